"""The verdict on the finished file and more samples: what few held-back samples do not show is said."""

from __future__ import annotations

from pathlib import Path
from threading import Barrier, Event, get_ident
from typing import Any

import megengine.functional as F
import megengine.module as M
import numpy as np
import onnxruntime
import pytest
from megengine import Tensor

import qtrace
from qtrace.data import open_data
from qtrace.data.opening import recut
from qtrace.errors import CalibrationError
from qtrace.quantizing import judging
from qtrace.quantizing.call_data import CallData, split_data
from qtrace.sensitivity.diagnosis.verdict import Verdict
from qtrace.sensitivity.simulation import Simulation
from tests.nets import images, net

SUFFIXES = {
    "onnxruntime": ".onnx",
    "openvino": ".onnx",
    "tensorrt": ".onnx",
    "tflite": ".tflite",
    "ncnn": ".param",
}


def _events(count: int, seed: int = 0) -> np.ndarray:
    """Images without an event but for the first 16: those that are held back are the last ones."""
    values = np.random.default_rng(seed).uniform(-0.2, 0.2, (count, 3, 16, 16)).astype("float32")
    values[:16] *= 5
    return values


def _network() -> Any:
    """Gives more than 0 only where a value exceeds what quiet images reach, and a little of it."""
    rng = np.random.default_rng(1)
    module = net(
        lambda self, x: F.relu(self.b(F.relu(self.a(x))) - 1.2) * 10,
        a=M.Conv2d(3, 8, 3, padding=1),
        b=M.Conv2d(8, 2, 3, padding=1),
    )
    for name, parameter in module.named_parameters():
        scale = 0.25 if name.endswith("weight") else 0.0
        parameter[...] = (scale * rng.normal(size=parameter.shape)).astype("float32")
    return module


def _quantize(tmp_path: Path, target: str = "onnxruntime", **options: Any) -> Any:
    options = {"target": target, "progress": False, "allow_broken": True, **options}
    return qtrace.quantize(_network(), _events(32), tmp_path / f"net{SUFFIXES[target]}", **options)


@pytest.mark.quick(1)
@pytest.mark.parametrize("target", SUFFIXES)
def test_events_that_no_held_back_sample_has_are_judged(tmp_path: Path, target: str) -> None:
    result = _quantize(tmp_path, target)
    verdict, file = result.verdict, result.judgement.file
    assert verdict.sqnr_db == np.inf
    assert file is not None
    assert file.samples == 32
    assert file.sqnr_db < 40
    assert verdict.word == "check"


def test_what_is_measured_on_the_file_is_what_the_file_gives(tmp_path: Path) -> None:
    result = _quantize(tmp_path)
    data = _events(32)
    session = onnxruntime.InferenceSession(str(result.path))
    rounded = session.run(None, {session.get_inputs()[0].name: data})[0].astype(np.float64)
    exact = result.traced(Tensor(data)).numpy().astype(np.float64)
    expected = 10 * np.log10((exact**2).sum() / ((exact - rounded) ** 2).sum())
    assert result.judgement.file.sqnr_db == pytest.approx(expected, abs=0.05)


def test_a_file_that_is_broken_is_not_written(tmp_path: Path) -> None:
    """Two bits of weights: the quiet images that are held back give nothing, in float and rounded."""
    recipe = {"weight": {"bits": 2}, "activation": {"bits": 2}, "backend": "generic"}
    data, out = _events(32), tmp_path / "net.onnx"
    said = r"the file is useless \(verdict   broken: outputs are exact.* The file has"
    with pytest.raises(CalibrationError, match=said):
        qtrace.quantize(_network(), data, out, recipe=recipe, progress=False)
    assert not list(tmp_path.iterdir())


@pytest.mark.quick(1)
@pytest.mark.parametrize("options", [{"verify": False}, {"metric": lambda graph: 1.0}])
def test_a_metric_decides_alone_and_no_file_runs_without_verify(tmp_path: Path, options: Any) -> None:
    assert _quantize(tmp_path, **options).judgement.file is None


def test_samples_are_counted_not_timed() -> None:
    """64 small ones, those that fit of large ones, and 8 of huge ones; held-back ones first."""

    def count(shape: tuple[int, ...], size: int | None = None) -> list[int]:
        traced = qtrace.trace(M.Identity(), np.zeros((1, *shape), "float32"), check=False)
        batches = [(np.broadcast_to(np.float32(i), (16, *shape)),) for i in range(8)]
        return [len(batch[0]) for batch in judging._cut(batches, traced, size)]

    assert count((3, 8, 8)) == [16, 16, 16, 16]
    assert sum(count((3, 320, 320))) == 15
    assert sum(count((3, 1024, 1024))) == 8
    assert count((3, 8, 8), size=1) == [1] * 64


def test_two_samples_of_large_images_are_verified_and_two_batches_of_small_ones() -> None:
    def count(side: int, size: int) -> list[int]:
        data = recut(open_data(np.zeros((16, 3, side, side), np.float32), batch_size=size), size)
        traced = qtrace.trace(M.Identity(), np.zeros((1, 3, side, side), np.float32), check=False)
        batches = judging._verified_batches(CallData(*split_data(data, None, None, 1)), traced)
        return [len(batch[0]) for batch in batches]

    assert count(320, 8) == [2]
    assert count(320, 1) == [1, 1]
    assert count(64, 8) == [4, 8]  # held back, and to calibrate on


