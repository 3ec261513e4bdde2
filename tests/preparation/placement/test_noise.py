"""Noise at the outputs by rounding one value or weight: held to real rounding in float64, and its edges."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import megengine as mge
import megengine.functional as F
import megengine.module as M
import numpy as np
import pytest
from numpy.lib.stride_tricks import sliding_window_view

import qtrace
from qtrace import ops
from qtrace.config import backends
from qtrace.data.batches import as_arguments
from qtrace.errors import QtraceWarning
from qtrace.graph.flatten import flatten
from qtrace.graph.interpreter import evaluate_fixed, fixed_nodes
from qtrace.graph.opaque import opaque_calls
from qtrace.graph.tracing.trace import trace
from qtrace.graph.types import TracedModule
from qtrace.graph.walk import exprs, is_float_tensor
from qtrace.numerics import choose, fake_quantize
from qtrace.preparation.passes.expand import expand
from qtrace.preparation.placement.reference import MeasuredRun, Run
from qtrace.preparation.placement.trials import estimate_noise
from qtrace.scheme import QScheme
from tests.importing.onnx.networks import model, node, save, weights
from tests.nets import images, net

BACKEND = backends.get("onnxruntime")


class Noise(NamedTuple):
    """Name of a node -> the noise of its value, and of the weight of its layer."""

    values: dict[str, float]
    weights: dict[str, float]


def _measure(
    module: M.Module,
    batches: list[Any] | None,
    example: Any = None,
    weight: QScheme = BACKEND.weight,
    **options: Any,
) -> tuple[Noise, Any]:
    example = batches[0] if example is None and batches else example
    inputs = example if isinstance(example, tuple) else (example,)
    return _measure_traced(trace(module, *inputs, check=False), batches, weight, **options)


def _measure_traced(
    traced: TracedModule,
    batches: list[Any] | None,
    weight: QScheme = BACKEND.weight,
    seed: int = 0,
    probes: int = 4,
) -> tuple[Noise, Any]:
    """Estimates the noise of all values and weights, rounded to the ranges that they have."""
    flat = flatten(traced)
    expand(flat)
    samples = None if batches is None else [as_arguments(b, flat) for b in batches]
    runs = [MeasuredRun(flat, samples, seed + probes * number) for number in range(probes)]
    run = runs[0]
    fixed = fixed_nodes(flat)
    layers = [c for e in exprs(flat) if (c := ops.read(e)) is not None and c.weight in fixed]
    stored = {c.weight for c in layers} | {c.bias for c in layers}
    nodes = [*flat.graph.inputs, *(node for expr in exprs(flat) for node in expr.outputs)]
    floats = [node for node in nodes if is_float_tensor(node) and node not in stored]
    finite = {n: ends for n, ends in run.ranges(floats).items() if np.isfinite(ends).all()}
    qparams = {node: choose(*ends, BACKEND.activation.replace(axis=None)) for node, ends in finite.items()}
    rounded = {}
    for call in layers:
        value = evaluate_fixed(flat, [call.weight])[call.weight].numpy()
        if np.isfinite(value).all():
            rounded[call.expr] = call.weight, mge.Tensor(_round_weight(value, call.channel_axes, weight))
    found = [estimate_noise(run, qparams, rounded) for run in runs]
    kinds = ([own[kind] for own in found] for kind in (0, 1))
    return Noise(*({name: sum(n[name] for n in k) / probes for name in k[0]} for k in kinds)), flat


def _round_weight(value: np.ndarray, axes: tuple[int, ...], scheme: QScheme) -> np.ndarray:
    if scheme.axis is None:
        return fake_quantize(value, choose(value.min(), value.max(), scheme))
    moved = np.moveaxis(value, axes, range(len(axes)))
    flat = moved.reshape(math.prod(moved.shape[: len(axes)]), -1)
    qparams = choose(flat.min(1), flat.max(1), scheme.replace(axis=0))
    rounded = fake_quantize(flat, qparams).reshape(moved.shape)
    return np.ascontiguousarray(np.moveaxis(rounded, range(len(axes)), axes))


def _forward(self: M.Module, x: mge.Tensor) -> mge.Tensor:
    y = self.b(F.silu(self.a(x)))
    return self.c(F.tanh(y) + y)


def _small_net() -> M.Module:
    return net(
        _forward,
        a=M.Conv2d(3, 8, 3, padding=1),
        b=M.Conv2d(8, 8, 3, padding=1, groups=8),
        c=M.Conv2d(8, 4, 1),
    )


def _conv(x: np.ndarray, weight: np.ndarray, bias: np.ndarray, pad: int) -> np.ndarray:
    padded = np.pad(x, ((0, 0), (0, 0), (pad, pad), (pad, pad)))
    windows = sliding_window_view(padded, weight.shape[-2:], axis=(2, 3))
    form = "nchwij,ocij->nohw" if weight.ndim == 4 else "nchwij,cij->nchw"
    kernel = weight if weight.ndim == 4 else weight[:, 0, 0]
    return np.einsum(form, windows, kernel) + bias.reshape(1, -1, 1, 1)


def _numpy_forward(
    w: Mapping[str, np.ndarray], x: np.ndarray, change: Callable[[str, np.ndarray], np.ndarray]
) -> np.ndarray:
    """The small net in float64; ``change`` replaces the value of a node."""
    x = change("x", x.astype(np.float64))
    y = change("a_out", _conv(x, w["a.weight"], w["a.bias"], 1))
    y = change("silu_out", y / (1 + np.exp(-y)))
    y = change("b_out", _conv(y, w["b.weight"], w["b.bias"], 1))
    z = change("add_out", change("tanh_out", np.tanh(y)) + y)
    return change("c_out", _conv(z, w["c.weight"], w["c.bias"], 0))


def _round(value: np.ndarray) -> np.ndarray:
    return fake_quantize(value, choose(value.min(), value.max(), BACKEND.activation))


def _decibels(value: float) -> float:
    return 10 * float(np.log10(value))


def test_equals_the_noise_of_real_rounding() -> None:
    module = _small_net()
    x = images(24, 3, 8, 8, seed=3)
    noise, _ = _measure(module, [x[:6], x[6:12], x[12:18], x[18:]], probes=16)
    weights = {n: p.numpy().astype(np.float64) for n, p in module.named_parameters()}
    exact = _numpy_forward(weights, x, lambda _, v: v)
    power = np.square(exact).sum()
    assert set(noise.values) == {"x", "a_out", "silu_out", "b_out", "tanh_out", "add_out", "c_out"}
    for name, measured in noise.values.items():
        rounded = _numpy_forward(weights, x, lambda n, v, name=name: _round(v) if n == name else v)
        assert _decibels(measured) == pytest.approx(
            _decibels(np.square(rounded - exact).sum() / power), abs=1.5
        )
    assert set(noise.weights) == {"a_out", "b_out", "c_out"}
    for name, measured in noise.weights.items():
        weight = weights[f"{name[0]}.weight"]
        flat = weight.reshape(8 if name != "c_out" else 4, -1)
        qparams = choose(flat.min(1), flat.max(1), BACKEND.weight)
        changed = {**weights, f"{name[0]}.weight": fake_quantize(flat, qparams).reshape(weight.shape)}
        rounded = _numpy_forward(changed, x, lambda _, v: v)
        assert _decibels(measured) == pytest.approx(
            _decibels(np.square(rounded - exact).sum() / power), abs=1.5
        )


def test_batches_run_once_for_the_ranges_and_half_of_them_for_the_noise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The run that measures gradients computes the rounding errors on its way."""
    runs = []
    execute = Run.execute

    def spy(self: Run, inputs: Any) -> None:
        runs.append(type(self).__name__)
        execute(self, inputs)

    monkeypatch.setattr(Run, "execute", spy)
    x = images(4, 3, 8, 8)
    _measure(_small_net(), [x[:2], x[2:]], probes=1)
    assert runs == ["RangeStatistics"] * 2 + ["Probe"]


