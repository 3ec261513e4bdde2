"""Expands layers and fused modules to functions, so that weights and biases are nodes of the graph.

The functions have gradients, which the layers lack on CPU. The results differ by the order of sums.

MegEngine adds a bias of one number to all channels, and ``bias[...] = 0`` leaves a parameter of one number.
It also adds a bias of any other shape, such as one for each place of a map or for each sample. That is an op
of its own in every runtime.

The kernel ``Where``, which MegEngine cannot write into a file, is expanded as well. The modules stay in the
tree and keep their parameters, so parameter names do not change. The results stay equal bit for bit: a fused
module becomes the calls that its own forward makes. Recurrent layers, which become functions that have
gradients, stay equal up to the order of their sums.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from typing import Any

import megengine.functional as F
import megengine.module as M
import numpy as np

from qtrace import ops
from qtrace.graph import recurrent
from qtrace.graph.edit import GraphEditor
from qtrace.graph.flatten import delete_attribute
from qtrace.graph.operations import KERNELS
from qtrace.graph.types import Apply, Expr, GetAttr, TensorNode, TracedModule
from qtrace.graph.walk import exprs, owner, users
from qtrace.ops import OpCall
from qtrace.preparation.passes.base import Left, PassResult

# Expands MegEngine's recurrent layers: layers to one function of their parameters, cells to linear layers.


def find_recurrent_obstacle(module: Any) -> str | None:
    """Returns the reason why a recurrent layer cannot be expanded, as a clause; None if it can."""
    if isinstance(module, M.LSTM) and module.proj_size > 0:
        return "its hidden state is projected (proj_size)"
    return None


def expand_recurrent(editor: GraphEditor, expr: Expr) -> None:
    """Replaces a call of a recurrent layer or cell, one of `RECURRENT`."""
    module: Any = owner(expr)
    write: Any = _RECURRENT_WRITERS[type(module)]
    bound = inspect.signature(type(module).forward).bind(*expr.args, **expr.kwargs)
    bound.apply_defaults()
    attribute = expr.inputs[0].expr
    assert isinstance(attribute, GetAttr)
    results = write(_Writer(editor, expr, attribute.name), module, *bound.args[1:])
    for new, old in zip(results, expr.outputs, strict=True):
        editor.put_in_place(new, old)
    editor.remove(expr)


class _Writer:
    """Writes new calls in the place of ``expr``, one after the other."""

    def __init__(self, editor: GraphEditor, expr: Expr, path: str) -> None:
        self.editor, self.after, self.path = editor, expr, path
        self.name = expr.outputs[0].name

    def __call__(self, func: Any, *args: Any, like: TensorNode | None = None, **kwargs: Any) -> Any:
        result = self.editor.call_function(
            func, *args, after=self.after, like=like, name=f"{self.name}_{func.__name__}", **kwargs
        )
        self.after = (result[0] if isinstance(result, (tuple, list)) else result).expr
        return result

    def parameter(self, name: str) -> TensorNode:
        """Returns the node of a parameter of the layer."""
        node = self.editor.get_attr(f"{self.path}.{name}")
        assert isinstance(node, TensorNode)
        return node


def _options(module: M.LSTM | M.RNN) -> dict[str, Any]:
    return {
        "hidden_size": module.hidden_size,
        "num_layers": module.num_layers,
        "bias": bool(module.bias),
        "bidirectional": bool(module.bidirectional),
        "batch_first": bool(module.batch_first),
    }


def _lstm(write: _Writer, module: M.LSTM, x: TensorNode, hx: Any) -> tuple[TensorNode, ...]:
    hidden, cell = (None, None) if hx is None else hx
    weights = write.parameter("_flatten_weights")
    return tuple(write(recurrent.stacked_lstm, x, weights, hidden, cell, **_options(module)))


def _rnn(write: _Writer, module: M.RNN, x: TensorNode, hx: Any) -> tuple[TensorNode, ...]:
    weights, mode = write.parameter("_flatten_weights"), str(module.nonlinearity).lower()
    return tuple(write(recurrent.stacked_rnn, x, weights, hx, **_options(module), nonlinearity=mode))


def _gates(write: _Writer, module: M.LSTMCell | M.RNNCell, x: TensorNode, hidden: Any) -> TensorNode:
    """Writes the products of the input and the hidden state, which is zero if it is None."""
    biases = [write.parameter(name) if module.bias else None for name in ("bias_ih", "bias_hh")]
    gates: TensorNode = write(F.linear, x, write.parameter("weight_ih"), biases[0])
    if hidden is not None:
        more = write(F.linear, hidden, write.parameter("weight_hh"), biases[1], like=gates)
    else:
        more = biases[1]
    return gates if more is None else write(F.add, gates, more, like=gates)


def _lstm_cell(write: _Writer, module: M.LSTMCell, x: TensorNode, hx: Any) -> tuple[TensorNode, ...]:
    hidden, state = (None, None) if hx is None else hx
    parts = write(F.split, _gates(write, module, x, hidden), 4, axis=1)
    i, f, o = (write(F.sigmoid, parts[place], like=parts[place]) for place in (0, 1, 3))
    g = write(F.tanh, parts[2], like=parts[2])
    new = write(F.mul, i, g, like=g)
    if state is not None:
        new = write(F.add, write(F.mul, f, state, like=g), new, like=g)
    return write(F.mul, o, write(F.tanh, new, like=g), like=g), new


def _rnn_cell(write: _Writer, module: M.RNNCell, x: TensorNode, hx: Any) -> tuple[TensorNode, ...]:
    gates = _gates(write, module, x, hx)
    function = F.relu if str(module.nonlinearity).lower() == "relu" else F.tanh
    return (write(function, gates, like=gates),)


def _onnx(
    write: _Writer, module: recurrent.OnnxRecurrent, x: TensorNode, *states: Any
) -> tuple[TensorNode, ...]:
    names = ("weight", "recurrence", *(() if module.bias is None else ("bias",)))
    weights = (*map(write.parameter, names), *(None,) * (3 - len(names)))
    if module.kind == "lstm":
        return tuple(write(recurrent.lstm, x, *weights, *states, module.direction))
    if module.kind == "gru":
        reset = module.linear_before_reset
        return tuple(write(recurrent.gru, x, *weights, states[0], module.direction, reset))
    return tuple(write(recurrent.rnn, x, *weights, states[0], module.direction, module.nonlinearity))


_RECURRENT_WRITERS: dict[Any, Any] = {
    M.LSTM: _lstm,
    M.LSTMCell: _lstm_cell,
    M.RNN: _rnn,
    M.RNNCell: _rnn_cell,
    recurrent.OnnxRecurrent: _onnx,
}
# The classes of modules that `expand_recurrent` replaces.
RECURRENT = frozenset(_RECURRENT_WRITERS)


# Gives every layer a bias with one number per channel, as integer kernels and files take it.


def align_biases(traced: TracedModule, before_norms: bool = True) -> PassResult:
    """Broadcasts biases of one number to the channels of their layers, and adds other shapes after them.

    The parameters stay as they are.

    Args:
        traced: a flat, expanded graph; it is edited in place.
        before_norms: False leaves a bias of one number to ``fuse_bn`` where a BatchNorm follows the layer.
    """
    changed = []
    with GraphEditor(traced) as editor:
        for call, bias in list(_unaligned_biases(traced)):
            shape = _bias_shape(call)
            if math.prod(bias.shape) == 1 and len(bias.shape) <= len(call.inputs[0].shape):
                if not before_norms and any(
                    (reader := ops.read(user)) is not None and reader.kind == "batch_norm"
                    for user in users(call.out)
                ):
                    continue
                shape = (1,) * (len(bias.shape) - len(shape)) + shape
                new = editor.call_function(F.broadcast_to, bias, shape, after=bias.expr, like=bias)
                new.shape = shape
                editor.set_argument(call.expr, "bias", new)
                changed.append(
                    f"{call.out.name}: its bias of one number broadcast to {math.prod(shape)} channels"
                )
                continue
            name = call.out.name
            total = editor.call_function(F.add, call.out, bias, after=call.expr, like=call.out)
            editor.set_argument(call.expr, "bias", None)
            editor.put_in_place(total, call.out)
            changed.append(f"{name}: its bias of shape {tuple(bias.shape)} is a sum of its own")
    return PassResult(tuple(changed))


def _unaligned_biases(traced: TracedModule) -> Iterator[tuple[OpCall, TensorNode]]:
    """Yields each layer whose bias lacks a number for each channel along their axis, and that bias."""
    for expr in exprs(traced):
        call = ops.read(expr)
        if call is None or call.weight is None or call.bias is None or len(call.out.shape or ()) < 2:
            continue
        if call.inputs[0].shape is None or call.bias.shape is None:  # later stages name what has no shape
            continue
        own, shape = tuple(int(n) for n in call.bias.shape), _bias_shape(call)
        rank = len(call.inputs[0].shape)
        padded = (1,) * (rank - len(own)) + own
        if padded != (1,) * (rank - len(shape)) + shape:
            yield call, call.bias


def _bias_shape(call: OpCall) -> tuple[int, ...]:
    """Returns the shape of a bias with one number for each channel of a layer."""
    assert call.weight is not None
    channels = math.prod(int(call.weight.shape[axis]) for axis in call.channel_axes)
    return (channels,) if call.kind == "linear" else (1, channels, *[1] * (len(call.inputs[0].shape) - 2))


def expand(traced: TracedModule) -> PassResult:
    """Replaces calls of layers and of MegEngine's fused modules by the functions that they call.

    Args:
        traced: a flat traced module; it is edited in place.
    """
    changed: list[str] = []
    left: list[Left] = []
    with GraphEditor(traced) as editor:
        for expr in exprs(traced):
            if isinstance(expr, Apply) and str(expr.opdef) == "Where":
                editor.replace_expr(expr, _expand_where(editor, expr))
                changed.append(f"{expr.outputs[0].name}: Where as a function")
                continue
            module = owner(expr)
            write = _WRITERS.get(type(module))
            if write is None and type(module) not in RECURRENT:
                continue
            out = expr.outputs[0].name
            reason = _find_obstacle(expr, module)
            if reason is not None:
                left.append(Left(out, reason))
                continue
            if write is None:
                expand_recurrent(editor, expr)
            else:
                new = write(_Calls(editor, expr), module, getattr(expr.inputs[0].expr, "name", ""))
                editor.replace_expr(expr, new)
            changed.append(f"{out}: {type(module).__name__} as a function")
    _drop_empty(traced)
    return PassResult(tuple(changed), tuple(left))


def _expand_where(editor: GraphEditor, expr: Expr) -> TensorNode:
    """Writes the kernel ``Where`` as `F.where`, which reads its mask as truth values, not as numbers."""
    mask, x, y = expr.inputs
    condition = editor.call_function(F.not_equal, mask, 0.0, after=expr, like=mask)
    condition.dtype = np.bool_
    return editor.call_function(F.where, condition, x, y, after=condition.expr, like=expr.outputs[0])


def _drop_empty(traced: TracedModule) -> None:
    """Deletes the Elemwise modules that no expr calls any more: they have no parameters."""
    used = {e.name for e in exprs(traced) if isinstance(e, GetAttr)}
    empty = [n for n, m in traced.named_modules() if isinstance(m, M.Elemwise) and n not in used]
    for path in empty:
        delete_attribute(traced, path)


def _find_obstacle(expr: Expr, module: Any) -> str | None:
    """Returns the reason why ``module`` cannot be expanded, as a clause; None if it can."""
    if isinstance(module, M.Elemwise):
        mode = str(module.method).upper()
        return None if mode in _ELEMWISE else f"Elemwise {mode} is computed as one"
    if not isinstance(expr.inputs[0].expr, GetAttr):
        return "its module is a constant of the trace, without parameters"
    layers = [getattr(module, n) for n in ("conv", "conv_transpose2d", "linear") if hasattr(module, n)]
    unknown = [layer for layer in layers if type(layer) not in _WRITERS]
    return f"its layer is a {type(unknown[0]).__name__}" if unknown else find_recurrent_obstacle(module)


class _Calls:
    """Writes new calls in the place of ``expr``, one after the other."""

    def __init__(self, editor: GraphEditor, expr: Expr) -> None:
        self.editor = editor
        self.args = tuple(expr.args[1:])
        self.after = expr
        self.like = expr.outputs[0]

    def function(self, func: Callable[..., Any], *args: Any) -> TensorNode:
        """Calls ``func``; its output has the shape of the module's output."""
        node = self.editor.call_function(func, *args, after=self.after, like=self.like)
        self.after = node.expr
        return node

    def module(self, path: str, x: TensorNode) -> TensorNode:
        """Calls the submodule at ``path``."""
        node = self.editor.call_module(path, x, after=self.after, like=self.like)
        self.after = node.expr
        return node

    def parameters(self, module: Any, path: str) -> tuple[TensorNode, TensorNode | None]:
        """Returns the nodes of weight and bias of the module at ``path``."""
        weight = self.editor.get_attr(f"{path}.weight")
        return weight, (None if module.bias is None else self.editor.get_attr(f"{path}.bias"))


