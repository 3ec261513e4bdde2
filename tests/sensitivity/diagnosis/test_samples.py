"""A verdict is no better than what other samples show: few samples, seen ones, and a bad one among many."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

import megengine as mge
import megengine.functional as F
import megengine.module as M
import numpy as np
import pytest

import qtrace
from qtrace.comparing.groups import find_groups
from qtrace.data import open_data
from qtrace.data.opening import recut
from qtrace.quantizing.call_data import split_data
from qtrace.sensitivity.diagnosis import Calibrated, JudgedOutputs, diagnose, judge_outputs
from qtrace.sensitivity.diagnosis.judged_outputs import SampleErrors, measure_differences, measure_samples
from qtrace.sensitivity.diagnosis.verdict import Doubt, Verdict, judge
from tests import selecting_nets
from tests.nets import net, randomize

F32 = np.float32


def _waves(count: int, seed: int) -> np.ndarray:
    """Series of unlike loudness."""
    rng = np.random.default_rng(seed)
    loudness = np.exp(rng.normal(size=(count, 1, 1)))
    return (rng.normal(size=(count, 8, 4)) * loudness).astype(F32)


def _points(count: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_t(3, (count, 16)).astype(F32)


def _recurrent_mask() -> M.Module:
    def forward(self, x):
        state, masks = F.zeros((x.shape[0], 8)), []
        for step in range(4):
            state = F.tanh(self.read(x[:, :, step]) + self.keep(state))
            masks.append(F.sigmoid(self.mask(state)))
        return x * F.stack(masks, axis=2)

    return net(forward, read=M.Linear(8, 8), keep=M.Linear(8, 8), mask=M.Linear(8, 8))


def _difference() -> M.Module:
    def forward(self, x):
        return F.mean((x - self.b(F.relu(self.a(x)))) ** 2, axis=1)

    return net(forward, a=M.Linear(16, 12), b=M.Linear(12, 16))


def _embedding() -> M.Module:
    return net(
        lambda self, x: F.normalize(self.b(F.relu(self.a(x))), axis=1), a=M.Linear(16, 32), b=M.Linear(32, 8)
    )


def _restored() -> M.Module:
    def forward(self, x):
        mean = F.mean(x, axis=1, keepdims=True)
        spread = F.sqrt(F.mean((x - mean) ** 2, axis=1, keepdims=True) + 1e-5)
        return self.b(F.relu(self.a((x - mean) / spread))) * spread + mean

    return net(forward, a=M.Linear(16, 32), b=M.Linear(32, 4))


KINDS: dict[str, tuple[Callable[[], M.Module], Callable[[int, int], np.ndarray]]] = {
    "experts": (lambda: selecting_nets.build("experts"), selecting_nets.pictures),
    "masked": (lambda: selecting_nets.build("masked"), selecting_nets.pictures),
    "recurrent mask": (_recurrent_mask, _waves),
    "score of a difference": (_difference, _points),
    "embedding": (_embedding, _points),
    "restored scale": (_restored, _points),
}


@pytest.mark.quick(2)
@pytest.mark.parametrize("kind", KINDS)
def test_no_verdict_on_samples_of_the_calibration_is_good(kind: str) -> None:
    build, draw = KINDS[kind]
    seen = draw(8, 1)
    traced = qtrace.trace(
        randomize(build()) if kind not in selecting_nets.NETS else build(), mge.tensor(seen), check=False
    )
    prepared = qtrace.prepare(traced, {"backend": "onnxruntime", "placement": "everything"})
    qtrace.calibrate(prepared, [seen], progress=False)
    verdict = diagnose(prepared, [seen], calibrated=Calibrated(8, read=1.0), progress=False).verdict
    assert verdict.word == "check"
    assert "No sample is new to the calibration, too few to speak for others" in str(verdict)


def _measured(noise: list[float], values: int = 100, signal: float = 1.0) -> SampleErrors:
    """Samples of a signal of 1 and the given noise."""
    return SampleErrors(np.full(len(noise), signal), np.array(noise), values)


def test_alike_samples_leave_no_doubt_and_unlike_ones_do() -> None:
    alike, unlike = _measured([0.004] * 8), _measured([0.0005] * 7 + [0.0285])
    assert alike.low_db() == pytest.approx(10 * math.log10(250))
    assert unlike.signal.sum() / unlike.noise.sum() == pytest.approx(250)
    assert unlike.low_db() < 20.0
    assert not alike.rests_on_one
    assert _measured([0.0, 0.0]).low_db() == math.inf
    alone = SampleErrors(np.array([1.0] + [1e-6] * 7), np.array([0.001] + [1e-9] * 7), 100)
    assert alone.rests_on_one  # the only one with a signal
    few, many = _measured([0.001, 0.003]), _measured([0.001, 0.003] * 8)
    assert few.low_db() < 20.0 < many.low_db()


def test_a_doubt_lowers_a_good_word_unless_a_metric_decides() -> None:
    doubts = (Doubt("worst-sample", "The worst sample has 5.0 dB."),)
    assert judge(30.0, doubts=doubts) == "check"
    assert judge(30.0, 0.9, 0.9, doubts=doubts) == "good"
    assert judge(5.0, doubts=doubts) == "broken"
    assert judge(30.0, doubts=(Doubt("silent-output", "Output 1 is 0.", lowers=False),)) == "good"


@pytest.mark.parametrize(("samples", "word"), [(1, "check"), (2, "check"), (7, "check"), (8, "good")])
def test_fewer_than_eight_samples_are_never_good(samples: int, word: str) -> None:
    values = np.random.default_rng(0).normal(size=(samples, 40)).astype(F32)
    verdict = _judged(values, (values * 1.0001).astype(F32))
    assert verdict.word == word
    few = [doubt for doubt in verdict.doubts if doubt.kind == "few-samples"]
    assert len(few) == (word == "check")
    assert all("give 32 samples, or 8 others as evaluation data." in doubt.text for doubt in few)
    assert verdict.doubted is (word == "check")


@pytest.mark.parametrize(
    ("changed", "samples", "word"),
    [(0, 8, "good"), (1, 8, "good"), (2, 8, "check"), (4, 100, "good"), (12, 100, "check")],
)
def test_other_predictions_keep_a_graph_from_being_good(changed: int, samples: int, word: str) -> None:
    """One changed sample is no share."""
    scores = np.random.default_rng(0).normal(size=(samples, 8)).astype(F32)
    order = np.sort(scores, axis=1)
    scores += (scores == order[:, -1:]) * (order[:, -2:-1] - scores + 1e-3)  # the two largest are close
    outputs = scores.copy()
    outputs[:changed] += (scores[:changed] == order[:changed, -2:-1]) * F32(2e-3)
    verdict = _judged(scores, outputs)
    assert verdict.agreement == pytest.approx(1 - changed / samples)
    assert (verdict.word, verdict.has("predictions")) == (word, word == "check")


@pytest.mark.parametrize("length", [1, 7, 24])
def test_each_doubt_is_a_sentence_with_a_cure(length: int) -> None:
    values = np.random.default_rng(0).normal(size=(length, 40)).astype(F32)
    noisy = values.copy()
    noisy[0] += 0.4  # a broken sample among exact ones
    verdict = _judged(values, noisy)
    assert verdict.doubts
    for doubt in verdict.doubts:
        assert ": " in doubt.text
        assert doubt.text.endswith(".")
        assert len(doubt.text.split()) <= 25


def test_a_broken_sample_keeps_a_graph_from_being_good() -> None:
    errors = _measured([1e-4] * 63 + [0.3])
    assert errors.worst_db() == pytest.approx(10 * math.log10(1 / 0.3))
    rng = np.random.default_rng(0)
    values = rng.normal(size=(64, 100))
    noisy = values + 0.01 * rng.normal(size=values.shape)
    noisy[7] += 0.5 * rng.normal(size=100)
    verdict = _judged(values.astype(F32), noisy.astype(F32))
    assert verdict.sqnr_db > 20.0
    assert verdict.word == "check"
    assert re.search(r"The worst sample has \d\.\d dB: calibrate on more", str(verdict))


def test_worst_sample_uses_the_mean_signal_for_quiet_samples() -> None:
    signal, noise = np.array([1.0] * 15 + [1e-6]), np.full(16, 1e-4)
    assert SampleErrors(signal, noise, 100).worst_db() > 20.0
    assert SampleErrors(np.array([1.0, 0.001]), np.array([1e-3, 1e-3]), 1).worst_db() > 25.0


def test_samples_are_those_of_the_first_axis_and_batches_otherwise() -> None:
    rng = np.random.default_rng(0)
    reference = [[rng.normal(size=(4, 3)), rng.normal(size=(7, 3))] for _ in range(2)]
    outputs = [[value + 0.01 for value in batch] for batch in reference]
    outputs[1][0][2] += 5.0
    outputs[0][1][0, 0] = math.inf
    groups = find_groups(None, reference)
    by_sample, by_batch = measure_samples(JudgedOutputs(groups, reference, outputs, [4, 4]))
    assert by_sample.signal.shape == (8,)
    assert by_sample.noise.argmax() == 6
    assert by_batch.noise.shape == (2,)
    assert by_batch.noise[0] == math.inf
    assert math.isfinite(by_batch.noise[1])


def _judged(reference: np.ndarray, outputs: np.ndarray, size: int = 8) -> Verdict:
    """The verdict on one output of some samples, in batches."""
    exact, rounded = ([[v[i : i + size]] for i in range(0, len(v), size)] for v in (reference, outputs))
    counts = [len(batch[0]) for batch in exact]
    repeated = [[False] * count for count in counts]
    return judge_outputs(
        JudgedOutputs(find_groups(None, exact), exact, rounded, counts, repeated), "unseen samples"
    )


def test_what_is_the_same_for_all_samples_hides_no_loss() -> None:
    """Boxes beside the corners of their grid: 40 dB, and nothing of the network is left."""
    rng = np.random.default_rng(0)
    grid = np.linspace(100.0, 600.0, 24)[None, :, None]
    boxes = (grid + 4.0 * rng.normal(size=(32, 24, 2))).astype(F32)
    dead = np.broadcast_to(boxes.mean(axis=0), boxes.shape) + 1e-3 * rng.normal(size=boxes.shape)
    verdict = _judged(boxes, dead.astype(F32))
    assert verdict.sqnr_db > 38.0
    assert (verdict.word, verdict.doubted) == ("check", False)
    assert "What differs between samples has 0.0 dB, which is lost or hardly anything" in str(verdict)
    for noise in (0.3, 0.7):  # 22 and 15 dB
        close = _judged(boxes, (boxes + noise * rng.normal(size=boxes.shape)).astype(F32))
        assert (close.word, close.doubts) == ("good", ())


def test_a_saturated_score_hides_no_loss() -> None:
    """A class with 0.99 for nearly all samples: the two that differ tell of the network."""
    rng = np.random.default_rng(1)
    scores = np.full((32, 10), 1e-3) + 1e-4 * rng.normal(size=(32, 10))
    scores[:, 3] += 0.99
    scores[[4, 20], 3], scores[[4, 20], 5] = 0.7, 0.3
    noisy = scores.copy()
    noisy[20, 3:6:2] += (0.15, -0.15)
    verdict = _judged(scores.astype(F32), noisy.astype(F32))
    assert verdict.sqnr_db > 26.0
    assert (verdict.word, verdict.doubted) == ("check", False)
    (text,) = [doubt.text for doubt in verdict.doubts if doubt.kind == "differences"]
    assert 3.0 < float(re.findall(r"has (.*) dB:", text)[0]) < 13.0


def test_one_unlike_sample_is_no_doubt_of_the_others() -> None:
    """Frames of one scene, and one of another, all of them right: nothing is lost."""
    rng = np.random.default_rng(3)
    frames = rng.normal(size=(1, 40)) + 0.05 * rng.normal(size=(16, 40))
    frames[7] = rng.normal(size=40)
    verdict = _judged(frames.astype(F32), (frames + 0.01 * rng.normal(size=frames.shape)).astype(F32))
    assert (verdict.word, verdict.doubts) == ("good", ())


def test_differences_count_samples_of_one_size_once() -> None:
    """Against the definition in numpy; equal samples differ in nothing, and repeated ones count once."""
    rng = np.random.default_rng(2)
    reference = [[rng.normal(size=(4, 3)) + 50.0] for _ in range(2)]
    outputs = [[value + rng.normal(size=value.shape) * 0.1 + 1.0] for (value,) in reference]
    groups = find_groups(None, reference)
    flags = [[False] * 4, [False, True, False, False]]
    (errors,), alike = measure_differences(JudgedOutputs(groups, reference, outputs, [4, 4], flags))
    assert not alike
    f, q = (
        np.delete(np.concatenate([batch[0] for batch in side]), 5, axis=0) for side in (reference, outputs)
    )
    np.testing.assert_allclose(errors.signal, np.square(f - f.mean(axis=0)).sum(axis=1))
    np.testing.assert_allclose(errors.noise, np.square((q - f) - (q - f).mean(axis=0)).sum(axis=1))
    equal = [[np.ones((4, 3))], [np.ones((4, 3))]]
    assert measure_differences(JudgedOutputs(groups, equal, equal, [4, 4])) == ([], True)
    unlike = [[np.ones((4, 3))], [np.ones((4, 5))]]
    sizes = JudgedOutputs(find_groups(None, unlike), unlike, unlike, [4, 4])
    assert measure_differences(sizes) == ([], False)
    few = [side[:1] for side in (reference, outputs)]
    three = JudgedOutputs(groups, *few, [4], [[False, True, False, False]])
    assert measure_differences(three) == ([], False)
    lost = [[outputs[0][0].copy()], outputs[1]]
    lost[0][0][0, 0] = math.nan
    assert measure_differences(JudgedOutputs(groups, reference, lost, [4, 4])) == ([], False)


@pytest.mark.parametrize(
    ("count", "first"), [(7, None), (8, 6), (24, 18), (32, 24), (56, 48), (64, 56), (128, 112), (999, 983)]
)
def test_a_quarter_at_most_is_held_back(count: int, first: int | None) -> None:
    source = recut(open_data(np.zeros((count, 1), F32)), 8)
    calibration, evaluation = split_data(source, None, None, 1)
    assert evaluation.seen == (first is None)
    assert sum(len(batch[0]) for batch in calibration) == (count if first is None else first)
