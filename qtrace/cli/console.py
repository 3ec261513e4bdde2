"""The streams of a command: results on stdout, everything else on stderr."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from qtrace.process import engine

if TYPE_CHECKING:
    from qtrace.data import Batch, DataSource  # at run time it loads numpy, which --help does without

__all__ = ["Console"]


@dataclass(frozen=True)
class Console:
    """What a command was told about its output.

    Attributes:
        quiet: print nothing but results and errors.
        as_json: print the result as one JSON document.
        forced: show progress bars where stderr is no terminal, too.
    """

    quiet: bool = False
    as_json: bool = False
    forced: bool = False

    @property
    def progress(self) -> bool:
        """Whether to show a progress bar."""
        return self.forced or (not self.quiet and sys.stderr.isatty())

    @contextlib.contextmanager
    def work(self) -> Iterator[None]:
        """Surrounds all work of a command.

        What models and loaders print goes to stderr; what the library logs is noted.
        """
        with contextlib.redirect_stdout(sys.stderr), self._noting_log():
            engine.quiet()
            yield
            engine.synchronize()

    @contextlib.contextmanager
    def _noting_log(self) -> Iterator[None]:
        logger, handler = logging.getLogger("qtrace"), _LogHandler(self)
        before = logger.level, logger.propagate
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        logger.propagate = False
        try:
            yield
        finally:
            logger.removeHandler(handler)
            logger.setLevel(before[0])
            logger.propagate = before[1]

    @contextlib.contextmanager
    def bar(self, batches: DataSource, what: str) -> Iterator[Iterable[Batch]]:
        """The batches, with a progress bar on stderr, whose line ends before an error is told."""
        from tqdm import tqdm

        with tqdm(batches, desc=what, unit="batch", disable=not self.progress) as bar:
            yield bar

    def note(self, text: str) -> None:
        """Tells what happens, unless quiet."""
        if not self.quiet:
            click.echo(text, err=True)

    def result(self, text: str, data: Any) -> None:
        """Prints the result, as text or as JSON; there, numbers that are not finite are null."""
        try:
            shown = json.dumps(_plain(data), indent=2, allow_nan=False) if self.as_json else text
            # The names of files may hold bytes that are no UTF-8.
            click.echo(shown.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace"))
        except BrokenPipeError:  # `| head`: nobody reads on
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise SystemExit(141) from None  # as a shell reports SIGPIPE; 1 is for failed checks


class _LogHandler(logging.Handler):
    """Shows the log of the library as notes, above a progress bar."""

    def __init__(self, console: Console) -> None:
        super().__init__(logging.INFO)
        self.console = console

    def emit(self, record: logging.LogRecord) -> None:
        from tqdm import tqdm

        with tqdm.external_write_mode(file=sys.stderr):
            self.console.note(record.getMessage())


def _plain(value: Any) -> Any:
    """The value in terms that every JSON reader knows."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if value is None or isinstance(value, bool | int | str):
        return value
    return _plain(value.tolist()) if hasattr(value, "tolist") else str(value)
