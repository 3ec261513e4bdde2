"""Outputs that appear whole or not at all."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from qtrace.cli import engine
from qtrace.errors import QtraceError

__all__ = ["output_file", "output_folder"]


@contextlib.contextmanager
def output_folder(path: Path, *, names: tuple[str, ...], force: bool) -> Iterator[Path]:
    """Gives a folder to fill, which becomes ``path`` when the block ends without an error.

    Args:
        path: the folder to make. It may exist if it is empty.
        names: what the block puts into the folder. ``force`` replaces a folder that holds nothing else.
        force: whether to replace a folder; the old one stays until the new one is complete.

    Raises:
        QtraceError: when ``path`` exists with something in it, or cannot be made.
    """
    target = Path(os.path.realpath(path))
    _check_replaceable(path, target, names, force)
    with _workspace(path, target) as folder:
        yield folder
        engine.synchronize()
        try:
            _replace(target, folder)
        except OSError as error:
            raise QtraceError(f"{path} cannot be replaced: {error.strerror}.") from error


@contextlib.contextmanager
def output_file(path: Path) -> Iterator[Path]:
    """Gives a path to write to, which becomes ``path`` when the block ends without an error.

    What else the block writes beside that path moves with it: some formats consist of several files.

    Raises:
        QtraceError: when ``path`` cannot be written.
    """
    target = Path(os.path.realpath(path))
    if target.is_dir():
        raise QtraceError(f"{path} is a folder; name a file.")
    with _workspace(path, target) as folder:
        yield folder / target.name
        engine.synchronize()
        try:
            for file in sorted(folder.iterdir(), key=lambda file: file.name == target.name):
                os.replace(file, target.parent / file.name)
        except OSError as error:
            raise QtraceError(f"{path} cannot be replaced: {error.strerror}.") from error


def _check_replaceable(path: Path, target: Path, names: tuple[str, ...], force: bool) -> None:
    if not target.exists():
        return
    if not target.is_dir():
        raise QtraceError(f"{path} is a file; name a folder.")
    others = sorted(entry.name for entry in target.iterdir())
    if others and not force:
        raise QtraceError(f"{path} exists and is not empty; name another folder, or replace it with --force.")
    others = [name for name in others if name not in names]
    if others:
        listed = ", ".join(others[:3]) + (", ..." if len(others) > 3 else "")
        raise QtraceError(f"{path} holds files that are not ours ({listed}); --force does not remove them.")


@contextlib.contextmanager
def _workspace(path: Path, target: Path) -> Iterator[Path]:
    """A folder beside the target, on the same file system, removed at the end."""
    folder = _beside(target)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir()
    except (FileExistsError, NotADirectoryError) as error:
        raise QtraceError(f"{path} cannot be written: {error.filename} is a file, not a folder.") from error
    except OSError as error:
        raise QtraceError(f"{path} cannot be written: {error.strerror}.") from error
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _beside(target: Path) -> Path:
    return target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")


def _replace(target: Path, folder: Path) -> None:
    """Renames ``folder`` to ``target``; if that fails, an old ``target`` is back in its place."""
    if not target.exists():
        os.rename(folder, target)
        return
    old = _beside(target)
    os.rename(target, old)
    try:
        os.rename(folder, target)
    except OSError:
        os.rename(old, target)
        raise
    shutil.rmtree(old, ignore_errors=True)
