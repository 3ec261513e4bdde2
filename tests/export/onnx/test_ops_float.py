"""Ops that stay in float, integers and shapes: exported, run in onnxruntime, and compared with the graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import megengine as mge
import megengine.functional as F
import megengine.module as M
import numpy as np
import onnxruntime as ort
import pytest

import qtrace
from qtrace import QConfig
from tests.each import each_of
from tests.export.reference import assert_agrees
from tests.nets import images, net, side_by_side, spread

T = mge.Tensor
IMAGE, ROWS, GRID = (4, 6, 8), (12,), (6, 8)


def _f(function: Callable[[T], Any], shape: tuple[int, ...] = IMAGE) -> tuple[M.Module, tuple[int, ...]]:
    return net(lambda self, x: function(x)), shape


def _m(layer: M.Module, shape: tuple[int, ...] = IMAGE) -> tuple[M.Module, tuple[int, ...]]:
    for name in ("weight", "bias"):
        value = getattr(layer, name, None)
        if value is not None:
            value._reset(mge.Parameter(_draw(*value.shape, seed=len(name))))
    return net(lambda self, x: self.m(x), m=layer), shape


def _draw(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def _kernel(function: Callable[..., Any], *args: Any) -> tuple[M.Module, tuple[int, ...]]:
    return net(lambda self, x: function(x, *args)), IMAGE


def _set(index: Any, value: Callable[[T], Any]) -> tuple[M.Module, tuple[int, ...]]:
    def forward(self: M.Module, x: T) -> T:
        y = x * 2.0
        y[index] = value(x)
        return y

    return net(forward), IMAGE


def _set_masked(x: T) -> T:
    y = x * 2.0
    y[x > 0.5] = T([0.25])  # MegEngine writes a plain number only sometimes
    return y


def _half(x: T) -> T:
    n = x.shape[2]
    n //= 2
    return x[:, :, :n] + x[:, :, n : n * 2]


def _floor_division(x: T) -> tuple[T, ...]:
    n = F.argmax(x, 1) - 3
    return n // 2, n % 2, -n // 3, n % -4, n >> 1, n << 2, n * n - 1, n / 4


def _anchors(x: T) -> T:
    columns, rows = F.arange(x.shape[3]), F.arange(0, x.shape[2], 1)
    grid = F.stack([F.broadcast_to(columns, (6, 8)), F.broadcast_to(rows.reshape(-1, 1), (6, 8))])
    # The factor makes the slice contiguous: MegEngine adds a broadcast tensor to a slice in the wrong places.
    return (grid.reshape(1, 2, 6, 8) + 0.5) * 8.0 + x[:, :2] * 1.0


def _window_mask(x: T) -> T:
    mask = F.zeros((1, 1, 6, 8))
    mask[:, :, :3, 4:] = 1.0
    mask[:, :, 3:] = 2.0
    return x + mask


CASES: dict[str, tuple[M.Module, tuple[int, ...]]] = {
    "neg_abs": _f(lambda x: -abs(x)),
    "square_sqrt": _f(lambda x: F.sqrt(F.square(x) + 1.0)),
    "pow": _f(lambda x: (x**2, x**3.0, 2.0**x, F.pow(F.abs(x) + 0.1, x))),
    "exp_log": _f(lambda x: (F.exp(x), F.log(F.abs(x) + 0.1), F.expm1(x), F.log1p(F.abs(x)))),
    "logaddexp": _f(lambda x: F.logaddexp(x, x * 2.0)),
    "rounding": _f(lambda x: (F.floor(x * 2.5), F.ceil(x * 2.5), F.sign(x))),
    "round_halves": _f(lambda x: F.round(F.floor(x * 4.0) / 2.0)),
    "trigonometry": _f(lambda x: (F.sin(x), F.cos(x), F.tan(x * 0.3), F.atan(x), F.sinh(x), F.cosh(x))),
    "inverse_trigonometry": _f(lambda x: (lambda y: (F.asin(y), F.acos(y), F.atanh(y)))(F.tanh(x) * 0.9)),
    "hyperbolic_inverse": _f(lambda x: (F.asinh(x), F.acosh(F.abs(x) + 1.1))),
    "extremes": _f(lambda x: (F.maximum(x, 0.5), F.minimum(-0.5, x), F.maximum(x, x * 2.0))),
    "reversed": _f(lambda x: (2.0 - x, 1.0 / (F.abs(x) + 1.0), 3.0 * x, 1 + x)),
    "arrays": _f(lambda x: x * np.arange(8, dtype=np.float32) - np.float32(2.0)),
    "float_mod": _f(lambda x: (x % 0.75, x // 0.75)),
    "integers": _f(_floor_division),
    "clip": _f(lambda x: (F.clip(x, -0.5, 0.5), F.clip(x, lower=0.0), F.clip(x, upper=0.0))),
    "clip_computed": _f(lambda x: (F.clip(x, -F.abs(x[:, :1]), 0.5), F.clip(x, upper=x.mean()))),
    "clip_kernel": _kernel(F.clip, -0.5, 0.5),
    "prelu": _m(M.PReLU(4)),
    "prelu_one": _m(M.PReLU(1)),
    "prelu_kernel": _kernel(F.leaky_relu, 0.2),
    "softplus": _f(lambda x: (F.softplus(x * 30.0), F.logsigmoid(x * 30.0))),
    "gelu": _m(M.GELU()),
    "elemwise_sigmoid": (net(lambda self, x: self.m(x, x), m=M.Elemwise("FUSE_ADD_SIGMOID")), IMAGE),
    "elemwise_tanh": (net(lambda self, x: self.m(x, x), m=M.Elemwise("FUSE_ADD_TANH")), IMAGE),
    "softmax": _f(lambda x: (F.softmax(x), F.softmax(x, -1), F.softmax(x, 2))),
    "softmax_rank_3": _f(lambda x: F.softmax(x, 1), GRID),
    "softmax_list": _f(lambda x: F.softmax(x, [1, 2])),
    "softmax_kernel": _kernel(F.softmax, 1),
    "logsoftmax": _f(lambda x: (F.logsoftmax(x, 1), F.logsumexp(x, (2, 3)), F.logsumexp(x, 1, True))),
    "layer_norm": _m(M.LayerNorm(8)),
    "layer_norm_many": _m(M.LayerNorm((6, 8))),
    "layer_norm_plain": _m(M.LayerNorm(8, affine=False)),
    "layer_norm_kernel": _kernel(F.nn.layer_norm, 8, False),
    "group_norm": _m(M.GroupNorm(2, 4)),
    "group_norm_kernel": _kernel(F.nn.group_norm, 2, False),
    "instance_norm": _m(M.InstanceNorm(4)),
    "general_norm": _m(M.GeneralNorm((4, 6), (1, 2))),
    "general_norm_apart": _m(M.GeneralNorm((4, 8), (1, 3))),
    "local_response_norm": _m(M.LocalResponseNorm(3, 1.0, 0.1, 0.75)),
    "norms": _f(lambda x: (F.norm(x, 1, 1, True), F.norm(x, 3.0, 1), F.normalize(x, axis=1))),
    "sum": _f(lambda x: (x.sum(axis=1), F.sum(x, (2, 3), True), x.sum(axis=(1, 2, 3)))),
    "mean": _f(lambda x: (x.mean(axis=1), F.mean(x, [2, 3]), F.mean(x, -1, True))),
    "max_min": _f(lambda x: (x.max(axis=1), F.min(x, 2, True), x.min(axis=(2, 3)))),
    "prod_var_std": _f(lambda x: (F.prod(x, 1), F.var(x, 1), F.std(x, (2, 3), True))),
    "all_axes": _f(lambda x: x * 0.0 + (x.max() + x.sum() * 0.0)),
    "argmax": _f(lambda x: (F.argmax(x, 1), F.argmin(x, 3, True), F.argmax(x, -1))),
    "argmax_kernel": _f(lambda x: F.argmax(x, 1)),
    "cumsum": _f(lambda x: (F.cumsum(x, 1), F.cumsum(F.argmax(x, 1), 1))),
    "topk": _f(lambda x: F.topk(x, 3, descending=True), ROWS),
    "topk_of_fewer": _f(lambda x: F.topk(x, 1000, descending=True), ROWS),
    "topk_smallest": _f(lambda x: F.topk(x, 3, descending=False), ROWS),
    "topk_kth_of_both": _f(lambda x: F.topk(x, 3, descending=True, kth_only=True), ROWS),
    "topk_kth_place": _f(lambda x: F.topk(x, 2, kth_only=True)[1] * 2, ROWS),
    "topk_kth": _f(lambda x: F.topk(x, 3, descending=True, kth_only=True)[0], ROWS),
    "sort": _f(lambda x: (F.sort(x), F.argsort(x, descending=True)), ROWS),
    "one_hot": _f(lambda x: F.nn.one_hot(F.argmax(x, 1), 12), ROWS),
    "comparisons": _f(lambda x: (x > 0.1, x >= 0.1, x < x * 2.0, x <= 0.1, x == x, x != x * 1.0)),
    "integer_comparisons": _f(lambda x: (lambda n: (n > 1, n == 2, n != 2, n <= 1.5))(F.argmax(x, 1))),
    "logic": _f(lambda x: (lambda a, b: (a & b, a | b, a ^ b, ~a))(x > 0.0, x < 0.5)),
    "mask_arithmetic": _f(lambda x: x * (x > 0.0).astype("float32") + (x > 0.0) * 2.0),
    "where": _f(lambda x: F.where(x > 0.0, x, x * 0.1)),
    "tests": _f(lambda x: (F.isnan(x), F.isinf(x))),
    "astype": _f(lambda x: ((x * 3.0).astype("int32"), x.astype("int32").astype("float32") / 2.0)),
    "detach_copy": _f(lambda x: (x.detach() + F.copy(x)).to("xpux:0")),
    "broadcast_to": _f(lambda x: F.broadcast_to(x[:, :1], (*x.shape[:1], 4, 6, 8))),
    "repeat": _f(lambda x: (F.repeat(x, 2, 1), F.repeat(x, 3, 3), F.repeat(x, 2, 0))),
    "tile": _f(lambda x: (F.tile(x, (1, 2, 1, 3)), F.tile(x, (2, 1, 1, 1, 1)))),
    "roll": _f(lambda x: (F.roll(x, (1, -2), (2, 3)), F.roll(x, 9, 3), F.roll(x, -1, 2))),
    "roll_back": _f(lambda x: F.roll(F.roll(x, (-3, -4), (-2, -1)), (3, 4), (-2, -1)) - x),
    "pixel_shuffle": _m(M.PixelShuffle(2)),
    "stack_concat": _f(lambda x: (F.stack([x, x * 2.0], -1), F.stack([x, x], 1), F.concat([x, x], -1))),
    "expand_squeeze": _f(lambda x: (F.expand_dims(x, (1, 3)), F.squeeze(x[:, :1], 1), F.expand_dims(x, -1))),
    "axis_kernels": _f(lambda x: _closed(F.expand_dims, x, 2) + _closed(F.squeeze, x[:, :1], 1).sum()),
    "swapaxes": _f(lambda x: (F.swapaxes(x, 1, -1), x.transpose(0, 3, 1, 2), F.transpose(x, (0, 2, 3, 1)))),
    "transpose_new": _f(lambda x: F.transpose(x, (0, "x", 1, 3, 2))),
    "flatten": _f(lambda x: (F.flatten(x, 1), x.flatten(2), F.flatten(x, 1, 2))),
    "reshape_shape": _f(lambda x: (x.reshape(x.shape), x.reshape(x.shape[0] * x.shape[1], -1))),
    "reshape_parts": _f(lambda x: x.reshape(x.shape[0], 2, x.shape[1] // 2, -1).transpose(0, 2, 1, 3)),
    "pads": _f(
        lambda x: (
            F.nn.pad(x, ((0, 0), (0, 0), (1, 2), (0, 1)), "constant", 1.5),
            F.nn.pad(x, ((0, 0), (0, 0), (1, 2), (0, 1)), "reflect"),
            F.nn.pad(x, ((0, 0), (0, 0), (1, 2), (0, 1)), "replicate"),
        )
    ),
    "split_computed": _f(lambda x: F.split(x, [x.shape[1] // 2], 1)),
    "slice_computed": _f(_half),
    "index_scalar": _f(lambda x: x[:, :, x.shape[2] // 2]),
    "index_list": _f(lambda x: (x[:, [0, 2, 1]], x[:, :, np.array([5, 0])])),
    "index_tensor": _f(lambda x: x[:, F.argsort(F.mean(x, (0, 2, 3)).reshape(1, -1))[0]]),
    "index_pairs": _f(lambda x: x[F.argmax(x, 1) % 2, F.argmax(x, 1) % 3], (12, 5)),
    "index_mask": _f(lambda x: x[x > 0.0]),
    "index_mask_rows": _f(lambda x: x[x[:, 0, 0, 0] > 0.0]),
    "index_negative": _f(lambda x: (x[:, -2:, ::-1], x[..., -1], x[:, None, 1:3, 2])),
    "gather": _f(lambda x: F.gather(x, 1, F.argsort(x)), ROWS),
    "scatter": _f(lambda x: F.scatter(x, 1, F.argsort(x), x * 2.0), ROWS),
    "indexing_one_hot": _f(lambda x: F.nn.indexing_one_hot(x, F.argmax(x, 1) // 2, 1), ROWS),
    "indexing_one_hot_kept": _f(lambda x: F.nn.indexing_one_hot(x, F.argmax(x, 1), 1, keepdims=True), ROWS),
    "cond_take": _f(lambda x: F.cond_take(x > 0.0, x)),
    "setitem_number": _set((slice(None), 1), lambda x: 0.5),
    "setitem_tensor": _set((slice(None), 1), lambda x: x[:, 0]),
    "setitem_region": _set((slice(None), slice(1, 3), slice(None, None, 2)), lambda x: x[:, :2, ::2] + 1.0),
    "setitem_ellipsis": _set((Ellipsis, slice(2, 5)), lambda x: x[..., :3] * 3.0),
    "setitem_broadcast": _set((slice(None), slice(0, 2)), lambda x: x[:, :1]),
    "setitem_mask": _f(_set_masked),
    "window_mask": _f(_window_mask),
    "full": _f(lambda x: x + F.full((1, 4, 1, 1), 2.0) + F.ones((x.shape[0], 1, 1, 1)) + F.zeros_like(x)),
    "full_like": _f(lambda x: (F.full_like(x, 3.0), F.ones_like(F.argmax(x, 1)), F.full((2, 3), 7))),
    "anchors": _f(_anchors),
    "linspace": _f(lambda x: x + F.linspace(0, x.shape[3] - 1, 8)),
    "eye": _f(lambda x: x + F.eye(6, 8)),
    "matmul": _f(lambda x: (F.matmul(x, x, transpose_b=True), F.matmul(x, x, transpose_a=True))),
    "matmul_parameter": (net(lambda self, x: x @ self.w, w=mge.Parameter(_draw(8, 5))), IMAGE),
    "matmul_kernels": _f(lambda x: _closed(F.matmul, x, x, False, True)),
    "batch_matmul": (
        net(
            lambda self, x: self.m(x.reshape(-1, 8)[:24].reshape(4, 6, 8).transpose(0, 2, 1)),
            m=M.BatchMatMulActivation(4, 8, 6, True, "relu"),
        ),
        IMAGE,
    ),
    "dot": _f(lambda x: F.dot(x[0], x[1]) + x, ROWS),
    "conv1d": _m(M.Conv1d(6, 4, 3, padding=1, bias=True), GRID),
    "conv3d": _m(M.Conv3d(4, 2, (1, 3, 3), padding=(0, 1, 1)), (4, 2, 6, 8)),
    "conv_transpose3d": _m(M.ConvTranspose3d(4, 2, 2, 2), (4, 2, 3, 3)),
    "adaptive_uneven": _f(lambda x: (F.adaptive_avg_pool2d(x, (4, 3)), F.adaptive_max_pool2d(x, (4, 5)))),
    "interpolate_sizes": _f(lambda x: F.vision.interpolate(x, (7, 11))),
    "interpolate_nearest": _f(lambda x: F.vision.interpolate(x, (9, 10), mode="nearest")),
    "interpolate_factor": _f(lambda x: F.vision.interpolate(x, scale_factor=1.5)),
    "interpolate_corners": _f(lambda x: F.vision.interpolate(x, (9, 13), align_corners=True)),
    "interpolate_bicubic": _f(lambda x: F.vision.interpolate(x, (12, 20), mode="bicubic")),
    "interpolate_computed": _f(lambda x: F.vision.interpolate(x, (x.shape[2] * 2, x.shape[3] * 2))),
    "conv_bn": (net(lambda self, x: self.m(x), m=M.ConvBnRelu2d(4, 6, 3)), IMAGE),
    "sliding_window": _f(lambda x: F.nn.sliding_window(x, (3, 2), (1, 0), (2, 1), (1, 2))),
    "linear_bn": (net(lambda self, x: self.m(x), m=M.LinearBnRelu1d(12, 6)), ROWS),
}


def _closed(function: Callable[..., Any], *args: Any) -> Any:
    """Calls a function that the tracer does not see."""
    return function(*args)


def _leaves(value: Any) -> list[np.ndarray]:
    if isinstance(value, (tuple, list)):
        return [leaf for item in value for leaf in _leaves(item)]
    return [value.numpy()]


def _same(value: np.ndarray, expected: np.ndarray, name: str) -> None:
    assert value.dtype == expected.dtype, name
    if expected.dtype == np.float32:
        np.testing.assert_allclose(value, expected, rtol=2e-5, atol=2e-5, err_msg=name)
    else:
        np.testing.assert_array_equal(value, expected, err_msg=name)


@pytest.fixture(autouse=True)
def _no_queue() -> Iterator[None]:
    """One op at a time: MegEngine's arange is wrong when several are queued."""
    level = mge.config.async_level
    mge.config.async_level = 0
    yield
    mge.config.async_level = level


