"""Inputs from a folder of images, which the recipe's ``preprocess`` converts."""

from __future__ import annotations

import errno
import hashlib
import logging
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from qtrace.data.base import Batch, SizedSource, file_identity
from qtrace.data.pixels import decode, fit, normalize
from qtrace.errors import DataError

if TYPE_CHECKING:
    from qtrace.config import Preprocess

__all__ = ["SUFFIXES", "ImageSource", "find_images"]

_LOG = logging.getLogger("qtrace")

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".ppm")


class ImageSource(SizedSource):
    """Batches of the images below a folder, in the order of their paths."""

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
        self.pixels = True
        self.cut = not skip_bad  # a bad image makes its batch smaller
        self._images = find_images(folder)
        self._preprocess = preprocess
        self._batch_size = batch_size
        self._skip_bad = skip_bad

    def identity(self) -> str:
        """Returns the folder and a hash of the names, sizes and times of change of its images."""
        names = "".join(f"{p.relative_to(self.source)} {file_identity(p)}\n" for p in self._images)
        return f"{self.source} {hashlib.sha256(names.encode('utf-8', 'surrogateescape')).hexdigest()}"

    def _count(self) -> int:
        return math.ceil(len(self._images) / self._batch_size)

    def _batches(self, selects: Callable[[int], bool]) -> Iterator[tuple[int, Batch]]:
        # A bad image makes its batch smaller. If the next image took its place, each batch would depend on
        # all images before it.
        for number in range(self._count()):
            if not selects(number):
                continue
            start = number * self._batch_size
            rows = [self._row(path, number) for path in self._images[start : start + self._batch_size]]
            images = [row for row in rows if row is not None]
            if images:
                yield number, (normalize(np.stack(images), self._preprocess),)

    def _row(self, path: Path, number: int) -> np.ndarray | None:
        """Reads one image as channels, height, width; None if it is left out."""
        if str(path) in self.skipped:
            return None
        try:
            image = decode(path, self._preprocess.size[0])
        except DataError as error:
            if not self._skip_bad:
                raise DataError(
                    f"batch {number}: {error} Repair or remove it, or leave such images out "
                    "(--skip-bad, skip_bad=True)."
                ) from error
            self.skipped.append(str(path))
            _LOG.warning("left out: %s", error)
            return None
        return np.ascontiguousarray(fit(image, self._preprocess).transpose(2, 0, 1))


def find_images(folder: Path) -> list[Path]:
    """Lists the images in a folder and the folders below it, by suffix, sorted by path.

    Hidden files and folders are left out. A link to a folder inside is not followed, as its images are
    listed already. A link that leaves the folder is refused.

    Raises:
        DataError: when there are none, or a link leads out of the folder.
    """
    root = folder.resolve()
    images = []
    folders = [folder]
    while folders:  # not os.walk: it recurses, and ends at a thousand nested folders
        for entry in _entries(folders.pop()):
            path = Path(entry)
            if entry.name.startswith("."):
                continue
            if entry.is_symlink() and not _target(path).is_relative_to(root):
                raise DataError(f"{path} is a link that leaves {folder}; put the images themselves there.")
            if entry.is_dir():
                folders += [] if entry.is_symlink() else [path]
            elif entry.name.lower().endswith(SUFFIXES):
                images.append(path)
    if not images:
        raise DataError(f"{folder} holds no image; looked for {', '.join(SUFFIXES)}, in its subfolders too.")
    return sorted(images, key=lambda path: path.relative_to(folder).as_posix())


def _target(path: Path) -> Path:
    """Resolves a link."""
    try:
        return path.resolve()
    except (OSError, RuntimeError) as error:  # Python raises RuntimeError for a circle
        raise DataError(f"{path} is a link that leads nowhere; remove it.") from error


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise DataError(
                f"{str(folder)[:60]}... cannot be read: its folders are nested too deep."
            ) from error
        raise DataError(f"{error.filename} cannot be read: {error.strerror}.") from error
