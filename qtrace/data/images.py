"""Inputs from a folder of images, prepared as the recipe's ``preprocess`` says."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from qtrace.data.base import Batch, SizedSource
from qtrace.data.pixels import decode, fit, normalize
from qtrace.errors import DataError

if TYPE_CHECKING:
    from qtrace.config import Preprocess

__all__ = ["SUFFIXES", "ImageSource", "find_images"]

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".ppm")


class ImageSource(SizedSource):
    """The images below a folder, in the order of their paths."""

    def __init__(
        self,
        folder: Path,
        *,
        preprocess: Preprocess,
        batch_size: int,
        max_batches: int | None,
        skip_bad: bool,
    ) -> None:
        super().__init__(str(folder), max_batches)
        self._images = find_images(folder)
        self._preprocess = preprocess
        self._batch_size = batch_size
        self._skip_bad = skip_bad

    def _count(self) -> int:
        return math.ceil((len(self._images) - len(self.skipped)) / self._batch_size)

    def _batches(self) -> Iterator[Batch]:
        rows: list[np.ndarray] = []
        for path in self._images:
            if str(path) in self.skipped:
                continue
            try:
                image = decode(path, self._preprocess.size[0])
            except DataError as error:
                if not self._skip_bad:
                    raise DataError(
                        f"{error} Mend or remove it, or leave such images out (skip_bad)."
                    ) from error
                self.skipped.append(str(path))
                continue
            rows.append(np.ascontiguousarray(fit(image, self._preprocess).transpose(2, 0, 1)))
            if len(rows) == self._batch_size:
                yield (normalize(np.stack(rows), self._preprocess),)
                rows = []
        if rows:
            yield (normalize(np.stack(rows), self._preprocess),)


def find_images(folder: Path) -> list[Path]:
    """The images in a folder and the folders below it, by suffix, sorted by path.

    Hidden files and folders are left out. A link to a folder inside is not followed, its images are found
    where they are; a link that leaves the folder is refused.

    Raises:
        DataError: when there are none, or a link leads out of the folder.
    """
    root = folder.resolve()
    found = []
    for where, folders, files in os.walk(folder, onerror=_fail):
        for name in folders + files:
            path = Path(where, name)
            if path.is_symlink() and not name.startswith(".") and not path.resolve().is_relative_to(root):
                raise DataError(f"{path} is a link that leaves {folder}; put the images themselves there.")
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [
            Path(where, name)
            for name in files
            if not name.startswith(".") and name.lower().endswith(SUFFIXES)
        ]
    if not found:
        raise DataError(f"{folder} holds no image; looked for {', '.join(SUFFIXES)}, in its subfolders too.")
    return sorted(found, key=lambda path: path.relative_to(folder).as_posix())


def _fail(error: OSError) -> None:
    raise DataError(f"{error.filename} cannot be read: {error.strerror}.") from error
