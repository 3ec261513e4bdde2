"""A batch that forward computes as a Python number stays open where a reshape can find it out."""

from __future__ import annotations

from typing import Any

import megengine as mge
import megengine.functional as F
import megengine.module as M
import numpy as np
import pytest

import qtrace
from qtrace.errors import QtraceWarning, TraceError
from qtrace.graph.flatten import flatten
from tests.each import each_of
from tests.nets import images, net

X = images(4, 3, 8, 8)


def _windows(self: M.Module, x: mge.Tensor) -> mge.Tensor:
    """Divides into windows and puts them together again, as public Swin transformers of MegEngine do."""
    y = self.conv(x)
    n, c, h, w = y.shape
    y = y.transpose(0, 2, 3, 1).reshape(n, h // 4, 4, w // 4, 4, c)
    y = self.fc(y.transpose(0, 1, 3, 2, 4, 5).reshape(-1, 4, 4, c))
    batch = int(y.shape[0] / (h * w / 4 / 4))
    y = y.reshape(batch, h // 4, w // 4, 4, 4, -1).transpose(0, 1, 3, 2, 4, 5)
    return F.reshape(y, (batch, h, w, -1))


def _module() -> M.Module:
    return net(_windows, conv=M.Conv2d(3, 8, 3, padding=1), fc=M.Linear(8, 8))


@pytest.mark.parametrize("inside", [False, True])
def test_a_batch_in_a_reshape_stays_open(inside: bool) -> None:
    module = net(lambda self, x: self.part(x) + self.part(x * 2), part=_module()) if inside else _module()
    traced = qtrace.trace(module, X)
    for model in (traced, flatten(traced)):
        for count in (1, 4, 7):
            x = mge.Tensor(images(count, 3, 8, 8))
            np.testing.assert_allclose(model(x).numpy(), module(x).numpy(), rtol=1e-6, atol=1e-6)


def _two(x: Any, n: int) -> Any:
    return F.reshape(x, (n, 4 if n == 4 else 3, -1))


def _groups(self: M.Module, x: mge.Tensor) -> mge.Tensor:
    """Groups of at most four, as StyleGAN's deviation within minibatches has them."""
    groups = F.reshape(x, (min(int(x.shape[0]), 4), -1, 6))
    return F.reshape(groups.mean(axis=0), (-1, 6))


def test_a_size_that_follows_the_batch_for_a_while_is_not_opened() -> None:
    with pytest.raises(TraceError, match=r"of another batch size \(3 instead of 2\)"):
        qtrace.trace(net(_groups), np.random.default_rng(0).normal(size=(2, 6)).astype(np.float32))


def test_an_opened_batch_that_takes_other_axes_in_is_said() -> None:
    module = net(lambda self, x: F.reshape(self.conv(x), (int(x.shape[0]), 8, 64)), conv=M.Conv2d(3, 8, 1))
    with pytest.warns(
        QtraceWarning, match=r"such as 4x3x16x16, the model fails there and the trace does not"
    ):
        qtrace.trace(module, X)


REFUSED: dict[str, Any] = {
    "another op": lambda self, x: x + F.zeros((int(x.shape[0]), 1, 1, 1)),
    "two sizes": lambda self, x: _two(x, int(x.shape[0])),
    "a number that follows": lambda self, x: F.reshape(x, (int(x.shape[0]), -1)) * int(x.shape[0]),
}


@each_of("case", REFUSED)
def test_what_a_reshape_cannot_find_out_is_refused_as_before(case: str) -> None:
    with pytest.raises(TraceError, match=r"of another batch size \(5 instead of 4\)"):
        qtrace.trace(net(REFUSED[case]), X)
