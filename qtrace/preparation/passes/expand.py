"""Expands layers and fused modules to functions, so that weights and biases are nodes of the graph.

The kernel ``Where``, which MegEngine cannot write into a file, is expanded as well. The modules stay in the
tree and keep their parameters, so parameter names do not change. The results stay equal bit for bit: a fused
module becomes the calls that its own forward makes. Recurrent layers, which become functions that have
gradients, stay equal up to the order of their sums.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import megengine.functional as F
import megengine.module as M
import numpy as np

from qtrace.graph.edit import GraphEditor
from qtrace.graph.flatten import delete_attribute
from qtrace.graph.types import Apply, Expr, GetAttr, TensorNode, TracedModule
from qtrace.graph.walk import exprs, owner
from qtrace.preparation.passes.base import Left, PassResult
from qtrace.preparation.passes.recurrent import RECURRENT, expand_recurrent, find_recurrent_obstacle

__all__ = ["expand"]


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


# Functions with the name of their Elemwise mode.
_SAME_NAMES = (
    "add sub mul pow floor_div mod relu relu6 sigmoid hsigmoid tanh silu gelu softplus logsigmoid "
    "exp log sqrt square abs floor ceil round sin cos"
)
_RENAMED: dict[str, Callable[..., Any]] = {
    "TRUE_DIV": F.div,
    "MAX": F.maximum,
    "MIN": F.minimum,
    "H_SWISH": F.hswish,
    "NEGATE": F.neg,
}
# Without FUSE_ADD_SIGMOID and FUSE_ADD_TANH, which round differently from two separate ops.
_ELEMWISE: dict[str, Callable[[_Calls], TensorNode]] = {
    **{name.upper(): _function(getattr(F, name)) for name in _SAME_NAMES.split()},
    **{mode: _function(func) for mode, func in _RENAMED.items()},
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
