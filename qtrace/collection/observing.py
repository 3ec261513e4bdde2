"""Observing in threads beside the next op or batch: numpy lets go of Python's lock while it computes."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any

import numpy as np

from qtrace.collection.base import Watched
from qtrace.collection.statistics import Statistics, arrays, checksum, fresh
from qtrace.fakequant.base import fold_channels
from qtrace.observers.base import Observer

__all__ = ["Observing"]

# Values that wait for an observer: few, since each keeps its tensor in memory.
_WAITING = 2


class Observing:
    """Shows values to observers of their own and puts these together when a batch is whole.

    The order in which threads come to an end has no say: parts are merged in the order of the graph. A batch
    that is refused leaves no trace.

    Attributes:
        statistics: with all batches that were committed.

    Args:
        statistics: what is added to.
        watched: what is observed.
        sites: group -> the name of its site, for errors.
        threads: how many threads observe.
    """

    def __init__(
        self, statistics: Statistics, watched: Watched, sites: Mapping[str, str], threads: int = 1
    ) -> None:
        self.statistics, self._watched, self._sites = statistics, watched, sites
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="observe")
        self._room = threading.Semaphore(_WAITING + threads)
        self._parts: list[tuple[str, Future[Observer]]] = []
        self._batch = 0
        self._checksum: Future[int] = Future()

    def __enter__(self) -> Observing:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def begin(self, number: int, batch: Any) -> None:
        """Begins a batch; what was observed since the last `commit` is dropped."""
        self._drop()
        self._batch = number
        # Tensors are read here: MegEngine works on the main thread only.
        self._checksum = self._pool.submit(checksum, arrays(batch))
        for group, value in self._watched.constants:
            self._submit(group, value)

    def observe(self, node: str, value: np.ndarray) -> None:
        """Takes the value of a node for all its groups."""
        for group in self._watched.nodes[node]:
            self._submit(group, fold_channels(value, self._watched.folded.get(group, ())))

    def commit(self) -> None:
        """Ends the batch: adds it to the statistics.

        Raises:
            CalibrationError: when an observer refuses a value, naming site and batch: the first of the graph.
        """
        observed: dict[str, list[Observer]] = {}
        try:
            for group, part in self._parts:
                observed.setdefault(group, []).append(part.result())
        finally:
            self._drop()
        # One assignment: whatever interrupts it, the statistics hold whole batches.
        self.statistics = self.statistics.plus(observed, {self._batch: self._checksum.result()})

    def _submit(self, group: str, value: Any) -> None:
        self._room.acquire()
        observer, batch = fresh(self.statistics.observers[group]), self._batch
        future = self._pool.submit(_observe, observer, value, batch, self._sites[group])
        future.add_done_callback(lambda _: self._room.release())
        self._parts.append((group, future))

    def _drop(self) -> None:
        for _, part in self._parts:
            part.cancel()
        for _, part in self._parts:
            if not part.cancelled():
                part.exception()
        self._parts = []


def _observe(observer: Observer, value: np.ndarray, batch: int, site: str) -> Observer:
    observer.observe(value, batch=batch, site=site)
    return observer
