"""The editor: order, users, names, dead code, refusals."""

from __future__ import annotations

import megengine as mge
import megengine.functional as F
import megengine.module as M
import numpy as np
import pytest

from qtrace.errors import GraphError
from qtrace.graph.edit import GraphEditor
from qtrace.graph.flatten import add_submodule, delete_attribute, flatten
from qtrace.graph.lint import lint
from qtrace.graph.tracing.trace import trace
from qtrace.graph.types import TracedModule
from qtrace.graph.walk import exprs, op_label
from tests.nets import images, net


def _flat() -> tuple[TracedModule, mge.Tensor]:
    x = images(2, 4, 4, 4)
    module = net(lambda self, x: F.relu(self.a(x)) + self.b(x), a=M.Conv2d(4, 4, 1), b=M.Conv2d(4, 4, 1))
    return flatten(trace(module, x)), mge.Tensor(x)


def _expr(traced: TracedModule, name: str) -> object:
    return next(e for e in exprs(traced) if e.outputs[0].name == name)


def test_insert_after_all_users_and_between_one() -> None:
    traced, x = _flat()
    a, relu = _expr(traced, "a_out"), _expr(traced, "relu_out")
    x_node = traced.graph.inputs[1]
    with GraphEditor(traced) as editor:
        doubled = editor.call_function(F.mul, a.outputs[0], 2.0, after=a, like=a.outputs[0])
        editor.replace_uses(a.outputs[0], doubled)
        shifted = editor.call_function(F.add, x_node, 1.0, after=x_node.expr, like=x_node)
        editor.replace_uses(x_node, shifted, users=[_expr(traced, "b_out")])
    assert lint(traced) == []
    want = F.relu(2 * traced.a(x)) + traced.b(x + 1.0)
    np.testing.assert_allclose(traced(x).numpy(), want.numpy(), rtol=1e-6)
    assert relu.inputs == [doubled]


def test_several_insertions_behind_one_expr_keep_the_order_of_the_calls() -> None:
    traced, _ = _flat()
    a = _expr(traced, "a_out")
    with GraphEditor(traced) as editor:
        first = editor.call_function(F.neg, a.outputs[0], after=a, like=a.outputs[0])
        second = editor.call_function(F.exp, first, after=first.expr, like=first)
        third = editor.call_function(F.abs, second, after=second.expr, like=first)
        editor.replace_uses(a.outputs[0], third, users=[_expr(traced, "relu_out")])
    names = [e.outputs[0].name for e in exprs(traced)]
    at = names.index("a_out")
    assert names[at + 1 : at + 4] == [first.name, second.name, third.name]
    assert lint(traced) == []


def test_equal_names_get_suffixes_and_stay_unique() -> None:
    traced, _ = _flat()
    a = _expr(traced, "a_out")
    with GraphEditor(traced) as editor:
        node = a.outputs[0]
        for _ in range(5):
            node = editor.call_function(F.neg, node, after=node.expr, like=node, name="neg_out")
        editor.replace_uses(a.outputs[0], node, users=[_expr(traced, "relu_out")])
    names = [n.name for e in exprs(traced) for n in e.outputs]
    assert len(set(names)) == len(names)
    assert {"neg_out", "neg_out_1", "neg_out_4"} <= set(names)
    assert lint(traced) == []


def test_submodule_call_and_attributes_stand_before_their_first_use() -> None:
    traced, x = _flat()
    add_submodule(traced, "gate", M.Sigmoid())
    x_node = traced.graph.inputs[1]
    with GraphEditor(traced) as editor:
        gated = editor.call_module("gate", x_node, after=x_node.expr, like=x_node)
        editor.replace_uses(x_node, gated)
    assert lint(traced) == []
    want = F.relu(traced.a(F.sigmoid(x))) + traced.b(F.sigmoid(x))
    np.testing.assert_allclose(traced(x).numpy(), want.numpy(), rtol=1e-6)


def test_replaced_expr_hands_on_its_name_and_dead_code_goes() -> None:
    traced, x = _flat()
    relu = _expr(traced, "relu_out")
    with GraphEditor(traced) as editor:
        new = editor.call_function(F.relu6, relu.inputs[0], after=relu, like=relu.outputs[0])
        editor.replace_expr(relu, new)
    assert new.name == "relu_out"
    assert relu not in exprs(traced)
    assert lint(traced) == []
    np.testing.assert_array_equal(traced(x).numpy(), (F.relu6(traced.a(x)) + traced.b(x)).numpy())


