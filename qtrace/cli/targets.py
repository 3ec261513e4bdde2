"""The options that name what a command writes, which is checked before the command begins."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click

from qtrace.cli.naming import MODEL_FILES
from qtrace.cli.options import file_or_folder
from qtrace.errors import QtraceError
from qtrace.storage.outputs import check_foreign

__all__ = ["file_to_write", "folder_to_write"]

_DATA = ("data", "eval_data", "evaluation", "samples", "dumped")  # options that name whole folders


def file_to_write(*flags: str, help: str, required: bool = False) -> Callable[..., Any]:
    """Adds an option that names a file to write, and --force; the command gets both.

    The command does not begin if the file is one of its inputs, or if it exists, qtrace did not write it and
    --force is not given.

    Args:
        *flags: the flags of the option, the long one first.
        help: its help.
        required: whether it must be given.
    """
    name = flags[0].lstrip("-").replace("-", "_")

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def command(**arguments: Any) -> Any:
            if (path := arguments[name]) is not None:
                _check_inputs(path, name)
                check_foreign(path, force=arguments["force"])
            return function(**arguments)

        forced = click.option(
            "--force", is_flag=True, help=f"Let {flags[0]} replace a file that qtrace did not write."
        )
        option = click.option(*flags, type=file_or_folder(), required=required, help=help)
        return option(forced(command))

    return decorate


def folder_to_write(help: str) -> Callable[..., Any]:
    """Adds the required option --out, a folder; the command does not begin if an input is in that folder.

    Args:
        help: the help of the option.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def command(**arguments: Any) -> Any:
            if arguments["out"].is_dir():
                _check_inputs(arguments["out"], "out")
            return function(**arguments)

        return click.option("--out", "-o", type=file_or_folder(), required=True, help=help)(command)

    return decorate


def _check_inputs(path: Path, option: str) -> None:
    """Refuses to write a file that the command reads, or a folder that has such a file."""
    target = Path(os.path.realpath(path))
    if not target.exists():
        return
    for shown, file in _inputs(option):
        if file == target:
            raise QtraceError(f"{path} is an input of this command: name another {_kind(target)} to write.")
        if target.is_dir() and file.is_relative_to(target):
            raise QtraceError(f"{path} has an input of this command, {shown}: name another folder to write.")
        if file.is_dir() and target.is_file() and target.is_relative_to(file):
            raise QtraceError(f"{path} is in {shown}, an input of this command: name another file to write.")


def _kind(target: Path) -> str:
    return "folder" if target.is_dir() else "file"


def _inputs(option: str) -> Iterator[tuple[str, Path]]:
    """Yields what the running command reads: as the user wrote it, and its real path."""
    for name, value in click.get_current_context().params.items():
        for entry in value if isinstance(value, tuple) else (value,):
            if name == option or not isinstance(entry, str | Path) or not str(entry).strip("\0"):
                continue
            if name == "recipe" and not str(entry).lower().endswith((".yaml", ".yml")):
                continue  # the name of a recipe, which a folder may have, too
            path = Path(os.path.realpath(entry))
            if path.is_dir() and name not in _DATA:
                yield from ((str(entry), path / file) for file in MODEL_FILES)
            elif path.exists():
                yield str(entry), path
