"""Stored tensors in fewer bytes, without a change of a number.

Tensors that hold some numbers again and again, or count, written as the nodes that compute them.

An import stores what a file computes of constants, such as an Expand, Tile or Range. Runtimes
do so, too, when they load a file; the file itself is smaller if it says how.

Tables of floats that are 8-bit integers times a scale, as files store look-ups, written as integers.

A file may store the rows of a table in 8 bits. Its float graph has the same numbers as floats, so the export
finds the integers again: exactly, or the table stays as it is. Only the rows that are read become floats.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from onnx import TensorProto, helper, numpy_helper

from qtrace.export.onnx.naming import claim_name
from qtrace.onnxfile.model import OnnxModel

__all__ = ["write_integer_tables", "write_repeated"]

_ELEMENTWISE = {"Add", "Sub", "Mul", "Div", "Max", "Min", "Pow", "Where", "Concat"}
"""What takes computed operands in every runtime, where a layer may need a stored weight."""


def write_repeated(model: Any, integers: bool) -> None:
    """Writes stored operands of elementwise ops as nodes where that takes fewer bytes.

    Args:
        model: the model; it is changed in place.
        integers: whether the target takes computed integers before a DequantizeLinear, too.
    """
    index = OnnxModel(model)
    names, outputs, graph = index.names(), index.output_names, model.graph
    for tensor in list(graph.initializer):
        readers = index.readers.get(tensor.name, [])
        if integers and all(r.op_type == "DequantizeLinear" and r.input[0] == tensor.name for r in readers):
            readers = [each for reader in readers for each in index.readers.get(reader.output[0], [])]
        if tensor.name in outputs or not readers or not {r.op_type for r in readers} <= _ELEMENTWISE:
            continue
        steps = _steps(numpy_helper.to_array(tensor))
        stored, nodes = list[Any](), list[Any]()
        for place, (op, arrays) in enumerate(steps):
            for part in arrays:
                stored.append(numpy_helper.from_array(part, claim_name(f"{tensor.name}_part", names)))
            last = place == len(steps) - 1
            inputs = [item.name for item in stored[len(stored) - len(arrays) :]]
            inputs = [nodes[-1].output[0], *inputs] if nodes else inputs
            output = tensor.name if last else claim_name(f"{tensor.name}_{op}", names)
            nodes.append(helper.make_node(op, inputs, [output], name=output))
        if steps and sum(item.ByteSize() for item in (*stored, *nodes)) < tensor.ByteSize():
            graph.initializer.remove(tensor)
            graph.initializer.extend(stored)
            for node in reversed(nodes):
                graph.node.insert(0, node)


def _steps(values: np.ndarray) -> list[tuple[str, list[np.ndarray]]]:
    """Returns the ops that compute values, each with the stored tensors that it reads."""
    part, repeats = values, []
    for axis, size in enumerate(values.shape):
        period = (
            next(n for n in range(1, size + 1) if not size % n and _repeats(part, axis, n)) if size else 0
        )
        repeats.append(size // period if period else 1)
        part = part.take(range(period), axis)
    flat = part.reshape(-1)
    steps: list[tuple[str, list[np.ndarray]]] = []
    if part.size > 1 and part.dtype.name in ("float32", "int32", "int64") and _counts(flat):
        step = flat[1] - flat[0]
        steps.append(("Range", [np.array(n, flat.dtype) for n in (flat[0], flat[-1] + step, step)]))
        if part.ndim != 1:
            steps.append(("Reshape", [np.array(part.shape, np.int64)]))
    if part.size < values.size:
        counts = np.array(repeats, np.int64)
        steps.append(("Tile", [counts] if steps else [part, counts]))
    return steps


def _repeats(values: np.ndarray, axis: int, period: int) -> bool:
    first = values.take(range(period), axis)
    folded = np.moveaxis(values, axis, 0).reshape(-1, period, values.size // values.shape[axis])
    return bool((folded == np.moveaxis(first, axis, 0).reshape(1, period, -1)).all())


def _counts(flat: np.ndarray) -> bool:
    """Whether numbers are whole ones at equal distances, which every runtime computes alike."""
    step = flat[1] - flat[0]
    whole = bool(step) and np.array_equal(flat, np.rint(flat)) and np.abs(flat).max() < 2**24
    return bool(whole and np.array_equal(flat, flat[0] + step * np.arange(flat.size, dtype=flat.dtype)))


def write_integer_tables(model: Any) -> None:
    """Writes tables that only look-ups of rows read as integers, in place, where no number changes."""
    index = OnnxModel(model)
    names, graph = index.names(), model.graph
    for tensor in list(graph.initializer):
        readers = index.readers.get(tensor.name, [])
        looked_up = all(
            node.op_type == "Gather" and node.input[0] == tensor.name and not any(a.i for a in node.attribute)
            for node in readers
        )
        if not readers or not looked_up or tensor.data_type != TensorProto.FLOAT or len(tensor.dims) != 2:
            continue
        found = _integers(numpy_helper.to_array(tensor))
        if found is None:
            continue
        integers, scales = (
            numpy_helper.from_array(part, claim_name(f"{tensor.name}_{end}", names))
            for part, end in zip(found, ("int", "scale"), strict=True)
        )
        nodes = sum(3 * node.ByteSize() for node in readers)  # that many nodes make the floats
        if integers.ByteSize() + scales.ByteSize() + nodes >= tensor.ByteSize():
            continue
        graph.initializer.remove(tensor)
        graph.initializer.extend([integers, scales])
        for node in readers:
            _look_up(graph, node, integers.name, scales.name, found[1].ndim > 0, names)


def _look_up(graph: Any, node: Any, integers: str, scales: str, by_row: bool, names: set[str]) -> None:
    """Lets a Gather read integers, and makes floats of the rows that it gives."""
    output = node.output[0]
    rows, floats = (claim_name(f"{output}_{end}", names) for end in ("rows", "levels"))
    node.input[0], node.output[0] = integers, rows
    added = [helper.make_node("Cast", [rows], [floats], name=floats, to=TensorProto.FLOAT)]
    if by_row:
        row_scales = claim_name(f"{output}_scales", names)
        added.append(helper.make_node("Gather", [scales, node.input[1]], [row_scales], name=row_scales))
        scales = row_scales
    added.append(
        helper.make_node("Mul", [floats, scales], [output], name=claim_name(f"{output}_scaled", names))
    )
    place = list(graph.node).index(node) + 1
    for new in reversed(added):
        graph.node.insert(place, new)


def _integers(table: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
    """Returns int8 and one scale, or one for each row, whose products are the table; None without them."""
    if not np.isfinite(table).all() or not table.size or _levels(table[:1]) is None:
        return None
    if (whole := _levels(table.reshape(1, -1))) is not None:
        return whole[0].reshape(table.shape), whole[1].reshape(())
    return _levels(table)


def _levels(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
    """Returns the integers of rows and a scale for each; None if a row lacks them.

    Neighbours in order are one step apart, or several where levels are missing.
    """
    gaps = np.diff(np.sort(np.concatenate([rows, np.zeros((len(rows), 1), rows.dtype)], 1)))
    least = np.where(gaps > 0, gaps, np.inf).min(1).astype(np.float64)
    largest = np.abs(rows).max(1).astype(np.float64)
    integers, scales = np.zeros(rows.shape, np.int8), np.ones((len(rows), 1), np.float32)
    left, count = np.flatnonzero(largest), 0
    while left.size:
        count += 1
        last = np.rint(count * largest[left] / least[left])
        if (last > np.iinfo(np.int8).max + 1).any():
            return None
        near = (largest[left] / last).astype(np.float32)[:, None]
        done = np.zeros(len(left), bool)
        for scale in (near, np.nextafter(near, np.float32(0)), np.nextafter(near, np.float32(np.inf))):
            levels = np.rint(rows[left] / scale)
            exact = ((levels * scale == rows[left]) & (np.abs(levels + 0.5) < 128)).all(1) & ~done
            integers[left[exact]], scales[left[exact]] = levels[exact], scale[exact]
            done |= exact
        left = left[~done]
    return integers, scales
