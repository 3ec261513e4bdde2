"""QuantizeLinear and DequantizeLinear: a pair is a noted rounding, stored integers are stored floats.

QuantizeLinear gives a `QuantizedIntegers` value, which ops that only move values pass on. DequantizeLinear
ends it. Ops with integers inside, such as QLinearConv, are written as such pairs around the float op.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import replace
from typing import Any

import megengine.functional as F
import megengine.module as M
import numpy as np
import onnx

from qtrace.graph.origin import Move, joined, part_of, reshaped_to, taken_at, transposed_by
from qtrace.graph.types import CallFunction, CallMethod, TensorNode
from qtrace.importing.onnx.call import Call
from qtrace.importing.onnx.layers import Layers, Refusal
from qtrace.importing.onnx.model import Computed, Graph, OnnxNode, QuantizedIntegers, Stored, Value, node_like
from qtrace.importing.onnx.naming import is_anonymous
from qtrace.preparation.passes.quantized_file import FileRounding, StoredGrid

PACKED = ("int4", "uint4", "int2", "uint2")  # several in a byte: only weights
_KINDS = ("int8", "uint8", "int16", "uint16", "int32")
_SUFFIXES = ("_quantized", "_int", "_q", "_QuantizeLinear_Output")

PARTS = {"Split", "Slice", "Gather", "GatherND", "Expand", "Tile"}
"""Ops whose results are parts of the tensor, or hold some of its numbers several times."""

# Op -> the number with which a tensor stays as it is. torch's exporter writes the `value` of addcmul so.
_NEUTRAL = {
    **dict.fromkeys(("Mul", "Div"), np.multiply.identity),
    **dict.fromkeys(("Add", "Sub"), np.add.identity),
}
_RESHAPES = {"Reshape", "Flatten", "Squeeze", "Unsqueeze", "Identity"}
_CASTS = {"Cast", "CastLike"}
# Places that the moves of one op may list: the record of them is kept as text.
MAX_TAKEN = 2**17

PAIRS = {(d, op) for d in ("", "com.microsoft") for op in ("QuantizeLinear", "DequantizeLinear")}
MOVES = {
    *("MaxPool", "Reshape", "Transpose", "Flatten", "Squeeze", "Unsqueeze", "Slice", "Split", "Gather"),
    *("Identity", "Expand", "Tile", "DepthToSpace", "SpaceToDepth", "Concat", "Dropout"),
}
_LAYERS = (M.Conv1d, M.Conv2d, M.Conv3d, M.ConvTranspose2d, M.Linear)


def read_grid(call: Call, kind: np.dtype[Any] | None) -> StoredGrid:
    """Reads scale and zero point.

    Args:
        call: the node.
        kind: the type of the integers; None for the type of the zero point.

    Raises:
        Refusal: when they are computed, or of a type or form that no site has.
    """
    call.attribute("saturate", 1)
    if call.attribute("block_size", 0):
        raise Refusal("has a scale per block, which qtrace lacks")
    for name in ("output_dtype", "precision"):
        value = call.attribute(name, 0)
        if value and name == "output_dtype" and call.node.op == "QuantizeLinear":
            kind = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(value))
    scale = call.array(1)
    zero = call.array(2, None)
    kind = kind or (np.dtype(np.uint8) if zero is None else zero.dtype)
    stored = isinstance(call.values[0], Stored)
    if kind.name not in (*_KINDS, *(PACKED if stored else ())) or (
        kind == np.int32 and call.node.op == "QuantizeLinear"
    ):
        raise Refusal(f"rounds to {kind.name}; qtrace has sites of 8 and 16 bits")
    zero = np.zeros(scale.shape, np.int64) if zero is None else zero.astype(np.int64)
    zero = np.broadcast_to(zero, scale.shape) if zero.size == 1 else zero
    if scale.dtype != np.float32 or scale.ndim > 1 or zero.shape != scale.shape:
        raise Refusal(f"has scales of {scale.dtype.name} and shape {list(scale.shape)}, which no site has")
    if not (np.isfinite(scale) & (scale > 0)).all():
        raise Refusal("has a scale that is not finite and positive")
    return StoredGrid(call.node.inputs[0], kind.name, scale, zero)


def dequantize(integers: np.ndarray, grid: StoredGrid, axis: int) -> np.ndarray:
    """Returns the floats that integers stand for, as DequantizeLinear computes them."""
    scale, zero = _broadcast(integers, grid, axis)
    return np.asarray((integers.astype(np.int64) - zero).astype(np.float32) * scale, np.float32)


def quantize(values: np.ndarray, grid: StoredGrid, axis: int) -> np.ndarray:
    """Returns the integers that QuantizeLinear computes."""
    scale, zero = _broadcast(values, grid, axis)
    steps, signed = 2 ** bits_of(grid.kind), grid.kind.startswith("i")
    lowest = -steps // 2 if signed else 0
    rounded = np.rint(values.astype(np.float32) / scale).astype(np.float64) + zero
    return np.asarray(np.clip(rounded, lowest, lowest + steps - 1).astype(np.int64).astype(grid.kind))


def bits_of(kind: str) -> int:
    """Returns the bits of an integer type such as ``uint4``; 0 for another type."""
    match = re.fullmatch(r"u?int(\d+)", kind)
    return int(match[1]) if match else 0


def _broadcast(array: np.ndarray, grid: StoredGrid, axis: int) -> tuple[np.ndarray, np.ndarray]:
    if grid.scale.size == 1:
        return grid.scale.reshape(()), grid.zero_point.reshape(())
    if axis >= array.ndim or array.shape[axis] != grid.scale.size:
        raise Refusal(f"has {grid.scale.size} scales for a tensor of the shape {list(array.shape)}")
    shape = [-1 if i == axis else 1 for i in range(array.ndim)]
    return grid.scale.reshape(shape), grid.zero_point.reshape(shape)


def stored_name(node: OnnxNode, source: Stored, layers: Layers, grid: StoredGrid) -> str:
    """Returns the name of the floats of a stored tensor: the name of its integers without their suffix."""
    name = source.name
    for suffix in () if name in layers.paths.values() else _SUFFIXES:
        name = name.removesuffix(suffix)
    known = layers.grids.get(name)
    same = known is None or (known.integers is source.array and known.equals(grid))
    return name if name and same else node.outputs[0]


def moves_of(
    node: OnnxNode, values: Sequence[Value | None], results: Sequence[Value]
) -> list[tuple[Move, ...] | None]:
    """Returns the moves that made each result of the first input; None for a result that was computed.

    Args:
        node: a node of ONNX's own that was folded.
        values: its inputs, of which the first is stored.
        results: its results.
    """
    source = values[0]
    assert isinstance(source, Stored)
    shapes = [result.array.shape if isinstance(result, Stored) else None for result in results]
    rank = source.array.ndim
    if node.op in _RESHAPES:
        return [None if shape is None else (reshaped_to(shape),) for shape in shapes]
    if node.op in _CASTS:
        same = isinstance(results[0], Stored) and results[0].array.dtype == source.array.dtype
        return [() if same else None]
    if node.op == "Transpose":
        return [(transposed_by(node.attributes.get("perm", range(rank - 1, -1, -1))),)]
    if node.op in _TAKING and source.array.dtype.kind == "f" and shapes[0] is not None:
        others = [value.array if isinstance(value, Stored) else None for value in values[1:]]
        moves_taken = _TAKING[node.op](node, source.array.shape, others, shapes[0])
        count = sum(len(numbers) for kind, numbers in moves_taken or () if kind == "take")
        return [moves_taken if count <= MAX_TAKEN else None]
    if node.op == "Split" and rank and all(shape is not None for shape in shapes):
        axis = int(node.attributes.get("axis", 0)) % rank
        moves: list[tuple[Move, ...] | None] = []
        first = 0
        for shape in shapes:
            end = first + (shape[axis] if shape is not None else 0)
            moves.append((part_of(axis, first, end),))
            first = end
        return moves
    return [None] * len(results)


def _gather(
    node: OnnxNode, _: tuple[int, ...], others: Sequence[np.ndarray | None], result: tuple[int, ...]
) -> tuple[Move, ...] | None:
    if others[0] is None:
        return None
    return taken_at(node.attributes.get("axis", 0), others[0].reshape(-1)), reshaped_to(result)


def _gather_nd(
    node: OnnxNode, shape: tuple[int, ...], others: Sequence[np.ndarray | None], result: tuple[int, ...]
) -> tuple[Move, ...] | None:
    """torch's exporter writes ``table[places]`` so."""
    if others[0] is None or node.attributes.get("batch_dims", 0):
        return None
    count = others[0].shape[-1]
    own = np.moveaxis(others[0].reshape(-1, count) % shape[:count], 1, 0)
    places = np.ravel_multi_index(tuple(own), shape[:count])
    return reshaped_to((-1, *shape[count:])), taken_at(0, places), reshaped_to(result)


