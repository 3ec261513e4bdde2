"""QuantizeLinear and DequantizeLinear: a pair is a noted rounding, stored integers are stored floats.

QuantizeLinear gives a `QuantizedIntegers` value, which ops that only move values pass on. DequantizeLinear
ends it.
`grids` reads scale and zero point, `operators` writes ops such as QLinearConv as such pairs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import megengine.functional as F
import megengine.module as M
import numpy as np

from qtrace.graph.origin import joined
from qtrace.graph.types import CallFunction, CallMethod, TensorNode
from qtrace.importing.onnx.call import Call
from qtrace.importing.onnx.layers import Layers, Refusal
from qtrace.importing.onnx.model import OnnxNode
from qtrace.importing.onnx.moving import PARTS, moves_of, unchanged
from qtrace.importing.onnx.naming import is_anonymous
from qtrace.importing.onnx.quantization.grids import dequantize, quantize, read_grid, stored_name
from qtrace.importing.onnx.values import Computed, QuantizedIntegers, Stored, Value
from qtrace.preparation.passes.quantized_file import FileRounding, StoredGrid

__all__ = ["MOVES", "PAIRS", "follow_stored", "lower_pair", "unwrap", "wrap"]

PAIRS = {(d, op) for d in ("", "com.microsoft") for op in ("QuantizeLinear", "DequantizeLinear")}
MOVES = {
    *("MaxPool", "Reshape", "Transpose", "Flatten", "Squeeze", "Unsqueeze", "Slice", "Split", "Gather"),
    *("Identity", "Expand", "Tile", "DepthToSpace", "SpaceToDepth", "Concat", "Dropout"),
}
_LAYERS = (M.Conv1d, M.Conv2d, M.Conv3d, M.ConvTranspose2d, M.Linear)


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
