"""A runtime in a process of its own, here or elsewhere: the child, its connection, and its loaded files.

Code that may abort ends only the child, and the caller gets a sentence. The child is a script of its own
(`worker.py`), which imports no qtrace and no MegEngine. Both sides speak over its pipes: a line of JSON whose
``arrays`` lists dtype and shape of the arrays that follow as raw bytes. After the command of a runner,
`Connection` is the near end and `tunnel.py` the far end.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import re
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any, NoReturn

import numpy as np

from qtrace.errors import ExportError, refusing
from qtrace.runtimes import tunnel, worker
from qtrace.runtimes.host import IDLE_SECONDS, RuntimeHost

_CHUNK = 1 << 20  # bytes of one transfer
_SECONDS_UNMEASURED = 0.1  # looking at every process of the system takes milliseconds

OLDEST_PYTHON = (3, 8)  # what worker.py and tunnel.py are written for
_SIGN_SECONDS = 5.0  # at most between two signs of life of the far end, and until it has removed its folder

# Python 2 reads it, too. An interactive Python needs no argument that a shell between could change.
_GREETING = (
    b'import sys; sys.stdout.write("\\n@qtrace python %d.%d.%d\\n" % sys.version_info[:3]); '
    b"sys.stdout.flush()\n"
)
_GREETED = re.compile(rb"@qtrace python (\d+)\.(\d+)\.(\d+)")

SECONDS = 600.0  # the longest time for a request and its answer

# Runtime -> what installs it.
_DISTRIBUTIONS = {
    "litert": "ai-edge-litert",
    "ncnn": "ncnn",
    "onnxruntime": "onnxruntime",
    "openvino": "openvino",
}


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
        self, command: Sequence[str], subject: str, seconds: float = SECONDS, idle: float = IDLE_SECONDS
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


class Connection(Child):
    """A worker that a runner's command starts, maybe on another machine.

    Args:
        host: the host with a ``runner``.
        subject: what it does, for messages.
        seconds: the longest time for a request and its answer.

    Raises:
        ExportError: when the command starts no Python of a version that can be used.
    """

    def __init__(self, host: RuntimeHost, subject: str, seconds: float) -> None:
        self.host = host
        self._lines = bytearray()
        super().__init__([*host.command, "-i"], subject, seconds, host.timeout)
        self._computed = 0.0
        deadline = time.monotonic() + seconds
        self._write(_GREETING, deadline)
        self._check_version(self._await_greeting(deadline))
        self._write(_start_line(min(_SIGN_SECONDS, self.idle / 4)), deadline)

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
        for start in range(0, len(data), tunnel.LINE_BYTES):
            line = b">" + base64.b64encode(data[start : start + tunnel.LINE_BYTES]) + b"\n"
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
            process.wait(_SIGN_SECONDS)
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


class RuntimeFile:
    """A file that a runtime has loaded in a child process.

    Attributes:
        facts: what the runtime says of the file.
    """

    def __init__(self, child: RuntimeChild, facts: dict[str, Any]) -> None:
        self._child, self._number, self.facts = child, facts["number"], facts

    def run(self, inputs: Sequence[np.ndarray], **options: Any) -> list[np.ndarray]:
        """Runs the file and returns its outputs.

        Raises:
            RefusalError: when the runtime refuses the inputs.
            ExportError: when it does not survive them.
        """
        refusal = f"{self._child.title} refused the input"
        request = {"command": "run", "number": self._number, "refusal": refusal, **options}
        return self._child.ask(request, inputs)[1]

    def time(self) -> float:
        """Runs the file again on the inputs of the last `run` and returns the seconds that it took.

        Raises:
            ExportError: when the runtime does not survive it.
        """
        return float(self._measure("time")[0])

    def memory(self) -> int:
        """Returns the bytes that loading and running the file added to the child process at most.

        Raises:
            ExportError: when the system does not tell the memory of a process.
        """
        return int(self._measure("memory")[0])

    def optimized(self) -> bytes:
        """Returns the file as onnxruntime optimized it, where it was opened for that."""
        return self._measure("optimized")[1][0].tobytes()

    def profile(self) -> bytes:
        """Ends onnxruntime's profile and returns it, where the file was opened for that."""
        return self._measure("profile")[1][0].tobytes()

    def close(self) -> None:
        """Frees the file; others of the process stay."""
        self._measure("close")

    def _measure(self, command: str) -> Any:
        refusal = f"{self._child.title} cannot be measured"
        return self._child.ask({"command": command, "number": self._number, "refusal": refusal})


