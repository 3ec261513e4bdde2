"""A child process for code that may abort: it ends only the child, and the caller gets a sentence.

The child is a script of its own, which imports no qtrace and no MegEngine. Both sides speak over its pipes: a
line of JSON whose ``arrays`` lists dtype and shape of the arrays that follow as raw bytes.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import shutil
import signal
import subprocess
import tempfile
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any, NoReturn

import numpy as np

from qtrace.errors import ExportError
from qtrace.runtimes.host import IDLE_SECONDS

__all__ = ["Child", "MissingPackageError", "RefusalError"]

_CHUNK = 1 << 20
_SECONDS_UNMEASURED = 0.1  # looking at every process of the system takes milliseconds


class RefusalError(ExportError):
    """A runtime refuses a file or its inputs.

    Attributes:
        reason: what the runtime says, in one line.
    """

    def __init__(self, subject: str, reason: str) -> None:
        self.reason = reason
        super().__init__(f"{subject}: {reason}" if subject else reason)


class MissingPackageError(ExportError):
    """The interpreter of a child lacks the runtime."""


class Child:
    """A process that answers requests until it is closed, dies, or does not answer in time.

    Threads may share it: a request waits for the answer of the one before.

    The command may be a script that starts what answers: all of its session ends together, and its
    processor time counts together.

    Args:
        command: what it runs.
        subject: what it does, for messages: "LiteRT with model.tflite".
        seconds: the longest time for a request and its answer.
        idle: the longest time in which it neither answers nor computes.
    """

    _own_session = True

    def __init__(
        self, command: Sequence[str], subject: str, seconds: float = 600.0, idle: float = IDLE_SECONDS
    ) -> None:
        self.subject, self.seconds, self.idle = subject, seconds, idle
        self._process: subprocess.Popen[bytes] | None = None
        self._received = bytearray()
        self._asking = threading.Lock()  # an answer belongs to the request before it
        folder = tempfile.mkdtemp(prefix="qtrace-runtime-")
        self._remove_folder = weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        self._messages = Path(folder, "stderr")
        try:
            with self._messages.open("wb") as messages:
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=messages,
                    # What a runtime writes to a temporary folder goes with this one.
                    env={**os.environ, "TMPDIR": folder},
                    bufsize=0,
                    start_new_session=self._own_session,
                )
        except (OSError, ValueError) as error:
            self._remove_folder()
            reason = getattr(error, "strerror", None) or error
            raise ExportError(
                f"{subject} needs a process of its own, and {command[0]!r} does not start: {reason}."
            ) from None  # no fault of a file that is being written
        if self._own_session:  # ctrl-C of a terminal does not reach it, so this ends it at the exit, too
            self._kill = weakref.finalize(self, _kill_session, self._process.pid, os.getpid())
        os.set_blocking(self._pipe("stdin").fileno(), False)

    def ask(self, request: dict[str, Any], arrays: Sequence[np.ndarray] = ()) -> tuple[Any, list[np.ndarray]]:
        """Sends a request with arrays and returns the answer: its value and its arrays.

        Raises:
            RefusalError: when the child refuses the request.
            MissingPackageError: when its interpreter lacks the runtime.
            ExportError: when the child dies, or does not answer in time.
        """
        contiguous = [np.asarray(array, order="C") for array in arrays]
        with self._asking:
            if self._process is None:
                raise ExportError(f"{self.subject} has ended already: see the error of the call before.")
            try:
                header, values = self._exchange(request, contiguous)
            except BaseException:  # ctrl-C, too: the rest of this answer must not answer the next request
                self.close()
                raise
        if "missing" in header:
            raise MissingPackageError(f"{self.subject} needs a package that is missing: {header['refused']}.")
        if "refused" in header:
            raise RefusalError(request.get("refusal", ""), header["refused"])
        return header["value"], values

    def _exchange(
        self, request: dict[str, Any], arrays: Sequence[np.ndarray]
    ) -> tuple[Any, list[np.ndarray]]:
        described = [(array.dtype.str, array.shape) for array in arrays]
        deadline = time.monotonic() + self.seconds
        self._send(json.dumps({**request, "arrays": described}).encode() + b"\n", deadline)
        for array in arrays:
            self._send(array.tobytes(), deadline)
        header = json.loads(self.read_line(deadline))
        values = []
        for dtype, shape in header["arrays"]:
            kind = np.dtype(dtype)
            data = self._read(kind.itemsize * int(np.prod(shape, dtype=np.int64)), deadline)
            values.append(np.frombuffer(data, kind).reshape(shape))
        return header, values

    def close(self) -> None:
        """Ends the process."""
        process, self._process = self._process, None
        if process is None:
            return
        self._end(process)
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):  # what was not sent is of no use now
                    pipe.close()
        process.wait()
        self._remove_folder()

    def __del__(self) -> None:
        self.close()

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        self._kill()

    def _pipe(self, name: str) -> IO[bytes]:
        pipe: IO[bytes] = getattr(self._process, name)
        return pipe

    def _send(self, data: bytes, deadline: float) -> None:
        self._write(data, deadline)

    def _write(self, data: bytes, deadline: float) -> None:
        pipe, sent = self._pipe("stdin"), 0
        view = memoryview(data)
        while sent < len(data):
            self._wait(pipe, selectors.EVENT_WRITE, deadline)
            try:
                sent += os.write(pipe.fileno(), view[sent : sent + _CHUNK])
            except BlockingIOError:
                continue
            except BrokenPipeError:
                raise self._describe_death() from None

    def read_line(self, deadline: float) -> bytes:
        """Returns the next line of the process.

        Args:
            deadline: the time, by `time.monotonic`, at which it is ended.

        Raises:
            ExportError: when the process dies, or writes no line in time.
        """
        while b"\n" not in self._received:
            self._receive(deadline)
        line, _, rest = bytes(self._received).partition(b"\n")
        self._received = bytearray(rest)
        return line

    def _read(self, count: int, deadline: float) -> bytearray:
        while len(self._received) < count:
            self._receive(deadline)
        data, self._received = self._received[:count], self._received[count:]
        return data

    def _receive(self, deadline: float) -> None:
        """Waits for output of the process and adds it to what was received."""
        self._received += self._read_part(deadline)

    def _read_part(self, deadline: float) -> bytes:
        pipe = self._pipe("stdout")
        self._wait(pipe, selectors.EVENT_READ, deadline)
        part = os.read(pipe.fileno(), _CHUNK)
        if not part:
            raise self._describe_death()
        return part

    def _wait(self, pipe: IO[bytes], event: int, deadline: float) -> None:
        """Waits until the pipe is ready, as long as the process computes and before the deadline."""
        with selectors.DefaultSelector() as selector:
            selector.register(pipe, event)
            if selector.select(max(0.0, min(_SECONDS_UNMEASURED, self.idle, deadline - time.monotonic()))):
                return
            before = self._processor_time()
            while not selector.select(max(0.0, min(self.idle, deadline - time.monotonic()))):
                now, late = self._processor_time(), time.monotonic() >= deadline
                if late or now == before:
                    break
                before = now
            else:
                return
        self._give_up(self.seconds if late else self.idle)

    def _give_up(self, seconds: float) -> NoReturn:
        """Ends a process that gave no answer in time."""
        self.close()
        raise ExportError(
            f"{self.subject} gave no answer in {seconds:g} s and was ended: run it by itself to see whether "
            "it is slow or hangs."
        )

    def _processor_time(self) -> float:
        """Returns the processor time of its session; a running clock where the system does not tell it."""
        assert self._process is not None
        times = [ticks for _, ticks in _processes_of(self._process.pid)]
        return float(sum(times)) if times else time.monotonic()

    def _describe_death(self) -> ExportError:
        """Returns the error of a process that ended without an answer."""
        process = self._process
        assert process is not None
        code, message = process.wait(), self._last_message()
        self.close()
        return self._describe_code(code, message)

    def _describe_code(self, code: int, message: str) -> ExportError:
        if code >= 0:
            last = f" Its last line: {message}" if message else ""
            return ExportError(f"{self.subject} ended its process with code {code}: please report it.{last}")
        return ExportError(
            f"{self.subject} ended its process by signal {signal.Signals(-code).name}: the runtime does not "
            "survive this file or its inputs. Look for values near the ends of float32 and for sizes that "
            "are too large, or report it to the authors of the runtime."
        )

    def _last_message(self) -> str:
        """Returns the last line that the process wrote to stderr."""
        with self._messages.open("rb") as messages:
            size = messages.seek(0, os.SEEK_END)
            messages.seek(max(0, size - 4096))
            lines = messages.read().decode("utf-8", "replace").strip().splitlines()
        return lines[-1].strip()[:300] if lines else ""


def _processes_of(session: int) -> Iterator[tuple[int, int]]:
    """Yields each process of a session and the ticks that it and its ended children have computed."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        if int(fields[3]) == session:
            yield int(path.parent.name), sum(map(int, fields[11:15]))


def _kill_session(session: int, owner: int) -> None:
    """Ends all processes of a session, unless this process is a fork of the owner."""
    if os.getpid() != owner:
        return
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(session, signal.SIGKILL)
    for pid, _ in _processes_of(session):  # a shell, or `timeout`, makes further groups
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
