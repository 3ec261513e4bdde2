"""The engine onnxruntime in another interpreter: the same parameters, or a sentence if it is not there."""

from __future__ import annotations

import logging
import sys

import megengine.module as M
import numpy as np
import pytest

import qtrace
from qtrace.errors import ExportError
from qtrace.preparation.model import fake_quants
from qtrace.runtimes.host import RuntimeHost
from tests.nets import Chain, images, randomize

BATCHES = [images(4, 3, 16, 16, seed=seed) for seed in range(2)]


def _calibrated(host: RuntimeHost | None) -> list[M.Module]:
    prepared = qtrace.prepare(qtrace.trace(randomize(Chain(2, 3)), BATCHES[0], check=False))
    qtrace.calibrate(prepared, BATCHES, progress=False, engine="onnxruntime", runtime_host=host)
    return fake_quants(prepared)


def test_the_parameters_are_those_of_this_interpreter(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "qtrace"):
        pairs = list(zip(_calibrated(RuntimeHost(sys.executable)), _calibrated(None), strict=True))
    assert pairs
    for there, here in pairs:
        np.testing.assert_array_equal(there.qparams().scale, here.qparams().scale)
        np.testing.assert_array_equal(there.qparams().zero_point, here.qparams().zero_point)
    assert any(f"by {sys.executable}" in record.message for record in caplog.records)


def test_missing_interpreter_fails_calibration_instead_of_changing_the_engine() -> None:
    with pytest.raises(ExportError, match="'/nowhere/python' does not start"):
        _calibrated(RuntimeHost("/nowhere/python"))
