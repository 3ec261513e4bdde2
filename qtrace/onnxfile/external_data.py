"""Reads and writes ONNX files, which may come from anywhere, with the tensors that they keep in other files.

A protobuf file holds 2 GB at most. Tensors in other files are mapped into memory: a tensor takes memory while
its values are read, and gives it back by `release`.
"""

from __future__ import annotations

import importlib.util
import math
import mmap
import os
import re
from collections import defaultdict
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass
from mmap import ALLOCATIONGRANULARITY
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from qtrace.display import format_bytes
from qtrace.errors import ExportError, install
from qtrace.storage.files import check_size

if TYPE_CHECKING:
    import onnx
else:

    class _Onnx:
        """The package, which is imported when its first name is read: it comes with an extra."""

        def __getattr__(self, name: str) -> Any:
            import onnx

            return getattr(onnx, name)

    onnx = _Onnx()

__all__ = [
    "LIMIT",
    "count_bytes",
    "describe_growth",
    "find_external",
    "load_model",
    "load_tensors",
    "map_tensor",
    "onnx",
    "read_model",
    "release",
    "skeleton",
    "split_off",
    "tensor_bytes",
    "tensor_files",
    "without_large_values",
]

# Bytes of tensors from which on they are stored outside; the rest of the file needs some of the 2 GB.
LIMIT = 2**31 - 2**24

# Smaller tensors stay inside: shapes and scales, which runtimes read while they load the graph.
_MIN_BYTES_OUTSIDE = 1024


@dataclass(frozen=True)
class TensorPlace:
    """Where a tensor lies.

    Attributes:
        file: the file next to the model.
        offset: the first byte.
        length: the number of bytes.
    """

    file: Path
    offset: int
    length: int

    def map(self) -> np.ndarray:
        """Returns the bytes as an array of uint8 that is mapped into memory."""
        if not self.length:
            return np.empty(0, np.uint8)
        return np.asarray(np.memmap(self.file, np.uint8, "r", self.offset, (self.length,)))


def find_external(model: Any, path: Path) -> list[tuple[Any, TensorPlace]]:
    """Finds the tensors of a model that lie in other files.

    Args:
        model: the model, without them.
        path: its file.

    Raises:
        ExportError: when the file of a tensor is missing, not whole, or outside of the model's folder.
    """
    tensors = (*model.graph.initializer, *_tensors_of_nodes(model.graph.node))
    return [(t, _place(t, path)) for t in tensors if t.data_location == onnx.TensorProto.EXTERNAL]


def tensor_files(path: Path, model: Any = None) -> list[Path]:
    """Returns the files next to a model in which its tensors lie.

    Args:
        path: the model's file.
        model: the model, without them; None to read it.

    Raises:
        ExportError: when one of them is missing, not whole, or outside of the model's folder.
    """
    return sorted({place.file for _, place in find_external(model or read_model(path), path)})


def _tensors_of_nodes(nodes: Iterable[Any]) -> Iterator[Any]:
    """Yields the tensors in attributes of nodes, and the tensors of their bodies."""
    for node in nodes:
        for attribute in node.attribute:
            yield from (*([attribute.t] if attribute.HasField("t") else ()), *attribute.tensors)
            for graph in (*([attribute.g] if attribute.HasField("g") else ()), *attribute.graphs):
                yield from graph.initializer
                yield from _tensors_of_nodes(graph.node)


def load_tensors(places: Iterable[tuple[Any, TensorPlace]]) -> None:
    """Copies tensors that `find_external` found into their model."""
    for tensor, place in places:
        tensor.raw_data = place.map().tobytes()
        tensor.ClearField("external_data")
        tensor.ClearField("data_location")


def map_tensor(tensor: Any, path: Path) -> np.ndarray:
    """Returns the values of an external tensor, mapped into memory where their type is one of numpy's.

    Args:
        tensor: the tensor.
        path: the file of its model.

    Raises:
        ExportError: when the file of the tensor is missing, not whole, or outside of the model's folder.
    """
    place = _place(tensor, path)
    dtype = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type))
    if place.length == dtype.itemsize * math.prod(tensor.dims):
        return place.map().view(dtype).reshape(tuple(tensor.dims))
    raw = place.map().tobytes()  # several values in a byte
    packed = onnx.TensorProto(data_type=tensor.data_type, dims=tensor.dims, raw_data=raw)
    return np.asarray(onnx.numpy_helper.to_array(packed))


def release(array: np.ndarray) -> None:
    """Gives the memory of a mapped array back; its values are read again where somebody needs them."""
    base: Any = array
    while isinstance(base, np.ndarray):
        base = base.base
    if isinstance(base, mmap.mmap):
        base.madvise(mmap.MADV_DONTNEED)


