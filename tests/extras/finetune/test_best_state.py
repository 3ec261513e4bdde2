"""finetune: rates in quantization steps, the best state on held-back data, and a bound on the time."""

from __future__ import annotations

import json
import logging
import re
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import megengine.functional as F
import megengine.module as M
import numpy as np
import pytest
from megengine import Parameter

import qtrace
from benchmarks.accuracy.subjects import batches, subject, training_inputs
from qtrace.errors import ConfigError
from qtrace.extras.finetune import FinetuneSettings
from qtrace.extras.finetune import training as monitoring
from qtrace.extras.finetune.evaluation import BestState
from qtrace.extras.finetune.finetune import TuningRun
from qtrace.extras.finetune.training import Learner, Retreats, Trainer
from qtrace.extras.finetune.twins import Units, range_unit, size_of
from qtrace.graph.types import TracedModule
from qtrace.preparation.model import QuantizedModel, fake_quants, graph_hash
from tests.nets import net

LOSS_FACTOR = 2.0  # what the loss may rise by in the first steps, against its largest value without learning


def _data(count: int = 4, seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.normal(size=(8, 3, 5, 5)).astype(np.float32) for _ in range(count)]


def _prepared(bits: int = 8, fakequant: str = "lsq", keep_bn: bool = False) -> TracedModule:
    def forward(self: Any, x: Any) -> Any:
        return self.fc(F.mean(F.relu(self.b(F.relu(self.bn(self.a(x))))), (2, 3)))

    children = {"a": M.Conv2d(3, 6, 3), "bn": M.BatchNorm2d(6), "b": M.Conv2d(6, 6, 1), "fc": M.Linear(6, 4)}
    module = net(forward, **children)
    traced = qtrace.trace(module, _data(1)[0], check=False)
    config = {
        "backend": "generic",
        "fakequant": fakequant,
        "weight": {"bits": bits},
        "activation": {"bits": bits},
        "qat": {"bn": {"fold": not keep_bn}},
    }
    return qtrace.calibrate(qtrace.prepare(traced, config), _data(2), progress=False)


def _trained(bits: int) -> tuple[TracedModule, list[np.ndarray], list[np.ndarray]]:
    """A network that was trained for its task, calibrated; inputs to learn from and to evaluate on."""
    digits = subject("resnet", quick=True)
    config = {
        "backend": "generic",
        "fakequant": "lsq",
        "weight": {"bits": bits},
        "activation": {"bits": bits},
    }
    traced = qtrace.trace(digits.net, digits.calibration[:1], check=False)
    prepared = qtrace.calibrate(qtrace.prepare(traced, config), batches(digits.calibration), progress=False)
    return prepared, batches(training_inputs(digits, 128), 32), [digits.test]


@pytest.mark.slow
def test_eight_bits_keep_to_their_minimum_and_gain() -> None:
    prepared, inputs, unseen = _trained(8)
    settings = FinetuneSettings(
        steps=48, jit=False
    )  # near a minimum a dozen steps gain on some processors only
    report = qtrace.finetune(prepared, inputs, settings, evaluation=unseen, progress=False)
    same, _, _ = _trained(8)
    resting = replace(settings, lr=1e-9)  # the losses of the same batches without learning
    rest = qtrace.finetune(same, inputs, resting, evaluation=unseen, progress=False)
    assert max(report.loss) < LOSS_FACTOR * max(rest.loss)
    assert report.outputs[0].after > report.outputs[0].before
    assert report.error_after < report.error_before
    assert not report.retreats


@pytest.mark.slow
def test_four_bits_gain_with_the_same_settings() -> None:
    prepared, inputs, unseen = _trained(4)
    report = qtrace.finetune(
        prepared, inputs, FinetuneSettings(steps=12, jit=False), evaluation=unseen, progress=False
    )
    assert report.outputs[0].after > report.outputs[0].before + 1.0


def test_a_step_moves_weights_and_ends_of_ranges_by_a_share_of_a_quantization_step() -> None:
    settings = FinetuneSettings(steps=1, warmup=0.0, jit=False, evaluate_every=1, lr=0.1)
    for bits in (4, 8):
        prepared = _prepared(bits)
        scale = prepared.qsites.b_weight.scale.numpy().copy()
        weight = prepared.b.weight.numpy().copy()
        kept = BestState.restore
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(BestState, "restore", lambda self: None)  # the state after the step
            qtrace.finetune(prepared, _data(), settings, progress=False)
        assert BestState.restore is kept
        moved = np.abs(prepared.b.weight.numpy() - weight) / scale
        assert moved.max() == pytest.approx(0.1, rel=0.05)
        ends = (2 ** (bits - 1) - 1) * np.abs(prepared.qsites.b_weight.scale.numpy() - scale) / scale
        assert 0 < ends.max() < 0.11


