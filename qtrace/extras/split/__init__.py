"""Parts of a graph as modules of their own, which compute together what the graph computes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from qtrace.plugins import load_when_used

if TYPE_CHECKING:
    from qtrace.extras.split.split import Composition, GraphPart, split

load_when_used(
    __name__,
    {
        "qtrace.extras.split.split": "Composition GraphPart split",
    },
)
