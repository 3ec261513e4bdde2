"""A converted graph as exporters read it: order, sites, integers, names."""

from __future__ import annotations

import megengine.functional as F
import megengine.module as M
import numpy as np
import pytest
from megengine import Tensor

import qtrace
from qtrace.errors import GraphError
from qtrace.export.converted import ConvertedGraph, ConvertedOp
from qtrace.graph.types import TracedModule
from qtrace.graph.walk import users
from qtrace.numerics import dequantize, quantize_bias
from qtrace.preparation.model import QuantizedSite


class _Net(M.Module):
    """A convolution with a bias, a pooling that carries integers, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc = M.Conv2d(3, 4, 3), M.Linear(4, 5)
        self.conv.bias[:] = np.array([0.3, -0.2, 0.1, 0.7], np.float32).reshape(1, 4, 1, 1)

    def forward(self, image: Tensor) -> Tensor:
        x = F.relu(self.conv(image))
        return self.fc(F.flatten(F.max_pool2d(x, 6), 1))


@pytest.fixture(scope="module")
def prepared() -> TracedModule:
    batch = np.random.RandomState(0).randn(2, 3, 8, 8).astype("float32")
    model = qtrace.prepare(qtrace.trace(_Net(), batch, check=False))
    qtrace.calibrate(model, [batch], progress=False)
    return model


@pytest.fixture(scope="module")
def graph(prepared: TracedModule) -> ConvertedGraph:
    return ConvertedGraph(qtrace.convert(prepared))


def _site(graph: ConvertedGraph, sort: str) -> QuantizedSite:
    return next(site for site in graph.sites if site.sort == sort)


def test_steps_are_the_ops_and_roundings_in_order(graph: ConvertedGraph) -> None:
    kinds = [op.call.kind for op in graph.ops if op.call is not None]
    assert kinds == ["conv2d", "relu", "max_pool2d", "flatten", "linear"]
    known = set(graph.inputs) | set(graph.values)
    for step in graph.steps:
        read = [step.source] if isinstance(step, QuantizedSite) else step.call.inputs  # type: ignore[union-attr]
        assert known.issuperset(read)
        known.update(step.expr.outputs)
    assert known.issuperset(graph.outputs)
    assert [op.call for op in graph.ops] == [graph.call(op.expr) for op in graph.ops]


def test_sites_are_those_of_the_annotation_with_their_nodes_and_readers(graph: ConvertedGraph) -> None:
    assert [site.decision for site in graph.sites] == list(graph.annotation.sites)
    for site in graph.sites:
        assert graph.site_of(site.value) is site
        assert site.node.name == site.decision.node
        assert site.consumers == tuple(users(site.value))
        assert site.consumers or site.value in graph.outputs
        assert graph.site_name(site.value) == site.name
        assert graph.model.unrounded_name(site.value) == site.decision.node
    node = next(iter(graph.inputs))
    assert graph.site_of(node) is None
    assert graph.site_name(node) == graph.model.unrounded_name(node) == node.name


def test_the_integers_of_a_weight_stand_for_what_the_graph_computes(graph: ConvertedGraph) -> None:
    site = _site(graph, "weight")
    stored = graph.values[site.source]
    integers = site.integers(stored)
    assert integers.shape == stored.shape
    assert np.abs(integers).max() > 100
    rounded = site.fake_quant(Tensor(stored)).numpy()
    np.testing.assert_array_equal(dequantize(integers, site.qparams), rounded)


def test_the_integers_of_a_bias_stand_for_what_the_graph_adds(graph: ConvertedGraph) -> None:
    site = _site(graph, "bias")
    stored = graph.values[site.source]
    weight = next(s for s in graph.sites if s.name == site.decision.weight)
    source = next(s for s in graph.sites if s.name == site.decision.activation)
    np.testing.assert_array_equal(site.bias_scale, source.qparams.scale * weight.qparams.scale)
    assert site.integers(stored).shape == (4,)
    groups = (node.owner for node in site.expr.args[2:])
    np.testing.assert_allclose(
        site.rounded_bias(stored), site.fake_quant(Tensor(stored), *groups).numpy(), rtol=1e-6
    )


def test_ties_of_a_bias_go_away_from_zero_and_large_ones_saturate() -> None:
    bias = np.array([0.25, -0.25, 0.75, 0.2, 1e9, -1e9], np.float32)
    integers = quantize_bias(bias, np.float32(0.5), 1000)
    assert integers.tolist() == [1, -1, 2, 0, 1000, -1000]
    assert integers.dtype == np.int32


def test_nodes_that_carry_integers_have_the_parameters_of_their_site(graph: ConvertedGraph) -> None:
    pool = next(op.call for op in graph.ops if op.call is not None and op.call.kind == "max_pool2d")
    relu = graph.site_of(pool.inputs[0])
    assert relu is not None
    np.testing.assert_array_equal(graph.carried[pool.out.name].scale, relu.qparams.scale)
    assert pool.out.name in graph.moved
    assert graph.nodes[pool.out.name] is pool.out


def test_input_names_are_those_of_the_trace(graph: ConvertedGraph) -> None:
    assert list(graph.inputs.values()) == ["image"]
    assert all(isinstance(op, ConvertedOp) for op in graph.ops)


def test_only_a_converted_module_is_read(prepared: TracedModule) -> None:
    with pytest.raises(GraphError, match="the module is prepared, not converted"):
        ConvertedGraph(prepared)
