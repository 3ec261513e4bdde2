"""Layer norm of channels: ``(x - mean) / sqrt(variance + eps) * weight + bias`` over axis 1 of images.

Source: Liu et al. 2022, "A ConvNet for the 2020s", whose stem and downsampling layers normalize the channels
of (N, C, H, W) and write the means. The result is a layer norm of the last axis between two transposes, which
every format has.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import megengine.functional as F

from qtrace.graph.composites.base import CompositeCall, CompositeRule
from qtrace.graph.composites.layer_norm import NORM_PATTERN, call_layer_norm
from qtrace.graph.composites.standardized import axes_problem, reduced_axes
from qtrace.graph.edit import GraphEditor
from qtrace.graph.pattern import PatternMatch
from qtrace.graph.types import Node
from qtrace.graph.walk import shape_of

__all__ = ["RULES", "ChannelNorm"]


class ChannelNorm(CompositeRule):
    """``(x - mean) / sqrt(variance + eps) * weight + bias`` over the channels, axis 1."""

    title = "layer norm of channels"
    formula = "(x - mean(x)) / sqrt(mean((x - mean(x))**2) + eps) * weight + bias, over axis 1 of 3 or more"
    becomes = "F.nn.layer_norm between two F.transpose"
    in_prepare = False  # ncnn and Caffe have the pieces, not the norm
    pattern = NORM_PATTERN

    def obstacle(self, match: PatternMatch) -> str | None:
        """Refuses means over other axes than 1, and weights that are not one number for each channel."""
        x = match["x"]
        problem = axes_problem(match, x)
        if problem is not None:
            return problem
        axes, shape = reduced_axes(match["variance"], x), shape_of(x)
        if axes != (1,) or len(shape) < 3:
            return f"its means are over the axes {axes} of {len(shape)}, those of the channels are (1,)"
        for name in ("weight", "bias"):
            node = match.get(name)
            if node is None:
                continue
            own = (1,) * (len(shape) - len(shape_of(node))) + shape_of(node)
            if len(own) != len(shape) or own[1] != shape[1] or math.prod(own) != shape[1]:
                return f"its {name} has the shape {shape_of(node)}, not one number for each channel"
        return None

    def call(self, match: PatternMatch) -> CompositeCall:
        """Calls `F.nn.layer_norm` over the last axis."""
        return call_layer_norm(match, (shape_of(match["x"])[1],))

    def rewrite(self, match: PatternMatch, editor: GraphEditor) -> Mapping[Node, Node]:
        """Writes the norm between the transpose that moves the channels to the end and the one back."""
        out, x, after = match.node, match["x"], match.exprs[0]
        rank = len(shape_of(x))
        to_end, back = (0, *range(2, rank), 1), (0, rank - 1, *range(1, rank - 1))
        turned = editor.call_function(F.transpose, x, to_end, after=after, like=x)
        turned.shape = tuple(shape_of(x)[axis] for axis in to_end)
        call = self.call(match)
        args = self.reshaped(call, editor)
        norm = editor.call_function(call.function, turned, *args[1:], after=turned.expr, like=turned)
        editor.put_in_place(editor.call_function(F.transpose, norm, back, after=norm.expr, like=out), out)
        return {}


RULES = (ChannelNorm(),)
