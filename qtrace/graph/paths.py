"""The path of a file in the place of the model that it holds."""

from __future__ import annotations

import os
from pathlib import PurePath
from typing import Any

__all__ = ["describe_path"]


def describe_path(value: Any) -> str:
    """Returns what a path in the place of a model is, and the function that reads it; "" for anything else.

    Args:
        value: the argument in the place of a model.
    """
    if not isinstance(value, (str, bytes, os.PathLike)):
        return ""
    path = PurePath(os.fsdecode(value))
    suffix = path.suffix.lower()
    if suffix == ".onnx":
        return f"{str(path)!r} is a path: read the network by qtrace.from_onnx first"
    if suffix == ".mge":
        return f"{str(path)!r} is a path: read the model by qtrace.load first"
    return f"{str(path)!r} is text: give the module, or what qtrace.load or qtrace.from_onnx reads"
