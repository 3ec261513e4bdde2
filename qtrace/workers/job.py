"""What workers do: a job, its tasks and outcomes, and the messages between processes."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import IO, Any, Protocol

import qtrace.errors
from qtrace.errors import QtraceError

__all__ = ["Job", "Outcome", "Pool", "attempt", "read_message", "write_message"]

_LENGTH_BYTES = 8


def write_message(stream: IO[bytes], value: Any) -> None:
    """Writes an object, at once."""
    data = pickle.dumps(value)
    stream.write(len(data).to_bytes(_LENGTH_BYTES, "big") + data)
    stream.flush()


def read_message(stream: IO[bytes]) -> Any:
    """Reads an object.

    Args:
        stream: a pipe, buffered or not.

    Raises:
        EOFError: when the stream ends before the object does.
    """
    return pickle.loads(_read(stream, int.from_bytes(_read(stream, _LENGTH_BYTES), "big")))


def _read(stream: IO[bytes], size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        part = stream.read(size - len(data))
        if not part:
            raise EOFError
        data += part
    return bytes(data)


News = Callable[[Any], None]
"""Gets what a task tells before its end, such as the number of a finished batch."""


class Job(Protocol):
    """What every worker does; it is pickled, and so are its tasks, their news and their values."""

    def open(self) -> Callable[[Any, News], Any]:
        """Prepares a worker, and returns the function from a task to its value.

        Raises:
            QtraceError: when the worker cannot do any task.
        """

    def describe_end(self, number: int, ending: str, news: int) -> str:
        """Returns the sentence for a process that ended before its task did.

        Args:
            number: the number of the task.
            ending: how the process ended, as a clause.
            news: how many news it gave before.
        """

    def describe_failure(self, number: int, line: str) -> str:
        """Returns the sentence for a task that failed on a cluster, which says why in a line."""


@dataclass(frozen=True)
class Outcome:
    """The end of a task, as workers send it.

    Attributes:
        value: the value of the task; None after an error.
        problem: the name of an error's class and its text; None without an error.
    """

    value: Any = None
    problem: tuple[str, str] | None = None

    @property
    def error(self) -> QtraceError | None:
        """The error as an object."""
        if self.problem is None:
            return None
        kind, text = self.problem
        return getattr(qtrace.errors, kind, QtraceError)(text)

    def get(self) -> Any:
        """Returns the value, or raises the error."""
        error = self.error
        if error is not None:
            raise error
        return self.value


def attempt(function: Callable[[], Any]) -> Outcome:
    """Calls a function; an error of the user becomes the outcome."""
    try:
        return Outcome(function())
    except QtraceError as error:
        return Outcome(problem=(type(error).__name__, str(error)))


class Pool(Protocol):
    """Workers that do tasks at the same time.

    Attributes:
        count: number of tasks at a time.
    """

    count: int

    def __enter__(self) -> Pool:
        """Starts the workers."""

    def __exit__(self, *error: Any) -> None:
        """Ends the workers, even in the middle of a task."""

    def run(self, tasks: Sequence[Any], news: News = lambda item: None) -> Iterable[Outcome]:
        """Does tasks; the outcomes come in their order, as soon as they are there."""
