"""Norms and softmax that exporters write in pieces; the docstring of a rule has its formula and its source.

The standardization that norms have in common is ``(x - mean) / sqrt(variance + eps)`` over some axes.
Exporters write the variance as the mean of squares (a product, a power or a square), divide by the root or
multiply by a power of -0.5. TensorFlow's ``batch_normalization`` distributes the product:
``x * inv + (bias - mean * inv)`` with ``inv = weight / sqrt(variance + eps)``.
"""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence
from typing import Any

import megengine.functional as F
import numpy as np

from qtrace.graph import functions
from qtrace.graph.algebra import (
    AnyOf,
    AnyTensor,
    Minus,
    Number,
    Operation,
    Power,
    Product,
    StoredOperand,
    Sum,
)
from qtrace.graph.composites import CompositeCall, CompositeRule
from qtrace.graph.edit import GraphEditor
from qtrace.graph.operations import numbers_of, read_operation
from qtrace.graph.pattern import Pattern, PatternMatch
from qtrace.graph.types import Node, TensorNode
from qtrace.graph.walk import shape_of


def _spread(x: Pattern) -> Pattern:
    """Builds the pattern of ``variance + eps``; the mean in it may be a call of its own."""
    centered = Sum(x, Minus(Operation("mean", x, name="inner_mean")))
    variance = AnyOf(
        Operation("mean", Product(Power(centered, 2.0)), name="variance"),
        Operation("var", x, name="variance"),
    )
    return AnyOf(Sum(variance, constant="eps", name="spread"), variance)


def standardized(x: Pattern) -> tuple[tuple[Pattern | Power, ...], Sum, Sum]:
    """Builds the patterns of a standardization.

    Returns:
        The factors of the product, and TensorFlow's form of the whole without and with weight and bias.
    """
    spread, mean = Power(_spread(x), -0.5), Operation("mean", x, name="mean")
    weight, bias = StoredOperand("weight"), StoredOperand("bias")
    return (
        (Sum(x, Minus(mean)), spread),
        Sum(Product(x, spread_of := Power(_spread(x), -0.5)), Minus(Product(mean, spread_of))),
        Sum(Product(x, spread_of, weight), bias, Minus(Product(mean, spread_of, weight))),
    )


def affine(value: Pattern) -> Sum:
    """Builds the pattern of ``value * weight + bias`` with stored tensors."""
    return Sum(Product(value, StoredOperand("weight")), StoredOperand("bias"))


def reduced_axes(reduction: TensorNode, x: TensorNode) -> tuple[int, ...] | None:
    """Returns the axes of ``x`` that a reduction removes and keeps as 1, sorted; None for another shape."""
    operation = read_operation(reduction)
    axis = None if operation is None else operation.settings.get("axis")
    rank = len(shape_of(x))
    if axis is None or isinstance(axis, TensorNode):
        return None
    listed: Sequence[Any] = axis if isinstance(axis, (tuple, list)) else (axis,)
    if not all(isinstance(a, int) and -rank <= a < rank for a in listed):
        return None
    axes = tuple(sorted(a % rank for a in listed))
    reduced = tuple(1 if i in axes else n for i, n in enumerate(shape_of(x)))
    return axes if shape_of(reduction) == reduced else None


def axes_problem(match: PatternMatch, x: TensorNode) -> str | None:
    """Returns why the means of a standardization of ``x`` are not of one norm, as a clause, or None."""
    names = [n for n in ("mean", "inner_mean", "variance") if match.get(n) is not None]
    axes = [reduced_axes(match[n], x) for n in names]
    if None in axes:
        return f"the mean {match[names[axes.index(None)]].name} does not keep its axes as 1"
    if len(set(axes)) > 1:
        return f"its means are over unequal axes: {', '.join(str(a) for a in dict.fromkeys(axes))}"
    eps = match.get("eps")
    if eps is None or not 0.0 < eps < 1.0:
        return "nothing small is added to the variance, as a norm does against a division by 0"
    return None


