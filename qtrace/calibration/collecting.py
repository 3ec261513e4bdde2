"""The loop that runs the batches and observes their activations."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from qtrace.calibration.base import Arguments, Watched, watched
from qtrace.calibration.choice import Chosen, ExplainedEngine, choose_engine
from qtrace.calibration.observing import Observing, refuse_spoiled
from qtrace.calibration.statistics import Statistics, arrays, checksum, fresh, no_statistics
from qtrace.data.batches import as_arguments, evaluating, find_unusual, find_values, refuse_nan
from qtrace.display import progress_bar
from qtrace.errors import CalibrationError
from qtrace.graph.nonfinite import remedy_for, search_nonfinite
from qtrace.graph.source_lines import name_with_line
from qtrace.graph.types import TensorNode, TracedModule
from qtrace.graph.walk import exprs, op_label
from qtrace.observers.base import Observer
from qtrace.preparation.model import QuantizedModel
from qtrace.preparation.phases import in_phase
from qtrace.runtimes.host import RuntimeHost

__all__ = ["CollectOptions", "Collected", "collect", "observe_parameters"]

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
                    with _naming_infinity(arguments):
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
def _naming_infinity(arguments: Arguments) -> Iterator[None]:
    """Adds to an error where the batch itself holds infinity, which a mask may mean."""
    try:
        yield
    except CalibrationError as error:
        place = find_values(arguments, np.isinf)
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
