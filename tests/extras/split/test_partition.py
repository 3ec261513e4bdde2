"""A graph in parts that a backend supports and parts that it does not: they compose bit for bit."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import hypothesis
import megengine as mge
import megengine.functional as F
import megengine.module as M
import numpy as np
import pytest
from hypothesis import strategies as st

import qtrace
from qtrace.config import backends
from qtrace.errors import ConfigError, GraphError
from qtrace.extras.split.partition import assign_levels, partition
from qtrace.extras.split.split import build_parts, copyable_exprs, flat_copy
from qtrace.graph import exprs, flatten, lint
from tests.fuzz.graphs import networks
from tests.graph.counting import count_calls
from tests.nets import ResNet, images, net


def _values(result: Any) -> list[np.ndarray]:
    return [v.numpy() for v in (result if isinstance(result, tuple) else (result,))]


def _assert_composes(parts: Any, traced: Any, x: np.ndarray) -> None:
    for value, expected in zip(_values(parts(mge.Tensor(x))), _values(traced(mge.Tensor(x))), strict=True):
        np.testing.assert_array_equal(value, expected)


@pytest.mark.quick(5)
@pytest.mark.parametrize("backend", backends.known())
def test_every_backend_has_parts_in_turn_that_compose_bit_for_bit(backend: str) -> None:
    x = images(1, 3, 16, 16)
    traced = qtrace.trace(ResNet(4, (1, 1)), x, check=False)
    parts = partition(traced, backend)
    _assert_composes(parts, traced, x)
    assert all(a.supported != b.supported for a, b in itertools.pairwise(parts))
    known = set(parts.inputs)
    for part in parts:
        assert known >= set(part.inputs)  # of earlier parts alone
        known |= set(part.outputs)
        assert lint(part.module) == []


def _ops(part: Any) -> list[str]:
    return [n.name for e in exprs(part.module) for n in e.outputs if n.name.endswith("_out")]


def test_ncnn_takes_layers_with_their_batchnorms_and_activations() -> None:
    x = images(1, 3, 16, 16)
    first, second, *_ = parts = partition(qtrace.trace(ResNet(4, (1, 1)), x, check=False), "ncnn")
    assert [part.supported for part in parts] == [True, False, True, False, True]
    assert {"conv1_out", "bn1_out", "relu_out", "stages_0_0_bn2_out"} <= set(_ops(first))
    assert _ops(second) == ["stages_0_0_iadd_out", "stages__0_out"]
    assert parts.interface()["parts"][1]["supported"] is False


def _silu(self: Any, x: Any) -> Any:
    y = self.conv(x)
    return F.softmax(self.head(y * F.sigmoid(y)), axis=1)


def test_pieces_of_a_function_stay_together_and_each_part_is_exported(tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    x = images(2, 4, 6, 6)
    module = net(_silu, conv=M.Conv2d(4, 6, 3), head=M.Conv2d(6, 4, 1))
    traced = qtrace.trace(module, x, check=False)
    parts = partition(traced, "ncnn")
    assert [part.supported for part in parts] == [True, False, True, False]
    assert _ops(parts[1]) == ["sigmoid_out", "mul_out"]
    values = {"x": mge.Tensor(x)}
    for part in parts:
        batch = tuple(values[name] for name in part.inputs)
        if part.supported:
            prepared = qtrace.prepare(part.module, {"backend": "ncnn"})
            data = [tuple(v.numpy() for v in batch)]
            exported = qtrace.convert(qtrace.calibrate(prepared, data, progress=False))
        else:
            exported = part.module
        if part.supported:
            text = qtrace.export(exported, tmp_path / f"{part.name}.param").read_text()
            assert all(f" {name}" in text for name in (*part.inputs, *part.outputs))
        else:
            graph = onnx.load(str(qtrace.export(exported, tmp_path / f"{part.name}.onnx"))).graph
            assert [i.name for i in graph.input] == list(part.inputs)
            assert [o.name for o in graph.output] == list(part.outputs)
        results = part.module(*batch)
        values.update(zip(part.outputs, results if isinstance(results, tuple) else (results,), strict=True))


@hypothesis.settings(max_examples=6, deadline=None, suppress_health_check=list(hypothesis.HealthCheck))
@hypothesis.given(networks(), st.sampled_from(backends.known()))
def test_random_graphs_compose_for_every_backend(module: M.Module, backend: str) -> None:
    x = images(2, 3, 6, 6)
    traced = qtrace.trace(module, x, check=False)
    _assert_composes(partition(traced, backend), traced, x)


@hypothesis.settings(max_examples=10, deadline=None, suppress_health_check=list(hypothesis.HealthCheck))
@hypothesis.given(st.data())
def test_any_support_gives_convex_parts(data: st.DataObject) -> None:
    """Random graphs of random ops, each supported or not at random."""
    steps = data.draw(st.lists(st.tuples(st.integers(0, 99), st.integers(0, 99)), min_size=1, max_size=12))

    def forward(self: Any, x: Any) -> Any:
        values = [x]
        for a, b in steps:
            left, right = values[a % len(values)], values[b % len(values)]
            values.append(F.relu(left) if a == b else left - 0.5 * right.reshape(left.shape))
        return tuple(values[1:][-3:])

    x = images(1, 2, 3, 3)
    traced = qtrace.trace(net(forward), x, check=False)
    flat = flat_copy(traced, "partition")
    own = [e for e in exprs(flat) if e not in copyable_exprs(flat)]
    support = {e: data.draw(st.booleans()) for e in own}
    level = assign_levels(flat, support)
    assert all((level[e] % 2 == 0) == support[e] for e in own)
    home = {e: sorted(set(level.values())).index(level[e]) for e in own}
    for expr in own:
        assert all(home[n.expr] <= home[expr] for n in expr.inputs if n.expr in home)
    parts = build_parts(flat, home, [None] * len(set(level.values())))
    _assert_composes(parts, traced, x)


def test_what_cannot_be_partitioned_is_refused() -> None:
    module = net(lambda self, x: F.relu(self.conv(x)), conv=M.Conv2d(4, 4, 1))
    traced = qtrace.trace(module, images(1, 4, 3, 3), check=False)
    with pytest.raises(ConfigError, match="unknown backend 'ncn'; known: esp_dl"):
        partition(traced, "ncn")
    with pytest.raises(GraphError, match="partition takes a TracedModule"):
        partition(module, "ncnn")
    with pytest.raises(GraphError, match="partition the float module, and prepare each part"):
        partition(qtrace.prepare(traced), "ncnn")
    assert len(partition(traced, "generic")) == 1
    assert {n.name for e in exprs(flatten(traced)) for n in e.outputs} >= {"conv_out", "relu_out"}


def test_work_is_linear_in_the_exprs() -> None:
    """With as many parts as ops, each of which reads a size; the plan is tested where it is made."""

    def count(length: int) -> int:
        def forward(self: Any, x: Any) -> Any:
            for _ in range(length):
                x = F.exp(x) + x.shape[0]
            return x

        flat = flat_copy(qtrace.trace(net(forward), images(1, 4, 3, 3), check=False), "partition")
        own = [e for e in exprs(flat) if e not in copyable_exprs(flat)]
        support = {e: i % 2 == 0 for i, e in enumerate(own)}

        def divide() -> None:
            level = assign_levels(flat, support)
            assert len(build_parts(flat, level, [None] * (max(level.values()) + 1))) >= 2 * length

        return count_calls(divide)

    assert count(32) < 5 * count(8)
