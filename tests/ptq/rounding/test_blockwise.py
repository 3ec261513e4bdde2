"""AdaRound and block reconstruction: less error than rounding to nearest, in integers that are exported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import megengine as mge
import megengine.functional as F
import megengine.module as M
import numpy as np
import pytest

import qtrace
from qtrace import QConfig
from qtrace.errors import CalibrationError, ConfigError
from qtrace.numerics import dequantize, quantize
from qtrace.preparation.model import read_record
from qtrace.ptq.rounding import blockwise
from qtrace.ptq.rounding import blockwise as learned_rounding
from tests.each import each_of
from tests.nets import left_lines, net, randomize


def _module() -> M.Module:
    module = net(
        lambda self, x: self.b(F.relu(self.a(x))),
        a=M.Conv2d(3, 6, 3, padding=1),
        b=M.Conv2d(6, 4, 3),
    )
    return randomize(module, seed=5)


def _batches(count: int = 2, size: int = 6) -> list[np.ndarray]:
    """Images whose channels and neighbours are alike, as those of real images are."""
    rng = np.random.default_rng(0)
    base = rng.normal(size=(count, 8, 1, size, size)).cumsum(-1).cumsum(-2) / size
    return list((base + 0.2 * rng.normal(size=(count, 8, 3, size, size))).astype(np.float32))


def _calibrated(*ptq: Any, batches: Any = None, module: M.Module | None = None, **config: Any) -> Any:
    data = _batches() if batches is None else batches
    traced = qtrace.trace(module or _module(), data[0][:1], check=False)
    bits = {"weight": {"bits": 3}, "activation": {"bits": 6}}
    prepared = qtrace.prepare(traced, QConfig(backend="generic", **{**bits, **config}, ptq=ptq))
    return qtrace.calibrate(prepared, data, progress=False)


QUICK = {"iterations": 50, "lr": 0.08, "batch": 8}
FEW = {**QUICK, "iterations": 5}


def _report(model: Any) -> dict[str, Any]:
    return read_record(model).ptq[-1]


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", ["adaround", "reconstruct"])
def test_the_error_falls_and_the_integers_are_those_that_convert_writes(name: str) -> None:
    plain, prepared = _calibrated(), _calibrated({name: QUICK})
    report = _report(prepared)
    assert left_lines(report) == []
    assert all(e["after"] > e["before"] + 0.5 for e in report["errors"])
    quantized = qtrace.convert(prepared)
    x = mge.Tensor(_batches()[0])
    np.testing.assert_array_equal(quantized(x).numpy(), prepared(x).numpy())
    turned = 0
    for layer in ("a", "b"):
        weight = getattr(quantized, layer).weight.numpy()
        qparams = getattr(quantized.qsites, f"{layer}_weight").qparams()
        integers = quantize(weight, qparams)
        np.testing.assert_array_equal(dequantize(integers, qparams), weight)  # on the grid, exactly
        floats = getattr(plain, layer).weight.numpy()
        nearest = quantize(floats, qparams)
        assert np.abs(integers - nearest).max() == 1
        exact = floats / qparams.scale.reshape(-1, 1, 1, 1)
        assert np.abs(integers - np.clip(exact, -4, 3)).max() < 1  # up or down, never further
        turned += int(np.sum(integers != nearest))
    lines = [line for line in report["changed"] if "rounded the other way" in line]
    assert sum(int(line.split(": ")[1].split()[0]) for line in lines) == turned


def test_reconstruct_learns_scales_of_activations_unless_told_not_to() -> None:
    options = {"iterations": 20, "lr": 0.2, "batch": 8}
    plain, learned = _calibrated(), _calibrated({"reconstruct": {**options, "scale_lr": 0.01}})
    fixed = _calibrated({"reconstruct": {**options, "scale_lr": 0.0}})
    scales = [float(m.qsites.relu_out.qparams().scale) for m in (plain, learned, fixed)]
    assert scales[0] == scales[2] != scales[1]
    assert scales[1] == pytest.approx(scales[0], rel=0.3)


@pytest.mark.quick(1)
@pytest.mark.parametrize("warm", [True, False])
def test_a_block_starts_from_what_its_layers_learned_alone(warm: bool, monkeypatch: Any) -> None:
    module = net(
        lambda self, x: F.relu(x + self.b(F.relu(self.a(x)))),
        a=M.Conv2d(3, 6, 3, padding=1),
        b=M.Conv2d(6, 3, 1),
    )
    descend, begun = blockwise.learn_block, []

    def record(run: Any, *args: Any) -> None:
        begun.append((run.block.name, [state.rounding.up() for state in run.layers]))
        descend(run, *args)

    monkeypatch.setattr(blockwise, "learn_block", record)
    report = _report(_calibrated({"reconstruct": {**QUICK, "warm": warm}}, module=randomize(module, seed=5)))
    layers = ["relu_out", "b_out"] if warm else []
    assert [name for name, _ in begun] == [*layers, report["errors"][0]["site"]]
    *_, (_, (first, second)) = begun
    for up in (first, second):
        assert (set(np.unique(up.round(5))) == {np.float32(0.2), np.float32(0.8)}) is warm
    (error,) = report["errors"]
    assert error["after"] > error["before"] + 0.5
    assert len([line for line in report["changed"] if "rounded the other way" in line]) == 2


def test_a_run_can_be_repeated() -> None:
    one, two = (_calibrated({"reconstruct": FEW}) for _ in range(2))
    for (name, a), (_, b) in zip(one.named_tensors(), two.named_tensors(), strict=True):
        np.testing.assert_array_equal(a.numpy(), b.numpy(), err_msg=name)
    assert _report(one) == _report(two)


def test_batches_of_several_sizes_are_taken_one_at_a_time() -> None:
    module = net(lambda self, x: F.adaptive_avg_pool2d(F.relu(self.a(x)), 1), a=M.Conv2d(3, 6, 3, padding=1))
    batches = [_batches(1, 6)[0], _batches(1, 7)[0][:5]]
    prepared = _calibrated({"adaround": {**QUICK, "iterations": 30}}, batches=batches, module=module)
    (error,) = _report(prepared)["errors"]
    assert error["after"] > error["before"]


def _state(model: Any) -> dict[str, np.ndarray]:
    return {n: t.numpy().copy() for n, t in model.named_tensors()}


def test_a_loss_that_is_no_number_names_the_block_and_changes_nothing() -> None:
    data, module = _batches(), _module()
    module.b.weight._reset(mge.Parameter(module.b.weight.numpy() * 1e22))  # squares beyond float32
    traced = qtrace.trace(module, data[0][:1], check=False)
    config = QConfig(backend="generic", observers={"activation": "minmax"}, ptq=[{"reconstruct": FEW}])
    prepared = qtrace.prepare(traced, config)
    before = _state(prepared)
    level = mge.config.async_level
    with pytest.raises(CalibrationError, match=r"the loss of b_out is (inf|nan) in step 1: the model"):
        qtrace.calibrate(prepared, data, progress=False)
    assert all(np.array_equal(v, before[n]) for n, v in _state(prepared).items())
    assert mge.config.async_level == level


def _once(files: int) -> Any:
    """Learning, for one block only: the first one is in a file."""
    assert files == 1
    descend, calls = blockwise.learn_block, []

    def call(*args: Any) -> None:
        calls.append(args)
        assert len(calls) == 1
        descend(*args)

    return call


def test_an_interruption_in_the_second_block_is_undone_and_resumed(monkeypatch: Any, tmp_path: Path) -> None:
    data, calls = _batches(), []
    learn = learned_rounding.learn

    def second(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return learn(*args)

    monkeypatch.setattr(learned_rounding, "learn", second)
    traced = qtrace.trace(_module(), data[0][:1], check=False)
    prepared = qtrace.prepare(traced, QConfig(backend="generic", ptq=[{"adaround": FEW}]))
    before = _state(prepared)
    with pytest.raises(KeyboardInterrupt):
        qtrace.calibrate(prepared, data, progress=False, state=tmp_path)
    assert len(calls) == 2
    assert all(np.array_equal(v, before[n]) for n, v in _state(prepared).items())
    monkeypatch.undo()
    monkeypatch.setattr(blockwise, "learn_block", _once(len(list(tmp_path.iterdir()))))
    qtrace.calibrate(prepared, data, progress=False, state=tmp_path)
    monkeypatch.undo()
    again = _calibrated({"adaround": FEW}, weight={"bits": 8}, activation={"bits": 8})
    assert all(np.array_equal(v, _state(again)[n]) for n, v in _state(prepared).items())


def test_what_cannot_be_learned_is_left_with_the_reason() -> None:
    shared = net(lambda self, x: self.b(F.relu(self.b(self.a(x)))), a=M.Conv2d(3, 3, 1), b=M.Conv2d(3, 3, 1))
    left = left_lines(_report(_calibrated({"adaround": FEW}, module=shared)))
    assert sum("its weight b.weight is shared with another call" in line for line in left) == 2
    rules = [{"match": {"op": "conv2d"}, "quantize": False}]
    doubled = net(lambda self, x: self.a(x + x), a=M.Conv2d(3, 3, 1))
    report = _report(_calibrated({"adaround": FEW}, module=doubled, rules=rules))
    assert (report["changed"], left_lines(report)) == ([], ["no layer has quantized weights"])


def test_kept_norms_are_left() -> None:
    module = net(lambda self, x: F.relu(self.bn(self.a(x))), a=M.Conv2d(3, 6, 3), bn=M.BatchNorm2d(6))
    config = {"qat": {"bn": {"fold": False}}}
    report = _report(_calibrated("fuse_bn", {"adaround": FEW}, module=module, **config))
    assert report["changed"] == []
    assert any("its BatchNorm is kept in training" in line for line in left_lines(report))


@each_of(
    ("ptq", "message"),
    [
        (
            ["adaround", "reconstruct"],
            "lists adaround and reconstruct: keep one, for roundings are chosen once",
        ),
        (["bias_correction", "adaround"], "put adaround before bias_correction"),
        (["adaround", "output_cosine"], "put output_cosine before adaround in ptq, for roundings are chosen"),
        ([{"adaround": {"beta": [2, 20]}}], "adaround.beta: beta is two numbers, from high to low"),
        ([{"reconstruct": {"drop": 1.0}}], "reconstruct.drop must be less than 1"),
        ([{"adaround": {"drop": 0.5}}], "unknown key 'drop' in adaround"),
    ],
)
def test_options_and_order_are_checked(ptq: list[Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace("[", r"\[")):
        qtrace.prepare(qtrace.trace(_module(), _batches()[0][:1], check=False), QConfig(ptq=ptq))
