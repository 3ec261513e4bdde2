"""Reads an ONNX file as data: nothing in it runs, and sizes are checked before memory is allocated."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import onnx.inliner
from google.protobuf.message import DecodeError

from qtrace.errors import ImportingError
from qtrace.storage.files import problem

__all__ = ["MAX_ELEMENTS", "array_of", "load_model", "stored_tensors"]

MAX_ELEMENTS = 2**31 - 1  # of one tensor
_MAX_NODES = 200_000
_MAX_DEPTH = 16  # of functions and bodies inside of each other
_OPSETS = range(6, 29)


def load_model(path: Path) -> onnx.ModelProto:
    """Reads a model without its external data, checks its structure and inlines its functions.

    Raises:
        ImportingError: when the file is missing, is no ONNX model, or is damaged.
    """
    if wrong := problem(path):
        raise ImportingError(wrong)
    if not path.is_file():
        raise ImportingError(f"{path} is not a file: name an ONNX model.")
    try:
        model = onnx.load_model_from_string(path.read_bytes())
    except (DecodeError, RecursionError, ValueError) as error:
        raise ImportingError(f"{path} is not an ONNX model, or is damaged: {_line(error)}.") from error
    if not model.graph.node and not model.graph.output:
        raise ImportingError(f"{path} has no graph: is it an ONNX model?")
    _check_size(path, model)
    try:
        onnx.checker.check_model(_to_check(model))
    except (onnx.checker.ValidationError, ValueError, RuntimeError) as error:
        raise ImportingError(f"{path} is not a valid ONNX model: {_line(error)}.") from error
    if model.functions:
        try:
            model = onnx.inliner.inline_local_functions(model)
        except (RuntimeError, ValueError) as error:
            raise ImportingError(f"{path}: its functions cannot be inlined: {_line(error)}.") from error
        _check_size(path, model)
    opset = next((o.version for o in model.opset_import if o.domain in ("", "ai.onnx")), 1)
    if opset not in _OPSETS:
        raise ImportingError(
            f"{path} has opset {opset}; qtrace reads opsets {_OPSETS[0]} to 23, and later ones where no op "
            "has changed: convert it with onnx.version_converter."
        )
    return model


def _check_size(path: Path, model: onnx.ModelProto) -> None:
    for count, _ in enumerate(_all_nodes(model.graph, 0), 1):
        if count > _MAX_NODES:
            raise ImportingError(f"{path} has more than {_MAX_NODES:,} nodes: qtrace reads no more.")


def _all_nodes(graph: onnx.GraphProto, depth: int) -> Iterator[onnx.NodeProto]:
    if depth > _MAX_DEPTH:
        raise ImportingError(f"graph {graph.name!r}: bodies are nested more than {_MAX_DEPTH} deep.")
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                yield from _all_nodes(attribute.g, depth + 1)
            for body in attribute.graphs:
                yield from _all_nodes(body, depth + 1)


def _to_check(model: onnx.ModelProto) -> bytes:
    """Returns the model for ONNX's checker: without weights, and with a shape for each input and output.

    The checker would look for external data in the current folder, and refuse what runtimes accept: an output
    whose shape the file leaves to inference.
    """
    copied = onnx.ModelProto()
    copied.CopyFrom(model)
    for tensor in copied.graph.initializer:
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            tensor.ClearField("external_data")
            tensor.ClearField("data_location")
            del tensor.dims[:]
            tensor.dims.append(0)
            tensor.raw_data = b""
    for value in (*copied.graph.input, *copied.graph.output):
        if value.type.HasField("tensor_type"):
            value.type.tensor_type.shape.SetInParent()
    return copied.SerializeToString()


def stored_tensors(graph: onnx.GraphProto, folder: Path) -> dict[str, np.ndarray]:
    """Reads the initializers of a graph.

    Args:
        graph: the graph, or the body of a node.
        folder: the folder of the file, in which external data lie.

    Raises:
        ImportingError: when a tensor's data are missing, of another size than its shape says, or outside of
            the folder.
    """
    if graph.sparse_initializer:
        raise ImportingError(
            f"{graph.sparse_initializer[0].values.name!r} is a sparse tensor: store it dense."
        )
    return {tensor.name: array_of(tensor, folder) for tensor in graph.initializer}


def array_of(tensor: onnx.TensorProto, folder: Path) -> np.ndarray:
    """Returns the values of a stored tensor.

    Raises:
        ImportingError: when they are strings, missing, of another size than the shape says, or lie outside
            of ``folder``.
    """
    shape = tuple(tensor.dims)
    count = math.prod(shape)
    name = tensor.name or "a constant"
    if any(n < 0 for n in shape) or count > MAX_ELEMENTS:
        raise ImportingError(f"{name}: its shape {list(shape)} is not one that a tensor can have.")
    if tensor.data_type in (onnx.TensorProto.STRING, onnx.TensorProto.UNDEFINED):
        raise ImportingError(f"{name} holds strings or nothing: MegEngine has tensors of numbers only.")
    if tensor.data_location == onnx.TensorProto.EXTERNAL:
        return _external(tensor, folder, name, shape, count)
    try:
        dtype = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type))
        packed = dtype.itemsize * count if dtype.name in np.sctypeDict else None
        if tensor.HasField("raw_data") and packed is not None and len(tensor.raw_data) != packed:
            raise ValueError(f"{len(tensor.raw_data)} bytes for the shape {list(shape)}")
        return onnx.numpy_helper.to_array(tensor)
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        raise ImportingError(f"{name} cannot be read: {_line(error)}.") from error


def _external(
    tensor: onnx.TensorProto, folder: Path, name: str, shape: tuple[int, ...], count: int
) -> np.ndarray:
    entries = {entry.key: entry.value for entry in tensor.external_data}
    location = entries.get("location", "")
    path = (folder / location).resolve()
    if not location or not path.is_relative_to(folder.resolve()) or Path(location).is_absolute():
        raise ImportingError(f"{name}: its data would be at {location!r}, outside of the model's folder.")
    if not path.is_file():
        raise ImportingError(f"{name}: {location!r} is missing in {folder}: keep it beside the model.")
    try:
        dtype = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type))
        offset = int(entries.get("offset", 0))
        length = int(entries.get("length", dtype.itemsize * count))
    except (KeyError, ValueError) as error:
        raise ImportingError(f"{name}: its external data cannot be read: {_line(error)}.") from error
    if length != dtype.itemsize * count or offset < 0 or offset + length > path.stat().st_size:
        raise ImportingError(
            f"{name}: {location!r} has no {dtype.itemsize * count} bytes at {offset}: is the file whole?"
        )
    values = np.fromfile(path, dtype, count, offset=offset)
    return values.reshape(shape)


def _line(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return (text[0] if text else type(error).__name__).rstrip(".")[:300]