class RuntimeChild:
    """A process that loads and runs files in a runtime, by `worker`.

    Args:
        runtime: the name of the runtime, such as ``litert``.
        title: its name in messages.
        path: the file, for messages.
        host: the interpreter or machine; None for this interpreter.

    Raises:
        ExportError: when no such process can be started, or its Python is too old or lacks numpy.
    """

    def __init__(self, runtime: str, title: str, path: Path | str, host: RuntimeHost | None = None) -> None:
        self.runtime, self.title, self.path, self.host = runtime, title, path, host
        self._stored = 0
        self._child = _start(host, f"{title} with {path}")
        self.side: dict[str, Any] = self._greet()

    def open(self, arrays: Sequence[np.ndarray] = (), **options: Any) -> tuple[RuntimeFile, dict[str, Any]]:
        """Loads a file and returns it with facts about it.

        Args:
            arrays: the content of the file, where the runtime reads it from memory.
            **options: how the runtime loads it; see `worker`.

        Raises:
            RefusalError: when the runtime refuses the file.
            ExportError: when it does not survive it.
        """
        refusal = f"{self.title} cannot run {self.path}"
        request = {"command": "open", "runtime": self.runtime, "refusal": refusal, **options}
        facts, _ = self.ask(request, arrays)
        self.side = {
            "runtime": self.runtime,
            "version": facts["version"],
            **self.side,
            "host": str(self.host),
        }
        return RuntimeFile(self, facts), facts

    def ask(self, request: dict[str, Any], arrays: Sequence[np.ndarray] = ()) -> tuple[Any, list[np.ndarray]]:
        """Sends a request; see `Child.ask`."""
        try:
            return self._child.ask(request, arrays)
        except MissingPackageError as error:
            if self.host is None:
                raise
            package = _DISTRIBUTIONS[self.runtime]
            raise MissingPackageError(
                f"the Python of {self.host} cannot import {self.title}: install it there, as by "
                f"`{self.host} -m pip install {package}`."
            ) from error

    def close(self) -> None:
        """Ends the process."""
        self._child.close()

    def place(self, path: Path, beside: Sequence[Path] = ()) -> str:
        """Returns the path of a file where the process runs: elsewhere, it and its neighbours are copied.

        Raises:
            ExportError: when a file cannot be read, or does not stand next to ``path`` or below.
        """
        if self.host is None or not self.host.runner:
            return os.path.abspath(path)
        return f"{self.place_all([*beside, path], path.parent)}/{path.name}"

    def place_all(self, files: Sequence[Path], folder: Path) -> str:
        """Copies files to where the process runs, elsewhere, and returns the folder that stands for theirs.

        Args:
            files: at least one.
            folder: their folder; the copies lie in the same folders below.

        Raises:
            ExportError: when a file cannot be read, or does not stand in the folder or below.
        """
        self._stored += 1
        placed = ""
        for path in files:
            name = Path(os.path.relpath(path, folder)).as_posix()
            if name.startswith("../"):
                raise ExportError(f"{path} does not stand in {folder}: move it there, to run it elsewhere.")
            placed = self._copy(path, f"files/{self._stored}/{name}")[: -len(name) - 1]
        return placed

    def _copy(self, path: Path, target: str) -> str:
        with refusing(ExportError, path, "read"), open(path, "rb") as file:
            piece = file.read(_CHUNK)
            while True:
                request = {"command": "store", "path": target, "refusal": f"{path} cannot be copied"}
                stored, _ = self.ask(request, [np.frombuffer(piece, np.uint8)])
                piece = file.read(_CHUNK)
                if not piece:
                    return str(stored)

    def _greet(self) -> dict[str, Any]:
        """Reads the first line of the worker, which a banner may precede."""
        try:
            first = self._await_facts()
        except ExportError:
            self._refuse_old_version()
            raise
        if "missing" in first:
            self.close()
            self._refuse_old_version()
            both = f"{first['missing']} {_DISTRIBUTIONS[self.runtime]}"
            raise ExportError(
                f"the Python of {self.host} lacks {first['missing']}: install what runs the file "
                f"there, as by `{self.host} -m pip install {both}`."
            )
        side: dict[str, Any] = first[worker.MARK]
        return side

    def _refuse_old_version(self) -> None:
        """Raises the error of an interpreter of this machine that is too old for the worker."""
        if self.host is None or self.host.runner:
            return
        code = "import sys; sys.stdout.write('%d.%d.%d' % sys.version_info[:3])"
        try:
            answer = subprocess.run([*self.host.command, "-c", code], capture_output=True, timeout=10)
            version = answer.stdout.decode("utf-8", "replace").strip()
            numbers = tuple(map(int, version.split(".")))
        except (OSError, ValueError, subprocess.SubprocessError):
            return
        if numbers[:2] < OLDEST_PYTHON:
            raise too_old(str(self.host), version) from None

    def _await_facts(self) -> dict[str, Any]:
        deadline = time.monotonic() + self._child.seconds
        banner = 0
        while banner < tunnel.LINE_BYTES:
            line = self._child.read_line(deadline)
            banner += len(line) + 1
            if line.startswith(b"{") and worker.MARK.encode() in line:
                facts: dict[str, Any] = json.loads(line)
                return facts
        self.close()
        raise ExportError(f"{self.host} prints without end instead of running Python.")


def check_host(host: RuntimeHost, path: Path) -> None:
    """Checks that a host starts Python, before work that takes time.

    Args:
        host: the interpreter or machine.
        path: the file that will run there, for messages.

    Raises:
        ExportError: when no such process can be started, or its Python is too old or lacks numpy.
    """
    RuntimeChild("", "the runtime", path, host).close()


def _start(host: RuntimeHost | None, subject: str) -> Child:
    if host is None:
        # -I: the variables of Python that this process was started with mean qtrace's modules.
        return Child([sys.executable, "-I", worker.__file__], subject)
    seconds = max(SECONDS, host.timeout)
    if host.runner:
        return Connection(host, subject, seconds)
    return Child([*host.command, "-E", worker.__file__], subject, seconds, host.timeout)
