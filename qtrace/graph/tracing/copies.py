"""Copies of views for MegEngine's broadcasting kernels, which compute wrong values from views on CPU.

On CPU, MegEngine 1.13 computes ``a + b`` wrong if two things meet. ``b`` is broadcast along the first axes
only, as a grid or a vector is. And ``a`` is a view whose rows do not follow each other in memory, such as
``x[..., :2]``. The kernel takes ``a`` for contiguous. The same holds for ``- * / **``, maximum and minimum,
in eager mode and under ``jit.trace``. It also holds for the gradient of ``* / **`` where the gradient that
arrives is such a view. Such views come after a concatenation, a stack or a sum over the first axes.

LayerNorm's gradient asserts that its input is laid out as its result: it stops with an AsyncError at the view
``x[:, 0:1]`` of a single sample.

Poolings, transposed convolutions and RoIAlign assert that their input is contiguous.

A copy is ``F.nn.pad`` by zero elements. It changes no bit and has a gradient. ``F.copy`` keeps the view, and
``jit.trace`` removes ``x * 1.0``.
"""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import megengine.functional as F
import numpy as np
from megengine.traced_module import TracedModule
from megengine.traced_module.expr import (
    Apply,
    CallFunction,
    CallMethod,
    Constant,
    Expr,
    GetAttr,
    is_call_module,
)
from megengine.traced_module.node import Node, TensorNode
from megengine.traced_module.traced_module import InternalGraph

from qtrace.errors import shorten_list
from qtrace.graph.edit import GraphEditor
from qtrace.graph.notes import source_line
from qtrace.graph.walk import signature

_PRODUCTS = {"mul", "div", "truediv", "pow", "MUL", "TRUE_DIV", "POW"}
_ARITHMETIC = {"add", "sub", "maximum", "minimum", "ADD", "SUB", "MAX", "MIN", *_PRODUCTS}
_ARITHMETIC |= {"FUSE_ADD_RELU", "FUSE_ADD_H_SWISH", "FUSE_MUL_ADD3"}
# Ops whose result is a view if their input is one. Some copy at times: one copy more does no harm.
_KEEPS_LAYOUT = {"reshape", "Reshape", "flatten", "expand_dims", "AddAxis", "squeeze", "RemoveAxis"}
_KEEPS_LAYOUT |= {"transpose", "Dimshuffle", "swapaxes", "roll"}
_KEEPS_LAYOUT |= {
    "copy",
    "Copy",
    "detach",
    "Identity",
    "Dropout",
    "dropout",
    "__pos__",
    "to",
    "astype",
    "TypeCvt",
}
_NORMS = {"layer_norm", "LayerNorm"}
# Kernels that assert that their first input is contiguous.
_CONTIGUOUS = {"max_pool2d", "avg_pool2d", "MaxPool2d", "AvgPool2d", "Pooling", "roi_align", "ROIAlign"}
_CONTIGUOUS |= {"conv_transpose2d", "conv_transpose3d", "ConvTranspose2d", "ConvTranspose3d"}
_CONTIGUOUS |= {"ConvTransposeRelu2d", "ConvTransposeBn2d", "ConvTransposeBnRelu2d"}
_CONTIGUOUS |= {"ConvolutionBackwardData", "Convolution3DBackwardData"}
_REPEATS = {"broadcast_to", "_broadcast", "Broadcast", "repeat", "tile"}
_SUMS = {"sum", "mean"}


def kernel_name(expr: Expr) -> str:
    """Returns the function, method or kernel that ``expr`` calls; ``add`` for all operators of addition."""
    if isinstance(expr, CallFunction):
        module = str(expr.func.__module__)
        return str(expr.func.__name__) if module.startswith("megengine.") else ""
    if isinstance(expr, Apply):
        kind = type(expr.opdef).__name__
        return str(expr.opdef.mode).rpartition(".")[2] if kind == "Elemwise" else kind
    if not isinstance(expr, CallMethod):
        return ""
    if is_call_module(expr):
        return str(expr.inputs[0].module_type.__name__)
    name = str(expr.method)
    bare = name.strip("_")
    known = bare if bare in _ARITHMETIC else bare[1:] if bare[1:] in _ARITHMETIC and bare[0] in "ri" else ""
    return known if known and name.startswith("__") else name


