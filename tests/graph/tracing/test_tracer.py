"""A subclass of Tracer says which modules stay one call, and what a call is recorded as."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import megengine as mge
import megengine.functional as F
import megengine.module as M
import numpy as np
import pytest
from megengine.functional import relu6 as imported_relu6

import qtrace
from qtrace.errors import TraceError
from qtrace.graph import Tracer, find

X = np.random.RandomState(0).randn(2, 3, 4, 4).astype("float32") * 4


class Block(M.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = M.Conv2d(3, 3, 1)

    def forward(self, x: Any) -> Any:
        return F.relu6(self.conv(x))


class _Net(M.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Block(), Block()

    def forward(self, x: Any) -> Any:
        return self.second(self.first(x))


def clip6(x: Any) -> Any:
    return F.clip(x, 0, 6)


class _Second(Tracer):
    def is_leaf(self, module: M.Module, path: str) -> bool:
        return path == "second" or super().is_leaf(module, path)


class _Clip(Tracer):
    def record(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return clip6 if function is F.relu6 else function


def _same(net: M.Module, traced: Any) -> None:
    x = mge.Tensor(X + 1)
    np.testing.assert_array_equal(traced(x).numpy(), net(x).numpy())


def test_a_leaf_is_chosen_by_its_path(tmp_path: Path) -> None:
    net = _Net()
    traced = qtrace.trace(net, X, tracer=_Second())
    _same(net, traced)
    assert len(find(traced, module=Block)) == 1
    assert type(traced.second) is Block
    assert type(net.second) is Block
    assert len(find(traced, function=F.relu6)) == 1
    qtrace.save(traced, tmp_path / "net.mge")
    _same(net, qtrace.load(tmp_path / "net.mge", allow=[f"{__name__}:Block"]))
    assert not find(qtrace.trace(net, X), module=Block)


def test_a_layer_that_is_no_leaf_is_looked_into() -> None:
    class _Inside(Tracer):
        def is_leaf(self, module: M.Module, path: str) -> bool:
            return path != "first.conv" and super().is_leaf(module, path)

    net = _Net()
    traced = qtrace.trace(net, X, tracer=_Inside())
    _same(net, traced)
    assert len(find(traced, module=M.Conv2d)) == 1
    assert len(find(traced, function=F.conv2d)) == 1


def test_a_call_is_recorded_as_another_function() -> None:
    net = _Net()
    traced = qtrace.trace(net, X, tracer=_Clip())
    _same(net, traced)
    assert not find(traced, function=F.relu6)
    assert len(find(traced, function=F.clip)) == 2


def test_a_function_of_megengine_is_recorded_as_one_call() -> None:
    class _Minimum(Tracer):
        def record(self, function: Callable[..., Any]) -> Callable[..., Any]:
            return F.minimum if function is F.maximum else function

    traced = qtrace.trace(lambda x: F.maximum(x, x), X, tracer=_Minimum())
    assert len(find(traced, function=F.minimum)) == 1
    assert not find(traced, function=F.maximum)


def test_a_replacement_may_call_what_it_replaces() -> None:
    class _Doubled(Tracer):
        def record(self, function: Callable[..., Any]) -> Callable[..., Any]:
            return (lambda x: F.relu(F.relu(x))) if function is F.relu else function

    traced = qtrace.trace(lambda x: F.relu(x), X, tracer=_Doubled())
    assert len(find(traced, function=F.relu)) == 2


def test_what_computes_something_else_or_is_no_function_is_refused() -> None:
    class _Wrong(Tracer):
        def record(self, function: Callable[..., Any]) -> Callable[..., Any]:
            return F.relu if function is F.relu6 else function

    class _Nothing(Tracer):
        def record(self, function: Callable[..., Any]) -> Any:
            return None if function is F.relu6 else function

    with pytest.raises(TraceError, match="what _Wrong.record gives must compute the same"):
        qtrace.trace(_Net(), X, tracer=_Wrong())
    with pytest.raises(TraceError, match="_Nothing.record returned None for relu6: return a function"):
        qtrace.trace(_Net(), X, tracer=_Nothing())


@pytest.mark.parametrize("call", [lambda x: F.nn.relu6(x), lambda x: imported_relu6(x)])
def test_a_function_is_the_same_under_every_name(call: Callable[..., Any]) -> None:
    traced = qtrace.trace(call, X, tracer=_Clip())
    assert len(find(traced, function=F.clip)) == 1


def test_a_tracer_that_fails_or_is_none_is_named() -> None:
    class _Fails(Tracer):
        def is_leaf(self, module: M.Module, path: str) -> bool:
            raise KeyError(path)

    with pytest.raises(TraceError, match="_Fails.is_leaf fails for first: KeyError"):
        qtrace.trace(_Net(), X, tracer=_Fails())
    with pytest.raises(TraceError, match="tracer takes an object of a subclass"):
        qtrace.trace(_Net(), X, tracer=_Second)  # type: ignore[arg-type]
    with pytest.raises(TraceError, match="a graph is traced already"):
        qtrace.trace(qtrace.trace(_Net(), X), X, tracer=_Second())
    with pytest.raises(TraceError, match="fixed takes values of arguments by name"):
        qtrace.trace(_Net(), X, fixed=["mode"])  # type: ignore[arg-type]


def test_the_tracer_leaves_megengine_as_it_was() -> None:
    from megengine.traced_module.module_tracer import module_tracer

    before, relu6 = set(module_tracer._opaque_types), F.relu6
    qtrace.trace(_Net(), X, tracer=_Second())
    qtrace.trace(_Net(), X, tracer=_Clip())
    assert module_tracer._opaque_types == before
    assert F.relu6 is relu6
