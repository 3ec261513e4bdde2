"""The far end of a runner's command: starts `worker.py` in a folder of its own, and passes bytes both ways.

It is a script of its own, which an interactive Python takes in one line (`child.py`), and imports the
standard library only. Lines carry bytes as base64 through whatever lies between: shells, ssh, adb. Each line
from here begins with a mark: ``>`` bytes of the worker, ``~`` the seconds that it has computed, ``!`` how it
ended. When the worker or the connection ends, the folder goes.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from typing import Any

LINE_BYTES = 45 * 1024  # as base64 they are less than the 64 KiB that a terminal takes


def run(worker: str, seconds: float) -> None:
    """Runs the worker until it or the connection ends, and ends this process.

    Args:
        worker: the source text of ``worker.py``.
        seconds: the time between two signs of life.
    """
    for name in ("SIGTERM", "SIGHUP"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), lambda *_: sys.exit("a signal ended it"))
    code = 1
    try:
        folder = tempfile.mkdtemp(prefix="qtrace-")
        try:
            code = _run(worker, folder, seconds)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    except (OSError, SystemExit) as error:  # the connection is gone, or no folder can be made
        _try_to_say({"reason": str(error)})
    os._exit(code)  # no way back to the interactive Python that read this


def _run(worker: str, folder: str, seconds: float) -> int:
    script = os.path.join(folder, "worker.py")
    with open(script, "w", encoding="utf-8") as file:
        file.write(worker)
    messages = os.path.join(folder, "stderr")
    # What a runtime writes to a temporary folder goes with this one.
    changes = {"TMPDIR": folder, "PYTHONDONTWRITEBYTECODE": "1"}
    with open(messages, "wb") as stderr:
        process = subprocess.Popen(
            [sys.executable, script],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            cwd=folder,
            env=dict(os.environ, **changes),
            bufsize=0,
        )
    try:
        threading.Thread(target=_pass_requests, args=(process,), daemon=True).start()
        _pass_answers(process, seconds)
        code = process.wait()
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    with open(messages, encoding="utf-8", errors="replace") as stderr_text:
        lines = stderr_text.read().strip().splitlines()
    _say(b"!" + json.dumps({"code": code, "stderr": lines[-1][:300] if lines else ""}).encode())
    return 0


def _pass_requests(process: Any) -> None:
    """Writes what comes from the other side to the worker; ends the worker when the connection ends."""
    rest = b""
    try:
        while True:
            part = os.read(0, LINE_BYTES)
            if not part:
                break
            lines = (rest + part).split(b"\n")
            rest = lines.pop()
            for line in lines:
                if line.startswith(b">"):
                    _write(process.stdin.fileno(), base64.b64decode(line[1:]))
    except OSError:  # either side is gone
        pass
    process.kill()


def _pass_answers(process: Any, seconds: float) -> None:
    """Writes what the worker answers to the other side, and signs of life between."""
    pipe = process.stdout.fileno()
    while True:
        if select.select([pipe], [], [], seconds)[0]:
            part = os.read(pipe, LINE_BYTES)
            if not part:
                return
            _say(b">" + base64.b64encode(part))
        else:
            _say(b"~%.2f" % _processor_time(process.pid))


def _processor_time(pid: int) -> float:
    """Returns the processor time of a process; a running clock where the system does not tell it."""
    try:
        with open("/proc/%d/stat" % pid, encoding="utf-8", errors="replace") as stat:  # noqa: UP031
            fields = stat.read().rpartition(")")[2].split()
        return sum(map(int, fields[11:13])) / float(os.sysconf("SC_CLK_TCK"))
    except (OSError, ValueError):
        return time.monotonic()


def _say(line: bytes) -> None:
    _write(1, line + b"\n")


def _try_to_say(value: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):
        _say(b"!" + json.dumps(value).encode())


def _write(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
