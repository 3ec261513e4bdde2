"""Values that are no arrays: what other libraries hand out, and how to make an array of each."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from qtrace.errors import CalibrationError

__all__ = ["read_array", "what_is_no_iterable"]

_IMAGE = (
    "make an N x C x H x W array of it and normalize it as in training: "
    "np.asarray(image, np.float32).transpose(2, 0, 1)[None]"
)


def read_array(value: Any, index: int) -> np.ndarray:
    """Returns the numbers of an array, a list of numbers, or a tensor of torch on any device.

    Args:
        value: one input of a batch.
        index: the number of the batch, for messages.

    Raises:
        CalibrationError: for anything else, with what to give instead.
    """
    if isinstance(value, (str, bytes, os.PathLike)):
        raise CalibrationError(f"batch {index} holds the path {_path(value)}: give the arrays, {_READ}.")
    library = _library(value)
    if library == "PIL":
        raise CalibrationError(f"batch {index} holds an image of PIL: {_IMAGE}.")
    if library == "torch" and hasattr(value, "detach"):
        value = value.detach().cpu()
        value = (value.float() if value.is_floating_point() else value).numpy()
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise CalibrationError(f"batch {index} is ragged: every array needs one shape.") from error
    if array.dtype == object or array.dtype.kind not in "fiub":
        more = f" ({type(value).__name__}; {_COLUMNS})" if _is_table(value) else ""
        raise CalibrationError(f"batch {index} holds {array.dtype} values: give arrays of numbers{more}.")
    return array


_READ = "read from it, or let the command line read it (--data)"
_COLUMNS = "choose columns of numbers: table[columns].to_numpy(np.float32)"


def what_is_no_iterable(batches: Any) -> str:
    """Returns what an object is that iterates over something else than batches, and a cure; "" for others."""
    if isinstance(batches, (str, bytes, os.PathLike)):
        return f"the path {_path(batches)}: give an iterable of batches, such as a list of arrays, {_READ}"
    if _is_table(batches):
        name = type(batches).__name__
        return f"a {name}, which iterates over columns: give [table[columns].to_numpy(np.float32)]"
    if hasattr(batches, "shape") and hasattr(batches, "dtype"):
        return f"one {type(batches).__name__}: give an iterable of batches, such as a list of arrays"
    return ""


def _is_table(value: Any) -> bool:
    return hasattr(value, "columns") and hasattr(value, "to_numpy")


def _library(value: Any) -> str:
    return type(value).__module__.partition(".")[0]


def _path(value: Any) -> str:
    return repr(os.fsdecode(value))
