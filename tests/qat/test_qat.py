"""The helpers of a training loop: groups, freezing, damping."""

from __future__ import annotations

from typing import Any

import megengine as mge
import megengine.functional as F
import megengine.module as M
import numpy as np
import pytest
from megengine.autodiff import GradManager
from megengine.optimizer import SGD, Adam

import qtrace
from qtrace import QConfig
from qtrace.errors import ConfigError, GraphError
from qtrace.fakequant import scales
from qtrace.graph.types import TracedModule
from qtrace.qat import Dampening, Oscillations, Schedule, cosine, freeze_batchnorm, freeze_ranges
from tests.each import each_of
from tests.nets import images, net

BATCHES = [images(4, 3, 8, 8, seed=s) for s in range(2)]
X = mge.Tensor(BATCHES[0])
pytestmark = pytest.mark.usefixtures("synchronous")


def _prepared(fakequant: str = "lsq", fold: bool = False, bits: int = 8, **bn: Any) -> TracedModule:
    module = net(
        lambda self, x: self.fc(F.mean(F.relu(self.bn(self.conv(x))), (2, 3))),
        conv=M.Conv2d(3, 4, 3, padding=1),
        bn=M.BatchNorm2d(4),
        fc=M.Linear(4, 2),
    )
    config = QConfig(fakequant=fakequant, qat={"bn": {"fold": fold, **bn}}, weight={"bits": bits})
    prepared = qtrace.prepare(qtrace.trace(module, BATCHES[0], check=False), config)
    qtrace.calibrate(prepared, BATCHES, progress=False)
    qtrace.set_phase(prepared, "train")
    prepared.train()
    return prepared


def _step(prepared: TracedModule, optimizer: Any, extra: Any = None) -> None:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    manager = GradManager().attach(parameters)
    with manager:
        loss = F.mean((prepared(X) - 1.0) ** 2)
        manager.backward(loss if extra is None else loss + extra())
    optimizer.step().clear_grad()


def _values(parameters: list[Any]) -> list[np.ndarray]:
    return [p.numpy().copy() for p in parameters]


def _same(before: list[np.ndarray], parameters: list[Any]) -> list[bool]:
    return [bool(np.array_equal(old, p.numpy())) for old, p in zip(before, parameters, strict=True)]


# -- groups --------------------------------------------------------------------------------------------


@each_of("fakequant", ["fixed", "lsq", "learned_range"])
def test_every_parameter_is_in_the_group_that_suits_it(fakequant: str) -> None:
    prepared = _prepared(fakequant)
    groups = qtrace.param_groups(prepared, 0.1, range_lr=0.02, weight_decay=1e-3)
    name_of = {id(p): name for name, p in prepared.named_parameters()}
    named = [{name_of.pop(id(p)) for p in group["params"]} for group in groups]
    assert not name_of
    assert named[0] == {"conv.weight", "fc.weight"}
    assert named[1] == {"conv.bias", "fc.bias", "bn.weight", "bn.bias"}
    numbers = [(group["lr"], group["weight_decay"]) for group in groups]
    want = [(0.1, 1e-3), (0.1, 0.0), (0.02, 0.0)]
    if fakequant == "fixed":
        assert numbers == want[:2]
        return
    assert numbers == want
    assert all(name.startswith("qsites.") for name in named[2])
    assert {id(p) for p in groups[2]["params"]} == {id(p) for p in scales(prepared)}


def test_groups_drive_an_optimizer_and_the_defaults_hold() -> None:
    prepared = _prepared()
    groups = qtrace.param_groups(prepared, 0.5)
    assert [g["lr"] for g in groups] == [0.5, 0.5, 0.05]
    assert [g["weight_decay"] for g in groups] == [0.0, 0.0, 0.0]
    assert qtrace.param_groups(prepared, 0.5, range_decay=0.25)[2]["weight_decay"] == 0.25
    still = qtrace.param_groups(prepared, 0.05, range_lr=0.0)
    ranges, weights = _values(still[2]["params"]), _values(still[0]["params"])
    _step(prepared, SGD(still, lr=0.05, momentum=0.9))
    assert all(_same(ranges, still[2]["params"]))
    assert not any(_same(weights, still[0]["params"]))


def test_impossible_rates_are_refused() -> None:
    prepared = _prepared()
    for arguments in (
        {"lr": -1.0},
        {"lr": float("nan")},
        {"lr": 0.1, "range_lr": "x"},
        {"lr": 0.1, "weight_decay": -1},
    ):
        with pytest.raises(ConfigError, match=rf"param_groups: {list(arguments)[-1]} is "):
            qtrace.param_groups(prepared, **arguments)
    with pytest.raises(ConfigError, match="lacks parameters"):
        qtrace.param_groups(M.ReLU(), 0.1)


