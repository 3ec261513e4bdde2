"""The group of all commands, and a run of it: signals, errors, exit codes."""

from __future__ import annotations

import math
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import click

from qtrace.cli import INTERRUPTED, help
from qtrace.cli.commands.bisect import bisect
from qtrace.cli.commands.calibrate import calibrate
from qtrace.cli.commands.compare import compare
from qtrace.cli.commands.explain import explain
from qtrace.cli.commands.export import export
from qtrace.cli.commands.finetune import finetune
from qtrace.cli.commands.recipes import recipes
from qtrace.cli.commands.sensitivity import sensitivity
from qtrace.cli.commands.trace import trace
from qtrace.cli.commands.verify import verify
from qtrace.errors import QtraceError, Terminated

__all__ = ["group", "main"]

INTERNAL_ERROR = 70  # EX_SOFTWARE: Python's own 1 would look like a failed check
_debug = False


def _version(ctx: click.Context, _: click.Parameter, wanted: bool) -> None:
    if not wanted or ctx.resilient_parsing:
        return
    import qtrace

    click.echo(f"qtrace {qtrace.__version__}")
    ctx.exit()


def _set_debug(_: click.Context, __: click.Parameter, wanted: bool) -> None:
    global _debug
    _debug = wanted


@click.group(
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    cls=help.Group,
    example="""
    qtrace trace models:resnet18 --shape 1x3x224x224 -o float.mge
    qtrace calibrate float.mge --data images/ --recipe resnet18 --out int8
    qtrace export int8/quantized.mge -o model.onnx
    qtrace verify model.onnx --model int8/quantized.mge --data images/ --recipe resnet18
    """,
)
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=_version, help="Print the version."
)
@click.option(
    "--debug",
    is_flag=True,
    expose_value=False,
    callback=_set_debug,
    help="Print the traceback of an error, that of your own code included.",
)
def group() -> None:
    """Quantize MegEngine models through their traced graph.

    Results go to stdout, progress and notes to stderr. Exit codes: 0 success, 1 a failed check, 2 a mistake
    in what was given, 70 an error in qtrace itself, 130 interrupted.
    """


_COMMANDS = (trace, calibrate, finetune, explain, export, verify, bisect, compare, sensitivity, recipes)
for _command in _COMMANDS:
    group.add_command(_command)


def main(args: Sequence[str] | None = None) -> NoReturn:
    """Runs the command line and exits.

    Args:
        args: the arguments without the program's name; None for those of the process.
    """
    try:
        code = _run(args)
    except KeyboardInterrupt:  # another one, while the first was being told
        code = INTERRUPTED
    sys.exit(_flushed(code))


def _flushed(code: int) -> int:
    """The exit code when stdout has taken all; what it cannot take is dropped.

    Python would try to write that once more at its end, and exit with 120.
    """
    try:
        sys.stdout.flush()
    except OSError as error:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - until the process ends
        return code or _failed(f"error: stdout: {error.strerror}.")
    return code


def _run(args: Sequence[str] | None) -> int:
    _open_streams()
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup sets it
            signal.signal(number, _terminate)
    interrupt = _Interrupt()
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, interrupt)
    try:
        result: Any = group.main(args, prog_name="qtrace", standalone_mode=False)
        return result if isinstance(result, int) else 0
    except (click.Abort, KeyboardInterrupt):
        return _interrupted()
    except Exception as error:
        # C code that is interrupted may make any error of it: an import, "initialization failed".
        return _interrupted() if interrupt.seen else _explained(error)


def _interrupted() -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # all is over but the message
    _told(lambda: click.echo("interrupted: no result was written.", err=True))
    return INTERRUPTED


def _explained(error: Exception) -> int:
    """Tells what an error means to users; gives the exit code."""
    if isinstance(error, QtraceError):
        return _failed(f"error: {' '.join(str(error).split())}")
    if isinstance(error, click.ClickException):
        _told(error.show)
        return error.exit_code
    if isinstance(error, OSError):  # a full disk, no more file handles: what no command can do anything about
        where = f"{error.filename}: " if error.filename else ""
        return _failed(f"error: {where}{error.strerror or error}.")
    if isinstance(error, MemoryError):
        return _failed("error: there is not enough memory; use smaller batches.")
    _told(traceback.print_exc)
    fault = "error: this is a fault in qtrace, not in what you gave it; please report it."
    _told(lambda: click.echo(fault, err=True))
    return INTERNAL_ERROR


def _failed(sentence: str) -> int:
    """Tells what is wrong, after a traceback where one was asked for; gives the exit code."""
    if _debug:
        _told(traceback.print_exc)
    _told(lambda: click.echo(sentence, err=True))
    return 2


def _told(tell: Callable[[], None]) -> None:
    """Writes to stderr. Where that fails, on a full disk, the exit code is all that is told."""
    try:
        tell()
    except OSError:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - Python would try once more at its end, and exit with 120


def _open_streams() -> None:
    """A standard stream that is closed leads nowhere.

    Otherwise the next file that is opened would have its number, and what C libraries print in it.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # it gets the lowest free number, this one
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 - until the process ends


class _Interrupt:
    """Ctrl-C, of which a second one within ``pause`` seconds does not cut short the cleaning up.

    Attributes:
        seen: whether there was one.
    """

    def __init__(self, pause: float = 2.0) -> None:
        self.seen = False
        self._pause, self._last = pause, -math.inf

    def __call__(self, number: int, _: Any) -> None:
        now = time.monotonic()
        if now - self._last > self._pause:
            self.seen, self._last = True, now
            raise KeyboardInterrupt


def _terminate(number: int, _: Any) -> None:
    """Lets a terminated command clean up behind itself."""
    raise Terminated(number)