@pytest.mark.parametrize("fakequant", ["lsq", "lsq_plus", "pact", "learned_range"])
def test_the_unit_of_a_range_moves_its_end_by_a_step(fakequant: str) -> None:
    for fake in fake_quants(_prepared(4, fakequant)):
        before = fake.qparams()
        for parameter in fake.parameters(recursive=False):
            value, unit = parameter.numpy().copy(), range_unit(fake, parameter)
            parameter._reset(Parameter(value + 0.25 * unit))
            after = fake.effective_scale().numpy().reshape(before.scale.shape)
            parameter._reset(Parameter(value))
            if parameter.numpy().shape != fake.shape or np.array_equal(after, before.scale):
                continue  # an offset leaves the scale as it is
            zero_point = before.zero_point
            steps = np.maximum(fake.scheme.qmax - zero_point, zero_point - fake.scheme.qmin)
            whole = fake.scheme.qmax - fake.scheme.qmin
            moved = np.abs(after - before.scale) / before.scale
            assert np.all((moved > 0.2 / whole) & (moved < 0.3 / np.maximum(steps, 1)))


def test_what_has_no_quantization_step_moves_like_the_median_weight() -> None:
    prepared = _prepared(8)
    units = Units(QuantizedModel(prepared))
    shares = [
        np.median(getattr(prepared.qsites, f"{name}_weight").scale.numpy() / size_of(module.weight.numpy()))
        for name, module in (("a", prepared.a), ("b", prepared.b), ("fc", prepared.fc))
    ]
    bias = prepared.b.bias
    np.testing.assert_allclose(units.of(bias), size_of(bias.numpy()) * np.median(shares), rtol=1e-5)


