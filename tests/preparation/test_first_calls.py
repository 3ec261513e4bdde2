"""The first images of a batch: shapes tell whether a network with an open batch takes so few."""

from __future__ import annotations

import megengine.functional as F
import megengine.module as M
import numpy as np
import pytest
from megengine import Tensor

import qtrace
from qtrace.data import batches
from qtrace.graph.flatten import flatten
from qtrace.graph.open_axes import OpenAxes, OpenAxis, write_open_axes
from qtrace.graph.types import TracedModule
from qtrace.preparation.faithfulness import cut_images, first_calls, halve_samples
from qtrace.quantizing.call_data import shorten
from tests.nets import images, net

DATA = images(8, 3, 8, 8)


def _traced(batch: int | None, opened: bool) -> TracedModule:
    def forward(self: M.Module, x: Tensor) -> Tensor:
        return F.reshape(self.a(x), (-1 if batch is None else batch, 4 * 36))

    traced = qtrace.trace(net(forward, a=M.Conv2d(3, 4, 3)), DATA, check=False)
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


def _large(axes: tuple[int, ...], shape: tuple[int, ...]) -> tuple[tuple[int, ...], int]:
    """Returns the shape of one image that is measured on, and its first value."""
    module = net(lambda self, x: F.relu(self.conv(x)), conv=M.Conv2d(1, 2, 3, stride=32))
    model = flatten(qtrace.trace(module, np.zeros((1, 1, 64, 64), np.float32), check=False))
    name = model.graph.inputs[1].name
    write_open_axes(
        model, OpenAxes(tuple(OpenAxis(name, axis, f"size {axis}", "NCHW"[axis]) for axis in axes))
    )
    image = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    ((call,), _) = cut_images([((Tensor(image),), {})], model)[0]
    ((halved,),) = halve_samples([(image,)], model)
    assert np.array_equal(halved.numpy(), call.numpy())
    return tuple(map(int, call.shape)), int(call.numpy()[0, 0, 0, 0])


def test_large_images_are_cut_where_the_network_takes_any_size() -> None:
    assert _large((0, 2, 3), (1, 1, 1760, 1760)) == ((1, 1, 1024, 1024), 368 * 1760 + 368)
    assert _large((0, 2, 3), (1, 1, 600, 2000)) == ((1, 1, 600, 1024), 488)
    assert _large((0, 2, 3), (1, 1, 1000, 1000))[0] == (1, 1, 1000, 1000)
    assert _large((0, 2), (1, 1, 1760, 1760))[0] == (1, 1, 1760, 1760)
    assert _large((0,), (1, 1, 1760, 1760))[0] == (1, 1, 1760, 1760)
