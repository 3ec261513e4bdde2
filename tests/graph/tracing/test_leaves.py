"""Classes and functions that stay one call, only for the trace that asks for it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import megengine as mge
import megengine.functional as F
import megengine.module as M
import numpy as np
import pytest
from megengine.autodiff import Function
from megengine.traced_module.module_tracer import Patcher, module_tracer

import qtrace
from qtrace.errors import QtraceWarning, TraceError, UnsafeFileError
from qtrace.graph import check_samples, exprs, find, flatten
from qtrace.graph.walk import op_label
from qtrace.ops import Role
from qtrace.ops.arguments import activation
from qtrace.ops.base import op_rule, typed
from tests.each import each_of
from tests.graph.planted import ROWS, holder, net

X = mge.Tensor(ROWS)


class Gain(M.Module):
    """A layer that a trace cannot look into: it branches on data."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = mge.Parameter(np.full(4, 0.5, "float32"))

    def forward(self, x: Any, shift: float = 0.0) -> Any:
        if x.max() > 1000:
            x = x / 1000
        return F.tanh(x) * self.gain + shift


def squash(x: Any, limit: float = 1.0) -> Any:
    """A function of which the same holds."""
    return F.tanh(x) * limit if float(x.mean()) < 1000 else x


class Round(Function):
    """Rounds, and passes the gradient."""

    def forward(self, x: Any) -> Any:
        return F.round(x)

    def backward(self, dy: Any) -> Any:
        return dy


class Rounded(M.Module):
    def forward(self, x: Any) -> Any:
        return Round()(x)


class Net(M.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.last = M.Linear(4, 4), M.Linear(4, 4)
        self.gains = [Gain(), Gain()]

    def forward(self, x: Any) -> Any:
        y = self.fc(x)
        for gain in self.gains:
            y = gain(y, 0.25)
        return self.last(squash(y, limit=2.0))


def _labels(traced: Any) -> list[str]:
    return [op_label(e) for e in exprs(flatten(traced)) if op_label(e) != "getattr"]


def test_leaves_are_one_call_each(tmp_path: Path) -> None:
    model = Net()
    with pytest.raises(TraceError, match="uses values of its data"):
        qtrace.trace(model, ROWS)
    traced = qtrace.trace(model, ROWS, leaves=[Gain, squash])
    assert _labels(traced) == ["Linear", "Gain", "Gain", f"{__name__}.squash", "Linear"]
    np.testing.assert_array_equal(traced(X).numpy(), model(X).numpy())
    assert {n for n, _ in traced.named_parameters()} == {n for n, _ in model.named_parameters()}
    assert check_samples(traced, ROWS).passed
    assert len(find(traced, module=Gain)) == 2
    path = tmp_path / "leaves.mge"
    qtrace.save(traced, path)
    own = [f"{__name__}:{name}" for name in ("Gain", "squash")]
    np.testing.assert_array_equal(qtrace.load(path, allow=own)(X).numpy(), model(X).numpy())
    with pytest.raises(UnsafeFileError, match=f"--allow {own[0]}"):
        qtrace.load(path, allow=own[1:])


class Named(M.ReLU):
    """Computes what its base computes, but has a name of its own."""


def test_a_subclass_of_a_layer_of_megengine_may_be_a_leaf() -> None:
    model = net(lambda self, x: self.act(x), act=Named())
    assert _labels(qtrace.trace(model, ROWS)) == ["ReLU"]
    assert _labels(qtrace.trace(model, ROWS, leaves=[Named])) == ["Named"]


def test_only_the_trace_that_names_them_keeps_them() -> None:
    types, functions = set(module_tracer._opaque_types), list(Patcher._builtin_functions)
    plain = net(lambda self, x: F.relu(self.gain(x)) if self is None else self.gain(x), gain=Rounded())
    assert _labels(qtrace.trace(holder(plain), ROWS, leaves=[Rounded]))[0] == "Rounded"
    with pytest.raises(TraceError, match="calls a custom autodiff Function.* Or trace with gradients=False"):
        qtrace.trace(holder(plain), ROWS)
    unlearned = qtrace.trace(holder(plain), ROWS, gradients=False)
    np.testing.assert_array_equal(
        unlearned(mge.Tensor(ROWS)).numpy(), holder(plain)(mge.Tensor(ROWS)).numpy()
    )
    with pytest.raises(TraceError, match="fails on the example"):
        qtrace.trace(Net(), ROWS[:, :3], leaves=[Gain])
    assert types == module_tracer._opaque_types
    assert functions == Patcher._builtin_functions


@pytest.mark.parametrize("kind", [Role.ELEMENTWISE, Role.FLOAT])
def test_a_rule_of_a_leaf_says_how_it_is_quantized(monkeypatch: pytest.MonkeyPatch, kind: Role) -> None:
    for leaf in (Gain, squash):
        rule = op_rule(
            leaf.__name__.lower(),
            kind,
            lambda expr: typed(expr, (activation(expr),)),
            leaf,
            reason="it stays float" if kind is Role.FLOAT else "",
        )
        monkeypatch.setattr(leaf, "qtrace_rule", rule, raising=False)
    traced = qtrace.trace(Net(), ROWS, leaves=[Gain, squash])
    config: dict[str, Any] = {"backend": "generic"}
    if kind is Role.ELEMENTWISE:
        config["rules"] = [{"match": {"name": "gains*"}, "quantize": True}]
    prepared = qtrace.calibrate(qtrace.prepare(traced, config), [ROWS], progress=False)
    sites = {site.node for site in qtrace.explain(prepared).annotation.sites}
    inner = {"gains_0_out", "gains_1_out"}
    assert inner <= sites if kind is Role.ELEMENTWISE else inner.isdisjoint(sites)
    result = qtrace.convert(prepared)(X).numpy()
    np.testing.assert_allclose(result, traced(X).numpy(), atol=0.05)


def nested() -> Callable[[Any], Any]:
    def inner(x: Any) -> Any:
        return x

    return inner


@each_of(
    ("leaves", "message"),
    [
        (Gain, r"leaves takes a list of module classes and functions, such as leaves=\[MyOp\]"),
        ([Gain()], "a leaf is a class of modules or a function, not Gain"),
        ([int], "a leaf is a class of modules or a function, not <class 'int'>"),
        ([nested()], "nested.<locals>.inner cannot be a leaf, since it is not at the top level of its file"),
        ([qtrace.graph.exprs.__class__, 3], "a leaf is a class"),
    ],
)
def test_what_cannot_be_a_leaf_is_refused(leaves: Any, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        qtrace.trace(Net(), ROWS, leaves=leaves)


def test_a_leaf_that_is_never_called_is_named() -> None:
    with pytest.warns(QtraceWarning, match="leaves names Gain, which forward never calls: remove it"):
        qtrace.trace(net(lambda self, x: x + 1), ROWS, leaves=[Gain])
