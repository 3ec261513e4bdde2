"""The multiply-accumulates of an op are those of its formula, at the traced shapes."""

from __future__ import annotations

from typing import Any

import megengine as mge
import megengine.functional as F
import megengine.module as M
import numpy as np

import qtrace
from qtrace import ops
from qtrace.graph import exprs
from qtrace.ops.base import count_macs
from qtrace.preparation.normalize import normalize
from tests.each import each_of
from tests.nets import images, net

X = images(2, 4, 6, 6)


def _matrix(*shape: int) -> mge.Parameter:
    return mge.Parameter(np.ones(shape, np.float32))


# name -> module, its multiply-accumulates
CASES: dict[str, tuple[M.Module, int]] = {
    "conv": (net(lambda self, x: self.c(x), c=M.Conv2d(4, 8, 3)), 2 * 8 * 4 * 4 * 4 * 9),
    "groups": (net(lambda self, x: self.c(x), c=M.Conv2d(4, 8, 3, groups=2)), 2 * 8 * 4 * 4 * 2 * 9),
    "transposed": (
        net(lambda self, x: self.c(x), c=M.ConvTranspose2d(4, 8, 2, stride=2)),
        2 * 36 * 4 * 8 * 4,
    ),
    "linear": (net(lambda self, x: self.c(F.flatten(x, 1)), c=M.Linear(144, 5)), 2 * 144 * 5),
    "matmul": (net(lambda self, x: F.matmul(x, self.m), m=_matrix(6, 3)), 2 * 4 * 6 * 3 * 6),
    "matmul, transposed": (
        net(lambda self, x: F.matmul(x, self.m, transpose_a=True), m=_matrix(6, 3)),
        2 * 4 * 6 * 3 * 6,
    ),
    "relu": (net(lambda self, x: F.relu(x)), 0),
}


def _calls(module: M.Module) -> list[Any]:
    calls = [ops.read(e) for e in exprs(normalize(qtrace.trace(module, X, check=False)))]
    return [call for call in calls if call is not None]


@each_of("name", CASES)
def test_the_count_is_that_of_the_formula(name: str) -> None:
    module, macs = CASES[name]
    assert sum(count_macs(call) for call in _calls(module)) == macs


def test_an_unknown_shape_counts_nothing() -> None:
    (call,) = _calls(CASES["conv"][0])
    call.out._shape = None
    assert count_macs(call) == 0
