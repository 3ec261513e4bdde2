"""The group of all commands, and a run of it: signals, errors, exit codes."""

from __future__ import annotations

import math
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import click

from qtrace.cli import options
from qtrace.cli.console import as_flags
from qtrace.cli.files import bench, bisect, export, verify
from qtrace.cli.networks import import_onnx, inspect, trace
from qtrace.cli.quantizing import calibrate, quantize
from qtrace.cli.recipes import recipes
from qtrace.cli.reports import compare, explain, sensitivity
from qtrace.errors import QtraceError, Terminated, missing_package
from qtrace.plugins import installed, load_object

_debug = False
_INTERRUPTED = 128 + signal.SIGINT


def _version(ctx: click.Context, _: click.Parameter, value: bool) -> None:
    if not value or ctx.resilient_parsing:
        return
    import qtrace

    click.echo(f"qtrace {qtrace.__version__}")
    ctx.exit()


def _set_debug(_: click.Context, __: click.Parameter, value: bool) -> None:
    global _debug
    _debug = value


@click.group(
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    cls=options.Group,
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

    Results go to stdout, progress and notes to stderr. No command replaces a file that it reads, and only
    --force lets it replace one that qtrace did not write. Exit codes: 0 success, 1 a failed check, 2 a
    mistake in what was given, 70 an error in qtrace itself, 130 interrupted.
    """


for _command in (
    trace,
    import_onnx,
    inspect,
    quantize,
    calibrate,
    explain,
    export,
    verify,
    bisect,
    bench,
    compare,
    sensitivity,
    recipes,
):
    group.add_command(_command)


def _add_installed() -> None:
    """Adds the commands that packages declare, qtrace's extras among them; a broken one stops no other."""
    names: Iterable[str] = ()
    with _warning():
        names = installed("qtrace.commands")
    for name in names:
        with _warning():
            group.add_command(load_object("qtrace.commands", name, click.Command), name)


@contextmanager
def _warning() -> Iterator[None]:
    """Makes a warning of what is wrong with an installed package."""
    try:
        yield
    except QtraceError as error:
        click.echo(f"warning: {error}", err=True)


_add_installed()


def main(args: Sequence[str] | None = None) -> NoReturn:
    """Runs the command line and exits.

    Args:
        args: the arguments without the program's name; None for the arguments of the process.
    """
    try:
        code = _run(args)
    except KeyboardInterrupt:  # another one, while the first was being reported
        code = _INTERRUPTED
    sys.exit(_flushed(code))


def _flushed(code: int) -> int:
    """Flushes stdout and returns the exit code; drops output that stdout refuses.

    Otherwise Python would write it once more at its end, and exit with 120.
    """
    try:
        sys.stdout.flush()
    except OSError as error:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - until the process ends
        return code or _report_mistake(f"error: stdout: {error.strerror}.")
    return code


def _run(args: Sequence[str] | None) -> int:
    _open_streams()
    try:
        os.getcwd()
    except FileNotFoundError:
        os.chdir(os.sep)  # Python looks into the working folder for the modules that print
        return _report_mistake("error: the working folder is deleted: change to another one.")
    if any(action == "error" for action, *_ in warnings.filters):  # which is about qtrace's own modules
        warnings.filterwarnings("ignore", module="(?!qtrace)")
        warnings.filterwarnings("default", category=UserWarning, module="(?!qtrace)")
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
        return _report_interrupt()
    except Exception as error:
        # Interrupted C code may raise any error, such as an import's "initialization failed".
        return _report_interrupt() if interrupt.seen else _report_error(error)


def _report_interrupt() -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # only the message is left
    _write_error(lambda: click.echo("interrupted: no result was written.", err=True))
    return _INTERRUPTED


def _report_error(error: Exception) -> int:
    """Prints a message for ``error`` and returns the exit code."""
    error = missing_package(error) if isinstance(error, ModuleNotFoundError) else error
    if isinstance(error, QtraceError):
        message = as_flags(f"error: {' '.join(str(error).split())}", group)
        return _report_mistake(message, error.exit_code)
    if isinstance(error, click.ClickException):
        _write_error(error.show)
        return error.exit_code
    if isinstance(error, OSError):  # such as a full disk or too many open files
        file = f"{error.filename}: " if error.filename else ""
        return _report_mistake(f"error: {file}{error.strerror or error}.")
    if isinstance(error, MemoryError):
        return _report_mistake("error: there is not enough memory; use smaller batches.")
    _write_error(traceback.print_exc)
    message = "error: this is a fault in qtrace, not in what you gave it; please report it."
    _write_error(lambda: click.echo(message, err=True))
    return os.EX_SOFTWARE  # Python's own 1 would look like a failed check


def _report_mistake(sentence: str, code: int = 2) -> int:
    """Prints ``sentence``, with --debug after a traceback, and returns ``code``."""
    if _debug:
        _write_error(traceback.print_exc)
    _write_error(lambda: click.echo(sentence, err=True))
    return code


def _write_error(write: Callable[[], None]) -> None:
    """Calls ``write``, which writes to stderr; drops its output if the disk is full."""
    try:
        write()
    except OSError:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - or else Python would retry at its end, and exit with 120


def _open_streams() -> None:
    """Opens closed standard streams on the null device.

    Otherwise the next file would get the stream's number, and the prints of C libraries.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # which gets this number, the lowest free one
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 - until the process ends


class _Interrupt:
    """Handles Ctrl-C; ignores a second one within ``pause`` seconds, so that cleaning up completes.

    Attributes:
        seen: whether Ctrl-C was pressed.
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
    """Raises `Terminated`, so that a terminated command cleans up."""
    raise Terminated(number)
