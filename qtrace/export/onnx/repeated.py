"""Tensors that hold some numbers again and again, or count, written as the nodes that compute them.

An import stores what a file computes of constants, such as an Expand, Tile or Range. Runtimes
do so, too, when they load a file; the file itself is smaller if it says how.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from onnx import helper, numpy_helper

from qtrace.graph.names import unused_name
from qtrace.onnxfile.model import OnnxModel

__all__ = ["write_repeated"]

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
                stored.append(numpy_helper.from_array(part, _claim(f"{tensor.name}_part", names)))
            last = place == len(steps) - 1
            inputs = [item.name for item in stored[len(stored) - len(arrays) :]]
            inputs = [nodes[-1].output[0], *inputs] if nodes else inputs
            output = tensor.name if last else _claim(f"{tensor.name}_{op}", names)
            nodes.append(helper.make_node(op, inputs, [output], name=output))
        if steps and sum(item.ByteSize() for item in (*stored, *nodes)) < tensor.ByteSize():
            graph.initializer.remove(tensor)
            graph.initializer.extend(stored)
            for node in reversed(nodes):
                graph.node.insert(0, node)


def _claim(name: str, names: set[str]) -> str:
    new = unused_name(name, names.__contains__)
    names.add(new)
    return new


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
