"""Traces a module faithfully: anything that a trace would lose or compute wrong is an error."""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Sequence
from typing import Any

import megengine as mge
from megengine.module import Module
from megengine.traced_module import TracedModule, trace_module

from qtrace.errors import QtraceWarning, TraceError
from qtrace.graph import failures
from qtrace.graph.native import lower, write_ranges
from qtrace.graph.tracing import diff, example_inputs, hazards, reads
from qtrace.graph.tracing.copies import Copy, describe_places, find_copies, insert_copies, report_copies
from qtrace.graph.tracing.nonfinite import nonfinite_results
from qtrace.graph.tracing.recording import NONE_IS_DROPPED, check_kernels, holds_none, recording, without_none
from qtrace.graph.tracing.returned import key_order, restore_key_order
from qtrace.graph.tracing.running import check_signature, copy_module, engine_for_tracing
from qtrace.graph.tracing.source_names import restore_names
from qtrace.process.thread import on_engine_thread

__all__ = ["trace"]

_log = logging.getLogger("qtrace")

_BAKED = (
    "A Python value was fixed while tracing (a branch or loop on a value, .item(), .numpy(), int() of a "
    "shape): compute it with tensor operations, or take it out of forward."
)


@on_engine_thread
def trace(
    module: Module,
    *example: Any,
    method: str = "forward",
    check: bool = True,
    allow_branch: Sequence[str] = (),
) -> TracedModule:
    """Traces ``module`` in eval mode and reports what the trace would lose or get wrong.

    The module stays as it is, training flags included, and the result shares nothing with it. Where a kernel
    of MegEngine's would compute wrong values from a view, the trace copies the view first; the logger
    ``qtrace`` says where.

    Where MegEngine's ``quantize_qat`` or ``quantize`` changed the module, the trace has float layers, and
    brings the scales that they were trained with: `prepare` gives them to its sites.

    Args:
        module: the model, one layer of MegEngine's own if need be; a ``TracedModule`` is copied and put in
            eval mode, not traced again.
        *example: inputs of ``forward`` by position: Tensors, numpy arrays, dicts, lists and tuples of them.
        method: name of the method to trace instead of ``forward``, such as one that returns tensors before
            boxes are decoded. It may call ``self.forward``.
        check: whether to compare module and trace on two other inputs: other values, and another batch size
            where the module itself accepts one. Costs about five forwards.
        allow_branch: lines of ``forward``, as ``FILE:LINE``, that may read a value of the data as a Python
            value, such as in ``if x.max() > 1``: the trace keeps what it is for the example. Where one does,
            ``check`` compares on the example only.

    Returns:
        The trace, in eval mode. Where forward returns None among tensors, it returns the tensors alone.

    Warns:
        QtraceWarning: when None is omitted, or an op gives NaN or infinity for finite inputs on the example.

    Raises:
        TraceError: when the module cannot be traced faithfully; the message names the submodule, parameter
            or expr.
    """
    if not isinstance(module, Module):
        raise TraceError(
            f"only a megengine.module.Module can be traced, not {type(module).__name__}: call it in the "
            "forward of a Module and trace that."
        )
    module, ranges = lower(module)
    if isinstance(module, TracedModule):
        copied = copy.deepcopy(module)
        copied.eval()
        if ranges is not None:
            write_ranges(copied, ranges)
        return copied
    args = example_inputs.to_tensors(example)
    check_signature(module, method, args)
    reads.check_allowed(allow_branch)
    traced, notes = _traced(module, args, method, check, tuple(allow_branch))
    if ranges is not None:
        write_ranges(traced, ranges)
    for note in notes:
        warnings.warn(note, QtraceWarning, stacklevel=2)
    return traced


def _traced(
    module: Module, args: tuple[Any, ...], method: str, check: bool, allow_branch: tuple[str, ...]
) -> tuple[TracedModule, list[str]]:
    try:
        with engine_for_tracing(async_level=1):
            return _Tracing(module, args, method, allow_branch).run(check)
    except TraceError:
        pass
    # F.arange and F.linspace race when several are queued, so a verdict counts only without a queue.
    with engine_for_tracing(async_level=0):
        return _Tracing(module, args, method, allow_branch).run(check)


class _ForwardError(Exception):
    """The module's own forward failed; the cause is its exception."""


