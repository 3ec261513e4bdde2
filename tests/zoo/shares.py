"""The share of a network that is computed on integers."""

from __future__ import annotations

import qtrace
from qtrace.graph.types import TracedModule

__all__ = ["LAYERS", "layer_share", "whole_share"]

LAYERS = frozenset({"conv1d", "conv2d", "conv3d", "conv_transpose2d", "linear"})


def whole_share(prepared: TracedModule) -> float:
    """The part of all MACs of the graph, decoding and what lies outside of a region included."""
    macs = qtrace.explain(prepared).to_dict()["summary"]["macs"]
    return 1.0 - macs["float"] / sum(macs.values())


def layer_share(prepared: TracedModule) -> float:
    """The part of the MACs of convolutions and linear layers."""
    notes = [n for n in qtrace.explain(prepared).annotation.notes if n.kind in LAYERS]
    return sum(n.macs for n in notes if n.state == "int") / sum(n.macs for n in notes)
