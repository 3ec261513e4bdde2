"""Attention, moves, scales and shifts that exporters write in pieces; each rule has its formula and its
source.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Any

import megengine.functional as F

from qtrace.graph import functions
from qtrace.graph.algebra import AnyOf, AnyTensor, Operation, Product, StoredOperand, Sum
from qtrace.graph.composites import CompositeCall, CompositeRule
from qtrace.graph.edit import GraphEditor
from qtrace.graph.operations import is_stored, read_operation
from qtrace.graph.pattern import Pattern, PatternMatch
from qtrace.graph.types import Node, TensorNode
from qtrace.graph.walk import is_float_tensor, shape_of

# Scaled dot-product attention: ``softmax(scale * query @ transposed key + bias + mask) @ value``.


def _scaled(tensor: Pattern, scale: str) -> Pattern:
    return AnyOf(Product(tensor, scale=scale), tensor)


_KEY = AnyOf(Operation("transpose", AnyTensor("key"), name="turned"), AnyTensor("key"))
_PRODUCT = Operation(
    "matmul", _scaled(AnyTensor("x"), "query_scale"), _scaled(_KEY, "key_scale"), name="product"
)
_SCORES = _scaled(_PRODUCT, "scale")
_BIASED = AnyOf(Sum(_SCORES, AnyTensor("bias"), name="biased"), _SCORES)
_SPLIT = Operation("reshape", _BIASED, name="windows")
_WINDOWS = Operation("reshape", Sum(_SPLIT, AnyTensor("mask"), name="masked"), name="joined")
_MASKED = AnyOf(
    Sum(_SCORES, AnyTensor("mask")), Sum(_SCORES, AnyTensor("bias"), AnyTensor("mask")), _WINDOWS, _SCORES
)
_WEIGHTS = Operation("softmax", _MASKED, name="weights")


class Attention(CompositeRule):
    """Scaled dot-product attention: ``softmax(scale * query @ transposed key + bias + mask) @ value``.

    Source: Vaswani et al. 2017, "Attention is all you need", section 3.2.1. Exporters write MatMul, Div or
    Mul, Add, Softmax, MatMul with a Transpose of the keys; PyTorch's own function multiplies queries and keys
    by the root of the scale. Swin adds a bias for each relative position, and a mask for each window of an
    image between two reshapes (Liu et al. 2021, "Swin Transformer", section 3.2). The rule takes apart a
    transpose of the keys: one that also moves other axes stays without its swap of the last two. ``prepare``
    keeps the pieces, whose products have integer kernels.
    """

    title = "scaled dot-product attention"
    formula = "matmul(softmax(scale * matmul(query, transposed key) + bias + mask), value)"
    becomes = "functions.scaled_dot_product_attention"
    keeps_shape = False
    in_prepare = False
    pattern = Operation("matmul", _WEIGHTS, AnyTensor("value"))

    def obstacle(self, match: PatternMatch) -> str | None:
        """Refuses other axes, transposed operands, and a mask that widens the scores."""
        query, key, value, weights = (match[n] for n in ("x", "key", "value", "weights"))
        rank = len(shape_of(query))
        if rank < 2 or {len(shape_of(key)), len(shape_of(value))} != {rank}:
            return "its queries, keys and values have unequal numbers of axes"
        axis = _setting(weights, "axis")
        if axis not in (-1, rank - 1) and axis not in ([-1], [rank - 1]):
            return f"its softmax is over the axis {axis}, that of attention is the last"
        if any(_setting(n, "transpose_a") for n in (match["product"], match.node)):
            return "its queries or weights are transposed in the product"
        if _setting(match.node, "transpose_b"):
            return "its values are transposed in the product"
        if (_swapped(match) is None) != bool(_setting(match["product"], "transpose_b")):
            return "its keys are not transposed, but have the axis of the scores last"
        return _mask_problem(match)

    def call(self, match: PatternMatch) -> CompositeCall:
        """Calls `functions.scaled_dot_product_attention` on the keys before their transpose."""
        scale = 1.0
        for name in ("query_scale", "key_scale", "scale"):
            scale *= match.get(name, 1.0)
        mask, bias, shapes = match.get("mask"), match.get("bias"), {}
        args: tuple[Any, ...] = (match["x"], match["key"], match["value"], mask, scale)
        if match.get("windows") is not None:
            shapes[3] = _window_shape(match)
        return CompositeCall(
            functions.scaled_dot_product_attention, (*args, bias) if bias is not None else args, shapes
        )

    def rewrite(self, match: PatternMatch, editor: GraphEditor) -> Mapping[Node, Node]:
        """Writes the rest of the keys' transpose, if it moves other axes too, before the call."""
        order = _swapped(match)
        if order is not None and order != tuple(range(len(order))):
            key = match["key"]
            like = match["turned"]
            turned = editor.call_function(F.transpose, key, order, after=like.expr, like=like)
            turned.shape = tuple(shape_of(key)[axis] for axis in order)
            match = PatternMatch(match.node, match.exprs, {**match.bound, "key": turned})
        return super().rewrite(match, editor)