# -- freezing ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer_class", [SGD, Adam])
def test_frozen_ranges_stay_while_weights_learn(optimizer_class: Any) -> None:
    prepared = _prepared()
    more = {"momentum": 0.9} if optimizer_class is SGD else {}
    optimizer = optimizer_class(qtrace.param_groups(prepared, 0.01), lr=0.01, **more)
    _step(prepared, optimizer)
    freeze_ranges(prepared)
    ranges, weight = _values(scales(prepared)), [prepared.fc.weight.numpy().copy()]
    _step(prepared, optimizer)
    assert all(_same(ranges, scales(prepared)))
    assert not any(_same(weight, [prepared.fc.weight]))
    freeze_ranges(prepared, False)
    _step(prepared, optimizer)
    assert not all(_same(ranges, scales(prepared)))


def test_frozen_batchnorm_is_what_convert_writes() -> None:
    prepared = _prepared()
    assert freeze_batchnorm(prepared) == 1
    mean = prepared.bn.running_mean.numpy().copy()
    frozen = prepared(X).numpy()
    np.testing.assert_array_equal(prepared.bn.running_mean.numpy(), mean)
    prepared.eval()
    np.testing.assert_array_equal(qtrace.convert(prepared)(X).numpy(), frozen)
    prepared.train()
    freeze_batchnorm(prepared, False)
    prepared(X)
    assert not np.array_equal(prepared.bn.running_mean.numpy(), mean)


def test_a_schedule_freezes_when_it_is_due_and_keeps_it_so() -> None:
    prepared = _prepared()
    schedule = Schedule(prepared, steps=10, freeze_bn=0.3, freeze_ranges=0.5)
    seen = []
    for _ in range(10):
        prepared.train()  # as loops do at every epoch
        told = schedule.step()
        phases = {
            fq.phase for fq in prepared.qsites.modules() if hasattr(fq, "scale") and hasattr(fq, "observer")
        }
        assert told == (not prepared.bn.training, phases == {"quantize"})
        seen.append(told)
    assert [bn for bn, _ in seen] == [False] * 3 + [True] * 7
    assert [ranges for _, ranges in seen] == [False] * 5 + [True] * 5
    assert schedule.fraction == 1.0
    resumed = Schedule(prepared, steps=10, freeze_bn=0.3, done=4)
    assert resumed.step() == (True, False)


def test_a_schedule_takes_the_recipe_s_fraction() -> None:
    assert Schedule(_prepared(freeze_after=0.25), steps=4).freeze_bn == 0.25
    assert Schedule(_prepared(), steps=4).freeze_bn is None


def test_impossible_schedules_are_refused() -> None:
    prepared = _prepared()
    wrong: list[dict[str, Any]] = [{"steps": 0}, {"steps": 1.5}, {"steps": 3, "done": -1}]
    wrong += [{"steps": 3, "freeze_bn": 1.5}, {"steps": 3, "freeze_ranges": "half"}]
    for arguments in wrong:
        with pytest.raises(ConfigError, match=rf"Schedule: {list(arguments)[-1]} is "):
            Schedule(prepared, **arguments)
    qtrace.set_phase(prepared, "float")
    with pytest.raises(ConfigError, match=r"phase 'float': call qtrace.set_phase\(prepared, 'train'\)"):
        Schedule(prepared, steps=2, freeze_ranges=0.0).step()
    with pytest.raises(GraphError, match="not a prepared"):
        freeze_ranges(M.ReLU())


def test_cosine_goes_from_start_to_end() -> None:
    assert [cosine(f, 0.0, 2.0) for f in (-1.0, 0.0, 0.5, 1.0, 3.0)] == pytest.approx([0, 0, 1, 2, 2])


# -- oscillations --------------------------------------------------------------------------------------


def test_dampening_is_the_paper_s_loss_and_gradient() -> None:
    prepared = _prepared(bits=3)
    dampening = Dampening(prepared)
    weights = {"conv": prepared.conv.weight, "fc": prepared.fc.weight}
    prepared.qsites.conv_weight.scale._reset(mge.Parameter(prepared.qsites.conv_weight.scale.numpy() * 0.5))
    manager = GradManager().attach([*weights.values(), *scales(prepared)])
    with manager:
        loss = dampening()
        manager.backward(loss)
    total = 0.0
    for name, parameter in weights.items():
        fake = getattr(prepared.qsites, f"{name}_weight")
        w, s = parameter.numpy().astype(np.float64), fake.effective_scale().numpy().astype(np.float64)
        clipped = np.clip(w, fake.scheme.qmin * s, fake.scheme.qmax * s)
        rounded = np.clip(np.rint(w / s), fake.scheme.qmin, fake.scheme.qmax) * s
        total += ((rounded - clipped) ** 2).sum()
        want = 2 * (clipped - rounded) * (clipped == w)
        np.testing.assert_allclose(parameter.grad.numpy(), want, atol=1e-6)
        assert np.abs(want).max() > 0
    assert float(loss.numpy()) == pytest.approx(total, rel=1e-4)
    assert all(p.grad is None or not p.grad.numpy().any() for p in scales(prepared))


