"""Arguments of forward that a trace fixes, and methods whose file imports functions by name."""

from __future__ import annotations

from typing import Any

import megengine as mge
import megengine.functional as F
import megengine.module as M
import numpy as np
import pytest
from megengine.functional import relu

import qtrace
from qtrace.errors import TraceError
from tests.each import each_of

X = np.random.RandomState(0).randn(2, 3).astype("float32")


class _Net(M.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = M.Linear(3, 3)

    def forward(self, x: Any, mode: int, y: Any = None, *, factor: float = 1.0, **options: Any) -> Any:
        h = self.fc(x) * factor
        if mode == 2:
            h = relu(h)
        if options.get("negate"):
            h = -h
        return h if y is None else h + y

    def scores(self, mode: int, x: Any) -> Any:
        return relu(self.fc(x)) if mode else F.sigmoid(self.fc(x))


def _value(result: Any) -> np.ndarray:
    return result.numpy()


@each_of(
    "fixed",
    [{"mode": 2}, {"mode": 1, "factor": 3.0}, {"mode": 2, "negate": True}, {"y": None, "mode": 0}],
)
def test_a_trace_keeps_what_fixed_arguments_choose(fixed: dict[str, Any]) -> None:
    net = _Net()
    traced = qtrace.trace(net, X, fixed=fixed)
    x = mge.Tensor(X[:1] + 1)
    np.testing.assert_array_equal(_value(traced(x)), _value(net(x, **fixed)))
    assert type(net) is _Net
    assert {name for name, _ in traced.named_parameters()} == {"fc.weight", "fc.bias"}


def test_inputs_behind_a_fixed_argument_keep_their_place_and_name() -> None:
    net = _Net()
    traced = qtrace.trace(net, X, X, fixed={"mode": 2})
    x = mge.Tensor(X + 1)
    np.testing.assert_array_equal(_value(traced(x, x)), _value(net(x, 2, x)))
    np.testing.assert_array_equal(_value(traced(x, y=x)), _value(net(x, 2, x)))
    with pytest.raises(Exception, match="mode"):
        traced(x, mode=1)


def test_methods_functions_and_open_axes_take_fixed_arguments() -> None:
    net = _Net()
    x = mge.Tensor(X)
    scores = qtrace.trace(net, X, method="scores", fixed={"mode": 0}, dynamic={"x": {0: "N"}})
    np.testing.assert_array_equal(_value(scores(x)), _value(net.scores(0, x)))
    function = qtrace.trace(lambda x, power: x**power, X, fixed={"power": 3})
    np.testing.assert_array_equal(_value(function(x)), _value(x**3))
    assert qtrace.trace(net.scores, X, fixed={"mode": 1}).graph


def test_a_method_records_the_functions_that_its_file_imports_by_name() -> None:
    traced = qtrace.trace(_Net(), X, method="scores", fixed={"mode": 1})
    assert qtrace.graph.find(traced, function=F.relu)


@each_of(
    ("fixed", "message"),
    [
        ({"mod": 1}, r"fixed: _Strict.forward takes no argument 'mod'; did you mean 'mode'\?"),
        ({"zzz": 1}, "fixed: _Strict.forward takes no argument 'zzz'; there are: x, mode."),
        ({"x": 1, "mode": 1}, r"cannot be called with 1 example\(s\)"),
    ],
)
def test_what_cannot_be_fixed_is_refused_by_name(fixed: dict[str, Any], message: str) -> None:
    class _Strict(M.Module):
        def forward(self, x: Any, mode: int) -> Any:
            return x * mode

    with pytest.raises(TraceError, match=message):
        qtrace.trace(_Strict(), X, fixed=fixed)


def test_a_graph_has_no_arguments_to_fix() -> None:
    traced = qtrace.trace(_Net(), X, fixed={"mode": 2})
    with pytest.raises(TraceError, match="a graph is traced already"):
        qtrace.trace(traced, X, fixed={"mode": 1})
