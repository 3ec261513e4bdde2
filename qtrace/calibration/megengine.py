"""The engine MegEngine, which runs every graph."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import megengine as mge

from qtrace.calibration.base import Arguments, Observe
from qtrace.data.batches import translate_errors
from qtrace.graph.interpreter import Interpreter
from qtrace.graph.types import Node, TracedModule

__all__ = ["MegEngine"]

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
                    watcher.run(*args, **kwargs)
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
