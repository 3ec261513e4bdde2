"""The samples of a verdict: held back, seen before, one number everywhere, or not finite."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import megengine.functional as F
import megengine.module as M
import numpy as np
import pytest
from PIL import Image

import qtrace
from qtrace.data import open_data
from qtrace.data.opening import SampleRange, recut
from qtrace.errors import CalibrationError
from qtrace.quantizing.call_data import split_data
from qtrace.sensitivity.diagnosis.verdict import Verdict
from tests.nets import images, net

DATA = images(64, 3, 8, 8)


def _module() -> M.Module:
    def forward(self: M.Module, x: Any) -> Any:
        return self.b(F.relu(self.a(x))).mean(axis=(2, 3))

    return net(forward, a=M.Conv2d(3, 8, 3), b=M.Conv2d(8, 4, 1))


def _one_call(data: Any, path: Path, evaluation: Any = None) -> Verdict:
    options = {"verify": False, "measure": False, "progress": False, "recipe": "w8a8"}
    verdict = qtrace.quantize(_module(), data, path / "a.onnx", evaluation=evaluation, **options).verdict
    assert verdict is not None
    return verdict


def _folder(data: Any, path: Path, evaluation: Any = None) -> Verdict:
    traced = qtrace.trace(_module(), DATA[:8], check=False)
    done = qtrace.calibrate_to_folder(
        traced, data, path / "a", recipe="w8a8", evaluation=evaluation, progress=False
    )
    assert done.judgement.verdict is not None
    return done.judgement.verdict


def _numbers(count: int) -> np.ndarray:
    return np.arange(count * 2, dtype=np.float32).reshape(count, 2)


Judged = Callable[..., Verdict]
both = pytest.mark.parametrize("judged", [_one_call, pytest.param(_folder, marks=pytest.mark.slow)])


@both
@pytest.mark.parametrize("number", [0.0, 1.0])
def test_samples_of_one_number_are_never_good(judged: Judged, number: float, tmp_path: Path) -> None:
    verdict = judged(DATA, tmp_path, np.full_like(DATA[:16], number))
    assert verdict.word != "good"
    assert verdict.has("one-number")


@both
def test_held_back_samples_of_one_number_are_never_good(judged: Judged, tmp_path: Path) -> None:
    verdict = judged(np.concatenate([DATA[:56], 0 * DATA[:8]]), tmp_path)
    assert (verdict.word, verdict.has("one-number"), verdict.doubted) == ("check", True, True)


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    "form", ["saturated", "dead", "one of two", "nearly the same", "nearly, and integers"]
)
def test_outputs_that_never_change_are_not_good(form: str, tmp_path: Path) -> None:
    def forward(self: Any, x: Any) -> Any:
        y = self.conv(x)
        if form == "saturated":
            return F.sigmoid(y + 9000)
        if form.startswith("nearly"):  # but for the rounding of floats
            same = y * 1e-5 + 1.0
            return same if form == "nearly the same" else (same, F.argmax(F.flatten(y, 1), axis=1))
        dead = F.relu(y - 1000)
        return dead if form == "dead" else (dead, y)

    module = net(forward, conv=M.Conv2d(3, 4, 3))
    options = {"verify": False, "measure": False, "progress": False, "recipe": "w8a8"}
    verdict = qtrace.quantize(module, DATA, tmp_path / "a.onnx", **options).verdict
    assert verdict is not None
    alive = form in ("one of two", "nearly, and integers")
    assert (verdict.word, verdict.has("constant-outputs"), verdict.doubted) == (
        ("good", False, False) if alive else ("check", True, True)
    )


def test_a_single_sample_does_not_say_that_outputs_never_change(tmp_path: Path) -> None:
    for data in (DATA[:1], np.repeat(DATA[:1], 8, 0)):
        assert not _one_call(data, tmp_path).has("constant-outputs")
        (tmp_path / "a.onnx").unlink()


def test_a_folder_of_data_that_is_one_number_is_no_good(tmp_path: Path) -> None:
    assert _folder(0 * DATA, tmp_path).word == "check"


@pytest.mark.quick(1)
@both
@pytest.mark.parametrize("evaluation", [DATA, DATA[10:30].copy(), [DATA[5:9]]])
def test_calibration_samples_do_not_count_as_evaluation(
    judged: Judged, evaluation: Any, tmp_path: Path
) -> None:
    verdict = judged(DATA[:40], tmp_path, evaluation)
    assert verdict.word == "check"
    assert verdict.has("few-samples")
    assert "of which the calibration has read" in verdict.line()


@both
def test_other_samples_and_labels_beside_them_are_new(judged: Judged, tmp_path: Path) -> None:
    labelled = (
        [(DATA[i : i + 8], np.arange(8)) for i in range(0, 32, 8)] if judged is _one_call else DATA[:32]
    )
    assert not judged(labelled, tmp_path, DATA[32:]).has("few-samples")


@pytest.mark.parametrize("judged", [_one_call, _folder])
def test_held_back_samples_that_were_read_before_are_not_new(judged: Judged, tmp_path: Path) -> None:
    verdict = judged(np.concatenate([DATA[:8]] * 8), tmp_path)
    assert "No sample is new to the calibration" in str(verdict)


def test_a_sample_that_is_given_again_counts_once(tmp_path: Path) -> None:
    verdict = _one_call(DATA[:32], tmp_path, np.repeat(DATA[40:41], 16, axis=0))
    assert "Only 1 sample is new to the calibration" in str(verdict)


@both
@pytest.mark.parametrize(("bad", "words"), [(np.nan, "holds NaN"), (np.inf, "holds infinity")])
def test_a_bad_value_in_samples_held_back_has_the_number_of_its_batch(
    judged: Judged, bad: float, words: str, tmp_path: Path
) -> None:
    spoiled = DATA.copy()
    spoiled[60, 1, 2, 3] = bad
    with pytest.raises(CalibrationError, match=rf"batch 7( \(.*\))? {words}.* input 0 at \[4, 1, 2, 3\]"):
        judged(spoiled, tmp_path)
    with pytest.raises(CalibrationError, match=rf"batch 1( \(.*\))? {words}"):
        judged(DATA, tmp_path, spoiled[52:])
    assert list(tmp_path.glob("*.onnx")) == []


@both
def test_few_samples_are_held_back_from_arrays(judged: Judged, tmp_path: Path) -> None:
    verdict = judged(DATA[:24], tmp_path)
    assert (verdict.samples, verdict.measured_on) == (6, "held-back samples")
    assert verdict.word == "check"
    assert "Only 6 samples are new to the calibration" in str(verdict)


@pytest.mark.parametrize(
    ("data", "count"),
    [
        (DATA[:7], None),  # too few
        ([DATA[:8], DATA[8:16]], (12, 4)),
        (DATA[:8], (6, 2)),
        ({"x": DATA[:20]}, (15, 5)),
        (DATA[:32], (24, 8)),
        (DATA[:33], (25, 8)),
        (lambda: [DATA[:32]], None),  # it does not say how much it has
    ],
)
def test_a_quarter_of_few_samples_is_held_back(data: Any, count: tuple[int, int] | None) -> None:
    source = recut(open_data(data, batch_size=8), 8)
    calibration, evaluation = split_data(source, None, None, 1)
    if count is None:
        assert evaluation.seen
        assert evaluation.source is calibration is source
        return
    read = [
        [next(iter(b.values())) if isinstance(b, dict) else b[0] for b in s]
        for s in (calibration, evaluation.source)
    ]
    assert tuple(sum(map(len, side)) for side in read) == count
    np.testing.assert_array_equal(np.concatenate([*read[0], *read[1]]), DATA[: sum(count)])


def test_a_quarter_of_a_folder_of_images_is_held_back(tmp_path: Path) -> None:
    """As of an array: sixteen images are two batches."""
    for index, image in enumerate(images(16, 8, 8, 3)):
        Image.fromarray((image * 40 + 128).clip(0, 255).astype(np.uint8)).save(tmp_path / f"{index:02}.png")
    preprocess = {"size": [3, 8, 8], "mean": [0, 0, 0], "std": [255, 255, 255]}
    recipe = {"backend": "onnxruntime", "placement": "everything", "preprocess": preprocess}
    options = {"verify": False, "measure": False, "progress": False, "recipe": recipe}
    verdict = qtrace.quantize(_module(), tmp_path, tmp_path / "a.onnx", **options).verdict
    assert verdict is not None
    assert (verdict.samples, verdict.measured_on) == (4, "held-back samples")
    assert "Only 4 samples are new to the calibration" in str(verdict)


def test_whole_batches_are_held_back_for_a_network_of_one_batch_size() -> None:
    for count, start in ((64, 56), (36, 24), (16, None)):
        source = recut(open_data(images(count, 3, 8, 8), batch_size=8), 8, whole=True)
        _, evaluation = split_data(source, None, None, 8)
        assert evaluation.seen == (start is None)
        assert start is None or evaluation.source.start == start


@pytest.mark.quick(2)
@pytest.mark.parametrize(("count", "least"), [(25, 6), (33, 8), (32, 8), (64, 8)])
def test_a_short_last_batch_is_not_all_that_is_held_back(count: int, least: int, tmp_path: Path) -> None:
    """With 25 samples the verdict rested on the one that batches of eight leave over."""
    verdict = _one_call(DATA[:count], tmp_path)
    assert "held-back" in verdict.line()
    assert int(verdict.line().split(" on ")[1].split()[0]) >= least


def test_rows_of_few_numbers_are_recognised(tmp_path: Path) -> None:
    table = np.random.default_rng(0).normal(size=(40, 8)).astype(np.float32)
    model = M.Sequential(M.Linear(8, 16), M.ReLU(), M.Linear(16, 3))
    options = {"verify": False, "measure": False, "progress": False, "recipe": "w8a8"}
    result = qtrace.quantize(model, table, tmp_path / "a.onnx", evaluation=table, **options)
    assert result.verdict is not None
    assert "100% of which the calibration has read" in result.verdict.line()


def test_labels_of_the_evaluation_alone_are_left_out(tmp_path: Path) -> None:
    pairs = [(DATA[i : i + 8], np.arange(8)) for i in (40, 48)]
    assert (
        _one_call(DATA[:40], tmp_path, pairs).line()
        == _one_call(DATA[:40], tmp_path, [x for x, _ in pairs]).line()
    )


@pytest.mark.parametrize("folder", [False, True])
def test_every_shape_of_other_data_is_tried_before_the_calibration(
    folder: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second batch failed behind the calibration."""

    def forward(self: Any, x: Any) -> Any:
        return self.b(F.flatten(self.a(x), 1))

    traced = qtrace.trace(net(forward, a=M.Conv2d(3, 4, 3), b=M.Linear(144, 2)), DATA[:8], check=False)
    monkeypatch.setattr("qtrace.quantizing.calibrator.calibrate", None)
    monkeypatch.setattr("qtrace.quantizing.stage._collect", None)
    call: Any = qtrace.calibrate_to_folder if folder else qtrace.quantize
    out = tmp_path / ("out" if folder else "out.onnx")
    other = [DATA[:4], images(4, 3, 10, 10)]
    with pytest.raises(
        CalibrationError, match=r"batch 1 \(from sample 4 of the data\) gives .* \(4, 3, 10, 10\)"
    ):
        call(traced, DATA[:32], out, evaluation=other, progress=False)


@pytest.mark.parametrize(
    "form", [_numbers, lambda count: [_numbers(count)[i : i + 3] for i in range(0, 20, 3)]]
)
def test_a_range_has_its_samples_and_keeps_the_numbers_of_batches(form: Any) -> None:
    source = recut(open_data(form(20), batch_size=8), 8)
    part = SampleRange(source, 10, 19)
    assert [(number, len(batch[0])) for number, batch in part.numbered()] == [(1, 6), (2, 3)]
    assert len(part) == 2
    np.testing.assert_array_equal(np.concatenate([batch[0] for batch in part]), _numbers(20)[10:19])
    assert [
        len(batch[0]) for batch in SampleRange(recut(open_data(form(20), batch_size=3), None), 0, 10)
    ] == [3] * 3
