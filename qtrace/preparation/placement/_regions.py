"""Regions that ``roi_align`` pools, which MegEngine's CPU kernel takes on trust.

It reads memory at the number of the image in the first column of a region, whatever that number is, and its
gradient is added to memory that nothing has cleared.
"""

from __future__ import annotations

import megengine.functional as F
import numpy as np
from megengine import Tensor

from qtrace.graph.dataflow import needed_nodes
from qtrace.graph.types import CallFunction, Expr, Node, TensorNode, TracedModule
from qtrace.graph.walk import exprs

__all__ = ["is_roi_align", "make_regions", "region_inputs"]

_LARGEST_CORNER = 64.0  # in pixels; what lies outside of the image is pooled as 0


def is_roi_align(expr: Expr) -> bool:
    """Returns whether ``expr`` calls MegEngine's ``roi_align``."""
    return isinstance(expr, CallFunction) and expr.func is F.vision.roi_align


def region_inputs(model: TracedModule) -> set[Node]:
    """Returns the inputs of the graph from which ``roi_align`` gets its regions."""
    regions = {node for expr in exprs(model) if is_roi_align(expr) for node in expr.inputs[1:]}
    before = needed_nodes(model, shapes=True, of=regions)
    return {node for node in model.graph.inputs if node in before and len(node.shape or ()) == 2}


def make_regions(node: TensorNode, rng: np.random.Generator) -> Tensor:
    """Generates regions of the first image: its number, then two corners."""
    assert node.shape is not None
    count, columns = (int(n) for n in node.shape)
    corners = np.sort(rng.uniform(0.0, _LARGEST_CORNER, (count, 2, 2)), axis=1).reshape(count, 4)
    value = np.zeros((count, columns), np.float32)
    width = min(columns, 4)
    value[:, columns - width :] = corners[:, :width]
    return Tensor(value)
