"""A child process at the end of a runner's command: the near end of `tunnel.py`."""

from __future__ import annotations

import base64
import contextlib
import json
import re
import subprocess
import time
import zlib
from collections.abc import Sequence
from pathlib import Path

from qtrace.errors import ExportError
from qtrace.runtimes import tunnel, worker
from qtrace.runtimes.child import Child
from qtrace.runtimes.host import RuntimeHost

__all__ = ["Connection"]

OLDEST_PYTHON = (3, 8)
_LINE_BYTES = 45 * 1024
_SECONDS_TO_LEAVE = 5.0  # for the far end to remove its folder
_MOST_SIGNS_APART = 5.0  # seconds

# Python 2 reads it, too. An interactive Python needs no argument that a shell between could change.
_GREETING = (
    b'import sys; sys.stdout.write("\\n@qtrace python %d.%d.%d\\n" % sys.version_info[:3]); '
    b"sys.stdout.flush()\n"
)
_GREETED = re.compile(rb"@qtrace python (\d+)\.(\d+)\.(\d+)")


class Connection(Child):
    """A worker that a runner's command starts, maybe on another machine.

    Args:
        host: the host with a ``runner``.
        subject: what it does, for messages.
        seconds: the longest time for a request and its answer.

    Raises:
        ExportError: when the command starts no Python of a version that can be used.
    """

    def __init__(self, host: RuntimeHost, subject: str, seconds: float = 600.0) -> None:
        self.host = host
        self._lines = bytearray()
        super().__init__([*host.command, "-i"], subject, seconds, host.timeout)
        self._computed = 0.0
        deadline = time.monotonic() + seconds
        self._write(_GREETING, deadline)
        self._check_version(self._await_greeting(deadline))
        self._write(_start_line(min(_MOST_SIGNS_APART, self.idle / 4)), deadline)

    def _await_greeting(self, deadline: float) -> Sequence[int]:
        """Reads what a login prints until Python greets, and returns its version."""
        while not (greeted := _GREETED.search(self._next_line(deadline))):
            pass
        return tuple(map(int, greeted.groups()))

    def _check_version(self, version: Sequence[int]) -> None:
        if tuple(version[:2]) < OLDEST_PYTHON:
            self.close()
            raise too_old(str(self.host), ".".join(map(str, version)))

    def _send(self, data: bytes, deadline: float) -> None:
        for start in range(0, len(data), _LINE_BYTES):
            line = b">" + base64.b64encode(data[start : start + _LINE_BYTES]) + b"\n"
            self._write(line, deadline)

    def _receive(self, deadline: float) -> None:
        """Waits for bytes of the worker, as long as it computes."""
        since = time.monotonic()
        while True:
            line = self._next_line(deadline)
            if line.startswith(b">"):
                self._received += base64.b64decode(line[1:])
                return
            if line.startswith(b"!"):
                raise self._describe_end(line[1:])
            if line.startswith(b"~"):
                computed, now = float(line[1:]), time.monotonic()
                if computed != self._computed:
                    self._computed, since = computed, now
                if now >= deadline:
                    self._give_up(self.seconds)
                if now - since >= self.idle:
                    self._give_up(self.idle)

    def _next_line(self, deadline: float) -> bytes:
        while b"\n" not in self._lines:
            self._lines += self._read_part(deadline)
        line, _, rest = bytes(self._lines).partition(b"\n")
        self._lines = bytearray(rest)
        return line.strip()

    def _processor_time(self) -> float:
        return self._computed if hasattr(self, "_computed") else 0.0

    def _describe_end(self, text: bytes) -> ExportError:
        """Returns the error of a worker whose far end tells how it ended."""
        self.close()
        facts = json.loads(text)
        if "reason" in facts:
            return ExportError(f"{self.subject} cannot run by {self.host}: {facts['reason']}.")
        return self._describe_code(facts["code"], facts["stderr"])

    def _describe_death(self) -> ExportError:
        """Returns the error of a connection that ended."""
        process = self._process
        assert process is not None
        code, message = process.wait(), self._last_message()
        self.close()
        last = f" ({message.rstrip('.')})" if message and not message.startswith(">>>") else ""
        return ExportError(
            f"{self.subject} lost its connection: the command {self.host} ended with code {code}{last}. Look "
            "whether it starts Python by itself, and run again."
        )

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        """Lets the far end see that the connection is over, so that it leaves no files."""
        if process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
        try:
            process.wait(_SECONDS_TO_LEAVE)
        except subprocess.TimeoutExpired:
            process.kill()


def too_old(where: str, version: str) -> ExportError:
    """Returns the error of an interpreter that cannot run the worker."""
    oldest = ".".join(map(str, OLDEST_PYTHON))
    return ExportError(f"{where} is Python {version}: a runtime is run by Python {oldest} or later.")


def _start_line(seconds: float) -> bytes:
    """Returns the line in which an interactive Python takes and runs both scripts."""
    sources = [Path(str(module.__file__)).read_text(encoding="utf-8") for module in (tunnel, worker)]
    packed = base64.b64encode(zlib.compress(json.dumps(sources).encode(), 9)).decode()
    return (
        f"import base64,json,zlib;t,w=json.loads(zlib.decompress(base64.b64decode('{packed}')).decode());"
        f"n={{'__name__':'qtrace_tunnel'}};exec(compile(t,'tunnel.py','exec'),n);n['run'](w,{seconds!r})\n"
    ).encode()