_FACTORS, _DISTRIBUTED, _DISTRIBUTED_AFFINE = standardized(AnyTensor("x"))
_STANDARDIZED = Product(*_FACTORS)
# A standardization of any axes, with weight and bias or without.
NORM_PATTERN = AnyOf(affine(_STANDARDIZED), _DISTRIBUTED_AFFINE, _STANDARDIZED, _DISTRIBUTED)


def call_layer_norm(match: PatternMatch, inner: tuple[int, ...]) -> CompositeCall:
    """Returns the call of `F.nn.layer_norm` over last axes of the sizes ``inner`` for `NORM_PATTERN`."""
    weight = match.get("weight")
    args: tuple[Any, ...] = (match["x"], inner, weight is not None, weight, match.get("bias"), match["eps"])
    return CompositeCall(F.nn.layer_norm, args, {3: inner, 4: inner})


class LayerNorm(CompositeRule):
    """Layer norm: ``(x - mean) / sqrt(variance + eps) * weight + bias`` over the last axes.

    Source: Ba et al. 2016, "Layer normalization". PyTorch before opset 17 and Paddle write ReduceMean, Sub,
    Pow, ReduceMean, Add, Sqrt, Div, Mul, Add; Keras the distributed form. A weight
    without a bias stays a multiplication after the norm.
    """

    title = "layer norm"
    formula = "(x - mean(x)) / sqrt(mean((x - mean(x))**2) + eps) * weight + bias, over the last axes"
    becomes = "F.nn.layer_norm"
    pattern = NORM_PATTERN

    def obstacle(self, match: PatternMatch) -> str | None:
        """Refuses means over other axes than the last, and weights of another shape."""
        x = match["x"]
        problem = axes_problem(match, x)
        if problem is not None:
            return problem
        axes, rank = self._axes(match), len(shape_of(x))
        if axes != tuple(range(rank - len(axes), rank)):
            return f"its means are over the axes {axes}, those of a layer norm are the last of {rank}"
        if rank == 4 and axes == (2, 3) and match.get("weight") is None:
            return "it is an instance norm"
        inner = shape_of(x)[-len(axes) :]
        for name in ("weight", "bias"):
            node = match.get(name)
            if node is None:
                continue
            shape = shape_of(node)
            if shape[len(shape) - len(axes) :] != inner or math.prod(shape) != math.prod(inner):
                return f"its {name} has the shape {shape}, that of a layer norm {inner}"
        return None

    @staticmethod
    def _axes(match: PatternMatch) -> tuple[int, ...]:
        axes = reduced_axes(match["variance"], match["x"])
        assert axes is not None
        return axes

    def call(self, match: PatternMatch) -> CompositeCall:
        """Calls `F.nn.layer_norm` with the shape of the last axes."""
        return call_layer_norm(match, shape_of(match["x"])[-len(self._axes(match)) :])


def channels_problem(match: PatternMatch, ranks: Container[int] = (4,)) -> str | None:
    """Returns why weight and bias are not one number per channel, as a clause, or None.

    Args:
        match: the norm.
        ranks: the numbers of axes that the norm can have.
    """
    shape = shape_of(match["x"])
    rank = len(shape)
    if rank not in ranks:
        return f"its input has {rank} axes, MegEngine's norm takes images with 4"
    for name in ("weight", "bias"):
        node = match.get(name)
        if node is None:
            continue
        own = (1,) * (rank - len(shape_of(node))) + shape_of(node)
        if own != (1, shape[1], *[1] * (rank - 2)):
            return f"its {name} has the shape {shape_of(node)}, not one number per channel"
    return None


