"""The command line: thin commands over the public API. Nothing heavy is imported until a command runs."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from qtrace.errors import Terminated

if TYPE_CHECKING:
    from qtrace.cli.program import group

__all__ = ["group", "main"]


def main(args: Sequence[str] | None = None) -> NoReturn:
    """Runs the command line and exits.

    Args:
        args: the arguments without the program's name; None for the arguments of the process.
    """
    try:
        from qtrace.cli import program  # here: Ctrl-C may come while the commands are imported
    except KeyboardInterrupt:
        print("interrupted: no result was written.", file=sys.stderr)
        raise Terminated(signal.SIGINT) from None
    program.main(args)


def __getattr__(name: str) -> Any:
    if name != "group":
        raise AttributeError(f"module 'qtrace.cli' has no attribute {name!r}")
    from qtrace.cli import program

    return program.group
