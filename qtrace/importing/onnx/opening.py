"""Leaves the axes open that a file leaves open, as far as its nodes allow.

The graph is built at two sizes of the open axes. It is then compared at other sizes, small ones first, on
random inputs: with the file in onnxruntime. If that is missing or differs, a graph that is built for this
size takes its place. An axis at which a node needs a number, or at which the graph computes something else,
is fixed at its recorded size. The record says which node did it.
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import megengine as mge
import numpy as np

from qtrace.errors import GraphError, ImportingError
from qtrace.graph.differences import NETWORK_RTOL, SAMPLE_RTOL
from qtrace.graph.interpreter import ENGINE_ERRORS, Interpreter, locate_failure
from qtrace.graph.kernels import quiet_engine
from qtrace.graph.opaque import divides_by_inputs
from qtrace.graph.open_axes import FixedAxis, OpenAxes, OpenAxis, growth, power_of_two
from qtrace.graph.origin import read_origin
from qtrace.graph.types import Node, TensorNode, TracedModule
from qtrace.importing.onnx.importer import KEPT_WHERE_OPEN
from qtrace.importing.onnx.inputs import InputShape, axes_of, fix_axes, open_sizes, resize_inputs
from qtrace.onnxfile.local_session import OrtSession, SessionError, SessionSettings
from qtrace.onnxfile.model import read_ending
from qtrace.onnxfile.sessions import open_session

# Open sizes at which the graph is compared, in steps: few values, then more; None for a larger size than
# the recorded one.
_LEAST_STEPS = (3, 7, None)
# Of an open size, by its `growth`, at which types are inferred: three, and another one if two sizes are open.
_MOST_GROWTHS = 4

_KEPT = {op for domain, op in KEPT_WHERE_OPEN if not domain}


class Build(Protocol):
    """Builds the graph of a file for some inputs."""

    def __call__(self, inputs: Sequence[InputShape], unlike: frozenset[str] = frozenset()) -> TracedModule:
        """Returns the graph, in which nodes that resize are kept whose first outputs are ``unlike``."""


class UnsupportedNodesError(ImportingError):
    """A traced graph lacks an equal of nodes of the file.

    Attributes:
        problems: a clause for each node, which begins with its label.
    """

    def __init__(self, message: str, problems: Sequence[str]) -> None:
        super().__init__(message)
        self.problems = tuple(problems)


@dataclass(frozen=True)
class Opened:
    """A graph whose axes are open as far as its nodes allow.

    Attributes:
        traced: the graph.
        inputs: its inputs.
        reasons: open size that had to be fixed -> why.
    """

    traced: TracedModule
    inputs: tuple[InputShape, ...]
    reasons: dict[str, str]


def build_open(
    inputs: Sequence[InputShape], build: Build, file: Path | None, batch_stays: bool = False
) -> Opened:
    """Builds a graph in which as many axes as possible stay open.

    Args:
        inputs: the inputs, with all axes open that the file leaves open.
        build: builds the graph of the file for some inputs.
        file: the file; None if the graph is a part of one, which is compared only in MegEngine.
        batch_stays: whether a graph whose batch must be fixed is refused.

    Raises:
        ImportingError: when the graph cannot be built for fixed sizes either.
    """
    inputs, runtime = tuple(inputs), _FileRuns(file)
    try:
        return _build_below_limits(inputs, build, runtime)
    except (ImportingError, GraphError) as error:
        batches = {item.open[item.batch_axis] for item in inputs if item.batch_axis is not None}
        if batch_stays or not batches:
            raise
        fixed = tuple(replace(item, batch_axis=None) for item in fix_axes(inputs, batches))
        try:
            opened = _build_open(fixed, build, runtime)
        except (ImportingError, GraphError):
            raise error from None
        reason = error.problems[0] if isinstance(error, UnsupportedNodesError) else str(error).rstrip(".")
        return replace(opened, reasons={**opened.reasons, **dict.fromkeys(batches, reason)})


def _build_below_limits(inputs: tuple[InputShape, ...], build: Build, runtime: _FileRuns) -> Opened:
    """Builds a graph as `_build_open` does, recorded at smaller sizes where the file takes no larger ones.

    Text that is padded to the length of a table of positions has the largest size: whether the axis can stay
    open shows only below it.
    """
    opened = _build_open(inputs, build, runtime)
    smaller = inputs
    limited = {s for s in open_sizes(inputs) if s in opened.reasons}
    for size in limited:
        smaller = _below_limit(smaller, size, runtime)
    if smaller == inputs:
        return opened
    with contextlib.suppress(ImportingError, GraphError):
        again = _build_open(smaller, build, runtime)
        if limited.isdisjoint(again.reasons):
            return again
    return opened


def _below_limit(inputs: tuple[InputShape, ...], size: str, runtime: _FileRuns) -> tuple[InputShape, ...]:
    """Returns the inputs with an open size so small that all sizes at which graphs are inferred are possible.

    They are as they were if the file takes larger sizes than the recorded one, or not the smaller one.
    """
    others = fix_axes(inputs, {axis.size for axis in axes_of(inputs)} - {size})
    lowered = resize_inputs(others, lambda unit, _: _sizes_below(unit) or unit)
    if lowered == others or runtime.takes(_grown(inputs, [size])) or not runtime.takes(lowered):
        return inputs
    return tuple(replace(item, shape=low.shape) for item, low in zip(inputs, lowered, strict=True))


def _sizes_below(number: int) -> int | None:
    """Returns a size that grows some times without exceeding ``number``; None if there is none.

    It can be halved as often as ``number`` if possible.
    """
    power = power_of_two(number)
    while power:
        for smaller in range(number - number % power - power, 0, -power):
            if smaller + _MOST_GROWTHS * growth(smaller) <= number:
                return smaller
        power //= 2
    return None


def _grown(inputs: tuple[InputShape, ...], sizes: Sequence[str]) -> tuple[InputShape, ...]:
    """Returns the inputs with larger numbers for some open sizes, which keep their ratio."""
    opened = fix_axes(_joined(inputs, sizes), {axis.size for axis in axes_of(inputs)} - {sizes[0]})
    return resize_inputs(opened, lambda unit, number: unit + (1 if number is None else growth(unit)))


def _joined(inputs: tuple[InputShape, ...], sizes: Sequence[str]) -> tuple[InputShape, ...]:
    """Returns the inputs with the first of some open sizes in the place of all of them."""
    return tuple(
        replace(item, open={axis: sizes[0] if size in sizes else size for axis, size in item.open.items()})
        for item in inputs
    )


def _agreeing(inputs: tuple[InputShape, ...], runtime: _FileRuns) -> tuple[str, ...]:
    """Returns the first open sizes that the file takes together only; () if it takes each without others.

    They are equal, or in the ratio of the recorded ones. A size that the file refuses to grow is tried with
    each other one, with all at the same position, and with all. The batch comes first, as it stays open.
    """
    axes = sorted(axes_of(inputs), key=lambda axis: axis.axis)
    sizes = list(dict.fromkeys(axis.size for axis in axes))
    for size in sizes:
        if runtime.takes(_grown(inputs, [size])):
            continue
        position = next(axis.axis for axis in axes if axis.size == size)
        same = [axis.size for axis in axes if axis.axis == position]
        for group in (*([size, other] for other in sizes), same, sizes):
            agreeing = tuple(s for s in sizes if s in group)
            if len(agreeing) > 1 and runtime.takes(_grown(inputs, agreeing)):
                return agreeing
    return ()


def _build_open(inputs: tuple[InputShape, ...], build: Build, runtime: _FileRuns) -> Opened:
    """Builds a graph whose batch stays open, and the other axes as far as possible."""
    sizes = open_sizes(inputs)
    if not sizes:
        return Opened(build(inputs), inputs, {})
    runtime.ran = False
    traced, reason = _attempt(inputs, build, runtime)
    known = traced is not None and (runtime.ran or divides_by_inputs(traced))
    group = () if known else _agreeing(inputs, runtime)
    if traced is not None and not group:
        return Opened(traced, inputs, {})
    if group:
        opened = _build_open(_joined(inputs, group), build, runtime)
        members = dict.fromkeys(group, opened.reasons[group[0]]) if group[0] in opened.reasons else {}
        return replace(opened, reasons={**opened.reasons, **members})
    reasons: dict[str, str] = {}
    if len(sizes) > 1:
        for size in sizes:
            alone = fix_axes(inputs, set(sizes) - {size})
            traced, own = _attempt(alone, build, runtime)
            if traced is None:
                reasons[size] = own
            elif len(reasons) == len(sizes) - 1:  # the only one that stays
                return Opened(traced, alone, reasons)
    remaining = [size for size in sizes if size not in reasons]
    while remaining:
        fixed = fix_axes(inputs, set(reasons))
        if len(remaining) < len(sizes):
            traced, reason = _attempt(fixed, build, runtime)
            if traced is not None:
                return Opened(traced, fixed, reasons)
        reasons[remaining.pop()] = reason
    closed = fix_axes(inputs, set(sizes))
    return Opened(build(closed), closed, reasons)


def open_axes_of(opened: Opened) -> OpenAxes:
    """Returns the record of a graph that `build_open` built; names of nodes are its inputs' names."""
    nodes = [node for node in opened.traced.graph.inputs if isinstance(node, TensorNode)]
    axes, fixed = [], []
    for node, item in zip(nodes, opened.inputs, strict=True):
        for axis, name in item.names.items():
            size = item.open.get(axis)
            if size is not None:
                axes.append(OpenAxis(node.name, axis, size, name))
            else:
                keys = (key for key in (name, f"{item.name}:{axis}") if key in opened.reasons)
                reason = opened.reasons.get(next(keys, ""), "")
                if reason:
                    fixed.append(FixedAxis(node.name, axis, name, reason))
    return OpenAxes(tuple(axes), tuple(fixed))


