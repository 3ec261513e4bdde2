"""One trace of a module and its checks: anything that it would lose or compute wrong is an error.

A forward may compute the batch as a Python number, as Swin's window_reverse does by dividing the number of
windows; a trace keeps the number. Traces at two batch sizes show which sizes of a reshape follow the batch:
if it is one of them, the reshape can find it out by itself.
"""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import megengine as mge
from megengine.module import Module
from megengine.traced_module import TracedModule, trace_module
from megengine.traced_module.expr import CallFunction, CallMethod, Expr
from megengine.traced_module.traced_module import InternalGraph

from qtrace.errors import GraphError, TraceError, shorten_list
from qtrace.graph import differences, failures
from qtrace.graph.interpreter import Interpreter
from qtrace.graph.nonfinite import nonfinite_results
from qtrace.graph.notes import name_with_line
from qtrace.graph.tracing import example_inputs, hazards
from qtrace.graph.tracing.copies import Copy, describe_places, find_copies, insert_copies, report_copies
from qtrace.graph.tracing.example_inputs import Arguments
from qtrace.graph.tracing.recording import (
    NONE_IS_DROPPED,
    VALUES_ARE_DROPPED,
    PythonRead,
    check_kernels,
    check_readers,
    describe_notes,
    describe_unused,
    holds_none,
    key_order,
    recording,
    refuse_reads,
    restore_key_order,
    watch_reads,
    without_none,
)
from qtrace.graph.tracing.running import copy_module, engine_for_tracing, restore_input_names, restore_names
from qtrace.graph.tracing.tracer import Tracer, chosen_leaves, name_own_classes
from qtrace.graph.walk import op_label

Opened = dict[Expr, list[tuple[int, Any]]]
"""Each reshape that was opened, with the sizes that it had."""


def open_reshapes(traced: TracedModule, other: TracedModule) -> Opened:
    """Lets the reshapes of a trace find out the one size in which a trace at another batch size differs.

    Args:
        traced: a trace; changed in place, where every difference is such a size.
        other: a trace of the same module at another batch size.

    Returns:
        The reshapes with the sizes that they had; none if there is another difference.
    """
    found: list[tuple[Expr, dict[int, int]]] = []
    for a, b in _pairs(traced.graph, other.graph, set()):
        constants, others = dict(a.const_val or ()), dict(b.const_val or ())
        if constants.keys() != others.keys():
            return {}
        differing = [leaf for leaf, value in constants.items() if _differs(value, others[leaf])]
        if not differing:
            continue
        sizes = _open(a, b, constants, differing)
        if sizes is None:
            return {}
        found.append((a, sizes))
    before = {expr: list(expr.const_val) for expr, _ in found}
    for expr, sizes in found:
        expr.const_val = [(leaf, sizes.get(leaf, value)) for leaf, value in expr.const_val]
    return before


def close_reshapes(opened: Opened) -> None:
    """Gives reshapes the sizes that they had."""
    for expr, constants in opened.items():
        expr.const_val = constants


def _pairs(old: InternalGraph, new: InternalGraph, seen: set[InternalGraph]) -> Iterator[tuple[Expr, Expr]]:
    """Yields the exprs of two graphs side by side, exprs of submodules once."""
    if old in seen:
        return
    seen.add(old)
    for a, b in zip(old._exprs, new._exprs, strict=False):
        yield a, b
        inner, other = getattr(a, "graph", None), getattr(b, "graph", None)
        if inner is not None and other is not None:
            yield from _pairs(inner, other, seen)


def _differs(value: Any, other: Any) -> bool:
    return type(value) is int and type(other) is int and value != other


def _open(a: Expr, b: Expr, constants: dict[int, Any], differing: list[int]) -> dict[int, int] | None:
    """Returns the new sizes of a reshape by their places among its arguments; None if it cannot be opened."""
    name = a.method if isinstance(a, CallMethod) else a.func.__name__ if isinstance(a, CallFunction) else ""
    shape, other = (tuple(map(int, e.outputs[0].shape)) for e in (a, b))
    if name != "reshape" or len(differing) != 1 or len(shape) != len(other):
        return None
    sizes = {differing[0]: -1}
    for leaf, value in constants.items():
        if value != -1:
            continue
        axis = leaf - 1  # after the tensor itself
        if axis >= len(shape) or shape[axis] != other[axis]:
            return None
        sizes[leaf] = shape[axis]
    return sizes