class InstanceNorm(CompositeRule):
    """Instance norm: ``(x - mean) / sqrt(variance + eps) * weight + bias`` over the places of each channel.

    Source: Ulyanov et al. 2016, "Instance normalization". TensorFlow and models by hand write the means.
    """

    title = "instance norm"
    formula = "(x - mean(x)) / sqrt(mean((x - mean(x))**2) + eps) * weight + bias, over height and width"
    becomes = "F.nn.instance_norm"
    pattern = AnyOf(affine(_STANDARDIZED), _DISTRIBUTED_AFFINE, _STANDARDIZED, _DISTRIBUTED)

    def obstacle(self, match: PatternMatch) -> str | None:
        """Refuses other axes than height and width, and weights that are not per channel."""
        problem = axes_problem(match, match["x"])
        if problem is not None:
            return problem
        axes = reduced_axes(match["variance"], match["x"])
        if axes != (2, 3):
            return f"its means are over the axes {axes}, those of an instance norm are (2, 3)"
        return channels_problem(match)

    def call(self, match: PatternMatch) -> CompositeCall:
        """Calls `F.nn.instance_norm`."""
        weight, flat = match.get("weight"), (shape_of(match["x"])[1],)
        args: tuple[Any, ...] = (match["x"], weight is not None, weight, match.get("bias"), match["eps"])
        return CompositeCall(F.nn.instance_norm, args, {2: flat, 3: flat})


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
    """Group norm: a standardization of each group of channels, then a number per channel as weight and bias.

    Source: Wu and He 2018, "Group normalization". PyTorch writes a reshape to (N, G, ...), an instance norm
        with weights 1 and biases 0, a reshape back, a product and a sum. TensorFlow and models by hand write
        the
    means.
    """

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


class ChannelNorm(CompositeRule):
    """Layer norm of channels: ``(x - mean) / sqrt(variance + eps) * weight + bias`` over axis 1 of images.

    Source: Liu et al. 2022, "A ConvNet for the 2020s", whose stem and downsampling layers normalize the
    channels of (N, C, H, W) and write the means. The result is a layer norm of the last axis between two
    transposes, which every format has.
    """

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
        return channels_problem(match, ranks=(len(shape),))

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


_X = AnyTensor("x")
_MEAN_SQUARES = Operation("mean", Product(Power(_X, 2.0)), name="squares")
_ROOT = Power(AnyOf(Sum(_MEAN_SQUARES, constant="eps"), _MEAN_SQUARES), -0.5)


def _is_centered(x: TensorNode) -> bool:
    """Returns whether ``x`` is a difference from a mean."""
    operation = read_operation(x)
    if operation is None or operation.kind != "sub":
        return False
    subtracted = read_operation(operation.operands[1])
    return subtracted is not None and subtracted.kind == "mean"


class RmsNorm(CompositeRule):
    """RMS norm: ``x / sqrt(mean(x * x) + eps) * weight``.

    Source: Zhang and Sennrich 2019, "Root mean square layer normalization". PyTorch's Llama writes Pow,
    ReduceMean, Add, Sqrt, Reciprocal or Div, Mul, Mul; T5 the same with a division.
    """

    title = "RMS norm"
    formula = "x / sqrt(mean(x * x) + eps) * weight, over one axis"
    becomes = "functions.rms_norm"
    pattern = AnyOf(Product(_X, _ROOT, StoredOperand("weight")), Product(_X, _ROOT))

    def obstacle(self, match: PatternMatch) -> str | None:
        """Refuses a mean over several axes, and one without a small number."""
        axes = reduced_axes(match["squares"], match["x"])
        if axes is None or len(axes) != 1:
            return f"its mean is over the axes {axes}, not over one that is kept as 1"
        if _is_centered(match["x"]):
            return "its input is centered around its mean: it is the second half of another norm"
        eps = match.get("eps")
        if eps is None or not 0.0 < eps < 1.0:
            return "nothing small is added to the mean, as a norm does against a division by 0"
        return None

    def call(self, match: PatternMatch) -> CompositeCall:
        """Calls `functions.rms_norm`."""
        axes = reduced_axes(match["squares"], match["x"])
        assert axes is not None
        return CompositeCall(functions.rms_norm, (match["x"], match.get("weight"), axes[0], match["eps"]))


_SQUARES = Operation("sum", Product(Power(_X, 2.0)), name="reduced")
_LENGTH = AnyOf(Product(Power(_SQUARES, 0.5)), Operation("norm", _X, name="reduced"))
_BOUNDED = Operation("maximum", _LENGTH, Number("eps"))
_WIDENED = Operation("broadcast_to", AnyOf(_BOUNDED, _LENGTH), name="wide")


