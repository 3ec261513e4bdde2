"""`GraphBuilder` builds graphs that lint, save, prepare and run as traced ones do."""

from __future__ import annotations

import functools

import megengine
import megengine as mge
import megengine.functional as F
import megengine.module as M
import numpy as np
import pytest
from megengine.utils.network_node import VarNode

import qtrace
from qtrace.errors import GraphError
from qtrace.graph import GraphBuilder, flatten, lint


def values(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def small_net():
    """A convolution, a stored factor, a split, a join and a reshape to the batch that runs."""
    builder = GraphBuilder("Net")
    x = builder.input("x", (1, 3, 8, 8), batch_axis=0)
    y = builder.call_module("stem.conv", M.Conv2d(3, 4, 3), x)
    y = builder.call_function(F.relu, builder.call_module("stem.bn", M.BatchNorm2d(4), y), name="stem/out")
    y = builder.call_method("__mul__", y, builder.parameter("head.gain", values(4, 1, 1)))
    left, right = builder.call_function(F.split, y, 2, axis=1, name=["left", "right"])
    joined = builder.call_function(F.concat, [right, left], axis=1)
    flat = builder.call_function(F.reshape, joined, (builder.size(x, 0), -1), name="flat")
    return builder, builder.finish((flat, left))


def reference(net, x):
    y = F.relu(net.stem.bn(net.stem.conv(mge.Tensor(x)))) * net.head.gain
    left, right = F.split(y, 2, axis=1)
    return F.flatten(F.concat([right, left], axis=1), 1).numpy(), left.numpy()


@pytest.mark.parametrize("batch", [1, 4])
def test_the_graph_computes_what_its_calls_compute(batch):
    _, net = small_net()
    x = values(batch, 3, 8, 8)
    for output, expected in zip(net(mge.Tensor(x)), reference(net, x), strict=True):
        np.testing.assert_allclose(output.numpy(), expected, rtol=1e-6)


def test_the_graph_has_no_fault_and_every_node_its_shape_and_name():
    builder, net = small_net()
    assert lint(net) == []
    nodes = {
        node.name: tuple(node.shape)
        for expr in net.graph._exprs
        for node in expr.outputs
        if hasattr(node, "shape")
    }
    assert nodes["stem_out"] == (1, 4, 6, 6)
    assert nodes["left"] == (1, 2, 6, 6)
    assert nodes["right"] == (1, 2, 6, 6)
    assert nodes["flat"] == (1, 144)
    assert builder.shapes(net.graph.outputs[0]) == ((1, 144), (2, 144))


def test_parameters_stand_under_their_paths():
    _, net = small_net()
    assert sorted(name for name, _ in net.named_parameters()) == [
        "head.gain", "stem.bn.bias", "stem.bn.weight", "stem.conv.bias", "stem.conv.weight",
    ]  # fmt: skip


def test_a_built_graph_is_flattened_saved_loaded_and_prepared(tmp_path):
    _, net = small_net()
    x = mge.Tensor(values(2, 3, 8, 8))
    expected = net(x)[0].numpy()
    assert np.array_equal(flatten(net)(x)[0].numpy(), expected)
    qtrace.save(net, tmp_path / "net.mge")
    assert np.array_equal(qtrace.load(tmp_path / "net.mge")(x)[0].numpy(), expected)
    prepared = qtrace.prepare(net)
    qtrace.calibrate(prepared, [values(2, 3, 8, 8, seed=seed) for seed in range(2)])
    assert qtrace.explain(prepared).table()


def test_a_module_may_be_called_again():
    builder = GraphBuilder()
    x = builder.input("x", (1, 2, 4, 4))
    once = builder.call_module("conv", M.Conv2d(2, 2, 1), x)
    net = builder.finish(builder.call_module("conv", None, once))
    y = values(1, 2, 4, 4)
    np.testing.assert_allclose(
        net(mge.Tensor(y)).numpy(), net.conv(net.conv(mge.Tensor(y))).numpy(), rtol=1e-6
    )


def test_views_that_megengine_would_misread_are_copied():
    """`x[..., :2] + grid` is wrong on CPU at a batch above 1 without the copy."""
    builder = GraphBuilder()
    x = builder.input("x", (2, 3, 4), batch_axis=0)
    part = builder.call_method("__getitem__", x, (slice(None), slice(None), slice(0, 2)))
    net = builder.finish(builder.call_function(F.add, part, builder.parameter("grid", values(1, 3, 2))))
    y = values(5, 3, 4)
    np.testing.assert_allclose(net(mge.Tensor(y)).numpy(), y[..., :2] + net.grid.numpy(), rtol=1e-6)


def test_outputs_keep_the_structure_that_is_given():
    builder = GraphBuilder()
    x = builder.input("x", (1, 2))
    net = builder.finish({"plus": builder.call_function(F.add, x, 1.0), "both": [x, x]})
    result = net(mge.Tensor(np.zeros((1, 2), np.float32)))
    assert set(result) == {"plus", "both"}
    assert result["plus"].numpy().tolist() == [[1.0, 1.0]]


def test_no_kernel_runs_on_what_depends_on_the_inputs(monkeypatch):
    """Types come from inference, at both sizes; a product of parameters is computed."""
    tensors = []
    for module, name in ((megengine.module.conv, "conv2d"), (F, "matmul")):
        function = getattr(module, name)

        def spy(x, *args, function=function, **kwargs):
            if isinstance(x, mge.Tensor) and not isinstance(x, VarNode):
                tensors.append(tuple(x.shape))
            return function(x, *args, **kwargs)

        monkeypatch.setattr(module, name, functools.wraps(function)(spy))
    builder = GraphBuilder()
    x = builder.input("x", (1, 3, 8, 8), batch_axis=0)
    y = builder.call_module("conv", M.Conv2d(3, 4, 3, padding=1), x)
    square = builder.call_function(
        F.matmul, builder.parameter("w", values(9, 8)), builder.parameter("v", values(8, 9))
    )
    z = builder.call_function(
        F.matmul, builder.call_function(F.reshape, y, (-1, 4, 64)), builder.parameter("u", values(64, 9))
    )
    z = builder.call_function(F.matmul, z, square)
    assert builder.shapes(z) == ((1, 4, 9), (2, 4, 9))
    assert tensors == [(9, 8)]


def test_an_op_that_fails_is_named_with_its_shapes_and_changes_nothing():
    builder = GraphBuilder()
    x = builder.input("x", (1, 3, 8, 8))
    with pytest.raises(GraphError, match=r"matmul fails on x \(1, 3, 8, 8\), w \(3, 3\)"):
        builder.call_function(F.matmul, x, builder.parameter("w", values(3, 3)))
    net = builder.finish(builder.call_function(F.relu, x))
    assert [problem.where for problem in lint(net)] == ["w"]  # which no op reads


def test_a_size_that_holds_for_one_batch_only_is_refused():
    builder = GraphBuilder()
    x = builder.input("x", (1, 4), batch_axis=0)
    with pytest.raises(GraphError, match="with one sample more"):
        builder.call_function(F.reshape, x, (4,))


def test_wrong_use_is_an_error_that_says_what_to_do():
    builder = GraphBuilder()
    x = builder.input("x", (1, 2, 3, 3))
    builder.call_module("a.conv", M.Conv2d(2, 2, 1), x)
    with pytest.raises(GraphError, match="add all inputs before the first op"):
        builder.input("y", (1,))
    with pytest.raises(GraphError, match=r"has an attribute 'a\.conv' already"):
        builder.add_module("a.conv", M.Conv2d(2, 2, 1))
    with pytest.raises(GraphError, match="'conv' is no container"):
        builder.add_module("a.conv.inner", M.Conv2d(2, 2, 1))
    with pytest.raises(GraphError, match="lacks attribute 'b'"):
        builder.attribute("b")
    with pytest.raises(GraphError, match="is not a node of this graph"):
        builder.finish(3)
    with pytest.raises(GraphError, match="at most 7"):
        GraphBuilder().input("x", (1,) * 8)
