"""Reads TFLite files for the tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from ai_edge_litert import schema_py_generated as schema

_NAMES = {v: n for n, v in vars(schema.BuiltinOperator).items() if isinstance(v, int)}
_TYPES = {
    schema.TensorType.FLOAT32: np.float32,
    schema.TensorType.INT8: np.int8,
    schema.TensorType.INT16: np.int16,
    schema.TensorType.INT32: np.int32,
    schema.TensorType.INT64: np.int64,
    schema.TensorType.BOOL: np.bool_,
}


def load(path: Path) -> schema.ModelT:
    return schema.ModelT.InitFromPackedBuf(path.read_bytes(), 0)


def kinds(path: Path) -> list[str]:
    """The operators in order."""
    model = load(path)
    return [_NAMES[model.operatorCodes[o.opcodeIndex].builtinCode] for o in model.subgraphs[0].operators]


def kinds_by_input(path: Path) -> list[list[str]]:
    """The operators that depend on each input of a file of networks side by side, in order."""
    model = load(path)
    graph = model.subgraphs[0]
    lists: list[list[str]] = [[] for _ in graph.inputs]
    origin = dict(zip(graph.inputs, lists, strict=True))
    for operator in graph.operators:
        (own,) = {id(origin[i]): origin[i] for i in operator.inputs if i in origin}.values()
        own.append(_NAMES[model.operatorCodes[operator.opcodeIndex].builtinCode])
        origin.update(dict.fromkeys(operator.outputs, own))
    return lists


def facts(path: Path) -> dict[str, Any]:
    """Returns the file's metadata entry ``qtrace``."""
    model = load(path)
    entry = next(m for m in model.metadata if m.name == b"qtrace")
    return json.loads(bytes(model.buffers[entry.buffer].data))


def tensors(path: Path) -> dict[str, schema.TensorT]:
    return {t.name.decode(): t for t in load(path).subgraphs[0].tensors}


def constants(path: Path) -> dict[str, np.ndarray]:
    """Returns the constants of the file by tensor name."""
    model = load(path)
    values = {}
    for tensor in model.subgraphs[0].tensors:
        data = model.buffers[tensor.buffer].data
        if data is not None and len(data):
            value = np.frombuffer(bytes(data), _TYPES[tensor.type])
            values[tensor.name.decode()] = value.reshape(tensor.shape)
    return values
