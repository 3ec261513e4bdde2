"""Traces a module faithfully: anything that a trace would lose or compute wrong is an error."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megengine.module import Module
from megengine.traced_module import TracedModule

from qtrace.errors import QtraceWarning, TraceError
from qtrace.graph.interpreter import name_failures
from qtrace.graph.native import lower, write_ranges
from qtrace.graph.open_axes import write_open_axes
from qtrace.graph.tracing import recording
from qtrace.graph.tracing.example_inputs import (
    Dynamic,
    fix_arguments,
    other_example,
    other_examples,
    read_dynamic,
    to_tensors,
)
from qtrace.graph.tracing.hazards import clear_leaked_state, debugging_marks
from qtrace.graph.tracing.running import as_module, check_signature, engine_for_tracing
from qtrace.graph.tracing.session import Tracing
from qtrace.graph.tracing.tracer import Tracer, check_leaves, describe_unused_leaves, keep_leaves
from qtrace.graph.walk import describe_path
from qtrace.plugins.options import check_arguments
from qtrace.process import on_engine_thread


@check_arguments
@on_engine_thread
def trace(
    module: Module | Callable[..., Any],
    *example: Any,
    method: str = "forward",
    check: bool = True,
    gradients: bool = True,
    allow_branch: Sequence[str] = (),
    leaves: Sequence[type[Module] | Callable[..., Any]] = (),
    also: Sequence[Any] = (),
    dynamic: Dynamic | None = None,
    fixed: Mapping[str, Any] | None = None,
    tracer: Tracer | None = None,
    **keywords: Any,
) -> TracedModule:
    """Traces ``module`` in eval mode and reports what the trace would lose or get wrong.

    The module stays as it is, training flags included, and the result shares nothing with it. Where a kernel
    of MegEngine's would compute wrong values from a view, the trace copies the view first; the logger
    ``qtrace`` says where.

    Where MegEngine's ``quantize_qat`` or ``quantize`` changed the module, the trace has float layers, and
    brings the scales that they were trained with: `prepare` gives them to its sites.

    Args:
        module: the model, one layer of MegEngine's own if need be; a ``TracedModule`` is copied and put in
            eval mode, not traced again. A function or lambda of Tensors serves as well: the modules and
            tensors that it names become attributes of the trace under these names. A method of a module
            stands for ``method``.
        *example: inputs of ``forward`` by position: Tensors, numpy arrays, dicts, lists and tuples of them.
        method: name of the method to trace instead of ``forward``, such as one that returns tensors before
            boxes are decoded. It may call ``self.forward``.
        check: whether to compare module and trace on two other inputs: other values, and another batch size
            where the module itself accepts one. Costs about five forwards.
        gradients: whether the trace must have the gradients of the module. False for a trace that is never
            trained: custom autodiff Functions are traced through, and their own gradients are lost.
        allow_branch: lines of ``forward``, as ``FILE:LINE``, that may read a value of the data as a Python
            value, such as in ``if x.max() > 1``. The trace keeps what it is for the example. Where one does,
            ``check`` compares on the example only.
        leaves: module classes and functions of your own that stay one call each, such as ``[MyOp]``. A class
            means only its own instances, not a subclass's. A function stands at the top level of a file.
            An `OpRule` as their attribute ``qtrace_rule`` says how they are quantized, and `load` needs them
            in ``allow``.
        also: other examples that the same graph must serve, such as other sizes of images: each a tuple of
            inputs, a dict of inputs by name, or the one input. The trace is compared with the module on each.
        dynamic: axes of inputs that stay open, such as ``{"x": {0: "N", 2: "H", 3: "W"}}``. It maps the name
            of an input that is a Tensor -> axis -> name of its size. Axes of one name have one size. The
            trace is compared with the module at two other sizes; `export` declares the axes under these
            names. Without it, only the batch is open.
        fixed: arguments of ``forward`` that are no inputs of the trace, by name, such as ``{"mode": 2}``: the
            trace keeps what they choose.
        tracer: an object of a subclass of `Tracer` that says which modules stay one call each, and what a
            call of a function is recorded as.
        **keywords: inputs of ``forward`` by name, such as ``mask=mask``. An input with the name of one of the
            options above is given by position.

    Returns:
        The trace, in eval mode. Where forward returns None or numbers among tensors, it returns only the
        tensors.

    Warns:
        QtraceWarning: when None or a number is omitted, a value that forward keeps on itself is lost, or a
            leaf is never called. Also when an op gives NaN or infinity for finite inputs on the example, or
            the trace holds a size as a number and is wrong at other sizes.

    Raises:
        TraceError: when the module cannot be traced faithfully, or one graph cannot serve all examples; the
            message names the submodule, parameter or expr.
    """
    if problem := describe_path(module):
        raise TraceError(f"trace takes a Module, and {problem}.")
    clear_leaked_state()
    source, method = as_module(module, method)
    if isinstance(source, TracedModule) and (marks := debugging_marks(source)):
        raise TraceError(f"the model cannot be copied: {marks}")
    if tracer is not None and not isinstance(tracer, Tracer):
        raise TraceError(f"tracer takes an object of a subclass of qtrace.graph.Tracer, not {tracer!r}.")
    if tracer is not None and isinstance(source, TracedModule):
        raise TraceError("tracer goes with a module: a graph is traced already.")
    if fixed is not None and not isinstance(fixed, Mapping):
        raise TraceError(f"fixed takes values of arguments by name, such as {{'mode': 2}}, not {fixed!r}.")
    if fixed:
        source = fix_arguments(source, method, fixed)
    source, ranges = lower(source)
    if isinstance(source, TracedModule):
        copied = copy.deepcopy(source)
        copied.eval()
        if ranges is not None:
            write_ranges(copied, ranges)
        name_failures(copied)
        return copied
    inputs = (
        to_tensors(example),
        dict(zip(keywords, to_tensors(tuple(keywords.values()), tuple(keywords)), strict=True)),
    )
    check_signature(source, method, *inputs)
    recording.check_allowed(allow_branch)
    check_leaves(leaves)
    others = [(f"also[{i}]", other_example(value, i)) for i, value in enumerate(also)]
    for _, other in others:
        check_signature(source, method, *other)
    axes = read_dynamic(source, method, inputs, dynamic) if dynamic is not None else None
    if axes is not None:
        others += other_examples(source, method, inputs, axes)
    with keep_leaves(leaves):
        traced, notes = _traced(
            check, source, inputs, method, tuple(allow_branch), others, tracer or Tracer(), gradients
        )
    notes += [f"{type(source).__name__}: {note}" for note in describe_unused_leaves(traced, leaves)]
    if ranges is not None:
        write_ranges(traced, ranges)
    if axes is not None:
        write_open_axes(traced, axes)
    name_failures(traced)
    for note in notes:
        warnings.warn(note, QtraceWarning, stacklevel=2)
    return traced


def _traced(check: bool, *arguments: Any) -> tuple[TracedModule, list[str]]:
    """Traces with `Tracing(*arguments)`."""
    # F.arange and F.linspace race when several are queued: a verdict counts only without a queue, and
    # F.gather, which computes its places by them, ends the process where one lies outside.
    with engine_for_tracing():
        return Tracing(*arguments).run(check)