class _Tracing:
    """One call of ``trace``: the source, a private copy of it in eval mode, and the examples."""

    def __init__(
        self, source: Module, args: tuple[Any, ...], method: str, allow_branch: tuple[str, ...]
    ) -> None:
        self.source = source
        self.allow_branch = allow_branch
        self.reads: list[reads.PythonRead] = []
        self.method = method
        self.name = type(source).__name__
        self.args = args
        self.module = copy_module(source, method)
        self.order: Any = None
        self.drops_none = False
        self.copies: list[Copy] = []

    def results(self, inputs: tuple[Any, ...]) -> list[Any]:
        """Runs the copy on ``inputs`` and returns the leaves of its result.

        Raises:
            _ForwardError: when the copy fails on the inputs.
        """
        args = example_inputs.fresh(inputs)
        try:
            result = self.module(*args)
            mge._full_sync()  # raises the errors of kernels
        except Exception as error:
            raise _ForwardError from error
        self.drops_none = holds_none(result)
        result = without_none(result)
        self.order = key_order(result)
        return diff.values(result)

    def run(self, check: bool) -> tuple[TracedModule, list[str]]:
        """Returns the trace, and warnings for its user."""
        inputs, expected = self.first_run(check and not self.allow_branch)
        traced = self.trace(self.args)
        reads.refuse_reads(self.name, self.reads, self.allow_branch)
        for note in reads.describe_notes(self.reads):
            _log.info("%s: %s.", self.name, note)
        self.copies = find_copies(traced)
        self.check_parameters(traced, inputs, expected)
        if check:
            self.compare(traced, inputs, expected)
            batch = example_inputs.batch_size(self.args)
            for extra in () if any(r.of_data for r in self.reads) else (1, 0) if batch else (0,):
                other = example_inputs.vary(self.args, high=True, extra=extra)
                try:
                    # Where shapes may not fit, one op at a time: a kernel after a failed one can crash.
                    with engine_for_tracing(async_level=0):
                        expected = self.results(other)
                except _ForwardError:  # nothing to compare
                    continue
                self.compare(traced, other, expected, batch if extra else None)
                inputs = other
                break
        traced.eval()
        if self.copies:
            insert_copies(traced, self.copies)
            problem = _run_and_compare(traced, inputs, expected)
            report_copies(self.name, describe_places(self.copies), problem)
        notes = [NONE_IS_DROPPED] if self.drops_none else []
        notes += reads.describe_unused(self.reads, self.allow_branch)
        notes += nonfinite_results(traced, example_inputs.fresh(self.args)) if check else []
        return traced, [f"{self.name}: {note}" for note in notes]

    def first_run(self, check: bool) -> tuple[tuple[Any, ...], list[Any]]:
        """Runs the copy once, on other values if it accepts them; refuses Functions and changed state."""
        candidates = [example_inputs.vary(self.args, high=False), self.args] if check else [self.args]
        failure: BaseException | None = None
        for inputs in candidates:
            if failure is not None:
                self.module = copy_module(self.source, self.method)
            try:
                with hazards.watch_functions(self.module) as functions:
                    expected = self.results(inputs)
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
        self.check_functions(functions)
        self.check_state()
        return inputs, expected

    def check_functions(self, functions: dict[str, str]) -> None:
        if functions:
            calls = ", ".join(f"{name} in {_place(path)}" for name, path in functions.items())
            raise TraceError(
                f"{self.name} calls a custom autodiff Function, whose gradient a trace loses: {calls}. Put "
                "the call in a module of its own and register its class with "
                "megengine.traced_module.register_as_builtin."
            )

    def check_state(self) -> None:
        changed = hazards.changed_state(self.source, self.module)
        if not changed:
            return
        # Filled once and kept whatever the values are: a cache, which a trace may compute anew.
        before = copy.deepcopy(self.module)
        try:
            self.results(example_inputs.vary(self.args, high=True))
            again = hazards.changed_state(before, self.module)
        except _ForwardError:
            again = changed
        if again or any(isinstance(t, mge.Parameter) for t in changed.values()):
            named = [path for path in changed if path in again] or list(changed)
            places = [hazards.with_place(self.module, path) for path in named[:5]]
            more = f" and {len(named) - 5} more" if len(named) > 5 else ""
            raise TraceError(
                f"{self.name}.forward updates its own state in eval mode, which a trace drops: "
                f"{', '.join(places)}{more}. Use a local variable for a value that only forward needs; else "
                "return the new value as an output, or update it outside of forward."
            )
        self.module = copy_module(self.source, self.method)

    def trace(self, args: tuple[Any, ...]) -> TracedModule:
        inputs = example_inputs.fresh(args)
        try:
            with recording(), reads.watch_reads() as self.reads:
                traced = trace_module(self.module, *inputs)
        except Exception as error:
            try:
                raise failures.explain(error, self.module, self.name) from error
            finally:
                failures.clean_up(error)
        check_kernels(traced, self.name)
        restore_names(self.module, traced)
        restore_key_order(traced, self.order)
        return traced

    def check_parameters(self, traced: TracedModule, inputs: tuple[Any, ...], expected: list[Any]) -> None:
        lost = hazards.lost_parameters(self.module, traced)
        if lost:
            raise TraceError(
                f"{self.name} keeps parameters where a trace cannot see them, so they became constants: "
                f"{_names(lost)}. Assign a Parameter as an attribute of its module, and keep modules in "
                "plain lists or as attributes (no tuples inside)."
            )
        read = hazards.read_parameters(traced)
        absent = {n: p for n, p in self.module.named_parameters() if id(p) not in read}
        used = self.used_parameters(absent, inputs, expected)
        if used:
            raise TraceError(
                f"{self.name} uses a parameter as a Python or numpy value, which a trace fixes: "
                f"{_names(used)}. Use the Tensor itself in forward (no .numpy(), .item() or float())."
            )

    def used_parameters(
        self, absent: dict[str, mge.Parameter], inputs: tuple[Any, ...], expected: list[Any]
    ) -> list[str]:
        """Returns the parameters of ``absent`` that change the output: all at once first, then one by one."""
        names = list(absent) if absent and self.depends_on(list(absent.values()), inputs, expected) else []
        if names and self.depends_on([], inputs, expected):  # random anyway: that is another hazard
            return []
        if len(names) > 1:
            names = [n for n in names if self.depends_on([absent[n]], inputs, expected)] or names
        return names

    def depends_on(
        self, parameters: list[mge.Parameter], inputs: tuple[Any, ...], expected: list[Any]
    ) -> bool:
        saved = [mge.Tensor(p.numpy(), dtype=p.dtype, device=p.device) for p in parameters]
        try:
            for parameter in parameters:
                parameter._reset(parameter * 1.25 + 0.125)
            return diff.output_mismatch(expected, self.results(inputs)) is not None
        except (_ForwardError, RuntimeError, TypeError):  # the forward refuses the changed values
            return False
        finally:
            for parameter, value in zip(parameters, saved, strict=True):
                parameter._reset(value)

    def compare(
        self, traced: TracedModule, inputs: tuple[Any, ...], expected: list[Any], batch: int | None = None
    ) -> None:
        """Raises a `TraceError` if ``traced`` differs from the module.

        Args:
            traced: the trace.
            inputs: inputs of both.
            expected: the module's result on ``inputs``.
            batch: the example's batch size; None if ``inputs`` have the same.
        """
        problem = _run_and_compare(traced, inputs, expected)
        if problem is None or self.is_kernels_fault(traced, inputs):
            return
        # More than once: a small number of random values can agree by chance.
        if any(diff.output_mismatch(expected, self.results(inputs)) for _ in range(3)):
            draws = ", ".join(diff.describe(e) for e in diff.random_exprs(traced)[:3])
            raise TraceError(
                f"{self.name} is not deterministic in eval mode: two runs on the same input differ; "
                f"{f'random: {draws}' if draws else 'it may keep a count in a Python attribute'}. Switch "
                "this off when not self.training."
            )
        kind, remedy = "with other values of the same shape", ""
        if batch is not None and self.same_batch_agrees(traced):
            kind = f"of another batch size ({batch + 1} instead of {batch})"
            remedy = f" If every batch will have {batch}, trace with check=False (--no-check)."
        raise TraceError(
            f"{self.name}: the trace is wrong on an input {kind}: {problem}; "
            f"{self.locate_difference(traced, inputs)}{remedy}"
        )

    def is_kernels_fault(self, traced: TracedModule, inputs: tuple[Any, ...]) -> bool:
        """Returns whether module and trace run the same steps, some of which kernels compute wrong.

        Such a kernel reads memory behind a view, so that two runs may differ. Asynchronous execution can
        cause wrong values as well, so the result is False until `trace` has tried without it.
        """
        if not self.copies or mge.config.async_level > 0 or hazards.hooked_modules(self.module):
            return False
        try:
            return diff.first_difference(traced, self.trace(inputs)) is None
        except TraceError:
            return False

    def same_batch_agrees(self, traced: TracedModule) -> bool:
        same = example_inputs.vary(self.args, high=True)
        try:
            return _run_and_compare(traced, same, self.results(same)) is None
        except _ForwardError:  # the module takes only the other one: then the batch is not to blame
            return False

    def locate_difference(self, traced: TracedModule, inputs: tuple[Any, ...]) -> str:
        """Describes the first expr at which a trace on ``inputs`` differs, with advice."""
        try:
            difference = diff.first_difference(traced, self.trace(inputs))
        except TraceError as error:
            return f"tracing on that input fails too ({error}). {_BAKED}"
        if difference is not None:
            return f"{difference}. {_BAKED}"
        hooked = hazards.hooked_modules(self.module)
        if hooked:
            return (
                f"a trace does not run forward hooks, such as those of {_names(hooked)}: use forward itself."
            )
        return (
            "both graphs have the same steps, so the difference hides in a value that forward keeps outside "
            "of tensors and attributes, or in a write into a shared tensor."
        )


def _run_and_compare(traced: TracedModule, inputs: tuple[Any, ...], expected: list[Any]) -> str | None:
    try:
        results = diff.values(traced(*example_inputs.fresh(inputs)))
    except Exception as error:
        return f"it fails with {failures.short(error)}"
    return diff.output_mismatch(expected, results)


def _place(path: str) -> str:
    return f"submodule {path!r}" if path else "its own forward"


def _names(names: Any, limit: int = 5) -> str:
    listed = [str(n) for n in names]
    more = f" and {len(listed) - limit} more" if len(listed) > limit else ""
    return ", ".join(repr(n) for n in listed[:limit]) + more
