"""Reads an ONNX file as data: nothing in it runs, and sizes are checked before memory is allocated."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import onnx
import onnx.inliner

from qtrace.errors import ExportError, ImportingError
from qtrace.importing.onnx.model import DEFAULT_DOMAINS, OF_ONNXRUNTIME, standard_opset
from qtrace.onnxfile.external_data import count_bytes, map_tensor, read_model, without_large_values
from qtrace.onnxfile.model import MAX_NODES
from qtrace.storage.files import problem

__all__ = ["MAX_ELEMENTS", "array_of", "load_model", "load_structure", "stored_tensors"]

MAX_ELEMENTS = 2**31 - 1  # of one tensor
_ANY_DOMAIN = "qtrace.onnxruntime"
_MAX_DEPTH = 16  # of functions and bodies inside of each other
_OPSETS = range(6, 29)


def load_model(path: Path) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """Reads a model, checks its structure and inlines its functions.

    Returns:
        The model without the values of its large tensors, and the values of its initializers without those
        that hold strings. Those that lie in other files are mapped into memory.

    Raises:
        ImportingError: when the file, or one of its tensors, is missing, is no ONNX model, or is damaged.
    """
    whole, model = _read(path)
    numbers = (tensor for tensor in whole.graph.initializer if tensor.data_type != onnx.TensorProto.STRING)
    try:
        _refuse_sparse(whole.graph)
        return model, {tensor.name: array_of(tensor, path) for tensor in numbers}
    except ImportingError as error:
        raise ImportingError(f"{path}: {error}") from error.__cause__


def load_structure(path: Path) -> onnx.ModelProto:
    """Reads a model as `load_model` does, without the values of its tensors, which may be missing."""
    return _read(path)[1]


def _read(path: Path) -> tuple[onnx.ModelProto, onnx.ModelProto]:
    """Returns the model as it is in the file, and the checked model without the values of large tensors."""
    if wrong := problem(path):
        raise ImportingError(wrong)
    if not path.is_file():
        raise ImportingError(f"{path} is not a file: name an ONNX model.")
    try:
        model = read_model(path)
    except ExportError as error:
        raise ImportingError(str(error)) from error
    _check_size(path, model)
    checked = without_large_values(model)
    for value in (*checked.graph.input, *checked.graph.output):
        if value.type.HasField("tensor_type"):  # runtimes leave the shape of an output to inference
            value.type.tensor_type.shape.SetInParent()
    _leave_to_onnxruntime(checked)
    try:
        onnx.checker.check_model(checked)
    except (onnx.checker.ValidationError, ValueError, RuntimeError) as error:
        raise ImportingError(f"{path} is not a valid ONNX model: {_line(error)}.") from error
    return model, _inlined(without_large_values(model), path)


def _leave_to_onnxruntime(checked: onnx.ModelProto) -> None:
    """Takes the nodes out of the check that onnxruntime has in ONNX's own domain at every opset.

    Its optimizer writes LayerNormalization into files of opsets before 17, which has it.
    """
    opset = standard_opset(checked) or 0
    own = [
        node
        for node in _all_nodes(checked.graph, {})
        if node.domain in DEFAULT_DOMAINS and opset < OF_ONNXRUNTIME.get(node.op_type, 0)
    ]
    if not own:
        return
    for node in own:
        node.domain = _ANY_DOMAIN
    checked.opset_import.append(onnx.helper.make_opsetid(_ANY_DOMAIN, 1))


def _inlined(model: onnx.ModelProto, path: Path) -> onnx.ModelProto:
    """Returns a model without functions, of an opset that qtrace reads."""
    if model.functions:
        try:
            model = onnx.inliner.inline_local_functions(model)
        except (RuntimeError, ValueError) as error:
            raise ImportingError(f"{path}: its functions cannot be inlined: {_line(error)}.") from error
    opset = standard_opset(model)
    if opset is not None and opset not in _OPSETS:
        raise ImportingError(
            f"{path} has opset {opset}; qtrace reads opsets {_OPSETS[0]} to 23, and later ones where no op "
            "has changed: convert it with onnx.version_converter."
        )
    return model


def _check_size(path: Path, model: onnx.ModelProto) -> None:
    """Refuses a model with too many nodes, a function's nodes counted at each of its calls."""
    functions = {(f.domain, f.name, f.overload): f for f in model.functions}
    for count, _ in enumerate(_all_nodes(model.graph, functions), 1):
        if count > MAX_NODES:
            raise ImportingError(f"{path} has more than {MAX_NODES:,} nodes: qtrace reads no more.")


def _all_nodes(
    graph: onnx.GraphProto | onnx.FunctionProto,
    functions: Mapping[tuple[str, str, str], onnx.FunctionProto],
    depth: int = 0,
) -> Iterator[onnx.NodeProto]:
    if depth > _MAX_DEPTH:
        raise ImportingError(f"{graph.name!r}: bodies and functions are nested more than {_MAX_DEPTH} deep.")
    for node in graph.node:
        yield node
        bodies = [a.g for a in node.attribute if a.type == onnx.AttributeProto.GRAPH]
        bodies += [body for attribute in node.attribute for body in attribute.graphs]
        called = functions.get((node.domain, node.op_type, node.overload))
        for body in bodies if called is None else [*bodies, called]:
            yield from _all_nodes(body, functions, depth + 1)


def stored_tensors(graph: onnx.GraphProto, path: Path) -> dict[str, np.ndarray]:
    """Reads the initializers of a graph.

    Args:
        graph: the graph, or the body of a node.
        path: the file, in whose folder external data lie.

    Raises:
        ImportingError: when a tensor's data are missing, of another size than its shape says, or outside of
            the folder.
    """
    _refuse_sparse(graph)
    return {tensor.name: array_of(tensor, path) for tensor in graph.initializer}


def _refuse_sparse(graph: onnx.GraphProto) -> None:
    if graph.sparse_initializer:
        raise ImportingError(
            f"{graph.sparse_initializer[0].values.name!r} is a sparse tensor: store it dense."
        )


def array_of(tensor: onnx.TensorProto, path: Path) -> np.ndarray:
    """Returns the values of a stored tensor.

    Raises:
        ImportingError: when they are strings, missing, of another size than the shape says, or lie outside
            of the folder of ``path``.
    """
    shape = tuple(tensor.dims)
    count = math.prod(shape)
    name = tensor.name or "a constant"
    if any(n < 0 for n in shape) or count > MAX_ELEMENTS:
        raise ImportingError(f"{name}: its shape {list(shape)} is not one that a tensor can have.")
    if tensor.data_type in (onnx.TensorProto.STRING, onnx.TensorProto.UNDEFINED):
        raise ImportingError(f"{name} holds strings or nothing: MegEngine has tensors of numbers only.")
    if tensor.data_location == onnx.TensorProto.EXTERNAL:
        try:
            return map_tensor(tensor, path)
        except ExportError as error:
            raise ImportingError(f"{name}: {str(error).removeprefix(f'{path}: ')}") from error
    try:
        if tensor.HasField("raw_data") and len(tensor.raw_data) != count_bytes(tensor):
            raise ValueError(f"{len(tensor.raw_data)} bytes for the shape {list(shape)}")
        return onnx.numpy_helper.to_array(tensor)
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        raise ImportingError(f"{name} cannot be read: {_line(error)}.") from error


def _line(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return (text[0] if text else type(error).__name__).rstrip(".")[:300]
