"""Collects the statistics of batches: each value is observed at its site.

A site is refused whose range is spoiled by a number that stands for infinity, such as a mask given at run
time.
"""

from __future__ import annotations

import logging
import threading
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from megengine import Tensor

from qtrace.calibration.base import Arguments, Watched, range_group, watched
from qtrace.calibration.choice import Chosen, ExplainedEngine, choose_engine
from qtrace.data.base import read_array
from qtrace.data.batches import as_arguments, evaluating, find_unusual, find_values, refuse_nan
from qtrace.display import progress_bar
from qtrace.errors import CalibrationError
from qtrace.fakequant.base import fold_channels
from qtrace.graph.nonfinite import remedy_for, search_nonfinite
from qtrace.graph.notes import name_with_line
from qtrace.graph.types import TensorNode, TracedModule
from qtrace.graph.walk import exprs, op_label
from qtrace.numerics import GAP
from qtrace.observers.base import Observer
from qtrace.observers.minmax import MinMax
from qtrace.preparation.float16 import float_values
from qtrace.preparation.model import QuantizedModel
from qtrace.preparation.phases import in_phase
from qtrace.runtimes.host import RuntimeHost
from qtrace.scheme import QScheme

# The statistics of a calibration: an observer for each group of sites, and the observed batches.

Observed = Mapping[str, Iterable[Observer]]


@dataclass(frozen=True)
class Statistics:
    """Immutable, mergeable statistics of a prepared graph.

    Attributes:
        observers: group of sites -> its observer; and `range_group` of a node in float -> its observer,
            if the config asks for float16.
        batches: number of each observed batch -> a checksum of its values.
    """

    observers: Mapping[str, Observer]
    batches: Mapping[int, int] = field(default_factory=dict)

    def plus(self, observed: Observed, batches: Mapping[int, int] | None = None) -> Statistics:
        """Returns these statistics merged with further observers of some groups, in their order."""
        observers = dict(self.observers)
        for group, others in observed.items():
            for other in others:
                observers[group] = observers[group].merge(other)
        return Statistics(observers, {**self.batches, **(batches or {})})

    def merge(self, other: Statistics) -> Statistics:
        """Merges two statistics; commutative and associative.

        Raises:
            CalibrationError: when both hold the same batch.
        """
        twice = sorted(set(self.batches) & set(other.batches))
        if twice:
            raise CalibrationError(f"batch {twice[0]} was observed twice: give each batch to one worker.")
        return self.plus({group: [o] for group, o in other.observers.items()}, other.batches)


def fresh(observer: Observer) -> Observer:
    """Builds an observer without data, of the same kind and options."""
    return type(observer)(observer.scheme, **observer.options)


def no_statistics(prepared: QuantizedModel) -> Statistics:
    """Builds the statistics of a prepared graph before its first batch."""
    fakes = prepared.fake_quants.items()
    ranges = {range_group(name): MinMax(QScheme()) for name in float_values(prepared)}
    observers = {name: fresh(fq.observer) for name, fq in fakes if fq.observer is not None}
    return Statistics({**observers, **ranges})


def arrays(batch: Any) -> list[np.ndarray]:
    """Returns the arrays of a batch; the order of the keys of a dict does not matter."""
    return [
        value.numpy()
        if isinstance(value, Tensor)
        else np.asarray(read_array(value, 0) if hasattr(value, "detach") else value)
        for value in _leaves(batch)
    ]


def checksum(values: Iterable[np.ndarray]) -> int:
    """Returns the CRC-32 of the bytes of all arrays, which tells batches apart."""
    crc = 0
    for value in values:
        crc = zlib.crc32(np.ascontiguousarray(value).data, crc)
    return crc


def _leaves(batch: Any) -> Iterator[Any]:
    if isinstance(batch, Mapping):
        for key in sorted(batch, key=str):
            yield from _leaves(batch[key])
    elif isinstance(batch, (tuple, list)):
        for item in batch:
            yield from _leaves(item)
    else:
        yield batch


# Observation of a batch: its values join the statistics only when the batch is complete.


