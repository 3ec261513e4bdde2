"""Runs a batch in the runtime and in the graph: the whole graph, and op by op on the runtime's integers."""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from qtrace import ops
from qtrace.comparing.groups import ColumnGroup
from qtrace.comparing.selections import SelectedShares, Share
from qtrace.comparing.sums import sqnr_db
from qtrace.data.batches import as_arguments, refuse_nan, translate_errors
from qtrace.errors import CalibrationError, ExportError, QtraceError
from qtrace.fakequant.fixed import FixedFakeQuant
from qtrace.graph.interpreter import ENGINE_ERRORS, Interpreter, needed_nodes
from qtrace.graph.opaque import OpaqueOp
from qtrace.graph.types import Expr, Input, Node, TensorNode, TracedModule
from qtrace.graph.walk import exprs, owner, users
from qtrace.numerics import dequantize, exact_levels, quantize, smallest_type
from qtrace.onnxfile.external_data import read_model
from qtrace.preparation.model import QuantizedModel, QuantizedSite, graph_hash
from qtrace.process import Together, prefetch
from qtrace.scheme import QParams
from qtrace.verification.crosscheck import Disagreement, RuntimeValues
from qtrace.verification.float16 import Float16Rounding, read_float16_ops
from qtrace.verification.float_outputs import FloatOutputs
from qtrace.verification.graph_runs import Lanes, TakingLane
from qtrace.verification.other_sizes import open_in_file, runs_at, say_other_size
from qtrace.verification.report import VerifyReport
from qtrace.verification.runtimes.base import Prefetcher, RuntimeRun, Session, threads_for
from qtrace.verification.selections import FirstOfEquals, Unsettled, find_rankings, find_selections
from qtrace.verification.tallies import at_same_precision

# How far from the middle of two integers a tie may lie, as a share of a step: the error of a division.
_TIE = 1e-3

_Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass
class BatchRun:
    """The values of one batch on both sides.

    Attributes:
        number: the number of the batch, from 0.
        arguments: the batch as arguments of a call.
        graph: the run of the graph by itself.
        runtime: the run of the runtime.
        single: the run of the graph op by op, from the runtime's integers.
        outputs: the outputs of `single`.
        floats: the outputs of the graph without roundings and with what the graph selects, and how many of
            the selected places are float's; None if another network has them, or nobody asked.
        deployed: gives the run of the file with optimizations; None if no session was given for it.
    """

    number: int
    arguments: _Arguments
    graph: EndToEnd
    runtime: RuntimeRun
    single: OpByOp
    outputs: list[np.ndarray]
    floats: tuple[list[np.ndarray], list[Share]] | None = None
    deployed: Callable[[], RuntimeRun] | None = None


class _Start:
    """A batch that is checked, and begins to run in the runtime, before the graph runs it.

    Args:
        file: the file.
        number: the number of the batch.
        batch: the batch.
        prefetcher: runs the batch in the sessions of the file.

    Attributes:
        arguments: the batch as arguments of a call, once it has begun.
        runs: what gives the run of each session, once it has begun.
    """

    def __init__(self, file: File, number: int, batch: Any, prefetcher: Prefetcher) -> None:
        self.number, self.batch = number, batch
        self._file, self._prefetcher = file, prefetcher
        self.arguments: _Arguments = ((), {})
        self.runs: list[Callable[[], RuntimeRun]] = []

    def begin(self) -> None:
        """Checks the batch and begins to run it, if that was not done yet.

        Raises:
            CalibrationError: when the batch does not fit the model or holds NaN.
        """
        if not self.runs:
            self.arguments, inputs = self._file.check(self.batch, self.number)
            self.runs = self._prefetcher.begin(inputs)