def _slice(
    node: OnnxNode, shape: tuple[int, ...], others: Sequence[np.ndarray | None], _: tuple[int, ...]
) -> tuple[Move, ...] | None:
    ends = dict(zip(("starts", "ends", "axes", "steps"), others, strict=False)) or node.attributes
    lists = {key: np.reshape(own, -1).tolist() for key, own in ends.items() if own is not None}
    if "starts" not in lists or "ends" not in lists:
        return None
    starts = lists["starts"]
    axes, steps = lists.get("axes", range(len(starts))), lists.get("steps", [1] * len(starts))
    moves = []
    for first, end, axis, step in zip(starts, lists["ends"], axes, steps, strict=True):
        places = range(shape[axis])[first:end:step]
        plain = places.step == 1
        moves.append(part_of(axis, places.start, places.stop) if plain else taken_at(axis, places))
    return tuple(moves)


def _repeat(
    _: OnnxNode, shape: tuple[int, ...], __: Sequence[np.ndarray | None], result: tuple[int, ...]
) -> tuple[Move, ...] | None:
    own = (*[1] * (len(result) - len(shape)), *shape)
    axes = [axis for axis, (size, new) in enumerate(zip(own, result, strict=True)) if size != new]
    if sum(result[axis] for axis in axes) > MAX_TAKEN or any(not own[axis] for axis in axes):
        return None
    return reshaped_to(own), *(taken_at(axis, [n % own[axis] for n in range(result[axis])]) for axis in axes)