def test_a_seed_determines_the_result() -> None:
    module, x = _small_net(), images(2, 3, 8, 8)
    first, second, other = (_measure(module, [x], seed=seed, probes=6)[0] for seed in (0, 0, 1))
    assert first == second
    assert first.values != other.values
    assert _decibels(first.values["x"]) == pytest.approx(_decibels(other.values["x"]), abs=4)


def test_unlike_channels_amplify_the_noise_of_the_layer_before_them() -> None:
    """The channels of the first result differ by 100; the depthwise layer brings them to one size."""
    module = net(
        lambda self, x: self.b(self.a(x)),
        a=M.Conv2d(4, 4, 1, bias=False),
        b=M.Conv2d(4, 4, 3, padding=1, groups=4, bias=False),
    )
    sizes = np.array([100.0, 1.0, 1.0, 1.0], np.float32)
    module.a.weight._reset(mge.Parameter(np.diag(sizes).reshape(4, 4, 1, 1)))
    module.b.weight._reset(mge.Parameter(module.b.weight.numpy() / sizes.reshape(4, 1, 1, 1, 1)))
    noise, _ = _measure(module, [images(4, 4, 8, 8)])
    assert _decibels(noise.values["a_out"]) > _decibels(noise.values["b_out"]) + 20
    assert _decibels(noise.values["a_out"]) > _decibels(noise.values["x"]) + 20


