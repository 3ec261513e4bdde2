"""The interpreter computes what the module computes, and its hooks see and replace every value."""

from __future__ import annotations

import gc
import weakref

import megengine as mge
import megengine.functional as F
import megengine.module as M
import numpy as np
import pytest
from megengine.autodiff import GradManager
from megengine.traced_module.node import TensorNode
from megengine.traced_module.pytree import tree_flatten

import qtrace
from qtrace.errors import GraphError
from qtrace.graph import interpreter
from qtrace.graph.edit import GraphEditor
from qtrace.graph.flatten import flatten
from qtrace.graph.interpreter import Interpreter, locate_failure, round_late
from qtrace.graph.kernels import large_reads
from tests.each import each_of
from tests.graph.samples import (
    IMAGE,
    MODELS,
    Containers,
    ConvBnRelu,
    Pair,
    Residual,
    chain,
    function,
    node,
    traced_model,
)


def assert_same(left, right):
    (left_leaves, structure), (right_leaves, expected) = (tree_flatten(v) for v in (left, right))
    assert structure == expected
    for a, b in zip(left_leaves, right_leaves, strict=True):
        np.testing.assert_array_equal(a.numpy(), b.numpy())


@each_of("model", MODELS)
@each_of("flat", [True, False])
def test_equals_the_module_bit_for_bit(model, flat):
    traced = traced_model(model, flat)
    assert_same(Interpreter(traced).run(mge.Tensor(IMAGE)), traced(mge.Tensor(IMAGE)))


def test_runs_again_on_another_batch_size():
    traced = traced_model(ConvBnRelu)
    interpreter = Interpreter(traced)
    for batch in (1, 2):
        x = mge.Tensor(IMAGE[:batch])
        assert_same(interpreter.run(x), traced(x))


@pytest.mark.parametrize("flat", [True, False])
def test_takes_containers_and_keywords(flat):
    a, b, c = (mge.Tensor(np.float32([i, i + 1])) for i in range(3))
    traced = traced_model(Pair, flat, {"a": a, "b": b}, bias=c)
    run = Interpreter(traced).run
    expected = traced({"a": a, "b": b}, bias=c)
    assert_same(run({"b": b, "a": a}, bias=c), expected)
    assert_same(run({"a": a, "b": b}, c), expected)
    assert_same(run(pair={"a": a, "b": b}, bias=c), expected)


def test_defaults_are_those_of_forward():
    traced = traced_model(Containers)
    assert_same(Interpreter(traced).run(mge.Tensor(IMAGE), 2.0), traced(mge.Tensor(IMAGE)))


@each_of(
    ("args", "kwargs", "text"),
    [
        ((), {}, "missing required positional arguments: x"),
        ((mge.Tensor(IMAGE),), {"y": 1}, "unexpected keyword argument y"),
        (
            (mge.Tensor(IMAGE), 3.0),
            {},
            "traced as forward(Tensor, 2.0), but is called as forward(Tensor, 3.0).",
        ),
        ((IMAGE,), {}, "called as forward(ndarray, 2.0); make Tensors of numpy arrays."),
        (([mge.Tensor(IMAGE)],), {}, "called as forward([Tensor], 2.0)."),
        (({"a": mge.Tensor(IMAGE)}, None), {}, "called as forward({'a': Tensor}, None)."),
        ((object(),), {}, "the arguments do not fit the traced module"),
    ],
)
def test_wrong_arguments_are_reported(args, kwargs, text):
    with pytest.raises(GraphError) as caught:
        Interpreter(traced_model(Containers)).run(*args, **kwargs)
    assert text in str(caught.value)


def test_refuses_what_is_no_trace():
    with pytest.raises(GraphError, match="runs a TracedModule, not a ReLU"):
        Interpreter(M.ReLU())


class Record(Interpreter):
    def __init__(self, traced):
        super().__init__(traced)
        self.seen = {}

    def on_node(self, node, value):
        self.seen[node.name] = (node, value)
        return value


def test_sees_every_node_with_its_value():
    traced = traced_model(Residual)
    record = Record(traced)
    record.run(mge.Tensor(IMAGE))
    assert list(record.seen) == [n.name for n in traced.graph.nodes(False)]
    assert record.seen["self"][1] is traced
    for n, value in record.seen.values():
        assert tuple(value.shape) == tuple(n.shape) if isinstance(n, TensorNode) else value is n.owner


def test_a_nested_call_is_one_expr():
    record = Record(traced_model(Residual, flat=False))
    record.run(mge.Tensor(IMAGE))
    assert "block_1_out" in record.seen
    assert "conv_out" not in record.seen