# Op -> what makes its moves of the node, its tensor's shape, its other inputs and its result's shape.
_TAKING = {"Gather": _gather, "GatherND": _gather_nd, "Slice": _slice, "Expand": _repeat, "Tile": _repeat}


def unchanged(node: OnnxNode, values: Sequence[Value | None], results: Sequence[Value]) -> Stored | None:
    """Returns the learned tensor that a node multiplies by 1, or adds to 0; None for any other node."""
    if node.op not in _NEUTRAL or node.domain or len(values) != 2 or len(results) != 1:
        return None
    orders = (0, 1) if node.op in ("Mul", "Add") else (0,)
    for index in orders:
        tensor, number = values[index], values[1 - index]
        if not isinstance(tensor, Stored) or not isinstance(number, Stored):
            continue
        named = tensor.learned and not is_anonymous(tensor.name)
        fixed = number.array.size == 1 and (not number.learned or is_anonymous(number.name))
        result = results[0]
        if named and fixed and np.all(number.array == _NEUTRAL[node.op]) and isinstance(result, Stored):
            return tensor if np.array_equal(result.array, tensor.array) else None
    return None


def lower_pair(node: OnnxNode, values: Sequence[Value | None], layers: Layers) -> Value:
    """Returns what a QuantizeLinear or DequantizeLinear gives.

    Raises:
        Refusal: when it lacks an equal: 4 bits, float8, blocks, scales that are computed.
    """
    call = Call(node, values, layers)
    source = values[0]
    if node.op == "QuantizeLinear":
        if isinstance(source, Stored):
            grid = read_grid(call, None)
            return replace(source, array=quantize(source.array, grid, _axis(call)))
        if not isinstance(source, Computed) or source.dtype.kind != "f":
            raise Refusal("quantizes values that are not floats of the graph")
        return _round(call, source, read_grid(call, None))
    if isinstance(source, QuantizedIntegers):
        return _dequantize(call, source)
    if not isinstance(source, Stored):
        raise Refusal(
            f"reads the integers {node.inputs[0]!r}, which the graph takes as an input or computes: let the "
            "graph take floats and a QuantizeLinear round them"
        )
    grid = read_grid(call, source.array.dtype)
    name = stored_name(node, source, layers, grid)
    layers.grids[name] = StoredGrid(name, grid.kind, grid.scale, grid.zero_point, source.array)
    return Stored(dequantize(source.array, grid, _axis(call)), name, learned=True)