_log = logging.getLogger("qtrace")

_BAKED = (
    "A Python value was fixed while tracing (a branch or loop on a value, .item(), .numpy(), int() of a "
    "shape): compute it with tensor operations, or take it out of forward."
)


_FAILS = "it fails with"


class _ForwardError(Exception):
    """The module's own forward failed; the cause is its exception."""


class Tracing:
    """One call of ``trace``: the source, a private copy of it in eval mode, and the examples.

    Args:
        source: the module; it is not changed.
        inputs: the example, positional and keyword arguments of ``method``.
        method: the name of the method to trace.
        allow_branch: the lines that may read a value of the data.
        also: other examples that the trace must serve, each with its title.
        tracer: says what is a leaf, and what a call is recorded as.
        gradients: whether custom autodiff Functions are refused, as a trace loses their gradients.
    """

    def __init__(
        self,
        source: Module,
        inputs: Arguments,
        method: str,
        allow_branch: tuple[str, ...],
        also: Sequence[tuple[str, Arguments]],
        tracer: Tracer,
        gradients: bool = True,
    ) -> None:
        self.source, self.also, self.tracer, self.gradients = source, also, tracer, gradients
        self.allow_branch = allow_branch
        self.reads: list[PythonRead] = []
        self.method = method
        self.name = type(source).__name__
        self.inputs = inputs
        self.module = copy_module(source, method)
        self.order: Any = None
        self.drops_none = False
        self.unread: dict[str, str] = {}
        self.opened: list[str] = []
        self.copies: list[Copy] = []

    def _results(self, inputs: Arguments) -> list[Any]:
        """Runs the copy on ``inputs`` and returns the leaves of its result.

        Raises:
            _ForwardError: when the copy fails on the inputs.
        """
        args, kwargs = example_inputs.fresh(inputs)
        try:
            result = self.module(*args, **kwargs)
            mge._full_sync()  # raises the errors of kernels
        except Exception as error:
            raise _ForwardError from error
        self.drops_none = holds_none(result)
        result = without_none(result)
        self.order = key_order(result)
        return differences.values(result)

    def run(self, check: bool) -> tuple[TracedModule, list[str]]:
        """Returns the trace, and warnings for its user."""
        inputs, expected = self._first_run(check and not self.allow_branch)
        traced = self._trace(self.inputs)
        refuse_reads(self.name, self.reads, self.allow_branch)
        for note in describe_notes(self.reads):
            _log.info("%s: %s.", self.name, note)
        self.copies = find_copies(traced)
        self._check_parameters(traced, inputs, expected)
        if check:
            self._compare(traced, inputs, expected)
            batch = example_inputs.batch_size(self.inputs)
            for extra in () if any(r.of_data for r in self.reads) else (1, 0) if batch else (0,):
                other = example_inputs.vary(self.inputs, high=True, extra=extra)
                try:
                    # Where shapes may not fit, one op at a time: a kernel after a failed one can crash.
                    with engine_for_tracing():
                        expected = self._results(other)
                except _ForwardError:  # nothing to compare
                    continue
                if extra and _run_and_compare(traced, other, expected) is not None:
                    self._open_batch(traced, other)
                self._compare(traced, other, expected, batch if extra else None)
                inputs = other
                break
        for title, other in self.also:
            inputs, expected = other, self._also_agrees(traced, title, other)
        traced.eval()
        if self.copies:
            insert_copies(traced, self.copies)
            problem = _run_and_compare(traced, inputs, expected)
            report_copies(self.name, describe_places(self.copies), problem)
        notes = [NONE_IS_DROPPED] if self.drops_none else []
        notes += [VALUES_ARE_DROPPED] if len(traced.graph.outputs) < len(expected) else []
        notes += [_describe_unread(list(self.unread.values()))] if self.unread else []
        notes += describe_unused(self.reads, self.allow_branch)
        notes += self._wrong_sizes(traced) if check and not self.also else []
        notes += nonfinite_results(traced, *example_inputs.fresh(self.inputs)) if check else []
        return traced, [f"{self.name}: {note}" for note in notes]

    def _open_batch(self, traced: TracedModule, other: Arguments) -> None:
        """Opens the batch that reshapes hold, if that is all in which traces at other ones differ."""
        try:
            changed = open_reshapes(traced, self._trace(other))
        except TraceError:  # said where the difference is looked for
            return
        batch = example_inputs.batch_size(self.inputs) or 1
        extras = {1 - batch, batch + 2, 3 * batch} - {0} if changed else set()
        for extra in sorted(extras):
            more = example_inputs.vary(self.inputs, high=False, extra=extra)
            with contextlib.suppress(_ForwardError), engine_for_tracing():
                if _run_and_compare(traced, more, self._results(more)) is not None:
                    close_reshapes(changed)
                    return
        self.opened = [name_with_line(expr, op_label(expr)) for expr in changed]

    def _wrong_sizes(self, traced: TracedModule) -> list[str]:
        """Returns a sentence if the trace computes something else than the module at another size."""
        sizes = [read for read in self.reads if read.node and not read.of_data]
        if (not sizes and not self.opened) or self.copies:
            return []
        other = example_inputs.enlarge(self.inputs)
        try:
            with engine_for_tracing():
                expected = self._results(other)
        except _ForwardError:  # the module has this size, too
            return self._wrongly_open(traced, other)
        problem = _run_and_compare(traced, other, expected)
        if problem is None or problem.startswith(_FAILS):  # a failure is no silent one
            return []
        lines, size = "; ".join(f"{r.line} by {r.how}" for r in sizes), example_inputs.describe(other)
        return [
            f"the trace holds a size of the example as a number ({lines}) and computes something else than "
            f"the model at other sizes, such as {size}. Use it at the example's sizes only, or compute with "
            "tensor operations; dynamic= or also= refuse such a trace."
        ]

    def _wrongly_open(self, traced: TracedModule, other: Arguments) -> list[str]:
        """Returns a sentence if a trace whose batch was opened runs at a size at which the module fails."""
        problem = _run_and_compare(traced, other, []) if self.opened else None
        if problem is None or problem.startswith(_FAILS):
            return []
        return [
            f"forward computes the batch as a number, which {self.opened[0]} finds out by itself in the "
            f"trace: at another size than the example's, such as {example_inputs.describe(other)}, the model "
            "fails there and the trace does not. Use it at the example's size."
        ]

    def _also_agrees(self, traced: TracedModule, title: str, inputs: Arguments) -> list[Any]:
        """Returns the module's result on another example, which the trace must serve."""
        title = f"{title} ({example_inputs.describe(inputs)})"
        args, kwargs = example_inputs.fresh(inputs)
        try:
            Interpreter(traced).bind(args, kwargs)
        except GraphError as error:
            raise TraceError(
                f"{self.name}: {title} has another structure than the example, and a graph has one: trace it "
                f"by itself ({error})"
            ) from error
        try:
            with engine_for_tracing():
                expected = self._results(inputs)
        except _ForwardError as error:
            cause = error.__cause__ or error
            raise TraceError(f"{self.name} itself fails on {title}: {failures.short(cause)}") from cause
        self._compare(traced, inputs, expected, title=title)
        return expected

    def _first_run(self, check: bool) -> tuple[Arguments, list[Any]]:
        """Runs the copy once, on other values if it accepts them; refuses Functions and changed state."""
        candidates = [example_inputs.vary(self.inputs, high=False), self.inputs] if check else [self.inputs]
        failure: BaseException | None = None
        for inputs in candidates:
            if failure is not None:
                self.module = copy_module(self.source, self.method)
            try:
                with hazards.watch_functions(self.module) as functions:
                    expected = self._results(inputs)
                break
            except _ForwardError as error:
                failure = error.__cause__
        else:
            assert failure is not None
            line = failures.user_line(failure)
            raise TraceError(
                f"{self.name} itself fails on the example{f' ({line})' if line else ''}, before any tracing: "
                f"{failures.short(failure)}"
            ) from failure
        self._check_functions(functions)
        self._check_state()
        return inputs, expected

    def _check_functions(self, functions: dict[str, str]) -> None:
        if not functions:
            return
        calls = ", ".join(f"{name} in {_place(path)}" for name, path in functions.items())
        lost = f"{self.name} calls a custom autodiff Function, whose gradient a trace loses: {calls}"
        if self.gradients:
            raise TraceError(
                f"{lost}. Put the call in a module of its own and give its class to trace in leaves=[...]. "
                "Or trace with gradients=False, if nothing trains the graph."
            )
        _log.info("%s. What is not trained needs none.", lost)

    def _check_state(self) -> None:
        changed = hazards.changed_state(self.source, self.module)
        if not changed:
            return
        # Filled once and kept whatever the values are: a cache, which a trace may compute anew.
        before = copy.deepcopy(self.module)
        try:
            self._results(example_inputs.vary(self.inputs, high=True))
            again = hazards.changed_state(before, self.module)
            if not again:  # perhaps as the values of the first call were extreme
                self.module = copy_module(self.source, self.method)
                self._results(example_inputs.vary(self.inputs, high=True))
                again = hazards.changed_state(before, self.module)
        except _ForwardError:
            again = changed
        of_parameters = any(isinstance(t, mge.Parameter) for t in changed.values())
        same = all(path in changed for path in again)  # a list that grows has new paths
        if again and same and not of_parameters and self._state_is_unread(changed):
            self.unread = {path: hazards.with_place(self.module, path) for path in changed}
        elif again or of_parameters:
            named = [path for path in changed if path in again] or list(changed)
            places = [hazards.with_place(self.module, path) for path in named]
            raise TraceError(
                f"{self.name}.forward updates its own state in eval mode, which a trace drops: "
                f"{shorten_list(places)}. Use a local variable for a value that only forward needs; else "
                "return the new value as an output, or update it outside of forward."
            )
        self.module = copy_module(self.source, self.method)

    def _state_is_unread(self, paths: Collection[str]) -> bool:
        """Whether the state that a call on other inputs left changes no result, as a kept attention.

        A running maximum changes none either where the example has a larger one: other values do.
        """
        try:
            later = [self._results(self.inputs)]
            for upwards in (True, False):
                hazards.shift_state(self.module, paths, upwards)
                later.append(self._results(self.inputs))
            self.module = copy_module(self.source, self.method)
            first = self._results(self.inputs)
        except _ForwardError:
            return False
        return all(differences.output_mismatch(first, results) is None for results in later)

    def _trace(self, inputs: Arguments) -> TracedModule:
        args, kwargs = example_inputs.fresh(inputs)
        try:
            leaves, record = chosen_leaves(self.module, self.tracer), recording(self.tracer)
            watched = hazards.attributes_at(self.module, self.unread)
            with leaves as own, record, watch_reads(watched) as self.reads:
                traced = trace_module(self.module, *args, **kwargs)
                name_own_classes(traced, own)
        except TraceError:  # a choice of the tracer
            raise
        except Exception as error:
            try:
                raise failures.explain(error, self.module, self.name) from error
            finally:
                failures.clean_up(error)
        hazards.forget(traced, self.unread)
        check_kernels(traced, self.name)
        check_readers(traced, self.name)
        restore_names(self.module, traced)
        restore_input_names(traced)
        restore_key_order(traced, self.order)
        return traced

    def _check_parameters(self, traced: TracedModule, inputs: Arguments, expected: list[Any]) -> None:
        lost = hazards.lost_parameters(self.module, traced)
        if lost:
            raise TraceError(
                f"{self.name} keeps parameters where a trace cannot see them, so they became constants: "
                f"{_names(lost)}. Assign a Parameter as an attribute of its module, and keep modules in "
                "plain lists or as attributes (no tuples inside)."
            )
        read = hazards.read_parameters(traced)
        absent = {n: p for n, p in self.module.named_parameters() if id(p) not in read}
        used = self._used_parameters(absent, inputs, expected)
        if used:
            raise TraceError(
                f"{self.name} uses a parameter as a Python or numpy value, which a trace fixes: "
                f"{_names(used)}. Use the Tensor itself in forward (no .numpy(), .item() or float())."
            )

    def _used_parameters(
        self, absent: dict[str, mge.Parameter], inputs: Arguments, expected: list[Any]
    ) -> list[str]:
        """Returns the parameters of ``absent`` that change the output: all at once first, then one by one."""
        names = list(absent) if absent and self._depends_on(list(absent.values()), inputs, expected) else []
        if names and self._depends_on([], inputs, expected):  # random anyway: that is another hazard
            return []
        if len(names) > 1:
            names = [n for n in names if self._depends_on([absent[n]], inputs, expected)] or names
        return names

    def _depends_on(self, parameters: list[mge.Parameter], inputs: Arguments, expected: list[Any]) -> bool:
        saved = [mge.Tensor(p.numpy(), dtype=p.dtype, device=p.device) for p in parameters]
        try:
            for parameter in parameters:
                parameter._reset(parameter * 1.25 + 0.125)
            return differences.output_mismatch(expected, self._results(inputs)) is not None
        except (_ForwardError, RuntimeError, TypeError):  # the forward refuses the changed values
            return False
        finally:
            for parameter, value in zip(parameters, saved, strict=True):
                parameter._reset(value)

    def _compare(
        self,
        traced: TracedModule,
        inputs: Arguments,
        expected: list[Any],
        batch: int | None = None,
        title: str = "",
    ) -> None:
        """Raises a `TraceError` if ``traced`` differs from the module.

        Args:
            traced: the trace.
            inputs: inputs of both.
            expected: the module's result on ``inputs``.
            batch: the example's batch size; None if ``inputs`` have the same.
            title: the name of the inputs if the user gave them.
        """
        problem = _run_and_compare(traced, inputs, expected)
        if problem is None or self._is_kernels_fault(traced, inputs):
            return
        # More than once: a small number of random values can agree by chance.
        if any(differences.output_mismatch(expected, self._results(inputs)) for _ in range(3)):
            draws = shorten_list(differences.describe(e) for e in differences.random_exprs(traced))
            raise TraceError(
                f"{self.name} is not deterministic in eval mode: two runs on the same input differ; "
                f"{f'random: {draws}' if draws else 'it may keep a count in a Python attribute'}. Switch "
                "this off when not self.training."
            )
        kind, remedy = "with other values of the same shape", ""
        if batch is not None and self._same_batch_agrees(traced):
            kind = f"of another batch size ({batch + 1} instead of {batch})"
            remedy = f" If every batch will have {batch}, trace with check=False (--no-check)."
        raise TraceError(
            f"{self.name}: the trace is wrong on {title or f'an input {kind}'}: {problem}; "
            f"{self._locate_difference(traced, inputs)}{remedy}"
        )

    def _is_kernels_fault(self, traced: TracedModule, inputs: Arguments) -> bool:
        """Returns whether module and trace run the same steps, some of which kernels compute wrong.

        Such a kernel reads memory after a view, so that two runs may differ. Asynchronous execution can
        cause wrong values as well, so the result is False until `trace` has tried without it.
        """
        if not self.copies or mge.config.async_level > 0 or hazards.hooked_modules(self.module):
            return False
        try:
            return differences.first_difference(traced, self._trace(inputs)) is None
        except TraceError:
            return False

    def _same_batch_agrees(self, traced: TracedModule) -> bool:
        same = example_inputs.vary(self.inputs, high=True)
        try:
            return _run_and_compare(traced, same, self._results(same)) is None
        except _ForwardError:  # the module takes only the other one: then the batch is not to blame
            return False

    def _locate_difference(self, traced: TracedModule, inputs: Arguments) -> str:
        """Describes the first expr at which a trace on ``inputs`` differs, with advice."""
        try:
            difference = differences.first_difference(traced, self._trace(inputs))
        except TraceError as error:
            return f"tracing on that input fails too ({error}). {_BAKED}"
        if difference is not None:
            return f"{difference}. {_BAKED}"
        hooked = hazards.hooked_modules(self.module)
        if hooked:
            return (
                f"a trace does not run forward hooks, such as those of {_names(hooked)}: use forward itself."
            )
        if type(self.tracer).record is not Tracer.record:
            return f"what {type(self.tracer).__name__}.record gives must compute the same as the function."
        return (
            "both graphs have the same steps, so the difference hides in a value that forward keeps outside "
            "of tensors and attributes, or in a write into a shared tensor."
        )


def _run_and_compare(traced: TracedModule, inputs: Arguments, expected: list[Any]) -> str | None:
    try:
        args, kwargs = example_inputs.fresh(inputs)
        results = differences.values(traced(*args, **kwargs))
    except Exception as error:
        return f"{_FAILS} {failures.short(error)}"
    return differences.output_mismatch(expected, results)


def _describe_unread(places: list[str]) -> str:
    return (
        "forward keeps values on which the results of other calls do not depend, as far as three calls "
        "show, and the trace does not have them: "
        f"{shorten_list(places)}. Return what code outside of forward needs as an output."
    )


def _place(path: str) -> str:
    return f"submodule {path!r}" if path else "its own forward"


def _names(names: Any) -> str:
    return shorten_list(repr(str(name)) for name in names)
