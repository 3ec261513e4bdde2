"""Several sets of example inputs: one graph serves all, or the size that it fixes is named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import megengine as mge
import megengine.functional as F
import megengine.module as M
import numpy as np
import pytest

import qtrace
from qtrace.errors import TraceError
from tests.graph.planted import net
from tests.nets import images

SMALL, LARGE, WIDE = images(2, 3, 8, 8), images(1, 3, 16, 16), images(3, 3, 8, 24)


def _line(function: Callable[..., Any], offset: int) -> str:
    return f"tests/graph/tracing/test_also.py:{function.__code__.co_firstlineno + offset}"


class Masked(M.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = M.Conv2d(3, 4, 3, padding=1)

    def forward(self, x: Any, mask: Any = None) -> Any:
        y = F.flatten(F.relu(self.conv(x)), 2)
        return y if mask is None else y * mask


def test_one_graph_serves_all_sizes() -> None:
    model = Masked()
    traced = qtrace.trace(model, SMALL, also=[LARGE, (WIDE,), {"x": LARGE}])
    assert len(traced.argdef_graph_map) == 1
    for x in (SMALL, LARGE, WIDE):
        np.testing.assert_array_equal(traced(mge.Tensor(x)).numpy(), model(mge.Tensor(x)).numpy())
    masks = [np.ones((1, 1, x.shape[2] * x.shape[3]), "float32") for x in (SMALL, LARGE)]
    traced = qtrace.trace(
        model, SMALL, mask=masks[0], also=[(LARGE, masks[1]), {"x": LARGE, "mask": masks[1]}]
    )
    assert traced(mge.Tensor(LARGE), mge.Tensor(masks[1])).shape == (1, 4, 256)


def fixed(self: Any, x: Any) -> Any:
    rows = int(x.shape[2])
    return F.relu(x).reshape(-1, 3, rows * 8)


def positioned(self: Any, x: Any) -> Any:
    table = np.arange(int(x.shape[3]), dtype="float32")
    return x + mge.Tensor(table)


@pytest.mark.parametrize(
    ("forward", "also", "offset", "problem"),
    [
        (fixed, LARGE, 2, "it holds"),
        (positioned, WIDE, 2, "it is a constant, but the module computes it from its input"),
    ],
)
@pytest.mark.parametrize("check", [True, False])
def test_a_fixed_size_is_named_with_its_line(
    forward: Callable[..., Any], also: np.ndarray, offset: int, problem: str, check: bool
) -> None:
    with pytest.raises(TraceError, match=r"the trace is wrong on also\[0\] \(\d+x3x\d+x\d+\): ") as caught:
        qtrace.trace(net(forward), SMALL, also=[also], check=check)
    assert _line(forward, offset) in str(caught.value)
    assert problem in str(caught.value)
    qtrace.trace(net(forward), SMALL, check=False)


def test_what_one_graph_cannot_serve_is_refused_in_a_sentence() -> None:
    mask = np.ones((1, 1, 64), "float32")
    with pytest.raises(
        TraceError, match=r"also\[1\] \(2x3x8x8, 1x1x64\) has another structure than the example"
    ):
        qtrace.trace(Masked(), SMALL, also=[LARGE, (SMALL, mask)])
    with pytest.raises(TraceError, match=r"Masked itself fails on also\[0\] \(2x4x8x8\)"):
        qtrace.trace(Masked(), SMALL, also=[images(2, 4, 8, 8)])
    with pytest.raises(TraceError, match=r"example 0 of also\[0\] \(object\) cannot be an input"):
        qtrace.trace(Masked(), SMALL, also=[object()])
    with pytest.raises(TraceError, match=r"Masked.forward.* and y by name"):
        qtrace.trace(Masked(), SMALL, also=[{"y": LARGE}])


def test_this_megengine_has_no_einsum() -> None:
    assert not hasattr(F, "einsum")
    assert not hasattr(F.nn, "einsum")
