"""Masks of infinity are added to scores in float; nothing rounds them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import megengine as mge
import megengine.functional as F
import megengine.module as M
import numpy as np
import pytest

import qtrace
from tests.nets import images, net

_INF = float("inf")
_BUFFER = mge.Tensor(np.triu(np.full((1, 6, 6), -_INF, np.float32), 1))


def _by_setitem(self: M.Module, mask: mge.Tensor) -> mge.Tensor:
    found = F.zeros(mask.shape, dtype="float32")
    found[:, 4:] = -_INF  # by the mask, MegEngine on CPU writes something else now and then
    return F.expand_dims(found, 1)


def _by_where(self: M.Module, mask: mge.Tensor) -> mge.Tensor:
    return F.expand_dims(F.where(mask, F.full(mask.shape, -_INF), F.zeros(mask.shape)), 1)


def _by_buffer(self: M.Module, mask: mge.Tensor) -> mge.Tensor:
    return self.buffer[:, :6] + 0.0


@pytest.mark.quick(2)
@pytest.mark.parametrize("make", [_by_setitem, _by_where, _by_buffer])
@pytest.mark.parametrize("recipe", [None, "detr"])
def test_a_mask_of_infinity_stays_float(
    make: Callable[..., mge.Tensor], recipe: str | None, tmp_path: Path
) -> None:
    def forward(self: M.Module, x: mge.Tensor, mask: mge.Tensor) -> mge.Tensor:
        x = x.reshape(x.shape[0], 4, -1).transpose(0, 2, 1)
        scores = F.matmul(self.q(x), self.k(x), transpose_b=True) * 0.5
        scores += make(self, mask.astype(bool))
        return self.out(F.matmul(F.softmax(scores, axis=-1), self.v(x)))

    layers = {name: M.Linear(4, 4) for name in ("q", "k", "v", "out")}
    model = net(forward, buffer=_BUFFER, **layers)
    batch = (images(2, 4, 2, 3), np.array([[0, 0, 0, 0, 1, 1], [0, 0, 0, 0, 0, 0]], np.float32))
    traced = qtrace.trace(model, *batch)
    prepared = qtrace.calibrate(qtrace.prepare(traced, recipe), [batch], progress=False)
    want = model(*map(mge.Tensor, batch)).numpy()
    got = prepared(*map(mge.Tensor, batch)).numpy()
    assert np.isfinite(got).all()
    assert np.abs(got - want).max() < 0.1 * np.abs(want).max()
    if recipe is None:  # the other one keeps the sum in float anyway
        notes = qtrace.explain(prepared).annotation.notes
        assert any("infinity" in n.reason for n in notes if n.state == "float")
    converted = qtrace.convert(prepared)
    qtrace.export(converted, tmp_path / "m.onnx")
    report = qtrace.verify(tmp_path / "m.onnx", converted, [batch], min_sqnr_db=20)
    assert report.passed, report.table()


def test_finite_masks_and_clips_are_computed_on_integers() -> None:
    model = net(
        lambda self, x: self.c(x + self.mask),
        c=M.Conv2d(3, 2, 1),
        mask=mge.Tensor(np.full((1, 1, 1, 4), -9.0, "f4")),
    )
    notes = qtrace.explain(qtrace.prepare(qtrace.trace(model, images(1, 3, 4, 4)))).annotation.notes
    assert {n.state for n in notes if n.kind in ("add", "conv2d")} == {"int"}
