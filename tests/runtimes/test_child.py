"""A child process: arrays both ways; abort, hang and refusal are one sentence; nothing is left behind."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from qtrace.errors import ExportError
from qtrace.runtimes.child import Child

_SCRIPT = """
import json, os, signal, sys, time
import numpy as np
answers = os.fdopen(os.dup(1), "wb")
os.dup2(2, 1)
for line in iter(sys.stdin.buffer.readline, b""):
    request = json.loads(line)
    arrays = []
    for dtype, shape in request["arrays"]:
        kind = np.dtype(dtype)
        count = kind.itemsize * int(np.prod(shape, dtype=np.int64))
        arrays.append(np.frombuffer(sys.stdin.buffer.read(count), kind).reshape(shape))
    print("noise of a runtime", flush=True)
    command = request["command"]
    if command == "abort":
        os.abort()
    if command == "leave":
        os._exit(3)
    while command == "compute" and time.process_time() < 0.3:
        pass
    if command == "hang":
        time.sleep(600)
    header = {"refused": "no such thing"} if command == "refuse" else {"value": os.getpid()}
    header["arrays"] = [(a.dtype.str, a.shape) for a in arrays]
    answers.write(json.dumps(header).encode() + b"\\n" + b"".join((a * 2).tobytes() for a in arrays))
    answers.flush()
