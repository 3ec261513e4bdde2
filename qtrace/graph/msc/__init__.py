"""MSCGraph, the graph document of TVM's multi-system compiler: data that is looked up, listed, run again."""

from qtrace.graph.msc.document import MSCGraph, MSCNode, MSCPrim, MSCTensor, from_msc
from qtrace.graph.msc.rebuild import to_traced

__all__ = ["MSCGraph", "MSCNode", "MSCPrim", "MSCTensor", "from_msc", "to_traced"]