def test_dampening_draws_weights_to_their_levels() -> None:
    prepared = _prepared(bits=4)
    dampening = Dampening(prepared)
    before = float(dampening().numpy())
    optimizer = SGD(qtrace.param_groups(prepared, 0.05, range_lr=0.0), lr=0.05)
    for _ in range(20):
        _step(prepared, optimizer, lambda: dampening() * 5.0)
    assert float(dampening().numpy()) < 0.1 * before


def _reference(levels: list[int], threshold: float, m: float) -> tuple[list[float], int | None]:
    """Algorithm 1 for one weight: the frequencies, and the level that it is fixed to."""
    last, direction, frequency, average, seen = levels[0], 0, 0.0, float(levels[0]), []
    for level in levels[1:]:
        sign = int(np.sign(level - last))
        flip = sign != 0 and direction != 0 and sign != direction
        frequency = m * flip + (1 - m) * frequency
        average = m * level + (1 - m) * average
        direction, last = sign or direction, level
        seen.append(frequency)
        if frequency > threshold:
            return seen, int(np.rint(average))
    return seen, None


def test_oscillating_weights_are_counted_and_fixed() -> None:
    prepared = _prepared(fold=True, bits=4)
    fake, weight = prepared.qsites.fc_weight, prepared.fc.weight
    watch = Oscillations(prepared, threshold=0.5, momentum=0.3)
    start = watch.state_dict()["fc_weight/integers"]
    shape = start.shape
    jump, place = np.zeros(shape, np.int32), np.unravel_index(np.argmax(start), shape)
    jump[place] = -1
    levels, frozen_at = [int(start[place])], None
    for turn in range(12):
        levels.append(int(start[place] + jump[place] * (turn % 2 == 0)))
        value = (start + jump * (turn % 2 == 0)) * fake.effective_scale().numpy()
        weight._reset(mge.Parameter(value.astype(np.float32)))
        watch.update()
        state = watch.state_dict()
        seen, level = _reference(levels, 0.5, 0.3)
        assert state["fc_weight/frequency"][place] == pytest.approx(seen[-1], rel=1e-5)
        if level is not None:
            frozen_at = level
            break
    assert frozen_at is not None
    mask = np.zeros(shape, bool)
    mask[place] = True
    np.testing.assert_array_equal(state["fc_weight/frozen"], mask)
    assert watch.share() == watch.frozen == 1 / sum(s.size for k, s in state.items() if k.endswith("frozen"))
    fake.scale._reset(mge.Parameter(fake.scale.numpy() * np.float32(1.1)))
    weight._reset(mge.Parameter(np.full(shape, 0.01, np.float32)))
    watch.update()
    want = np.float32(frozen_at) * fake.effective_scale().numpy()[place[0], 0]
    assert weight.numpy()[place] == want
    np.testing.assert_array_equal(weight.numpy()[~mask], np.float32(0.01))


def test_counting_alone_changes_nothing_and_resumes() -> None:
    prepared = _prepared(bits=2)
    watch = Oscillations(prepared)
    optimizer = SGD(qtrace.param_groups(prepared, 0.2), lr=0.2)
    for _ in range(4):
        _step(prepared, optimizer)
        before = _values([prepared.conv.weight, prepared.fc.weight])
        watch.update()
        assert all(_same(before, [prepared.conv.weight, prepared.fc.weight]))
    assert watch.frozen == 0.0
    again = Oscillations(prepared)
    again.load_state_dict(watch.state_dict())
    _step(prepared, optimizer)
    for other in (watch, again):
        other.update(threshold=0.9)
    one, two = watch.state_dict(), again.state_dict()
    assert all(np.array_equal(one[key], two[key]) for key in one)
    with pytest.raises(ConfigError, match="does not fit this network"):
        again.load_state_dict({k: v for k, v in one.items() if "conv" not in k})


def test_impossible_numbers_are_refused() -> None:
    prepared = _prepared()
    for arguments in ({"threshold": 0.0}, {"threshold": 2}, {"momentum": None}, {"momentum": -0.1}):
        with pytest.raises(ConfigError, match=rf"Oscillations: {next(iter(arguments))} is "):
            Oscillations(prepared, **arguments)
