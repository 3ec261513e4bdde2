"""Edits that change inputs, outputs and modules, edits that are refused, and edits that are undone."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import megengine as mge
import megengine.functional as F
import megengine.module as M
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import qtrace
from qtrace.errors import GraphError
from qtrace.fakequant.base import FakeQuant
from qtrace.graph import (
    GraphEditor,
    add_submodule,
    delete_attribute,
    exprs,
    find,
    flatten,
    lint,
    load,
    propagate_shapes,
    save,
    set_parameter,
)
from qtrace.graph.interface import Interface, TensorInfo, read_interface, write_interface
from qtrace.graph.types import TensorNode, TracedModule
from qtrace.graph.walk import set_arguments
from tests.nets import images, net

X = images(2, 4, 4, 4)


def _flat(forward: Callable[..., Any] | None = None) -> TracedModule:
    layers = {"a": M.Conv2d(4, 4, 1), "b": M.Conv2d(4, 4, 1)}
    forward = forward or (lambda self, x: F.relu(self.a(x)) + self.b(x))
    return flatten(qtrace.trace(net(forward, **layers), X))


def _node(traced: TracedModule, name: str) -> TensorNode:
    return next(n for e in exprs(traced) for n in e.outputs if n.name == name)


FLAT = _flat()


def _state(traced: TracedModule) -> Any:
    nodes = [n for e in exprs(traced) for n in e.outputs]
    types = [(n.name, getattr(n, "shape", None)) for n in nodes]
    return str(traced.graph), types, sorted(n for n, _ in traced.named_tensors()), traced.a.stride


def test_a_call_with_several_results_gives_a_node_for_each() -> None:
    traced = _flat()
    node = _node(traced, "relu_out")
    with GraphEditor(traced) as edit:
        low, high = edit.call_function(F.split, node, 2, axis=1, after=node.expr, name="half")
        rows = edit.call_method("reshape", high, 16, -1, after=low.expr)
        values, indices = edit.call_function(F.topk, rows, 2, descending=True, after=low.expr)
        joined = edit.call_function(F.concat, [high, low], 1, after=low.expr)
        edit.replace_uses(node, joined, users=[_node(traced, "add_out").expr])
        edit.add_output(values)
    assert (low.name, high.name, high.shape) == ("half", "half_1", (2, 2, 4, 4))
    assert (values.shape, np.dtype(indices.dtype)) == ((16, 2), np.dtype("int32"))
    assert lint(traced) == []
    x = mge.Tensor(X)
    y = F.relu(traced.a(x))
    want = F.concat([y[:, 2:], y[:, :2]], 1) + traced.b(x)
    np.testing.assert_array_equal(traced(x)[0].numpy(), want.numpy())


def test_an_edit_that_cannot_run_is_refused_at_its_call() -> None:
    traced = _flat()
    before, node = _state(traced), _node(traced, "relu_out")
    refusals: dict[str, Callable[[GraphEditor], Any]] = {
        r"the inserted F.reshape .*\) fails on relu_out \(2, 4, 4, 4\) float32": lambda e: e.call_function(
            F.reshape, node, (3, -1), after=node.expr
        ),
        r"F.relu .*fails on relu_out .*: TypeError: ": lambda e: e.call_function(
            F.relu, node, 1, after=node.expr
        ),
        "a Tensor lacks the method 'rehsape'": lambda e: e.call_method("rehsape", node, after=node.expr),
        "depends on values, so the edit must say it": lambda e: e.call_function(
            F.cond_take, node, node, after=node.expr
        ),
        r"F.split.*fails on relu_out .*: ValueError: it has 2 results, and the graph 1": lambda e: (
            e.replace_uses(node, e.call_function(F.split, node, 2, 1, after=node.expr, like=node))
        ),
    }
    for message, change in refusals.items():
        with pytest.raises(GraphError, match=message), GraphEditor(traced) as edit:
            change(edit)
        assert _state(traced) == before
        assert lint(traced) == []


def test_an_edit_after_which_a_later_op_cannot_run_is_refused() -> None:
    traced = _flat()
    before = _state(traced)
    with pytest.raises(GraphError, match=r"add_out .* fails on relu_out \(2, 4, 2, 2\) float32, b_out"):  # noqa: SIM117
        with GraphEditor(traced):
            traced.a.stride = (2, 2)
    assert _state(traced) == before
    assert lint(traced) == []


def test_an_op_that_fits_only_the_new_attributes_is_inserted() -> None:
    traced = _flat(lambda self, x: (self.a(x), self.b(x)))
    a, b = traced.graph.outputs
    with GraphEditor(traced) as edit:
        both = edit.call_function(F.add, a, b, after=b.expr)
        edit.add_output(both)
        traced.a.stride = traced.b.stride = (2, 2)
        half = edit.call_function(F.zeros, (2, 4, 2, 2), after=b.expr)
        edit.add_output(edit.call_function(F.add, a, half, after=half.expr))
    assert [node.shape for node in traced.graph.outputs] == [(2, 4, 2, 2)] * 4
    assert lint(traced) == []
    values = [value.numpy() for value in traced(mge.Tensor(X))]
    np.testing.assert_array_equal(values[2], values[0] + values[1])
    np.testing.assert_array_equal(values[3], values[0])


def test_set_argument_names_the_arguments_of_the_op() -> None:
    traced = _flat(lambda self, x: F.leaky_relu(self.a(x) + self.b(x), 0.2))
    leaky = _node(traced, "leaky_relu_out").expr
    with (
        pytest.raises(
            GraphError, match=r"leaky_relu_out \(F.leaky_relu, .* takes no argument 'slope'; it takes inp, "
        ),
        GraphEditor(traced) as edit,
    ):
        edit.set_argument(leaky, "slope", 0.5)
    with pytest.raises(GraphError, match="a_out .* calls no function: for a layer set the attribute"):  # noqa: SIM117
        with GraphEditor(traced) as edit:
            edit.set_argument(_node(traced, "a_out").expr, "stride", 2)
    with GraphEditor(traced) as edit:
        edit.set_argument(leaky, "negative_slope", 0.5)
    assert leaky.kwargs.get("negative_slope", leaky.args[-1]) == 0.5


def test_lint_reports_arguments_that_the_op_does_not_take() -> None:
    traced = _flat(lambda self, x: F.leaky_relu(self.a(x) + self.b(x), 0.2))
    expr = _node(traced, "leaky_relu_out").expr
    expr.const_val = [(index, {1, 2}) for index, _ in expr.const_val]
    assert {p.code for p in lint(traced)} == {"wrong-constant", "wrong-arguments"}
    traced = _flat(lambda self, x: F.relu(self.a(x) + self.b(x)))
    expr = _node(traced, "relu_out").expr
    (operand,) = expr.inputs
    operand.users.remove(expr)
    set_arguments(expr, (operand,), {"inexistent": 0.5})
    (problem,) = lint(traced)
    assert problem.code == "wrong-arguments"
    assert "inexistent" in problem.message


def test_an_exception_undoes_changes_of_modules_and_parameters() -> None:
    traced = _flat()
    before, weight = _state(traced), traced.a.weight

    def change() -> None:
        with GraphEditor(traced) as edit:
            set_parameter(traced, "a.weight", mge.Parameter(np.ones((4, 4, 1, 1), "float32")))
            delete_attribute(traced, "b")
            add_submodule(traced, "c", M.ReLU())
            traced.a.stride = (4, 4)
            edit.add_output(_node(traced, "a_out"))
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        change()
    assert _state(traced) == before
    assert traced.a.weight is weight
    assert not hasattr(traced, "c")
    assert lint(traced) == []
    assert traced(mge.Tensor(X)).shape == (2, 4, 4, 4)


def test_editor_adds_and_removes_inputs() -> None:
    traced = _flat()
    x, y = mge.Tensor(X), mge.Tensor(X + 1)
    write_interface(traced, Interface((TensorInfo("x:0", "float32"),), (TensorInfo("y:0", "float32"),)))
    with GraphEditor(traced) as edit:
        other = edit.add_input("other", X.shape)
        edit.replace_uses(traced.graph.inputs[1], other, users=[_node(traced, "b_out").expr])
    assert lint(traced) == []
    np.testing.assert_array_equal(traced(x, other=y).numpy(), (F.relu(traced.a(x)) + traced.b(y)).numpy())
    assert [t.name for t in read_interface(traced).inputs] == ["x:0", "other"]
    with pytest.raises(GraphError, match="input x is still used by Conv2d"), GraphEditor(traced) as edit:
        edit.remove_input(traced.graph.inputs[1])
    with GraphEditor(traced) as edit:
        first = traced.graph.inputs[1]
        edit.replace_uses(first, other)
        edit.remove_input(first)
    assert lint(traced) == []
    assert [t.name for t in read_interface(traced).inputs] == ["other"]
    np.testing.assert_array_equal(traced(y).numpy(), (F.relu(traced.a(y)) + traced.b(y)).numpy())
    with pytest.raises(GraphError, match="'other' is an input already"), GraphEditor(traced) as edit:
        edit.add_input("other", (1,))
    with GraphEditor(traced) as edit:
        unused = edit.call_function(F.relu, other, after=other.expr)
        with pytest.raises(GraphError, match="relu_out_1 is not a tensor input"):
            edit.remove_input(unused)


def test_inputs_of_a_dict_are_refused() -> None:
    traced = flatten(
        qtrace.trace(net(lambda self, pair: pair["a"] + pair["b"]), {"a": X, "b": X}, check=False)
    )
    first, second = traced.graph.inputs[1:]
    with GraphEditor(traced) as edit:
        edit.replace_uses(second, first)
        with pytest.raises(GraphError, match="is part of a container"):
            edit.remove_input(second)
    with GraphEditor(traced) as edit:
        third = edit.add_input("third", X.shape)
        total = _node(traced, "add_out")
        edit.replace_uses(total, edit.call_method("__add__", total, third, after=total.expr))
    x = mge.Tensor(X)
    np.testing.assert_array_equal(traced({"a": x, "b": x}, x).numpy(), (x + x + x).numpy())


def test_editor_adds_and_removes_outputs(tmp_path: Any) -> None:
    traced = _flat()
    x = mge.Tensor(X)
    write_interface(traced, Interface((TensorInfo("x:0", "float32"),), (TensorInfo("y:0", "float32"),)))
    with GraphEditor(traced) as edit:
        edit.add_output(_node(traced, "a_out"))
    with GraphEditor(traced) as edit:
        edit.add_output(_node(traced, "b_out"))
    assert lint(traced) == []
    assert [t.name for t in read_interface(traced).outputs] == ["y:0", "a_out", "b_out"]
    results = traced(x)
    np.testing.assert_array_equal(results[1].numpy(), traced.a(x).numpy())
    with GraphEditor(traced) as edit:
        edit.remove_output(traced.graph.outputs[0])
    save(traced, tmp_path / "m.mge")
    assert [tuple(v.shape) for v in load(tmp_path / "m.mge")(x)] == [(2, 4, 4, 4)] * 2
    with GraphEditor(traced) as edit:
        edit.set_outputs({"a": _node(traced, "a_out")})
        edit.add_output(_node(traced, "b_out"), key="b")
    assert sorted(traced(x)) == ["a", "b"]
    assert {p.code for p in lint(traced)} <= {"stale-module"}


def test_outputs_that_make_no_sense_are_refused() -> None:
    traced = _flat()
    a = _node(traced, "a_out")
    refusals: dict[str, Callable[[GraphEditor], None]] = {
        "returns no dict: leave out the key": lambda e: e.add_output(a, key="a"),
        "cannot go, since forward returns one tensor": lambda e: e.remove_output(a),
        "the outputs are nodes of tensors": lambda e: e.set_outputs((a, 3.0)),
    }
    for message, change in refusals.items():
        with pytest.raises(GraphError, match=message), GraphEditor(traced) as edit:
            change(edit)
    with GraphEditor(traced) as edit:
        edit.set_outputs({"a": a})
    for message, change in {
        "give the key of the output": lambda e: e.add_output(a),
        "returns a value under 'a' already": lambda e: e.add_output(a, key="a"),
        "a_out is the last output": lambda e: e.remove_output(a),
        "x is no value of the dict": lambda e: e.remove_output(traced.graph.inputs[1]),
    }.items():
        with pytest.raises(GraphError, match=message), GraphEditor(traced) as edit:
            change(edit)


@pytest.mark.parametrize("stage", ["prepared", "converted"])
def test_the_graph_of_a_quantized_module_is_not_edited(stage: str) -> None:
    model = qtrace.prepare(_flat(), "onnxruntime")
    if stage == "converted":
        model = qtrace.convert(qtrace.calibrate(model, [(X,)], progress=False))
    before = str(model.graph)
    (relu,) = find(model, function=F.relu)
    edits: list[Callable[[GraphEditor], Any]] = [
        lambda e: e.replace_uses(relu.outputs[0], relu.inputs[0]),
        lambda e: e.call_function(F.relu6, relu.outputs[0], after=relu),
        lambda e: e.add_output(relu.outputs[0]),
    ]
    for change in edits:
        with (
            pytest.raises(GraphError, match="is prepared or converted, .* edit the float module and prepare"),
            GraphEditor(model) as edit,
        ):
            change(edit)
        assert str(model.graph) == before
    with GraphEditor(model):
        set_parameter(model, "a.bias", mge.Parameter(np.ones((1, 4, 1, 1), "float32")))
    assert model.a.bias.numpy().max() == 1


def test_finds_exprs_of_every_kind_of_graph() -> None:
    inner = net(lambda self, x: F.relu(self.conv(x)).reshape(-1, 4), conv=M.Conv2d(4, 4, 1))
    traced = qtrace.trace(net(lambda self, x: self.inner(x) * self.inner(x) + 1, inner=inner), X, check=False)
    prepared = qtrace.prepare(traced, "onnxruntime")
    converted = qtrace.convert(qtrace.calibrate(prepared, [(X,)], progress=False))
    for model, convs in ((traced, 1), (flatten(traced), 2)):
        assert len(find(model, module=M.Conv2d)) == len(find(model, op="Conv2d")) == convs
        assert len(find(model, attribute="inner.conv")) == convs
    for model in (prepared, converted):
        assert len(find(model, function=F.conv2d)) == len(find(model, op="F.conv2d")) == 2
        assert len(find(model, attribute="inner.conv.weight")) >= 1
        assert find(model, name="*relu_out*", function=F.relu) == find(model, function=F.relu)
    assert [len(find(m, method="reshape")) for m in (traced, prepared, converted)] == [1, 2, 2]
    assert find(traced, name="nothing") == []
    with pytest.raises(GraphError, match="find needs a condition"):
        find(traced)
    with pytest.raises(GraphError, match="find takes a class as module, such as M.Conv2d, not 'Conv2d'"):
        find(traced, module="Conv2d")  # type: ignore[arg-type]
    with pytest.raises(GraphError, match="find takes a TracedModule, not a ReLU"):
        find(M.ReLU(), op="x")


CHANGES = ("relu", "conv", "pool", "split", "flip", "output", "scale", "remove")


_CHANGE = st.tuples(st.sampled_from(CHANGES), st.integers(0, 50))


@settings(max_examples=15, deadline=None, derandomize=True)
@given(st.lists(_CHANGE, max_size=6))
def test_random_edits_give_the_predicted_outputs_and_shapes(changes: list[tuple[str, int]]) -> None:
    _check_edits(changes)


@pytest.mark.slow
@settings(max_examples=4, deadline=None, derandomize=True)
@given(st.lists(_CHANGE, min_size=50, max_size=50))
def test_long_sequences_of_random_edits(changes: list[tuple[str, int]]) -> None:
    _check_edits(changes)


def _check_edits(changes: list[tuple[str, int]]) -> None:
    """Edits a graph and checks outputs, lint and shapes."""
    traced = copy.deepcopy(FLAT)
    for kind, choice in changes:
        traced_nodes = [n for e in exprs(traced) for n in e.outputs if getattr(n, "shape", None) is not None]
        nodes = [
            n for n in traced_nodes if len(n.shape) == 4 and n.shape[2] > 1 and n.shape[1] == 4 and n.users
        ]
        if nodes:
            _apply(traced, kind, nodes[choice % len(nodes)])
        assert {p.code for p in lint(traced)} <= {"stale-module"}
    recorded = [(n.name, n.shape) for e in exprs(traced) for n in e.outputs if isinstance(n, TensorNode)]
    propagate_shapes(traced, X)
    assert recorded == [
        (n.name, n.shape) for e in exprs(traced) for n in e.outputs if isinstance(n, TensorNode)
    ]


def _apply(traced: TracedModule, kind: str, node: TensorNode) -> None:
    """Changes the graph behind ``node`` if the rest of it can run then."""
    x = mge.Tensor(X)
    before = traced(x)
    definitions: dict[str, Callable[[GraphEditor], TensorNode]] = {
        "relu": lambda e: e.call_function(F.relu, node, after=node.expr),
        "scale": lambda e: e.call_method("__mul__", node, 2.0, after=node.expr),
        "pool": lambda e: e.call_function(F.max_pool2d, node, 2, after=node.expr),
        "flip": lambda e: e.call_function(F.transpose, node, (0, 1, 3, 2), after=node.expr),
        "conv": lambda e: e.call_module("a", node, after=node.expr),
    }
    try:
        with GraphEditor(traced) as edit:
            if kind == "output":
                edit.add_output(node)
            elif kind == "split":
                readers = list(node.users)
                low, high = edit.call_function(F.split, node, 2, 1, after=node.expr)
                joined = edit.call_function(F.concat, [low, high], 1, after=low.expr)
                edit.replace_uses(node, joined, users=readers)
            elif kind == "remove":
                if len(node.expr.inputs) == 2 and node.expr.inputs[1] is not node.expr.inputs[0]:
                    return
                edit.replace_uses(node, node.expr.inputs[-1])
            else:
                edit.replace_uses(node, definitions[kind](edit))
    except GraphError as error:  # the other operand of the sum has another shape now
        assert "fails on" in str(error)  # noqa: PT017
        np.testing.assert_array_equal(_leaves(traced(x))[0].numpy(), _leaves(before)[0].numpy())
        return
    after = traced(x)
    if kind in ("output", "split"):
        np.testing.assert_array_equal(_leaves(after)[0].numpy(), _leaves(before)[0].numpy())


def _leaves(value: Any) -> tuple[mge.Tensor, ...]:
    return value if isinstance(value, tuple) else (value,)


def test_the_lookups_of_megengine_work_on_every_stage() -> None:
    traced = _flat(lambda self, x: F.relu(self.a(x)).reshape(2, -1))
    prepared = qtrace.prepare(traced, "onnxruntime")
    converted = qtrace.convert(qtrace.calibrate(prepared, [(X,)], progress=False))
    for model in (traced, prepared, converted):
        graph = model.graph
        (relu,) = graph.get_function_by_type(F.relu)
        assert len(graph.get_function_by_type().as_list()) >= 1 + (model is not traced)
        if model is not traced:  # a traced graph calls the module
            conv = graph.get_function_by_type(F.conv2d).as_unique()
            assert conv is graph.exprs(recursive=False).call_function(F.conv2d).as_unique()
            assert conv.outputs[0] in {relu.inputs[0], *relu.inputs[0].expr.inputs}
        assert [e.method for e in graph.get_method_by_type("reshape")] == ["reshape"]
        assert graph.get_expr_by_id(relu._id).as_unique() is relu
        assert graph.get_node_by_id(relu.outputs[0]._id).as_unique() is relu.outputs[0]
        assert relu.outputs[0] in graph.get_node_by_name("*relu_out*").as_list()
        kinds = {type(node.owner) for node in graph.get_module_by_type(M.Module)}
        assert M.Conv2d in kinds or any(issubclass(kind, FakeQuant) for kind in kinds)


def test_what_is_no_node_or_tensor_is_refused() -> None:
    traced = _flat(lambda self, x: F.relu(self.a(x)))
    (relu,) = traced.graph.get_function_by_type(F.relu)
    with (
        pytest.raises(GraphError, match="takes two nodes of the graph, not NoneType"),
        GraphEditor(traced) as edit,
    ):
        edit.replace_uses(None, relu.outputs[0])  # type: ignore[arg-type]
    with pytest.raises(GraphError, match="'a.nope' cannot become 1: give a Parameter, a Tensor or None"):
        set_parameter(traced, "a.nope", 1)
    assert not hasattr(traced.a, "nope")