def test_the_held_back_samples_come_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[np.ndarray] = []
    cut = judging._cut

    def keep(batches: Any, *args: Any) -> Any:
        for batch in cut(batches, *args):
            seen.append(batch[0])
            yield batch

    monkeypatch.setattr(judging, "_cut", keep)
    _quantize(tmp_path)
    order = np.concatenate(seen)
    assert np.array_equal(order, np.concatenate([_events(32)[24:], _events(32)[:24]]))


def test_a_limit_holds_for_the_file_too() -> None:
    """A limit between the figure of the graph and that of the file is broken, and the line says by what."""
    graph = Verdict("good", 38.3, None, None, None, None, 8, "samples").limited(37.0)
    judged = graph.with_file(Verdict("good", 35.7, None, None, None, None, 32, "samples"))
    assert graph.passed
    assert not judged.passed
    assert "The file has 35.7 dB at the output on 32 samples: calibrate on more" in str(judged)
    assert "not at least 37" in judged.line()


def test_the_verdict_is_on_what_the_file_gives_for_what_was_held_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The graph does not run for it."""
    monkeypatch.setattr(Simulation, "quantized", None)
    data = images(32, 3, 16, 16)
    result = qtrace.quantize(_network(), data, tmp_path / "net.onnx", progress=False, allow_broken=True)
    session, held_back = onnxruntime.InferenceSession(str(result.path)), data[-8:]
    rounded = session.run(None, {session.get_inputs()[0].name: held_back})[0].astype(np.float64)
    exact = result.traced(Tensor(held_back)).numpy().astype(np.float64)
    expected = 10 * np.log10((exact**2).sum() / ((exact - rounded) ** 2).sum())
    assert result.verdict.sqnr_db == pytest.approx(expected, abs=1e-3)
    assert "on 8 held-back samples" in result.verdict.line()


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("target", "options"),
    [
        ("onnxruntime", {"verify": False}),
        ("onnxruntime", {"metric": lambda graph: 1.0}),
        ("openvino", {}),
        ("tflite", {}),
        ("ncnn", {}),
    ],
)
def test_elsewhere_the_graph_is_judged(
    tmp_path: Path, target: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: list[Any] = []
    run = Simulation.quantized
    monkeypatch.setattr(Simulation, "quantized", lambda self: runs.append(self) or run(self))
    assert "on 8 held-back samples" in _quantize(tmp_path, target, **options).verdict.line()
    assert runs


def test_a_file_of_one_batch_alone_is_not_run_in_the_place_of_its_graph(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = net(lambda self, x: F.reshape(F.relu(self.a(x)), (4, -1)), a=M.Conv2d(3, 4, 3))
    runs: list[Any] = []
    run = Simulation.quantized
    monkeypatch.setattr(Simulation, "quantized", lambda self: runs.append(self) or run(self))
    qtrace.quantize(module, images(32, 3, 8, 8), tmp_path / "net.onnx", progress=False, batch_size=4)
    assert runs


def test_a_broken_file_is_not_written_and_its_cause_is_reported(tmp_path: Path) -> None:
    """Judged by its file, behind the check of its integers."""
    module = net(lambda self, x: self.b(F.relu(self.a(x))), a=M.Conv2d(3, 16, 3), b=M.Conv2d(16, 4, 1))
    module.a.weight[3] *= 3000.0
    module.b.weight[:, 3] *= 0.0
    path = tmp_path / "net.onnx"
    recipe = {"placement": "everything", "ptq": [], "observers": {"activation": "minmax"}}
    with pytest.raises(CalibrationError, match=r"useless \(.*outlier-channels at relu_out"):
        qtrace.quantize(module, images(32, 3, 8, 8), path, recipe=recipe, progress=False)
    assert not path.exists()


def test_outputs_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judging, "_MOST_OUTPUTS", 1)
    assert _quantize(tmp_path).judgement.file.samples == 8


def test_the_file_runs_while_that_in_float_is_made_whose_runs_go_beside_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = _quantize(tmp_path).judgement.file
    run, open_runs, begun = judging.run_batch, judging.open_runs, Event()
    both = Barrier(2, timeout=30)  # which breaks where one runs after the other
    in_float: list[Any] = []

    def note_float(path: Path, *args: Any) -> Any:
        session = open_runs(path, *args)
        if path.stem == "float":
            in_float.append(session)
            assert begun.wait(30)
        return session

    def wait_for_the_other(session: Any, values: Any) -> Any:
        if session in in_float:
            both.wait()
        begun.set()
        return run(session, values)

    monkeypatch.setattr(
        "qtrace.quantizing.delivering.open_for_verdict", lambda *_: None
    )  # which runs one alone

    monkeypatch.setattr("os.cpu_count", lambda: 2)
    monkeypatch.setattr(judging, "open_runs", note_float)
    monkeypatch.setattr(judging, "run_batch", wait_for_the_other)
    assert _quantize(tmp_path).judgement.file == alone
    assert len(in_float) == 1


def test_files_of_other_runtimes_run_in_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threads, run = set(), judging.run_batch
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    monkeypatch.setattr(
        judging, "run_batch", lambda *args, **named: threads.add(get_ident()) or run(*args, **named)
    )
    assert _quantize(tmp_path, "ncnn").judgement.file is not None
    assert threads == {get_ident()}
