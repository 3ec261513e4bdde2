"""verify compares rows with those that the file itself has picked, not with those of another run of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import megengine.functional as F
import megengine.module as M
import numpy as np
import pytest
from megengine import Tensor

import qtrace
from qtrace.graph.types import TracedModule
from qtrace.targets.onnxruntime import runtime as onnxruntime
from qtrace.verification import selections
from qtrace.verification.runtimes.base import RuntimeRun
from qtrace.verification.selections import FirstOfEquals, read_runtime_places
from tests.comparing.test_selecting_in_file import _detector
from tests.nets import net
from tests.selecting_nets import build, pictures

pytestmark = pytest.mark.usefixtures("synchronous")


def _taken(self: M.Module, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rows by a boolean index, by cond_take and by the k-th value, of one layer."""
    y = self.fc(x)
    values, order = F.cond_take(y[:, 0] > 0.0, y[:, 0])
    best, _ = F.topk(y[:, 1], 2, descending=True)  # nothing reads these places
    return y[y[:, 1] > 0.2], values + F.sum(order.astype("float32")), best


def _converted(
    traced: TracedModule, batches: Sequence[np.ndarray], in_float: Sequence[str] = ()
) -> TracedModule:
    rules = [{"match": {"name": name}, "quantize": False} for name in in_float]
    prepared = qtrace.prepare(traced, {"placement": "everything", "rules": rules})
    return qtrace.convert(qtrace.calibrate(prepared, batches, progress=False))


def _network(name: str, folder: Path) -> tuple[TracedModule, list[np.ndarray]]:
    if name == "taken":
        x = np.random.default_rng(0).normal(size=(8, 6)).astype(np.float32)
        return qtrace.trace(net(_taken, fc=M.Linear(6, 4)), x, check=False), [x]
    if name == "in a file":
        return _detector(folder / "float.onnx"), [pictures(1, seed, 32) for seed in range(2)]
    batches = [pictures(1, seed) for seed in range(2)]
    return qtrace.trace(build(name), batches[0], check=False), batches


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", ["yolov10", "beam", "retrieval", "nms", "taken", "in a file"])
def test_the_file_tells_the_places_of_each_selection(name: str, tmp_path: Path) -> None:
    traced, batches = _network(name, tmp_path)
    converted = _converted(traced, batches)
    path = qtrace.export(converted, tmp_path / "m.onnx")
    graph = FirstOfEquals(converted)
    graph.run(Tensor(batches[-1]))
    for optimize in (False, True):
        session = onnxruntime.OnnxSession(path, optimize)
        run = session.run([batches[-1]])
        own = [np.zeros_like(kept) for kept in graph.tape.places]
        told = read_runtime_places(converted, session.place_kinds, run.places, own)
        assert told is not own
        for kept, picked in zip(graph.tape.places, told, strict=True):
            assert picked.shape == kept.shape
            # Equal scores may come in another order; the rest are last bits.
            right = np.isin(picked, kept) if name == "nms" else picked == kept
            assert right.mean() > 0.9


def test_a_file_of_another_form_tells_nothing(tmp_path: Path) -> None:
    traced, batches = _network("beam", tmp_path)
    converted = _converted(traced, batches)
    own = [np.zeros((1, 64), np.int32)]
    assert read_runtime_places(converted, ["ArgMax"], [np.ones((1, 64), np.int64)], own) is own
    assert read_runtime_places(converted, ["TopK"], [np.ones((1, 3), np.int64)], own) is own
    assert read_runtime_places(converted, [], [], own) is own


class _OtherIntegers(onnxruntime.OnnxSession):
    """Stands for a runtime that computes a little otherwise where integers are outputs, too."""

    def __init__(self, path: Path, optimize: bool) -> None:
        super().__init__(path, optimize)
        self.optimize = optimize

    def run(self, inputs: list[np.ndarray]) -> RuntimeRun:
        run = super().run(inputs)
        if not self.optimize:
            return run
        turned = {name: v[:, ::-1].copy() if v.ndim == 3 else v for name, v in run.integers.items()}
        return dataclasses.replace(run, integers=turned)


@pytest.mark.quick(1)
@pytest.mark.parametrize("told", [True, False])
def test_rows_of_the_deployed_file_meet_the_rows_that_it_picks(
    told: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = dataclasses.replace(onnxruntime.RUNTIME, open=_OtherIntegers)
    monkeypatch.setattr(onnxruntime, "RUNTIME", runtime)
    if not told:
        monkeypatch.setattr(selections, "_written_as", lambda expr: ["nothing"])
    traced, batches = _network("beam", tmp_path)
    converted = _converted(traced, batches, ["score"])  # scores of 8 bits are often equal
    path = qtrace.export(converted, tmp_path / "m.onnx")
    report = qtrace.verify(path, converted, batches[:1])
    assert (report.sqnr_db("deployed") > 60) is told