def _conv(func: Callable[..., Any]) -> Callable[..., TensorNode]:
    def write(calls: _Calls, module: Any, path: str) -> TensorNode:
        x, padding = calls.args[0], module.padding
        if func is not F.nn.conv3d and module.padding_mode != "zeros":
            width, shape = module.get_pad_witdth(), x.shape
            x = calls.function(F.nn.pad, x, width, module.padding_mode)
            x.shape, padding = _padded(shape, width), 0
        options = [module.stride, padding, module.dilation, module.groups, module.conv_mode]
        if func is not F.nn.conv3d:
            options.append(module.compute_mode)
        return calls.function(func, x, *calls.parameters(module, path), *options)

    return write


def _padded(shape: Any, width: Any) -> tuple[int, ...]:
    return tuple(int(n) + int(before) + int(behind) for n, (before, behind) in zip(shape, width, strict=True))


def _conv_transpose2d(calls: _Calls, module: Any, path: str) -> TensorNode:
    options = (module.stride, module.padding, module.output_padding, module.dilation, module.groups)
    modes = (module.conv_mode, module.compute_mode)
    weight, bias = calls.parameters(module, path)
    return calls.function(F.conv_transpose2d, calls.args[0], weight, bias, *options, *modes)


def _conv_transpose3d(calls: _Calls, module: Any, path: str) -> TensorNode:
    # Like the forward of ConvTranspose3d, which does not pass its groups.
    options = (module.stride, module.padding, module.output_padding, module.dilation)
    return calls.function(F.nn.conv_transpose3d, calls.args[0], *calls.parameters(module, path), *options)


