"""Written parameters are the same, byte for byte, however the batches are shared out: real processes, Ray."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import qtrace
from tests.nets import MobileNetV2, images, randomize

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
BATCHES = 11
PLAIN = ("-m", "qtrace.cli")
SHUFFLED = ("-m", "tests.shuffling", str(BATCHES))
RECIPE = """\
schema: qtrace/1
observers: {activation: percentile}
rules:
  - {match: {op: add}, observers: {activation: moving_average}}
  - {match: {position: first}, observers: {activation: mse}}
  - {match: {op: linear}, observers: {activation: kl}}
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("place")
    module = randomize(MobileNetV2(0.25, blocks=(1, 2, 1)))
    qtrace.save(qtrace.trace(module, images(2, 3, 32, 32), check=False), folder / "net.mge")
    np.save(folder / "x.npy", images(2 * BATCHES - 1, 3, 32, 32))
    (folder / "r.yaml").write_text(RECIPE)
    return folder


def written(place: Path, name: str, engine: str, program: Sequence[str], *more: str) -> dict[str, str]:
    """The hash of every file that `qtrace calibrate` writes, in a process of its own."""
    out = place / f"{engine}-{name}"
    command = ["calibrate", "net.mge", "-d", "x.npy", "-r", "r.yaml", "-q", "--batch-size", "2"]
    command += ["--engine", engine, "--threads", "1", "-o", str(out), *more]
    path = os.pathsep.join([str(ROOT), *sys.path])  # the folder is another than that of the tests
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *program, *command],
        cwd=place,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(out.iterdir())}


@pytest.fixture(scope="module", params=["megengine", "onnxruntime"])
def alone(request: pytest.FixtureRequest, place: Path) -> tuple[str, dict[str, str]]:
    """The engine, and what one process writes."""
    files = written(place, "alone", request.param, PLAIN)
    assert {"quantized.mge", "prepared.mge", "report.json"} <= set(files)
    return request.param, files


@pytest.mark.parametrize(("count", "program"), [(2, PLAIN), (5, SHUFFLED)], ids=["2 in turn", "5 shuffled"])
def test_processes_write_the_same_bytes(alone: Any, place: Path, count: int, program: Any) -> None:
    engine, files = alone
    assert written(place, f"{len(program)}-{count}", engine, program, "--workers", f"{count}") == files


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed")
def test_a_local_ray_cluster_writes_the_same_bytes(alone: Any, place: Path) -> None:
    engine, files = alone
    assert written(place, "ray", engine, SHUFFLED, "--ray", "--workers", "2") == files
