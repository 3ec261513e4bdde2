"""`propagate_shapes` renews what nodes record, and changes nothing else."""

from __future__ import annotations

from typing import Any

import megengine as mge
import megengine.functional as F
import megengine.module as M
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import qtrace
from qtrace.errors import GraphError, TraceError
from qtrace.graph import flatten, propagate_shapes
from qtrace.graph.types import TensorNode, TracedModule
from tests.each import each_of
from tests.graph.samples import IMAGE, MODELS, Pair, Residual, SplitConcat, function, traced_model
from tests.nets import MobileNetV2, ResNet, images, net, randomize

Recorded = dict[tuple[int, str], tuple[tuple[int, ...], Any]]


def recorded(traced: TracedModule) -> Recorded:
    """(position of the graph, name of the node) -> its shape and dtype, inner graphs included."""
    graphs = [g for m in traced.modules() for g in getattr(m, "argdef_graph_map", {}).values()]
    return {
        (index, node.name): (tuple(int(n) for n in node.shape), node.dtype)
        for index, graph in enumerate(graphs)
        for node in [*graph._inputs, *(n for e in graph._exprs for n in e.outputs)]
        if isinstance(node, TensorNode)
    }


def forget(traced: TracedModule) -> None:
    for module in traced.modules():
        for graph in getattr(module, "argdef_graph_map", {}).values():
            for node in [*graph._inputs, *(n for e in graph._exprs for n in e.outputs)]:
                if isinstance(node, TensorNode):
                    node._shape, node._dtype = None, None


@each_of("model", MODELS)
@each_of("flat", [True, False])
def test_traced_sizes_give_what_was_recorded(model: type[M.Module], flat: bool) -> None:
    traced = traced_model(model, flat)
    before = recorded(traced)
    propagate_shapes(traced, IMAGE)
    assert recorded(traced) == before
    forget(traced)
    propagate_shapes(traced, IMAGE)
    assert recorded(traced) == before


@pytest.mark.quick(1)
@pytest.mark.parametrize("flat", [True, False])
@settings(max_examples=10, deadline=None)
@given(batch=st.integers(1, 5), size=st.integers(4, 9))
def test_every_batch_axis_follows_the_inputs(flat: bool, batch: int, size: int) -> None:
    traced = traced_model(Residual, flat)
    parameters = {name.replace(".", "_") for name, _ in traced.named_tensors()}
    before = recorded(traced)
    propagate_shapes(traced, np.zeros((batch, 4, size, size), np.float32))
    after = recorded(traced)
    assert after.keys() == before.keys()
    activations = 0
    for (graph, name), (shape, dtype) in after.items():
        if name in parameters:
            assert (shape, dtype) == before[graph, name]
        else:
            assert (shape, dtype) == ((batch, 4, size, size), before[graph, name][1])
            activations += 1
    assert activations >= 10


@pytest.mark.parametrize("build", [lambda: ResNet(4, (1, 1)), lambda: MobileNetV2(0.25, blocks=(1, 2, 1))])
@pytest.mark.parametrize("batch", [1, 3])
def test_a_network_has_the_shapes_of_its_trace_at_this_batch(build: Any, batch: int) -> None:
    x, network = images(2, 3, 32, 32), randomize(build())
    traced = qtrace.trace(network, x, check=False)
    other = qtrace.trace(network, images(batch, 3, 32, 32), check=False)
    propagate_shapes(traced, images(batch, 3, 32, 32))
    assert recorded(traced) == recorded(other)
    assert recorded(flatten(traced)) == recorded(flatten(other))


def test_parameters_statistics_and_flags_stay() -> None:
    traced = traced_model(Residual, flat=False)
    traced.train()
    state = {name: tensor.numpy().copy() for name, tensor in traced.named_tensors()}
    level = mge.config.async_level
    propagate_shapes(traced, IMAGE * 3 + 1)
    assert all(module.training for module in traced.modules())
    assert mge.config.async_level == level
    for name, tensor in traced.named_tensors():
        np.testing.assert_array_equal(tensor.numpy(), state[name], err_msg=name)


