"""ONNX files with their integer tensors as outputs, for the runtimes that read ONNX."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qtrace.errors import ExportError
from qtrace.verification.runtimes.base import check_size

__all__ = ["Exposed", "with_integer_outputs"]

# Of a model with its tensors in one piece: what a protobuf file holds, less some room for the rest.
_LIMIT = 2**31 - 2**24

# The types of 4 bits by their numbers in ONNX, and what holds their values.
_WIDER = {22: 3, 21: 2}  # int4 -> int8, uint4 -> uint8
_SUFFIX = "_as_8_bits"


@dataclass(frozen=True)
class Exposed:
    """A model whose integer tensors are outputs, too.

    Attributes:
        data: the file.
        outputs: names of the model's own outputs.
        integers: names of the sites.
        tensors: the names of their integers, in that order; these outputs follow the model's own.
        folder: where the file of tensors lies that ``data`` refers to; None where it needs none.
        graph_hash: of the graph that was exported; "" where the file does not tell.
    """

    data: bytes
    outputs: list[str]
    integers: list[str]
    tensors: list[str]
    folder: Path | None = None
    graph_hash: str = ""


def with_integer_outputs(path: Path) -> Exposed:
    """Reads an ONNX file and makes the result of every QuantizeLinear an output.

    Raises:
        ExportError: when the file, or the file of its tensors, is missing or is something else.
    """
    if importlib.util.find_spec("onnx") is None:
        raise ExportError("verification needs the package onnx: run pip install 'qtrace[onnx]'.")
    import onnx

    check_size(path, "ONNX")
    try:
        model = onnx.load(str(path), load_external_data=False)
    except Exception as error:
        raise ExportError(f"{path} is not an ONNX file, or not all of one: {error}.") from error
    if not model.graph.node and not model.graph.output:
        raise ExportError(f"{path} is not an ONNX file: it has no graph.")
    folder = _take_in(model, path)
    outputs = [o.name for o in model.graph.output]
    integers: list[str] = []
    tensors: list[str] = []
    stored = {t.name: t.data_type for t in model.graph.initializer}
    for node in model.graph.node:
        if node.op_type == "QuantizeLinear":
            name = node.output[0]
            integers.append(name.removesuffix("_int"))
            kind = stored.get(node.input[2]) if len(node.input) > 2 else None
            if kind is None:
                raise ExportError(
                    f"{path}: QuantizeLinear {name!r} has no stored zero point: qtrace.export did not write "
                    "this file; export the module again."
                )
            if kind in _WIDER:  # numpy has no type of 4 bits
                kind, wide = _WIDER[kind], f"{name}{_SUFFIX}"
                model.graph.node.append(onnx.helper.make_node("Cast", [name], [wide], to=kind))
                name = wide
            model.graph.output.append(onnx.helper.make_tensor_value_info(name, kind, None))
            tensors.append(name)
    facts = {p.key: p.value for p in model.metadata_props}
    data = model.SerializeToString()
    return Exposed(data, outputs, integers, tensors, folder, facts.get("qtrace.graph", ""))


def _take_in(model: Any, path: Path) -> Path | None:
    """Loads tensors that lie in other files into ``model``; if they are too many, returns their folder."""
    import onnx

    outside = [t for t in model.graph.initializer if t.data_location == onnx.TensorProto.EXTERNAL]
    size = 0
    for tensor in outside:
        where = {e.key: e.value for e in tensor.external_data}
        file = _beside(path, where.get("location", ""))
        try:
            offset, length = int(where.get("offset", 0)), int(where.get("length", 0))
        except ValueError:
            offset, length = -1, -1
        if min(offset, length) < 0:
            raise ExportError(
                f"{path}: tensor {tensor.name!r} has no whole number for its place in {file.name}: the file "
                "is damaged; export it again."
            )
        if not file.is_file():
            raise ExportError(
                f"{file} does not exist: it holds the tensors of {path.name}, so keep them together."
            )
        if file.stat().st_size < offset + length:
            raise ExportError(
                f"{file} is not whole: {path.name} needs {offset + length} bytes of it; export it again."
            )
        size += length
    if size >= _LIMIT:
        return path.parent
    try:
        onnx.external_data_helper.load_external_data_for_model(model, str(path.parent))
    except Exception as error:  # of tensors within nodes, which qtrace.export does not write
        line = " ".join(str(error).split())[:200]
        raise ExportError(f"{path}: its tensors in other files cannot be read: {line}") from error
    return None


def _beside(path: Path, location: str) -> Path:
    """The file of tensors that an ONNX file calls ``location``.

    Raises:
        ExportError: when it is not in the folder of the ONNX file, as ONNX demands.
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