def _attempt(
    inputs: Sequence[InputShape], build: Build, runtime: _FileRuns
) -> tuple[TracedModule | None, str]:
    """Builds the graph with open axes and checks it; returns why it cannot be so if it fails."""
    difference, unlike = _SAME, frozenset[str]()
    while True:
        try:
            traced = build(inputs, unlike)
        except UnsupportedNodesError as error:
            return None, difference.reason or error.problems[0]
        except (ImportingError, GraphError) as error:
            return None, difference.reason or str(error).rstrip(".")
        difference = _differs(traced, inputs, build, runtime)
        if not difference.reason:
            return traced, ""
        if not difference.resized or difference.resized in unlike:
            return None, difference.reason
        unlike |= {difference.resized}


@dataclass(frozen=True)
class _Difference:
    """How a graph differs from the file at another size.

    Attributes:
        reason: a clause; "" if it does not differ.
        resized: the result of the node of the file that is to blame, if it is one that can be kept instead.
    """

    reason: str = ""
    resized: str = ""


_SAME = _Difference()


def _differs(
    traced: TracedModule, inputs: Sequence[InputShape], build: Build, runtime: _FileRuns
) -> _Difference:
    """Compares the graph at other sizes with the file; where it differs, with graphs for each of them."""
    tried: list[dict[str, tuple[int, ...]]] = []
    refused = 0  # a file that refuses as many sizes as a kind has takes no small one of the other kind
    for candidates in (_even, _odd):
        # At small sizes maps may vanish, or the values, and the file may need larger ones.
        for least in _LEAST_STEPS:
            shapes = _resized(inputs, partial(candidates, least=least))
            if shapes in tried or (refused >= len(_LEAST_STEPS) and least is not None):
                continue
            tried.append(shapes)
            fixed = [replace(item, shape=shapes[item.name], batch_axis=None, open={}) for item in inputs]
            arrays = _random_inputs(fixed)
            try:
                equal = runtime.is_equal(traced, fixed, arrays)
                if equal is None and least is not None:
                    continue
                if equal:
                    break
                reference = build(fixed)
            except (ImportingError, GraphError, _NoSuchSizeError) as error:
                refused += isinstance(error, _NoSuchSizeError)
                continue
            difference = _compare(traced, reference, fixed, arrays)
            if difference.reason:
                return difference
            break
    return _SAME


