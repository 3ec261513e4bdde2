"""Layers: matrix products, convolutions, recurrent layers, normalisation and pooling."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import megengine.functional as F
import megengine.module as M

from qtrace.graph import functions, recurrent
from qtrace.graph.types import Apply, CallFunction, Expr, TensorNode
from qtrace.graph.walk import is_float_tensor, owner
from qtrace.ops.arguments import (
    Arguments,
    UnreadableError,
    activation,
    arguments,
    children,
    operands,
    positional,
    settings,
    tensors,
    traced_arguments,
)
from qtrace.ops.base import OpRule, Reading, Role, op_rule, typed

# Linear layers and matrix products.


def weight_and_bias(a: Arguments) -> tuple[TensorNode, TensorNode | None]:
    """Reads the weight and the bias of a layer.

    Raises:
        UnreadableError: when one of them is not a tensor of the graph.
    """
    weight, bias = a["weight"], a["bias"]
    if not isinstance(weight, TensorNode) or not isinstance(bias, (TensorNode, type(None))):
        raise UnreadableError("its weight or bias is not a tensor of the graph")
    return weight, bias


def _linear(expr: Expr) -> Reading:
    a = arguments(expr)
    weight, bias = weight_and_bias(a)
    return Reading((a.tensor(),), {}, weight, bias, (0,))


def _matmul(expr: Expr) -> Reading:
    left, right = operands(expr, 2)
    flips = (False, False)
    if isinstance(expr, CallFunction):
        a = arguments(expr)  # F.dot lacks arguments for flips
        flips = (bool(a.get("transpose_a", False)), bool(a.get("transpose_b", False)))
    elif isinstance(expr, Apply):
        flips = (bool(expr.opdef.transposeA), bool(expr.opdef.transposeB))
    elif expr.method == "__rmatmul__":
        left, right = right, left
    nodes = tensors(left, right)
    if len(nodes) != 2:
        raise UnreadableError("an operand is not a tensor of the graph")
    return typed(expr, nodes, {"transpose_a": flips[0], "transpose_b": flips[1]})


_LINEAR = (
    op_rule("linear", Role.COMPUTE, _linear, F.linear),
    op_rule("matmul", Role.COMPUTE, _matmul, F.matmul, F.dot, kernels=["MatrixMul", "BatchedMatrixMul"]),
)


# Convolutions. Their modules are expanded to these functions before quantization (`passes.expand`).


def _conv(rank: int, transposed: bool = False) -> Callable[[Expr], Reading]:
    def read(expr: Expr) -> Reading:
        a = arguments(expr)
        weight, bias = weight_and_bias(a)
        if a.get("conv_mode", "cross_correlation") != "cross_correlation":
            raise UnreadableError(f"conv_mode {a['conv_mode']!r} is not supported")
        names = ("stride", "padding", "dilation", *(("output_padding",) if transposed else ()))
        numbers, fixed = traced_arguments({n: a[n] for n in (*names, "groups")})
        attrs = {**{n: numbers.integers(n, rank) for n in names}, "groups": numbers.integer("groups")}
        # A grouped weight has the groups as its first axis: (groups, out / groups, in / groups, ...), or
        # (groups, in / groups, out / groups, ...) if transposed.
        single, grouped = ((1,), (0, 2)) if transposed else ((0,), (0, 1))
        channels = grouped if len(weight.shape) == rank + 3 else single
        return Reading((a.tensor(),), attrs, weight, bias, channels, fixed=fixed)

    return read


def _float(expr: Expr) -> Reading:
    """Reads a module or function whose first operand is the activation."""
    nodes = tensors(*positional(expr))
    module = owner(expr)
    names = ("weight", "bias", "stride", "padding", "dilation", "groups")
    configured = arguments(expr) if module is None else {n: getattr(module, n, None) for n in names}
    return Reading(nodes[:1], {**{n: configured.get(n) for n in names}, "operands": nodes})


_SAMPLES = "it samples between pixels at offsets that 8 bits would round"
_PLACES = "no runtime has integer kernels for a weight of its own at every place"
_REGIONS = "no runtime has integer kernels for regions"
_DEFORMABLE = (M.DeformableConv2d, F.nn.deformable_conv2d)
_RESTRICTED = (M.RegionRestrictedConv, F.nn.region_restricted_conv)

_CONV = (
    op_rule("conv1d", Role.COMPUTE, _conv(1), F.nn.conv1d),
    op_rule("conv2d", Role.COMPUTE, _conv(2), F.conv2d),
    op_rule("conv3d", Role.COMPUTE, _conv(3), F.nn.conv3d),
    op_rule("conv_transpose2d", Role.COMPUTE, _conv(2, True), F.conv_transpose2d),
    op_rule("conv_transpose3d", Role.COMPUTE, _conv(3, True), F.nn.conv_transpose3d),
    op_rule("deformable_conv2d", Role.FLOAT, _float, *_DEFORMABLE, reason=_SAMPLES),
    op_rule("local_conv2d", Role.FLOAT, _float, M.LocalConv2d, F.nn.local_conv2d, reason=_PLACES),
    op_rule("region_restricted_conv", Role.FLOAT, _float, *_RESTRICTED, reason=_REGIONS),
)


# Recurrent layers and MegEngine's attention: ops whose inner products are not nodes of the graph.

_STATES = ("hidden", "cell")
_WEIGHTS = ("weights", "weight", "recurrence")


def _read(expr: Expr) -> Reading:
    return Reading(tuple(n for n in children((expr.args, expr.kwargs)) if is_float_tensor(n)))


def _recurrent(expr: Expr) -> Reading:
    """Reads a layer.

    Its attributes are the attributes of the function that prepare writes for it, parameters included, and
    ``multiplied``, the number of weights that a step multiplies by.
    """
    if not isinstance(expr, CallFunction):
        module = owner(expr)
        kind = module.kind if isinstance(module, recurrent.OnnxRecurrent) else ""
        return Reading(_read(expr).inputs, {"multiplied": _multiplied(module)}, kind=kind)
    a: dict[str, Any] = dict(arguments(expr))
    inputs = tensors(a["x"], *(a.get(name) for name in _STATES))
    count = sum(_size(a[name]) for name in _WEIGHTS if name in a)
    if "weights" in a and a["bias"]:
        count -= _biases(expr, a)
    return Reading(inputs, {**a, "multiplied": count})


def _size(weight: TensorNode) -> int:
    return math.prod(int(n) for n in weight.shape)


def _biases(expr: CallFunction, a: dict[str, Any]) -> int:
    """Counts the biases in the one parameter of a stack."""
    gates = 4 if expr.func is recurrent.stacked_lstm else 1
    return int(2 * gates * a["hidden_size"] * a["num_layers"] * (2 if a["bidirectional"] else 1))


def _multiplied(module: Any) -> int:
    """Counts the weights of MegEngine's own layers and cells."""
    if isinstance(module, (M.LSTMCell, M.RNNCell)):
        return sum(int(w.shape[0]) * int(w.shape[1]) for w in (module.weight_ih, module.weight_hh))
    if isinstance(module, recurrent.OnnxRecurrent):
        return sum(int(w.size) for w in (module.weight, module.recurrence))
    rows, columns = (int(n) for n in module._flatten_weights.shape)
    return rows * (columns - (2 * module.num_layers * module.num_directions if module.bias else 0))