def test_outputs_weigh_alike_whatever_their_size() -> None:
    def forward(self: M.Module, x: mge.Tensor) -> dict[str, mge.Tensor]:
        return {"large": self.a(x) * 1e4, "small": self.b(x)}

    parts = {"a": M.Conv2d(3, 4, 1), "b": M.Conv2d(3, 4, 1)}
    noise, _ = _measure(net(forward, **parts), [images(8, 3, 8, 8)])
    assert _decibels(noise.values["a_out"]) == pytest.approx(_decibels(noise.values["b_out"]), abs=3)
    alone, _ = _measure(net(lambda self, x: self.b(x), **parts), [images(8, 3, 8, 8)])
    # One of two outputs is disturbed: half of what it is where there is no other.
    assert noise.values["b_out"] == pytest.approx(alone.values["b_out"] / 2, rel=0.3)


def test_each_call_of_a_shared_layer_has_its_own_noise() -> None:
    module = net(lambda self, x: self.a(F.relu(self.a(x)) * 0.1), a=M.Conv2d(4, 4, 3, padding=1))
    noise, flat = _measure(module, [images(4, 4, 8, 8)])
    calls = [e.outputs[0].name for e in exprs(flat) if (c := ops.read(e)) and c.kind == "conv2d"]
    assert len(calls) == 2
    assert set(noise.weights) == set(calls)
    assert noise.weights[calls[0]] != noise.weights[calls[1]]


def test_integers_have_no_noise_and_what_decides_them_has() -> None:
    def forward(self: M.Module, x: mge.Tensor) -> tuple[mge.Tensor, ...]:
        y = F.flatten(self.a(x), 1)
        values, places = F.topk(y, 3, descending=True)
        return values, places, F.argmax(self.fc(y), axis=1), x.shape[0]

    module = net(forward, a=M.Conv2d(3, 2, 1), fc=M.Linear(128, 5))
    noise, flat = _measure(module, [images(2, 3, 8, 8)])
    assert {"x", "a_out", "fc_out"} <= set(noise.values)
    integers = {n.name for n in flat.graph.outputs if np.dtype(n.dtype).kind != "f"}
    assert len(integers) == 3
    assert not integers & set(noise.values)
    assert set(noise.weights) == {"a_out", "fc_out"}