def _linear(calls: _Calls, module: Any, path: str) -> TensorNode:
    return calls.function(F.linear, calls.args[0], *calls.parameters(module, path), module.compute_mode)


def _prelu(calls: _Calls, module: Any, path: str) -> TensorNode:
    return calls.function(F.nn.prelu, calls.args[0], calls.editor.get_attr(f"{path}.weight"))


def _with_relu(write: Callable[..., TensorNode]) -> Callable[..., TensorNode]:
    return lambda calls, module, path: calls.function(F.relu, write(calls, module, path))


def _with_norm(name: str) -> Callable[..., TensorNode]:
    """Returns a writer of the layer ``name`` of a module and of its BatchNorm ``bn``."""

    def write(calls: _Calls, module: Any, path: str) -> TensorNode:
        layer = getattr(module, name)
        y = _WRITERS[type(layer)](calls, layer, f"{path}.{name}")
        return calls.module(f"{path}.bn", y)

    return write


def _matmul(calls: _Calls, module: Any, path: str) -> TensorNode:
    weight, bias = calls.parameters(module, path)
    y = calls.function(F.matmul, weight, calls.args[0])
    if bias is not None:
        y = calls.function(F.add, y, bias)
    return calls.function(F.relu, y) if module.nonlinear_mode == "relu" else y