def _place(tensor: Any, path: Path) -> TensorPlace:
    """Reads where a tensor lies.

    Raises:
        ExportError: when its file is missing, not whole, or outside of the model's folder.
    """
    entries = {entry.key: entry.value for entry in tensor.external_data}
    file = _tensor_file(path, entries.get("location", ""))
    try:
        needed = count_bytes(tensor)
    except (KeyError, ValueError, TypeError) as error:
        raise ExportError(f"{path}: tensor {tensor.name!r} lacks a type of ONNX: {error}.") from error
    try:
        offset, length = int(entries.get("offset", 0)), int(entries.get("length", needed))
    except ValueError:
        offset, length = -1, -1
    if min(offset, length) < 0:
        raise ExportError(
            f"{path}: tensor {tensor.name!r} lacks a whole number for its place in {file.name}: the file "
            "is damaged; export it again."
        )
    if not file.is_file():
        raise ExportError(
            f"{file} does not exist: it holds the tensors of {path.name}, so keep them together."
        )
    if length != needed or file.stat().st_size < offset + length:
        raise ExportError(
            f"{file} is not whole: {path.name} needs {offset + needed} bytes of it; export it again."
        )
    return TensorPlace(file, offset, length)


def count_bytes(tensor: Any) -> int:
    """Returns the number of bytes that the values of a tensor take, several of few bits in one byte.

    Raises:
        KeyError: when ONNX lacks the type.
        ValueError: as KeyError.
        TypeError: as KeyError.
    """
    bits = 8 * np.dtype(onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type)).itemsize
    named = re.search(r"\d+", onnx.TensorProto.DataType.Name(tensor.data_type))
    if named:
        bits = min(bits, int(named.group()))
    return -(-math.prod(tensor.dims) * bits // 8)


def _tensor_file(path: Path, location: str) -> Path:
    """Returns the file of tensors that the ONNX file at ``path`` calls ``location``.

    Raises:
        ExportError: when the file is outside the folder of the ONNX file, which ONNX forbids.
    """
    folder = os.path.realpath(path.parent)
    try:
        real = os.path.realpath(os.path.join(folder, location))
    except ValueError:  # a zero byte
        real = ""
    if not location or os.path.isabs(location) or not real.startswith(os.path.join(folder, "")):
        raise ExportError(
            f"{path} keeps tensors in {location!r}, which is not a file in its own folder: keep both files "
            "in one folder, or export the module again."
        )
    return path.parent / location


def _large(model: Any) -> list[Any]:
    return [t for t in model.graph.initializer if len(t.raw_data) >= _MIN_BYTES_OUTSIDE]


def skeleton(model: Any) -> Any:
    """Copies a model for checks, with large tensors as inputs of the same name, type and shape."""
    large = _large(model)
    copy = _without(model, {tensor.name for tensor in large})
    for tensor in large:
        info = onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims))
        copy.graph.input.append(info)
    return copy


def without_large_values(model: Any) -> Any:
    """Copies a model with empty tensors in place of those that are large, or lie in other files."""
    external = [t for t in model.graph.initializer if t.data_location == onnx.TensorProto.EXTERNAL]
    empty = [t for t in model.graph.initializer if t.ByteSize() >= _MIN_BYTES_OUTSIDE]
    names = {tensor.name for tensor in (*external, *empty)}
    copy = _without(model, names)
    for name in names:
        copy.graph.initializer.add(name=name, data_type=onnx.TensorProto.FLOAT, dims=[0], raw_data=b"")
    return copy


def _without(model: Any, names: Container[str]) -> Any:
    """Copies a model without some of its initializers."""
    copy = onnx.ModelProto()
    _copy_fields(model, copy, "graph")
    _copy_fields(model.graph, copy.graph, "initializer")
    copy.graph.initializer.extend(t for t in model.graph.initializer if t.name not in names)
    return copy


def _copy_fields(source: Any, target: Any, left_out: str) -> None:
    """Copies all fields of a protobuf message but one, which may be too large for a copy."""
    for field, value in source.ListFields():
        if field.name == left_out:
            continue
        if hasattr(value, "extend"):
            getattr(target, field.name).extend(value)
        elif hasattr(value, "CopyFrom"):
            getattr(target, field.name).CopyFrom(value)
        else:
            setattr(target, field.name, value)


def tensor_bytes(model: Any) -> int:
    """Returns the bytes of all initializers of a model."""
    return sum(tensor.ByteSize() for tensor in model.graph.initializer)


