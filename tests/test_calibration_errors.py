"""What calibrate refuses, and that it leaves the module as it was."""

from __future__ import annotations

from typing import Any

import megengine.module as M
import numpy as np
import pytest

import qtrace
from qtrace.errors import CalibrationError
from qtrace.graph.types import TracedModule

_X = np.random.RandomState(0).randn(2, 3, 4, 4).astype("float32")


def _prepared() -> TracedModule:
    return qtrace.prepare(qtrace.trace(M.Sequential(M.Conv2d(3, 4, 1)), _X))


@pytest.mark.parametrize("limit", [0, -1, 1.5, True, "2"])
def test_max_batches_is_a_positive_whole_number(limit: Any) -> None:
    with pytest.raises(CalibrationError, match="max_batches is"):
        qtrace.calibrate(_prepared(), [_X], max_batches=limit, progress=False)


@pytest.mark.parametrize("batches", [None, 3, _X, {"x": _X}, "abc"], ids=lambda b: type(b).__name__)
def test_one_batch_is_no_list_of_batches(batches: Any) -> None:
    with pytest.raises(CalibrationError, match="give an iterable of batches"):
        qtrace.calibrate(_prepared(), batches, progress=False)


def test_a_failure_leaves_every_phase_as_it_was() -> None:
    prepared = qtrace.calibrate(_prepared(), [_X], progress=False)
    phases = [m.phase for m in prepared.modules() if hasattr(m, "phase")]
    with pytest.raises(CalibrationError, match="NaN"):
        qtrace.calibrate(prepared, [_X * np.nan], progress=False)
    assert [m.phase for m in prepared.modules() if hasattr(m, "phase")] == phases
    assert set(phases) == {"quantize"}
