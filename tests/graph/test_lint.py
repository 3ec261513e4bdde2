"""Every check of lint finds its planted fault and names it; what MegEngine and qtrace make has none."""

from __future__ import annotations

import copy
import weakref

import megengine as mge
import megengine.functional as F
import megengine.module as M
import numpy as np
import pytest
from megengine.traced_module import trace_module

from qtrace.errors import GraphError
from qtrace.graph.lint import LEFTOVERS, LintProblem, check, lint
from tests.each import each_of
from tests.graph.samples import (
    IMAGE,
    MODELS,
    ConvBnRelu,
    Residual,
    chain,
    expr,
    function,
    node,
    traced_model,
)
from tests.growth import assert_linear, calls_of


@each_of("model", MODELS)
def test_clean_traces_have_no_problem(model):
    traced = traced_model(model, flat=False)
    assert lint(traced) == []
    assert lint(traced.flatten()) == []
    assert lint(traced_model(model)) == []
    assert lint(copy.deepcopy(traced)) == []
    check(traced, leftovers=True)


def test_saved_and_loaded_trace_is_clean(tmp_path):
    mge.save(traced_model(Residual, flat=False), str(tmp_path / "net.tm"))
    assert lint(mge.load(str(tmp_path / "net.tm"))) == []


def test_one_node_as_two_inputs_is_clean():
    class Two(M.Module):
        def forward(self, x, y):
            return x + y

    x = mge.Tensor(IMAGE)
    assert lint(trace_module(Two(), x, x)) == []


def test_works_on_a_native_qat_module():
    from megengine.quantization import ema_fakequant_qconfig, quantize_qat

    class Net(M.Module):
        def __init__(self):
            super().__init__()
            self.conv = M.ConvRelu2d(4, 4, 3)

        def forward(self, x):
            return self.conv(x)

    net = quantize_qat(Net(), qconfig=ema_fakequant_qconfig)
    net.eval()
    traced = trace_module(net, mge.Tensor(IMAGE))
    assert lint(traced) == []
    assert lint(traced.flatten()) == []


def before(traced):
    exprs = traced.graph._exprs
    exprs.insert(0, exprs.pop())


def unproduced(traced):
    traced.graph._exprs.remove(expr(traced, "bn_out"))


def twice(traced):
    other = copy.copy(expr(traced, "conv_out"))
    for source in other.inputs:
        source.users.append(other)
    traced.graph._exprs.append(other)


def producer(traced):
    node(traced, "conv_out").expr = expr(traced, "bn_out")


def missing_user(traced):
    node(traced, "conv_out").users.clear()


def user_twice(traced):
    users = node(traced, "conv_out").users
    users.append(users[0])


def foreign_user(traced):
    node(traced, "x").users.append(expr(function(lambda x: F.exp(x)), "exp_out"))


def output_as_user(traced):
    node(traced, "relu_out").users.append(expr(traced, "relu_out"))


def no_attribute(traced):
    del traced.bn


def no_parent(traced):
    expr(traced, "conv").name = "body.conv"


def tensor_for_module(traced):
    traced.bn = mge.Parameter(np.zeros(4, "float32"))


def owner(traced):
    traced.bn = copy.deepcopy(traced.bn)


def self_owner(traced):
    other = traced_model(ConvBnRelu)
    traced.keeps_it_alive = [other]
    traced.graph.inputs[0]._owner = weakref.ref(other)


def no_output(traced):
    traced.graph._outputs[0] = node(function(lambda x: F.exp(x)), "exp_out")


def more_outputs(traced):
    traced.graph._outputs.append(node(traced, "bn_out"))


def same_name(traced):
    node(traced, "bn_out")._name = "conv_out"


def node_elsewhere(traced):
    node(traced, "bn_out")._top_graph = None


def expr_elsewhere(traced):
    other = function(lambda x: F.exp(x)).graph
    expr(traced, "bn_out")._top_graph = weakref.ref(other)


def argument_count(traced):
    expr(traced, "relu_out").const_val.append((1, None))


def argument_place(traced):
    relu = expr(traced, "relu_out")
    relu.inputs[0].users.remove(relu)
    relu.inputs.clear()
    relu.const_val.append((3, None))


def output_count(traced):
    relu = expr(traced, "relu_out")
    relu.out_def = expr(function(lambda x: F.split(x, 2)[0]), "split_out").out_def


def dead(traced):
    traced.graph._outputs[:] = [node(traced, "conv_out")]


def stale_module(traced):
    traced.extra = M.Linear(2, 2)


def stale_leaf(traced):
    traced.extra = M.ReLU()


def stale_tensor(traced):
    traced.extra = mge.Parameter(np.zeros(2, "float32"))


