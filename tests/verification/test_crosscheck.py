"""A second evaluation says which side is wrong: the graph's kernel, or the file and its runtime."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import megengine as mge
import megengine.functional as F
import megengine.module as M
import numpy as np
import onnx
import pytest
from onnx import numpy_helper

import qtrace
from qtrace.errors import ExportError
from qtrace.graph.types import CallFunction, CallMethod, TracedModule
from tests.nets import images, net

BATCHES = [images(4, 4, 8, 8, seed=s) for s in range(2)]


def _forward(self: M.Module, x: mge.Tensor) -> tuple[mge.Tensor, mge.Tensor]:
    y = F.relu(self.a(x))
    return self.b(y) + y, self.scores(y)


def _exported(
    folder: Path, batches: list[np.ndarray], forward: Callable[..., object] = _forward
) -> tuple[TracedModule, Path]:
    """A network with one output on integers and one in float, and its file."""
    parts = {name: M.Conv2d(4, 4, 3, padding=1) for name in ("a", "b", "scores")}
    recipe = {"rules": [{"match": {"name": "scores"}, "quantize_output": False}]}
    traced = qtrace.trace(net(forward, **parts), batches[0], check=False)
    prepared = qtrace.calibrate(qtrace.prepare(traced, recipe), batches, progress=False)
    converted = qtrace.convert(prepared)
    return converted, qtrace.export(converted, folder / "m.onnx")


def _break_kernel(patch: pytest.MonkeyPatch, node: str, from_batch: int) -> None:
    """Makes MegEngine's op that computes ``node`` wrong for batches of ``from_batch`` samples and more."""
    for kind in (CallFunction, CallMethod):

        def interpret(self: Any, *inputs: Any, right: Callable[..., Any] = kind.interpret) -> Any:
            results = right(self, *inputs)
            if self.outputs[0].name != node or results[0].shape[0] < from_batch:
                return results
            return (0.5 - results[0],)

        patch.setattr(kind, "interpret", interpret)


def _scale(path: Path, name: str) -> None:
    model = onnx.load(path)
    tensor = next(t for t in model.graph.initializer if t.name == name)
    tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor) * np.float32(1.5), name))
    onnx.save(model, path)


# The node whose kernel is wrong -> the site or output that bisect names, and the kind of op.
BROKEN = {"b_out": ("b_out_q", "F.conv2d"), "scores_out": ("scores_out", "F.conv2d")}


