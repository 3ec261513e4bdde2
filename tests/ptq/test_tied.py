"""Parameters that two layers hold: no algorithm changes one layer by the needs of the other."""

from __future__ import annotations

from typing import Any

import megengine as mge
import megengine.functional as F
import megengine.module as M
import numpy as np
import pytest

import qtrace
from qtrace.preparation.model import read_record
from tests.nets import left_lines

RANDOM = np.random.default_rng(0)
IDS = RANDOM.integers(0, 11, (4, 5)).astype(np.int32)


class Words(M.Module):
    """A model of words whose output layer has the weight of its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.fc, self.out = M.Embedding(11, 8), M.Linear(8, 8), M.Linear(8, 11, bias=False)
        self.words.weight = mge.Parameter(RANDOM.normal(size=(11, 8)).astype(np.float32))
        self.out.weight = self.words.weight

    def forward(self, ids: Any) -> Any:
        return self.out(F.relu(self.fc(self.words(ids))))


class Pair(M.Module):
    """Two linear layers of one weight, each behind another that could be scaled against it."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (M.Linear(8, 8) for _ in range(4))
        self.d.weight = self.b.weight

    def forward(self, x: Any) -> Any:
        return self.d(F.relu(self.c(F.relu(self.b(F.relu(self.a(x)))))))


CONFIG = {"backend": "generic", "weight": {"bits": 4}}


def _left(prepared: Any) -> str:
    return "; ".join(left_lines(read_record(prepared).ptq[-1]))


@pytest.mark.quick(1)
@pytest.mark.parametrize("algorithm", ["gptq", "adaround", "bias_correction"])
def test_a_tied_weight_is_left_with_the_reason(algorithm: str) -> None:
    traced = qtrace.trace(Words(), IDS, check=False)
    prepared = qtrace.prepare(traced, {**CONFIG, "ptq": [algorithm]})
    before = prepared.words.weight.numpy()
    qtrace.calibrate(prepared, [IDS], progress=False)
    np.testing.assert_array_equal(prepared.words.weight.numpy(), before)
    assert prepared.out.weight is prepared.words.weight
    assert "its parameter out.weight is tied to words.weight" in _left(prepared)


@pytest.mark.parametrize("algorithm", ["equalize", "smooth"])
def test_float_algorithms_keep_what_tied_layers_compute(algorithm: str) -> None:
    x = RANDOM.normal(size=(4, 8)).astype(np.float32)
    module = Pair()
    module.a.weight[0] *= 30.0  # worth scaling
    traced = qtrace.trace(module, x, check=False)
    prepared = qtrace.prepare(traced, {**CONFIG, "ptq": [algorithm]})
    qtrace.calibrate(prepared, [x], progress=False)
    qtrace.set_phase(prepared, "float")
    np.testing.assert_allclose(prepared(mge.Tensor(x)).numpy(), module(mge.Tensor(x)).numpy(), rtol=1e-4)


def test_equalize_passes_ops_that_read_parameters_alone() -> None:
    traced = qtrace.trace(Words(), IDS, check=False)  # the embedding indexes a parameter
    qtrace.prepare(traced, {**CONFIG, "ptq": ["equalize"]})
