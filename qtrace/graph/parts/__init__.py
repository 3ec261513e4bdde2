"""Parts of a graph as modules of their own, which compute together what the graph computes."""

from qtrace.graph.parts.composition import Composition, GraphPart
from qtrace.graph.parts.split import split

__all__ = ["Composition", "GraphPart", "split"]
