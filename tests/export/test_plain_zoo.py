"""Networks of each family of the zoo as float files: outputs in onnxruntime and LiteRT, names, BatchNorms."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import megengine as mge
import megengine.module as M
import numpy as np
import onnx
import onnxruntime as ort
import pytest

import qtrace
from qtrace.errors import ExportError
from qtrace.graph.flatten import flatten
from qtrace.graph.interpreter import Interpreter
from qtrace.graph.types import GetAttr, TracedModule
from qtrace.graph.walk import exprs, owner
from tests.zoo.catalog import CNN
from tests.zoo.checks import tensors
from tests.zoo.detectors.entries import DETECTORS
from tests.zoo.quick import one_of_each, parameters
from tests.zoo.transformers.entries import TRANSFORMERS, USER_NETS

NETWORKS = (*one_of_each(CNN), *DETECTORS, *TRANSFORMERS, *USER_NETS)
QUICK = ("resnet_basic", "mobilenet_v3", "unet_transposed", "vit", "CalledTwice", "NestedOutput")


@dataclass(frozen=True)
class Case:
    """A network, traced once for all tests of it."""

    name: str
    args: tuple[Any, ...]
    traced: TracedModule


@pytest.fixture(scope="module")
def case(request: pytest.FixtureRequest) -> Iterator[Case]:
    entry = request.param
    level = mge.config.async_level
    mge.config.async_level = 0
    args = entry.example()
    yield Case(entry.name, args, qtrace.trace(entry.build(), *args, check=False))
    mge.config.async_level = level


def _arrays(value: Any) -> list[np.ndarray]:
    """The arrays in the arguments of a call, in the order of the graph's inputs."""
    if isinstance(value, dict):
        value = [value[key] for key in sorted(value)]
    return [a for item in value for a in _arrays(item)] if isinstance(value, (list, tuple)) else [value]


def _read_tensors(traced: TracedModule) -> set[str]:
    """The keys in the state of the module that its graph reads."""
    flat = flatten(traced)
    called = [module for e in exprs(flat) if (module := owner(e)) is not None]
    parts = {id(part) for module in called for part in module.modules()}
    prefixes = {f"{path}." for path, module in flat.named_modules() if id(module) in parts}
    read = {e.name for e in exprs(flat) if isinstance(e, GetAttr)}
    return {k for k in flat.state_dict() if k in read or f"{k.rpartition('.')[0]}." in prefixes}


@pytest.mark.quick(2)
@pytest.mark.parametrize("case", parameters(NETWORKS, QUICK), indirect=True, scope="module")
def test_network(case: Case, tmp_path: Path) -> None:
    args, traced = case.args, case.traced
    path = qtrace.export(traced, tmp_path / "m.onnx")
    session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    outputs = session.run(None, dict(zip([i.name for i in session.get_inputs()], _arrays(args), strict=True)))
    for expected, output in zip(Interpreter(traced).run_flat(*tensors(args)), outputs, strict=True):
        assert output.shape == tuple(expected.shape)
        assert np.abs(expected.numpy() - output).max(initial=0) <= 1e-5 * np.abs(output).max(initial=0)
    model = onnx.load(path)
    stored, state = {t.name for t in model.graph.initializer}, set(traced.state_dict())
    assert stored & state == _read_tensors(traced)
    norms = [e for e in exprs(flatten(traced)) if isinstance(owner(e), (M.BatchNorm1d, M.BatchNorm2d))]
    written = [node for node in model.graph.node if node.op_type == "BatchNormalization"]
    assert len(written) >= len(norms)
    assert len({node.name for node in model.graph.node}) == len(model.graph.node)


# The graphs that no TFLite file holds, in float or in integers.
REFUSED = {"faster_rcnn:box": "roi_align_out"}


@pytest.mark.parametrize("case", parameters(NETWORKS, ("resnet_basic",)), indirect=True, scope="module")
def test_network_in_litert(case: Case, tmp_path: Path) -> None:
    args, traced = case.args, case.traced
    if case.name in REFUSED:
        with pytest.raises(ExportError, match=REFUSED[case.name]):
            qtrace.export(traced, tmp_path / "m.tflite")
        return
    path = qtrace.export(traced, tmp_path / "m.tflite")
    report = qtrace.verify(path, traced, [args])
    assert report.passed, report.summary()
    assert report.sqnr_db() > 100