def test_a_batch_norm_that_was_traced_in_training_keeps_its_statistics() -> None:
    class Net(M.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bn = M.BatchNorm2d(4)

        def forward(self, x: mge.Tensor) -> mge.Tensor:
            bn = self.bn
            mean, var, weight, bias = bn.running_mean, bn.running_var, bn.weight, bn.bias
            return F.batch_norm(x, mean, var, weight, bias, training=True)

    traced = traced_model(Net)
    state = {name: tensor.numpy().copy() for name, tensor in traced.named_tensors()}
    propagate_shapes(traced, IMAGE[:1] + 5)
    for name, tensor in traced.named_tensors():
        np.testing.assert_array_equal(tensor.numpy(), state[name], err_msg=name)
    assert traced.graph.outputs[0].shape == (1, 4, 6, 6)


@pytest.mark.parametrize("flat", [True, False])
def test_inputs_may_be_containers_of_arrays(flat: bool) -> None:
    x = np.ones((1, 2), np.float32)
    traced = traced_model(Pair, flat, {"a": mge.Tensor(x), "b": mge.Tensor(x)})
    wide = np.zeros((3, 7), np.float32)
    propagate_shapes(traced, {"a": wide, "b": mge.Tensor(wide)})
    assert {shape for shape, _ in recorded(traced).values()} == {(3, 7)}


def test_dtypes_follow_the_inputs() -> None:
    traced = function(lambda x: x + x)
    propagate_shapes(traced, np.zeros((2, 3), np.int32))
    assert {(shape, np.dtype(dtype)) for shape, dtype in recorded(traced).values()} == {
        ((2, 3), np.dtype(np.int32))
    }


def test_inputs_are_not_written() -> None:
    def forward(x: mge.Tensor) -> mge.Tensor:
        x[:, 0] = 0
        x += 1
        return x

    x = mge.Tensor(IMAGE)
    traced = function(forward)
    propagate_shapes(traced, x)
    np.testing.assert_array_equal(x.numpy(), IMAGE)


@pytest.mark.parametrize("flat", [True, False])
def test_an_error_names_node_line_and_shapes_and_changes_nothing(flat: bool) -> None:
    class Inner(M.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = M.Linear(6, 3)

        def forward(self, x: mge.Tensor) -> mge.Tensor:
            return self.fc(F.relu(x))

    traced = qtrace.trace(net(lambda self, x: self.inner(x + 1), inner=Inner()), IMAGE, check=False)
    traced = flatten(traced) if flat else traced
    before = recorded(traced)
    message = (
        r"(fc|inner)_out \(Linear, .*test_propagate.py:\d+\) fails on \w*relu_out \(2, 4, 6, 5\) float32: "
        "give inputs of sizes that the graph takes"
    )
    with pytest.raises(GraphError, match=message):
        propagate_shapes(traced, IMAGE[..., :5])
    assert recorded(traced) == before
    propagate_shapes(traced, IMAGE[:1])
    assert traced.graph.outputs[0].shape == (1, 4, 6, 3)


def test_arguments_of_another_structure_are_refused() -> None:
    traced = traced_model(SplitConcat)
    with pytest.raises(GraphError, match="the module was traced as forward"):
        propagate_shapes(traced, IMAGE, IMAGE)
    with pytest.raises(TraceError, match=r"example 0 \(object\) cannot be an input"):
        propagate_shapes(traced, object())
    with pytest.raises(GraphError, match="a TracedModule, not a Linear"):
        propagate_shapes(M.Linear(3, 3), IMAGE)


def test_a_tensor_made_of_a_size_is_inferred() -> None:
    traced = flatten(
        qtrace.trace(net(lambda self, x: x * mge.Tensor(x.shape[0])), images(2, 3, 4, 4), check=False)
    )
    before = recorded(traced)
    forget_results(traced)
    propagate_shapes(traced)
    assert recorded(traced) == before


def forget_results(traced: TracedModule) -> None:
    for expr in traced.graph._exprs[1:]:
        for node in expr.outputs:
            node._shape = None