@pytest.mark.quick(1)
@pytest.mark.parametrize("keep_bn", [False, True])
def test_no_better_step_restores_the_start_bit_for_bit_and_says_so(
    keep_bn: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    prepared = _prepared(8, keep_bn=keep_bn)
    before = graph_hash(prepared)
    step = Learner.step

    def ascends(self: Any, gradients: Any, *rest: Any) -> None:
        step(self, [None if g is None else -g for g in gradients], *rest)

    monkeypatch.setattr(Learner, "step", ascends)
    settings = FinetuneSettings(steps=6, jit=False, evaluate_every=2)
    report = qtrace.finetune(prepared, _data(), settings, progress=False)
    assert report.best_step == 0
    assert graph_hash(prepared) == before
    assert report.error_after == report.error_before
    assert not report.improved
    assert [o.after for o in report.outputs] == [o.before for o in report.outputs]
    assert report.table().startswith("NO STEP WAS BETTER than the start: the model is as it was.")
    assert "no step was better than the start" in caplog.text
    assert [e.step for e in report.evaluations] == [0, 2, 4, 6]
    assert not report.frozen


@pytest.mark.quick(1)
@pytest.mark.parametrize("keep_bn", [False, True])
def test_the_best_state_is_what_the_model_has_in_the_end(
    keep_bn: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared = _prepared(3, keep_bn=keep_bn)
    states: dict[int, str] = {}
    consider = BestState.consider

    def notes(self: Any, step: int, error: float) -> None:
        states[step] = graph_hash(self.model)
        consider(self, step, 0.0 if step == 4 else error)

    monkeypatch.setattr(BestState, "consider", notes)
    report = qtrace.finetune(
        prepared, _data(), FinetuneSettings(steps=8, jit=False, evaluate_every=2), progress=False
    )
    assert report.best_step == 4
    assert graph_hash(prepared) == states[4]
    assert len(set(states.values())) == 4
    assert "the state after step 4, best of 4 evaluations" in report.table()


def test_a_rate_that_throws_the_network_off_is_lowered_and_told(caplog: pytest.LogCaptureFixture) -> None:
    prepared = _prepared(8)
    settings = FinetuneSettings(steps=40, lr=10.0, jit=False, evaluate_every=5)
    report = qtrace.finetune(prepared, _data(), settings, progress=False)
    assert report.retreats
    assert report.retreats[0].factor == 0.25
    assert report.error_after <= report.error_before
    assert "learning rates times 0.25" in report.table()
    assert "learning rates times 0.25" in caplog.text
    assert json.loads(json.dumps(report.to_dict()))["retreats"][0]["back_to"] == 0


def test_retreats_ask_for_a_clear_and_lasting_rise() -> None:
    retreats = Retreats(0.01, [1.0, 2.0])
    assert not retreats.reason(10, [1.5] * 10, 0.029)
    assert "held-back error is 0.031" in retreats.reason(10, [1.5] * 10, 0.031)
    assert not retreats.reason(9, [9.0] * 9, None)
    losses = [1.5] + [5.0] * 9
    assert "mean loss of 10 steps is 4.65" in retreats.reason(10, losses, None)
    retreats.retreat(10, 0, "a reason")
    assert not retreats.reason(12, [*losses, 5.0, 5.0], None)  # two steps at the smaller rate
    again = Retreats(0.01, [1.0])
    again.load_state_dict(retreats.state_dict())
    assert again.all == retreats.all


def test_a_run_that_diverged_resumes_to_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = FinetuneSettings(
        steps=16, lr=10.0, jit=False, evaluate_every=5, checkpoint_every=7, weight_average=0.5
    )
    first, second = _prepared(8), _prepared(8)
    whole = qtrace.finetune(first, _data(), settings, progress=False)
    assert whole.retreats
    step = Trainer.compute

    def stops(self: Any, number: int) -> Any:
        if number == 15:
            raise KeyboardInterrupt
        return step(self, number)

    file = tmp_path / "state.npz"
    with monkeypatch.context() as patched:
        patched.setattr(Trainer, "compute", stops)
        with pytest.raises(KeyboardInterrupt):
            qtrace.finetune(second, _data(), settings, checkpoint=file, progress=False)
    resumed = qtrace.finetune(second, _data(), settings, checkpoint=file, resume=True, progress=False)
    assert resumed.resumed == 14
    assert (resumed.evaluations, resumed.retreats) == (whole.evaluations, whole.retreats)
    assert resumed.loss == whole.loss
    assert graph_hash(second) == graph_hash(first)


def test_time_is_estimated_before_the_first_step(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "qtrace")
    step = Trainer.compute

    def looks(self: Any, number: int) -> Any:
        assert "steps of" in caplog.text
        return step(self, number)

    monkeypatch.setattr(Trainer, "compute", looks)
    qtrace.finetune(_prepared(), _data(), FinetuneSettings(steps=6, jit=False), progress=False)
    assert re.search(r"finetune: about \d+ s: 6 steps of \S+ s and 3 evaluations of", caplog.text)


def test_minutes_bound_the_steps(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    monkeypatch.setattr("qtrace.extras.finetune.training.time.monotonic", lambda: now[0])
    gradients = Trainer.gradients

    def slow(self: Any, leaves: Any) -> Any:
        now[0] += 6.0
        return gradients(self, leaves)

    monkeypatch.setattr(Trainer, "gradients", slow)
    settings = FinetuneSettings(steps=50, jit=False, max_minutes=1.0)
    report = qtrace.finetune(_prepared(), _data(), settings, progress=False)
    assert len(report.loss) == 9  # the first of ten that fit told how long they take
    assert "9 steps instead of 50, to end within 1 minutes" in caplog.text
    assert report.seconds == 60.0

    def slower(self: Any, leaves: Any) -> Any:
        now[0] += 6.0 * (1 + len(self.curves))
        return gradients(self, leaves)

    monkeypatch.setattr(Trainer, "gradients", slower)
    late = qtrace.finetune(_prepared(), _data(), settings, progress=False)
    assert 0 < len(late.loss) < 9
    assert late.stopped.startswith("max_minutes (1) leaves no time for another step")
    assert late.evaluations[-1].step == len(late.loss)
    assert "ended after step" in late.table()
    with pytest.raises(ConfigError, match="max_minutes is 0"):
        FinetuneSettings(max_minutes=0)


def test_minutes_cover_the_data_and_the_evaluations(monkeypatch: pytest.MonkeyPatch) -> None:
    now, seconds = [0.0], {"step": 1.0, "evaluation": 10.0}
    monkeypatch.setattr("qtrace.extras.finetune.training.time.monotonic", lambda: now[0])
    gradients, evaluate = Trainer.gradients, monitoring.evaluate

    def slow_gradients(self: Any, batch: Any) -> Any:
        now[0] += seconds["step"]
        return gradients(self, batch)

    def slow_evaluate(*arguments: Any) -> Any:
        now[0] += seconds["evaluation"]
        return evaluate(*arguments)

    monkeypatch.setattr(Trainer, "gradients", slow_gradients)
    monkeypatch.setattr(monitoring, "evaluate", slow_evaluate)
    settings = FinetuneSettings(steps=50, jit=False, max_minutes=1.0)
    report = qtrace.finetune(_prepared(), _data(), settings, progress=False)
    # 11 s for the first evaluation and the timed step; then 10 steps, 2 evaluations and one for the report.
    assert len(report.loss) == 10
    assert report.seconds <= 60.0

    plan = TuningRun._plan

    def slower_machine(self: Any) -> None:
        plan(self)
        seconds["evaluation"] = 20.0

    now[0] = 0.0
    monkeypatch.setattr(TuningRun, "_plan", slower_machine)
    late = qtrace.finetune(_prepared(), _data(), settings, progress=False)
    assert 0 < len(late.loss) < 10
    assert late.seconds <= 60.0
    assert late.stopped == "max_minutes (1) leaves no time for another step"

    class SlowData:
        def __iter__(self) -> Any:
            now[0] += 50.0
            return iter(_data())

    late = qtrace.finetune(_prepared(), SlowData(), settings, progress=False)
    assert len(late.loss) == 1


def test_parameters_without_values_neither_learn_nor_warn() -> None:
    """As an imported operator's unused input is."""
    prepared = _prepared(8)
    prepared.b.nothing = Parameter(np.zeros((0,), np.float32))
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        report = qtrace.finetune(prepared, _data(), FinetuneSettings(steps=5, jit=False), progress=False)
    assert len(report.loss) == 5