def _elemwise(calls: _Calls, module: Any, path: str) -> TensorNode:
    return _ELEMWISE[str(module.method).upper()](calls)


def _function(func: Callable[..., Any]) -> Callable[[_Calls], TensorNode]:
    return lambda calls: calls.function(func, *calls.args)


def _add_then(func: Callable[..., Any]) -> Callable[[_Calls], TensorNode]:
    return lambda calls: calls.function(func, calls.function(F.add, *calls.args))


def _multiply_add(calls: _Calls) -> TensorNode:
    """Writes a * b + c, or a * b + c * d."""
    a, b, c, *d = calls.args
    product = calls.function(F.mul, a, b)
    return calls.function(F.add, product, calls.function(F.mul, c, *d) if d else c)


_ELEMWISE: dict[str, Callable[[_Calls], TensorNode]] = {
    **{mode: _function(func) for mode, func in KERNELS.items()},
    "FUSE_ADD_RELU": _add_then(F.relu),
    "FUSE_ADD_H_SWISH": _add_then(F.hswish),
    "FUSE_MUL_ADD3": _multiply_add,
    "FUSE_MUL_ADD4": _multiply_add,
}

_WRITERS: dict[type, Callable[[_Calls, Any, str], TensorNode]] = {
    M.Conv1d: _conv(F.nn.conv1d),
    M.Conv2d: _conv(F.conv2d),
    M.Conv3d: _conv(F.nn.conv3d),
    M.ConvTranspose2d: _conv_transpose2d,
    M.ConvTranspose3d: _conv_transpose3d,
    M.Linear: _linear,
    M.PReLU: _prelu,
    M.ConvRelu2d: _with_relu(_conv(F.conv2d)),
    M.ConvTransposeRelu2d: _with_relu(_conv_transpose2d),
    M.LinearRelu: _with_relu(_linear),
    M.ConvBn2d: _with_norm("conv"),
    M.ConvBnRelu2d: _with_relu(_with_norm("conv")),
    M.ConvTransposeBn2d: _with_norm("conv_transpose2d"),
    M.ConvTransposeBnRelu2d: _with_relu(_with_norm("conv_transpose2d")),
    M.LinearBn1d: _with_norm("linear"),
    M.LinearBnRelu1d: _with_relu(_with_norm("linear")),
    M.BatchMatMulActivation: _matmul,
    M.Elemwise: _elemwise,
}
