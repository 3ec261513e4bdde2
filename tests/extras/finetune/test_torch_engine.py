"""The engine torch: one step equals MegEngine's, whole runs agree, checkpoints are shared."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import megengine as mge
import megengine.functional as F
import megengine.module as M
import numpy as np
import pytest

import qtrace
from qtrace.data.batches import evaluating
from qtrace.errors import TrainingError
from qtrace.extras.finetune import FinetuneSettings
from qtrace.extras.finetune.data import Batch
from qtrace.extras.finetune.evaluation import choose_compared
from qtrace.extras.finetune.training import Trainer
from qtrace.extras.finetune.twins import MegEngineTwins
from qtrace.graph import functions
from qtrace.graph.kernels import synchronous
from qtrace.graph.types import TracedModule
from qtrace.inspection.twin import float_twin
from qtrace.preparation.model import QuantizedModel
from qtrace.preparation.phases import in_phase
from tests.nets import net

pytest.importorskip("torch", reason="the engine torch needs the extra torch")

RUN = FinetuneSettings(steps=4, batch_size=8, most_blocks=2, jit=False, evaluate_every=2)


def _data(count: int = 2, seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.normal(size=(8, 3, 8, 8)).astype(np.float32) for _ in range(count)]


def _forward(self: Any, x: Any) -> Any:
    x = F.relu(self.a(x))
    x = F.max_pool2d(F.relu(x + self.b(x)), 2)
    return {"boxes": self.boxes(x), "classes": self.fc(F.mean(x, (2, 3)))}


def _children() -> dict[str, M.Module]:
    return {
        "a": M.Conv2d(3, 6, 3, padding=1),
        "b": M.Conv2d(6, 6, 3, padding=1, groups=2),
        "boxes": M.Conv2d(6, 2, 1),
        "fc": M.Linear(6, 4),
    }


def _prepared(config: Any, forward: Callable[..., Any] = _forward, **children: M.Module) -> TracedModule:
    module = net(forward, **(children or _children()))
    traced = qtrace.trace(module, _data(1)[0], check=False)
    return qtrace.calibrate(qtrace.prepare(traced, config), _data(), progress=False)


def _config(**more: Any) -> dict[str, Any]:
    return {
        "backend": "generic",
        "fakequant": "lsq",
        "weight": {"bits": 8},
        "activation": {"bits": 8},
        **more,
    }


def _step(prepared: TracedModule, engine: str, blocks: tuple[str, ...] = ()) -> tuple[list[Any], list[str]]:
    """Loss, parts and gradients of a step, and the names of the parameters."""
    from qtrace.extras.finetune.torch_twins import TorchTwins

    teacher = float_twin(QuantizedModel(prepared, "prepared"), None)
    batch, form = Batch(0, _data(1, 5)), ((0,), {})
    named = [(name, p) for name, p in prepared.named_parameters() if p.size]
    chosen: Any = MegEngineTwins(prepared, teacher, form, blocks, jit=False)
    if engine == "torch":
        chosen = TorchTwins(prepared, teacher, form, blocks)
    with evaluating(prepared), in_phase(prepared, "train"), synchronous():
        compared = choose_compared(chosen, blocks, [batch])
        for module in prepared.modules():
            if isinstance(module, M.BatchNorm2d):
                module.training = True
        results = chosen.gradients(batch, compared, RUN, [p for _, p in named], {})
    return results, [name for name, _ in named]


def _check_step(prepared: TracedModule, tolerance: float = 2e-3) -> None:
    statistics = {name: t.numpy().copy() for name, t in prepared.named_buffers()}
    want, names = _step(prepared, "megengine")
    moved = {name: t.numpy().copy() for name, t in prepared.named_buffers()}
    for name, tensor in prepared.named_buffers():
        tensor._reset(mge.Tensor(statistics[name]))
    have, _ = _step(prepared, "torch")
    for name, tensor in prepared.named_buffers():
        np.testing.assert_allclose(tensor.numpy(), moved[name], rtol=1e-4, atol=1e-6, err_msg=name)
    assert have[0] == pytest.approx(want[0], rel=1e-3)
    assert any(np.abs(g).max() > 0 for g in want[4:] if g is not None)
    smallest = 1e-5 * max(float(np.abs(g).max()) for g in want[4:] if g is not None)  # sums that are 0
    for name, a, b in zip(names, want[4:], have[4:], strict=True):
        a, b = (np.zeros(1) if v is None else v for v in (a, b))
        largest = max(float(np.abs(a).max()), smallest)
        assert float(np.abs(a - b).max()) <= tolerance * largest, (name, a, b)


SYMMETRIC = {"bits": 8, "symmetric": True}
KINDS: dict[str, dict[str, Any]] = {
    "fixed": _config(fakequant="fixed"),
    "lsq": _config(),
    "lsq_plus": _config(fakequant="lsq_plus"),
    "learned_range": _config(fakequant="learned_range"),
    "pact": _config(fakequant="pact"),
    "dorefa": _config(fakequant="dorefa"),
    "tqt": _config(
        fakequant="tqt",
        weight={"bits": 8, "power_of_two": True},
        activation={"bits": 8, "power_of_two": True},
    ),
    "lsq, ties away": _config(activation={"bits": 8, "rounding": "half_away"}),
    "lsq, ties up": _config(activation={"bits": 8, "rounding": "half_up"}),
    "lsq, 4 bits": _config(weight={"bits": 4}, activation={"bits": 8}),
}


def test_column_groups_weigh_alike_in_both_engines() -> None:
    def forward(self: Any, x: Any) -> Any:
        y = F.relu(self.a(x))
        return F.concat([self.boxes(y) * 1000, self.scores(y)], axis=1)

    layers = {"a": M.Conv2d(3, 6, 1), "boxes": M.Conv2d(6, 2, 1), "scores": M.Conv2d(6, 3, 1)}
    _check_step(_prepared(_config(), forward, **layers))


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_equals_that_of_megengine(kind: str) -> None:
    # A value within the last place of a boundary rounds to either side, and a step of 4 bits is a large one.
    _check_step(_prepared(KINDS[kind]), tolerance=1e-2 if "4 bits" in kind else 2e-3)


def _folding(**qat: Any) -> TracedModule:
    def forward(self: Any, x: Any) -> Any:
        x = F.relu(self.bn(self.conv(x)))
        return self.fc(F.mean(F.relu6(self.other(self.up(x))), (2, 3)))

    children = {
        "conv": M.Conv2d(3, 6, 3, padding=1),
        "bn": M.BatchNorm2d(6),
        "up": M.ConvTranspose2d(6, 6, 2, stride=2, groups=2),
        "other": M.BatchNorm2d(6),
        "fc": M.Linear(6, 4),
    }
    return _prepared(_config(qat=qat), forward, **children)


def test_a_batchnorm_that_trains_is_computed_and_moves_its_statistics() -> None:
    prepared = _folding(bn={"fold": False})
    before = {name: t.numpy().copy() for name, t in prepared.named_buffers() if "running" in name}
    _check_step(prepared)
    after = dict(prepared.named_buffers())
    assert len(before) == 4
    assert not any(np.array_equal(after[name].numpy(), value) for name, value in before.items())


def test_an_unfolded_batchnorm_is_folded_in_evaluation_as_by_megengine() -> None:
    from qtrace.extras.torch.learning.engine import TorchGraph

    prepared, x = _folding(bn={"fold": False}), mge.Tensor(_data(1, 5)[0])
    with evaluating(prepared), in_phase(prepared, "quantize"):
        (have,) = TorchGraph(prepared).call((x,), {})
        want = prepared(x).numpy()
    step = prepared.qsites.linear_out.qparams().scale if hasattr(prepared.qsites, "linear_out") else 0.0
    assert np.abs(have.numpy() - want).max() <= 1e-5 * np.abs(want).max() + step


def _activations(self: Any, x: Any) -> Any:
    parts = (F.silu(x), F.hswish(x), F.hsigmoid(x), F.leaky_relu(x, 0.2), F.gelu(x), F.tanh(x), F.sigmoid(x))
    more = (F.clip(x, -0.5, 0.5), F.abs(x), -x, F.softplus(x), F.exp(x * 0.1), functions.mish(x), 1.0 - x)
    others = (functions.hard_sigmoid(x), functions.erf(x), functions.gelu_tanh(x), F.maximum(x, 0.1), x / 2.0)
    return self.conv(F.concat([*parts, *more, *others], axis=1))


def _movements(self: Any, x: Any) -> Any:
    y = F.transpose(F.reshape(x, (x.shape[0], 3, 4, -1)), (0, 1, 3, 2)).reshape(x.shape)
    y = F.nn.pad(y, ((0, 0), (0, 0), (1, 1), (2, 2)))[:, :, 1:-1, 2:-2]
    left, right = F.split(F.tile(F.repeat(y, 2, 2), (1, 1, 1, 2))[:, :, ::2, :8] + x, 2, axis=3)
    z = F.vision.interpolate(F.concat([right, left], axis=3), scale_factor=2, mode="nearest")
    z = F.vision.interpolate(z, size=(8, 8), mode="bilinear", align_corners=False)
    z = F.avg_pool2d(z, 3, 1, 1) + F.adaptive_avg_pool2d(z, (1, 1)) + F.max(z, axis=1, keepdims=True)
    return self.conv(F.squeeze(F.expand_dims(z, 1), 1))


def _norms(self: Any, x: Any) -> Any:
    y = self.layer(x) + self.group(x)
    scores = F.softmax(F.matmul(F.flatten(y, 2), F.flatten(x, 2), transpose_b=True), axis=-1)
    return self.conv(F.reshape(F.matmul(scores, F.flatten(x, 2)), (-1, 3, 8, 8)))


def _more_ops(self: Any, x: Any) -> Any:
    y = functions.space_to_depth(functions.channel_shuffle(F.nn.prelu(x, self.slope), 3), 2)
    y = F.pixel_shuffle(F.stack([y, y * 2.0, y, y - 1.0], axis=2).reshape(y.shape[0], 48, 4, 4), 2)
    y = F.nn.pad(
        functions.scale_and_shift(y, self.gain, self.shift), ((0, 0), (0, 0), (1, 1), (1, 1)), "reflect"
    )
    y = functions.rms_norm(F.where(y > 0.0, y, y * 0.5), axis=1) + F.broadcast_to(self.gain, y.shape)
    y = F.adaptive_max_pool2d(self.instance(y), (3, 3)) + F.min(y, axis=(2, 3), keepdims=True)
    return {"sums": F.sum(y, axis=1), "classes": F.logsoftmax(self.conv(y).mean((2, 3)), 1)}


def _more_children() -> dict[str, Any]:
    rng = np.random.default_rng(1)
    tensors = {name: mge.Parameter(rng.uniform(0.2, 1, (1, 12, 1, 1))) for name in ("gain", "shift")}
    return {
        **tensors,
        "slope": mge.Parameter(rng.uniform(0.1, 0.5, (1, 3, 1, 1)).astype(np.float32)),
        "instance": M.InstanceNorm(12),
        "conv": M.Conv2d(12, 4, 1),
    }


@pytest.mark.parametrize(
    ("forward", "children"),
    [
        (_activations, lambda: {"conv": M.Conv2d(57, 2, 1)}),
        (_more_ops, _more_children),
        (_movements, lambda: {"conv": M.Conv2d(3, 2, 1)}),
        (
            _norms,
            lambda: {"layer": M.LayerNorm((8, 8)), "group": M.GroupNorm(3, 3), "conv": M.Conv2d(3, 2, 1)},
        ),
    ],
)
def test_ops_give_the_values_and_gradients_of_megengine(forward: Any, children: Any) -> None:
    _check_step(_prepared(_config(), forward, **children()), tolerance=5e-3)


def _run(engine: str, **more: Any) -> tuple[TracedModule, Any]:
    prepared = _prepared(_config())
    settings = replace(RUN, engine=engine)
    return prepared, qtrace.finetune(prepared, _data(4), settings, progress=False, **more)


def test_a_run_ends_with_the_parameters_and_losses_of_megengine() -> None:
    (ours, report), (theirs, expected) = _run("auto"), _run("megengine")
    assert (report.engine, expected.engine) == ("torch", "megengine")
    assert "engine: torch, torch has a form of every op" in report.table()
    np.testing.assert_allclose(report.loss, expected.loss, rtol=0.02)
    assert report.best_step == expected.best_step > 0
    start = dict(_prepared(_config()).named_parameters())
    for (name, a), (_, b) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
        moved = np.abs(b.numpy() - start[name].numpy()).max()
        assert np.abs(a.numpy() - b.numpy()).mean() <= 0.1 * moved + 1e-7, name


class _Stopped(Exception):
    pass


@pytest.mark.parametrize("engines", [("torch", "megengine"), ("megengine", "torch")])
def test_a_checkpoint_of_one_engine_is_resumed_by_the_other(
    engines: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (replace(RUN, engine=name, checkpoint_every=2) for name in engines)
    step, prepared, file = Trainer.compute, _prepared(_config()), tmp_path / "part.npz"

    def stops(self: Any, number: int) -> Any:
        if number == 2:
            raise _Stopped
        return step(self, number)

    with monkeypatch.context() as patched:
        patched.setattr(Trainer, "compute", stops)
        with pytest.raises(_Stopped):
            qtrace.finetune(prepared, _data(4), first, checkpoint=file, progress=False)
    report = qtrace.finetune(prepared, _data(4), second, checkpoint=file, resume=True, progress=False)
    assert (report.resumed, report.engine) == (2, engines[1])
    _, expected = _run(engines[1])
    np.testing.assert_allclose(report.loss, expected.loss, rtol=0.02)


def _unusual() -> TracedModule:
    forward = lambda self, x: self.conv(F.cumsum(x, axis=1))  # noqa: E731
    return _prepared(_config(), forward, conv=M.Conv2d(3, 2, 1))


def test_an_op_without_a_form_in_torch_is_named_and_megengine_takes_the_steps() -> None:
    label = r"F\.cumsum at \w+ cannot run in torch"
    report = qtrace.finetune(_unusual(), _data(4), RUN, progress=False)
    assert report.engine == "megengine"
    assert "torch does not apply: F.cumsum at" in report.table()
    with pytest.raises(TrainingError, match=f"the engine torch does not apply: {label}; use the engine meg"):
        qtrace.finetune(_unusual(), _data(4), replace(RUN, engine="torch"), progress=False)


def test_a_mode_without_a_form_is_noticed_before_the_first_step() -> None:
    forward = lambda self, x: self.conv(F.vision.interpolate(x, scale_factor=2, mode="bicubic"))  # noqa: E731
    prepared = _prepared(_config(), forward, conv=M.Conv2d(3, 2, 1))
    with pytest.raises(TrainingError, match=r"interpolate at \w+ in the mode bicubic, which cannot run"):
        qtrace.finetune(prepared, _data(4), replace(RUN, engine="torch"), progress=False)


def test_float_values_that_differ_from_megengines_refuse_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    from qtrace.extras.torch.learning import engine

    monkeypatch.setitem(engine._FORMS, "relu", lambda x: x.clamp_min(0.1))
    report = _run("auto")[1]
    assert report.engine == "megengine"
    assert report.engine_reason.startswith("torch does not apply: its float values differ from MegE")


def test_a_fake_quant_of_ones_own_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from qtrace.extras.torch.learning import engine
    from qtrace.fakequant.lsq import LSQFakeQuant

    monkeypatch.setattr(engine, "MODULES", tuple(set(engine.MODULES) - {LSQFakeQuant}))
    assert "is a fake quant of your own" in _run("auto")[1].engine_reason
