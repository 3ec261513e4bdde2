"""MegEngine's traps in calibration: late errors, other threads, forks."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import megengine as mge
import numpy as np
import pytest

import qtrace
from qtrace.errors import QtraceError, SchemeError
from qtrace.preparation.model import fake_quants
from tests.nets import Chain, images

ROOT = Path(__file__).parent.parent.parent
_X = images(2, 3, 8, 8)

_LATE = """
import megengine.module as M, numpy as np, qtrace
from tests.nets import net
class Net(M.Module):
    def __init__(self):
        super().__init__()
        self.c, self.d = M.Conv2d(3, 4, 1), M.Conv2d(4, 4, 1)
    def forward(self, x, which):
        return BODY
x = np.ones((2, 3, 4, 4), "float32")
good, bad = np.array([1], "int32"), np.array([9], "int32")
prepared = qtrace.prepare(qtrace.trace(Net(), x, good, check=False))
try:
    qtrace.calibrate(prepared, [(x, good), (x, bad)], progress=False, engine="megengine")
except qtrace.errors.CalibrationError as error:
    print("told:", error, flush=True)
"""


@pytest.mark.quick(1)
@pytest.mark.parametrize("body", ["self.c(x)[which]", "self.d(self.c(x)[which])"])
def test_an_error_in_a_kernel_is_the_batchs_wherever_the_sites_are(body: str) -> None:
    script = _LATE.replace("BODY", body)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script], cwd=ROOT, capture_output=True, text=True
    )
    assert done.stdout.startswith("told: batch 1 gives 2 inputs"), done.stderr


_SLACK = """
import ctypes, os, time
from pathlib import Path
from qtrace import process
ctypes.CDLL(None).prctl(29, ctypes.c_ulong(40_000))
process.quiet()
import megengine as mge, numpy as np
(mge.Tensor(np.ones((64, 64), "float32")) + 1).numpy()
until = time.monotonic() + 300  # a thread gives itself its name
while time.monotonic() < until:
    if any("CompNode" in (task / "comm").read_text() for task in Path("/proc/self/task").iterdir()):
        break
    time.sleep(0.01)
for task in Path("/proc/self/task").iterdir():
    kind = "main" if task.name == str(os.getpid()) else (task / "comm").read_text().strip()
    print(kind.replace(" ", ""), Path("/proc", task.name, "timerslack_ns").read_text().strip())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lets threads oversleep")
def test_the_command_line_lets_megengines_idle_thread_sleep() -> None:
    command = [sys.executable, "-W", "ignore", "-c", _SLACK]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if "PermissionError" in done.stderr:
        pytest.skip("this user may not look at the timers of a thread")
    slack = [line.split() for line in done.stdout.splitlines()]
    assert [value for name, value in slack if name == "CompNodeSync"] == ["5000000"], done.stderr
    assert ["main", "40000"] in slack, "the main thread keeps its own"


_WAITING = """
import gc, logging, os, subprocess, sys
from qtrace import process
if sys.argv[1] == "start":
    class Collect(logging.Handler):
        def emit(self, record):
            gc.collect()  # as may happen at any time
    logging.getLogger("megbrain").addHandler(Collect())
    process.quiet()
import megengine as mge, numpy as np
gc.disable()
x = mge.Tensor(np.ones((64, 64), "float32"))
for _ in range(100):
    garbage = {"value": x + 1}
    garbage["itself"] = garbage
    x = x @ x / 64
    x.numpy()
print(os.environ.get("MGB_WORKER_MAX_SPIN"), logging.getLogger("megbrain").level == logging.INFO, flush=True)
if sys.argv[1] == "start":
    subprocess.run([sys.executable, "-W", "ignore", __file__, "child"], stderr=subprocess.DEVNULL, check=True)
"""


@pytest.mark.parametrize(
    ("wanted", "told"), [(None, "None True"), pytest.param("30", "30 True", marks=pytest.mark.slow)]
)
def test_megengines_threads_may_sleep_and_its_remark_on_that_hangs_nowhere(
    wanted: str | None, told: str, tmp_path: Path
) -> None:
    """Inside of a lock, it remarks at its first wait, or at every one if it may not spin at all."""
    script = tmp_path / "waiting.py"
    script.write_text(_WAITING, encoding="utf-8")
    environment = {k: v for k, v in os.environ.items() if k != "MGB_WORKER_MAX_SPIN"}
    environment |= {"PYTHONPATH": str(ROOT), **({} if wanted is None else {"MGB_WORKER_MAX_SPIN": wanted})}
    command = [sys.executable, "-W", "ignore", str(script), "start"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert (done.stdout, done.stderr) == (f"{told}\n{told}\n", "")


@pytest.mark.parametrize("engine", ["megengine", "onnxruntime"])
def test_tensors_are_touched_on_the_main_thread_only(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared = qtrace.prepare(
        qtrace.trace(Chain(3, 3), _X, check=False), {"observers": {"activation": "mse"}}
    )
    threads: set[int] = set()

    def noting(name: str) -> Any:
        real = getattr(mge.Tensor, name)

        def method(self: Any, *args: Any) -> Any:
            threads.add(threading.get_ident())
            return real(self, *args)

        return method

    for name in ("numpy", "__dlpack__"):
        monkeypatch.setattr(mge.Tensor, name, noting(name))
    qtrace.calibrate(prepared, [mge.Tensor(_X), _X], progress=False, engine=engine)
    assert threads == {threading.main_thread().ident}


def test_another_thread_is_refused_before_anything_runs() -> None:
    prepared = qtrace.prepare(qtrace.trace(Chain(1, 3), _X, check=False))
    caught: list[BaseException] = []

    def work() -> None:
        try:
            qtrace.calibrate(prepared, [_X], progress=False)
        except QtraceError as error:
            caught.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert "call it on the main thread" in str(caught[0])


def test_scales_of_another_shape_are_refused_before_any_kernel() -> None:
    prepared = qtrace.calibrate(
        qtrace.prepare(qtrace.trace(Chain(1, 3), _X, check=False)), [_X], progress=False
    )
    weight = next(fq for fq in fake_quants(prepared) if fq.shape == (3, 1, 1, 1))
    with pytest.raises(
        SchemeError, match="scales of shape .3, 1, 1, 1. do not fit a tensor of shape .4, 3, 3, 3."
    ):
        weight(mge.Tensor(np.ones((4, 3, 3, 3), "float32")))
    with pytest.raises(SchemeError, match="do not fit a tensor of shape .3,."):
        weight(mge.Tensor(np.ones(3, "float32")))
    weight.scale = mge.Tensor(weight.scale.numpy().reshape(3))
    with pytest.raises(SchemeError, match=f"site {weight.site}: its scale has shape .3,., not .3, 1, 1, 1."):
        prepared(mge.Tensor(_X))


def test_package_never_forks() -> None:
    """A process that forks after MegEngine was used is refused by it, or hangs."""
    forbidden = {"multiprocessing", "os.fork", "os.forkpty", "concurrent.futures.ProcessPoolExecutor"}
    for path in (ROOT / "qtrace").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        if not any(name.rpartition(".")[2] in text for name in forbidden):
            continue
        tree = ast.parse(text)
        names = {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                names |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                names |= {f"{node.module}.{alias.name}" for alias in node.names} | {
                    node.module.partition(".")[0]
                }
        assert not names & forbidden, path
