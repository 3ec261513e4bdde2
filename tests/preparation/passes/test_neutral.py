"""Ops that change no value leave the graph, and nothing else does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import megengine as mge
import megengine.functional as F
import megengine.module as M
import numpy as np
import pytest

import qtrace
from qtrace.graph import exprs
from qtrace.ops import read
from tests.each import each_of
from tests.nets import images, net

X = images(4, 3, 8, 8)

NEUTRAL: dict[str, Callable[[Any], Any]] = {
    "0 + y": lambda y: 0 + y,
    "y + 0.0": lambda y: y + 0.0,
    "y - 0": lambda y: y - 0,
    "1 * y": lambda y: 1 * y,
    "y / 1": lambda y: y / 1,
    "y ** 1": lambda y: y**1,
    "sum": lambda y: sum([y]),
    "a constant": lambda y: F.mul(y, mge.Tensor(1.0)),
    "several": lambda y: sum([(y * 1) ** 1.0, 0]) / 1.0,
}
OTHER: dict[str, Callable[[Any], Any]] = {
    "0 - y": lambda y: 0 - y,
    "1 / y": lambda y: 1 / (y + 9),
    "1 ** y": lambda y: 1**y,
    "y + 1": lambda y: y + 1,
    "wider": lambda y: F.reshape(y, (4, 8, 8, 8)) * mge.Tensor(np.ones((2, 1, 1, 1, 1), np.float32)),
    "another type": lambda y: F.argmax(y, axis=1) * 1.0,
}


def _kinds(way: Callable[[Any], Any]) -> list[str]:
    module = net(lambda self, x: F.relu(way(self.conv(x))), conv=M.Conv2d(3, 8, 3, padding=1))
    prepared = qtrace.prepare(qtrace.trace(module, X, check=False), "w8a8")
    np.testing.assert_allclose(prepared(mge.Tensor(X)).numpy(), module(mge.Tensor(X)).numpy(), atol=1e-5)
    return [call.kind for call in map(read, exprs(prepared)) if call is not None]


@pytest.mark.parametrize("way", NEUTRAL)
def test_what_changes_no_value_is_removed(way: str) -> None:
    assert _kinds(NEUTRAL[way]) == ["conv2d", "relu"]


@pytest.mark.parametrize("way", OTHER)
def test_what_changes_values_shapes_or_types_is_kept(way: str) -> None:
    assert len(_kinds(OTHER[way])) > 2


def _written(self: M.Module, x: Any) -> Any:
    y = self.conv(x)
    z = y * 1
    z[:, :2] = 0.5
    return z + y


def _written_by_plus(self: M.Module, x: Any) -> Any:
    y = self.conv(x)
    z = y + 0
    z += 1.5
    return z * y


def _source_written(self: M.Module, x: Any) -> Any:
    y = self.conv(x)
    z = y - 0
    y[:, :2] = 0.5
    return z * y


def _written_under_another_name(self: M.Module, x: Any) -> Any:
    y = self.conv(x)
    z = self.drop(y / 1)
    z[:, :2] = 0.5
    return z + y


def _input_written(self: M.Module, x: Any) -> Any:
    z = x * 1
    z[:, :2] = 0.5
    return self.conv(z) + F.mean(x)


WRITES = [_written, _written_by_plus, _source_written, _written_under_another_name, _input_written]


@each_of("forward", WRITES)
def test_a_copy_before_a_write_stays(forward: Callable[[Any, Any], Any]) -> None:
    module = net(forward, conv=M.Conv2d(3, 8, 3, padding=1), drop=M.Dropout(0.5))
    expected = module(mge.Tensor(X)).numpy()
    prepared = qtrace.prepare(qtrace.trace(module, X, check=False), "w8a8")
    x = mge.Tensor(X)
    np.testing.assert_allclose(prepared(x).numpy(), expected, atol=1e-5)
    np.testing.assert_array_equal(x.numpy(), X)  # the caller's own tensor


def test_a_sum_with_zero_in_place_writes_nothing() -> None:
    def forward(self: M.Module, x: mge.Tensor) -> mge.Tensor:
        y = self.conv(x)
        y += 0
        return F.relu(y)

    module = net(forward, conv=M.Conv2d(3, 8, 3, padding=1))
    prepared = qtrace.prepare(qtrace.trace(module, X, check=False), "w8a8")
    assert [call.kind for call in map(read, exprs(prepared)) if call is not None] == ["conv2d", "relu"]


def _behind_a_view(self: M.Module, x: Any) -> Any:
    y = self.fc(x)
    return F.concat([y[..., :2] * 1.0 + self.grid, y[..., 2:]], axis=-1)


def _behind_a_view_by_a_parameter(self: M.Module, x: Any) -> Any:
    y = self.fc(x)
    return F.concat([y[..., :2] * self.stride + self.grid, y[..., 2:]], axis=-1)


@pytest.mark.parametrize("forward", [_behind_a_view, _behind_a_view_by_a_parameter])
def test_a_kernel_that_misreads_views_gets_a_copy_in_place_of_the_op_that_went(
    forward: Callable[[Any, Any], Any],
) -> None:
    rng = np.random.default_rng(0)
    module = net(
        forward,
        fc=M.Linear(6, 8),
        grid=mge.Parameter(10 * rng.normal(size=(64, 2)).astype(np.float32)),
        stride=mge.Parameter(np.float32(2)),
    )
    x = rng.normal(size=(4, 64, 6)).astype(np.float32)
    expected = module(mge.Tensor(x)).numpy()
    algorithms = ["fuse_bn", "absorb"]  # the latter takes the product with `stride`
    prepared = qtrace.prepare(qtrace.trace(module, x, check=False), {"ptq": algorithms})
    kinds = [call.kind for call in map(read, exprs(prepared)) if call is not None]
    assert "mul" not in kinds
    np.testing.assert_allclose(prepared(mge.Tensor(x)).numpy(), expected, atol=1e-4)


def test_a_result_keeps_its_name() -> None:
    module = net(lambda self, x: self.conv(x) + 0, conv=M.Conv2d(3, 8, 3))
    traced = qtrace.trace(module, X, check=False)
    prepared = qtrace.prepare(traced, "w8a8")
    (result,), (rounded,) = traced.graph.outputs, prepared.graph.outputs
    assert rounded.name == f"{result.name}_q"


def test_the_branches_of_a_block_of_repvgg_that_has_no_third_one_are_one_layer() -> None:
    def forward(self: M.Module, x: mge.Tensor) -> mge.Tensor:
        return F.relu(self.c3(x) + self.c1(x) + 0)

    module = net(forward, c3=M.Conv2d(3, 8, 3, stride=2, padding=1), c1=M.Conv2d(3, 8, 1, stride=2))
    prepared = qtrace.prepare(qtrace.trace(module, X, check=False), {"ptq": ["fuse_bn", "reparameterize"]})
    calls = [call for call in map(read, exprs(prepared)) if call is not None]
    assert [call.kind for call in calls] == ["conv2d", "relu"]
    sites = qtrace.explain(prepared).annotation.sites
    assert [site.node for site in sites if site.sort == "activation"] == ["x", "relu_out"]
