"""Group norm: a standardization of each group of channels, then a number per channel as weight and bias.

Source: Wu and He 2018, "Group normalization". PyTorch writes a reshape to (N, G, ...), an instance norm with
weights 1 and biases 0, a reshape back, a product and a sum. TensorFlow and models by hand write the means.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import megengine.functional as F
import numpy as np

from qtrace.graph.algebra import AnyOf, AnyTensor, Operation, Product
from qtrace.graph.composites.base import CompositeCall, CompositeRule
from qtrace.graph.composites.instance_norm import channels_problem
from qtrace.graph.composites.standardized import affine, axes_problem, reduced_axes, standardized
from qtrace.graph.edit import GraphEditor
from qtrace.graph.operations import numbers_of, read_operation
from qtrace.graph.pattern import PatternMatch
from qtrace.graph.types import Node
from qtrace.graph.walk import shape_of

__all__ = ["RULES", "GroupNorm"]

_SPLIT = Operation("reshape", AnyTensor("x"), name="split")
_SPLIT_FACTORS, _SPLIT_DISTRIBUTED, _ = standardized(_SPLIT)
# MegEngine's instance norm takes 4 axes: an imported one of PyTorch's 3 stands between two more reshapes.
_NORM = Operation("instance_norm", AnyOf(Operation("reshape", _SPLIT, name="image"), _SPLIT), name="norm")
_JOINED = Operation(
    "reshape",
    AnyOf(Product(*_SPLIT_FACTORS), _SPLIT_DISTRIBUTED, Operation("reshape", _NORM), _NORM),
    name="joined",
)


class GroupNorm(CompositeRule):
    """A standardization of each group of channels, between two reshapes."""

    title = "group norm"
    formula = "reshape(standardize(reshape(x, (N, G, ...))), shape of x) * weight + bias"
    becomes = "F.nn.group_norm"
    pattern = AnyOf(affine(_JOINED), _JOINED)

    def obstacle(self, match: PatternMatch) -> str | None:
        """Refuses reshapes that do not split the channels, and axes that are not a group's."""
        problem = channels_problem(match, ranks=(3, 4))
        if problem is not None:
            return problem
        x, split = match["x"], match["split"]
        shape, parts = shape_of(x), shape_of(split)
        if shape_of(match["joined"]) != shape:
            return f"it is reshaped to {shape_of(match['joined'])}, not back to {shape}"
        if len(parts) < 3 or parts[0] != shape[0] or shape[1] % parts[1]:
            return f"it is reshaped to {parts}, which does not split the {shape[1]} channels into groups"
        if match.get("norm") is None:
            problem = axes_problem(match, split)
            axes = reduced_axes(match["variance"], split)
            if problem is None and axes != tuple(range(2, len(parts))):
                problem = f"its means are over the axes {axes} of {parts}, not over each group"
            return problem
        image = match.get("image")
        if image is not None and shape_of(image)[:2] != parts[:2]:
            return f"its groups are normalized in the shape {shape_of(image)}, not one by one"
        return _weights_problem(match)

    def call(self, match: PatternMatch) -> CompositeCall:
        """Calls `F.nn.group_norm`."""
        x, weight = match["x"], match.get("weight")
        groups, flat = shape_of(match["split"])[1], (shape_of(x)[1],)
        operation = read_operation(match["norm"]) if match.get("norm") is not None else None
        eps = match["eps"] if operation is None else float(operation.settings["eps"])
        args: tuple[Any, ...] = (x, groups, weight is not None, weight, match.get("bias"), eps)
        return CompositeCall(F.nn.group_norm, args, {3: flat, 4: flat})

    def rewrite(self, match: PatternMatch, editor: GraphEditor) -> Mapping[Node, Node]:
        """Adds an axis to a signal (N, C, L), since MegEngine's group norm takes images."""
        x, out = match["x"], match.node
        if len(shape_of(x)) == 4:
            return super().rewrite(match, editor)
        call = self.call(match)
        image = editor.call_function(F.expand_dims, x, -1, after=match.exprs[0], like=x)
        image.shape = (*shape_of(x), 1)
        args = self.reshaped(call, editor)
        norm = editor.call_function(call.function, image, *args[1:], after=image.expr, like=image)
        editor.put_in_place(editor.call_function(F.squeeze, norm, -1, after=norm.expr, like=out), out)
        return {}


def _weights_problem(match: PatternMatch) -> str | None:
    """Returns why the instance norm between the reshapes is not without effect of its own weights."""
    operation = read_operation(match["norm"])
    assert operation is not None
    settings = operation.settings
    if not settings.get("affine", True):
        return None
    for name, neutral in (("weight", 1.0), ("bias", 0.0)):
        values = numbers_of(settings.get(name))
        if values is None or not np.all(values == neutral):
            return f"the {name} of its instance norm is not {neutral:g} for every group"
    return None


RULES = (GroupNorm(),)