@each_of("name", ["x", "bn_out", "relu_out"])
def test_a_replaced_value_is_used(name):
    class Replace(Interpreter):
        def on_node(self, node, value):
            return F.full_like(value, 3.0) if node.name == name else value

    traced = traced_model(ConvBnRelu)
    result = Replace(traced).run(mge.Tensor(IMAGE))
    constant = mge.Tensor(np.full_like(IMAGE, 3.0))
    assert_same(result, traced(constant) if name == "x" else constant)


def test_run_expr_can_be_replaced():
    class Negate(Interpreter):
        def run_expr(self, expr, inputs):
            results = super().run_expr(expr, inputs)
            return [-v for v in results] if expr.outputs[0].name == "exp_out" else results

    result = Negate(function(lambda x: F.exp(x))).run(mge.Tensor(IMAGE))
    np.testing.assert_array_equal(result.numpy(), -F.exp(mge.Tensor(IMAGE)).numpy())


def test_run_expr_must_return_as_many_values():
    class Wrong(Interpreter):
        def run_expr(self, expr, inputs):
            return ()

    with pytest.raises(GraphError, match=r"has the outputs \['relu_out'\], but run_expr returned 0 values"):
        Wrong(function(lambda x: F.relu(x))).run(mge.Tensor(IMAGE))


def test_stops_at_a_node():
    traced = traced_model(ConvBnRelu)
    record = Record(traced)
    value = record.run_until(node(traced, "conv_out"), mge.Tensor(IMAGE))
    np.testing.assert_array_equal(value.numpy(), traced.conv(mge.Tensor(IMAGE)).numpy())
    assert list(record.seen)[-1] == "conv_out"
    x = mge.Tensor(IMAGE)
    assert record.run_until(node(traced, "x"), x) is x
    with pytest.raises(GraphError, match="does not produce exp_out"):
        record.run_until(node(function(lambda x: F.exp(x)), "exp_out"), x)


class Alive(Interpreter):
    """Counts the values that are alive while each expr runs."""

    def __init__(self, traced):
        super().__init__(traced)
        self.values = weakref.WeakSet()
        self.counts = []

    def run_expr(self, expr, inputs):
        self.counts.append(len(self.values))
        return super().run_expr(expr, inputs)

    def on_node(self, node, value):
        if isinstance(node, TensorNode) and node.name != "x":
            self.values.add(value)
        return value


def test_values_are_freed_after_their_last_use():
    gc.disable()  # freed by counting alone
    try:
        alive = Alive(chain(50))
        result = alive.run(mge.Tensor(IMAGE))
        assert alive.counts == [0] + [1] * 49
        assert len(alive.values) == 1
        del result
        assert len(alive.values) == 0
    finally:
        gc.enable()


def test_values_are_kept_until_their_last_use():
    def forward(x):
        a = F.relu(x)
        b = F.relu(a)
        c = F.relu(b)
        return F.relu(c + a), b

    alive = Alive(function(forward))
    alive.run(mge.Tensor(IMAGE))
    assert alive.counts == [0, 1, 2, 3, 2]  # b is an output and stays


def test_results_that_nothing_reads_are_freed_at_once():
    traced = function(lambda x: F.relu(F.split(x, 2, axis=1)[0]))
    alive = Alive(traced)
    alive.run(mge.Tensor(IMAGE))
    assert alive.counts == [0, 1]


@pytest.mark.usefixtures("synchronous")
def test_gradients_flow():
    traced = traced_model(Residual)
    grads = []
    for run in (traced, Interpreter(traced).run):
        manager = GradManager().attach(traced.parameters())
        with manager:
            manager.backward((run(mge.Tensor(IMAGE)) ** 2).mean())
        grads.append({name: p.grad.numpy() for name, p in traced.named_parameters()})
        for p in traced.parameters():
            p.grad = None
    assert grads[0].keys() == grads[1].keys()
    for name, grad in grads[0].items():
        np.testing.assert_array_equal(grads[1][name], grad)
        assert np.abs(grad).max() > 0 or name.endswith("conv.bias"), name


def test_sees_an_edit_of_the_graph():
    traced = function(lambda x: F.exp(x))
    interpreter = Interpreter(traced)
    out = traced.graph.outputs[0]
    with GraphEditor(traced) as editor:
        editor.replace_uses(out, editor.call_function(F.relu, out, after=out.expr, like=out))
    assert_same(interpreter.run(mge.Tensor(IMAGE)), traced(mge.Tensor(IMAGE)))