class Normalize(CompositeRule):
    """L2 normalization: ``x / max(norm(x), eps)`` with ``norm(x) = sqrt(sum(x * x))``.

    PyTorch's ``F.normalize`` is written as ReduceL2, Clip, Expand, Div; Paddle writes the sum of squares with
    a root, TensorFlow's ``l2_normalize`` ``x * rsqrt(max(sum(x * x), eps))``. An eps that is added makes
    another function, which stays in pieces.
    """

    title = "L2 normalization"
    formula = "x / max(sqrt(sum(x * x)), eps), over one axis"
    becomes = "F.normalize"
    pattern = AnyOf(
        Product(_X, Power(AnyOf(_BOUNDED, _WIDENED), -1.0)),
        Product(_X, Power(Operation("maximum", _SQUARES, Number("squared_eps")), -0.5)),
        Product(_X, Power(Sum(_SQUARES, constant="added"), -0.5)),
        Product(_X, Power(Sum(_LENGTH, constant="added"), -1.0)),
        Product(_X, Power(_SQUARES, -0.5)),
        Product(_X, Power(Operation("norm", _X, name="reduced"), -1.0)),
    )

    def obstacle(self, match: PatternMatch) -> str | None:
        """Refuses a number that is added, several axes, and another norm."""
        if match.get("added") is not None:
            return f"{match['added']:g} is added where F.normalize has a lower bound"
        axes = reduced_axes(match["reduced"], match["x"])
        if axes is None or len(axes) != 1:
            return f"its length is over the axes {axes}, not over one that is kept as 1"
        operation = read_operation(match["reduced"])
        if operation is not None and operation.kind == "norm" and operation.settings["ord"] not in (None, 2):
            return f"its norm has the order {operation.settings['ord']:g}, not 2"
        if match.get("wide") is not None and shape_of(match["wide"]) != shape_of(match["x"]):
            return "its length is broadcast to another shape"
        if match.get("squared_eps", 0.0) < 0.0:
            return "its lower bound is negative"
        return None

    def call(self, match: PatternMatch) -> CompositeCall:
        """Calls `F.normalize`."""
        axes = reduced_axes(match["reduced"], match["x"])
        assert axes is not None
        eps = match.get("eps", math.sqrt(match.get("squared_eps", 0.0)))
        return CompositeCall(F.normalize, (match["x"], 2.0, axes[0], eps))


def _quotient(powers: Pattern) -> Pattern:
    return Product(powers, Power(Operation("sum", powers, name="total"), -1.0))


class Softmax(CompositeRule):
    """Softmax: ``exp(x - max(x)) / sum(exp(x - max(x)))`` over one axis.

    Source: Bridle 1990, "Probabilistic interpretation of feedforward classification network outputs".
    TensorFlow's Keras for other axes than the last, and models by hand, write Max, Sub, Exp, Sum, Div. Some
    leave out the maximum, which changes nothing but the range of x.
    """

    title = "softmax"
    formula = "exp(x - max(x)) / sum(exp(x - max(x))), over one axis"
    becomes = "F.softmax"
    pattern = AnyOf(
        _quotient(Operation("exp", Sum(_X, Minus(Operation("max", _X, name="top"))), name="powers")),
        _quotient(Operation("exp", _X, name="powers")),
    )

    def obstacle(self, match: PatternMatch) -> str | None:
        """Refuses several axes, and unequal axes of maximum and sum."""
        x, top = match["x"], match.get("top")
        axes = reduced_axes(match["total"], x)
        if axes is None or len(axes) != 1:
            return f"its sum is over the axes {axes}, not over one that is kept as 1"
        if top is not None and reduced_axes(top, x) != axes:
            return f"its maximum is over the axes {reduced_axes(top, x)}, its sum over {axes}"
        return None

    def call(self, match: PatternMatch) -> CompositeCall:
        """Calls `F.softmax` with a list of one axis: the form that subtracts the largest value."""
        axes = reduced_axes(match["total"], match["x"])
        assert axes is not None
        return CompositeCall(F.softmax, (match["x"], list(axes)))


RULES = (GroupNorm(), LayerNorm(), ChannelNorm(), InstanceNorm(), RmsNorm(), Normalize(), Softmax())
