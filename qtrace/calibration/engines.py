"""The engines that compute the activations: MegEngine, which runs every graph, and onnxruntime."""

from __future__ import annotations

import importlib.util
import logging
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import megengine as mge
import numpy as np

from qtrace.calibration.base import Arguments, EngineError, Observe
from qtrace.data.batches import translate_errors
from qtrace.errors import ExportError, install
from qtrace.export.open_axes import SharedAxes
from qtrace.graph.interpreter import Interpreter
from qtrace.graph.kernels import STAGE_BYTES
from qtrace.graph.stepping import GraphSegment, SegmentRun, Use
from qtrace.graph.types import Node, TensorNode, TracedModule
from qtrace.graph.walk import exprs
from qtrace.onnxfile.local_session import OrtSession, SessionError, SessionSettings
from qtrace.onnxfile.sessions import open_session
from qtrace.preparation.model import QuantizedModel
from qtrace.process import count_threads, prefetch_map
from qtrace.runtimes.host import RuntimeHost, describe_side

if TYPE_CHECKING:
    from qtrace.export.onnx.segment import PreparedSegments

# The engine MegEngine, which runs every graph.


class MegEngine:
    """Runs the prepared graph expr by expr.

    Args:
        prepared: a module made by ``qtrace.prepare``, whose phase is float.
        nodes: the names of the nodes that are watched.
    """

    name = "megengine"
    prefetched = 0

    def __init__(self, prepared: TracedModule, nodes: Collection[str]) -> None:
        self._prepared, self._nodes = prepared, frozenset(nodes)

    def begin(self, arguments: Arguments) -> None:
        """Does nothing: MegEngine computes for one thread."""

    def drop(self, arguments: Arguments) -> None:
        """Does nothing, as `begin`."""

    def close(self) -> None:
        """Does nothing, as `begin`."""

    def run(self, arguments: Arguments, index: int, observe: Observe) -> None:
        """Runs one batch; see `Engine`."""
        args, kwargs = arguments
        watcher = _Watcher(self._prepared, self._nodes, observe)
        try:
            with translate_errors(self._prepared, arguments, index):
                try:
                    _kept = watcher.run(*args, **kwargs)  # freeing a failed result ends the process
                finally:
                    # Kernels report errors late: errors after the last site belong to this batch, too. An
                    # observer may also have refused the memory that a failed kernel left.
                    mge._full_sync()
        except _ObserverError as error:
            raise error.original from error.original.__cause__  # no error of MegEngine's


class _ObserverError(Exception):
    """Carries an error of an observer past the translation of MegEngine's errors."""

    def __init__(self, original: Exception) -> None:
        super().__init__(str(original))
        self.original = original


class _Watcher(Interpreter):
    """Observes the value of each watched node."""

    def __init__(self, prepared: TracedModule, nodes: Collection[str], observe: Observe) -> None:
        super().__init__(prepared)
        self._nodes, self._observe = nodes, observe

    def on_node(self, node: Node, value: Any) -> Any:
        if node.name in self._nodes:
            array = value.numpy()
            try:
                self._observe(node.name, array)
            except Exception as error:
                raise _ObserverError(error) from error
        return value


# The engine onnxruntime: runs graphs that have an ONNX form, several times as fast on CPU as MegEngine.

_LOG = logging.getLogger("qtrace")

# A constant, not a share of the free memory: the outputs of the model decide what onnxruntime fuses, and
# thereby the last bits of the values.
_MAX_ACTIVATION_BYTES = 2 << 30


@dataclass(frozen=True)
class _PendingBatch:
    """A batch that is computed on another thread, and the bytes of its values."""

    arguments: Arguments
    values: Future[list[np.ndarray]]
    size: float


