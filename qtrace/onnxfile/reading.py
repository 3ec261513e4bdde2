"""Reads ONNX files that may come from anywhere, with the tensors that they keep in other files."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from qtrace.errors import ExportError, install
from qtrace.onnxfile.external_data import LIMIT, find_external, load_tensors
from qtrace.storage.files import check_size

__all__ = ["load_model", "read_model"]


def read_model(path: Path) -> Any:
    """Reads an ONNX file as a ``ModelProto``, without the tensors that it keeps in other files.

    Raises:
        ExportError: when the file is missing, damaged, too large or of another kind, or the package onnx is
            missing.
    """
    if importlib.util.find_spec("onnx") is None:
        raise ExportError(f"reading ONNX files needs the package onnx: run {install('onnx')}.")
    import onnx
    from google.protobuf.message import DecodeError

    check_size(path, "ONNX")
    try:
        model = onnx.load(str(path), load_external_data=False)
    except (DecodeError, OSError, RecursionError, ValueError) as error:
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