def test_removing_what_is_used_is_refused_by_name() -> None:
    traced, _ = _flat()
    editor = GraphEditor(traced)
    editor.remove(_expr(traced, "a_out"))
    with pytest.raises(GraphError, match="a_out"):
        editor.commit()


@pytest.mark.parametrize("fault", ["raise", "remove"])
def test_an_exception_leaves_the_graph_as_it_was(fault: str) -> None:
    traced, x = _flat()
    text, want = str(traced.graph), traced(x).numpy()
    relu = _expr(traced, "relu_out")

    def edit() -> None:
        with GraphEditor(traced) as editor:
            new = editor.call_function(F.neg, relu.outputs[0], after=relu, like=relu.outputs[0])
            editor.replace_uses(relu.outputs[0], new)
            editor.replace_expr(
                relu, editor.call_function(F.exp, relu.inputs[0], after=relu, like=relu.outputs[0])
            )
            if fault == "raise":
                raise KeyError("a user's mistake")
            editor.remove(_expr(traced, "a_out"))

    with pytest.raises(KeyError if fault == "raise" else GraphError):
        edit()
    assert str(traced.graph) == text
    assert lint(traced) == []
    np.testing.assert_array_equal(traced(x).numpy(), want)


def test_missing_attributes_are_named() -> None:
    traced, _ = _flat()
    with pytest.raises(GraphError, match=r"lacks attribute 'nothing\.here'"):
        GraphEditor(traced).get_attr("nothing.here")
    with pytest.raises(GraphError, match="already"):
        add_submodule(traced, "a", M.ReLU())


def test_an_edited_graph_survives_deepcopy_and_deletes_empty_parents() -> None:
    module = net(
        lambda self, x: self.inner(x),
        inner=M.Sequential(M.Sequential(M.Conv2d(4, 4, 1)), M.Sequential(M.ReLU())),
    )
    traced = flatten(trace(module, images(1, 4, 4, 4)))
    relu = next(e for e in exprs(traced) if e.outputs[0].name.startswith("inner") and "1" in str(e.inputs[0]))
    with GraphEditor(traced) as editor:
        editor.replace_uses(relu.outputs[0], relu.inputs[1])
    delete_attribute(traced, "inner.1.0")
    assert not hasattr(traced.inner, "1")
    assert hasattr(traced.inner, "0")
    assert lint(traced) == []


def test_a_reader_moves_after_what_it_reads() -> None:
    traced = flatten(trace(M.Sequential(M.ReLU(), M.Sigmoid()), np.ones((2, 3), "f4")))
    first, last = [e for e in exprs(traced) if type(e).__name__ == "CallMethod"]
    (x,) = traced.graph.inputs[1:]
    with GraphEditor(traced) as editor:
        new = editor.call_function(F.exp, x, after=last, like=x)
        editor.replace_uses(first.outputs[0], new)
    assert [problem.code for problem in lint(traced)] == ["stale-module"]
    assert [op_label(e) for e in exprs(traced) if op_label(e) != "getattr"] == ["F.exp", "Sigmoid"]


def test_a_node_that_would_need_itself_is_refused_and_undone() -> None:
    traced = flatten(trace(M.Sequential(M.ReLU(), M.Sigmoid()), np.ones((2, 3), "f4")))
    first, last = [e for e in exprs(traced) if type(e).__name__ == "CallMethod"]
    node = first.outputs[0]
    with pytest.raises(GraphError, match="produced later: it would need"), GraphEditor(traced) as editor:
        editor.replace_uses(node, editor.call_function(F.relu, last.outputs[0], after=last, like=node))
    assert not lint(traced)


def test_deleting_an_attribute_keeps_a_parent_that_still_holds_a_tensor() -> None:
    gain = mge.Parameter(np.zeros((4, 1, 1), np.float32))
    inner = net(lambda self, x: self.conv(x) * self.gain, conv=M.Conv2d(4, 4, 1), gain=gain)
    traced = flatten(trace(net(lambda self, x: self.inner(x), inner=inner), images(2, 4, 4, 4), check=False))
    delete_attribute(traced, "inner.conv")
    assert [n for n, _ in traced.named_parameters()] == ["inner.gain"]
    delete_attribute(traced, "inner.gain")
    assert getattr(traced, "inner", None) is None
