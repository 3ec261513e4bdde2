"""MegEngine itself: it runs every graph."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import megengine as mge

from qtrace.batches import told
from qtrace.collection.base import Arguments, Observe
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

    def __init__(self, prepared: TracedModule, nodes: Collection[str]) -> None:
        self._prepared, self._nodes = prepared, frozenset(nodes)

    def run(self, arguments: Arguments, index: int, observe: Observe) -> None:
        """Runs one batch; see `Engine`."""
        args, kwargs = arguments
        with told(self._prepared, arguments, index):
            watcher = _Watcher(self._prepared, self._nodes, observe)
            watcher.run(*args, **kwargs)
            watcher.show()
            # Errors in kernels come late: those behind the last site are this batch's, too.
            mge._full_sync()


class _Watcher(Interpreter):
    """Shows a value when the next one is under way, so that MegEngine computes while it is copied."""

    def __init__(self, prepared: TracedModule, nodes: Collection[str], observe: Observe) -> None:
        super().__init__(prepared)
        self._nodes, self._observe = nodes, observe
        self._last: tuple[str, Any] | None = None

    def on_node(self, node: Node, value: Any) -> Any:
        if node.name in self._nodes:
            self.show()
            self._last = node.name, value
        return value

    def show(self) -> None:
        """Shows the value that waits."""
        if self._last is not None:
            (name, value), self._last = self._last, None
            self._observe(name, value.numpy())
