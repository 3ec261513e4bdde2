"""Reads ONNX files that may come from anywhere, with the tensors that they keep in other files."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

from qtrace.errors import ExportError, install
from qtrace.verification.runtimes.base import check_size

__all__ = ["load_onnx"]

# A protobuf file holds 2 GiB; 16 MiB of it are left for what is not a tensor.
_MAX_TENSOR_BYTES = 2**31 - 2**24


def load_onnx(path: Path) -> tuple[Any, Path | None]:
    """Reads an ONNX file.

    Returns:
        The model, and the folder of its external tensors if they are too large to be loaded, else None.

    Raises:
        ExportError: when the file, or the file of its tensors, is missing, damaged or of another kind.
    """
    if importlib.util.find_spec("onnx") is None:
        raise ExportError(f"verification needs the package onnx: run {install('onnx')}.")
    import onnx
    from google.protobuf.message import DecodeError

    check_size(path, "ONNX")
    try:
        model = onnx.load(str(path), load_external_data=False)
    except (DecodeError, OSError) as error:
        raise ExportError(f"{path} is not an ONNX file, or not all of one: {error}.") from error
    if not model.graph.node and not model.graph.output:
        raise ExportError(f"{path} is not an ONNX file: it has no graph.")
    return model, _load_tensors(model, path)


def _load_tensors(model: Any, path: Path) -> Path | None:
    """Loads external tensors into ``model``, or returns their folder if they are too large for one file."""
    import onnx

    external = [t for t in model.graph.initializer if t.data_location == onnx.TensorProto.EXTERNAL]
    size = 0
    for tensor in external:
        place = {e.key: e.value for e in tensor.external_data}
        file = _tensor_file(path, place.get("location", ""))
        try:
            offset, length = int(place.get("offset", 0)), int(place.get("length", 0))
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
    if size >= _MAX_TENSOR_BYTES:
        return path.parent
    try:
        onnx.external_data_helper.load_external_data_for_model(model, str(path.parent))
    # The tensors of nodes' attributes, which qtrace.export does not write, were not checked above.
    except (onnx.checker.ValidationError, OSError, ValueError) as error:
        message = " ".join(str(error).split())[:200]
        raise ExportError(f"{path}: its tensors in other files cannot be read: {message}") from error
    return None


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