def _even(size: int, order: int, least: int | None) -> int:
    """Returns another size that can be halved as often.

    Args:
        size: the recorded size.
        order: the number of the open size: each gets another one.
        least: how often the size is to have the largest power of two that divides it, up to 32, if that is
            smaller than ``size``; None for a larger size.
    """
    step = min(size & -size, 32)
    other = step * (least + order) if least is not None else size
    return other if other < size else size + growth(size) * (1 + order)


def _odd(size: int, order: int, least: int | None) -> int:
    """Returns an odd size; see `_even`."""
    other = (min(size & -size, 32) * (least + order) - 1) | 1 if least is not None else size
    return other if 8 * (1 + order) < other < size else (size + growth(size) * (2 + order)) | 1


def _resized(inputs: Sequence[InputShape], resize: Callable[[int, int], int]) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of the inputs with other sizes of their open axes, among them the batch."""

    def other(unit: int, number: int | None) -> int:
        return unit + 1 if number is None else resize(unit, number + 1)

    return {item.name: item.shape for item in resize_inputs(inputs, other)}


class _NoSuchSizeError(Exception):
    """The network does not run at a size."""


class _FileRuns:
    """Runs the file in onnxruntime, if it is installed and takes the file.

    Args:
        file: the file; None if nothing is to be run.

    Attributes:
        ran: whether the file has run at a size at which a graph is compared.
    """

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self._session: OrtSession | None = None
        self._opened = self.ran = False

    def takes(self, inputs: Sequence[InputShape]) -> bool:
        """Returns whether the file runs at the recorded sizes; True if it cannot be run at any.

        Integers are 1: a division by 0 would end the process.
        """
        session = self._open()
        if session is None:
            return True
        safe = (a if a.dtype.kind == "f" else a**0 for a in _random_inputs(inputs))
        feeds = {item.name: array.astype(item.dtype) for item, array in zip(inputs, safe, strict=True)}
        try:
            session.run(None, feeds)
        except SessionError:
            return False
        return True

    def is_equal(
        self, traced: TracedModule, inputs: Sequence[InputShape], arrays: Sequence[np.ndarray]
    ) -> bool | None:
        """Returns whether the graph computes what the file does; False if the file cannot be run.

        None says that the size does not tell. Maps vanish in MegEngine, or the values are so small that an
        activation such as a sigmoid, which rounds to the precision of 1, leaves them no digits.

        Raises:
            _NoSuchSizeError: when the file does not run at the size.
        """
        session = self._open()
        if session is None:
            return False
        feeds = {i.name: a.astype(i.dtype) for i, a in zip(inputs, arrays, strict=True)}
        guarded = divides_by_inputs(traced)
        with quiet_engine(traced):
            results = _outputs(traced, arrays) if guarded else None
        if guarded and results is None:  # perhaps at a division by 0, which the file would not survive
            return None
        try:
            expected = session.run(None, feeds)
        except SessionError as error:
            raise _NoSuchSizeError(str(error)) from error
        self.ran = True
        with quiet_engine(traced):
            results = results or _outputs(traced, arrays)
        if results is None:
            return None
        pairs = [(a.astype(e.dtype), e) for a, e in zip(results, expected, strict=True)]
        different = [(a, e) for a, e in pairs if not _is_equal(a, e, NETWORK_RTOL)]
        if different and all(_is_close_to_zero(a) and _is_close_to_zero(e) for a, e in different):
            return None
        return not different

    def _open(self) -> OrtSession | None:
        installed = importlib.util.find_spec("onnxruntime") is not None
        if not self._opened and self._file is not None and installed:
            # A file that it does not take is compared only in MegEngine.
            with contextlib.suppress(SessionError):
                source = read_ending(self._file)
                self._session = open_session(source, SessionSettings(optimize=False, as_megengine=True))
        self._opened = True
        return self._session


def _compare(
    traced: TracedModule,
    reference: TracedModule,
    inputs: Sequence[InputShape],
    arrays: Sequence[np.ndarray],
) -> _Difference:
    """Runs both graphs on random numbers; returns how the first one differs."""
    shown = ", ".join(f"{item.name} {list(item.shape)}" for item in inputs)
    with quiet_engine(traced), quiet_engine(reference):
        expected = _outputs(reference, arrays)
        if expected is None:
            return _SAME
        results = _outputs(traced, arrays)
        if results is None:
            reason = f"{locate_failure(traced, *map(mge.Tensor, arrays))} (at {shown})"
            return _Difference(reason, _resized_apart(traced, reference, ()))
        if all(_is_equal(a, b) for a, b in zip(results, expected, strict=True)):
            return _SAME
        nodes = _different_nodes(traced, reference, arrays)
    reason = f"{f'node {nodes[0]}' if nodes else 'the graph'} computes other values than the file at {shown}"
    return _Difference(reason, _resized_apart(traced, reference, nodes))


def _resized_apart(traced: TracedModule, reference: TracedModule, nodes: Sequence[str]) -> str:
    """Returns the result of the node of the file that is to blame for a difference, if it resizes; else "".

    Args:
        traced: the graph with open axes.
        reference: the graph of the same file for the size at which they differ.
        nodes: the nodes that differ, in order. The first one that gives a result of the file is to blame. So
            is a node that resizes only in the reference, as the other graph had nothing to change.
    """
    own, others = (origin.results if (origin := read_origin(g)) else {} for g in (traced, reference))
    first = next((own[node] for node in nodes if node in own), None)
    if first is not None and first.op in _KEPT:
        return first.tensor
    tensors = {result.tensor for result in own.values()}
    return next((r.tensor for r in others.values() if r.op in _KEPT and r.tensor not in tensors), "")


def _random_inputs(inputs: Sequence[InputShape]) -> list[np.ndarray]:
    random = np.random.default_rng(0)
    arrays = []
    for item in inputs:
        if item.carried.kind == "f":
            arrays.append(random.standard_normal(item.shape, np.float32))
        else:
            arrays.append(random.integers(0, 2, item.shape).astype(item.carried))
    return arrays


def _outputs(traced: TracedModule, arrays: Sequence[np.ndarray]) -> list[np.ndarray] | None:
    """Returns the outputs; None if an op fails."""
    try:
        result = traced(*map(mge.Tensor, arrays))
        return [t.numpy() for t in (result if isinstance(result, (tuple, list)) else [result])]
    except ENGINE_ERRORS:
        return None


def _is_equal(first: np.ndarray, second: np.ndarray, tolerance: float = SAMPLE_RTOL) -> bool:
    if first.shape != second.shape:
        return False
    if first.dtype.kind != "f":
        return bool(np.array_equal(first, second))
    finite = second[np.isfinite(second)]
    largest = float(np.abs(finite).max()) if finite.size else 0.0
    return bool(np.allclose(first, second, rtol=0, atol=tolerance * max(largest, 1e-30), equal_nan=True))


def _is_close_to_zero(array: np.ndarray) -> bool:
    return array.dtype.kind == "f" and bool(np.abs(array).max(initial=0.0) < NETWORK_RTOL)  # few digits


class _Values(Interpreter):
    """Keeps the values of all nodes, or compares them with the values of another run."""

    def __init__(self, traced: TracedModule, expected: dict[str, np.ndarray] | None = None) -> None:
        super().__init__(traced)
        self.values: dict[str, np.ndarray] = {}
        self.expected = expected
        self.different: list[str] = []

    def on_node(self, node: Node, value: Any) -> Any:
        """Keeps or compares a float tensor; sizes have other nodes in graphs for fixed sizes."""
        if not isinstance(node, TensorNode) or np.dtype(node.dtype).kind != "f":
            return value
        if self.expected is None:
            self.values[str(node.name)] = value.numpy()
        elif node.name in self.expected and not _is_equal(value.numpy(), self.expected[str(node.name)]):
            self.different.append(str(node.name))
        return value


def _different_nodes(
    traced: TracedModule, reference: TracedModule, arrays: Sequence[np.ndarray]
) -> list[str]:
    """Returns the nodes of one name that have other values in both graphs, in order."""
    tensors = [mge.Tensor(array) for array in arrays]
    known = _Values(reference)
    known.run(*tensors)
    run = _Values(traced, known.values)
    run.run(*tensors)
    return run.different