def is_arithmetic(name: str) -> bool:
    """Returns whether a kernel of the call ``name`` may read a view as contiguous memory."""
    return name in _ARITHMETIC


def is_product(name: str) -> bool:
    """Returns whether such a kernel computes a gradient of the call from the gradient that arrives."""
    return name in _PRODUCTS


def refuses_views(name: str) -> bool:
    """Returns whether the kernel of the call ``name``, or the kernel of its gradient, stops at a view."""
    return name in _NORMS or name in _CONTIGUOUS


def reads_only_shape(name: str) -> bool:
    """Returns whether the result of the call ``name`` depends on the shape of its input only."""
    return name in ("GetVarShape", "zeros_like", "ones_like", "full_like")


def broadcasts_first_axes(
    view: Sequence[int], other: Sequence[int], view_is_fixed: bool, other_is_fixed: bool
) -> bool:
    """Returns whether ``other`` is, at some batch size, broadcast only over the first axes of ``view``.

    Args:
        view: the shape of the operand that may be a view.
        other: the shape of the other operand.
        view_is_fixed: whether the view is without a batch, since it does not depend on the inputs' values.
        other_is_fixed: the same of the other operand; its first axis then has the same size for all batches.
    """
    rank = max(len(view), len(other))
    pairs = zip(
        (1,) * (rank - len(view)) + tuple(view), (1,) * (rank - len(other)) + tuple(other), strict=True
    )
    axes = [
        "none" if x == y == 1 else "same" if x == y else "spread" if y == 1 else "other" for x, y in pairs
    ]
    cases = [axes]
    if not view_is_fixed and len(view) == rank:
        cases.append(["none", *axes[1:]])  # a batch of 1
        if other_is_fixed and axes[0] == "none":
            cases.append(["spread", *axes[1:]])  # a larger one
    return any(_spreads_then_same([a for a in case if a != "none"]) for case in cases)


def _spreads_then_same(axes: list[str]) -> bool:
    spread = next((i for i, axis in enumerate(axes) if axis != "spread"), len(axes))
    return 0 < spread < len(axes) and all(axis == "same" for axis in axes[spread:])


def gives_view(expr: Expr, name: str, inputs: Sequence[tuple[Node, bool]]) -> bool:
    """Returns whether the results of ``expr`` may be views whose rows are not contiguous.

    Args:
        expr: the expr.
        name: what it calls; see `kernel_name`.
        inputs: the nodes that ``expr`` reads, each with whether it may be such a view.
    """
    if name in _REPEATS:
        return True
    if name in ("split", "Split"):
        return inputs[0][1] or _axis(expr, 2, len(inputs[0][0].shape or ())) != 0
    if name == "Subtensor":
        return True
    if name == "__getitem__":
        return _cuts(expr.args[1], len(inputs[0][0].shape or ()), inputs[0][1])
    if name in _KEEPS_LAYOUT and inputs:
        source, is_view = next(pair for pair in inputs if isinstance(pair[0], TensorNode))
        return is_view and source.dtype == expr.outputs[0].dtype
    return False


def _cuts(index: Any, rank: int, is_view: bool) -> bool:
    """Returns whether ``x[index]`` is a view without contiguous rows, for a tensor of ``rank`` axes."""
    items = list(index) if isinstance(index, tuple) else [index]
    if any(isinstance(item, (list, TensorNode)) and not _is_number(item) for item in items):
        return False  # gathers into new memory
    indexed = [item for item in items if item is not None and item is not Ellipsis]
    place = items.index(Ellipsis) if any(item is Ellipsis for item in items) else len(items)
    front = [item for item in items[:place] if item is not None]
    whole: list[Any] = [slice(None)] * max(rank - len(indexed), 0)
    axes = [*front, *whole, *indexed[len(front) :]]
    if axes and not (isinstance(axes[-1], slice) and axes[-1].step in (None, 1)):
        return False  # steps along the last axis: another kernel
    first = axes[0] if axes else slice(None)
    steps = isinstance(first, slice) and first.step not in (None, 1)
    return is_view or steps or any(not _is_whole(item) for item in axes[1:])