class Observing:
    """Observes the values of a batch by new observers and merges these when the batch is complete.

    A refused batch leaves no trace. Threads would not help: they would pass Python's lock to each other at
    every numpy call, which takes longer than the call.

    Attributes:
        statistics: the statistics of all committed batches.
        nonfinite: the graph outputs that are no sites and hold NaN or infinity in the current batch.
        large: group -> its values that are far larger than all others, for `refuse_spoiled`.

    Args:
        statistics: the statistics to add to.
        watched: the nodes and parameters that are observed.
        sites: group -> the name of its site, for errors.
        places: node -> its op and source line, for errors.
    """

    def __init__(
        self, statistics: Statistics, watched: Watched, sites: Mapping[str, str], places: Mapping[str, str]
    ) -> None:
        self.statistics, self._watched, self._sites = statistics, watched, sites
        self._places = places
        self._observed: dict[str, list[Observer]] = {}
        self._batch = self._checksum = 0
        self.nonfinite: list[str] = []
        self.large: dict[str, Values] = {}

    def begin(self, number: int, checksum: int) -> None:
        """Begins a batch; what was observed since the last `commit` is dropped.

        Args:
            number: the number of the batch.
            checksum: the checksum of its arrays.

        Raises:
            CalibrationError: when an observer refuses a parameter, naming site and batch.
        """
        self._observed, self.nonfinite = {}, []
        self._batch, self._checksum = number, checksum
        for group, value in self._watched.constants:
            self._observe(group, value)

    def observe(self, node: str, value: np.ndarray) -> None:
        """Observes the value of a node for all its groups; an output without a group must be finite.

        Raises:
            CalibrationError: when an observer refuses the value; it names site, batch, op and line.
        """
        groups = self._watched.nodes[node]
        if node in self._watched.ends and not np.isfinite(value).all():
            self.nonfinite.append(node)
        for group in groups:
            if group == range_group(node):
                self._observe_range(group, value)
                continue
            try:
                observer = self._observe(group, fold_channels(value, self._watched.folded.get(group, ())))
            except CalibrationError as error:
                place = self._places.get(node)
                text = f"{error} The value is {place}." if place else str(error)
                raise CalibrationError(text + _meant(value)) from error
            if observer.largest >= LARGE and (values := read_large(node, value)) is not None:
                earlier = self.large.get(group, values)
                self.large[group] = values if values.near >= earlier.near else earlier

    def commit(self) -> None:
        """Adds the batch to the statistics."""
        # One assignment: after an interruption the statistics still hold complete batches only.
        self.statistics = self.statistics.plus(self._observed, {self._batch: self._checksum})
        self._observed = {}

    def _observe_range(self, group: str, value: np.ndarray) -> None:
        """Observes the range of a node in float; what is not finite counts as the largest number."""
        if value.size:
            most = float(np.finfo(np.float32).max)
            self._observe(group, np.nan_to_num(value, nan=most, posinf=most, neginf=-most))

    def _observe(self, group: str, value: np.ndarray) -> Observer:
        observer = fresh(self.statistics.observers[group])
        observer.observe(value, batch=self._batch, site=self._sites.get(group, group))
        self._observed.setdefault(group, []).append(observer)
        return observer


def _meant(value: np.ndarray) -> str:
    """Returns what to do if NaN or infinity in a refused value is meant; nothing if it is finite."""
    if np.isfinite(value).all():
        return ""
    kind = "NaN" if np.isnan(value).any() else "infinity"
    return f" If the {kind} is meant, no integer stands for it: call prepare with samples that hold it."


LARGE = 1e4  # smaller numbers do not stand for infinity, unless the graph shows it
_LEAST_STEPS = 4.0  # of the grid within the others: fewer than 3 bits


@dataclass(frozen=True)
class Values:
    """The values of a node that are far larger than all others, and these others.

    Attributes:
        node: the name of the node.
        large: the value of the largest magnitude.
        near: the largest magnitude of the others.
    """

    node: str
    large: float
    near: float


def read_large(node: str, value: np.ndarray) -> Values | None:
    """Reads a value that reaches `LARGE`; None if no gap parts its large numbers from the others.

    Zeros do not count: a mask of two numbers needs two integers.
    """
    sizes = np.abs(value)
    largest = float(sizes.max())
    near = float(sizes.max(where=sizes < largest / GAP, initial=0.0))
    if largest < LARGE or near == 0.0:
        return None
    return Values(node, float(value.flat[int(sizes.argmax())]), near)


def refuse_spoiled(
    values: Mapping[str, Values],
    observers: Mapping[str, Observer],
    places: Mapping[str, str],
    readers: Callable[[str], Iterable[str]],
) -> None:
    """Refuses statistics in which large values leave the others of their site next to no integers.

    Args:
        values: group of sites -> its large values.
        observers: group -> its observer, which chooses the range.
        places: node -> its op and source line.
        readers: returns the results of the ops that write the value of a node or read it as their site.

    Raises:
        CalibrationError: naming the site, its range, the magnitude of the other values, and the cure.
    """
    for group, entry in values.items():
        observer = observers[group]
        if observer.scheme.per_channel:
            continue
        step = float(observer.qparams().scale.max())
        if entry.near >= _LEAST_STEPS * step:
            continue
        lo, hi = (float(end) for end in observer.range())
        place = f", {places[entry.node]}" if entry.node in places else ""
        names = ", ".join(readers(entry.node))
        raise CalibrationError(
            f"site {entry.node}{place}: its range is {lo:.4g} to {hi:.4g} with a step of {step:.3g}, but "
            f"without numbers such as {entry.large:.4g} no value exceeds {entry.near:.3g}. Call prepare with "
            "samples, or give a mask as a constant, so that qtrace reads the number as infinity. "
            f"Or keep the site in float by a rule {{match: {{name: [{names}]}}, quantize: false}}."
        )