def _mask_problem(match: PatternMatch) -> str | None:
    """Returns why a mask or bias does not fit attention, as a clause, or None."""
    scores, mask = shape_of(match["product"]), match.get("mask")
    if mask is None:
        return None
    wide = f"its mask has the shape {shape_of(mask)}, that of the scores is {scores}"
    windows, biased = match.get("windows"), match.get("biased")
    if shape_of(match["weights"]) != scores or (biased is not None and shape_of(biased) != scores):
        return wide
    if windows is None:
        return None
    split = shape_of(windows)
    if len(split) != len(scores) + 1 or split[2:] != scores[1:]:
        return f"its scores are reshaped to {split}, which does not split {scores} into windows"
    if shape_of(match["masked"]) != split or _window_shape(match)[0] != 1:
        return f"its mask has the shape {shape_of(mask)}, that of the windows is {split}"
    return None


def _window_shape(match: PatternMatch) -> tuple[int, ...]:
    """Returns the shape of the mask of windows with as many axes as the windows."""
    own, rank = shape_of(match["mask"]), len(shape_of(match["windows"]))
    return (1,) * (rank - len(own)) + own


def _setting(node: TensorNode, name: str) -> Any:
    operation = read_operation(node)
    return None if operation is None else operation.settings.get(name)


def _swapped(match: PatternMatch) -> tuple[int, ...] | None:
    """Returns the transpose of the keys with its last two axes exchanged; None without a transpose."""
    turned = match.get("turned")
    places = None if turned is None else permutation(turned)
    return None if places is None else (*places[:-2], places[-1], places[-2])


_ATTENTION = (Attention(),)


# Moves of values that exporters write in pieces; the docstring of a rule has its formula and its source.


def read_slices(node: TensorNode, x: TensorNode) -> dict[int, range] | None:
    """Returns axis -> the places that an index of ``x`` by slices takes, of axes that are not taken whole.

    Args:
        node: the result of the index.
        x: what is indexed.

    Returns:
        None for an index by numbers, tensors, or slices whose bounds are computed.
    """
    operation = read_operation(node)
    if operation is None or operation.kind != "getitem":
        return None
    (index,) = operation.settings.values()
    shape = shape_of(x)
    parts: list[Any] = list(index) if isinstance(index, tuple) else [index]
    if any(part is Ellipsis for part in parts):
        place = next(i for i, part in enumerate(parts) if part is Ellipsis)
        parts[place : place + 1] = [slice(None)] * (len(shape) - len(parts) + 1)
    ranges: dict[int, range] = {}
    for axis, part in enumerate(parts):
        if not isinstance(part, slice) or axis >= len(shape):
            return None
        if not all(b is None or isinstance(b, int) for b in (part.start, part.stop, part.step)):
            return None
        places = range(shape[axis])[part]
        if places != range(shape[axis]):
            ranges[axis] = places
    return ranges


def permutation(node: TensorNode) -> tuple[int, ...] | None:
    """Returns the order of axes of the transpose that gives ``node``; None if it is computed or adds axes."""
    order, rank = _setting(node, "pattern"), len(shape_of(node))
    if not isinstance(order, (tuple, list)) or not all(isinstance(axis, int) for axis in order):
        return None
    places = tuple(axis % rank for axis in order) or tuple(range(rank))[::-1]
    return places if sorted(places) == list(range(rank)) else None