def _is_whole(item: Any) -> bool:
    return (
        isinstance(item, slice) and item.start in (None, 0) and item.stop is None and item.step in (None, 1)
    )


def _is_number(item: Any) -> bool:
    return isinstance(item, TensorNode) and item.shape == ()


def returns_views(expr: Expr, name: str, arrives: bool) -> list[bool]:
    """Returns whether the gradient of ``expr`` for each of its inputs may be a view without contiguous rows.

    Args:
        expr: the expr.
        name: what it calls; see `kernel_name`.
        arrives: whether the gradient of an output of ``expr`` is such a view.
    """
    if name in _SUMS:
        return [_sums_first_axes(expr, len(node.shape or ())) for node in expr.inputs]
    if name in ("add", "ADD", "sub", "SUB"):
        return [arrives and node.shape == expr.outputs[0].shape for node in expr.inputs]
    if name in ("concat", "Concat", "stack"):
        joins_rows = _axis(expr, 1, len(expr.outputs[0].shape or ())) == 0
        return [arrives or not joins_rows] * len(expr.inputs)
    return [arrives and name in _KEEPS_LAYOUT] * len(expr.inputs)


def _sums_first_axes(expr: Expr, rank: int) -> bool:
    """Returns whether the gradient of a sum or mean is, at some batch size, broadcast over the first axes."""
    axis = _argument(expr, "axis", 1)
    if axis is None or not isinstance(axis, (int, tuple, list)):
        return False
    axes = {int(a) % max(rank, 1) for a in (axis if isinstance(axis, (tuple, list)) else [axis])}
    return bool(axes & {0, 1}) and rank - 1 not in axes


def _axis(expr: Expr, position: int, rank: int) -> int:
    axis = expr.opdef.axis if isinstance(expr, Apply) else _argument(expr, "axis", position)
    return int(axis) % max(rank, 1) if isinstance(axis, int) else -1


def _argument(expr: Expr, name: str, position: int) -> Any:
    """Returns an argument of a function or method by its name; None if the call lacks it."""
    if isinstance(expr, CallFunction):
        bound = signature(expr.func).bind(*expr.args, **expr.kwargs)
        bound.apply_defaults()
        return bound.arguments.get(name)
    if isinstance(expr, Apply):
        return getattr(expr.opdef, name, None)
    return expr.kwargs.get(name, expr.args[position] if len(expr.args) > position else None)


_log = logging.getLogger("qtrace")


@dataclass(frozen=True)
class Copy:
    """A copy that a kernel needs.

    Attributes:
        module: the traced module whose graph holds the node.
        node: the tensor to copy.
        reader: the expr that shall read the copy; None for all readers of the node, if the copy is for the
            gradient.
        source: the expr that MegEngine would compute wrong.
    """

    module: TracedModule
    node: TensorNode
    reader: Expr | None
    source: Expr


def find_copies(traced: TracedModule) -> list[Copy]:
    """Finds the tensors of a traced module that must be copied for MegEngine's kernels to be right.

    The result holds for every batch size: a tensor that does not depend on the inputs' values counts as
    broadcast over a batch. It also holds for a prepared graph, in which a rounding op may replace a
    transposed tensor by a contiguous one, so this trace may not need every copy. Time is linear in the
    number of executed exprs.

    Args:
        traced: a traced module, flat or hierarchical; it is not changed.
    """
    unrolled = _Unrolled(traced)
    views, fixed = _layouts(unrolled)
    copies = (*_for_values(unrolled, views, fixed), *_for_gradients(unrolled, fixed))
    return list({(copy.node, copy.reader): copy for copy in copies}.values())


