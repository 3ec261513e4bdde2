"""A call of every op that public MegEngine models were seen to call, and how it must be read.

What is expected is written ``kind role inputs``; a module that is expanded has one such for each new call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import megengine as mge
import megengine.functional as F
import megengine.module as M
import numpy as np

from tests.nets import images, net

__all__ = ["CASES", "KERNELS", "SIBLINGS", "Case"]

IMAGE = images(2, 4, 8, 8)
ROWS = np.random.default_rng(0).normal(size=(3, 5)).astype(np.float32)
TOKENS = np.array([[1, 0, 3]], np.int32)


@dataclass(frozen=True)
class Case:
    """A module that calls one op on ``x``.

    Attributes:
        module: the module.
        x: its example.
        expected: how the op is read after expansion.
    """

    module: M.Module
    x: np.ndarray
    expected: tuple[str, ...]


def _f(function: Callable[..., Any], *expected: str, x: np.ndarray = IMAGE) -> Case:
    """Calls ``function`` on the input."""
    return Case(net(lambda self, x: function(x)), x, expected)


def _m(layer: M.Module, *expected: str, x: np.ndarray = IMAGE) -> Case:
    """Calls a module on the input."""
    return Case(net(lambda self, x: self.m(x), m=layer), x, expected)


def _p(function: Callable[..., Any], shape: tuple[int, ...], *expected: str, x: np.ndarray = IMAGE) -> Case:
    """Calls ``function`` on the input and a parameter ``w``."""
    weight = mge.Parameter(np.full(shape, 0.5, np.float32))
    return Case(net(lambda self, x: function(x, self.w), w=weight), x, expected)


def _setitem(x: mge.Tensor) -> mge.Tensor:
    y = x * 2.0
    y[:, 0] = x[:, 1]
    return y


def _setitem_number(x: mge.Tensor) -> mge.Tensor:
    y = x * 2.0
    y[:, 0] = 1.0
    return y


def _inplace(name: str) -> Callable[[mge.Tensor], mge.Tensor]:
    return lambda x: getattr(F.relu(x), name)(x)


def _half(x: mge.Tensor) -> mge.Tensor:
    count = x.shape[3]
    count //= 2
    return F.arange(count)


def _rois(x: mge.Tensor) -> mge.Tensor:
    return F.vision.roi_align(x, F.concat([F.zeros((2, 1)), F.ones((2, 4))], 1), (2, 2))


def _deformable(self: M.Module, x: mge.Tensor) -> mge.Tensor:
    return self.m(x, self.offset(x), F.sigmoid(self.mask(x)))


def _ordered(x: mge.Tensor) -> mge.Tensor:
    return F.argsort(x)


_CONV = "conv2d compute x"

# Op of the survey -> a call of it.
CASES: dict[str, Case] = {
    "mod:Conv2d": _m(M.Conv2d(4, 6, 3), _CONV),
    "mod:BatchNorm2d": _m(M.BatchNorm2d(4), "batch_norm norm x"),
    "mod:ReLU": _m(M.ReLU(), "relu activation x"),
    "mod:MaxPool2d": _m(M.MaxPool2d(2), "max_pool2d carry x"),
    "fn:F.tensor.flatten": _f(lambda x: F.flatten(x, 1), "flatten carry x"),
    "mod:Linear": _m(M.Linear(8, 3), "linear compute x"),
    "tm:__add__": _f(lambda x: x + x, "add elementwise x x"),
    "tm:__iadd__": _f(_inplace("__iadd__"), "add elementwise relu_out x"),
    "tm:__mul__": _f(lambda x: x * 0.5, "mul elementwise x"),
    "tm:__getitem__": _f(lambda x: x[:, ::2], "getitem carry x"),
    "mod:AdaptiveAvgPool2d": _m(M.AdaptiveAvgPool2d(1), "adaptive_avg_pool2d elementwise x"),
    "mod:Identity": _m(M.Identity(), "identity carry x"),
    "apply:GetVarShape": _f(lambda x: x.reshape(x.shape), "shape shape x"),
    "fn:F.tensor.concat": _f(lambda x: F.concat([x, x * 2.0], 1), "concat concat x mul_out"),
    "fn:F.vision.interpolate": _f(
        lambda x: F.vision.interpolate(x, scale_factor=2), "interpolate elementwise x"
    ),
    "tm:reshape": _f(lambda x: x.reshape(2, -1), "reshape carry x"),
    "fn:F.nn.relu": _f(lambda x: F.relu(x), "relu activation x"),
    "fn:F.nn.conv2d": _p(lambda x, w: F.conv2d(x, w), (4, 4, 3, 3), _CONV),
    "tm:transpose": _f(lambda x: x.transpose(0, 2, 3, 1), "transpose carry x"),
    "mod:Dropout": _m(M.Dropout(0.5), "dropout carry x"),
    "tm:__floordiv__": _f(lambda x: F.arange(x.shape[3] // 2), "floor_div shape getitem_out"),
    "fn:F.nn.sigmoid": _f(lambda x: F.sigmoid(x), "sigmoid elementwise x"),
    "fn:F.tensor.broadcast_to": _f(lambda x: F.broadcast_to(x, (3, 2, 4, 8, 8)), "broadcast_to carry x"),
    "fn:F.tensor.arange": _f(lambda x: F.arange(x.shape[3]), "arange shape getitem_out"),
    "fn:F.tensor.stack": _f(lambda x: F.stack([x, x], 1), "stack concat x x"),
    "mod:Sigmoid": _m(M.Sigmoid(), "sigmoid elementwise x"),
    "fn:F.tensor.expand_dims": _f(lambda x: F.expand_dims(x, 1), "expand_dims carry x"),
    "tm:__truediv__": _f(lambda x: x / 3.0, "div elementwise x"),
    "mod:SiLU": _m(M.SiLU(), "silu elementwise x"),
    "tm:__sub__": _f(lambda x: x - x * 2.0, "sub elementwise x mul_out"),
    "tm:__setitem__": _f(_setitem, "setitem concat mul_out getitem_out"),
    "mod:GroupNorm": _m(M.GroupNorm(2, 4), "group_norm float x"),
    "fn:F.tensor.full": _f(lambda x: F.full((x.shape[0], 1), 2.0), "full shape"),
    "fn:F.tensor.transpose": _f(lambda x: F.transpose(x, (0, 2, 1, 3)), "transpose carry x"),
    "mod:AvgPool2d": _m(M.AvgPool2d(2), "avg_pool2d elementwise x"),
    "mod:ConvBn2d": _m(M.ConvBn2d(4, 6, 3), _CONV, "batch_norm norm conv2d_out"),
    "fn:F.nn.avg_pool2d": _f(lambda x: F.avg_pool2d(x, 2), "avg_pool2d elementwise x"),
    "tm:__rmul__": _f(lambda x: 2.0 * x, "mul elementwise x"),
    "mod:GELU": _m(M.GELU(), "gelu float x"),
    "fn:F.elemwise.clip": _f(lambda x: F.clip(x, -1.0, 1.0), "clip activation x"),
    "fn:F.nn.relu6": _f(lambda x: F.relu6(x), "relu6 activation x"),
    "fn:F.tensor.repeat": _f(lambda x: F.repeat(x, 2, 1), "repeat carry x"),
    "tm:mean": _f(lambda x: x.mean(axis=1), "mean elementwise x"),
    "mod:LayerNorm": _m(M.LayerNorm(8), "layer_norm float x"),
    "tm:astype": _f(lambda x: x.astype("float32"), "identity carry x"),
    "tm:__imul__": _f(_inplace("__imul__"), "mul elementwise relu_out x"),
    "fn:F.elemwise.exp": _f(lambda x: F.exp(x), "exp float x"),
    "tm:sum": _f(lambda x: x.sum(axis=1), "sum elementwise x"),
    "fn:F.elemwise.sqrt": _f(lambda x: F.sqrt(F.abs(x)), "sqrt float abs_out"),
    "fn:F.tensor.split": _f(lambda x: F.split(x, 2, axis=1), "split carry x"),
    "mod:ConvBnRelu2d": _m(
        M.ConvBnRelu2d(4, 6, 3), _CONV, "batch_norm norm conv2d_out", "relu activation m_bn_out"
    ),
    "mod:ConvTranspose2d": _m(M.ConvTranspose2d(4, 6, 3), "conv_transpose2d compute x"),
    "fn:F.elemwise.maximum": _f(lambda x: F.maximum(x, 0.5), "maximum elementwise x"),
    "tm:detach": _f(lambda x: x.detach(), "identity carry x"),
    "tm:__radd__": _f(lambda x: 1.0 + x, "add elementwise x"),
    "fn:F.math.matmul": _f(lambda x: F.matmul(x, x, transpose_b=True), "matmul compute x x"),
    "mod:QuantStub": _m(M.QuantStub(), "identity carry x"),
    "mod:Elemwise": _m(M.Elemwise("RELU"), "relu activation x"),
    "mod:DequantStub": _m(M.DequantStub(), "identity carry x"),
    "fn:F.elemwise.minimum": _f(lambda x: F.minimum(x, x * 2.0), "minimum elementwise x mul_out"),
    "tm:__pow__": _f(lambda x: x**2, "pow float x"),
    "fn:F.tensor.zeros": _f(lambda x: F.zeros((x.shape[0], 1)), "full shape"),
    "fn:F.nn.softmax": _f(lambda x: F.softmax(x, 1), "softmax float x"),
    "mod:LeakyReLU": _m(M.LeakyReLU(0.1), "leaky_relu elementwise x"),
    "tm:__gt__": _f(lambda x: x > 0.0, "greater float x"),
    "fn:F.elemwise.log": _f(lambda x: F.log(F.abs(x)), "log float abs_out"),
    "tm:flatten": _f(lambda x: x.flatten(1), "flatten carry x"),
    "fn:F.tensor.zeros_like": _f(lambda x: F.zeros_like(x), "full_like shape x"),
    "tm:__rsub__": _f(lambda x: 1.0 - x, "sub elementwise x"),
    "tm:__neg__": _f(lambda x: -x, "neg elementwise x"),
    "fn:F.math.topk": _f(lambda x: F.topk(x, 2), "topk float x", x=ROWS),
    "fn:F.nn.max_pool2d": _f(lambda x: F.max_pool2d(x, 2), "max_pool2d carry x"),
    "fn:F.nn.hswish": _f(lambda x: F.hswish(x), "hswish elementwise x"),
    "mod:Softmax": _m(M.Softmax(1), "softmax float x"),
    "fn:F.math.mean": _f(lambda x: F.mean(x, (2, 3)), "mean elementwise x"),
    "tm:max": _f(lambda x: x.max(axis=1), "max carry x"),
    "fn:F.math.argmax": _f(lambda x: F.argmax(x, 1), "argmax float x"),
    "tm:__and__": _f(lambda x: (x > 0) & (x < 1), "logical_and shape gt_out lt_out"),
    "tm:__eq__": _f(lambda x: x == 0.0, "equal float x"),
    "fn:F.nn.logsigmoid": _f(lambda x: F.logsigmoid(x), "logsigmoid float x"),
    "fn:F.elemwise.abs": _f(lambda x: F.abs(x), "abs elementwise x"),
    "tm:__invert__": _f(lambda x: ~(x > 0), "logical_not shape gt_out"),
    "fn:F.nn.adaptive_avg_pool2d": _f(
        lambda x: F.adaptive_avg_pool2d(x, 2), "adaptive_avg_pool2d elementwise x"
    ),
    "fn:F.nn.dropout": _f(lambda x: F.dropout(x, 0.5, training=False), "dropout carry x"),
    "mod:PixelShuffle": _m(M.PixelShuffle(2), "pixel_shuffle carry x"),
    "fn:F.nn.hsigmoid": _f(lambda x: F.hsigmoid(x), "hsigmoid elementwise x"),
    "fn:F.tensor.roll": _f(lambda x: F.roll(x, (1, 1), (2, 3)), "roll carry x"),
    "fn:F.tensor.full_like": _f(lambda x: F.full_like(x, 3.0), "full_like shape x"),
    "tm:__ge__": _f(lambda x: x >= 0.0, "greater_equal float x"),
    "fn:F.math.max": _f(lambda x: F.max(x, 1), "max carry x"),
    "tm:__isub__": _f(_inplace("__isub__"), "sub elementwise relu_out x"),
    "tm:__itruediv__": _f(_inplace("__itruediv__"), "div float relu_out x"),
    "fn:F.tensor.ones": _f(lambda x: F.ones((x.shape[0], 1)), "full shape"),
    "fn:F.nn.indexing_one_hot": _f(
        lambda x: F.nn.indexing_one_hot(x, F.argmax(x, 1), 1), "indexing_one_hot carry x", x=ROWS
    ),
    "tm:__ne__": _f(lambda x: x != 0.0, "not_equal float x"),
    "fn:F.tensor.cond_take": _f(lambda x: F.cond_take(x > 0, x), "cond_take carry x"),
    "fn:F.nn.leaky_relu": _f(lambda x: F.leaky_relu(x, 0.1), "leaky_relu elementwise x"),
    "mod:DeformableConv2d": Case(
        net(
            _deformable,
            m=M.DeformableConv2d(4, 4, 3, padding=1),
            offset=M.Conv2d(4, 18, 3, padding=1),
            mask=M.Conv2d(4, 9, 3, padding=1),
        ),
        IMAGE,
        ("deformable_conv2d float x",),
    ),
    "fn:F.tensor.squeeze": _f(lambda x: F.squeeze(x[:, :1], 1), "squeeze carry getitem_out"),
    "mod:InstanceNorm": _m(M.InstanceNorm(4), "instance_norm float x"),
    "tm:__lt__": _f(lambda x: x < 0.0, "less float x"),
    "fn:F.math.sum": _f(lambda x: F.sum(x, 1), "sum elementwise x"),
    "fn:F.tensor.gather": _f(lambda x: F.gather(x, 1, F.argsort(x)), "gather carry x", x=ROWS),
    "fn:F.math.std": _f(lambda x: F.std(x, 1), "std float x"),
    "fn:F.tensor.scatter": _f(
        lambda x: F.scatter(x, 1, F.argsort(x), x * 2.0), "scatter concat x mul_out", x=ROWS
    ),
    "fn:F.math.min": _f(lambda x: F.min(x, 1), "min carry x"),
    "tm:__mod__": _f(lambda x: x % 2.0, "mod float x"),
    "tm:__rtruediv__": _f(lambda x: 1.0 / x, "div float x"),
    "fn:F.vision.nms": _f(
        lambda x: F.vision.nms(x[:, :4], x[:, 4], 0.5), "nms float getitem_out getitem_out_1", x=ROWS
    ),
    "fn:F.elemwise.floor": _f(lambda x: F.floor(x), "floor float x"),
    "fn:F.vision.roi_align": _f(_rois, "roi_align elementwise x"),
    "fn:F.math.argsort": _f(_ordered, "argsort float x", x=ROWS),
    "tm:__new__": _f(lambda x: mge.Tensor(x.shape[0]), "identity shape getitem_out"),
    "tm:min": _f(lambda x: x.min(axis=1), "min carry x"),
    "tm:__iand__": _f(lambda x: (x > 0).__iand__(x < 1), "logical_and shape gt_out lt_out"),
    "fn:F.nn.one_hot": _f(lambda x: F.nn.one_hot(x, 4), "one_hot shape x", x=TOKENS),
    "fn:F.nn.batch_norm": _p(lambda x, w: F.nn.batch_norm(x, w, w, w, w), (1, 4, 1, 1), "batch_norm norm x"),
    "fn:F.tensor.cumsum": _f(lambda x: F.cumsum(x, 1), "cumsum float x"),
    "tm:__rpow__": _f(lambda x: 2.0**x, "pow float x"),
    "fn:F.elemwise.sin": _f(lambda x: F.sin(x), "sin float x"),
    "fn:F.elemwise.cos": _f(lambda x: F.cos(x), "cos float x"),
    "tm:__ifloordiv__": _f(_half, "floor_div shape getitem_out"),
    "fn:F.elemwise.pow": _f(lambda x: F.pow(x, 2.0), "pow float x"),
    "fn:F.nn.layer_norm": _f(lambda x: F.nn.layer_norm(x, (8,), False), "layer_norm float x"),
    "fn:F.nn.pad": _f(lambda x: F.nn.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1))), "pad carry x"),
    "tm:__matmul__": _f(lambda x: x @ x, "matmul compute x x"),
    "fn:F.elemwise.mul": _f(lambda x: F.mul(x, 2.0), "mul elementwise x"),
    "fn:F.math.matinv": _f(lambda x: F.matinv(x), "matinv float x"),
    "mod:PReLU": _m(M.PReLU(4), "prelu elementwise x"),
}


def _k(function: Callable[..., Any], call: Callable[..., Any], *expected: str) -> Case:
    """Calls a function that is kept in a variable: the tracer sees only the kernel that it calls."""
    return Case(net(lambda self, x: call(function, x)), IMAGE, expected)


def _one(function: Callable[..., Any], expected: str) -> Case:
    return _k(function, lambda f, x: f(x), expected)


# The kernel in the graph -> a call that leaves it there.
KERNELS: dict[str, Case] = {
    "MatrixMul": _k(F.matmul, lambda f, x: f(x[0, 0], x[0, 1]), "matmul compute getitem_out getitem_out_1"),
    "BatchedMatrixMul": _k(F.matmul, lambda f, x: f(x, x, transpose_b=True), "matmul compute x x"),
    "Softmax": _k(F.softmax, lambda f, x: f(x, 1), "softmax float x"),
    "GroupNorm": _k(F.nn.group_norm, lambda f, x: f(x, 2, False), "group_norm float x"),
    "LayerNorm": _k(F.nn.layer_norm, lambda f, x: f(x, 8, False), "layer_norm float x"),
    "Concat": _k(F.concat, lambda f, x: f([x, x], 1), "concat concat x x"),
    "Stack": _k(F.stack, lambda f, x: f([x, x], 1), "stack concat x x"),
    "Where": _k(F.where, lambda f, x: f(x > 0, x, x), "where concat x x"),
    "AddAxis": _k(F.expand_dims, lambda f, x: f(x, 1), "expand_dims carry x"),
    "RemoveAxis": _k(F.squeeze, lambda f, x: f(x[:, :1], 1), "squeeze carry getitem_out"),
    "Identity": _one(F.copy, "identity carry x"),
    "PRELU": _k(F.leaky_relu, lambda f, x: f(x, 0.1), "prelu elementwise x"),
    "MAX": _k(F.maximum, lambda f, x: f(x, 0.5), "maximum elementwise x"),
    "CLIP": _k(F.clip, lambda f, x: f(x, -1.0, 1.0), "clip activation x"),
    "RELU": _one(F.relu, "relu activation x"),
    "RELU6": _one(F.relu6, "relu6 activation x"),
    "SIGMOID": _one(F.sigmoid, "sigmoid elementwise x"),
    "SILU": _one(F.silu, "silu elementwise x"),
    "H_SWISH": _one(F.hswish, "hswish elementwise x"),
    "HSIGMOID": _one(F.hsigmoid, "hsigmoid elementwise x"),
    "TANH": _one(F.tanh, "tanh elementwise x"),
    "GELU": _one(F.gelu, "gelu float x"),
    "SOFTPLUS": _one(F.softplus, "softplus float x"),
    "LOGSIGMOID": _one(F.logsigmoid, "logsigmoid float x"),
    "EXP": _one(F.exp, "exp float x"),
    "ABS": _one(F.abs, "abs elementwise x"),
    "NEGATE": _one(F.neg, "neg elementwise x"),
    "SQUARE": _one(F.square, "square float x"),
    "FLOOR": _one(F.floor, "floor float x"),
}

_ADDED = "add elementwise x x"

# What has the same rule as an op of the survey, or is like one.
SIBLINGS: dict[str, Case] = {
    "mod:Conv1d": Case(
        net(lambda self, x: self.m(x[:, :, 0]), m=M.Conv1d(4, 6, 3)), IMAGE, ("conv1d compute getitem_out",)
    ),
    "mod:ConvRelu2d": _m(M.ConvRelu2d(4, 6, 3), _CONV, "relu activation conv2d_out"),
    "mod:ConvTransposeRelu2d": _m(
        M.ConvTransposeRelu2d(4, 6, 3), "conv_transpose2d compute x", "relu activation conv_transpose2d_out"
    ),
    "mod:ConvTransposeBn2d": _m(
        M.ConvTransposeBn2d(4, 6, 3), "conv_transpose2d compute x", "batch_norm norm conv_transpose2d_out"
    ),
    "mod:ConvTransposeBnRelu2d": _m(
        M.ConvTransposeBnRelu2d(4, 6, 3),
        "conv_transpose2d compute x",
        "batch_norm norm conv_transpose2d_out",
        "relu activation m_bn_out",
    ),
    "mod:LinearRelu": _m(M.LinearRelu(8, 3), "linear compute x", "relu activation linear_out"),
    "mod:LinearBn1d": _m(M.LinearBn1d(5, 3), "linear compute x", "batch_norm norm linear_out", x=ROWS),
    "mod:LinearBnRelu1d": _m(
        M.LinearBnRelu1d(5, 3),
        "linear compute x",
        "batch_norm norm linear_out",
        "relu activation m_bn_out",
        x=ROWS,
    ),
    "mod:BatchMatMulActivation": Case(
        net(lambda self, x: self.m(x[0]), m=M.BatchMatMulActivation(4, 8, 3, False, "relu")),
        IMAGE,
        ("matmul compute m_weight getitem_out", "relu activation matmul_out"),
    ),
    "mod:Elemwise:FUSE_ADD_RELU": Case(
        net(lambda self, x: self.m(x, x), m=M.Elemwise("FUSE_ADD_RELU")),
        IMAGE,
        (_ADDED, "relu activation add_out"),
    ),
    "mod:Elemwise:fuse_mul_add3": Case(
        net(lambda self, x: self.m(x, x, x), m=M.Elemwise("fuse_mul_add3")),
        IMAGE,
        ("mul elementwise x x", "add elementwise mul_out x"),
    ),
    "mod:Elemwise:FUSE_ADD_SIGMOID": Case(
        net(lambda self, x: self.m(x, x), m=M.Elemwise("FUSE_ADD_SIGMOID")),
        IMAGE,
        ("elemwise elementwise x x",),
    ),
    "mod:Concat": Case(net(lambda self, x: self.m([x, x], 1), m=M.Concat()), IMAGE, ("concat concat x x",)),
    "fn:F.elemwise.clip:computed": _f(lambda x: F.clip(x, x.min(), 1.0), "clip float x"),
    "mod:Pad": _m(M.Pad(((0, 0), (0, 0), (1, 1), (1, 1)), constant_val=2.0), "pad float x"),
    "mod:Embedding": _m(M.Embedding(4, 4), "embedding float", x=TOKENS),
    "tm:__setitem__": _f(_setitem_number, "setitem concat mul_out"),
    "tm:astype:int32": _f(lambda x: x.astype("int32"), "astype float x"),
    "tm:__mul__:shape": _f(lambda x: x * x.shape[0], "mul float x getitem_out"),
    "fn:F.tensor.swapaxes": _f(lambda x: F.swapaxes(x, 1, 2), "swapaxes carry x"),
    "fn:F.tensor.tile": _f(lambda x: F.tile(x, (1, 2, 1, 1)), "tile carry x"),
    "fn:F.tensor.where": _f(lambda x: F.where(x > 0, x, x * 2.0), "where concat x mul_out"),
    "fn:F.tensor.linspace": _f(lambda x: F.linspace(0, x.shape[3] - 1, 4), "linspace shape sub_out"),
    "fn:F.math.var": _f(lambda x: F.var(x, 1), "var float x"),
    "fn:F.math.sort": _f(lambda x: F.sort(x), "sort float x", x=ROWS),
    "fn:F.math.normalize": _f(lambda x: F.normalize(x, axis=1), "normalize float x"),
    "fn:F.nn.softplus": _f(lambda x: F.softplus(x), "softplus float x"),
    "fn:F.nn.logsoftmax": _f(lambda x: F.logsoftmax(x, 1), "logsoftmax float x"),
    "fn:F.nn.pixel_shuffle": _f(lambda x: F.pixel_shuffle(x, 2), "pixel_shuffle carry x"),
    "fn:F.nn.group_norm": _f(lambda x: F.nn.group_norm(x, 2, False), "group_norm float x"),
    "fn:F.nn.instance_norm": _f(lambda x: F.nn.instance_norm(x, False), "instance_norm float x"),
    "fn:F.nn.prelu": _p(lambda x, w: F.nn.prelu(x, w), (1, 4, 1, 1), "prelu elementwise x"),
    "fn:F.nn.conv1d": _p(lambda x, w: F.nn.conv1d(x[:, :, 0], w), (4, 4, 3), "conv1d compute getitem_out"),
    "fn:F.vision.interpolate:nearest": _f(
        lambda x: F.vision.interpolate(x, (16, 16), mode="nearest"), "interpolate carry x"
    ),
}