_WHY = "its states would carry each rounding from step to step"
_ONE = "it is one op whose products are not nodes of the graph: write it with linear layers to quantize it"
_ATTENTION = (M.MultiHeadAttention, F.nn.multi_head_attention)


def _rule(kind: str, *callees: Any) -> OpRule:
    return op_rule(kind, Role.FLOAT, _recurrent, *callees, reason=_WHY)


_RECURRENT = (
    _rule("rnn", M.RNN, M.RNNCell, recurrent.rnn, recurrent.stacked_rnn),
    _rule("lstm", M.LSTM, M.LSTMCell, recurrent.lstm, recurrent.stacked_lstm),
    _rule("gru", recurrent.gru, recurrent.OnnxRecurrent),
    op_rule("multi_head_attention", Role.FLOAT, _read, *_ATTENTION, reason=_ONE),
)


# Normalisation. BatchNorm is folded into the layer before it, or fused with it; others stay float.


def _batch_norm(expr: Expr) -> Reading:
    a = settings(expr, "running_mean", "eps")
    if a["running_mean"] is None or a.get("training"):
        raise UnreadableError("it normalises by the statistics of each batch")
    names = ("running_mean", "running_var", "weight", "bias") if owner(expr) is None else ()
    return Reading((activation(expr),), {"eps": a.number("eps"), **{n: a[n] for n in names}})


def _affine(*fields: str) -> Callable[[Expr], Reading]:
    """Builds a reader of a norm: weight and bias (node, module tensor or None), eps and ``fields``."""

    def read(expr: Expr) -> Reading:
        node = activation(expr)
        if isinstance(expr, Apply):
            attrs = {"eps": float(expr.opdef.eps), **{n: getattr(expr.opdef, n, None) for n in _FIELDS}}
            weight, bias = (*expr.inputs[1:], None, None)[:2]
            return Reading((node,), {**attrs, "weight": weight, "bias": bias})
        a = settings(expr, "weight", "bias", "eps", *fields)
        if not a.get("affine", True):
            a["weight"] = a["bias"] = None
        attrs = {"eps": a.number("eps"), "weight": a["weight"], "bias": a["bias"]}
        return Reading((node,), {**attrs, **{n: a[n] for n in fields}})

    return read


