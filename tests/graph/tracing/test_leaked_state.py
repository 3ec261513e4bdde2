"""A failed block of MegEngine's ``insert_exprs``, and a failed trace, leave nothing behind."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import megengine as mge
import megengine.functional as F
import megengine.module as M
import numpy as np
import pytest
from megengine.traced_module import TracedModule, trace_module

import qtrace
from qtrace.errors import GraphError
from tests.nets import net

X = np.random.default_rng(0).standard_normal((2, 4)).astype(np.float32)


def _layer() -> M.Module:
    return net(lambda self, x: F.relu(self.c(x)), c=M.Linear(4, 4))


def _fails_by_itself(traced: TracedModule) -> None:
    with traced.graph.insert_exprs():
        F.exp(traced.graph.inputs[1])
        raise ValueError("mine")


def _fails_in_a_call(traced: TracedModule) -> None:
    with traced.graph.insert_exprs():
        F.matmul(traced.graph.inputs[1], 3.0, wrong=1)


def _fails_in_a_submodule(traced: TracedModule) -> None:
    with traced.graph.insert_exprs():
        traced.graph.inputs[0].c(traced.graph.inputs[1], 1, 2)


def _fails_while_tracing(traced: TracedModule) -> None:
    trace_module(net(lambda self, x: x.nothing), mge.Tensor(X))


FAILURES = [_fails_by_itself, _fails_in_a_call, _fails_in_a_submodule, _fails_while_tracing]


@pytest.mark.parametrize("fail", FAILURES)
def test_a_trace_after_a_failed_one_is_unaffected(fail: Callable[[TracedModule], None]) -> None:
    module = _layer()
    traced = trace_module(module, mge.Tensor(X))
    expected, shown = module(mge.Tensor(X)).numpy(), str(traced.graph)
    for _ in range(2):
        with pytest.raises((ValueError, TypeError, AttributeError)):
            fail(traced)
        M.Linear(4, 4)  # its initialization runs ops
        np.testing.assert_array_equal(traced(mge.Tensor(X)).numpy(), expected)
        np.testing.assert_array_equal(qtrace.trace(module, X)(mge.Tensor(X)).numpy(), expected)
        assert str(traced.graph) == shown
    with traced.graph.insert_exprs():
        out = F.exp(traced.graph.outputs[0])
    traced.graph.replace_node({traced.graph.outputs[0]: out})
    traced.graph.compile()
    np.testing.assert_allclose(traced(mge.Tensor(X)).numpy(), np.exp(expected), rtol=1e-6)


def test_a_block_that_failed_before_the_import() -> None:
    script = """
import megengine as mge, megengine.functional as F, megengine.module as M, numpy as np
from megengine.traced_module import trace_module
class Net(M.Module):
    def __init__(self):
        super().__init__()
        self.c = M.Linear(4, 4)
    def forward(self, x):
        return self.c(x)
module, x = Net(), mge.Tensor(np.ones((2, 4), np.float32))
traced = trace_module(module, x)
try:
    with traced.graph.insert_exprs():
        F.matmul(traced.graph.inputs[1], 3.0, wrong=1)
except TypeError:
    pass
import qtrace
assert qtrace.trace(module, x)(x).shape == (2, 4)
traced.graph.outputs[0].name = "y"
assert traced.graph.outputs[0].name == "y" and len(traced(x)) == 2
"""
    subprocess.run([sys.executable, "-c", script], check=True)


def test_a_trace_inside_of_a_block_or_a_trace_is_refused() -> None:
    module = _layer()
    traced = trace_module(module, mge.Tensor(X))
    with pytest.raises(GraphError, match="a block of insert_exprs is open"), traced.graph.insert_exprs():
        qtrace.trace(module, X)
    inner = net(lambda self, x: qtrace.trace(module, X)(x))
    with pytest.raises(GraphError, match="tracing a module now"):
        trace_module(inner, mge.Tensor(X))
    assert qtrace.trace(module, X)(mge.Tensor(X)).shape == (2, 4)