def describe_places(copies: Iterable[Copy]) -> str:
    """Describes the ops that MegEngine may compute wrong.

    Args:
        copies: the copies that `find_copies` returned.
    """
    places = {copy.source.outputs[0].name: source_line(copy.source) for copy in copies}
    named = [f"{name} ({line})" if line else name for name, line in places.items()]
    return (
        "MegEngine's kernels on CPU can take a view such as x[..., :2] for contiguous memory, or refuse it, "
        f"at {shorten_list(named)}"
    )


def report_copies(name: str, places: str, problem: str | None) -> None:
    """Logs the ops before which a trace has copies, as a warning if the module itself computes wrong values.

    Args:
        name: the class of the module.
        places: the description that `describe_places` returned.
        problem: the difference between the values of module and trace; None if they agree.
    """
    if problem is None:
        _log.info("%s: %s; the trace copies the views first.", name, places)
        return
    _log.warning(
        "%s: %s. The trace copies the views first and is right; the module itself computes wrong values "
        "(%s), in training, too: train the trace, or put F.nn.pad(x, ((0, 0),) * x.ndim) behind the view.",
        name,
        places,
        problem,
    )


def insert_copies(traced: TracedModule, copies: Iterable[Copy]) -> None:
    """Inserts ``copies`` into the graphs of ``traced`` and of its submodules."""
    by_module: dict[Node, list[Copy]] = {}
    for copy in copies:
        by_module.setdefault(copy.module, []).append(copy)
    for group in by_module.values():
        module = group[0].module
        with GraphEditor(module) as editor:
            for copy in group:
                node, after = copy.node, copy.node.expr
                widths = ((0, 0),) * len(node.shape)
                new = editor.call_function(
                    F.nn.pad, node, widths, after=after, like=node, name=f"{node._name}_copy"
                )
                editor.replace_uses(node, new, None if copy.reader is None else [copy.reader])
        if module is not traced:
            module.graph._total_ids = None  # only the top graph counts
    if by_module:
        traced._update_ref()
        traced.graph._reset_ids()


def _for_values(unrolled: _Unrolled, views: Mapping[int, bool], fixed: Mapping[int, bool]) -> Iterator[Copy]:
    """Yields a copy for each operand that a kernel would misread or refuse."""
    for step in unrolled.steps:
        if refuses_views(step.name):
            node, value = _operands(step)[0]
            if views[value]:
                yield Copy(step.module, node, step.expr, step.expr)
        if not is_arithmetic(step.name):
            continue
        operands = _operands(step)
        for node, value in operands:
            for other, number in operands:
                if number == value or not views[value] or node.shape is None or other.shape is None:
                    continue
                if broadcasts_first_axes(node.shape, other.shape, fixed[value], fixed[number]):
                    yield Copy(step.module, node, step.expr, step.expr)
                    break


def _for_gradients(unrolled: _Unrolled, fixed: Mapping[int, bool]) -> Iterator[Copy]:
    """Yields a copy for each result whose gradient would arrive as a view."""
    gradient_views = _gradient_views(unrolled)
    for step in unrolled.steps:
        if not is_product(step.name) or step.outputs[0] not in gradient_views:
            continue
        (out,), is_fixed = step.expr.outputs, fixed[step.outputs[0]]
        for other, number in _operands(step):
            if out.shape is None or other.shape is None or np.dtype(out.dtype).kind != "f":
                continue
            if broadcasts_first_axes(out.shape, other.shape, is_fixed, fixed[number]):
                yield Copy(step.module, out, None, step.expr)
                break


def _operands(step: _ExecutedExpr) -> list[tuple[TensorNode, int]]:
    """Returns the tensors that a step reads, except for booleans, with the numbers of their values."""
    pairs = zip(step.expr.inputs, step.inputs, strict=True)
    return [(n, v) for n, v in pairs if isinstance(n, TensorNode) and np.dtype(n.dtype) != np.bool_]


