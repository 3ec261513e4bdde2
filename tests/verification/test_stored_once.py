"""A value that a file of fixed sizes has once for all samples, and the graph for each."""

from __future__ import annotations

import megengine as mge
import megengine.functional as F
import megengine.module as M
import numpy as np

import qtrace
from qtrace.verification import runs


class Resized(M.Module):
    """Bicubic resizing as imports have it: a product with weights that are repeated for each sample."""

    def __init__(self):
        super().__init__()
        self.conv = M.Conv2d(2, 2, 1)
        self.weights = np.random.default_rng(0).random((1, 1, 6, 8), dtype=np.float32)

    def forward(self, x):
        weights = F.broadcast_to(mge.Tensor(self.weights), (x.shape[0], 2, 6, 8))
        return F.matmul(self.conv(x), weights)


def exported(path):
    rng = np.random.default_rng(1)
    data = [rng.random((4, 2, 5, 6), dtype=np.float32) for _ in range(3)]
    prepared = qtrace.prepare(qtrace.trace(Resized(), data[0][:1], check=False), "backend/tflite")
    qtrace.calibrate(prepared, data)
    converted = qtrace.convert(prepared)
    qtrace.export(converted, path)
    return converted, data


def test_verify_compares_a_tensor_stored_once_with_every_sample(tmp_path):
    path = tmp_path / "net.tflite"
    converted, data = exported(path)
    report = qtrace.verify(path, converted, data)
    assert report.passed
    assert any("weights" in name or "broadcast" in name for name in report.sites["op_by_op"])


def test_a_site_of_one_sample_that_is_no_constant_is_found(tmp_path, monkeypatch):
    """A file that gives the first sample alone gives no other one its values."""
    whole = runs._for_all_samples
    monkeypatch.setattr(runs, "_for_all_samples", lambda integers, shape: whole(integers[:1], shape))
    path = tmp_path / "net.tflite"
    converted, data = exported(path)
    assert not qtrace.verify(path, converted, data).passed
