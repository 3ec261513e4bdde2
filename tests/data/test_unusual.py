"""Warnings about data on which the network was hardly trained."""

from __future__ import annotations

import logging
from typing import Any

import megengine.module as M
import numpy as np
import pytest
from megengine import Tensor

import qtrace
from tests.nets import net

RANDOM = np.random.default_rng(0)
X = RANDOM.standard_normal((2, 3, 8, 8)).astype(np.float32)
PIXELS = RANDOM.integers(0, 256, (2, 3, 8, 8)).astype(np.float32)
PREPROCESS = {"size": [3, 8, 8], "mean": [120.0] * 3, "std": [60.0] * 3}
PLAIN = {"size": [3, 8, 8], "mean": [0.0] * 3, "std": [1.0] * 3}


def _warnings(caplog: Any, batch: Any, config: Any = None, scales: bool = False) -> list[str]:
    module = net(lambda self, x: self.conv((x - 120.0) / 60.0 if scales else x), conv=M.Conv2d(3, 4, 3))
    prepared = qtrace.prepare(qtrace.trace(module, Tensor(X), check=False), config or {})
    caplog.clear()
    with caplog.at_level(logging.WARNING, "qtrace"):
        qtrace.calibrate(prepared, [batch, batch], progress=False, engine="megengine")
    return [r.getMessage() for r in caplog.records if "batch 0: input" in r.getMessage()]


@pytest.mark.parametrize("config", [{}, {"preprocess": PREPROCESS}], ids=["no word", "normalized"])
def test_raw_pixels(caplog: Any, config: Any) -> None:
    (text,) = _warnings(caplog, PIXELS, config)
    assert "input x holds whole numbers up to 255, such as raw pixels" in text


def test_raw_pixels_that_are_meant(caplog: Any) -> None:
    assert not _warnings(caplog, PIXELS, {"preprocess": PLAIN})
    assert not _warnings(caplog, PIXELS, scales=True)
    assert not _warnings(caplog, X)


@pytest.mark.parametrize("number", [0.0, 1.5])
def test_the_same_number_everywhere(caplog: Any, number: float) -> None:
    (text,) = _warnings(caplog, np.full_like(X, number))
    assert f"input x is {number:g} everywhere: look at what reads the data" in text