def _layouts(unrolled: _Unrolled) -> tuple[Mapping[int, bool], Mapping[int, bool]]:
    """Maps each value to whether it may be a view, and to whether it is independent of the graph's inputs."""
    views = dict.fromkeys(unrolled.inputs, False)
    fixed = dict.fromkeys(unrolled.inputs, False)
    fixed[unrolled.inputs[0]] = True  # the module itself
    for step in unrolled.steps:
        expr = step.expr
        constant = isinstance(expr, (GetAttr, Constant)) or reads_only_shape(step.name)
        read = [(node, views[value]) for node, value in zip(expr.inputs, step.inputs, strict=True)]
        is_fixed = constant or all(fixed[value] for value in step.inputs)
        views.update(dict.fromkeys(step.outputs, not constant and gives_view(expr, step.name, read)))
        fixed.update(dict.fromkeys(step.outputs, is_fixed))
    return views, fixed


def _gradient_views(unrolled: _Unrolled) -> set[int]:
    """Returns the values whose gradient may arrive as a view; a sum of several gradients is no view."""
    uses = Counter(unrolled.outputs)
    uses.update(unrolled.outputs)  # so that one that is read, too, has several
    for step in unrolled.steps:
        uses.update(step.inputs)
    views: set[int] = set()
    for step in reversed(unrolled.steps):
        returned = returns_views(step.expr, step.name, not views.isdisjoint(step.outputs))
        pairs = zip(step.inputs, returned, strict=True)
        views.update(value for value, is_view in pairs if is_view and uses[value] == 1)
    return views


@dataclass(frozen=True)
class _ExecutedExpr:
    """One execution of an expr.

    Attributes:
        expr: the expr in the source's graph.
        module: the traced module whose graph holds the expr.
        inputs: the values of ``expr.inputs``, as numbers.
        outputs: the values of ``expr.outputs``, as numbers.
        name: the function, method or kernel that ``expr`` calls; see `kernel_name`.
    """

    expr: Expr
    module: TracedModule
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    name: str


class _Unrolled:
    """The steps of a traced module in execution order; the steps of a submodule replace its call.

    Nothing is copied: a step is an expr of the source with numbers for the values that it reads and gives.

    Attributes:
        steps: all steps.
        inputs: the values of the graph's inputs.
        outputs: the values that the graph returns.

    Args:
        traced: a traced module, flat or hierarchical.
    """

    def __init__(self, traced: TracedModule) -> None:
        self.steps: list[_ExecutedExpr] = []
        self._numbers = itertools.count()
        graph = traced.graph
        self.inputs = tuple(next(self._numbers) for _ in graph._inputs)
        self.outputs = self._unroll(traced, graph, self.inputs)

    def _unroll(self, module: TracedModule, graph: InternalGraph, inputs: Sequence[int]) -> tuple[int, ...]:
        numbers: dict[Node, int] = dict(zip(graph._inputs, inputs, strict=True))
        for expr in graph._exprs:
            read = tuple(numbers[node] for node in expr.inputs)
            callee = _traced_callee(expr)
            if callee is None:
                outputs = tuple(next(self._numbers) for _ in expr.outputs)
                self.steps.append(_ExecutedExpr(expr, module, read, outputs, kernel_name(expr)))
            else:
                outputs = self._unroll(callee, callee.argdef_graph_map[expr.arg_def], read)
            numbers.update(zip(expr.outputs, outputs, strict=True))
        return tuple(numbers[node] for node in graph._outputs)


def _traced_callee(expr: Expr) -> TracedModule | None:
    """Returns the traced submodule that ``expr`` calls, if the submodule has a graph to unroll."""
    if not (isinstance(expr, CallMethod) and is_call_module(expr)):
        return None
    callee = expr.inputs[0].owner
    return callee if isinstance(callee, TracedModule) and not callee.is_qat else None