def split_off(model: Any, location: str) -> tuple[Any, Iterator[bytes]]:
    """Splits the large tensors off a model.

    Args:
        model: the model, which must not change until the pieces are written.
        location: the name of the tensors' file, next to the model's.

    Returns:
        A copy of the model whose large tensors are in that file, or the model itself without any; and the
        content of that file, one tensor at a time.
    """
    large = {tensor.name for tensor in _large(model)}
    if not large:
        return model, iter(())
    light = _without(model, {tensor.name for tensor in model.graph.initializer})
    end = 0
    for tensor in model.graph.initializer:
        if tensor.name not in large:
            light.graph.initializer.append(tensor)
            continue
        moved = light.graph.initializer.add(name=tensor.name, data_type=tensor.data_type, dims=tensor.dims)
        moved.doc_string, moved.data_location = tensor.doc_string, onnx.TensorProto.EXTERNAL
        offset = end + -end % ALLOCATIONGRANULARITY
        end = offset + len(tensor.raw_data)
        entries = {"location": location, "offset": offset, "length": end - offset}
        for key, value in entries.items():
            moved.external_data.add(key=key, value=str(value))
    return light, _pieces(model, large)


def _pieces(model: Any, names: Container[str]) -> Iterator[bytes]:
    """Yields the values of some tensors, each begun at an address that can be mapped."""
    end = 0
    for tensor in model.graph.initializer:
        if tensor.name in names:
            data = tensor.raw_data
            yield bytes(-end % ALLOCATIONGRANULARITY)
            yield data
            end += -end % ALLOCATIONGRANULARITY + len(data)


def read_model(path: Path) -> Any:
    """Reads an ONNX file as a ``ModelProto``, without the tensors that it keeps in other files.

    Raises:
        ExportError: when the file is missing, damaged, too large or of another kind, or the package onnx is
            missing.
    """
    if importlib.util.find_spec("onnx") is None:
        raise ExportError(f"reading ONNX files needs the package onnx: run {install('onnx')}.")
    from google.protobuf import json_format, message, text_format

    wrong = (message.DecodeError, json_format.ParseError, text_format.ParseError, onnx.parser.ParseError)
    check_size(path, "ONNX")
    try:
        model = onnx.load(str(path), load_external_data=False)
    except (*wrong, OSError, RecursionError, ValueError) as error:
        raise ExportError(f"{path} is not an ONNX file, or not all of one: {error}.") from error
    if not model.graph.node and not model.graph.output:
        raise ExportError(f"{path} is not an ONNX file: it lacks a graph.")
    return model


def load_model(path: Path) -> tuple[Any, Path | None]:
    """Reads an ONNX file with its tensors.

    Returns:
        The model, and the folder of its external tensors if they are too large to be loaded, else None.

    Raises:
        ExportError: when the file, or the file of its tensors, is missing, damaged or of another kind.
    """
    model = read_model(path)
    external = find_external(model, path)
    if sum(place.length for _, place in external) >= LIMIT:
        return model, path.parent
    load_tensors(external)
    return model, None


def describe_growth(path: Path, source: Path) -> str:
    """Says that a file is larger than its source, by how much, and through which tensors; "" if it is not.

    Args:
        path: the file.
        source: the file that it was made of.
    """
    graphs = [read_model(file).graph for file in (path, source)]
    sizes = [_count_all(*pair) for pair in zip((path, source), graphs, strict=True)]
    if sizes[0] <= sizes[1]:
        return ""
    known = defaultdict[int, list[int]](list)
    for tensor in _tensors(graphs[1]):
        known[math.prod(tensor.dims)].append(count_bytes(tensor))
    grown = []
    for tensor in graphs[0].initializer:
        equal = known[math.prod(tensor.dims)]
        grown.append((count_bytes(tensor) - (equal.pop() if equal else 0), tensor.name))
    grown.append((sizes[0] - sizes[1] - sum(more for more, _ in grown), "its nodes and names"))
    grown = sorted((pair for pair in grown if format_bytes(max(pair[0], 0)) != format_bytes(0)), reverse=True)
    shown = ", ".join(f"{name} (+{format_bytes(more)})" for more, name in grown[:3]) or "its nodes"
    own, before = map(format_bytes, sizes)
    return f"size: {own}, {sizes[0] / sizes[1]:.2f} times the {before} of {source.name}, through {shown}"


def _count_all(path: Path, graph: Any) -> int:
    """Returns the bytes of a file and of the tensors that it keeps in others."""
    return path.stat().st_size + sum(count_bytes(t) for t in graph.initializer if t.data_location)


def _tensors(graph: Any) -> list[Any]:
    """Returns the stored tensors of a graph; some files have them as nodes."""
    constants = (a.t for node in graph.node if node.op_type == "Constant" for a in node.attribute)
    return [*graph.initializer, *(tensor for tensor in constants if tensor.data_type)]
