"""A child process for code that may abort: it ends the child alone, and the caller gets a sentence.

The child is a script of its own, which imports no qtrace and no MegEngine. Both sides speak over its pipes: a
line of JSON whose ``arrays`` lists dtype and shape of the arrays that follow as raw bytes.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

from qtrace.errors import ExportError
from qtrace.process import runtime_child

__all__ = ["Child", "RuntimeChild", "RuntimeFile"]

_CHUNK = 1 << 20
_IDLE_SECONDS = 60.0  # a process that waits that long without computing hangs


class Child:
    """A process that answers requests until it is closed, dies, or does not answer in time.

    Args:
        script: the Python file that it runs.
        subject: what it does, for messages: "LiteRT with model.tflite".
        seconds: the longest time for a request and its answer.
        idle: the longest time in which it neither answers nor computes.
        python: the interpreter that runs the script; None for that of this process.
    """

    def __init__(
        self,
        script: Path,
        subject: str,
        seconds: float = 600.0,
        idle: float = _IDLE_SECONDS,
        python: str | None = None,
    ) -> None:
        self.subject, self.seconds, self.idle = subject, seconds, idle
        self._process: subprocess.Popen[bytes] | None = None
        self._received = bytearray()
        try:
            # -I: the script's folder, whose modules are qtrace's, is not searched.
            self._process = subprocess.Popen(
                [python or sys.executable, "-I", str(script)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                bufsize=0,
            )
        except OSError as error:
            raise ExportError(
                f"{subject} needs a process of its own, which does not start: {error.strerror or error}."
            ) from error
        os.set_blocking(self._pipe("stdin").fileno(), False)

    def ask(self, request: dict[str, Any], arrays: Sequence[np.ndarray] = ()) -> tuple[Any, list[np.ndarray]]:
        """Sends a request with arrays and returns the answer: its value and its arrays.

        Raises:
            ExportError: when the child refuses the request, dies, or does not answer in time.
        """
        if self._process is None:
            raise ExportError(f"{self.subject} has ended already: see the error of the call before.")
        contiguous = [np.asarray(array, order="C") for array in arrays]
        described = [(array.dtype.str, array.shape) for array in contiguous]
        deadline = time.monotonic() + self.seconds
        self._write(json.dumps({**request, "arrays": described}).encode() + b"\n", deadline)
        for array in contiguous:
            self._write(array.tobytes(), deadline)
        header = json.loads(self._read_line(deadline))
        values = []
        for dtype, shape in header["arrays"]:
            kind = np.dtype(dtype)
            data = self._read(kind.itemsize * int(np.prod(shape, dtype=np.int64)), deadline)
            values.append(np.frombuffer(data, kind).reshape(shape))
        if "error" in header:
            raise ExportError(header["error"])
        return header["value"], values

    def close(self) -> None:
        """Ends the process."""
        process, self._process = self._process, None
        if process is None:
            return
        if process.poll() is None:
            process.kill()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):  # what was not sent is of no use now
                    pipe.close()
        process.wait()

    def __del__(self) -> None:
        self.close()

    def _pipe(self, name: str) -> IO[bytes]:
        pipe: IO[bytes] = getattr(self._process, name)
        return pipe

    def _write(self, data: bytes, deadline: float) -> None:
        pipe, sent = self._pipe("stdin"), 0
        while sent < len(data):
            self._wait(pipe, selectors.EVENT_WRITE, deadline)
            try:
                sent += os.write(pipe.fileno(), data[sent : sent + _CHUNK])
            except BlockingIOError:
                continue
            except BrokenPipeError:
                raise self._describe_death() from None

    def _read_line(self, deadline: float) -> bytes:
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
        pipe = self._pipe("stdout")
        self._wait(pipe, selectors.EVENT_READ, deadline)
        part = os.read(pipe.fileno(), _CHUNK)
        if not part:
            raise self._describe_death()
        self._received += part

    def _wait(self, pipe: IO[bytes], event: int, deadline: float) -> None:
        """Waits until the pipe is ready, as long as the process computes and the deadline has not passed."""
        before = self._processor_time()
        with selectors.DefaultSelector() as selector:
            selector.register(pipe, event)
            while not selector.select(max(0.0, min(self.idle, deadline - time.monotonic()))):
                now, late = self._processor_time(), time.monotonic() >= deadline
                if late or now == before:
                    break
                before = now
            else:
                return
        self.close()
        raise ExportError(
            f"{self.subject} gave no answer in {self.seconds if late else self.idle:g} s and was ended: run "
            "it by itself to see whether it is slow or hangs."
        )

    def _processor_time(self) -> float:
        """Returns the processor time of the process; a running clock where the system does not tell it."""
        assert self._process is not None
        try:
            state = Path(f"/proc/{self._process.pid}/stat").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return time.monotonic()
        return float(sum(map(int, state.rpartition(")")[2].split()[11:13])))

    def _describe_death(self) -> ExportError:
        """Returns the error of a process that ended without an answer."""
        process = self._process
        assert process is not None
        code = process.wait()
        self.close()
        if code >= 0:
            return ExportError(f"{self.subject} ended its process with code {code}: please report it.")
        return ExportError(
            f"{self.subject} ended its process by signal {signal.Signals(-code).name}: the runtime does not "
            "survive this file or its inputs. Look for values near the ends of float32 and for sizes that "
            "are too large, or report it to the authors of the runtime."
        )


class RuntimeFile:
    """A file that a runtime has loaded in a child process."""

    def __init__(self, child: RuntimeChild, number: int) -> None:
        self._child, self._number = child, number

    def run(self, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Runs the file and returns its outputs.

        Raises:
            ExportError: when the runtime refuses the inputs or does not survive them.
        """
        refusal = f"{self._child.title} refused the input"
        return self._child.ask({"command": "run", "number": self._number, "refusal": refusal}, inputs)[1]

    def time(self) -> float:
        """Runs the file again on the inputs of the last `run` and returns the seconds that it took.

        Raises:
            ExportError: when the runtime does not survive it.
        """
        return float(self._measure("time"))

    def memory(self) -> int:
        """Returns the bytes that loading and running the file added to the child process at most.

        Raises:
            ExportError: when the system does not tell the memory of a process.
        """
        return int(self._measure("memory"))

    def _measure(self, command: str) -> Any:
        refusal = f"{self._child.title} cannot be measured"
        return self._child.ask({"command": command, "number": self._number, "refusal": refusal})[0]


class RuntimeChild(Child):
    """A process that loads and runs files in a runtime, by `runtime_child`.

    Args:
        runtime: the name of the runtime, such as ``litert``.
        title: its name in messages.
        path: the file, for messages.
    """

    def __init__(self, runtime: str, title: str, path: Path) -> None:
        self.runtime, self.title, self.path = runtime, title, path
        super().__init__(Path(runtime_child.__file__), f"{title} with {path}")

    def open(self, arrays: Sequence[np.ndarray] = (), **options: Any) -> tuple[RuntimeFile, dict[str, Any]]:
        """Loads a file and returns it with facts about it.

        Args:
            arrays: the content of the file, where the runtime reads it from memory.
            **options: how the runtime loads it; see `runtime_child`.

        Raises:
            ExportError: when the runtime refuses the file or does not survive it.
        """
        refusal = f"{self.title} cannot run {self.path}"
        request = {"command": "open", "runtime": self.runtime, "refusal": refusal, **options}
        facts, _ = self.ask(request, arrays)
        return RuntimeFile(self, facts["number"]), facts