def _axis(call: Call) -> int:
    rank = max(call.rank(0), 1)
    return call.axis(call.attribute("axis", 1), rank) if rank > 1 else 0


def _round(call: Call, source: Computed, grid: StoredGrid) -> QuantizedIntegers:
    if grid.scale.size != 1:
        raise Refusal("rounds an activation with a scale per channel, which qtrace lacks")
    flat = StoredGrid(grid.label, grid.kind, grid.scale.reshape(()), grid.zero_point.reshape(()))
    layers, value = call.layers, source.node
    if int(flat.zero_point) == np.iinfo(flat.kind).min and _computes_products(value):
        rectified = call.function(F.relu, value, name=f"{value.name}_unclipped")
        layers.builder.swap_names(value, rectified)
        value = rectified
    layers.roundings += 1
    path = f"given_roundings.r{layers.roundings}"
    node = layers.builder.call_module(path, FileRounding(flat), value, name=call.name)
    return QuantizedIntegers(node, np.dtype(grid.kind), flat)


def _computes_products(node: TensorNode) -> bool:
    """Returns whether a layer or an addition gives the value, after which tools leave out a Relu.

    A zero point at the lowest integer cuts off negative values as the Relu does, so that the integers are the
    same. With the Relu the float network is the one that was quantized.
    """
    expr = node.expr
    if isinstance(expr, CallMethod):
        return getattr(expr.inputs[0], "module_type", None) in _LAYERS
    return isinstance(expr, CallFunction) and expr.func in (F.add, F.matmul, F.conv2d)


def _dequantize(call: Call, source: QuantizedIntegers) -> Computed:
    grid, own = source.grid, read_grid(call, source.dtype)
    if own.scale.size != 1 or own.zero_point.reshape(()) != grid.zero_point:
        raise Refusal("reads integers with another zero point than QuantizeLinear wrote them with")
    scale = np.float32(own.scale.reshape(()))
    if scale == grid.scale:
        return Computed(source.node, np.dtype(np.float32))
    factor = float(scale / grid.scale)
    if np.frexp(factor)[0] != 0.5 or np.float32(grid.scale * np.float32(factor)) != scale:
        raise Refusal("reads integers with another scale than QuantizeLinear wrote them with")
    name = call.name.removesuffix("_dq")
    return Computed(call.function(F.mul, source.node, factor, name=name), np.dtype(np.float32))


def unwrap(
    node: OnnxNode, values: Sequence[Value | None]
) -> tuple[list[Value | None], QuantizedIntegers | None]:
    """Returns the values of a node that moves integers, as floats, and the integers that it moves.

    Raises:
        Refusal: when the node computes with integers, or joins ones of different scales.
    """
    quantized = [value for value in values if isinstance(value, QuantizedIntegers)]
    if not quantized:
        return list(values), None
    first = quantized[0]
    if node.op not in MOVES or node.domain:
        raise Refusal("computes with integers that QuantizeLinear gives, without a DequantizeLinear")
    joined = quantized if node.op == "Concat" else quantized[:1]
    if node.op == "Concat" and len(quantized) != len(values):
        raise Refusal("joins integers of the graph with stored ones")
    if any(not value.grid.equals(first.grid) for value in joined):
        raise Refusal("joins integers with different scales")
    floats: list[Value | None] = [
        Computed(v.node, np.dtype(np.float32)) if isinstance(v, QuantizedIntegers) else v for v in values
    ]
    return floats, first


