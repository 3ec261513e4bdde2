"""Ranges that a target runs faster: nearly symmetric ones in OpenVINO, whose zero point becomes 0."""

from __future__ import annotations

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
from qtrace.preparation.model import QuantizedModel


class Stem(M.Module):
    """A layer that reads the input, through a pooling if asked for."""

    def __init__(self, pooled: bool = False) -> None:
        super().__init__()
        self.conv, self.pool = M.Conv2d(3, 8, 3, padding=1), M.MaxPool2d(2) if pooled else None

    def forward(self, x: Any) -> Any:
        return self.conv(x if self.pool is None else self.pool(x))


def _batch(low: float, high: float) -> np.ndarray:
    return np.random.default_rng(0).uniform(low, high, (2, 3, 8, 8)).astype(np.float32)


def _prepared(batch: np.ndarray, backend: str, pooled: bool = False, **config: Any) -> Any:
    observers = {"activation": "minmax", "weight": "minmax"}
    recipe = {"backend": backend, "observers": observers, **config}
    prepared = qtrace.prepare(qtrace.trace(Stem(pooled), batch), recipe, samples=[batch])
    return qtrace.calibrate(prepared, [batch], progress=False)


def _input_scheme(converted: Any) -> tuple[str, int]:
    site = next(s for s in QuantizedModel(converted).sites if s.sort == "activation")
    assert site.plan is not None
    assert site.plan.scheme == site.fake_quant.scheme
    return site.fake_quant.scheme.describe(), int(site.fake_quant.qparams().zero_point)


@pytest.mark.parametrize("pooled", [False, True])
def test_a_nearly_symmetric_input_is_int8_in_openvino_and_the_same_values(
    pooled: bool, tmp_path: Path
) -> None:
    batch = _batch(-1.0, 1.2)
    prepared = _prepared(batch, "openvino", pooled)
    converted = qtrace.convert(prepared)
    assert _input_scheme(converted) == ("int8 sym", 0)
    np.testing.assert_array_equal(converted(Tensor(batch)).numpy(), prepared(Tensor(batch)).numpy())
    path = qtrace.export(converted, tmp_path / "net.onnx")
    graph = onnx.load(str(path)).graph
    stored = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
    rounding = next(node for node in graph.node if node.op_type == "QuantizeLinear")
    assert stored[rounding.input[2]].dtype == np.int8
    assert not stored[rounding.input[2]].any()
    assert qtrace.verify(path, converted, [batch], runtime="openvino", optimized=False).passed
    assert qtrace.verify(path, converted, [batch], runtime="onnxruntime", optimized=False).passed


@pytest.mark.parametrize(
    ("low", "high", "backend", "placement", "scheme"),
    [
        (0.0, 1.0, "openvino", "balanced", ("uint8 affine", 0)),
        (-0.25, 2.0, "openvino", "balanced", ("uint8 affine", 28)),
        (-0.25, 2.0, "openvino", "fastest", ("int8 sym", 0)),
        (-2.0, 0.0, "openvino", "everything", ("uint8 affine", 255)),
        (-1.0, 1.2, "onnxruntime", "balanced", ("uint8 affine", 116)),
    ],
)
def test_other_ranges_keep_their_zero_point(
    low: float, high: float, backend: str, placement: str, scheme: tuple[str, int]
) -> None:
    batch = _batch(low, high)
    batch[0, 0, 0, :2] = low, high
    rules = [{"match": {"name": "*"}, "quantize": True}]
    converted = qtrace.convert(_prepared(batch, backend, rules=rules, placement=placement))
    assert _input_scheme(converted) == scheme


def test_the_step_of_a_centred_range_is_at_most_a_quarter_larger() -> None:
    batch = _batch(-1.0, 1.2)
    batch[0, 0, 0, :2] = -1.0, 1.2
    (fake_quant, *_) = QuantizedModel(_prepared(batch, "openvino")).fake_quants.values()
    qparams = fake_quant.qparams()
    affine = 2.2 / 255
    assert int(qparams.zero_point) == 128
    assert affine < float(qparams.scale) <= 1.25 * affine


class Joined(M.Module):
    """Two layers whose results of unlike ranges are joined."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.last = (M.Conv2d(3, 4, 1), M.Conv2d(3, 4, 1), M.Conv2d(8, 4, 1))

    def forward(self, x: Any) -> Any:
        return self.last(F.concat([F.relu(self.a(x)), F.relu(self.b(x)) * 4], 1))


def test_the_parts_of_a_concat_share_their_range_in_openvino() -> None:
    batch = _batch(-1.0, 1.0)
    prepared = qtrace.prepare(qtrace.trace(Joined(), batch), {"backend": "openvino"})
    model = QuantizedModel(prepared)
    groups = {site.group for site in model.sites if site.name in ("relu_out", "mul_out")}
    assert groups == {model.annotation.carried["concat_out"]}
