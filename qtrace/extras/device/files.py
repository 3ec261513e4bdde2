"""Finds and reads the files of dumped tensors: .npy, .npz and raw ones, a sample each or a folder each."""

from __future__ import annotations

import math
import re
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from qtrace.errors import ExportError

__all__ = ["KINDS", "Sample", "file_name", "find_samples"]

KINDS = ("inputs", "sites", "outputs")
"""The folders of a batch that tell tensors of one name apart."""

_RAW = (".raw", ".bin")
_PARTS = re.compile(r"(\d+)")


@dataclass(frozen=True)
class Sample:
    """The dumped tensors of one batch.

    Attributes:
        path: the folder or the archive that holds them.
        files: name of the tensor, such as ``sites/conv_out`` or ``conv_out`` -> its file; None for a member
            of ``path``.
    """

    path: Path
    files: Mapping[str, Path | None]

    def read(self, name: str, decode: Callable[[bytes], np.ndarray]) -> np.ndarray:
        """Reads one tensor.

        Args:
            name: one of `files`.
            decode: turns the bytes of a raw file into values.

        Raises:
            ExportError: when the file is damaged.
        """
        file = self.files[name]
        try:
            if file is None:
                with np.load(self.path, allow_pickle=False) as archive:
                    return np.asarray(archive[name])
            if file.suffix.lower() == ".npy":
                return np.asarray(np.load(file, allow_pickle=False))
            return decode(file.read_bytes())
        except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
            where = self.path if file is None else file
            raise ExportError(
                f"{where}: the tensor {name!r} cannot be read ({error}): dump it again."
            ) from error


def find_samples(folder: Path) -> tuple[Sample, ...]:
    """Finds the dumped tensors of each batch, in the order of their names with numbers by value.

    A batch is an .npz archive or a folder of .npy, .raw and .bin files, which may stand in folders
    ``inputs``, ``sites`` and ``outputs``; files that stand in ``folder`` itself are one batch. An archive
    with the name of a folder next to it stands for the folder.

    Args:
        folder: the folder of dumped tensors, or one .npz archive.

    Raises:
        ExportError: when there is no such folder, or nothing of this form in it.
    """
    if folder.is_file():
        return (_archive(folder),)
    if not folder.is_dir():
        raise ExportError(f"{folder} is no folder of dumped tensors, and no .npz file.")
    samples = {path.stem: _archive(path) for path in sorted(folder.glob("*.npz")) if path.stem != "inputs"}
    for inner in sorted(path for path in folder.iterdir() if path.is_dir() and path.name not in KINDS):
        if inner.name not in samples and (files := dict(_tensor_files(inner))):
            samples[inner.name] = Sample(inner, files)
    if not samples and (files := dict(_tensor_files(folder))):
        return (Sample(folder, files),)
    if not samples:
        raise ExportError(
            f"{folder} holds no tensors: it needs an .npz file for each batch, or a folder of .npy, .raw or "
            ".bin files."
        )
    return tuple(samples[name] for name in sorted(samples, key=_natural))


def file_name(tensor: str) -> str:
    """Returns the name of a tensor's files: what is no letter, digit, ``_``, ``-`` or ``.`` becomes ``_``."""
    return re.sub(r"[^\w.-]", "_", tensor)


def _archive(path: Path) -> Sample:
    try:
        with np.load(path, allow_pickle=False) as archive:
            return Sample(path, dict.fromkeys(archive.files))
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, AttributeError) as error:
        raise ExportError(f"{path} is no .npz archive ({error}): dump it again.") from error


def _tensor_files(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yields the name and the file of each tensor in a folder.

    Raises:
        ExportError: when two files hold one tensor.
    """
    names: dict[str, Path] = {}
    folders = [folder, *(folder / kind for kind in KINDS if (folder / kind).is_dir())]
    for path in sorted(path for inner in folders for path in inner.iterdir()):
        if path.suffix.lower() not in (".npy", *_RAW) or not path.is_file():
            continue
        name = path.relative_to(folder).with_suffix("").as_posix()
        other = names.setdefault(name, path)
        if other != path:
            raise ExportError(f"{path} and {other.name} both hold the tensor {name!r}: remove one.")
        yield name, path


def _natural(name: str) -> tuple[tuple[int, str], ...]:
    return tuple((int(part), "") if part.isdigit() else (math.inf, part) for part in _PARTS.split(name))  # type: ignore[misc]
