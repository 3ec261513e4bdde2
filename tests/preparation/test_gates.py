"""What decides by the size of a float reads it in float; a function in pieces does not decide."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import megengine as mge
import megengine.functional as F
import megengine.module as M
import numpy as np
import pytest

import qtrace
from qtrace.inspection.explanation import explain
from tests.nets import net

X = np.random.default_rng(0).standard_normal((2, 32, 24, 24)).astype(np.float32)

GATES: dict[str, Callable[[Any], Any]] = {
    "threshold": lambda y: F.where(y > 0.3, y, F.zeros_like(y)),
    "threshold of another value": lambda y: F.where(y[:, :1] > 0, y[:, 1:2], y[:, 2:3]),
    "product with a mask": lambda y: y * (y >= 0.25).astype("float32"),
    "peaks": lambda y: y * (F.max_pool2d(y, 3, 1, 1) == y),
    "both sides computed": lambda y: F.where(y[:, :1] < y[:, 1:2], y[:, 2:3], y[:, 3:4]),
    "bits": lambda y: y > 0,
    "codes": lambda y: F.round(y * 4).astype("int32"),
    "cells": lambda y: F.floor(y * 4),
    "cast": lambda y: (y * 4).astype("int32"),
    "signs": lambda y: F.sign(y),
}
PIECES: dict[str, Callable[[Any], Any]] = {
    "product with its sign": lambda y: y * (y > 0),
    "product with a cast": lambda y: (y >= 0).astype("float32") * y,
    "signed root": lambda y: F.sign(y) * F.sqrt(F.abs(y)),
    "zero of a tensor": lambda y: F.where(y > mge.Tensor(0.0), y, y * 0.1),
    "the other way round": lambda y: F.where((y > 0) == False, y * 0.1, y),  # noqa: E712
    "one sign for two": lambda y: (lambda m: F.where(m, y, y * 0.1) + F.where(m, y * 0.5, y * 0.2))(y > 0),
    "leaky": lambda y: F.where(y > 0, y, F.minimum(y, 0) * 0.3 - 0.01 * y),
    "elu": lambda y: F.where(y <= 0, F.exp(F.minimum(y, 0)) - 1, y),
}


def _rounds_result(gate: Callable[[Any], Any], config: dict[str, Any]) -> bool:
    """Whether the result of the last of three convolutions, before ``gate``, is rounded."""

    def forward(self: Any, x: Any) -> Any:
        return gate(self.c(F.relu(self.b(F.relu(self.a(x))))))

    layers = {name: M.Conv2d(32, 32, 3, padding=1) for name in "abc"}
    prepared = qtrace.prepare(qtrace.trace(net(forward, **layers), X, check=False), config)
    *_, last = [note for note in explain(prepared).annotation.notes if note.weight]
    return bool(last.output)


@pytest.mark.parametrize("name", GATES)
def test_a_gate_reads_floats(name: str) -> None:
    assert not _rounds_result(GATES[name], {"placement": "fastest"})


@pytest.mark.parametrize("name", PIECES)
def test_a_function_in_pieces_is_no_gate(name: str) -> None:
    assert _rounds_result(PIECES[name], {"placement": "fastest"})


def test_the_config_wins() -> None:
    assert _rounds_result(lambda y: F.relu(y) + F.floor(y), {"placement": "everything"})
