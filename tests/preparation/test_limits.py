"""Ranges that a target runs faster: symmetric ones in OpenVINO, whose zero point becomes 0."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import megengine.functional as F
import megengine.module as M
import numpy as np
import onnx
import pytest
from megengine import Tensor
from onnx import numpy_helper

import qtrace
from qtrace.config.recipe import as_qconfig
from qtrace.graph.failures import from_json
from qtrace.graph.types import TracedModule
from qtrace.preparation.annotation import Annotation
from qtrace.preparation.model import QuantizedModel
from tests.nets import images, net

_OBSERVERS = {"activation": "minmax", "weight": "minmax"}


def _stem(pooled: bool = False) -> M.Module:
    """Returns a layer that reads the input, through a pooling if asked for."""
    layers = {"conv": M.Conv2d(3, 8, 3, padding=1), "pool": M.MaxPool2d(2)}
    return net(lambda self, x: self.conv(self.pool(x) if pooled else x), **layers)


def _batch(low: float, high: float) -> np.ndarray:
    batch = np.random.default_rng(0).uniform(low, high, (2, 3, 8, 8)).astype(np.float32)
    batch[0, 0, 0, :2] = low, high
    return batch


def _prepared(module: M.Module, batch: np.ndarray, centred: bool, backend: str = "openvino") -> TracedModule:
    """Prepares a module with all ops on integers, and calibrates it."""
    rules = [{"match": {"op": kind}, "quantize": True, "optional": True} for kind in ("conv2d", "concat")]
    placement = "fastest" if centred else "small"
    config = as_qconfig({"backend": backend, "observers": _OBSERVERS, "placement": placement, "rules": rules})
    traced = qtrace.trace(module, batch, check=False)
    prepared = qtrace.prepare(traced, config, samples=[batch])
    return qtrace.calibrate(prepared, [batch], progress=False)


def _input_scheme(converted: Any) -> tuple[str, int]:
    site = next(s for s in QuantizedModel(converted).sites if s.sort == "activation")
    assert site.plan is not None
    assert site.plan.scheme == site.fake_quant.scheme
    return site.fake_quant.scheme.describe(), int(site.fake_quant.qparams().zero_point)


@pytest.mark.parametrize("pooled", [False, True])
def test_a_centred_input_is_int8_in_openvino_and_the_same_values(pooled: bool, tmp_path: Path) -> None:
    batch = _batch(-1.0, 1.2)
    prepared = _prepared(_stem(pooled), batch, centred=True)
    converted = qtrace.convert(prepared)
    assert _input_scheme(converted) == ("int8 sym", 0)
    np.testing.assert_array_equal(converted(Tensor(batch)).numpy(), prepared(Tensor(batch)).numpy())
    path = qtrace.export(converted, tmp_path / "net.onnx")
    graph = onnx.load(str(path)).graph
    stored = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
    rounding = next(node for node in graph.node if node.op_type == "QuantizeLinear")
    assert stored[rounding.input[2]].dtype == np.int8
    assert not stored[rounding.input[2]].any()
    assert qtrace.verify(path, converted, [batch], runtime="openvino").passed
    assert qtrace.verify(path, converted, [batch], runtime="onnxruntime", optimized=False).passed


@pytest.mark.parametrize(
    ("low", "high", "centred", "scheme"),
    [
        (0.0, 1.0, True, ("uint8 affine", 0)),
        (-1.0, 1.2, False, ("uint8 affine", 116)),
        (-0.25, 2.0, True, ("int8 sym", 0)),
        (-2.0, 0.0, True, ("int8 sym", 0)),
    ],
)
def test_what_is_centred(low: float, high: float, centred: bool, scheme: tuple[str, int]) -> None:
    """Ranges from 0 on have no zero point, and without the placement's word nothing changes."""
    assert _input_scheme(qtrace.convert(_prepared(_stem(), _batch(low, high), centred))) == scheme


def test_a_target_without_such_layers_centres_nothing() -> None:
    converted = qtrace.convert(_prepared(_stem(), _batch(-1.0, 1.2), centred=True, backend="onnxruntime"))
    assert _input_scheme(converted) == ("uint8 affine", 116)


def test_a_centred_range_covers_the_same_values() -> None:
    prepared = _prepared(_stem(), _batch(-1.0, 1.2), centred=True)
    qparams = next(iter(QuantizedModel(prepared).fake_quants.values())).qparams()
    assert int(qparams.zero_point) == 128
    assert float(qparams.scale) * 127 == pytest.approx(1.2, rel=0.01)


@pytest.mark.parametrize("centred", [False, True])
def test_the_parts_of_a_concat_share_their_range_if_centred(centred: bool) -> None:
    """OpenVINO rounds each part again before the next layer otherwise."""
    layers = {"a": M.Conv2d(3, 4, 1), "b": M.Conv2d(3, 4, 1), "last": M.Conv2d(8, 4, 1)}
    joined = net(lambda self, x: self.last(F.concat([F.relu(self.a(x)), F.relu(self.b(x)) * 4], 1)), **layers)
    model = QuantizedModel(_prepared(joined, _batch(-1.0, 1.0), centred))
    groups = {site.group for site in model.sites if site.name in ("relu_out", "mul_out")}
    assert len(groups) == (1 if centred else 2)


def test_annotations_of_before_can_be_read() -> None:
    """They have predictions of noise, and lack the rows that a calibrated graph has chosen from."""
    batch = images(1, 3, 8, 8)
    for centred in (False, True):
        annotation = QuantizedModel(_prepared(_stem(), batch, centred)).annotation
        data = json.loads(annotation.to_json())
        del data["placement"]["rows"]
        data["placement"].update(sqnr=30.0, measured="", refused="", synthetic=False)
        read = from_json(Annotation, json.dumps(data)).placement
        assert read is not None
        assert read.centred is centred