class File:
    """An exported file in a session of its runtime, next to the converted graph.

    Args:
        path: the file.
        model: the converted graph.
        session: the session, with the runtime's optimizations or without.

    Attributes:
        qparams: what `integer_qparams` gives for the graph.
        roundings: expr -> the node that it rounds to integers of the runtime, one scale for all and ties to
            even, where all of them can be compared.
        float16: rounds what the file has in float16; None for nothing.
        after_opaque: the nodes of integers that round what is computed from kept nodes of an imported file.

    Raises:
        ExportError: when the file is not an export of the graph.
    """

    def __init__(self, path: Path, model: QuantizedModel, session: Session) -> None:
        self.path, self.model, self.session = path, model, session
        self.names = _integer_names(model, path, session)
        self.output_names, self.qparams = output_names(model), integer_qparams(model)
        self.first_of_equals: bool = getattr(session, "first_of_equals", True)
        self.open_axes = open_in_file(path, model.module)
        ops = _float16_ops(path, session)
        self.float16 = Float16Rounding(model, ops) if ops else None
        watched = () if self.float16 is None else self.float16.parameters
        self.lanes = Lanes(model.module, {*self.names, *watched})
        self.groups: tuple[ColumnGroup, ...] = ()  # of the outputs; as a whole until they are known
        ends = list(zip(self.output_names, model.module.graph.outputs, strict=True))
        self.ends = ends
        self.selections = _by_name(find_selections(model.module), ends)
        self.rankings = _by_name(find_rankings(model.module), ends)
        self.after_opaque = _after_opaque(model.module, self.names)
        self.roundings: Mapping[Expr, str] = {}
        if self.float16 is None and not self.selections and not self.rankings:
            self.roundings = _plain_roundings(model, self.names)

    def report(self, max_lsb: int, min_equal: float, min_sqnr_db: float) -> VerifyReport:
        """Returns an empty report with these tolerances."""
        rounded = self.model.rounded.items()
        kinds = {name: site.qparams for name, site in rounded if site.sort != "bias"}
        kinds.update(self.model.carried_qparams())
        wide = frozenset(name for name, qparams in kinds.items() if qparams.scheme.bits > 8)
        tolerances = (max_lsb, min_equal, min_sqnr_db)
        return VerifyReport(
            str(self.path),
            *tolerances,
            selections=self.selections,
            rankings=self.rankings,
            groups=self.groups,
            wide=wide,
            inexact=self.after_opaque | getattr(self.session, "inexact", frozenset()),
            float16=0 if self.float16 is None else self.float16.count,
        )

    def run(
        self,
        batches: Iterable[Any],
        op_by_op: Callable[[File, dict[str, np.ndarray]], OpByOp],
        exact: FloatOutputs | None = None,
        others: Callable[[], Iterable[Sequence[Any]]] = tuple,
        deployed: Session | None = None,
    ) -> Iterator[BatchRun]:
        """Runs each batch on both sides; the graph must be in eval mode.

        A runtime that can runs a batch while the graph runs the one before it.

        Args:
            batches: inputs as for ``qtrace.calibrate``.
            op_by_op: makes the op-by-op run of a batch from the runtime's integers.
            exact: the float network, which gives the column groups of the outputs by the first batch; None if
                they are known.
            others: gives batches at other sizes, several for each of which the first one counts at which the
                graph runs; it is called after all batches.
            deployed: a session of the file with optimizations, for `BatchRun.deployed`; None for none.

        Raises:
            CalibrationError: when a batch does not fit the model or holds NaN.
        """
        sessions = [self.session, *([] if deployed is None else [deployed])]
        with Together(threads_for(sessions)) as together:
            prefetcher = Prefetcher(sessions, together)
            for starts, at_other_size in prefetch(self._starts(batches, others, prefetcher), _begin):
                for start in starts:
                    if not at_other_size:
                        yield self._run_batch(start, op_by_op, exact)
                    elif (run := self._run_if_possible(start, op_by_op, exact)) is not None:
                        yield run
                        del run
                        break

    def _starts(
        self, batches: Iterable[Any], others: Callable[[], Iterable[Sequence[Any]]], prefetcher: Prefetcher
    ) -> Iterator[tuple[list[_Start], bool]]:
        """Yields each batch, cut to the size that the file fixes, and then the choices of each other size."""
        numbers = itertools.count()
        for number, batch in enumerate(batches):
            for part in self._parts(batch, number):
                yield [_Start(self, next(numbers), part, prefetcher)], False
        for choice in others():
            parts = (self._parts(batch, 0)[0] for batch in choice)
            yield [_Start(self, next(numbers), part, prefetcher) for part in parts], True

    def _parts(self, batch: Any, number: int) -> Sequence[Any]:
        """Cuts a batch into batches of the size that the file fixes; one that is no multiple stays whole."""
        fixed: Mapping[str, int] = getattr(self.session, "fixed_samples", {})
        if not fixed:
            return [batch]
        try:
            arguments = as_arguments(batch, self.model.module, number)
            inputs = self._check_sizes(arguments, number)
        except QtraceError:  # it is said where the batch is run
            return [batch]
        names = getattr(self.session, "input_names", ())
        own = [fixed.get(name, 0) if x.ndim else 0 for name, x in zip(names, inputs, strict=True)]
        count = max((len(x) // n for n, x in zip(own, inputs, strict=True) if n), default=1)
        if count < 2 or any(n and len(x) not in (n, n * count) for n, x in zip(own, inputs, strict=True)):
            return [batch]
        split = [n if n and len(x) != n else 0 for n, x in zip(own, inputs, strict=True)]
        return [
            tuple(x[i * n : (i + 1) * n] if n else x for n, x in zip(split, inputs, strict=True))
            for i in range(count)
        ]

    def _run_if_possible(
        self,
        start: _Start,
        op_by_op: Callable[[File, dict[str, np.ndarray]], OpByOp],
        exact: FloatOutputs | None,
    ) -> BatchRun | None:
        """Does what `_run_batch` does; returns None, and counts nothing, where the graph does not run."""
        before: list[tuple[VerifyReport, dict[str, Any]]] = []

        def note(file: File, integers: dict[str, np.ndarray]) -> OpByOp:
            single = op_by_op(file, integers)
            before.append((single.report, copy.deepcopy(vars(single.report))))
            return single

        try:
            run = self._run_batch(start, note, exact, explain=False)
        except (*ENGINE_ERRORS, QtraceError):
            for report, state in before:
                vars(report).update(state)
            if not runs_at(self.model.module, start.batch):
                return None
            run = self._run_batch(start, op_by_op, exact)  # says what is wrong, if that was not by chance
        say_other_size(self.path, start.batch)
        return run

    def check(self, batch: Any, number: int) -> tuple[_Arguments, list[np.ndarray]]:
        """Returns the arguments of a call with a batch, and the inputs of the file.

        Raises:
            CalibrationError: when the batch does not fit the model or holds NaN.
        """
        converted = self.model.module
        args, kwargs = as_arguments(batch, converted, number)
        refuse_nan((args, kwargs), number, converted)
        try:
            return (args, kwargs), self._check_sizes((args, kwargs), number)
        except CalibrationError:
            if number == 0:  # the first batch shows whether data and network belong together at all
                with translate_errors(converted, (args, kwargs), number):
                    EndToEnd(self).compute(args, kwargs)
            raise

    def _run_batch(
        self,
        start: _Start,
        op_by_op: Callable[[File, dict[str, np.ndarray]], OpByOp],
        exact: FloatOutputs | None,
        explain: bool = True,
    ) -> BatchRun:
        """Runs one batch on both sides, and compares op by op.

        Where the graph fails, its error comes before the runtime's, unless ``explain`` is False.
        """
        start.begin()
        number, (args, kwargs) = start.number, start.arguments
        graph = EndToEnd(self)
        lane = None if exact is None else exact.lane(graph.tape.places)
        try:
            self.lanes.prepare(args, kwargs)
            runtime = start.runs[0]()
            single = op_by_op(self, runtime.integers)
            single.beside = graph
            if self.float16 is not None:
                self.float16.measure(args, kwargs)
            lanes = [graph, single, *([] if lane is None else [lane])]
            values = self.lanes.run(lanes, args, kwargs)
            graph.outputs, outputs, *others = ([t.numpy() for t in own] for own in values)
        except (*ENGINE_ERRORS, QtraceError):
            if not explain:
                raise
            # What is wrong in the graph comes first.
            with translate_errors(self.model.module, (args, kwargs), number):
                EndToEnd(self).compute(args, kwargs)
            raise
        floats = None
        if lane is not None and exact is not None:
            floats = (others[0], lane.tape.shares)
            if not lane.tape.places:
                exact.keep(number, floats[0])
        if exact is not None and number == 0:
            self.groups = single.report.groups = exact.find_groups(self.output_names, args, kwargs)
        single.report.add_outputs(
            "op_by_op",
            self.output_names,
            outputs,
            runtime.outputs,
            single.rows.among(self.ends),
            single.reordered_outputs(self.ends, runtime.outputs),
        )
        deployed = start.runs[1] if len(start.runs) > 1 else None
        return BatchRun(number, (args, kwargs), graph, runtime, single, outputs, floats, deployed)

    def _check_sizes(self, arguments: _Arguments, number: int) -> list[np.ndarray]:
        """Returns the inputs; refuses another size than was traced along axes that the file fixes.

        The first axis may always have another size.
        """
        _, bound = Interpreter(self.model.module).bind(*arguments)
        for node, value in zip(self.model.module.graph.inputs[1:], bound[1:], strict=True):
            shape, traced = tuple(map(int, value.shape)), tuple(map(int, node.shape))
            opened = {0, *(axis.axis for axis in self.open_axes if axis.input == node.name)}
            differ = {axis for axis, (a, b) in enumerate(zip(shape, traced, strict=False)) if a != b}
            if len(shape) != len(traced) or not differ <= opened:
                sizes = ", ".join("?" if axis in opened else str(n) for axis, n in enumerate(traced))
                raise CalibrationError(
                    f"batch {number} gives {node.name} of shape {shape}, but {self.path} fixes it to "
                    f"({sizes}), as it was traced: give data of this size, or trace anew."
                )
        return [value.numpy() for value in bound[1:]]

    def find_wrong_output(self, run: BatchRun, min_sqnr_db: float) -> Disagreement | None:
        """Finds the first output that differs by too much although both sides read the same integers.

        Args:
            run: one batch.
            min_sqnr_db: smallest signal-to-noise ratio allowed.

        Returns:
            The output's values on both sides; None where every column group is within the limit or depends
            on a selection or on the order of equal scores.
        """
        unsettled = run.single.rows.among(self.ends)
        unsettled |= run.single.reordered_outputs(self.ends, run.runtime.outputs)
        nodes = self.model.module.graph.outputs
        values = zip(self.output_names, nodes, run.outputs, run.runtime.outputs, strict=True)
        for index, (name, node, a, b) in enumerate(values):
            if b is None or name in unsettled or a.shape != b.shape:
                continue
            groups = run.single.report.groups_of(index, name, a)
            if any(sqnr_db(*at_same_precision(g.select(a), g.select(b))) < min_sqnr_db for g in groups):
                return Disagreement(node.name, *at_same_precision(a, b))
        return None


def _after_opaque(module: TracedModule, integers: Collection[str]) -> frozenset[str]:
    """Returns the nodes of integers that round what is computed from kept nodes of an imported file.

    Each runtime computes those nodes in a way of its own, and a rounding by the range of the batch inside of
    one makes a step of the last bit.
    """
    sites, floats = set[str](), set[Node]()
    for expr in exprs(module):
        if isinstance(owner(expr), OpaqueOp) or not floats.isdisjoint(expr.inputs):
            sites.update(node.name for node in expr.outputs if node.name in integers)
            floats.update(node for node in expr.outputs if node.name not in integers)
    return frozenset(sites)


def _float16_ops(path: Path, session: Session) -> Sequence[str]:
    """Returns the ops that a file has in float16, which a session of dumped tensors does not know."""
    known: Sequence[str] | None = getattr(session, "float16", None)
    if known is not None:
        return known
    return read_float16_ops(read_model(path)) if path.suffix.lower() == ".onnx" and path.is_file() else ()


def _begin(starts: tuple[list[_Start], bool]) -> tuple[list[_Start], bool]:
    """Begins with a batch, or with the first choice of another size, which need not run."""
    (first, *_), at_other_size = starts
    with contextlib.suppress(*((*ENGINE_ERRORS, QtraceError) if at_other_size else ())):
        first.begin()
    return starts


def _by_name(origins: dict[Node, str], ends: Sequence[tuple[str, Node]]) -> dict[str, str]:
    """Maps the names of nodes, and of outputs, to what their values depend on."""
    names = {node.name: origin for node, origin in origins.items()}
    return {**names, **{name: origins[node] for name, node in ends if node in origins}}


def _integer_names(converted: QuantizedModel, path: Path, session: Session) -> dict[str, str]:
    """Maps each node that holds dequantized integers to the name under which the runtime returns them.

    A format may leave out the integers of ops that only move values, sites on which no output depends, and
    sites that only max poolings read: the ONNX export rounds after these.

    Raises:
        ExportError: when the file lacks a site, or says that it was exported from another graph.
    """
    known = set(session.integer_names)
    computed = {n: s.name for n, s in activations(converted).items() if not s.static}
    needed = {node.name for node in needed_nodes(converted.module)}
    pooled = {
        s.name for s in activations(converted).values() if not s.static and _is_pooled(s.consumers, known)
    }
    missing = sorted({site for name, site in computed.items() if name in needed} - known - pooled)
    if missing and not getattr(session, "partial", False):
        raise ExportError(f"{path} is not an export of this module: it lacks integers of {missing[0]!r}.")
    exported = getattr(session, "graph_hash", "")  # of formats that store it
    if exported and exported != graph_hash(converted.module):
        other = "another calibration or" if computed else "a quantized module or one with"
        raise ExportError(
            f"{path} is not an export of this module: it comes from {other} other weights; export it again."
        )
    moved = {name: name for name in converted.annotation.moved()}
    return {name: site for name, site in {**computed, **moved}.items() if site in known}


def _is_pooled(readers: Iterable[Expr], known: Collection[str]) -> bool:
    """Whether only max poolings read a value, whose results the file has as integers.

    A padding before a pooling is the pooling's own in the file.
    """
    calls = [(expr, ops.read(expr)) for expr in readers]
    return bool(calls) and all(
        call is not None
        and (
            (call.kind == "max_pool2d" and expr.outputs[0].name in known)
            or (call.kind == "pad" and _is_pooled(users(expr.outputs[0]), known))
        )
        for expr, call in calls
    )


def _plain_roundings(model: QuantizedModel, names: Collection[str]) -> dict[Expr, str]:
    """Finds the roundings that numpy computes bit by bit as MegEngine does."""
    return {
        site.expr: name
        for name, site in activations(model).items()
        if name in names
        and type(site.fake_quant) is FixedFakeQuant
        and site.fake_quant.phase == "quantize"
        and not site.fake_quant.transforms
        and not site.fake_quant.shape
        and site.fake_quant.scheme.rounding == "half_even"
    }


def output_names(converted: QuantizedModel) -> list[str]:
    """Returns the names of the graph's outputs before rounding; a repeated name is numbered."""
    names = [converted.unrounded_name(node) for node in converted.module.graph.outputs]
    return [f"{n}_{c}" if (c := names[:i].count(n) + 1) > 1 else n for i, n in enumerate(names)]


def activations(converted: QuantizedModel) -> dict[str, QuantizedSite]:
    """Maps the name of each node that holds a rounded activation to its site."""
    return {name: site for name, site in converted.rounded.items() if site.sort == "activation"}


def integer_qparams(converted: QuantizedModel) -> dict[str, QParams]:
    """Maps the name of each node that holds dequantized integers to their parameters."""
    sites = activations(converted).items()
    return {**{name: site.qparams for name, site in sites}, **converted.carried_qparams()}


def tied_inputs(file: File, graph: EndToEnd, runtime: RuntimeRun) -> dict[str, np.ndarray]:
    """Returns the runtime's integers of the inputs that it rounds otherwise than the graph, only at ties.

    A value half a step from two integers is as near to either. Data that are clipped have many at their ends,
    such as 1.5 in a range of -1.5 to 1.5, and all of them go one way.

    Args:
        file: the file.
        graph: a run of the graph by itself.
        runtime: the run of the runtime on the same inputs.
    """
    values = dict(zip(file.model.module.graph.inputs[1:], graph.inputs, strict=False))
    tied = {}
    for node, site in activations(file.model).items():
        x, own, name = values.get(site.source), graph.integers.get(node), file.names.get(node)
        if x is None or own is None or name not in runtime.integers:
            continue
        other, qparams = runtime.integers[name], site.qparams
        if other.shape != own.shape or np.array_equal(own, other):
            continue
        apart = [np.abs(x - dequantize(levels.astype(np.int32), qparams)) for levels in (own, other)]
        step = np.abs(dequantize(own.astype(np.int32), qparams) - dequantize(other.astype(np.int32), qparams))
        if (np.abs(apart[0] - apart[1]) <= _TIE * step).all():
            tied[node] = other
    return tied


def _read_levels(values: np.ndarray, qparams: QParams) -> tuple[np.ndarray, bool]:
    """Returns the integers of a site in few bytes, and whether `values` are the floats of these integers."""
    levels = exact_levels(values, qparams)
    if levels is not None:
        return levels, True
    return quantize(values, qparams, smallest_type(qparams.scheme)), False


def _for_all_samples(integers: np.ndarray, shape: Sequence[int]) -> np.ndarray:
    """Returns the integers of a site, repeated where a file of fixed sizes has stored them for one sample."""
    stored = integers.ndim == len(shape) and integers.shape[:1] == (1,) != tuple(shape[:1])
    if stored and integers.shape[1:] == tuple(shape[1:]):
        return np.broadcast_to(integers, tuple(shape))
    return integers


class OpByOp(TakingLane):
    """Compares at every site, then goes on with the runtime's integers.

    Both sides may select other rows from the same integers, or rank equal scores in another order. Then a
    site right after that op cannot be compared, nor what is computed from its result past that site.
    The graph goes on with the runtime's integers there, or with its own where their number differs.

    Attributes:
        rows: the nodes whose rows may be others in the runtime.
        order: the nodes that may depend on another order of equal scores in the runtime.
        values: the runtime's integers.
        disagreement: the first site that differs by more than the report allows; None where there is none.
        beside: the lane of the graph by itself; None for none.
    """

    def __init__(self, file: File, integers: dict[str, np.ndarray], report: VerifyReport) -> None:
        super().__init__(file.model.module, file.first_of_equals)
        self.names, self.integers, self.report = file.names, integers, report
        self.qparams = file.qparams
        self.values = RuntimeValues(self.names, integers, self.qparams)
        self.disagreement: Disagreement | None = None
        self.beside: EndToEnd | None = None
        self.rows, self.order = Unsettled(), Unsettled()
        self._selecting = file.lanes.selecting
        self._float16, self._unrounded = file.float16, dict[str, Any]()
        sources = {} if file.float16 is None else file.float16.sources
        self._sources = {name: source.name for name, source in sources.items()}
        self._kept = frozenset(self._sources.values())
        self._roundings, self._taken = file.roundings, ""

    def takes(self, expr: Expr) -> bool:
        """Returns whether an expr rounds a site to integers that the runtime has."""
        return expr in self._roundings

    def take(self, expr: Expr, inputs: Sequence[Any]) -> Any:
        """Compares the integers of a site, and returns what the runtime computed there."""
        name = self._taken = self._roundings[expr]
        qparams, runtime, value = self.qparams[name], self.integers[self.names[name]], inputs[-1]
        graph = quantize(value.numpy(), qparams, smallest_type(qparams.scheme))
        self.report.compares("op_by_op", f"site {name}", graph, runtime)
        self.on_integers(value, Disagreement(name, graph, runtime, qparams))
        return type(value)(dequantize(runtime, qparams))

    def on_node(self, node: Node, value: Any) -> Any:
        """Replaces the graph's value at a site by what the runtime computed there."""
        if node.name == self._taken:
            return value
        if self._float16 is not None:
            value = self._float16.round(node, value)
            if node.name in self._kept:
                self._unrounded[node.name] = value
        name = self.names.get(node.name)
        selected = self.rows.follow(node, node.expr in self._selecting, name is not None)
        ranked = self.order.follow(node, node in self.tied, name is not None)
        if name is None or node in self.rows.unequal or node in self.order.unequal:
            return value
        qparams = self.qparams[node.name]
        runtime = self.integers[name] = _for_all_samples(self.integers[name], value.shape)
        known = None if self.beside is None else self.beside.integers_of(node, value)
        graph, exact = known or _read_levels(value.numpy(), qparams)
        same = exact and np.array_equal(graph, runtime)
        if self._float16 is not None:
            unrounded = self._unrounded.get(self._sources.get(node.name, ""))
            graph = self._float16.nearest(node, unrounded, graph, runtime, qparams)
        if not self.report.compares("op_by_op", f"site {node.name}", graph, runtime):
            self.rows.differ(node)
            return value
        uncertain = selected or ranked
        differs = uncertain and np.abs(runtime.astype(np.int64) - graph).max(initial=0) > self.report.max_lsb
        if selected and differs:
            self.report.note_rows("op_by_op", f"site {node.name}", graph, runtime)
            self.rows.differ()
        elif ranked and differs:
            self.report.note_order("op_by_op", f"site {node.name}")
            self.order.differ()
        else:
            self.on_integers(value, Disagreement(node.name, graph, runtime, qparams))
        # The same tensor lets the next ops be computed once for both lanes.
        if same:
            return value
        values = dequantize(runtime, qparams)
        return value if not exact and np.array_equal(values, value.numpy()) else type(value)(values)

    def reordered_outputs(self, ends: Sequence[tuple[str, Node]], values: Sequence[np.ndarray]) -> set[str]:
        """Returns the names of outputs that may differ by the order of equal scores.

        Args:
            ends: the outputs' names and nodes.
            values: the runtime's outputs; one that has positions of other scores is wrong.
        """
        ranked = {name: self.tied.get(node) for name, node in ends}
        wrong = {
            name
            for (name, _), value in zip(ends, values, strict=False)  # their number is compared later
            if (scores := ranked[name]) is not None and value is not None and not scores.accepts(value)
        }
        return self.order.among(ends) - wrong

    def on_integers(self, value: Any, both: Disagreement) -> None:
        """Counts the integers of a site on both sides; `value` is the graph's tensor, rounded or not."""
        worst = self.report.add("op_by_op", both.node, both.graph, both.runtime)
        if self.disagreement is None and worst > self.report.max_lsb:
            self.disagreement = both


class GraphRun(FirstOfEquals):
    """Runs the graph by itself and keeps its inputs, its outputs and the integers of nodes.

    Args:
        model: the converted graph.
        nodes: names of nodes that hold dequantized integers.
        first_of_equals: whether the first one of equal scores comes first.
        places: the places that its selections give; None for its own.
        qparams: what `integer_qparams` gives for the graph, if it is known.
    """

    def __init__(
        self,
        model: QuantizedModel,
        nodes: Collection[str],
        first_of_equals: bool = True,
        places: Sequence[np.ndarray] | None = None,
        qparams: Mapping[str, QParams] | None = None,
    ) -> None:
        super().__init__(model.module, first_of_equals, places)
        self.nodes, self.qparams = nodes, integer_qparams(model) if qparams is None else qparams
        self.integers: dict[str, np.ndarray] = {}
        self.inputs: list[np.ndarray] = []
        self.outputs: list[np.ndarray] = []

    def on_node(self, node: Node, value: Any) -> Any:
        """Keeps the values of graph inputs and the integers of sites."""
        if isinstance(node.expr, Input) and isinstance(node, TensorNode):
            self.inputs.append(value.numpy())
        if node.name in self.nodes:
            self.integers[node.name] = self._quantize(node.name, value)
        return value

    def _quantize(self, name: str, value: Any) -> np.ndarray:
        return quantize(value.numpy(), self.qparams[name])

    def compute(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Runs the graph on the arguments of one call."""
        self.outputs = [t.numpy() for t in self.run_flat(*args, **kwargs)]

    def compute_in(self, lanes: Lanes, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Runs the graph as `compute` does, where lanes of it know what no batch changes."""
        (outputs,) = lanes.run([self], args, kwargs)
        self.outputs = [t.numpy() for t in outputs]


@dataclass(frozen=True)
class SameRows:
    """The outputs of one batch with the rows that the runtime selects, and float's.

    Attributes:
        exact: float's outputs with what the graph selects; () without a float network.
        replayed: float's outputs with what the runtime selects.
        graph: the graph's outputs with what the runtime selects.
        shares, runtime_shares: how many of the places that graph and runtime select are float's.
    """

    exact: Sequence[np.ndarray]
    replayed: Sequence[np.ndarray]
    graph: Sequence[np.ndarray]
    shares: Sequence[Share] = ()
    runtime_shares: Sequence[Share] = ()

    def blank(
        self,
        selected: SelectedShares | None,
        exact: Sequence[np.ndarray],
        graph: Sequence[np.ndarray],
        runtime: Sequence[np.ndarray],
        replayed: Sequence[np.ndarray],
    ) -> tuple[Sequence[np.ndarray], ...]:
        """Returns the outputs without the rows that float does not select."""
        if selected is None:
            return exact, graph, runtime, replayed
        graphs, runtimes = ((exact, graph), self.shares), ((runtime, replayed), self.runtime_shares)
        return tuple(selected.blank(side, shares) for sides, shares in (graphs, runtimes) for side in sides)


class EndToEnd(GraphRun):
    """Runs the graph by itself, to compare it with a run of the runtime.

    Args:
        file: the file.
        places: the places that its selections give; None for its own.
        given: the integers of some sites, which are taken in the place of its own.
    """

    def __init__(
        self,
        file: File,
        places: Sequence[np.ndarray] | None = None,
        given: Mapping[str, np.ndarray] | None = None,
    ) -> None:
        super().__init__(file.model, file.names, file.first_of_equals, places, file.qparams)
        self.names, self.ends, self._float16 = file.names, file.ends, file.float16
        self.given = given or {}
        self.keeps_values = not self.given and self._float16 is None
        self.order = Unsettled()
        self._latest: tuple[Node, Any] | None = None
        self._exact = False  # whether the latest value has the floats of its integers

    def on_node(self, node: Node, value: Any) -> Any:
        """Follows equal scores to the outputs; keeps what is compared."""
        given = self.given.get(node.name)
        if given is not None:
            value = type(value)(dequantize(given, self.qparams[node.name]))
        self.order.follow(node, node in self.tied, False)
        if self._float16 is not None:
            value = self._float16.round(node, value)
        self._latest = (node, value)
        return super().on_node(node, value)

    def integers_of(self, node: Node, value: Any) -> tuple[np.ndarray, bool] | None:
        """Returns what `_read_levels` does, if a node was the last one and had this very value; else None."""
        same = self._latest is not None and self._latest[0] is node and self._latest[1] is value
        return (self.integers[node.name], self._exact) if same and node.name in self.integers else None

    def _quantize(self, name: str, value: Any) -> np.ndarray:
        """Returns the integers in few bytes: they are kept for all sites until the file is compared."""
        levels, self._exact = _read_levels(value.numpy(), self.qparams[name])
        return levels

    def tally(
        self,
        run: RuntimeRun,
        mode: str,
        report: VerifyReport,
        output_names: list[str],
        rows: SameRows | None = None,
    ) -> None:
        """Adds the differences between the runtime's values in `run` and the graph's to `report`.

        Args:
            run: the run of the runtime.
            mode: "end_to_end" or "deployed".
            report: the report.
            output_names: the names of the outputs.
            rows: the outputs of the float network, if both sides are compared to them.
        """
        for node, integers in self.integers.items():
            own = _for_all_samples(run.integers[self.names[node]], integers.shape)
            report.add(mode, node, integers, own)
        name = "reference" if mode == "end_to_end" else mode
        order = self.order.among(self.ends)
        outputs = self.outputs if rows is None else rows.graph
        report.add_outputs(name, output_names, outputs, run.outputs, report.selections, order)
        if rows is not None and rows.exact:
            sides = (rows.exact, self.outputs, run.outputs, rows.replayed)
            report.add_selected(name, rows.runtime_shares)
            report.add_closeness(name, output_names, *rows.blank(report.selected, *sides))
