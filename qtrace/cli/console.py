"""The streams of a command, results on stdout and everything else on stderr."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from qtrace import process
from qtrace.quantizing.reporting import NOTES

if TYPE_CHECKING:
    from qtrace.data import Batch, DataSource  # at run time it loads numpy, which --help does without

_SPELLED = re.compile(r"""\b([a-z]\w*)=(?:True\b|"([\w-]+)"|(?![\w"\'(\[{.<-]))""")


def as_flags(text: str, group: click.Command | None = None) -> str:
    """Writes the options that a message names as the command line has them: ``--force`` for ``force=True``.

    Args:
        text: a message of the library, which names options as Python has them.
        group: the program, whose commands have the options; None for the running command.
    """
    context = click.get_current_context(silent=True)
    program = group if context is None else context.find_root().command
    commands = program.commands.values() if isinstance(program, click.Group) else ()
    options = [p for command in commands for p in command.params if isinstance(p, click.Option)]
    flags = {option.name: max(option.opts, key=len) for option in options}

    def spell(match: re.Match[str]) -> str:
        flag = flags.get(match[1])
        return match[0] if flag is None else f"{flag} {match[2]}" if match[2] else flag

    return _SPELLED.sub(spell, text)


@dataclass(frozen=True)
class Console:
    """The output options of a command, and its writes to stdout and stderr.

    Attributes:
        quiet: write only results, warnings and errors.
        as_json: print the result as one JSON document.
        forced: take stderr for a terminal, on which progress bars are drawn.
    """

    quiet: bool = False
    as_json: bool = False
    forced: bool = False

    @property
    def progress(self) -> bool:
        """Whether to show progress bars, which `qtrace.display` draws on terminals only."""
        return self.forced or not self.quiet

    @contextlib.contextmanager
    def work(self, log_level: int = logging.WARNING) -> Iterator[None]:
        """Surrounds all work of a command: prints of models and loaders go to stderr, the log is shown.

        Args:
            log_level: the lowest level of the library's log that this command shows.
        """
        stderr: Any = _Terminal(sys.stderr) if self.forced else sys.stderr
        with (
            contextlib.redirect_stdout(sys.stderr),
            contextlib.redirect_stderr(stderr),
            self._show_log(log_level),
        ):
            process.quiet()
            yield
            process.synchronize()

    @contextlib.contextmanager
    def _show_log(self, level: int) -> Iterator[None]:
        logger, handler = logging.getLogger("qtrace"), _LogHandler(self)
        notes = logging.getLogger(NOTES)
        before = logger.level, logger.propagate, notes.level
        logger.addHandler(handler)
        logger.setLevel(level)
        notes.setLevel(logging.INFO)
        logger.propagate = False
        try:
            yield
        finally:
            logger.removeHandler(handler)
            logger.setLevel(before[0])
            notes.setLevel(before[2])
            logger.propagate = before[1]

    @contextlib.contextmanager
    def bar(self, batches: DataSource, label: str) -> Iterator[Iterable[Batch]]:
        """Gives ``batches`` with a progress bar on stderr, whose line ends before an error is printed."""
        from qtrace.display import progress_bar

        with progress_bar(batches, desc=label, unit="batch", disable=not self.progress) as bar:
            yield bar

    def note(self, text: str) -> None:
        """Prints ``text`` on stderr, unless the command is quiet."""
        if not self.quiet:
            click.echo(as_flags(text), err=True)

    def warn(self, text: str) -> None:
        """Prints a warning on stderr, also if the command is quiet."""
        click.echo(as_flags(f"warning: {text}"), err=True)

    def result(self, text: str, data: Any) -> None:
        """Prints the result: ``text``, or ``data`` as JSON, in which numbers that are not finite are null."""
        try:
            shown = json.dumps(_plain(data), indent=2, allow_nan=False) if self.as_json else text
            # File names may hold bytes that are no UTF-8.
            click.echo(shown.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace"))
        except BrokenPipeError:  # the reader, such as `| head`, has stopped
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise SystemExit(141) from None  # as a shell reports SIGPIPE; 1 is for failed checks


class _Terminal:
    """A stream that says that it is a terminal."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def isatty(self) -> bool:
        """Returns True."""
        return True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class _LogHandler(logging.Handler):
    """Shows the library's log above a progress bar: warnings as warnings, once each, all else as notes."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self.console = console
        self.warned: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        from tqdm import tqdm

        message, warns = record.getMessage(), record.levelno >= logging.WARNING
        if message in self.warned:  # data that are opened again have the same faults
            return
        self.warned |= {message} if warns else set()
        with tqdm.external_write_mode(file=sys.stderr):
            (self.console.warn if warns else self.console.note)(message)


def _plain(value: Any) -> Any:
    """Converts ``value`` to dicts, lists, text and finite numbers, which every JSON reader knows."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if value is None or isinstance(value, bool | int | str):
        return value
    return _plain(value.tolist()) if hasattr(value, "tolist") else str(value)