# The loop that runs the batches and observes their activations.

_LOG = logging.getLogger("qtrace")

Numbered = Iterable[tuple[int, Any]]


@dataclass(frozen=True)
class CollectOptions:
    """The options of `collect`.

    Attributes:
        engine: one of `qtrace.calibration.choice.ENGINES`, or an earlier choice.
        batches: number of batches, with the batches of ``start``; None if unknown.
        threads: number of threads that compute; None for all cores.
        progress: whether to show a progress bar on stderr.
        prefetch: whether to read batches while earlier ones are computed.
        host: the interpreter or machine whose onnxruntime computes; None for this process.
    """

    engine: str | Chosen = "auto"
    batches: int | None = None
    threads: int | None = None
    progress: bool = False
    host: RuntimeHost | None = None
    prefetch: bool = False


@dataclass(frozen=True)
class Collected:
    """The statistics of a collection and its engine.

    Attributes:
        statistics: the statistics of the activations.
        chosen: the engine and the reason for its choice.
    """

    statistics: Statistics
    chosen: Chosen


def collect(
    prepared: TracedModule | QuantizedModel,
    batches: Numbered,
    options: CollectOptions | None = None,
    after: Callable[[Collected], None] = lambda collected: None,
    start: Statistics | None = None,
) -> Collected:
    """Runs batches through a prepared graph in float and observes its activations.

    The module is left as it was. Its parameters are not observed: see `observe_parameters`.

    Args:
        prepared: a module made by ``qtrace.prepare``, or its view.
        batches: pairs of a number and a batch as for `qtrace.calibrate`.
        options: engine, threads and progress; None for the defaults.
        after: a function that is called after each batch with the statistics so far.
        start: statistics to add to; None to start without.

    Raises:
        CalibrationError: when a batch does not fit the model, a value is not finite, a number that stands for
            infinity spoils the range of a site, or the caller is not on the main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        raise CalibrationError(
            "calibrate was called on a thread of its own, where MegEngine fails: call it on the main thread."
        )
    options = options or CollectOptions()
    model = QuantizedModel.of(prepared, "prepared")
    module, observed = model.module, watched(model)
    start = start or no_statistics(model)
    with in_phase(module, "float"), evaluating(module):
        sites = {name: fq.site for name, fq in model.fake_quants.items()}
        places = _places(module, observed)
        observing = Observing(start, observed, sites, places)
        with _Reader(model, observed, options) as reader:
            bar = progress_bar(
                reader.read(batches),
                total=options.batches,
                initial=len(start.batches),
                desc="calibrate",
                unit="batch",
                disable=not options.progress,
            )
            with bar:
                for batch in bar:
                    index, arguments, engine = batch.number, batch.arguments, reader.engine()
                    observing.begin(index, batch.checksum)
                    with _naming_infinity(arguments, index):
                        engine.run(arguments, index, observing.observe)
                        for name in observing.nonfinite:
                            _refuse_nonfinite_output(module, arguments, index, model.nodes[name])
                    observing.commit()
                    after(Collected(observing.statistics, engine.chosen))
            chosen = reader.engine().chosen
        sited = {group: large for group, large in observing.large.items() if group not in model.record.native}
        refuse_spoiled(sited, observing.statistics.observers, places, lambda node: _bound(model, node))
        for problem in reader.unusual:  # not with an error, which matters more
            _LOG.warning(f"batch 0: {problem}.")
        return Collected(observing.statistics, chosen)


@dataclass(frozen=True)
class _Batch:
    """A batch that was read.

    Attributes:
        number: its number.
        arguments: the arguments of the call.
        checksum: the checksum of its arrays.
    """

    number: int
    arguments: Arguments
    checksum: int


class _Reader:
    """Reads batches, chooses the engine by the first one, and lets it begin those that come next.

    Attributes:
        unusual: what is unusual about the values of batch 0.

    Args:
        model: the prepared model.
        observed: the nodes and parameters that are observed.
        options: the options of `collect`.
    """

    def __init__(self, model: QuantizedModel, observed: Watched, options: CollectOptions) -> None:
        self._model, self._observed, self._options = model, observed, options
        self._engine: ExplainedEngine | None = None
        self.unusual: list[str] = []

    def __enter__(self) -> _Reader:
        return self

    def __exit__(self, *_: object) -> None:
        if self._engine is not None:
            self._engine.close()

    def engine(self, first: Arguments | None = None) -> ExplainedEngine:
        """Returns the engine, which is chosen at the first call.

        Args:
            first: the arguments of the first batch; None to assume the shapes of the trace.
        """
        if self._engine is None:
            engine, options = self._options.engine, self._options
            self._engine = choose_engine(
                self._model, self._observed, engine, options.batches, options.threads, first, options.host
            )
        return self._engine

    def read(self, batches: Numbered) -> Iterator[_Batch]:
        """Yields the batches in order; an error of one that was read ahead comes in its turn."""
        source, waiting = iter(batches), deque[_Batch]()
        ended, failure = False, None
        while True:
            while not ended and len(waiting) <= self._count_prefetched():
                try:
                    number, batch = next(source, (None, None))
                    if number is not None:
                        waiting.append(self._prepare(number, batch))
                    ended = number is None
                except Exception as error:
                    ended, failure = True, error
            if not waiting:
                break
            for batch in waiting if self._options.prefetch else ():
                self.engine().begin(batch.arguments)
            yield waiting.popleft()
        if failure is not None:
            raise failure

    def _count_prefetched(self) -> int:
        return self._engine.prefetched if self._options.prefetch and self._engine is not None else 0

    def _prepare(self, number: int, batch: Any) -> _Batch:
        arguments = as_arguments(batch, self._model.module, number)
        if number == 0:
            self.unusual = find_unusual(arguments, self._model.module, self._model.config.preprocess)
        self.engine(arguments)
        read = _Batch(number, arguments, checksum(arrays(batch)))
        refuse_nan(arguments, number, self._model.module)  # a ReLU would make numbers of it
        return read


def _refuse_nonfinite_output(
    model: TracedModule, arguments: Arguments, index: int, output: TensorNode
) -> None:
    """Refuses a batch for which an output of the graph holds NaN or infinity that is not meant.

    Args:
        model: the prepared graph, in the phase float.
        arguments: the arguments of its forward.
        index: the number of the batch.
        output: the node that held NaN or infinity.

    Raises:
        CalibrationError: names output, batch, and the op that produced NaN or infinity first.
    """
    origins = search_nonfinite(model, *arguments).origins
    origin = origins.get(output, output.expr)  # finite in MegEngine: another engine computed the value
    if origin is None:
        return
    place = name_with_line(origin, op_label(origin))
    remedy = remedy_for(origin) or "repair the data or the model"
    raise CalibrationError(
        f"output {output.name}, batch {index}: it holds NaN or infinity, which {place} gives first: {remedy}."
    )


@contextmanager
def _naming_infinity(arguments: Arguments, index: int) -> Iterator[None]:
    """Adds to an error where the batch itself holds infinity, which a mask may mean."""
    try:
        yield
    except CalibrationError as error:
        place = find_values(arguments, np.isinf, index)
        if not place:
            raise
        raise CalibrationError(f"{error} The batch itself holds infinity, first in {place}.") from error


def _places(prepared: TracedModule, observed: Watched) -> dict[str, str]:
    """Maps each watched node to its op and source line."""
    nodes = ((node, e) for e in exprs(prepared) for node in e.outputs)
    return {node.name: name_with_line(e, op_label(e)) for node, e in nodes if node.name in observed.nodes}


def _bound(model: QuantizedModel, site: str) -> list[str]:
    """Returns the results of the ops that a rule keeps in float so that nothing of a site is rounded.

    These are the op of the site and the moves after it. Where that op is in float already, or the site is an
    input of the graph, they are its readers.
    """
    states = {note.name: note.state for note in model.annotation.notes}
    names = [site] if site in states else []
    followed = {"carried", "int", "fused"} if states.get(site, "float") == "float" else {"carried"}
    stack = [(model.nodes[site], followed)]
    while stack:
        node, followed = stack.pop()
        for result in (n for user in node.users for n in user.outputs):
            name = result.name
            if name not in states:  # of a fake quant
                stack.append((result, followed))
            elif name not in names and states[name] in followed:
                names.append(name)
                stack.append((result, {"carried"}))
    return names


def observe_parameters(prepared: QuantizedModel, statistics: Statistics) -> Statistics:
    """Returns the statistics with the values of the parameters, which are the same in every batch.

    Raises:
        CalibrationError: when a parameter is not finite; it names the site.
    """
    sites = {name: fq.site for name, fq in prepared.fake_quants.items()}
    observed: dict[str, list[Observer]] = {}
    for group, read in watched(prepared).parameters:
        observer = fresh(statistics.observers[group])
        observer.observe(read(), site=sites[group])
        observed.setdefault(group, []).append(observer)
    return statistics.plus(observed)
