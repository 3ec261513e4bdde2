"""Tensors that share their values with copies, and are read without an array that stays."""

from __future__ import annotations

import copy
import subprocess
import sys

import megengine as mge
import megengine.functional as F
import megengine.module as M
import numpy as np
import pytest
from megengine.autodiff import GradManager
from megengine.core.tensor.dtype import qint8
from megengine.optimizer import SGD

import qtrace
from qtrace.graph.flatten import flatten
from qtrace.graph.kernels import read_array, shared_copies, shared_copy, stored_tensor
from tests.each import each_of
from tests.nets import net

VALUES = np.random.default_rng(0).standard_normal((256, 512)).astype(np.float32)


COPIES = """
from pathlib import Path
import megengine as mge, megengine.functional as F, megengine.module as M, numpy as np
import qtrace
from qtrace.graph.flatten import flatten
from qtrace.graph.kernels import read_array
from tests.nets import net


def resident():
    mge._full_sync()
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) * 1024


module = net(lambda self, x: self.b(F.relu(self.a(x))), a=M.Linear(1024, 1024), b=M.Linear(1024, 1024))
traced = qtrace.trace(module, np.ones((2, 1024), np.float32), check=False)
for weight in traced.parameters():
    weight._reset(weight.detach()[...])  # drops the array that reading it has left
before = resident()
copies = [flatten(traced) for _ in range(8)]
for flat in copies:
    read_array(flat.a.weight)
    read_array(flat.b.weight)
print(resident() - before)
"""


@each_of("value", [VALUES, VALUES > 0, np.float32(3), np.zeros((0, 3), np.float32)])
def test_a_copy_has_the_values_and_the_kind(value: np.ndarray) -> None:
    for kind in (mge.Tensor, mge.Parameter):
        tensor = kind(value)
        copied = shared_copy(tensor)
        assert type(copied) is kind
        assert copied.dtype == tensor.dtype
        np.testing.assert_array_equal(read_array(copied), value)
    np.testing.assert_array_equal(read_array(stored_tensor(np.asarray(value))), value)


def test_no_write_reaches_the_other_side() -> None:
    first = mge.Parameter(VALUES)
    others = [shared_copy(first) for _ in range(3)]
    first[...] = 0.0
    others[0] += 1.0
    others[1]._reset(mge.Parameter(2 * VALUES))
    manager, optimizer = GradManager().attach([others[2]]), SGD([others[2]], lr=0.5)
    with manager:
        manager.backward((others[2] * 2).sum())
    optimizer.step()
    assert first.grad is None
    assert not first.numpy().any()
    expected = [VALUES + 1, 2 * VALUES, VALUES - 1]
    for tensor, values in zip(others, expected, strict=True):
        np.testing.assert_allclose(tensor.numpy(), values, rtol=1e-6)


def test_quantized_tensors_keep_their_scale() -> None:
    tensor = mge.Tensor(VALUES).astype(qint8(0.1))
    assert shared_copy(tensor).dtype == tensor.dtype


def test_values_are_copied_where_optimizers_write_into_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGENGINE_INPLACE_UPDATE", "1")
    np.testing.assert_array_equal(shared_copy(mge.Parameter(VALUES)).numpy(), VALUES)


def test_a_flat_copy_takes_no_memory_for_weights() -> None:
    """In a process of its own: what the allocator kept or gives back of other tests would count here."""
    run = subprocess.run([sys.executable, "-c", COPIES], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    weights = 2 * 4 * 1024**2
    # The allocator may keep some arrays of what was read; eight copies that share nothing have 8 * weights.
    assert int(run.stdout) < 4 * weights


def test_a_flat_copy_is_independent() -> None:
    module = net(lambda self, x: self.b(F.relu(self.a(x))), a=M.Linear(16, 16), b=M.Linear(16, 16))
    traced = qtrace.trace(module, np.ones((2, 16), np.float32), check=False)
    for weight in traced.parameters():
        weight._reset(weight.detach()[...])
    copies = [flatten(traced) for _ in range(2)]
    kept = traced.a.weight.numpy().copy()
    copies[0].a.weight[...] = 0.0
    np.testing.assert_array_equal(copies[1].a.weight.numpy(), kept)
    assert copies[0].a.weight is not traced.a.weight


def test_a_shared_parameter_stays_shared_in_a_copy() -> None:
    layer = M.Linear(256, 256)
    module = net(lambda self, x: self.b(self.a(x)), a=layer, b=M.Linear(256, 256))
    module.b.weight = layer.weight
    copied = copy.deepcopy(module, shared_copies(module))
    assert copied.a.weight is copied.b.weight
    assert copied.a.weight is not layer.weight
