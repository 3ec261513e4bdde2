"""Opens calibration data, whatever its form."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qtrace.data.arrays import ArraySource
from qtrace.data.base import DataSource
from qtrace.data.images import ImageSource
from qtrace.data.loader import is_object_name, open_loader
from qtrace.data.values import open_values
from qtrace.errors import DataError

if TYPE_CHECKING:
    from qtrace.config import Preprocess

__all__ = ["open_data"]

_FORMS = "an .npy or .npz file, a folder of images, or pkg.mod:loader"


def open_data(
    source: Any,
    *,
    preprocess: Preprocess | None = None,
    batch_size: int = 8,
    max_batches: int | None = None,
    shape: tuple[int, ...] | None = None,
    skip_bad: bool = False,
) -> DataSource:
    """Opens calibration data: checks headers and names now, and reads values at each iteration.

    The forms of ``source``:

    * ``.npy``: one input; its first axis counts the samples.
    * ``.npz``: without arrays called ``y``, ``label(s)`` or ``target(s)``, unless it holds nothing else. One
      array is the first input whatever its name; several are inputs by name, in the order of the file. A
      single number next to arrays, such as a sample rate, is given with each batch.
    * a folder: the images in it and below (png, jpg, jpeg, bmp, webp, ppm), by path. Links that leave the
      folder are refused. ``preprocess`` is needed.
    * ``pkg.mod:loader``: an iterable, or a callable that returns one and is called again for each iteration.
      A batch is a Tensor or array, a tuple of inputs by position, or a dict of inputs by name; it holds no
      labels. ``batch_size`` is ignored.
    * what is in memory: an array or a dict of arrays, whose first axis counts the samples; a list of batches,
      an object whose ``__iter__`` begins anew, or a function that returns an iterable.

    Inputs get a dtype of MegEngine: floats and uint8 become float32. Four-dimensional uint8 arrays, in a
    file or in memory, are raw pixels in the model's order of channels, and normalized if there is a
    ``preprocess``: N x C x H x W, or N x H x W x C if its ``layout`` says so.

    Args:
        source: one of the forms above.
        preprocess: the recipe's ``preprocess``, which converts pixels to inputs.
        batch_size: samples per batch; the last batch may be smaller.
        max_batches: the largest number of batches.
        shape: the shape that samples in a file must have, without the first axis.
        skip_bad: leave unreadable images out, and list them in the source's ``skipped``.

    Returns:
        Batches from the start at each iteration: tuples of arrays, or dicts of arrays by input name. It has a
        length if that is known beforehand.

    Raises:
        DataError: when the source cannot be read; some mistakes appear only at an iteration.
    """
    for name, value in (("batch_size", batch_size), ("max_batches", max_batches)):
        if value is not None and value < 1:
            raise DataError(f"{name} must be at least 1, not {value}.")
    if not isinstance(source, (str, os.PathLike)):
        return open_values(source, batch_size=batch_size, max_batches=max_batches, preprocess=preprocess)
    source = os.fspath(source)
    path = Path(source)
    if source and path.is_dir():
        if preprocess is None:
            raise DataError(
                f"{path} is a folder of images: give --size, --scale, --mean, --std and --channels, or a "
                "recipe with the key `preprocess`."
            )
        return ImageSource(
            path, preprocess=preprocess, batch_size=batch_size, max_batches=max_batches, skip_bad=skip_bad
        )
    if path.suffix.lower() in (".npy", ".npz"):
        if not path.is_file():
            raise DataError(f"There is no file {source}; the data must be {_FORMS}.")
        return ArraySource(
            path, batch_size=batch_size, max_batches=max_batches, shape=shape, preprocess=preprocess
        )
    if is_object_name(source) and not path.exists():
        return open_loader(source, max_batches, preprocess)
    problem = "cannot be read as data" if source and path.exists() else "does not exist"
    raise DataError(f"{source!r} {problem}; give {_FORMS}.")
