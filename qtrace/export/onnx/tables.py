"""Tables of floats that are 8-bit integers times a scale, as files store look-ups, written as integers.

A file may store the rows of a table in 8 bits. Its float graph has the same numbers as floats, so the export
finds the integers again: exactly, or the table stays as it is. Only the rows that are read become floats.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from onnx import TensorProto, helper, numpy_helper

from qtrace.graph.names import unused_name
from qtrace.onnxfile.model import OnnxModel

__all__ = ["write_integer_tables"]


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
            numpy_helper.from_array(part, _claim(f"{tensor.name}_{end}", names))
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
    rows, floats = (_claim(f"{output}_{end}", names) for end in ("rows", "levels"))
    node.input[0], node.output[0] = integers, rows
    added = [helper.make_node("Cast", [rows], [floats], name=floats, to=TensorProto.FLOAT)]
    if by_row:
        row_scales = _claim(f"{output}_scales", names)
        added.append(helper.make_node("Gather", [scales, node.input[1]], [row_scales], name=row_scales))
        scales = row_scales
    added.append(helper.make_node("Mul", [floats, scales], [output], name=_claim(f"{output}_scaled", names)))
    place = list(graph.node).index(node) + 1
    for new in reversed(added):
        graph.node.insert(place, new)


def _claim(name: str, names: set[str]) -> str:
    new = unused_name(name, names.__contains__)
    names.add(new)
    return new


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