def test_float_constants_are_values_and_biases_are_not() -> None:
    def forward(self: M.Module, x: mge.Tensor) -> mge.Tensor:
        return self.a(x) + self.table

    table = mge.Parameter(np.linspace(-3, 1, 4 * 8 * 8).reshape(1, 4, 8, 8).astype(np.float32))
    module, x = net(forward, a=M.Conv2d(3, 4, 1), table=table), images(4, 3, 8, 8)
    noise, flat = _measure(module, [x], probes=40)
    (table_name,) = set(noise.values) - {"x", "a_out", *(n.name for n in flat.graph.outputs)}
    assert "table" in table_name
    exact = table.numpy().astype(np.float64)
    output = flat(mge.Tensor(x)).numpy().astype(np.float64)
    power = 10**0.7 * 4 * output.var(axis=0, ddof=1).sum()  # less than that of the table, which never changes
    assert power < np.square(output).sum()
    expected = 4 * np.square(_round(exact) - exact).sum() / power
    assert _decibels(noise.values[table_name]) == pytest.approx(_decibels(expected), abs=1.5)


def test_an_end_of_zeros_and_values_without_limit_are_left_out() -> None:
    def forward(self: M.Module, x: mge.Tensor) -> tuple[mge.Tensor, mge.Tensor]:
        y = self.a(x)
        masked = F.where(x[:, :1] > 0, x[:, :1], mge.Tensor(-np.inf))
        return F.softmax(masked.reshape(len(x), -1), axis=1) + F.mean(y), y * 0.0

    noise, _ = _measure(net(forward, a=M.Conv2d(3, 4, 1)), [images(2, 3, 8, 8)])
    assert "a_out" in noise.values
    assert all(np.isfinite(v) for v in noise.values.values())
    assert not [name for name in noise.values if name.startswith("where")]


def test_random_inputs_tell_nothing_of_what_differs_between_samples() -> None:
    module, x = net(lambda self, x: self.a(x) + 100.0, a=M.Conv2d(3, 4, 1)), images(8, 3, 8, 8)
    flat = flatten(trace(module, x, check=False))
    (own,), (random,) = (MeasuredRun(flat, samples).groups for samples in ([((mge.Tensor(x),), {})], None))
    assert own.power < 0.01 * np.square(flat(mge.Tensor(x)).numpy()).sum()
    assert random.power > 0.5 * 2 * 100.0**2 * 8 * 4 * 64  # two batches


def test_weights_are_rounded_by_their_scheme() -> None:
    """The second layer brings the channels of the first to one size."""
    parts = {"a": M.Conv2d(3, 4, 1), "b": M.Conv2d(4, 4, 1, groups=4, bias=False)}
    module, x = net(lambda self, x: self.b(self.a(x)), **parts), images(4, 3, 8, 8)
    scale = np.array([1000.0, 1.0, 1.0, 1.0], np.float32).reshape(-1, 1, 1, 1)
    module.a.weight._reset(mge.Parameter(module.a.weight.numpy() * scale))
    module.b.weight._reset(mge.Parameter(1 / scale[..., None]))
    by_channel, by_tensor = (
        _measure(module, [x], weight=BACKEND.weight.replace(axis=axis))[0].weights["a_out"]
        for axis in (0, None)
    )
    assert _decibels(by_tensor) > _decibels(by_channel) + 20
    module.b.weight._reset(mge.Parameter(np.full((4, 1, 1, 1, 1), np.inf, np.float32)))
    assert _measure(module, [x])[0].weights == {}


def test_a_graph_without_a_live_output_has_no_noise() -> None:
    noise, _ = _measure(net(lambda self, x: self.a(x) * 0.0, a=M.Conv2d(3, 4, 1)), [images(1, 3, 8, 8)])
    assert (noise.values, noise.weights) == ({}, {})


def test_leaves_the_model_and_the_inputs_as_they_were() -> None:
    module, x = _small_net(), mge.Tensor(images(2, 3, 8, 8))
    level = mge.config.async_level
    noise, flat = _measure(module, [x])
    flat.train()
    assert noise.values
    assert x.grad is None
    assert all(p.grad is None for p in flat.parameters())
    assert mge.config.async_level == level


