"""Networks of each family of the zoo and every op of the survey in ONNX, beside the graph in onnxruntime."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import megengine.module as M
import onnxruntime as ort
import pytest

import qtrace
from qtrace.graph.types import TracedModule
from tests.nets import calibrated_if_quantized, side_by_side, spread
from tests.ops.cases import CASES, KERNELS, SIBLINGS
from tests.zoo.catalog import CNN
from tests.zoo.checks import rounded_to_nearest
from tests.zoo.detectors.entries import DETECTORS
from tests.zoo.parts import pictures
from tests.zoo.quick import one_of_each
from tests.zoo.transformers.entries import TRANSFORMERS

pytestmark = pytest.mark.usefixtures("synchronous")

Made = Callable[[], tuple[M.Module, tuple[Any, ...], str, Any]]


def _cnn(entry: Any) -> Made:
    return lambda: (entry.build(), (pictures(4, *entry.input_shape),), entry.recipe, None)


def _other(entry: Any) -> Made:
    return lambda: (entry.build(), entry.inputs(4, 0, entry.size), entry.recipe, entry.ends)


NETS: dict[str, Made] = {e.name: _cnn(e) for e in one_of_each(CNN)}
NETS.update((e.name, _other(e)) for e in (*DETECTORS, *TRANSFORMERS))

OPS = {**CASES, **KERNELS, **SIBLINGS}


def _converted(module: M.Module, args: tuple[Any, ...], recipe: str, ends: Any) -> TracedModule:
    config = rounded_to_nearest(qtrace.load_recipe(recipe))
    prepared = qtrace.prepare(qtrace.trace(module, *args, check=False), config, outputs=ends)
    return qtrace.convert(calibrated_if_quantized(prepared, [args]))


# What a detector decodes is written by the same ops on every target: see test_targets.py.
_SHOWN = {e.name for e in (*one_of_each(CNN), *one_of_each(DETECTORS), *TRANSFORMERS)}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow if n in _SHOWN else pytest.mark.long) for n in NETS]
)
def test_network(name: str, tmp_path: Path) -> None:
    module, args, recipe, ends = NETS[name]()
    converted = _converted(module, args, recipe, ends)
    path = qtrace.export(converted, tmp_path / "m.onnx")
    report = qtrace.verify(path, converted, [args], optimized=False)
    assert report.worst_lsb() <= 1, report.table()
    assert report.equal_share() >= 0.999, report.table()


@pytest.mark.slow
@pytest.mark.parametrize("names", spread(OPS, 16), ids=lambda names: names[0])
def test_ops_of_the_survey_run_in_onnxruntime(names: list[str], tmp_path: Path) -> None:
    module = side_by_side({f"op_{i}": OPS[name].module for i, name in enumerate(names)})
    inputs = tuple(OPS[name].x for name in names)
    converted = _converted(module, inputs, "onnxruntime", None)
    path = qtrace.export(converted, tmp_path / "m.onnx")
    session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    session.run(None, {i.name: x for i, x in zip(session.get_inputs(), inputs, strict=True)})