def _in_place(x):
    y = x * 2.0
    y += x
    y[:, :1] = x[:, 1:2]
    y /= 4.0
    return y - x


def test_ops_in_place_leave_the_values_before_them() -> None:
    """Calibration keeps the value of a node until the next one is under way."""
    traced = function(_in_place)
    values = {}

    class Keeper(Interpreter):
        def on_node(self, node, value):
            values[node.name] = value
            return value

    assert_same(Keeper(traced).run(mge.Tensor(IMAGE)), traced(mge.Tensor(IMAGE)))
    x = IMAGE
    np.testing.assert_array_equal(values["mul_out"].numpy(), x * 2)
    added = x * 2 + x
    np.testing.assert_array_equal(values["iadd_out"].numpy(), added)
    added[:, :1] = x[:, 1:2]
    np.testing.assert_array_equal(values["setitem_out"].numpy(), added)


def test_ops_in_place_pass_gradients_on() -> None:
    traced = function(_in_place)
    gradients = []
    for run in (traced, Interpreter(traced).run):
        x = mge.Tensor(IMAGE)
        with GradManager().attach([x]) as manager:
            manager.backward((run(x) * mge.Tensor(np.cos(IMAGE))).sum())
        gradients.append(x.grad.numpy())
    np.testing.assert_array_equal(*gradients)


@pytest.mark.parametrize("flat", [False, True])
def test_an_error_names_the_op_and_its_source_line(flat):
    class Inner(M.Module):
        def forward(self, x):
            return F.matmul(x, F.ones((6, 3)))

    class Outer(M.Module):
        def __init__(self):
            super().__init__()
            self.inner = Inner()

        def forward(self, x):
            return self.inner(F.relu(x)) + 1

    traced = qtrace.trace(Outer(), IMAGE, check=False)
    if flat:
        traced = flatten(traced)
    wrong = mge.Tensor(IMAGE[..., :5])
    place = (
        r"\w+_out \(F.matmul, .*test_interpreter.py:\d+\) fails on .* \(2, 4, 6, 5\) float32.*: RuntimeError"
    )
    with pytest.raises(RuntimeError, match=place):
        Interpreter(traced).run(wrong)
    assert "F.matmul" in locate_failure(traced, wrong)
    assert locate_failure(traced, mge.Tensor(IMAGE)) == ""


def test_an_error_of_a_hook_stays_as_it_is():
    class Refuse(Interpreter):
        def on_node(self, node, value):
            raise ValueError("the hook")

    with pytest.raises(ValueError, match="^the hook$"):
        Refuse(traced_model(Residual)).run(mge.Tensor(IMAGE))


def test_only_roundings_of_large_parameters_wait_for_their_reader() -> None:
    """A selection keeps its place: the tape of another run counts them in the order of execution."""

    class Bank(M.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bank = mge.Parameter(np.random.default_rng(0).normal(size=(4096, 80)).astype(np.float32))

        def forward(self, x):
            order, best = F.argsort(self.bank)[0], F.argmax(self.bank, 1)
            rounded = F.round(self.bank)
            return F.topk(x, 2)[1] + best[:2], F.sum(order), F.sum(rounded)

    traced = flatten(qtrace.trace(Bank(), np.ones((1, 8), np.float32), check=False))
    steps = traced.graph._exprs
    order = round_late(steps, large_reads(traced.graph))
    moved = [s for s in steps if order.index(s) != steps.index(s)]
    waits = next(s for s in steps if getattr(s, "func", None) is F.round)
    assert order[order.index(waits) + 1].inputs[0] is waits.outputs[0]
    ranks = [s for s in order if getattr(s, "func", None) in (F.argsort, F.argmax, F.topk)]
    assert ranks == [s for s in steps if s in ranks]
    assert waits in moved


@pytest.mark.parametrize(("waits", "times"), [(False, 0), (True, 3)])
def test_waits_for_large_results(monkeypatch: pytest.MonkeyPatch, waits: bool, times: int) -> None:
    """MegEngine allocates the results of all ops that it is given, before it computes and frees them."""
    waited = []
    monkeypatch.setattr(interpreter, "synchronize", lambda: waited.append(1))
    traced = chain(6)
    batch = mge.Tensor(np.zeros((2, *traced.graph.inputs[1].shape[1:]), np.float32))
    monkeypatch.setattr(interpreter, "PART_BYTES", 2 * batch.numpy().nbytes)
    run = Interpreter(traced, waits=waits)
    assert np.array_equal(run.run(batch).numpy(), traced(batch).numpy())
    assert len(waited) == times