@pytest.mark.quick(1)
@pytest.mark.parametrize("node", BROKEN)
def test_a_kernel_of_megengine_that_is_wrong_for_batches_is_named_and_the_file_is_not(
    node: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    converted, path = _exported(tmp_path, BATCHES)
    assert qtrace.verify(path, converted, BATCHES).passed
    _break_kernel(monkeypatch, node, 2)
    site, op = BROKEN[node]
    found = qtrace.bisect(path, converted, BATCHES)
    assert found is not None
    assert (found.site, found.check.side) == (site, "graph"), found.table()
    assert f"MegEngine computes {op} ({node}) differently" in found.check.reason
    assert "4 samples" in found.check.reason
    text = found.table()
    assert "the graph is wrong, not the file" in text
    assert "weight, a bias" not in text
    assert "in the file" not in text
    assert found.to_dict()["check"]["side"] == "graph"
    report = qtrace.verify(path, converted, BATCHES)
    assert not report.passed
    assert f"at {site}, the graph is wrong, not the file" in report.summary()
    assert report.to_dict()["cross_check"]["node"] == site


def test_a_float_output_of_a_wrong_file_is_the_files_fault(tmp_path: Path) -> None:
    converted, path = _exported(tmp_path, BATCHES)
    _scale(path, "scores_weight_scale")
    found = qtrace.bisect(path, converted, BATCHES)
    assert found is not None
    assert (found.site, found.check.side) == ("scores_out", "runtime"), found.table()
    assert "a weight, a bias or a scale there" in found.table()
    assert "the file or the runtime is wrong" in qtrace.verify(path, converted, BATCHES).summary()


def _of_fixed_size(self: M.Module, x: mge.Tensor) -> tuple[mge.Tensor, mge.Tensor]:
    y = self.a(F.reshape(x, (2, 4, 16, 8)))
    return self.b(y), self.scores(y)


@pytest.mark.parametrize(("forward", "batch"), [(_forward, 1), (_of_fixed_size, 4)])
def test_a_wrong_file_is_named_where_a_batch_cannot_be_divided(
    forward: Callable[..., object], batch: int, tmp_path: Path
) -> None:
    batches = [batch_[:batch] for batch_ in BATCHES]
    converted, path = _exported(tmp_path, batches, forward)
    _scale(path, "b_weight_scale")
    found = qtrace.bisect(path, converted, batches)
    assert found is not None
    assert (found.site, found.check.side) == ("b_out_q", "runtime"), found.table()
    assert "onnx.reference" in found.check.reason


def test_crosscheck_names_no_culprit_where_megengine_and_onnx_disagree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    converted, path = _exported(tmp_path, BATCHES)
    _break_kernel(monkeypatch, "scores_out", 1)
    found = qtrace.bisect(path, converted, BATCHES)
    assert found is not None
    assert found.check.side == "unknown", found.table()
    assert "either MegEngine's kernel or the rule that exports the op is wrong" in found.table()
    assert "a weight, a bias" not in found.table()


def test_crosscheck_names_no_culprit_without_a_second_evaluation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    converted, path = _exported(tmp_path, BATCHES)
    _scale(path, "b_weight_scale")

    def refuse(*_: object) -> np.ndarray:
        raise ExportError("RuntimeError: no kernel here")

    for name in ("_run_reference", "_run_onnxruntime"):
        monkeypatch.setattr(f"qtrace.verification.crosscheck.{name}", refuse)
    found = qtrace.bisect(path, converted, BATCHES)
    assert found is not None
    assert found.check.side == "unknown"
    assert "either side may be wrong" in found.table()
    assert "onnx.reference refuses it (RuntimeError: no kernel here)" in found.check.reason


def test_a_slice_that_is_added_to_is_not_blamed_on_the_file(tmp_path: Path) -> None:
    """Where MegEngine adds wrongly to a slice of a batch, the addition is named; else nothing differs."""
    grid = mge.Tensor(np.arange(128, dtype=np.float32).reshape(1, 64, 2) / 64)

    def forward(self: M.Module, x: mge.Tensor) -> mge.Tensor:
        y = F.flatten(self.a(x), 2).transpose(0, 2, 1)
        return F.concat([y[..., :2] + grid, y[..., 2:]], axis=2)

    traced = qtrace.trace(net(forward, a=M.Conv2d(4, 4, 3, padding=1)), BATCHES[0], check=False)
    rules = [{"match": {"op": "add"}, "quantize": False}, {"match": {"name": "a"}, "quantize_output": False}]
    prepared = qtrace.calibrate(qtrace.prepare(traced, {"rules": rules}), BATCHES, progress=False)
    converted = qtrace.convert(prepared)
    path = qtrace.export(converted, tmp_path / "m.onnx")
    found = qtrace.bisect(path, converted, BATCHES)
    if found is not None:
        assert found.check.side == "graph"
        assert "(add_out)" in found.check.reason


def test_an_op_that_makes_numbers_of_nan_is_wrong_in_the_graph(tmp_path: Path) -> None:
    def forward(self: M.Module, x: mge.Tensor) -> tuple[mge.Tensor, mge.Tensor]:
        y, scores = self.a(x), self.scores(x)
        return y, F.relu(F.where(scores > 0, scores, F.full_like(scores, float("nan"))))

    converted, path = _exported(tmp_path, BATCHES, forward)
    report = qtrace.verify(path, converted, BATCHES[:1])
    assert "the graph is wrong, not the file: F.relu gives numbers for NaN in MegEngine" in report.summary()
