"""Options for a runtime on another interpreter or machine, and for tensors that a device has dumped."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from qtrace.runtimes.host import IDLE_SECONDS, RuntimeHost

__all__ = ["Dumps", "options", "runtime_host"]


def runtime_host(function: Callable[..., Any]) -> Callable[..., Any]:
    """Adds --runtime-python, --runner and --runtime-timeout; the command gets them as ``runtime_host``."""

    @click.option(
        "--runtime-python",
        metavar="PATH",
        help="Run the runtime in this interpreter, such as ~/venvs/ship/bin/python, which needs numpy and "
        "the runtime alone (Python 3.8 or later).",
    )
    @click.option(
        "--runner",
        metavar="COMMAND",
        help="Run the runtime by a command that starts Python elsewhere, such as 'ssh board python3'; files "
        "are copied through it, and nothing is left there.",
    )
    @click.option(
        "--runtime-timeout",
        metavar="SECONDS",
        type=click.FloatRange(0, min_open=True),
        help="With either: end a runtime that neither answers nor computes for so long; default: "
        f"{IDLE_SECONDS:g}.",
    )
    @functools.wraps(function)
    def with_host(
        *args: Any, runtime_python: str | None, runner: str | None, runtime_timeout: float | None, **kw: Any
    ) -> Any:
        host = None
        if runtime_python is not None or runner is not None:
            host = RuntimeHost(runtime_python or "", runner or "", runtime_timeout or IDLE_SECONDS)
        elif runtime_timeout is not None:
            raise click.UsageError("--runtime-timeout belongs to --runtime-python or --runner.")
        return function(*args, runtime_host=host, **kw)

    return with_host


@dataclass(frozen=True)
class Dumps:
    """Where the dumped tensors are, and how they are called and stored.

    Attributes:
        folder: the folder, or an .npz archive.
        names: a YAML file with name in the dump: name in the graph; None if they are the same.
        layout: the order of axes.
    """

    folder: str
    names: str | None
    layout: str

    def runtime(self, model: Any) -> Any:
        """Returns the runtime that reads the tensors of ``model``, a converted module."""
        from qtrace.extras.device import dumped_tensors

        return dumped_tensors(self.folder, model, self._read_names(), self.layout)

    def _read_names(self) -> dict[str, str]:
        from qtrace.config.tree import read

        if self.names is None:
            return {}
        problems: list[str] = []
        try:
            tree = read(Path(self.names).read_text(encoding="utf-8"), self.names, problems)
        except (OSError, UnicodeDecodeError) as error:
            raise click.UsageError(f"{self.names} cannot be read: {error}.") from error
        names = None if tree is None else tree.plain()
        if problems:
            raise click.UsageError(problems[0])
        if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
            raise click.UsageError(f"{self.names} must be a mapping of names in the dump to names of sites.")
        return {str(dumped): name for dumped, name in names.items()}


def options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Adds --dumped, --names and --layout; the command gets them as its argument ``dumps``."""

    @click.option(
        "--dumped",
        metavar="DIR",
        help="Compare tensors that a device has dumped, in place of running FILE: an .npz file for each "
        "batch, or a folder of .npy, .raw or .bin files.",
    )
    @click.option(
        "--names",
        metavar="FILE",
        help="YAML with the names of dumped tensors: name in the dump: name of the site.",
    )
    @click.option(
        "--layout",
        metavar="L",
        default="nchw",
        show_default=True,
        help="How dumped tensors of four axes are stored: nchw, nhwc, or such as nc4hw4.",
    )
    @functools.wraps(function)
    def command(dumped: str | None, names: str | None, layout: str, **arguments: Any) -> Any:
        if dumped is None and (names is not None or layout != "nchw"):
            raise click.UsageError(
                "--names and --layout say how to read the tensors of --dumped: give it too."
            )
        return function(dumps=None if dumped is None else Dumps(dumped, names, layout), **arguments)

    return command