class OnnxRuntime:
    """Runs the graph as an ONNX model whose outputs are the watched nodes.

    After a run, all activations of the batch are in memory; each is freed when it was observed. If they take
    more than ``limit`` bytes, the model runs once for each part of the watched nodes, up to their last one.

    Args:
        prepared: a module made by ``qtrace.prepare``.
        nodes: the names of the watched nodes, in graph order.
        threads: number of threads; None for all cores.
        limit: the most bytes of activations in memory.
        host: the interpreter or machine that has onnxruntime; None for this process.
        axes: the open axes of the files of the network; None to find this network's.

    Raises:
        EngineError: when ONNX cannot express the graph, or onnxruntime is missing or refuses it.
    """

    name = "onnxruntime"

    def __init__(
        self,
        prepared: TracedModule,
        nodes: Sequence[str],
        threads: int | None = None,
        limit: int = _MAX_ACTIVATION_BYTES,
        host: RuntimeHost | None = None,
        axes: SharedAxes | None = None,
    ) -> None:
        if host is None and importlib.util.find_spec("onnxruntime") is None:
            raise EngineError(f"the package onnxruntime is not installed ({install('onnx')})")
        if len(prepared.argdef_graph_map) != 1:
            raise EngineError("the model was traced with several structures of arguments")
        try:
            from qtrace.export.onnx.segment import activations  # here: it needs the package onnx

            self._model = activations(prepared, nodes, axes)
        except ExportError as error:
            raise EngineError(f"the graph cannot become ONNX: {str(error).rstrip('.')}") from error
        self._prepared, self._nodes, self._threads, self._limit = prepared, tuple(nodes), threads, limit
        self._host = host
        self._pool: ThreadPoolExecutor | None = None
        self._pending: dict[int, _PendingBatch] = {}
        self._inputs = [n for n in prepared.graph.inputs if isinstance(n, TensorNode)]
        produced = [*self._inputs, *(n for e in exprs(prepared) for n in e.outputs)]
        self._bytes = {n.name: 4 * math.prod(n.shape or ()) for n in produced if isinstance(n, TensorNode)}
        self._sessions: dict[tuple[str, ...], OrtSession] = {}
        session = self._session(self._nodes)
        if session is not None and session.side:
            _LOG.info(f"activations are computed by {describe_side(session.side)}")

    def run(self, arguments: Arguments, index: int, observe: Observe) -> None:
        """Runs one batch; see `Engine`."""
        feeds, pending = self._feeds(arguments), self._pending.pop(id(arguments), None)
        for part in self._split(next(iter(feeds.values()))):
            values = self._compute(part, feeds) if pending is None else pending.values.result()
            values.reverse()
            for node in part:
                source = self._model.input_nodes.get(node)
                observe(node, feeds[source] if source is not None else values.pop())

    @property
    def prefetched(self) -> int:
        """The number of batches that are computed together with the one that is observed; see `Engine`."""
        threads = count_threads(self._threads)
        return threads if threads > 1 and self._host is None else 0

    def begin(self, arguments: Arguments) -> None:
        """Begins to compute a batch; see `Engine`."""
        if not self.prefetched or id(arguments) in self._pending:
            return
        feeds = self._feeds(arguments)
        first = next(iter(feeds.values()))
        parts, size = self._split(first), self._growth(first) * sum(self._bytes[node] for node in self._nodes)
        waiting = sum(pending.size for pending in self._pending.values())
        if len(parts) > 1 or waiting + size > STAGE_BYTES:
            return
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self.prefetched)
        values = self._pool.submit(self._compute, parts[0], feeds)
        self._pending[id(arguments)] = _PendingBatch(arguments, values, size)

    def drop(self, arguments: Arguments) -> None:
        """Gives up a batch that was begun; see `Engine`."""
        pending = self._pending.pop(id(arguments), None)
        if pending is not None:
            pending.values.cancel()

    def close(self) -> None:
        """Gives up all batches that were begun; see `Engine`."""
        self._pending.clear()
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            self._pool = None

    def _compute(self, part: tuple[str, ...], feeds: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        """Computes the nodes of a part that are no inputs."""
        session = self._session(part)
        names = [self._model.outputs[n] for n in part if n in self._model.outputs]
        return run_session(session, names, feeds) if session is not None else []

    def _feeds(self, arguments: Arguments) -> dict[str, np.ndarray]:
        args, kwargs = arguments
        _, (_, *tensors) = Interpreter(self._prepared).bind(args, kwargs)
        arrays = [t.numpy().astype(n.dtype, copy=False) for t, n in zip(tensors, self._inputs, strict=True)]
        return dict(zip(self._model.inputs, arrays, strict=True))

    def _split(self, first: np.ndarray) -> list[tuple[str, ...]]:
        """Splits the watched nodes into parts whose values fit into memory; sizes grow as the first input."""
        growth = self._growth(first)
        parts: list[list[str]] = [[]]
        total = 0.0
        for node in self._nodes:
            size = self._bytes[node] * growth
            if parts[-1] and total + size > self._limit:
                parts.append([])
                total = 0.0
            parts[-1].append(node)
            total += size
        return [tuple(part) for part in parts]

    def _growth(self, first: np.ndarray) -> float:
        """Returns the size of a batch as a multiple of the traced one."""
        return first.nbytes / max(1, self._bytes[self._inputs[0].name])

    def _session(self, part: tuple[str, ...]) -> OrtSession | None:
        """Returns the session that computes the nodes of ``part``; None if all of them are inputs."""
        outputs = {self._model.outputs[node] for node in part if node in self._model.outputs}
        if not outputs:
            return None
        if part not in self._sessions:
            data = self._model.data if part == self._nodes else _with_outputs(self._model.data, outputs)
            folder = self._model.folder
            tensors = None if folder is None else Path(folder.name)
            self._sessions[part] = start_session(data, host=self._host, tensors=tensors)
        return self._sessions[part]


def _with_outputs(data: bytes, names: set[str]) -> bytes:
    import onnx

    model = onnx.load_from_string(data)
    outputs = [output for output in model.graph.output if output.name in names]
    del model.graph.output[:]
    model.graph.output.extend(outputs)
    return model.SerializeToString()


def start_session(
    data: bytes,
    fuse_integers: bool = True,
    host: RuntimeHost | None = None,
    tensors: Path | None = None,
) -> OrtSession:
    """Opens a model that computes as MegEngine does, each batch on one thread.

    onnxruntime's last bits depend on the number of threads of an op. Batches run side by side instead,
    see `prefetch_map`, so that the values are the same for any number of threads.

    Args:
        data: the ONNX file.
        fuse_integers: whether ops between roundings may run on integers, with other last bits than in float.
        host: the interpreter or machine that has onnxruntime; None for this process.
        tensors: the folder of tensors that ``data`` refers to.

    Raises:
        EngineError: when onnxruntime refuses the model.
        ExportError: when the host cannot be reached, or does not survive the model.
    """
    settings = SessionSettings(
        threads=1,
        fuse_integers=fuse_integers,
        as_megengine=True,
        spin=False,
        shared=True,
        host=host,
        tensors=tensors,
    )
    try:
        return open_session(data, settings)
    except SessionError as error:
        raise EngineError(f"onnxruntime refuses the graph: {error.reason}") from error


def run_session(
    session: OrtSession, names: Sequence[str], feeds: Mapping[str, np.ndarray]
) -> list[np.ndarray]:
    """Runs a session on a batch.

    Raises:
        EngineError: when onnxruntime refuses the batch.
    """
    try:
        return session.run(names, feeds)
    except SessionError as error:
        raise EngineError(f"onnxruntime refuses the batch: {error.reason}") from error


# Runs segments of a prepared graph in onnxruntime for algorithms that change its layers one by one.

_Result = TypeVar("_Result")


class OnnxSegments:
    """Computes segments of prepared graphs in onnxruntime; see `qtrace.graph.stepping.SegmentEngine`.

    Every segment is written with the parameters that the graph has at that moment. A segment without an ONNX
    form is left to MegEngine, and the logger ``qtrace`` gets the reason (INFO), once.

    Args:
        model: the view of a prepared module, with the record of every graph that is computed.
        threads: number of threads; None for all cores.
    """

    def __init__(self, model: QuantizedModel, threads: int | None = None) -> None:
        self._model, self._threads = model, threads
        self._writers: dict[TracedModule, PreparedSegments] = {}
        self._refused: set[Node] = set()

    def begin(self, segment: GraphSegment) -> SegmentRun | None:
        """Writes the segment as a model, which its run opens; see `SegmentEngine`."""
        outputs = segment.outputs
        run = self._unless_refused(outputs, lambda: self._write(segment))
        if run is None:
            return None

        def compute(use: Use) -> list[Any] | None:
            return self._unless_refused(outputs, lambda: [use(i, values) for i, values in enumerate(run())])

        return compute

    def _unless_refused(self, outputs: Sequence[TensorNode], step: Callable[[], _Result]) -> _Result | None:
        """Returns the result of a step; None if onnxruntime cannot do it, which is remembered."""
        if any(node in self._refused for node in outputs):
            return None
        try:
            return step()
        except (EngineError, ExportError) as error:
            _LOG.info(f"MegEngine computes up to {outputs[-1].name}: {error}")
            self._refused.update(outputs)
            return None

    def _write(self, segment: GraphSegment) -> Callable[[], Iterator[list[np.ndarray]]]:
        """Writes the segment; returns what opens it and yields the outputs of each batch."""
        traced, batches = segment.traced, segment.batches
        if traced not in self._writers:
            from qtrace.export.onnx.segment import PreparedSegments  # here: it needs the package onnx

            self._writers[traced] = PreparedSegments(self._model.view(traced))
        inputs = {node: (value.dtype, _shape(node, batches)) for node, value in batches[0].items()}
        data, names, results = self._writers[traced].model(
            segment.exprs, inputs, segment.fixed, segment.outputs
        )
        content = [data]

        def feeds_of(values: Mapping[TensorNode, np.ndarray]) -> dict[str, np.ndarray]:
            return {name: np.ascontiguousarray(values[n]) for name, n in zip(names, inputs, strict=True)}

        def run() -> Iterator[list[np.ndarray]]:
            session = start_session(content.pop(), fuse_integers=False)  # which copies the weights
            return prefetch_map(lambda v: run_session(session, results, feeds_of(v)), batches, self._threads)

        return run


def _shape(node: TensorNode, batches: Sequence[Mapping[TensorNode, np.ndarray]]) -> list[Any]:
    """Returns the shape of a node in all batches, with None for each length that varies."""
    shapes = {values[node].shape for values in batches}
    if len({len(shape) for shape in shapes}) > 1:
        raise EngineError(f"{node.name} has another number of axes in each batch")
    return [lengths[0] if len(set(lengths)) == 1 else None for lengths in zip(*shapes, strict=True)]
