"""After every kind of surgery lint, MACs and exports see the graph as it is."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path

import megengine as mge
import megengine.functional as F
import megengine.module as M
import numpy as np
import onnxruntime
import pytest

import qtrace
from qtrace.errors import GraphError
from qtrace.graph import (
    GraphEditor,
    add_submodule,
    delete_attribute,
    exprs,
    flatten,
    lint,
    propagate_shapes,
    set_input_shapes,
    set_parameter,
)
from qtrace.graph.types import TensorNode, TracedModule
from qtrace.preparation.prepare import plan
from qtrace.targets.tflite.runtime import LitertSession
from tests.nets import images, net

X = images(2, 3, 8, 8)


def _net() -> TracedModule:
    """A convolution, ReLU, pooling, another convolution, a reshape, and a linear layer."""

    def forward(self: M.Module, x: mge.Tensor) -> mge.Tensor:
        y = self.second(self.pool(F.relu(self.first(x))))
        return self.head(y.reshape(-1, 64))

    layers = {"first": M.Conv2d(3, 4, 3, padding=1), "pool": M.MaxPool2d(2), "second": M.Conv2d(4, 4, 1)}
    return flatten(qtrace.trace(net(forward, **layers, head=M.Linear(64, 5)), X))


def _node(traced: TracedModule, name: str) -> TensorNode:
    return next(n for e in exprs(traced) for n in e.outputs if n.name == name)


def _refit_head(edit: GraphEditor, features: int) -> None:
    """Gives the linear layer as many inputs as the reshape gives now."""
    set_parameter(edit.traced, "head.weight", _weight(5, features))
    reshape = _node(edit.traced, "head_out").expr.inputs[1]
    source = reshape.expr.inputs[0]
    flat = edit.call_function(F.reshape, source, (-1, features), after=source.expr)
    edit.replace_uses(reshape, flat)


def _weight(*shape: int) -> mge.Parameter:
    return mge.Parameter(np.random.default_rng(1).normal(size=shape).astype("float32") / 8)


def _stride(edit: GraphEditor) -> None:
    edit.traced.first.stride = (2, 2)
    _refit_head(edit, 16)


def _kernel(edit: GraphEditor) -> None:
    conv = edit.traced.first
    conv.kernel_size, conv.padding = (5, 5), (2, 2)
    set_parameter(edit.traced, "first.weight", _weight(4, 3, 5, 5))


def _pruned_channels(edit: GraphEditor) -> None:
    first, second = edit.traced.first, edit.traced.second
    set_parameter(edit.traced, "first.weight", mge.Parameter(first.weight.numpy()[:2]))
    set_parameter(edit.traced, "first.bias", mge.Parameter(first.bias.numpy()[:, :2]))
    set_parameter(edit.traced, "second.weight", mge.Parameter(second.weight.numpy()[:, :2]))
    first.out_channels = second.in_channels = 2


def _inserted_pool(edit: GraphEditor) -> None:
    add_submodule(edit.traced, "extra", M.AvgPool2d(2))
    node = _node(edit.traced, "second_out")
    edit.replace_uses(node, edit.call_module("extra", node, after=node.expr))
    _refit_head(edit, 16)


def _removed_layer(edit: GraphEditor) -> None:
    pooled = _node(edit.traced, "pool_out")
    edit.replace_uses(pooled, pooled.expr.inputs[1])
    edit.remove(pooled.expr)
    _refit_head(edit, 256)
    delete_attribute(edit.traced, "pool")


def _replaced_activation(edit: GraphEditor) -> None:
    old = _node(edit.traced, "relu_out")
    edit.replace_expr(old.expr, edit.call_function(F.relu6, old.expr.inputs[0], after=old.expr))


def _reshape(edit: GraphEditor) -> None:
    old = _node(edit.traced, "reshape_out")
    edit.replace_expr(old.expr, edit.call_method("reshape", old.expr.inputs[0], -1, 32, after=old.expr))
    set_parameter(edit.traced, "head.weight", _weight(5, 32))


def _split(edit: GraphEditor) -> None:
    node = _node(edit.traced, "second_out")
    left, right = edit.call_function(F.split, node, 2, 1, after=node.expr)
    swapped = edit.call_function(F.concat, [right, left, left], 1, after=right.expr)
    edit.replace_uses(node, swapped, users=[_node(edit.traced, "reshape_out").expr])
    _refit_head(edit, 96)


def _output(edit: GraphEditor) -> None:
    edit.add_output(_node(edit.traced, "pool_out"))


def _input(edit: GraphEditor) -> None:
    bias = edit.add_input("bias", (1, 4, 1, 1))
    node = _node(edit.traced, "second_out")
    edit.replace_uses(node, edit.call_method("__add__", node, bias, after=node.expr))


def _argument(edit: GraphEditor) -> None:
    node = _node(edit.traced, "relu_out")
    pooled = edit.call_function(F.max_pool2d, node, 2, after=node.expr)
    edit.replace_uses(_node(edit.traced, "pool_out"), pooled)
    edit.set_argument(pooled.expr, "kernel_size", 4)
    delete_attribute(edit.traced, "pool")
    _refit_head(edit, 16)


SURGERY: dict[str, tuple[Callable[[GraphEditor], None], int]] = {
    "stride": (_stride, 2 * (4 * 4 * 4 * 27 + 4 * 2 * 2 * 4 + 5 * 16)),
    "kernel": (_kernel, 2 * (4 * 64 * 75 + 4 * 16 * 4 + 5 * 64)),
    "pruned channels": (_pruned_channels, 2 * (2 * 64 * 27 + 4 * 16 * 2 + 5 * 64)),
    "inserted pool": (_inserted_pool, 2 * (4 * 64 * 27 + 4 * 16 * 4 + 5 * 16)),
    "removed layer": (_removed_layer, 2 * (4 * 64 * 27 + 4 * 64 * 4 + 5 * 256)),
    "replaced activation": (_replaced_activation, 2 * (4 * 64 * 27 + 4 * 16 * 4 + 5 * 64)),
    "reshape": (_reshape, 2 * (4 * 64 * 27 + 4 * 16 * 4 + 2 * 5 * 32)),
    "split": (_split, 2 * (4 * 64 * 27 + 4 * 16 * 4 + 5 * 96)),
    "output": (_output, 2 * (4 * 64 * 27 + 4 * 16 * 4 + 5 * 64)),
    "input": (_input, 2 * (4 * 64 * 27 + 4 * 16 * 4 + 5 * 64)),
    "argument": (_argument, 2 * (4 * 64 * 27 + 4 * 4 * 4 + 5 * 16)),
    "input shape": (lambda edit: None, 1 * (4 * 256 * 27 + 4 * 64 * 4 + 4 * 5 * 64)),
}


def _changed(name: str) -> tuple[TracedModule, tuple[np.ndarray, ...]]:
    traced = _net()
    with GraphEditor(traced) as edit:
        SURGERY[name][0](edit)
    if name == "input shape":
        set_input_shapes(traced, {"x": (1, 3, 16, 16)})
        return traced, (images(1, 3, 16, 16),)
    return traced, (X, images(1, 4, 1, 1)) if name == "input" else (X,)


def _run_file(path: Path, inputs: tuple[np.ndarray, ...]) -> list[np.ndarray]:
    if path.suffix == ".tflite":
        return LitertSession(path, False).run(list(inputs)).outputs
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return session.run(None, {i.name: v for i, v in zip(session.get_inputs(), inputs, strict=True)})


def _shapes(traced: TracedModule) -> dict[str, tuple[int, ...]]:
    nodes = [*traced.graph.inputs, *(n for e in exprs(traced) for n in e.outputs)]
    return {n.name: tuple(n.shape) for n in nodes if isinstance(n, TensorNode)}


@pytest.mark.quick(2)
@pytest.mark.parametrize("name", SURGERY)
def test_all_readers_see_the_changed_graph(name: str, tmp_path: Path) -> None:
    traced, inputs = _changed(name)
    assert lint(traced) == []
    fresh = copy.deepcopy(traced)
    propagate_shapes(fresh, *inputs)
    assert _shapes(traced) == _shapes(fresh)
    assert sum(note.macs for note in plan(traced, "onnxruntime").notes) == SURGERY[name][1]
    expected = traced(*map(mge.Tensor, inputs))
    wanted = [v.numpy() for v in (expected if isinstance(expected, tuple) else (expected,))]
    for suffix in (".onnx", ".tflite"):
        results = _run_file(qtrace.export(traced, tmp_path / f"m{suffix}"), inputs)
        for want, got in zip(wanted, results, strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
    prepared = qtrace.prepare(traced, "onnxruntime")
    converted = qtrace.convert(qtrace.calibrate(prepared, [inputs], progress=False))
    shapes = _shapes(fresh)
    for module in (traced, converted):
        document = json.loads(qtrace.export(module, tmp_path / "m.json", "msc").read_text())
        written = {node["name"]: tuple(node["outputs"][0]["shape"]) for node in document["nodes"]}
        known = written.keys() & shapes.keys()
        assert {k: written[k] for k in known} == {k: shapes[k] for k in known}
        assert "second_out" in written


@pytest.mark.parametrize("hierarchical", [False, True])
def test_a_stride_that_passes_no_editor_is_reported_and_renewed(hierarchical: bool) -> None:
    traced = _net()
    if hierarchical:
        inner = net(lambda self, x: F.relu(self.conv(x)), conv=M.Conv2d(3, 4, 3, padding=1))
        outer = net(lambda self, x: self.pool(self.inner(x)), inner=inner, pool=M.MaxPool2d(2))
        traced = qtrace.trace(outer, X, check=False)
        traced.inner.conv.stride = (2, 2)
    else:
        traced.pool.kernel_size = traced.pool.stride = 1
        set_parameter(traced, "head.weight", _weight(5, 64))
    (problem,) = lint(traced)
    assert problem.code == "stale-shape"
    where = "inner/conv_out" if hierarchical else "pool_out"
    assert problem.where == where
    propagate_shapes(traced)
    assert lint(traced) == []
    prepared = qtrace.prepare(traced, "onnxruntime")
    assert prepared(mge.Tensor(X)).shape == traced(mge.Tensor(X)).shape


def test_prepare_and_export_refuse_a_layer_that_cannot_run(tmp_path: Path) -> None:
    traced = _net()
    set_parameter(traced, "second.weight", _weight(4, 3, 1, 1))
    assert [p.code for p in lint(traced)] == ["cannot-run"]
    for use in (qtrace.prepare, propagate_shapes, lambda m: qtrace.export(m, tmp_path / "m.onnx")):
        with pytest.raises(GraphError, match=r"second_out \(Conv2d, .*\) fails on pool_out \(2, 4, 4, 4\)"):
            use(traced)


def test_set_input_shapes_refuses_and_restores() -> None:
    traced = _net()
    before = _shapes(traced)
    with pytest.raises(GraphError, match="lacks input 'y'; it has x"):
        set_input_shapes(traced, {"y": (1, 3, 8, 8)})
    with pytest.raises(GraphError, match=r"first_out .* fails on x \(2, 4, 8, 8\) float32"):
        set_input_shapes(traced, {"x": (2, 4, 8, 8)})
    assert _shapes(traced) == before
