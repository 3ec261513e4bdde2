"""Which nodes depend on the values of the inputs."""

from __future__ import annotations

import megengine as mge
import megengine.functional as F
import megengine.module as M
import numpy as np

import qtrace
from qtrace.graph.flatten import flatten
from qtrace.graph.interpreter import static_nodes
from qtrace.graph.walk import exprs
from tests.nets import images, net


def _static(module: M.Module) -> set[str]:
    traced = flatten(qtrace.trace(module, images(2, 4, 8, 8), check=False))
    static = static_nodes(traced)
    return {n.name for e in exprs(traced) for n in e.outputs if n in static}


def _anchors(self: M.Module, x: mge.Tensor) -> mge.Tensor:
    grid = (F.arange(x.shape[3]) + 0.5) * 8.0
    return grid + x * 2.0


def test_places_made_from_shapes_are_static_and_what_meets_data_is_not() -> None:
    assert _static(net(_anchors)) == {"getvarshape_out", "getitem_out", "arange_out", "add_out", "mul_out"}


def test_parameters_and_what_is_made_of_them_alone_are_static() -> None:
    table = mge.Parameter(np.ones((8, 4), np.float32))
    module = net(lambda self, x: x + F.expand_dims(self.table.reshape(-1, 8), 1), table=table)
    assert _static(module) == {"table", "reshape_out", "expand_dims_out"}


def test_a_tensor_filled_like_data_is_static_and_a_written_one_is_not() -> None:
    def forward(self: M.Module, x: mge.Tensor) -> tuple[mge.Tensor, ...]:
        zeros = F.zeros_like(x)
        written = F.ones_like(x)
        written[:, 0] = x[:, 0]
        return zeros, written

    assert _static(net(forward)) == {"zeros_like_out", "ones_like_out"}
