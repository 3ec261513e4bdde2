"""Numbers that stand for infinity in the data: read from samples, or refused where they spoil a range."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import megengine as mge
import megengine.functional as F
import megengine.module as M
import numpy as np
import pytest

import qtrace
from qtrace.calibration.collecting import read_large
from qtrace.errors import CalibrationError
from qtrace.graph.types import TracedModule
from qtrace.preparation.model import fake_quants
from tests.each import each_of
from tests.nets import net

T = 6
READERS: dict[str, Callable[[M.Module, mge.Tensor], Any]] = {
    "max": lambda self, s: self.b(F.max(s, axis=2, keepdims=True)),
    "argmax": lambda self, s: F.argmax(s, axis=2),
    "topk": lambda self, s: F.topk(s.reshape(-1, T), 2, descending=True)[0],
    "output": lambda self, s: s,
}

MOVES = {"max": ["max_out"], "topk": ["reshape_out"]}


def _masked(reader: str, value: float) -> tuple[TracedModule, tuple[np.ndarray, np.ndarray]]:
    read = READERS[reader]
    model = net(lambda self, x, m: read(self, self.a(x) + m), a=M.Linear(8, T), b=M.Linear(1, 4))
    x = np.random.default_rng(0).normal(size=(2, T, 8)).astype(np.float32)
    mask = np.zeros((2, T, T), np.float32)
    mask[:, np.triu(np.ones((T, T)), 1) > 0] = value
    return qtrace.trace(model, x, mask, check=False), (x, mask)


def _largest_scale(prepared: TracedModule) -> float:
    return max(float(fq.scale.numpy().max()) for fq in fake_quants(prepared))


@each_of("value", [-1e4, -1e9])
@each_of("reader", READERS)
def test_a_mask_that_spoils_a_range_is_refused_with_a_cure_that_works(reader: str, value: float) -> None:
    traced, batch = _masked(reader, value)
    with pytest.raises(CalibrationError, match=r"site add_out.* its range is -1e\+0") as refusal:
        qtrace.calibrate(qtrace.prepare(traced, "backend/tflite"), [batch], progress=False)
    text = str(refusal.value)
    names = text.partition("name: [")[2].partition("]")[0].split(", ")
    assert names == ["add_out", *MOVES.get(reader, ())]
    rules = [{"match": {"name": names}, "quantize": False}]
    cured = qtrace.prepare(traced, {"backend": "tflite", "rules": rules})
    assert _largest_scale(qtrace.calibrate(cured, [batch], progress=False)) < 0.1


@each_of("value", [-1e4, -np.inf])
@each_of("reader", READERS)
def test_samples_show_that_an_input_stands_for_infinity(reader: str, value: float) -> None:
    traced, batch = _masked(reader, value)
    prepared = qtrace.prepare(traced, "backend/tflite", samples=[batch])
    assert _largest_scale(qtrace.calibrate(prepared, [batch], progress=False)) < 0.1


def test_infinity_in_the_data_names_both_ways_out() -> None:
    traced, batch = _masked("max", -np.inf)
    with pytest.raises(CalibrationError, match="If the infinity is meant, .* call prepare with samples"):
        qtrace.calibrate(qtrace.prepare(traced, "backend/tflite"), [batch], progress=False)


def test_where_only_readers_round_the_value_the_cure_names_them() -> None:
    model = net(lambda self, x, m: self.b(F.neg(self.a(x) + m)), a=M.Linear(8, T), b=M.Linear(T, 4))
    x, mask = np.ones((2, T, 8), np.float32), np.zeros((2, T, T), np.float32)
    mask[:, 0] = -1e9
    traced = qtrace.trace(model, x, mask, check=False)
    config = {"backend": "tflite", "rules": [{"match": {"name": ["add_out", "neg_out"]}, "quantize": False}]}
    with pytest.raises(CalibrationError, match=r"site neg_out.*name: \[neg_out, b_out\]"):
        qtrace.calibrate(qtrace.prepare(traced, config), [(x, mask)], progress=False)


def test_masks_alone_and_continuous_ranges_are_no_gap() -> None:
    assert read_large("x", np.array([0.0, -1e9], np.float32)) is None  # two integers are enough
    assert read_large("x", np.arange(0, 65535, 7, dtype=np.float32)) is not None  # judged by the step
    model = net(lambda self, x: self.c(x), c=M.Conv2d(3, 2, 1))
    batch = np.random.default_rng(0).uniform(0, 65535, (1, 3, 8, 8)).astype(np.float32)
    traced = qtrace.trace(model, batch, check=False)
    qtrace.calibrate(qtrace.prepare(traced, "megengine"), [batch], progress=False)