# Where onnx.reference 1.23 is no oracle.
NO_ORACLE = {"local_response_norm": "it sums other channels than the standard says"}


_OPS = [*spread([name for name in CASES if name not in NO_ORACLE], 9), [*NO_ORACLE]]


@each_of("names", _OPS, ids=[names[0] for names in _OPS])
def test_float_ops_run_in_onnxruntime_as_in_the_graph(names: list[str], tmp_path: Path) -> None:
    module = side_by_side({name: CASES[name][0] for name in names})
    inputs = [
        [_draw(count, *CASES[name][1], seed=seed) for name in names] for count, seed in ((3, 0), (5, 1))
    ]
    traced = qtrace.trace(module, *inputs[0])
    prepared = qtrace.prepare(traced, QConfig(rules=[{"match": {}, "quantize": False}]))
    converted = qtrace.convert(prepared)  # without a site there is nothing to calibrate
    path = qtrace.export(converted, tmp_path / "m.onnx")
    for level in (ort.GraphOptimizationLevel.ORT_DISABLE_ALL, ort.GraphOptimizationLevel.ORT_ENABLE_ALL):
        options = ort.SessionOptions()
        options.graph_optimization_level = level
        session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        for given in inputs:
            found = iter(
                session.run(None, {i.name: x for i, x in zip(session.get_inputs(), given, strict=True)})
            )
            wanted = traced(*map(mge.Tensor, given))
            for name in names:
                for want in _leaves(wanted[name]):
                    _same(next(found), want, name)
            assert next(found, None) is None
    if names != [*NO_ORACLE]:
        assert_agrees(path, inputs[0])


def test_an_identity_has_the_size_of_an_open_axis(tmp_path: Path) -> None:
    x = images(3, 4, 1, 1)[..., 0, 0]
    module = net(lambda self, x: F.matmul(F.eye(x.shape[0], x.shape[0]), x) + 1)
    path = qtrace.export(qtrace.trace(module, x, dynamic={"x": {0: "n"}}), tmp_path / "m.onnx")
    session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    for rows in (2, 3):
        np.testing.assert_array_equal(session.run(None, {"x": x[:rows]})[0], x[:rows] + 1)
