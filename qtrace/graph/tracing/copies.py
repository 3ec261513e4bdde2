"""Copies of views for MegEngine's broadcasting kernels, which compute wrong values from views on CPU.

On CPU, MegEngine 1.13 computes ``a + b`` wrong if ``b`` is broadcast along the first axes only, as a grid or
a vector is, and ``a`` is a view whose rows do not follow each other in memory, such as ``x[..., :2]``: the
kernel takes ``a`` for contiguous. The same holds for ``- * / **``, maximum and minimum, in eager mode and
under ``jit.trace``, and for the gradient of ``* / **`` where the gradient that arrives is such a view: after
a concatenation, a stack or a sum over the first axes.

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

import megengine.functional as F
import numpy as np
from megengine.traced_module import TracedModule
from megengine.traced_module.expr import CallMethod, Constant, Expr, GetAttr, is_call_module
from megengine.traced_module.node import Node, TensorNode
from megengine.traced_module.traced_module import InternalGraph

from qtrace.graph.edit import GraphEditor
from qtrace.graph.source_lines import source_line
from qtrace.graph.tracing.views import (
    broadcasts_first_axes,
    gives_view,
    is_arithmetic,
    is_product,
    kernel_name,
    reads_only_shape,
    refuses_views,
    returns_views,
)

__all__ = ["Copy", "describe_places", "find_copies", "insert_copies", "report_copies"]

_MAX_NAMED_OPS = 5  # in a message
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
    more = f" and {len(named) - _MAX_NAMED_OPS} more" if len(named) > _MAX_NAMED_OPS else ""
    return (
        "MegEngine's kernels on CPU can take a view such as x[..., :2] for contiguous memory, or refuse it, "
        f"at {', '.join(named[:_MAX_NAMED_OPS])}{more}"
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
