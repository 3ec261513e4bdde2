"""Expands conv and linear modules to their functions, so that weights and biases are nodes of the graph.

The modules stay in the tree and keep their parameters, so parameter names do not change.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import megengine.functional as F
import megengine.module as M

from qtrace.graph.edit import GraphEditor
from qtrace.graph.types import Expr, GetAttr, TensorNode, TracedModule
from qtrace.graph.walk import exprs, owner
from qtrace.passes.base import PassResult

__all__ = ["expand"]


def expand(traced: TracedModule) -> PassResult:
    """Replaces calls of Conv2d, ConvTranspose2d and Linear by the functions that they call.

    Args:
        traced: a flat traced module; it is edited in place.
    """
    changed: list[str] = []
    left: list[str] = []
    with GraphEditor(traced) as editor:
        for expr in exprs(traced):
            module = owner(expr)
            write = _WRITERS.get(type(module))
            if write is None:
                continue
            if not isinstance(expr.inputs[0].expr, GetAttr):
                left.append(
                    f"{expr.outputs[0].name}: its module is a constant of the trace, without parameters"
                )
                continue
            new = write(editor, expr, module, expr.inputs[0].expr.name)
            editor.replace_expr(expr, new)
            changed.append(f"{new.name}: {type(module).__name__} as a function")
    return PassResult(traced, tuple(changed), tuple(left))


def _parameters(editor: GraphEditor, module: Any, path: str) -> tuple[TensorNode, TensorNode | None]:
    weight = editor.get_attr(f"{path}.weight")
    return weight, (None if module.bias is None else editor.get_attr(f"{path}.bias"))


def _conv2d(editor: GraphEditor, expr: Expr, module: Any, path: str) -> TensorNode:
    weight, bias = _parameters(editor, module, path)
    (x, out), after, padding = (expr.args[1], expr.outputs[0]), expr, module.padding
    if module.padding_mode != "zeros":
        width = module.get_pad_witdth()
        x = editor.call_function(F.nn.pad, x, width, module.padding_mode, after=expr, like=x)
        x.shape = _padded(expr.args[1].shape, width)
        after, padding = x.expr, 0
    options = (module.stride, padding, module.dilation, module.groups, module.conv_mode, module.compute_mode)
    return editor.call_function(F.conv2d, x, weight, bias, *options, after=after, like=out)


def _padded(shape: Any, width: Any) -> tuple[int, ...]:
    return tuple(int(n) + int(before) + int(behind) for n, (before, behind) in zip(shape, width, strict=True))


def _conv_transpose2d(editor: GraphEditor, expr: Expr, module: Any, path: str) -> TensorNode:
    weight, bias = _parameters(editor, module, path)
    options = (module.stride, module.padding, module.output_padding, module.dilation, module.groups)
    modes = (module.conv_mode, module.compute_mode)
    x, out = expr.args[1], expr.outputs[0]
    return editor.call_function(F.conv_transpose2d, x, weight, bias, *options, *modes, after=expr, like=out)


def _linear(editor: GraphEditor, expr: Expr, module: Any, path: str) -> TensorNode:
    weight, bias = _parameters(editor, module, path)
    x, out = expr.args[1], expr.outputs[0]
    return editor.call_function(F.linear, x, weight, bias, module.compute_mode, after=expr, like=out)


_WRITERS: dict[type, Callable[[GraphEditor, Expr, Any, str], TensorNode]] = {
    M.Conv2d: _conv2d,
    M.ConvTranspose2d: _conv_transpose2d,
    M.Linear: _linear,
}
