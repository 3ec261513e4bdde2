"""Where a runtime runs besides this process: another interpreter, or a command to another machine."""

from __future__ import annotations

import math
import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from qtrace.errors import ConfigError

IDLE_SECONDS = 60.0  # a process that waits that long without computing hangs


@dataclass(frozen=True)
class RuntimeHost:
    """An interpreter that has the runtime, on this machine or reached by a command.

    Only numpy and the runtime are installed there; qtrace and MegEngine are not. Python 3.8 to 3.14.

    Attributes:
        python: the path of an interpreter of this machine, such as ``~/venvs/ship/bin/python``.
        runner: a command that starts Python elsewhere, such as ``ssh board python3``. Files are copied
            through it into a temporary folder, which is removed at the end.
        timeout: the seconds without an answer and without computing after which the process is ended.

    Raises:
        ConfigError: when not exactly one of ``python`` and ``runner`` is given, or one cannot be a command.
    """

    python: str | os.PathLike[str] = ""
    runner: str = ""
    timeout: float = IDLE_SECONDS

    def __post_init__(self) -> None:
        object.__setattr__(self, "python", os.path.expanduser(os.fspath(self.python)))
        if bool(self.python) == bool(self.runner.strip()):
            raise ConfigError(
                "a runtime host is either an interpreter (python, --runtime-python) or a command that starts "
                "one (runner, --runner): give one of them."
            )
        if not (math.isfinite(self.timeout) and self.timeout > 0):
            raise ConfigError(f"the timeout of a runtime host is {self.timeout}: give seconds above 0.")
        try:
            shlex.split(self.runner)
        except ValueError as error:
            raise ConfigError(f"the runner {self.runner!r} is no command: {error}.") from None

    @property
    def command(self) -> list[str]:
        """The command that starts Python."""
        return shlex.split(self.runner) if self.runner else [str(self.python)]

    def __str__(self) -> str:
        return self.runner or str(self.python)


def describe_side(side: Mapping[str, Any]) -> str:
    """Says in a line which runtime ran where.

    Args:
        side: the facts of a worker, with ``runtime``, ``version`` and ``host``.
    """
    flags = f" ({' '.join(side['flags'])})" if side["flags"] else ""
    versions = f"{side['runtime']} {side['version']}, Python {side['python']}, numpy {side['numpy']}"
    return f"{versions}, {side['system']}, {side['processor']}{flags}, by {side['host']}"
