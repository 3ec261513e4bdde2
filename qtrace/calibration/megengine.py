"""MegEngine itself: it runs every graph."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from typing import Any

import megengine as mge

from qtrace.calibration.arrivals import Arrival, Arrivals
from qtrace.calibration.base import Arguments, Observe
from qtrace.data.batches import translate_errors
from qtrace.graph.interpreter import Interpreter
from qtrace.graph.types import Node, TracedModule

__all__ = ["MegEngine"]

# Watched values that MegEngine may be computing, and their bytes: each is in memory until it was observed.
_AHEAD = 8
_AHEAD_BYTES = 64 << 20


class MegEngine:
    """Runs the prepared graph expr by expr.

    Args:
        prepared: a module made by ``qtrace.prepare``, whose phase is float.
        nodes: the names of the nodes that are watched.
    """

    name = "megengine"

    def __init__(self, prepared: TracedModule, nodes: Collection[str]) -> None:
        self._prepared, self._nodes = prepared, frozenset(nodes)

    def run(self, arguments: Arguments, index: int, observe: Observe) -> None:
        """Runs one batch; see `Engine`."""
        args, kwargs = arguments
        watcher = _Watcher(self._prepared, self._nodes, observe)
        try:
            with translate_errors(self._prepared, arguments, index):
                try:
                    watcher.run(*args, **kwargs)
                    watcher.show()
                finally:
                    # Errors in kernels come late: those behind the last site are this batch's, too. And what
                    # a failed kernel left in memory may have been refused.
                    mge._full_sync()
        except _ObserverError as error:
            raise error.original from error.original.__cause__  # no error of MegEngine's


class _ObserverError(Exception):
    """An observer refuses a value, or is at fault."""

    def __init__(self, original: Exception) -> None:
        super().__init__(str(original))
        self.original = original


class _Watcher(Interpreter):
    """Shows values some nodes later, so that MegEngine has ops to run while one is awaited."""

    def __init__(self, prepared: TracedModule, nodes: Collection[str], observe: Observe) -> None:
        super().__init__(prepared)
        self._nodes, self._observe = nodes, observe
        self._arrivals = Arrivals()
        self._asked: deque[tuple[str, Arrival]] = deque()

    def on_node(self, node: Node, value: Any) -> Any:
        if node.name in self._nodes:
            self._asked.append((node.name, self._arrivals.expect(value)))
            while len(self._asked) > 1 and self._too_many():
                self._show()
        return value

    def _too_many(self) -> bool:
        return len(self._asked) > _AHEAD or sum(a.nbytes for _, a in self._asked) > _AHEAD_BYTES

    def show(self) -> None:
        """Shows all values that are left."""
        while self._asked:
            self._show()

    def _show(self) -> None:
        name, arrival = self._asked.popleft()
        value = arrival.wait()
        try:
            self._observe(name, value)
        except Exception as error:
            raise _ObserverError(error) from error