FAULTS = [
    (before, "used-before-produced", "relu_out", "reads bn_out before %5 BatchNorm2d produces it"),
    (unproduced, "not-produced", "relu_out", "reads bn_out, which no expr of this graph produces"),
    (twice, "produced-twice", "conv_out", "a second time, by %3 Conv2d"),
    (producer, "wrong-producer", "conv_out", "produced by %3 Conv2d, but its expr is %5 BatchNorm2d"),
    (missing_user, "wrong-users", "conv_out", "read 1 times by %5 BatchNorm2d, but lists it 0 times"),
    (user_twice, "wrong-users", "conv_out", "read 1 times by %5 BatchNorm2d, but lists it 2 times"),
    (foreign_user, "wrong-users", "x", "F.exp as a user, which is not in this graph"),
    (output_as_user, "wrong-users", "relu_out", "read 0 times by %6 F.relu, but lists it 1 times"),
    (no_attribute, "missing-attribute", "bn", "reads bn, but the module has no such attribute"),
    (no_parent, "missing-attribute", "conv", "reads body.conv"),
    (tensor_for_module, "wrong-kind", "bn", "reads bn as a module, but it is a Parameter"),
    (owner, "wrong-owner", "bn", "stands for bn, but refers to another module"),
    (self_owner, "wrong-owner", "self", "refers to another one"),
    (no_output, "output-not-produced", "exp_out", "is output 0 of the graph"),
    (more_outputs, "wrong-outputs", "ConvBnRelu", "has 2 outputs, but the module returns 1 values"),
    (same_name, "name-twice", "conv_out", "of %3 Conv2d and of %5 BatchNorm2d"),
    (node_elsewhere, "wrong-graph", "bn_out", "the node does not refer back"),
    (expr_elsewhere, "wrong-graph", "bn_out", "the expr does not refer back"),
    (argument_count, "wrong-arguments", "relu_out", "has 2 arguments, but its call takes 1"),
    (argument_place, "wrong-arguments", "relu_out", "impossible places [3]"),
    (output_count, "wrong-outputs", "relu_out", "has 1 outputs, but its call returns 2"),
    (dead, "dead-expr", "relu_out", "nothing uses the result of %6 F.relu"),
    (dead, "dead-expr", "bn_out", "nothing uses the result of %5 BatchNorm2d"),
    (stale_module, "stale-module", "extra", "no expr reaches this Linear"),
    (stale_leaf, "stale-module", "extra", "no expr reaches this ReLU"),
    (stale_tensor, "stale-tensor", "extra", "no expr reads this tensor"),
]


@each_of(("fault", "code", "where", "text"), FAULTS)
def test_lint_finds_each_fault_by_code_and_place(fault, code, where, text):
    traced = traced_model(ConvBnRelu)
    assert lint(traced) == []
    fault(traced)
    problems = lint(traced)
    assert any(p.code == code and p.where == where and text in p.message for p in problems), problems
    if code in LEFTOVERS:
        check(traced)
    with pytest.raises(GraphError) as caught:
        check(traced, leftovers=True)
    assert any(str(p) in str(caught.value) for p in problems)


def test_a_fault_of_one_kind_is_one_problem():
    traced = traced_model(ConvBnRelu)
    stale_module(traced)
    foreign_user(traced)
    assert [p.code for p in lint(traced)] == ["wrong-users", "stale-module"]


def test_parts_of_a_used_module_that_nothing_reads_are_stale():
    traced = traced_model(ConvBnRelu)
    fault = expr(traced, "conv")
    fault.name, fault.outputs[0].__class__ = "conv.weight", type(node(traced, "x"))
    assert LintProblem("stale-tensor", "conv.bias", "no expr reads this tensor") in lint(traced)
    assert not any(p.where == "conv.weight" and p.code in LEFTOVERS for p in lint(traced))


def test_tied_parameters_are_reached_under_both_names():
    traced = traced_model(Residual)
    traced.same = traced.gain
    traced.also = traced.block.conv
    assert lint(traced) == []


def test_looks_into_called_graphs_and_names_their_path():
    traced = traced_model(Residual, flat=False)
    inner = getattr(traced.stages, "0").graph
    next(n for n in inner.nodes(False) if n.name == "conv_out").users.clear()
    del traced.block.bn
    problems = lint(traced)
    assert ("wrong-users", "stages.0/conv_out") in [(p.code, p.where) for p in problems]
    missing = [p for p in problems if p.code == "missing-attribute"]
    assert [(p.where, p.message) for p in missing] == [
        ("block/bn", "reads block.bn, but the module has no such attribute")
    ]


def test_a_call_needs_its_graph():
    traced = traced_model(Residual, flat=False)
    traced.block.argdef_graph_map.clear()
    problem = next(p for p in lint(traced) if p.code == "no-graph")
    assert problem.message == "calls block with arguments for which it lacks a graph"


def test_what_writes_in_place_or_is_kept_on_purpose_is_not_dead():
    traced = function(lambda x: F.exp(x))
    with_write = function(_write)
    with_write.graph._outputs[:] = [node(with_write, "exp_out")]
    assert "setitem_out" not in [p.where for p in lint(with_write)]
    traced.graph._outputs[:] = [node(traced, "x")]
    assert [p.where for p in lint(traced)] == ["exp_out"]
    expr(traced, "exp_out").disable_remove()
    assert lint(traced) == []


def _write(x):
    y = F.exp(x)
    y[0] = 1
    return y


def test_check_shows_the_first_few():
    traced = traced_model(ConvBnRelu)
    for index in range(7):
        setattr(traced, f"extra{index}", M.ReLU())
    check(traced)
    with pytest.raises(GraphError) as caught:
        check(traced, leftovers=True)
    lines = str(caught.value).splitlines()
    assert lines[0] == "the graph has 7 problems:"
    assert lines[1] == "  extra0: no expr reaches this ReLU [stale-module]"
    assert len(lines) == 5
    assert "and 4 more" in lines[-1]


def test_refuses_what_is_no_trace():
    with pytest.raises(GraphError, match="takes a TracedModule, not a Conv2d"):
        lint(M.Conv2d(1, 1, 1))


def test_work_is_linear():
    chains = {length: chain(length) for length in (300, 1200)}
    assert [lint(traced) for traced in chains.values()] == [[], []]
    assert_linear({length: calls_of(lambda t=traced: lint(t)) for length, traced in chains.items()})


def test_computes_no_layer():
    traced = traced_model(ConvBnRelu)
    forward = traced.conv.forward
    inputs = []

    def run(x):
        inputs.append(type(x))
        return forward(x)

    traced.conv.forward = run
    assert lint(traced) == []
    assert inputs
    assert mge.Tensor not in inputs  # variables without values