def wrap(results: Sequence[Value], moved: QuantizedIntegers | None) -> Sequence[Value]:
    """Returns the results of a node as the integers that it moves; unchanged if it moves none."""
    if moved is None:
        return results
    return [
        QuantizedIntegers(result.node, moved.dtype, moved.grid) if isinstance(result, Computed) else result
        for result in results
    ]


def follow_stored(
    node: OnnxNode, values: Sequence[Value | None], results: Sequence[Value], layers: Layers
) -> Sequence[Value]:
    """Keeps name and grid of learned values that a folded node only moves; returns the results."""
    same = unchanged(node, values, results)
    if same is not None and same.name not in layers.grids:
        return [same]
    source = values[0] if values else None
    if node.domain or not isinstance(source, Stored):
        return results
    known = source.name in layers.grids
    if not (known or (source.learned and not is_anonymous(source.name))):
        return results
    followed: list[Value] = []
    for result, moves in zip(results, moves_of(node, values, results), strict=True):
        if not isinstance(result, Stored) or moves is None or (known and node.op in PARTS):
            followed.append(result)
        else:
            followed.append(replace(source, array=result.array, moves=joined(source.moves, *moves)))
    return followed


class _Rewriter:
    """Writes one op as several.

    Args:
        node: the op.
        opsets: the versions that the model imports.
        used: the names of all values of the graph.
    """

    def __init__(self, node: OnnxNode, opsets: Mapping[str, int], used: Container[str]) -> None:
        self.node, self.opsets, self.used = node, opsets, used
        self.nodes: list[OnnxNode] = []

    def input(self, index: int) -> str:
        """Returns the name of an input; "" if it is left out."""
        return self.node.inputs[index] if index < len(self.node.inputs) else ""

    def add(self, op: str, inputs: list[str], output: str, **attributes: Any) -> str:
        """Adds a node of ONNX's own and returns its output."""
        new = node_like(self.node, op, inputs, output, self.opsets, **attributes)
        self.nodes.append(replace(new, title=""))
        return output

    def floats(self, index: int, axis: int = 1) -> str:
        """Adds the DequantizeLinear of the integers, scale and zero point at ``index``."""
        inputs = [self.input(index), self.input(index + 1), self.input(index + 2)]
        return self._dequantized(inputs, f"{self.node.outputs[0]}_input_{index}", axis)

    def _dequantized(self, inputs: list[str], output: str, axis: int) -> str:
        return self.add("DequantizeLinear", inputs, output, axis=axis)

    def bias(self, index: int, scales: tuple[int, int]) -> list[str]:
        """Adds the DequantizeLinear of an int32 bias, whose scale is a product; none if it is left out."""
        if not self.input(index):
            return []
        out = self.node.outputs[0]
        scale = self.add("Mul", [self.input(i) for i in scales], f"{out}_bias_scale")
        return [self._dequantized([self.input(index), scale], f"{out}_bias", 0)]

    def result(self, index: int, op: str, inputs: list[str], **attributes: Any) -> None:
        """Adds the float op and the QuantizeLinear with scale and zero point at ``index``."""
        out = self.node.outputs[0]
        if not self.input(index):
            self.add(op, inputs, out, **attributes)
            return
        plain = out.removesuffix("_quantized")
        name = plain if plain not in self.used else f"{out}_float"
        value = self.add(op, inputs, name, **attributes)
        pair = [value, self.input(index), self.input(index + 1)]
        self.add("QuantizeLinear", [name for name in pair if name], out)


