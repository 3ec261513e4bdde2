"""Weights fitted to what quantized layers read: against numpy's least squares, and in a graph."""

from __future__ import annotations

from typing import Any

import megengine as mge
import megengine.functional as F
import megengine.module as M
import numpy as np
import pytest

import qtrace
from qtrace import QConfig
from qtrace.errors import CalibrationError
from qtrace.preparation.model import read_record
from qtrace.ptq import gptq
from qtrace.ptq.layers import scaling, second_order
from qtrace.ptq.layers.held_back import OutputErrors
from qtrace.ptq.layers.second_order import DAMPINGS, SecondMoments, correction, ridge
from tests.nets import images, left_lines, net


def _values(places: int, noise: float, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What two groups of 5 inputs read at some places, (2, P, 5), what 3 outputs miss, and why, (2, 5, 3)."""
    random = np.random.default_rng(seed)
    read = random.normal(size=(2, places, 5)) @ random.normal(size=(2, 5, 5)) + random.normal(size=(2, 1, 5))
    planted = random.normal(size=(2, 5, 3))
    return read, read @ planted + noise * random.normal(size=(2, places, 3)), planted


def _least_squares(read: np.ndarray, missed: np.ndarray, damping: float) -> np.ndarray:
    """The damping as rows of their own under what was read."""
    size = read.shape[-1]
    rows = np.sqrt(damping * np.sum(read * read) / size) * np.eye(size)
    padded = np.concatenate([missed, np.zeros((size, missed.shape[-1]))])
    return np.linalg.lstsq(np.concatenate([read, rows]), padded, rcond=None)[0]


@pytest.mark.parametrize("damping", [1.0, 0.01])
def test_ridge_is_damped_least_squares_per_group(damping: float) -> None:
    read, missed, _ = _values(40, noise=0.5)
    solution = ridge(SecondMoments.of(read, missed), damping)
    for group in range(2):
        np.testing.assert_allclose(
            solution[group], _least_squares(read[group], missed[group], damping), rtol=1e-8
        )


def test_moments_add_up_and_are_those_about_the_mean() -> None:
    read, missed, _ = _values(60, noise=0.5)
    whole = SecondMoments.of(read, missed)
    both = SecondMoments.of(read[:, :25], missed[:, :25]) + SecondMoments.of(read[:, 25:], missed[:, 25:])
    for name, value in vars(whole).items():
        np.testing.assert_allclose(vars(both)[name], value, rtol=1e-9, err_msg=name)
    about = whole.centered()
    for group in range(2):
        joint = np.concatenate([read[group], missed[group]], axis=1)
        covariance = 60 * np.cov(joint, rowvar=False, bias=True)
        np.testing.assert_allclose(about.square[group], covariance[:5, :5], rtol=1e-3, atol=1e-3)
        np.testing.assert_allclose(about.cross[group], covariance[:5, 5:], rtol=1e-8, atol=1e-8)


def test_the_damping_is_the_one_that_serves_best_on_the_other_half() -> None:
    chosen = set()
    for seed, places, noise in [(0, 400, 0.1), (1, 14, 3.0), (2, 24, 5.0), (3, 60, 10.0)]:
        read, missed, _ = _values(places, noise, seed)
        halves = [slice(0, places // 2), slice(places // 2, None)]
        errors = {}
        for damping in DAMPINGS:
            errors[damping] = 0.0
            for own, other in (halves, halves[::-1]):
                for group in range(2):
                    fitted = _least_squares(read[group, own], missed[group, own], damping)
                    rest = missed[group, other] - read[group, other] @ fitted
                    errors[damping] += float(np.sum(rest**2) - np.sum(missed[group, other] ** 2))
        first, second = (SecondMoments.of(read[:, half], missed[:, half]) for half in halves)
        moved, damping = correction(first, second)
        assert damping == min(errors, key=lambda d: errors[d])
        np.testing.assert_allclose(moved, ridge(SecondMoments.of(read, missed), damping))
        chosen.add(damping)
    assert len(chosen) > 1


def test_damping_is_chosen_on_some_outputs_and_fits_all() -> None:
    random = np.random.default_rng(3)
    read = random.normal(size=(1, 60, 12))
    missed = read @ random.normal(size=(1, 12, 200)) * 0.1 + random.normal(size=(1, 60, 200))
    halves = [SecondMoments.of(read[:, part], missed[:, part]) for part in (slice(0, 30), slice(30, None))]
    some = [SecondMoments.of(read[:, p], missed[:, p, ::4]) for p in (slice(0, 30), slice(30, None))]
    moved, damping = correction(*halves)
    assert damping is not None
    assert damping == correction(*some)[1]
    np.testing.assert_allclose(moved, ridge(SecondMoments.of(read, missed), damping))


def _halves_with_errors(share: float) -> list[SecondMoments]:
    """Sums of two halves whose fourth input has a negative power, as by rounding errors."""
    random = np.random.default_rng(4)
    read, missed = random.normal(size=(1, 80, 4)), random.normal(size=(1, 80, 3))
    missed = missed + read[:, :, :3]
    halves = [SecondMoments.of(read[:, part], missed[:, part]) for part in (slice(0, 40), slice(40, None))]
    for m in halves:
        m.square[0, 3, :] = m.square[0, :, 3] = 0
        m.square[0, 3, 3] = -share * np.trace(m.square[0])
        m.cross[0, 3] = 0
    return halves


def test_sums_of_rounding_errors_want_more_damping() -> None:
    """A matrix that is not positive definite has no least squares: the damping that makes it so is taken."""
    halves = _halves_with_errors(0.05)
    moved, damping = correction(*halves)
    assert damping is not None
    assert damping >= 0.1
    both = halves[0] + halves[1]
    np.testing.assert_array_equal(ridge(both, 0.001), ridge(both, 1.0))
    assert np.isfinite(moved).all()


def test_correction_finds_planted_errors_and_ignores_chance() -> None:
    read, missed, planted = _values(1000, noise=0.01)
    halves = [SecondMoments.of(read[:, part], missed[:, part]) for part in (slice(0, 500), slice(500, None))]
    np.testing.assert_allclose(correction(*halves)[0], planted, atol=0.01)
    random = np.random.default_rng(5)
    halves = [
        SecondMoments.of(random.normal(size=(1, 8, 30)), random.normal(size=(1, 8, 4))) for _ in range(2)
    ]
    # The halves contradict each other: what the one says makes the other worse.
    contrary = SecondMoments(*(-v if k in ("missed", "cross") else v for k, v in vars(halves[0]).items()))
    moved, damping = correction(halves[0], contrary)
    assert damping is None
    assert not moved.any()


def test_constant_inputs_lead_to_no_correction() -> None:
    read = np.full((1, 50, 3), 7.3, np.float32)
    missed = np.random.default_rng(0).normal(size=(1, 50, 2)).astype(np.float32)
    about = SecondMoments.of(read, missed).centered()
    assert np.linalg.eigvalsh(about.square[0]).min() > 0
    assert np.abs(correction(about, about)[0]).max() < 0.05
    nothing = SecondMoments.of(0 * read, missed).centered()
    np.testing.assert_array_equal(correction(nothing, nothing)[0], 0)


BATCHES = [np.concatenate([images(4, 4, 8, 8, seed=s + i) for i in range(2)]) for s in (0, 2)]
OTHERS = [images(4, 4, 8, 8, seed=100 + s) for s in range(4)]


def _module() -> M.Module:
    """The activations lose so much on the way to `c` that it can make up for some of it."""
    return net(
        lambda self, x: self.d(F.flatten(F.relu(self.c(F.relu(self.b(F.relu(self.a(x)))))), 1)),
        a=M.Conv2d(4, 6, 3, padding=1),
        b=M.Conv2d(6, 6, 3, padding=1, groups=6),
        c=M.Conv2d(6, 8, 3, stride=2),
        d=M.Linear(72, 5),
    )


def _prepared(module: M.Module, *ptq: Any) -> Any:
    """Coarse activations, so that there are errors of inputs to make up for; the outputs stay float."""
    rules = [{"match": {"position": "last"}, "quantize_output": False}]
    config = QConfig(
        backend="generic", weight={"bits": 8, "axis": 0}, activation={"bits": 4}, ptq=ptq, rules=rules
    )
    return qtrace.prepare(qtrace.trace(module, BATCHES[0], check=False), config)


def _noise(module: M.Module, model: Any) -> float:
    qtrace.set_phase(model, "quantize")
    errors = [module(mge.Tensor(x)).numpy() - model(mge.Tensor(x)).numpy() for x in OTHERS]
    return float(np.mean(np.square(np.concatenate(errors).astype(np.float64))))


def test_errors_of_inputs_are_made_up_for_on_other_data_too() -> None:
    module = _module()
    plain = qtrace.calibrate(_prepared(module, "gptq", "bias_correction"), BATCHES, progress=False)
    refitted = _prepared(module, {"gptq": {"refit": True}}, "bias_correction")
    qtrace.calibrate(refitted, BATCHES, progress=False)
    assert _noise(module, refitted) < 0.95 * _noise(module, plain)
    report = read_record(refitted).ptq[0]
    assert report["options"]["refit"] is True
    lines = {line.partition(":")[0]: line for line in report["changed"]}
    assert lines.keys() == {"a_out", "b_out", "c_out", "d_out"}
    assert "fitted to what is read with damping" in lines["b_out"]
    assert all("fitted" not in line for line in read_record(plain).ptq[0]["changed"])
    assert all(e["after"] >= e["before"] for e in report["errors"])
    for name in "abcd":  # the weights of those that were changed lie on their grids
        quant, weight = getattr(refitted.qsites, f"{name}_weight"), getattr(refitted, name).weight
        if "nearest is better" not in lines[f"{name}_out"]:
            np.testing.assert_allclose(quant(weight).numpy(), weight.numpy(), atol=1e-6)


def test_the_biases_take_the_means_without_bias_correction() -> None:
    module = _module()
    refitted = qtrace.calibrate(_prepared(module, {"gptq": {"refit": True}}), BATCHES, progress=False)
    qtrace.set_phase(refitted, "quantize")
    pairs = [(module(mge.Tensor(x)).numpy(), refitted(mge.Tensor(x)).numpy()) for x in BATCHES]
    shift = np.mean([(expected - actual).mean(axis=0) for expected, actual in pairs], axis=0)
    assert np.abs(shift).max() < 1e-3 * max(np.abs(expected).max() for expected, _ in pairs)


def test_one_sample_and_layers_in_parts_are_rounded_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = qtrace.calibrate(
        _prepared(_module(), {"gptq": {"refit": True}}), [BATCHES[0][:1]], progress=False
    )
    report = read_record(alone).ptq[0]
    assert report["changed"]
    assert all("fitted" not in line for line in report["changed"])
    monkeypatch.setattr(second_order, "MAX_JOINT_INPUTS", 8)  # every layer has more inputs
    parted = qtrace.calibrate(_prepared(_module(), {"gptq": {"refit": True}}), BATCHES, progress=False)
    assert all("fitted" not in line for line in read_record(parted).ptq[0]["changed"])


def test_a_shared_weight_is_left() -> None:
    module = net(lambda self, x: self.a(F.relu(self.a(x))), a=M.Conv2d(4, 4, 3, padding=1))
    before = module.a.weight.numpy().copy()
    refitted = qtrace.calibrate(_prepared(module, {"gptq": {"refit": True}}), BATCHES, progress=False)
    assert all("shared" in line for line in left_lines(read_record(refitted).ptq[0]))
    np.testing.assert_array_equal(refitted.a.weight.numpy(), before)


@pytest.mark.parametrize("how", ["interrupted", "not finite"])
def test_a_run_that_ends_early_leaves_the_model_as_it_was(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    module = _module()
    if how == "not finite":
        module.d.bias._reset(mge.Parameter(np.full(5, np.nan, np.float32)))
    prepared = _prepared(module, {"gptq": {"refit": True}})
    before = {n: t.numpy().copy() for n, t in prepared.named_tensors()}
    calls = []

    def third_fails(*arguments: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return correction(*arguments)

    if how == "interrupted":
        monkeypatch.setattr(gptq, "correction", third_fails)
        with pytest.raises(KeyboardInterrupt):
            qtrace.calibrate(prepared, BATCHES, progress=False)
    else:
        with pytest.raises(CalibrationError, match="output d_out, batch 0: it holds NaN or infinity"):
            qtrace.calibrate(prepared, BATCHES, progress=False)
    after = {n: t.numpy() for n, t in prepared.named_tensors()}
    assert all(np.array_equal(before[n], after[n], equal_nan=True) for n in before)


def test_layers_whose_weights_are_left_and_those_without_a_bias_give_their_means_too() -> None:
    module = net(
        lambda self, x: self.b(F.relu(self.a(x))),
        a=M.ConvTranspose2d(4, 6, 2, stride=2),
        b=M.Conv2d(6, 5, 3, bias=False),
    )
    refitted = qtrace.calibrate(_prepared(module, {"gptq": {"refit": True}}), BATCHES, progress=False)
    report = read_record(refitted).ptq[0]
    assert "a_out: its bias takes the mean error" in report["changed"]
    assert "a_out: weights of conv_transpose2d are rounded to nearest" in left_lines(report)
    assert np.abs(refitted.b.bias.numpy()).max() > 0
    qtrace.set_phase(refitted, "quantize")
    pairs = [(module(mge.Tensor(x)).numpy(), refitted(mge.Tensor(x)).numpy()) for x in BATCHES]
    shift = np.mean([(expected - actual).mean(axis=(0, 2, 3)) for expected, actual in pairs], axis=0)
    assert np.abs(shift).max() < 1e-3 * max(np.abs(expected).max() for expected, _ in pairs)


def test_ridge_ends_on_negative_moments() -> None:
    """No power is left to scale the damping by, which grows until the matrix is positive definite."""
    sums = SecondMoments.of(np.zeros((1, 4, 2)), np.zeros((1, 4, 3)))
    sums.square[:] = -10 * np.ones((1, 2, 2))
    assert np.array_equal(ridge(sums, 0.01), np.zeros((1, 2, 3)))


def test_a_layer_without_outputs_has_no_correction() -> None:
    sums = SecondMoments.of(np.ones((1, 4, 2)), np.zeros((1, 4, 0)))
    assert correction(sums, sums)[1] is None


def test_correction_finds_a_larger_damping_after_two_that_fail() -> None:
    """With 0.1 and 1 the matrices are not positive definite; 10 lowers the error all the same."""
    assert correction(*_halves_with_errors(0.6))[1] == 10.0


def test_means_are_taken_to_the_nearest_of_steps_far_below_the_error() -> None:
    means = np.linspace(-1.0, 1.0, 101) / 2**10
    errors = OutputErrors(count=1.0, total=means, square=1.9**2 * means.size, signal=1.0)  # steps of 2**-12
    steps = scaling._coarse(errors) * 2**12
    np.testing.assert_array_equal(steps, np.round(means * 2**12))