_FIELDS = ("group", "normalized_dim")


def _softmax(expr: Expr) -> Reading:
    node, a = activation(expr), settings(expr, "axis")
    if a["axis"] is None:
        # MegEngine's softmax chooses the axis of the channels of a matrix, of an image or of a batch of them.
        a["axis"] = 0 if len(node.shape) in (0, 1, 3) else 1
    return typed(expr, (node,), {"axis": a.axes("axis")})


def _named_axis(expr: Expr) -> Reading:
    a = arguments(expr)
    names = ("axis", "ord", "eps", "keepdims")
    return Reading((activation(expr),), {n: a[n] for n in names if n in a})


def _local_response(expr: Expr) -> Reading:
    names = ("kernel_size", "k", "alpha", "beta")
    a = settings(expr, *names)
    return Reading((activation(expr),), {n: a[n] for n in names})


def _float_norm(
    kind: str, read: Callable[[Expr], Reading], *callees: Callable[..., Any], kernels: tuple[str, ...] = ()
) -> OpRule:
    reason = "it keeps its accuracy only in float between 8-bit neighbours"
    return op_rule(kind, Role.FLOAT, read, *callees, kernels=kernels, reason=reason)


_LAYER_NORMS = (M.LayerNorm, F.nn.layer_norm)
_BATCH_NORMS = (M.BatchNorm2d, M.BatchNorm1d, M.SyncBatchNorm, F.nn.batch_norm)

_NORM = (
    op_rule("batch_norm", Role.NORM, _batch_norm, *_BATCH_NORMS),
    _float_norm("softmax", _softmax, M.Softmax, F.softmax, kernels=("Softmax",)),
    _float_norm("logsoftmax", _named_axis, F.logsoftmax, functions.log_softmax),
    _float_norm("logsumexp", _named_axis, F.logsumexp),
    _float_norm("norm", _named_axis, F.norm),
    _float_norm("normalize", _named_axis, F.normalize),
    _float_norm("layer_norm", _affine("normalized_shape"), *_LAYER_NORMS, kernels=("LayerNorm",)),
    _float_norm("group_norm", _affine("num_groups"), M.GroupNorm, F.nn.group_norm, kernels=("GroupNorm",)),
    _float_norm("instance_norm", _affine(), M.InstanceNorm, F.nn.instance_norm, kernels=("InstanceNorm",)),
    _float_norm("general_norm", _affine("normalized_axis"), M.GeneralNorm, F.nn.general_norm),
    _float_norm("local_response_norm", _local_response, M.LocalResponseNorm, F.nn.local_response_norm),
)


# Pooling.


def _window(expr: Expr, *more: str) -> Reading:
    names = ("kernel_size", "stride", "padding")
    a = settings(expr, *names, *more)
    numbers, fixed = traced_arguments({n: a[n] for n in names})
    kernel = numbers.integers("kernel_size", 2)
    attrs: dict[str, Any] = {
        "kernel": kernel,
        "stride": kernel if numbers["stride"] is None else numbers.integers("stride", 2),
        "padding": numbers.integers("padding", 2),
    }
    if "mode" in a:
        attrs["count_include_pad"] = a["mode"] == "average"
    return Reading((activation(expr),), attrs, fixed=fixed)


def _average(expr: Expr) -> Reading:
    return _window(expr, "mode")


def _adaptive(expr: Expr) -> Reading:
    numbers, fixed = traced_arguments({"output size": settings(expr, "oshp")["oshp"]})
    return Reading((activation(expr),), {"output_size": numbers.integers("output size", 2)}, fixed=fixed)


_ADAPTIVE_MEAN = (M.AdaptiveAvgPool2d, F.adaptive_avg_pool2d)
_ADAPTIVE_MAX = (M.AdaptiveMaxPool2d, F.adaptive_max_pool2d)

_POOL = (
    op_rule("max_pool2d", Role.CARRY, _window, M.MaxPool2d, F.max_pool2d),
    op_rule("avg_pool2d", Role.ELEMENTWISE, _average, M.AvgPool2d, F.avg_pool2d),
    op_rule("adaptive_avg_pool2d", Role.ELEMENTWISE, _adaptive, *_ADAPTIVE_MEAN),
    op_rule("adaptive_max_pool2d", Role.CARRY, _adaptive, *_ADAPTIVE_MAX),
)

RULES = (*_LINEAR, *_CONV, *_RECURRENT, *_NORM, *_POOL)