class ChannelShuffle(CompositeRule):
    """Channel shuffle: the channels of several groups, interleaved.

    Source: Zhang et al. 2018, "ShuffleNet". Every exporter writes Reshape to (N, groups, C / groups, ...),
    Transpose of the axes 1 and 2, and Reshape. ``prepare`` keeps the pieces, which move integers in every
    runtime.
    """

    title = "channel shuffle"
    formula = "reshape(transpose(reshape(x, (N, groups, C / groups, ...)), (0, 2, 1, ...)), shape of x)"
    becomes = "functions.channel_shuffle"
    keeps_shape = False
    in_prepare = False
    pattern = Operation(
        "reshape",
        Operation("transpose", Operation("reshape", AnyTensor("x"), name="split"), name="moved"),
    )

    def obstacle(self, match: PatternMatch) -> str | None:
        """Refuses another order of axes, and other shapes."""
        shape, parts = shape_of(match["x"]), shape_of(match["split"])
        if shape_of(match.node) != shape:
            return f"its result has the shape {shape_of(match.node)}, that of the input is {shape}"
        order = permutation(match["moved"])
        if order is None or order != (0, 2, 1, *range(3, len(parts))):
            return f"it transposes by {order}, a shuffle exchanges the axes 1 and 2"
        rest = math.prod(shape[2:])
        if parts[0] != shape[0] or math.prod(parts[3:]) != rest or parts[1] * parts[2] != shape[1]:
            return f"its first reshape, to {parts}, does not split the {shape[1]} channels"
        return None

    def call(self, match: PatternMatch) -> CompositeCall:
        """Calls `functions.channel_shuffle`."""
        return CompositeCall(functions.channel_shuffle, (match["x"], shape_of(match["split"])[1]))


_ORDER = {3: 0, 5: 1, 1: 2}  # axis of the reshaped image -> row in the block, column in the block, channel


