"""The first images of a batch: shapes tell whether a network with an open batch takes so few."""

from __future__ import annotations

import megengine.functional as F
import megengine.module as M
import pytest
from megengine import Tensor

import qtrace
from qtrace.data import batches
from qtrace.graph.open_axes import OpenAxes, OpenAxis, write_open_axes
from qtrace.graph.types import TracedModule
from qtrace.preparation.samples import first_calls
from qtrace.quantizing.evaluation import shorten
from tests.nets import images, net

DATA = images(8, 3, 8, 8)


def _traced(batch: int | None, opened: bool) -> TracedModule:
    def forward(self: M.Module, x: Tensor) -> Tensor:
        return F.reshape(self.a(x), (-1 if batch is None else batch, 4 * 36))

    traced = qtrace.trace(net(forward, a=M.Conv2d(3, 4, 3)), DATA)
    if opened:
        write_open_axes(traced, OpenAxes((OpenAxis("x", 0, "N", "N"),)))
    return traced


@pytest.mark.parametrize("opened", [True, False])
def test_a_batch_is_cut_without_a_run_where_it_is_recorded_as_open(
    opened: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = []
    run = batches.can_run
    monkeypatch.setattr(batches, "can_run", lambda *given: runs.append(1) or run(*given))
    calls = first_calls([((Tensor(DATA),), {})], 4, _traced(None, opened))
    assert [call[0][0].shape[0] for call in calls] == [4]
    assert bool(runs) is not opened


def test_a_batch_stays_whole_where_an_edit_has_fixed_what_is_recorded_as_open() -> None:
    traced = _traced(8, opened=True)
    calls = first_calls([((Tensor(DATA),), {})], 4, traced)
    assert [call[0][0].shape[0] for call in calls] == [8]
    assert shorten((DATA,), traced, 0, 4)[0].shape[0] == 8  # the verdict's batches, too