def _conv(new: _Rewriter) -> None:
    inputs = [new.floats(0), new.floats(3, axis=0), *new.bias(8, (1, 4))]
    new.result(6, "Conv", inputs, **new.node.attributes)


def _matmul(new: _Rewriter) -> None:
    new.result(6, "MatMul", [new.floats(0), new.floats(3, axis=1)])


def _gemm(new: _Rewriter) -> None:
    axis = 0 if new.node.attributes.get("transB", 0) else 1
    inputs = [new.floats(0), new.floats(3, axis=axis), *new.bias(6, (1, 4))]
    new.result(7, "Gemm", inputs, **new.node.attributes)


def _binary(op: str) -> Callable[[_Rewriter], None]:
    return lambda new: new.result(6, op, [new.floats(0), new.floats(3)])


def _unary(op: str, lacks: str = "") -> Callable[[_Rewriter], None]:
    """Returns what writes an op of one tensor, whose float op lacks an attribute."""
    return lambda new: new.result(3, op, [new.floats(0)], **_without(new, lacks))


def _concat(new: _Rewriter) -> None:
    inputs = [new.floats(index) for index in range(2, len(new.node.inputs), 3)]
    new.result(0, "Concat", inputs, **new.node.attributes)


def _without(new: _Rewriter, name: str) -> dict[str, Any]:
    """Returns the attributes of the op without one that its float op lacks; unless 0, it is refused later."""
    attributes = dict(new.node.attributes)
    if name == "opset" or not attributes.get(name, 0):
        attributes.pop(name, None)
    return attributes


_REWRITES: dict[tuple[str, str], Callable[[_Rewriter], None]] = {
    ("", "QLinearConv"): _conv,
    ("", "QLinearMatMul"): _matmul,
    ("com.microsoft", "QGemm"): _gemm,
    ("com.microsoft", "QLinearAdd"): _binary("Add"),
    ("com.microsoft", "QLinearMul"): _binary("Mul"),
    ("com.microsoft", "QLinearSigmoid"): _unary("Sigmoid"),
    ("com.microsoft", "QLinearLeakyRelu"): _unary("LeakyRelu"),
    ("com.microsoft", "QLinearSoftmax"): _unary("Softmax", "opset"),
    ("com.microsoft", "QLinearConcat"): _concat,
    ("com.microsoft", "QLinearGlobalAveragePool"): _unary("GlobalAveragePool", "channels_last"),
    ("com.microsoft", "QLinearAveragePool"): _unary("AveragePool", "channels_last"),
}


# Ops whose result is integers if their first input is.
_MOVES = {
    *("Identity", "Reshape", "Flatten", "Squeeze", "Unsqueeze", "Transpose", "Slice", "Split", "Concat"),
    *("MaxPool", "Pad", "Expand", "Tile", "Gather", "DepthToSpace", "SpaceToDepth"),
}


def with_pairs(graph: Graph, opsets: Mapping[str, int]) -> Graph:
    """Returns the graph with pairs of QuantizeLinear and DequantizeLinear instead of ops on integers.

    An op stays whose integers the graph takes as an input or gives as an output: no float stands for them.
    """
    integers = {value.name for value in graph.inputs if value.dtype in (np.int8, np.uint8)}
    outputs = {*graph.outputs}
    nodes: list[OnnxNode] = []
    used = {*graph.stored, *(i.name for i in graph.inputs), *(o for n in graph.nodes for o in n.outputs)}
    for node in graph.nodes:
        rewrite = _REWRITES.get((node.domain, node.op))
        if rewrite is None or integers.intersection(node.inputs) or outputs.intersection(node.outputs):
            if node.inputs and node.inputs[0] in integers and (rewrite is not None or node.op in _MOVES):
                integers.update(node.outputs)
            nodes.append(node)
            continue
        new = _Rewriter(node, opsets, used)
        rewrite(new)
        nodes += new.nodes
    return replace(graph, nodes=tuple(nodes))
