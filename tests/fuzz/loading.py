"""Loads files in processes of their own with limits: ``python -m tests.fuzz.loading``.

A ``.onnx`` file is imported, every other one is a saved model.

Reads the path of a file from each line of stdin and writes a line: "loaded", "refused: ..." with the
sentence, or "finding: ..." for everything that a file may not do. MegEngine is loaded once; it has run
nothing yet when the process is forked.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from functools import lru_cache
from pathlib import Path

import qtrace
from qtrace.errors import QtraceError
from qtrace.inspection.explanation import explain

__all__ = ["stop_server", "verdict"]

CPU, WALL = 10, 120  # seconds; the machine may be busy
MEMORY = 1 << 30  # bytes above those of the idle process
THREADS = 16  # more than those of the idle process
RAN = "fuzz-ran"


@lru_cache(maxsize=1)
def _server() -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.fuzz.loading"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        bufsize=1,
    )
    atexit.register(process.kill)
    return process


def stop_server() -> None:
    """Ends the server: only then does the CPU time of this process's children include that of the loads."""
    if _server.cache_info().currsize:
        process = _server()
        assert process.stdin is not None
        process.stdin.close()
        process.wait()
        _server.cache_clear()


def verdict(path: Path) -> str:
    """What became of loading a file: "loaded", "refused: ..." with the sentence, or "finding: ..."."""
    server = _server()
    assert server.stdin is not None
    assert server.stdout is not None
    server.stdin.write(f"{path}\n")
    server.stdin.flush()
    return server.stdout.readline().rstrip("\n") or "finding: the server ended"


def load_one(path: str, threads: int) -> str:
    """Loads one file, and does with it what shows a graph that is not whole."""
    stage = "load"
    try:
        model = qtrace.from_onnx(path) if path.endswith(".onnx") else qtrace.load(path)
        stage = "repr"
        str(model.graph), repr(model)
        stage = "explain"
        str(explain(model))
        stage = "save"
        with tempfile.TemporaryDirectory() as folder:
            qtrace.save(model, Path(folder) / "again.mge")
            stage = "load again"
            qtrace.load(Path(folder) / "again.mge")
    except QtraceError as error:
        said = str(error)
        said.encode()
        if stage == "load again" or not said.strip() or "\n" in said or len(said) > 2000:
            return f"finding: {stage}: {said[:300]!r}"
        return f"refused: {said}"
    except BaseException as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{place.filename}:{place.lineno}"
        return f"finding: {stage}: {type(error).__name__}: {str(error)[:150]!r} in {where}"
    if len(os.listdir("/proc/self/task")) > threads + THREADS:
        return "finding: it started threads"
    return "loaded"


def _child(path: str, answer: int) -> None:
    """Runs in the forked process."""
    threads = len(os.listdir("/proc/self/task"))
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY, size + MEMORY))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU, CPU + 1))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.alarm(WALL)
    os.write(answer, load_one(path, threads).encode("utf-8", "replace"))
    os._exit(0)


def judge(path: str) -> str:
    """The line about one file."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            _child(path, writer)
        os._exit(3)
    os.close(writer)
    said = b""
    while chunk := os.read(reader, 1 << 16):
        said += chunk
    os.close(reader)
    _, status = os.waitpid(child, 0)
    if os.path.exists(RAN):
        return "finding: it ran a command"
    if os.WIFSIGNALED(status):
        return f"finding: ended by {signal.Signals(os.WTERMSIG(status)).name}"
    return said.decode().replace("\n", " ") or f"finding: ended with {status}"


def main() -> None:
    faulthandler.disable()
    for line in sys.stdin:
        started = time.monotonic()
        said = judge(line.rstrip("\n"))
        print(said, flush=True)
        print(f"{time.monotonic() - started:.2f} s: {said[:200]}", file=sys.stderr)


if __name__ == "__main__":
    main()