@pytest.mark.parametrize("mode", ["cubic", "linear"])
def test_what_is_before_a_kept_resize_has_noise(tmp_path: Path, mode: str) -> None:
    """Without a gradient through the node it had none, and all of it was placed on integers."""
    nodes = [
        node("Conv", "x w", "a", pads=[1, 1, 1, 1]),
        node("Resize", "a _ factors", "b", mode=mode),
        node("Conv", "b v", "y", pads=[1, 1, 1, 1]),
    ]
    stored = {"w": weights(8, 3, 3, 3), "v": weights(4, 8, 3, 3), "factors": np.float32([1, 1, 1.5, 1.5])}
    path = save(model(nodes, {"x": ["N", 3, "h", "w"]}, stored=stored), tmp_path)
    measured = []
    for fixed in (True, False):
        traced = qtrace.from_onnx(path, {"x": (1, 3, 16, 16)}, fixed=fixed)
        assert bool(opaque_calls(traced)) != fixed
        with warnings.catch_warnings():
            warnings.simplefilter("error", QtraceWarning)
            measured.append(_measure_traced(traced, [images(2, 3, 16, 16)])[0])
    whole, kept = measured
    for name in ("x", "a", "y"):
        assert 0.25 * whole.values[name] < kept.values[name] < 4 * whole.values[name]
    assert 0.25 * whole.weights["a"] < kept.weights["a"] < 4 * whole.weights["a"]


_MOVED = {
    "ScatterND": [
        node("Slice", "t zero two zero", "first"),
        node("Neg", "first", "minus"),
        node("ScatterND", "t rows minus", "b"),
    ],
    "ReverseSequence": [node("ReverseSequence", "t lengths", "b", batch_axis=1, time_axis=0)],
}


@pytest.mark.parametrize("op", list(_MOVED))
def test_what_is_before_a_kept_node_that_moves_values_has_noise(op: str, tmp_path: Path) -> None:
    """As boxes are decoded in place: of the scores beside them nothing was known."""
    stored = {"w": weights(8, 3, 3, 3), "v": weights(8, 4), "zero": np.array([0]), "two": np.array([2])}
    stored["lengths"] = np.array([8, 5])
    batch = images(2, 3, 8, 8), np.array([[0], [1]], np.int32)
    before = [node("Conv", "x w", "a", pads=[1, 1, 1, 1]), node("Transpose", "a", "t", perm=[1, 0, 2, 3])]
    after = [node("Transpose", "b", "c", perm=[1, 2, 3, 0]), node("MatMul", "c v", "y")]
    measured = []
    for moved in (_MOVED[op], [node("Identity", "t", "b")]):
        ends = {"x": [2, 3, 8, 8], "rows": [2, 1]}
        nodes = [*before, *moved, *after]
        path = save(model(nodes, ends, stored=stored, dtypes={"rows": np.int64}), tmp_path)
        traced = qtrace.from_onnx(path)
        assert bool(opaque_calls(traced)) == (moved is _MOVED[op])
        measured.append(_measure_traced(traced, [batch])[0])
    kept, whole = measured
    for name in ("x", "a", "y"):
        assert 0.25 * whole.values[name] < kept.values[name] < 4 * whole.values[name]
    assert 0.25 * whole.weights["a"] < kept.weights["a"] < 4 * whole.weights["a"]


def test_what_a_kept_node_without_a_gradient_reads_has_noise(tmp_path: Path) -> None:
    """Everything before such a node was placed on integers, however far it was from float."""
    nodes = [
        node("MatMul", "x w", "a"),
        node("Relu", "a", "r"),
        node("LSTM", "r i h", "b", hidden_size=4, clip=2.0),
        node("MatMul", "b v", "y"),
    ]
    stored = {"w": weights(6, 5), "i": weights(1, 16, 5), "h": weights(1, 16, 4), "v": weights(4, 3)}
    traced = qtrace.from_onnx(save(model(nodes, {"x": [7, 2, 6]}, stored=stored), tmp_path))
    assert opaque_calls(traced)
    noise, _ = _measure_traced(traced, [images(7, 2, 6)])
    assert all(noise.values[name] > 0 for name in ("x", "a", "r", "b", "y"))
    assert noise.weights["a"] > 0
