"""A graph run step by step on several batches: the values of a whole run, and changes on the way."""

from __future__ import annotations

from typing import Any

import megengine as mge
import megengine.functional as F
import megengine.module as M
import numpy as np
import pytest

from qtrace.errors import GraphError
from qtrace.graph.flatten import flatten
from qtrace.graph.interpreter import Interpreter
from qtrace.graph.stepping import Stepper
from qtrace.graph.tracing.trace import trace
from qtrace.graph.types import TensorNode
from qtrace.graph.walk import exprs
from qtrace.preparation.passes.expand import expand
from tests.nets import images, net

BATCHES = [images(n, 3, 6, 6, seed=n) for n in (1, 4, 2)]


def _stepper() -> Stepper:
    def forward(self: M.Module, x: Any) -> Any:
        y = F.relu(self.a(x))
        return self.b(y) + y.mean()

    flat = flatten(trace(net(forward, a=M.Conv2d(3, 4, 3), b=M.Conv2d(4, 2, 1)), BATCHES[0], check=False))
    expand(flat)
    return Stepper(flat, [((mge.Tensor(b),), {}) for b in BATCHES])


def _values(stepper: Stepper, batch: int) -> dict[str, np.ndarray]:
    values = {}

    class Keep(Interpreter):
        def on_node(self, node: Any, value: Any) -> Any:
            if isinstance(node, TensorNode):
                values[node.name] = value.numpy()
            return value

    Keep(stepper.traced).run(mge.Tensor(BATCHES[batch]))
    return values


def test_every_step_has_the_values_of_a_whole_run() -> None:
    stepper = _stepper()
    want = [_values(stepper, b) for b in range(stepper.count)]
    assert stepper.count == 3
    for expr in exprs(stepper.traced):
        stepper.advance(expr)
        for batch in range(3):
            (value,) = stepper.outputs(expr, batch)
            if isinstance(expr.outputs[0], TensorNode):
                np.testing.assert_array_equal(value.numpy(), want[batch][expr.outputs[0].name])


def test_values_ahead_are_computed_without_being_kept() -> None:
    stepper = _stepper()
    order = [e for e in exprs(stepper.traced) if e.outputs[0].name in ("a_out", "relu_out")]
    stepper.advance(order[0])
    (value,) = stepper.compute(order, [order[1].outputs[0]], 1)
    np.testing.assert_array_equal(value.numpy(), _values(stepper, 1)["relu_out"])
    with pytest.raises(GraphError, match="relu_out lacks a value here"):
        stepper.value(order[1].outputs[0], 1)


def test_a_changed_parameter_counts_from_there_on() -> None:
    stepper = _stepper()
    last = next(e for e in exprs(stepper.traced) if e.outputs[0].name == "b_out")
    stepper.advance(last)
    weight = stepper.traced.b.weight
    before = stepper.outputs(last, 0)[0].numpy()
    weight._reset(mge.Parameter(weight.numpy() * 2))
    stepper.traced.b.bias._reset(mge.Parameter(stepper.traced.b.bias.numpy() * 2))
    stepper.changed()
    np.testing.assert_allclose(stepper.outputs(last, 0)[0].numpy(), 2 * before, rtol=1e-5)


def test_parameters_that_nothing_reads_any_more_are_dropped() -> None:
    stepper = _stepper()
    last = next(e for e in exprs(stepper.traced) if e.outputs[0].name == "b_out")
    stepper.advance(last)
    stepper.outputs(last, 0)
    read = {node.name for expr in exprs(stepper.traced) for node in expr.inputs if node in stepper._known}
    assert read == {node.name for node in last.inputs[1:]}
    stepper.finish()
    assert not stepper._known


def test_stepper_refuses_to_go_back() -> None:
    stepper = _stepper()
    order = exprs(stepper.traced)
    stepper.advance(order[-1])
    with pytest.raises(GraphError, match="was passed already"):
        stepper.advance(next(e for e in order if e.outputs[0].name == "a_out"))


def test_fork_of_a_stepper_is_independent() -> None:
    stepper = _stepper()
    exprs_by_name = {e.outputs[0].name: e for e in exprs(stepper.traced)}
    first, last = exprs_by_name["a_out"], exprs_by_name["b_out"]
    stepper.advance(first)
    ahead = stepper.fork()
    ahead.advance(last)
    for one in (ahead, stepper):
        one.advance(last)
        np.testing.assert_array_equal(one.outputs(last, 1)[0].numpy(), _values(stepper, 1)["b_out"])
    with pytest.raises(GraphError, match="was passed already"):
        ahead.advance(first)
