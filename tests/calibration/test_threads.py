"""Calibrated parameters are the same, byte for byte, for any number of threads of BLAS and onnxruntime."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import megengine.functional as F
import megengine.module as M
import numpy as np
import pytest

import qtrace
from qtrace import QConfig
from qtrace.graph.types import TracedModule
from qtrace.ptq.layers import statistics as collecting
from tests.nets import images, net, randomize

ROOT = Path(__file__).parents[2]
GPTQ = ("fuse_bn", {"gptq": {"refit": True}})


def _convolutions() -> tuple[M.Module, list[np.ndarray]]:
    module = net(
        lambda self, x: self.c(F.relu(self.b(F.relu(self.a(x))))),
        a=M.Conv2d(8, 64, 3, padding=1),
        b=M.Conv2d(64, 64, 3, padding=1),
        c=M.Conv2d(64, 8, 1),
    )
    return module, [images(2, 8, 16, 16, seed=s) for s in range(8)]


def _attention() -> tuple[M.Module, list[np.ndarray]]:
    def forward(self: M.Module, x: Any) -> Any:
        weights = F.softmax(F.matmul(self.q(x), self.k(x).transpose(0, 2, 1)) * 0.1, axis=-1)
        return x + self.o(F.matmul(weights, self.v(x)))

    module = net(forward, **{name: M.Linear(192, 192) for name in "qkvo"})
    return module, [images(2, 1, 64, 192, seed=s)[:, 0] for s in range(8)]


def _calibrated(
    module: M.Module, batches: list[np.ndarray], threads: int = 1, engine: str = "onnxruntime"
) -> TracedModule:
    config = QConfig(backend="onnxruntime", observers={"activation": "mse"}, ptq=GPTQ)
    prepared = qtrace.prepare(qtrace.trace(module, batches[0], check=False), config)
    return qtrace.calibrate(prepared, batches, progress=False, engine=engine, threads=threads)


def _digest(model: TracedModule) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(model.named_tensors()):
        digest.update(name.encode() + np.ascontiguousarray(tensor.numpy()).tobytes())
    return digest.hexdigest()


def _print_digests(threads: int) -> None:
    for build in (_convolutions, _attention):
        module, batches = build()
        print(_digest(_calibrated(randomize(module), batches, threads)))


@pytest.mark.slow
def test_threads_of_blas_and_of_onnxruntime_do_not_matter() -> None:
    printed = set()
    for blas, threads in ((1, 1), (2, 2), (4, 1)):
        environment = {"OMP_NUM_THREADS": f"{blas}", "OPENBLAS_NUM_THREADS": f"{blas}"}
        done = subprocess.run(
            [
                sys.executable,
                "-W",
                "ignore",
                "-c",
                f"from {__name__} import _print_digests as run; run({threads})",
            ],
            cwd=ROOT,
            env={**os.environ, **environment, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
            capture_output=True,
            text=True,
            timeout=900,
        )
        assert done.returncode == 0, done.stderr
        printed.add(done.stdout)
    assert len(printed) == 1, printed


@pytest.mark.quick(1)
@pytest.mark.parametrize("engine", ["onnxruntime", "megengine"])
def test_gptq_gives_the_same_weights_and_report_on_any_number_of_threads(engine: str) -> None:
    """The first layer's inputs are more than are rounded jointly, and every fourth batch is held back."""
    module = net(
        lambda self, x: self.b(F.relu(self.a(x).reshape(-1, 8, 6, 6))),
        a=M.Linear(1200, 288),
        b=M.Conv2d(8, 16, 3, padding=1),
    )
    mixing = images(1, 1, 40, 1200)[0, 0]  # inputs that depend on each other compensate errors
    batches = [images(1, 1, 64, 40, seed=s)[0] @ mixing for s in range(8)]
    ones, threes = (_calibrated(randomize(module), batches, threads, engine) for threads in (1, 3))
    assert _digest(ones) == _digest(threes)
    assert str(qtrace.explain(ones)) == str(qtrace.explain(threes))
    assert "better (a_out" in str(qtrace.explain(ones))


def test_last_bits_of_what_layers_read_and_give_decide_no_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    module = net(
        lambda self, x: self.b(F.relu(self.a(x))), a=M.Conv2d(4, 8, 3, padding=1), b=M.Conv2d(8, 6, 1)
    )
    batches = [images(2, 4, 8, 8, seed=s) for s in range(8)]
    exact = _calibrated(module, batches, engine="megengine")

    def disturbed(function: Any) -> Any:
        def disturb(*args: Any) -> np.ndarray:
            rows = function(*args)
            bits = np.random.default_rng(rows.size).integers(-1, 2, rows.shape)
            return rows * (1 + bits * np.finfo(np.float32).eps).astype(np.float32)

        return disturb

    for name in ("read_rows", "result_rows"):
        monkeypatch.setattr(collecting, name, disturbed(getattr(collecting, name)))
    assert _digest(_calibrated(module, batches, engine="megengine")) == _digest(exact)
