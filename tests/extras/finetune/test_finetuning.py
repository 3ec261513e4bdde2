"""finetune: it learns without labels, freezes by drift, resumes bit for bit, and leaves no damage."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import megengine.functional as F
import megengine.module as M
import numpy as np
import pytest

import qtrace
from qtrace.errors import CalibrationError, ConfigError, GraphError, TrainingError
from qtrace.extras.finetune import FinetuneSettings, twins
from qtrace.extras.finetune.data import hold_back, read
from qtrace.extras.finetune.training import Trainer
from qtrace.extras.finetune.twins import MovingTensors, size_of
from qtrace.graph.types import TracedModule
from qtrace.preparation.model import fake_quants, followers, graph_hash, read_record, write_record
from tests.each import each_of
from tests.nets import net

W3 = {"backend": "generic", "fakequant": "lsq", "weight": {"bits": 3}, "activation": {"bits": 4}}
QUICK = FinetuneSettings(
    steps=60,
    batch_size=16,
    lr=0.02,
    range_average=0.5,
    freeze_below=1e-3,
    most_blocks=2,
    jit=True,
    evaluate_every=60,
)
FEW = replace(QUICK, steps=3, jit=False)


def _data(count: int = 4, seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.normal(size=(16, 3, 6, 6)).astype(np.float32) for _ in range(count)]


def _traced() -> TracedModule:
    def forward(self: Any, x: Any) -> Any:
        x = F.relu(self.a(x))
        x = F.relu(x + self.b(x))
        return {"boxes": self.boxes(x), "classes": self.fc(F.mean(x, (2, 3)))}

    module = net(
        forward,
        a=M.Conv2d(3, 6, 3, padding=1),
        b=M.Conv2d(6, 6, 1),
        boxes=M.Conv2d(6, 2, 1),
        fc=M.Linear(6, 4),
    )
    return qtrace.trace(module, _data(1)[0], check=False)


@pytest.fixture(scope="module")
def traced() -> TracedModule:
    return _traced()


def _prepared(traced: TracedModule, config: Any = W3) -> TracedModule:
    return qtrace.calibrate(qtrace.prepare(traced, config), _data(2), progress=False)


@pytest.fixture(scope="module")
def done(traced: TracedModule) -> Any:
    """A trained module and its report."""
    prepared = _prepared(traced)
    return prepared, qtrace.finetune(prepared, _data(), QUICK, evaluation=_data(2, 9), progress=False)


def test_loss_falls_and_every_output_gains_on_data_not_seen(done: Any) -> None:
    prepared, report = done
    assert np.mean(report.loss[-10:]) < 0.8 * np.mean(report.loss[:3])
    assert report.improved
    assert [o.shape for o in report.outputs] == [(2, 6, 6), (4,)]
    # The report's figures against a measurement of our own.
    twin = _traced()
    want = {
        k: np.concatenate([twin(qtrace_tensor(x))[k].numpy() for x in _data(2, 9)])
        for k in ("boxes", "classes")
    }
    have = {k: np.concatenate([prepared(qtrace_tensor(x))[k].numpy() for x in _data(2, 9)]) for k in want}
    for output, key in zip(report.outputs, want, strict=True):
        noise = np.sum((have[key] - want[key]) ** 2, dtype=np.float64)
        assert output.after == pytest.approx(
            10 * np.log10(np.sum(want[key] ** 2, dtype=np.float64) / noise), abs=0.01
        )
        assert output.after > output.before + 0.5
    assert report.outputs[1].agreement_after == np.mean(
        want["classes"].argmax(1) == have["classes"].argmax(1)
    )
    assert report.outputs[0].agreement_before is None


def qtrace_tensor(array: np.ndarray) -> Any:
    import megengine as mge

    return mge.Tensor(array)


def test_block_outputs_are_found_by_structure(done: Any) -> None:
    _, report = done
    assert len(report.blocks) == 2
    assert np.mean(report.parts["blocks"]) > 0


def test_ranges_freeze_when_they_hardly_move(done: Any) -> None:
    _, report = done
    assert report.frozen
    assert all(f.sort == "range" and f.drift < QUICK.freeze_below for f in report.frozen)
    assert len({f.step for f in report.frozen}) > 1  # each by itself, not at a fixed step
    assert len(report.frozen) + report.moving == report.ranges


def test_report_is_data_and_text(done: Any) -> None:
    _, report = done
    data = json.loads(json.dumps(report.to_dict()))
    assert data["samples"] == 64
    assert data["outputs"][0]["before"] == report.outputs[0].before
    text = report.table()
    assert "SQNR before" in text
    assert "frozen after step" in text


def test_module_is_left_in_its_phase_and_converts(done: Any) -> None:
    prepared, _ = done
    assert {m.phase for m in (*fake_quants(prepared), *followers(prepared))} == {"quantize"}
    x = qtrace_tensor(_data(1, 5)[0])
    np.testing.assert_allclose(
        qtrace.convert(prepared)(x)["boxes"].numpy(), prepared(x)["boxes"].numpy(), atol=1e-5
    )


class _Stopped(Exception):
    pass


@pytest.mark.parametrize("jit", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_interrupted_run_resumes_to_the_same_bits(
    traced: TracedModule, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jit: bool
) -> None:
    config = {**W3, "qat": {"bn": {"fold": False}}}
    settings = replace(QUICK, steps=4, checkpoint_every=2, jit=jit, weight_average=0.5)
    first, second = _prepared(traced, config), _prepared(traced, config)
    before = graph_hash(second)
    whole = qtrace.finetune(first, _data(), settings, progress=False)
    step = Trainer.compute

    def stops(self: Any, number: int) -> Any:
        if number == 3:
            raise _Stopped
        return step(self, number)

    file = tmp_path / "state.npz"
    with monkeypatch.context() as patched:
        patched.setattr(Trainer, "compute", stops)
        with pytest.raises(_Stopped):
            qtrace.finetune(second, _data(), settings, checkpoint=file, progress=False)
    assert graph_hash(second) == before
    assert [p.name for p in tmp_path.iterdir()] == ["state.npz"]
    with pytest.raises(TrainingError, match="exists: go on with resume=True"):
        qtrace.finetune(second, _data(), settings, checkpoint=file, progress=False)
    other = replace(settings, lr=0.5)
    with pytest.raises(TrainingError, match="belongs to another fine-tuning"):
        qtrace.finetune(second, _data(), other, checkpoint=file, resume=True, progress=False)
    resumed = qtrace.finetune(second, _data(), settings, checkpoint=file, resume=True, progress=False)
    assert resumed.resumed == 2
    assert resumed.loss == whole.loss
    assert graph_hash(second) == graph_hash(first) != before
    assert not file.exists()


def test_damaged_checkpoint_is_reported(traced: TracedModule, tmp_path: Path) -> None:
    file = tmp_path / "state.npz"
    file.write_bytes(b"PK\x03\x04 not whole")
    with pytest.raises(TrainingError, match="is damaged"):
        qtrace.finetune(_prepared(traced), _data(), FEW, checkpoint=file, resume=True, progress=False)


def test_loss_that_is_not_finite_stops_with_its_site_and_restores(monkeypatch: pytest.MonkeyPatch) -> None:
    module = net(lambda self, x: F.log(F.mean(self.a(x), (2, 3))), a=M.Conv2d(3, 2, 1))
    module.a.bias._reset(type(module.a.bias)(np.full((1, 2, 1, 1), 5.0, np.float32)))
    prepared = _prepared(qtrace.trace(module, _data(1)[0], check=False))
    before = graph_hash(prepared)
    step = Trainer.compute

    def spoils(self: Any, number: int) -> Any:
        if number == 2:  # as a rate that is too high would
            bias = self.model.a.bias
            value = self.learner.steppers[[id(p) for p in self.learner.parameters].index(id(bias))].value
            value *= -1
            bias._reset(type(bias)(value))
        return step(self, number)

    monkeypatch.setattr(Trainer, "compute", spoils)
    told = r"the loss is nan in step 3: .* quantized graph that is not finite is log_out. The model is left"
    with pytest.raises(TrainingError, match=told):
        qtrace.finetune(prepared, _data(), FEW, progress=False)
    assert graph_hash(prepared) == before


def test_data_that_is_not_finite_is_reported(traced: TracedModule) -> None:
    bad = _data()
    bad[0][:] = np.inf
    with pytest.raises(CalibrationError, match="the data: batch 0 holds NaN or infinite values"):
        qtrace.finetune(_prepared(traced), bad, FEW, progress=False)


def _fixed_size() -> TracedModule:
    """A calibrated network that takes images of 6 x 6 only."""
    module = net(
        lambda self, x: self.fc(F.flatten(F.relu(self.a(x)), 1)), a=M.Conv2d(3, 2, 1), fc=M.Linear(72, 3)
    )
    return _prepared(qtrace.trace(module, _data(1)[0], check=False))


def test_a_batch_that_does_not_fit_is_named_by_its_own_number() -> None:
    other = np.zeros((16, 3, 7, 7), np.float32)
    sentence = r"batch 2 gives 1 input of shape \(16, 3, 7, 7\), which does not fit the model"
    with pytest.raises(CalibrationError, match=sentence):
        qtrace.finetune(_fixed_size(), [*_data(2), other], replace(FEW, holdout=0.0), progress=False)
    with pytest.raises(CalibrationError, match=sentence):
        qtrace.finetune(_fixed_size(), _data(2), FEW, evaluation=[*_data(2), other], progress=False)


@pytest.mark.parametrize("name", ["_error", "_arrays"])
def test_a_fault_in_the_loss_surfaces_as_itself(
    name: str, traced: TracedModule, monkeypatch: pytest.MonkeyPatch
) -> None:
    def faulty(*_: Any) -> Any:
        raise ValueError("a fault")

    monkeypatch.setattr(twins, name, faulty)
    with pytest.raises(ValueError, match="^a fault$"):
        qtrace.finetune(_prepared(traced), _data(2), replace(FEW, engine="megengine"), progress=False)


def test_kept_batchnorm_trains_and_its_statistics_freeze() -> None:
    module = net(
        lambda self, x: self.fc(F.mean(F.relu(self.bn(self.conv(x))), (2, 3))),
        conv=M.Conv2d(3, 6, 3, padding=1),
        bn=M.BatchNorm2d(6),
        fc=M.Linear(6, 4),
    )
    config = {**W3, "qat": {"bn": {"fold": False}}}
    prepared = _prepared(qtrace.trace(module, _data(1)[0], check=False), config)
    before = prepared.bn.running_mean.numpy().copy()
    settings = replace(QUICK, steps=20, freeze_bn_below=0.05)
    report = qtrace.finetune(prepared, _data(), settings, progress=False)
    assert [f.name for f in report.frozen if f.sort == "statistics"] == ["bn"]
    assert not np.array_equal(before, prepared.bn.running_mean.numpy())
    assert report.measured_on == "held back"
    assert report.samples + report.measured == 64


@pytest.mark.quick(1)
@pytest.mark.parametrize("placement", ["fastest", "balanced"])
def test_an_activation_in_pieces_has_no_block_output_that_the_teacher_lacks(placement: str) -> None:
    module = net(
        lambda self, x: self.c(F.hswish(self.b(F.hswish(self.a(x))))),
        a=M.Conv2d(3, 32, 3, padding=1),
        b=M.Conv2d(32, 32, 3, padding=1),
        c=M.Conv2d(32, 4, 1),
    )
    images = [np.random.default_rng(i).normal(size=(4, 3, 32, 32)).astype(np.float32) for i in range(2)]
    traced = qtrace.trace(module, images[0], check=False)
    prepared = qtrace.prepare(traced, {"placement": placement}, samples=images)
    qtrace.calibrate(prepared, images, progress=False)
    pieces = {node.name for node in prepared.graph.nodes()} & {"relu6_out", "relu6_out_1"}
    assert pieces  # the network as traced has the whole
    settings = replace(FEW, steps=1, most_blocks=16)
    report = qtrace.finetune(prepared, images, settings, teacher=traced, progress=False)
    assert report.blocks
    # The teacher's activations are written in the same pieces, so that these are blocks, too.
    settings = replace(settings, blocks=["relu6_out"])
    report = qtrace.finetune(prepared, images, settings, teacher=traced, progress=False)
    assert tuple(report.blocks) == ("relu6_out",)


def test_the_statistics_of_a_layer_in_float_stay_those_of_the_teacher() -> None:
    module = net(
        lambda self, x: self.fc(F.mean(F.relu(self.bn(F.abs(self.conv(x)))), (2, 3))),
        conv=M.Conv2d(3, 6, 3, padding=1),
        bn=M.BatchNorm2d(6),
        fc=M.Linear(6, 4),
    )
    far = np.full(module.bn.running_mean.shape, 0.5, np.float32)  # from the mean of a batch
    module.bn.running_mean._reset(type(module.bn.running_mean)(far))
    config = {**W3, "rules": [{"match": {"op": "conv2d"}, "quantize": False}]}
    prepared = _prepared(qtrace.trace(module, _data(1)[0], check=False), config)
    before = [t.numpy().copy() for t in (prepared.bn.running_mean, prepared.bn.running_var)]
    report = qtrace.finetune(prepared, _data(), replace(QUICK, steps=20), progress=False)
    assert report.best_step > 0
    for tensor, value in zip((prepared.bn.running_mean, prepared.bn.running_var), before, strict=True):
        np.testing.assert_array_equal(tensor.numpy(), value)


def test_fixed_ranges_stay_and_weights_learn(traced: TracedModule) -> None:
    prepared = _prepared(traced, {**W3, "fakequant": "fixed"})
    before = [fq.qparams().scale.copy() for fq in fake_quants(prepared)]
    weight = prepared.a.weight.numpy().copy()
    report = qtrace.finetune(prepared, _data(), FEW, progress=False)
    assert report.ranges == 0
    assert "ranges stay as calibrated" in report.table()
    assert not np.array_equal(weight, prepared.a.weight.numpy())
    for fq, scale in zip(fake_quants(prepared), before, strict=True):
        np.testing.assert_array_equal(fq.qparams().scale, scale)


def test_weights_that_an_algorithm_changed_need_the_float_network(traced: TracedModule) -> None:
    config = {**W3, "ptq": ["bias_correction"]}
    prepared = _prepared(traced, config)
    with pytest.raises(TrainingError, match="bias_correction changed the weights.*teacher"):
        qtrace.finetune(prepared, _data(), QUICK, progress=False)
    report = qtrace.finetune(prepared, _data(), FEW, teacher=traced, progress=False)
    assert len(report.loss) == 3
    assert len(report.blocks) == 2


@pytest.mark.parametrize("named", [{"ptq": ["bad_luck:Class"]}, {"fakequant": "bad_luck:Class"}])
def test_a_model_file_cannot_have_a_module_imported(
    named: dict[str, Any], traced: TracedModule, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bad_luck.py").write_text("raise SystemExit('it ran')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    prepared = _prepared(traced)
    record = read_record(prepared)
    write_record(prepared, replace(record, qconfig={**record.qconfig, **named}))
    teacher = traced if "fakequant" in named else None
    with pytest.raises(ConfigError, match="'bad_luck:Class' of its own: import bad_luck first"):
        qtrace.finetune(prepared, _data(), FEW, teacher=teacher, progress=False)


def test_what_cannot_be_trained_is_refused_in_a_sentence(traced: TracedModule) -> None:
    prepared = _prepared(traced)
    with pytest.raises(GraphError, match="is converted, not prepared"):
        qtrace.finetune(qtrace.convert(prepared), _data(), QUICK, progress=False)
    with pytest.raises(GraphError, match="is not a prepared module"):
        qtrace.finetune(traced, _data(), QUICK, progress=False)
    with pytest.raises(CalibrationError, match="never calibrated"):
        qtrace.finetune(qtrace.prepare(traced, W3), _data(), QUICK, progress=False)
    with pytest.raises(CalibrationError, match="the data holds no batches"):
        qtrace.finetune(prepared, [], QUICK, progress=False)
    with pytest.raises(CalibrationError, match="batch 0 gives"):
        qtrace.finetune(prepared, [np.zeros((4, 5, 6, 6), np.float32)], QUICK, progress=False)
    with pytest.raises(ConfigError, match="no float node .* fits blocks: 'nowhere'"):
        qtrace.finetune(prepared, _data(), replace(QUICK, blocks=("nowhere",)), progress=False)


@each_of(
    "wrong",
    [{"steps": 0}, {"lr": 0.0}, {"warmup": 1.0}, {"clip": float("nan")}, {"blocks": "a"}, {"range_lr": -1.0}],
)
def test_settings_out_of_bounds_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"finetune: {next(iter(wrong))} is"):
        FinetuneSettings(**wrong)


def test_rates_warm_up_and_fall_to_zero() -> None:
    settings = FinetuneSettings(steps=100, warmup=0.1)
    factors = [settings.factor(step) for step in range(100)]
    assert factors[0] == pytest.approx(1 / 11)
    assert factors[10] == 1.0
    assert np.all(np.diff(factors[:11]) > 0)
    assert np.all(np.diff(factors[10:]) < 0)
    assert factors[-1] < 1e-3
    assert [FinetuneSettings(steps=30, warmup=0.05).factor(step) for step in range(3)] == [1 / 3, 2 / 3, 1.0]


def test_each_epoch_shows_every_sample_once(traced: TracedModule) -> None:
    data = [
        np.full((5, 3, 6, 6), 10 * n, np.float32) + np.arange(5, dtype=np.float32)[:, None, None, None]
        for n in range(2)
    ]
    samples = read(data, traced, 2**20, "the data")
    drawn = np.concatenate([samples.draw(step, 4, 0).leaves[0][:, 0, 0, 0] for step in range(5)])
    assert sorted(drawn[:10]) == sorted(drawn[10:]) == sorted({*range(5), *range(10, 15)})
    assert list(drawn[:10]) != list(drawn[10:])
    learned, unseen = hold_back(samples, 0.25, 0)
    assert unseen is not None
    assert (learned.count, unseen.count) == (7, 3)
    assert not {*learned.batches[0].leaves[0][:, 0, 0, 0]} & {*unseen.batches[0].leaves[0][:, 0, 0, 0]}


def test_memory_bounds_the_data(traced: TracedModule) -> None:
    data = _data(3)
    samples = read(data, traced, 2 * data[0].nbytes, "the data")
    assert (samples.count, samples.left_out) == (32, 1)


def test_drift_is_the_relative_change_of_the_average() -> None:
    tensor = qtrace_tensor(np.array([2.0, 4.0], np.float32))
    watched = MovingTensors("x", "range", [tensor], [np.array([2.0, 4.0], np.float32)], 0.02)
    assert not watched.check(1, 10)
    tensor._reset(qtrace_tensor(np.array([3.0, 6.0], np.float32)))
    watched.move(0.5)
    assert not watched.check(11, 10)  # a quarter in ten steps
    tensor._reset(qtrace_tensor(np.array([2.5, 5.0], np.float32)))
    watched.move(0.9)
    assert watched.check(21, 10)
    assert watched.frozen is not None
    assert watched.frozen.drift == pytest.approx(0.0, abs=1e-6)
    np.testing.assert_allclose(tensor.numpy(), [2.5, 5.0])


def test_sizes_are_by_output_channel() -> None:
    weight = np.ones((2, 3, 1, 1), np.float32) * np.array([2.0, 0.5], np.float32)[:, None, None, None]
    np.testing.assert_allclose(size_of(weight).ravel(), [2.0, 0.5])
    np.testing.assert_allclose(size_of(np.zeros(3, np.float32)), 0.01)
    assert size_of(np.ones((2, 4, 3, 1, 1), np.float32)).shape == (2, 4, 1, 1, 1)