"""


def _command(script: Path) -> list[str]:
    return [sys.executable, "-I", str(script)]


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(_SCRIPT)
    return path


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        # What nobody waits for stays as a zombie in a container.
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except (ProcessLookupError, FileNotFoundError):
        return False


def _wait_for_end(pid: int) -> None:
    deadline = time.monotonic() + 600
    while _alive(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not _alive(pid)


def _interpreter(folder: Path, kind: str) -> str:
    """A script that starts Python and stays, in a group of its own, too, as `timeout` does."""
    script = folder / "python"
    lines = {
        "shell": f'#!/bin/sh\n{sys.executable} "$@"\nexit $?\n',
        "group": f"#!{sys.executable}\nimport os, subprocess, sys\n"
        "sys.exit(subprocess.call([sys.executable, *sys.argv[1:]], preexec_fn=os.setpgrp))\n",
    }
    script.write_text(lines[kind])
    script.chmod(0o755)
    return str(script)


def test_arrays_of_every_kind_go_both_ways(script: Path) -> None:
    child = Child(_command(script), "a runtime")
    arrays = [
        np.arange(6, dtype=np.float32).reshape(2, 3).T,
        np.zeros((0, 4), np.int8),
        np.array(3, np.int64),
        np.ones(3_000_000, np.uint8),
    ]
    pid, results = child.ask({"command": "double"}, arrays)
    for array, result in zip(arrays, results, strict=True):
        assert (result.dtype, result.shape) == (array.dtype, array.shape)
        np.testing.assert_array_equal(result, array * 2)
        result[...] = 0  # writable: the child's answer is the caller's
    child.close()
    assert not _alive(pid)


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        ("abort", r"LiteRT with m.tflite ended its process by signal SIGABRT: .*near the ends of float32"),
        ("leave", "LiteRT with m.tflite ended its process with code 3: please report it"),
        ("hang", "LiteRT with m.tflite gave no answer in 0.5 s and was ended"),
        ("refuse", "no such thing"),
    ],
)
def test_what_happened_is_one_sentence(script: Path, command: str, sentence: str) -> None:
    child = Child(_command(script), "LiteRT with m.tflite")
    pid, _ = child.ask({"command": "double"})
    child.seconds = 0.5 if command == "hang" else 600.0
    with pytest.raises(ExportError, match=sentence) as caught:
        child.ask({"command": command}, [np.ones(3)])
    assert "\n" not in str(caught.value)
    if command == "refuse":
        assert child.ask({"command": "double"})[0] == pid, "a refusal is no end"
    else:
        assert not _alive(pid)
        with pytest.raises(ExportError, match="has ended already"):
            child.ask({"command": "double"})


def test_a_child_ends_with_its_owner(script: Path) -> None:
    child = Child(_command(script), "a runtime")
    pid, _ = child.ask({"command": "double"})
    del child
    gc.collect()
    _wait_for_end(pid)


@pytest.mark.quick(1)
@pytest.mark.parametrize("kind", ["shell", "group"])
def test_what_a_script_starts_counts_and_ends_with_it(tmp_path: Path, script: Path, kind: str) -> None:
    child = Child([_interpreter(tmp_path, kind), "-I", str(script)], "a runtime")
    pid, _ = child.ask({"command": "compute"})
    assert child._processor_time() >= 0.2 * os.sysconf("SC_CLK_TCK")
    child.idle = 0.5
    with pytest.raises(ExportError, match=r"gave no answer in 0\.5 s and was ended"):
        child.ask({"command": "hang"})
    _wait_for_end(pid)


def test_an_interrupted_request_leaves_no_answer_and_no_process(script: Path) -> None:
    code = (
        "import sys, threading, time\n"
        "from qtrace.runtimes.child import Child\n"
        "child = Child([sys.executable, '-I', sys.argv[1]], 'a runtime')\n"
        "print(child.ask({'command': 'double'})[0], flush=True)\n"
        "other = Child([sys.executable, '-I', sys.argv[1]], 'a runtime')\n"
        "print(other.ask({'command': 'double'})[0], flush=True)\n"
        "def interrupt(*_): raise KeyboardInterrupt\n"
        "other._exchange = interrupt\n"
        "try:\n"
        "    other.ask({})\n"
        "except KeyboardInterrupt:\n"
        "    print(other._process, flush=True)\n"
        'child._send(b\'{"command": "hang", "arrays": []}\\n\', time.monotonic() + 600)\n'
        # A thread that nobody joins keeps the child from being collected at the exit.
        "threading.Thread(target=lambda _: time.sleep(600), args=(child,), daemon=True).start()\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", code, str(script)], capture_output=True, text=True, timeout=600, check=True
    )
    first, second, process = run.stdout.split()
    assert process == "None"
    for pid in (first, second):
        _wait_for_end(int(pid))


def test_request_times_out_if_the_child_reads_nothing(tmp_path: Path) -> None:
    script = tmp_path / "deaf.py"
    script.write_text("import time\ntime.sleep(600)\n")
    child = Child(_command(script), "a runtime", seconds=0.5)
    with pytest.raises(ExportError, match="gave no answer in 0.5 s"):
        child.ask({"command": "double"}, [np.zeros(4_000_000, np.uint8)])


def test_timeout_spares_a_child_that_computes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "slow.py"
    script.write_text(
        "import json, sys, time\n"
        "sys.stdin.readline()\n"
        "while time.process_time() < 0.3:\n"
        "    pass\n"
        "print(json.dumps({'value': 'done', 'arrays': []}), flush=True)\n"
        "time.sleep(600)\n"
    )
    child = Child(_command(script), "a runtime", seconds=600)
    assert child.ask({})[0] == "done"
    assert child._processor_time() >= 0.2 * os.sysconf("SC_CLK_TCK")
    times = iter([7.0, 8.0, 9.0, 9.0])  # it computes for two more spans, and then no more
    monkeypatch.setattr(child, "_processor_time", lambda: next(times))
    child.idle = 0.1
    with pytest.raises(ExportError, match=r"a runtime gave no answer in 0\.1 s and was ended"):
        child.read_line(time.monotonic() + 600)
    assert not list(times)


def test_long_headers_are_read_at_once(tmp_path: Path) -> None:
    script = tmp_path / "long.py"
    script.write_text(
        "import json, sys\n"
        "for line in sys.stdin:\n"
        "    print(json.dumps({'value': 'x' * 3_000_000, 'arrays': []}), flush=True)\n"
    )
    child = Child(_command(script), "a runtime", seconds=600)
    assert len(child.ask({})[0]) == 3_000_000


def test_threads_get_their_own_answers(script: Path) -> None:
    child = Child(_command(script), "a runtime", seconds=600)

    def doubled(number: int) -> bool:
        _, (result,) = child.ask({"command": "double"}, [np.full(100_000, number)])
        return bool((result == 2 * number).all())

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(doubled, range(40)))


def test_missing_interpreter_is_one_sentence(script: Path) -> None:
    with pytest.raises(ExportError, match=r"needs a process .*'/nowhere/python' does not start: No such"):
        Child(["/nowhere/python", str(script)], "a runtime")
