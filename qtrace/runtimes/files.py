"""Files that a runtime has loaded in a process of its own, here or elsewhere."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from qtrace.errors import ExportError
from qtrace.runtimes import worker
from qtrace.runtimes.child import Child, MissingPackageError
from qtrace.runtimes.connection import OLDEST_PYTHON, Connection, too_old
from qtrace.runtimes.host import RuntimeHost

__all__ = ["RuntimeChild", "RuntimeFile", "check_host"]

_PIECE = 8 << 20  # bytes of a file in one request
_SECONDS = 600.0
_MOST_LINES_BEFORE = 10_000  # of what a login prints

# Runtime -> what installs it.
_DISTRIBUTIONS = {
    "litert": "ai-edge-litert",
    "ncnn": "ncnn",
    "onnxruntime": "onnxruntime",
    "openvino": "openvino",
}


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
        try:
            with open(path, "rb") as file:
                piece = file.read(_PIECE)
                while True:
                    request = {"command": "store", "path": target, "refusal": f"{path} cannot be copied"}
                    stored, _ = self.ask(request, [np.frombuffer(piece, np.uint8)])
                    piece = file.read(_PIECE)
                    if not piece:
                        return str(stored)
        except OSError as error:
            raise ExportError(f"{path} cannot be read: {error.strerror or error}.") from error

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
        for _ in range(_MOST_LINES_BEFORE):
            line = self._child.read_line(deadline)
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
    seconds = max(_SECONDS, host.timeout)
    if host.runner:
        return Connection(host, subject, seconds)
    return Child([*host.command, "-E", worker.__file__], subject, seconds, host.timeout)