class SpaceToDepth(CompositeRule):
    """Space to depth: each block of places of an image in the channels.

    Source: Shi et al. 2016, "Real-time single image and video super-resolution", whose pixel shuffle it
    inverts. Exporters write Reshape to (N, C, H / b, b, W / b, b), Transpose and Reshape; YOLOX's Focus
    concatenates four slices with step 2. ``prepare`` keeps the pieces, which move integers in every runtime.
    """

    title = "space to depth"
    formula = (
        "reshape(transpose(reshape(x, (N, C, H / b, b, W / b, b)), (0, ..., 2, 4)), (N, C * b * b, ...))"
    )
    becomes = "functions.space_to_depth"
    keeps_shape = False
    in_prepare = False
    pattern = Operation(
        "reshape",
        Operation("transpose", Operation("reshape", AnyTensor("x"), name="split"), name="moved"),
    )

    def obstacle(self, match: PatternMatch) -> str | None:
        """Refuses blocks that are no squares, and another order of axes."""
        shape, parts, order = shape_of(match["x"]), shape_of(match["split"]), permutation(match["moved"])
        if len(shape) != 4 or len(parts) != 6:
            return f"its first reshape is from {len(shape)} to {len(parts)} axes, not from 4 to 6"
        block = parts[3]
        if parts != (*shape[:2], shape[2] // block, block, shape[3] // block, block):
            return f"its first reshape, to {parts}, does not split height and width into square blocks"
        if order is None or order[0] != 0 or order[4:] != (2, 4):
            return f"it transposes by {order}, which does not move the blocks to the channels"
        expected = (shape[0], shape[1] * block * block, shape[2] // block, shape[3] // block)
        if shape_of(match.node) != expected:
            return f"its result has the shape {shape_of(match.node)}, not {expected}"
        return None

    def call(self, match: PatternMatch) -> CompositeCall:
        """Calls `functions.space_to_depth`."""
        order = permutation(match["moved"])
        assert order is not None
        block = shape_of(match["split"])[3]
        return CompositeCall(
            functions.space_to_depth, (match["x"], block, tuple(_ORDER[a] for a in order[1:4]))
        )


def _slice(number: int) -> Pattern:
    x, name = AnyTensor("x"), f"slice{number}"
    return AnyOf(Operation("getitem", Operation("getitem", x)), Operation("getitem", x), name=name)


class Focus(CompositeRule):
    """Four slices with step 2, concatenated, as YOLOv5 and YOLOX write their Focus layer."""

    title = "space to depth (Focus)"
    formula = "concat([x[:, :, r::2, c::2] for each row r and column c of the block], axis=1)"
    becomes = "functions.space_to_depth"
    keeps_shape = False
    in_prepare = False
    pattern = Operation("concat", _slice(0), _slice(1), _slice(2), _slice(3), name="joined")

    def obstacle(self, match: PatternMatch) -> str | None:
        """Refuses other slices, and another order of them than by rows or by columns."""
        shape, axis = shape_of(match["x"]), _setting(match["joined"], "axis")
        if len(shape) != 4 or axis not in (1, -3):
            return f"it joins {len(shape)} axes along the axis {axis}, not images along the channels"
        if shape[2] % 2 or shape[3] % 2:
            return f"its height or width is odd: {shape[2:]}"
        places = [_place(match[f"slice{i}"], match["x"]) for i in range(4)]
        if None in places:
            return f"{match[f'slice{places.index(None)}'].name} is no slice of every second row and column"
        if tuple(places) not in _PLACES:
            return f"it takes the places of a block in the order {places}, not by rows or by columns"
        return None

    def call(self, match: PatternMatch) -> CompositeCall:
        """Calls `functions.space_to_depth`."""
        places = tuple(_place(match[f"slice{i}"], match["x"]) for i in range(4))
        return CompositeCall(functions.space_to_depth, (match["x"], 2, _PLACES[places]))


# Rows and columns of four slices, by rows or by columns -> the order of `functions.space_to_depth`.
_BY_ROWS = tuple(itertools.product(range(2), repeat=2))
_PLACES: dict[Any, tuple[int, int, int]] = {
    _BY_ROWS: (0, 1, 2),
    tuple(place[::-1] for place in _BY_ROWS): (1, 0, 2),
}


def _place(node: TensorNode, x: TensorNode) -> tuple[int, int] | None:
    """Returns row and column at which slices with step 2 begin; None for other slices."""
    begins: dict[int, int] = {}
    while node is not x:
        operation = read_operation(node)
        source = x if operation is None else operation.operands[0]
        ranges = read_slices(node, source)
        if ranges is None or not begins.keys().isdisjoint(ranges):
            return None
        for axis, places in ranges.items():
            if places not in (range(begin, shape_of(source)[axis], 2) for begin in (0, 1)):
                return None
            begins[axis] = places.start
        node = source
    return (begins[2], begins[3]) if sorted(begins) == [2, 3] else None


class Roll(CompositeRule):
    """Roll: the two parts of a tensor, exchanged along one axis.

    Source: `torch.roll`, which exporters write as two slices and a concatenation, along one axis after the
    other; Swin's shifted windows (Liu et al. 2021, "Swin Transformer", section 3.2).
    """

    title = "roll"
    formula = "concat([x[:, n:], x[:, :n]], axis=1), along any axis"
    becomes = "F.roll"
    pattern = Operation(
        "concat",
        Operation("getitem", AnyTensor("x"), name="end"),
        Operation("getitem", AnyTensor("x"), name="begin"),
        name="joined",
    )

    def obstacle(self, match: PatternMatch) -> str | None:
        """Refuses slices that are not the two parts of the tensor."""
        if _cut(match) is None:
            return (
                f"{match['end'].name} and {match['begin'].name} are not the end and the beginning of one axis"
            )
        return None

    def call(self, match: PatternMatch) -> CompositeCall:
        """Calls `F.roll`."""
        cut = _cut(match)
        assert cut is not None
        axis, number = cut
        return CompositeCall(F.roll, (match["x"], -number, axis))


def _cut(match: PatternMatch) -> tuple[int, int] | None:
    """Returns the axis and the length of the part that comes to the end; None for other slices."""
    x, axis = match["x"], _setting(match["joined"], "axis")
    rank = len(shape_of(x))
    if not isinstance(axis, int) or not -rank <= axis < rank:
        return None
    axis %= rank
    size = shape_of(x)[axis]
    end, begin = (read_slices(match[name], x) for name in ("end", "begin"))
    if end is None or begin is None or set(end) != {axis} or set(begin) != {axis}:
        return None
    cut = begin[axis].stop
    return (axis, cut) if begin[axis] == range(cut) and end[axis] == range(cut, size) else None


class Pick(CompositeRule):
    """Pick: one place of an axis, ``x[:, 1]``, written as a slice of length 1 and a squeeze.

    Source: formats without an index along one axis, such as the ONNX files of qtrace itself.
    """

    title = "pick"
    formula = "squeeze(x[:, n : n + 1], axis=1), along any axis"
    becomes = "x[:, n]"
    keeps_shape = False
    in_prepare = False
    pattern = Operation("squeeze", Operation("getitem", AnyTensor("x"), name="part"), name="squeezed")

    def obstacle(self, match: PatternMatch) -> str | None:
        """Refuses slices of several places or axes, and a squeeze of another axis."""
        if self._index(match) is None:
            return f"{match['part'].name} is no slice of length 1 along the axis that is squeezed"
        return None

    @staticmethod
    def _index(match: PatternMatch) -> tuple[Any, ...] | None:
        part, rank = match["part"], len(shape_of(match["x"]))
        axis = _setting(match["squeezed"], "axis")
        axes = list(axis) if isinstance(axis, (tuple, list)) else [axis]
        slices = read_slices(part, match["x"])
        if slices is None or len(axes) != 1 or not isinstance(axes[0], int):
            return None
        place = axes[0] % rank
        if set(slices) - {place} or place not in slices or len(slices[place]) != 1:
            return None
        return (*[slice(None)] * place, slices[place][0])

    def call(self, match: PatternMatch) -> CompositeCall:
        """Returns the function of the last piece, which `rewrite` does not call."""
        return CompositeCall(F.squeeze, (match["x"], self._index(match)))

    def rewrite(self, match: PatternMatch, editor: GraphEditor) -> Mapping[Node, Node]:
        """Indexes the tensor by the place."""
        x, index = self.call(match).args
        new = editor.call_method("__getitem__", x, index, after=match.exprs[0], like=match.node)
        editor.put_in_place(new, match.node)
        return {}


_ARRANGEMENTS = (ChannelShuffle(), SpaceToDepth(), Focus(), Roll(), Pick())


# Scale and shift by stored tensors, as one call.


def _long_axes(node: TensorNode, rank: int) -> tuple[int, ...]:
    """Returns the axes of a tensor with ``rank`` axes along which a stored tensor has several numbers."""
    shape = shape_of(node)
    return tuple(rank - len(shape) + i for i, n in enumerate(shape) if n > 1)


class ScaleAndShift(CompositeRule):
    """Scale and shift: ``x * scale + shift`` with stored tensors of one number, or one per index.

    Source: PP-OCRv4's LearnableAffineBlock (PPLCNetV3), FrozenBatchNorm, ResMLP's Affine; ActNorm of Kingma
    and Dhariwal 2018, "Glow". Products and sums with Python numbers are no parameters and stay as they are.
    """

    title = "scale and shift"
    formula = "x * scale + shift, with stored scale and shift"
    becomes = "functions.scale_and_shift"
    kind = "scale_and_shift"
    pattern = Sum(Product(AnyTensor("x"), StoredOperand("scale")), StoredOperand("shift"))

    def obstacle(self, match: PatternMatch) -> str | None:
        """Refuses tensors with numbers along several axes, such as an embedding of positions."""
        x, rank = match["x"], len(shape_of(match["x"]))
        if is_stored(x) or not all(is_float_tensor(n) for n in (x, match["scale"], match["shift"])):
            return "it multiplies and adds stored tensors, or integers"
        axes = {n: _long_axes(match[n], rank) for n in ("scale", "shift")}
        for name, long in axes.items():
            if len(long) > 1:
                return f"its {name} has the shape {shape_of(match[name])}: numbers along {len(long)} axes"
        if len({long for long in axes.values() if long}) > 1:
            return "its scale and its shift are along unequal axes"
        return None

    def call(self, match: PatternMatch) -> CompositeCall:
        """Calls `functions.scale_and_shift`."""
        return CompositeCall(functions.scale_and_shift, (match["x"], match["scale"], match["shift"]))


_SCALE_AND_SHIFT = (ScaleAndShift(),)

RULES = (*_ATTENTION, *_ARRANGEMENTS, *_SCALE_AND_SHIFT)
