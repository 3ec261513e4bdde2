"""The options that say where a runtime runs: in another interpreter, or on another machine."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import click

from qtrace.runtimes.host import IDLE_SECONDS, RuntimeHost

__all__ = ["runtime_host"]


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
