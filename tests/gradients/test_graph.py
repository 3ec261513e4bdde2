"""The gradients of `qtrace.gradients` in prepared graphs and in float networks."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import megengine as mge
import megengine.functional as F
import megengine.module as M
import numpy as np
import pytest
from megengine.autodiff import GradManager
from megengine.jit import trace as jit_trace
from megengine.quantization import quantize_qat

import qtrace
from qtrace.errors import UnsafeFileError
from qtrace.gradients import conv, conv2d, fast_gradients
from qtrace.graph.files.allowlist import QTRACE_FUNCTIONS
from qtrace.graph.pattern import Op, match
from qtrace.graph.stepping import exchange_function
from qtrace.graph.types import CallFunction, TracedModule
from tests.nets import images, net

BATCH = images(2, 3, 10, 10)
X = mge.Tensor(BATCH)
pytestmark = pytest.mark.usefixtures("synchronous")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for each gradient of a weight that is ours."""
    found: list[int] = []
    kernel = conv.to_weight

    def spy(*args: Any) -> Any:
        found.append(1)
        return kernel(*args)

    monkeypatch.setattr(conv, "to_weight", spy)
    return found


def _network() -> M.Module:
    return net(
        lambda self, x: self.last(F.relu(self.deep(F.relu(self.bn(self.first(x)))))),
        first=M.Conv2d(3, 4, 3, stride=2, padding=1, padding_mode="reflect"),
        bn=M.BatchNorm2d(4),
        deep=M.Conv2d(4, 4, 3, padding=1, groups=4),
        last=M.Conv2d(4, 2, 1),
    )


def _prepared(fold: bool = True, fakequant: str = "lsq") -> TracedModule:
    traced = qtrace.trace(_network(), BATCH, check=False)
    prepared = qtrace.prepare(traced, {"fakequant": fakequant, "qat": {"bn": {"fold": fold}}})
    qtrace.calibrate(prepared, [BATCH], progress=False)
    qtrace.set_phase(prepared, "train")
    return prepared


def _gradients(module: M.Module, run: Callable[[Any], Any] | None = None) -> dict[str, np.ndarray]:
    parameters = dict(module.named_parameters())
    manager = GradManager().attach(list(parameters.values()))

    def step(x: Any) -> Any:
        with manager:
            y = module(x)
            manager.backward((y * y).sum())
        return y

    (step if run is None else run(step))(X)
    found = {name: p.grad.numpy() for name, p in parameters.items() if p.grad is not None}
    for p in parameters.values():
        p.grad = None
    return found


def _assert_close(got: dict[str, np.ndarray], want: dict[str, np.ndarray]) -> None:
    assert got.keys() == want.keys()
    for name, value in want.items():
        # A scale's gradient is the difference of large sums over those of the weight.
        size = max(np.abs(value).max(), 1.0 if name.endswith(".scale") else 1e-3)
        assert np.abs(got[name] - value).max() <= 1e-5 * size, name


def _without(prepared: TracedModule) -> TracedModule:
    """A copy with MegEngine's own gradients."""
    other = copy.deepcopy(prepared)
    exchange_function(other, conv2d, F.conv2d)
    return other


@pytest.mark.parametrize("fakequant", ["fixed", "lsq"])
def test_training_has_the_gradients_of_megengine(fakequant, calls):
    prepared = _prepared(fakequant=fakequant)
    got = _gradients(prepared)
    assert len(calls) == 3
    _assert_close(got, _gradients(_without(prepared)))
    assert len(calls) == 3


def test_batch_norm_in_training(calls):
    prepared = _prepared(fold=False)
    prepared.train()
    got = _gradients(prepared)
    assert len(calls) == 3
    prepared.eval()
    _gradients(prepared)
    assert len(calls) == 6
    assert {"first.weight", "bn.weight"} <= got.keys()


@pytest.mark.parametrize("symbolic", [False, True])
def test_jit_trace(symbolic, calls):
    prepared = _prepared()
    got = _gradients(prepared, lambda step: jit_trace(step, symbolic=symbolic))
    assert len(calls) == 3
    _assert_close(got, _gradients(_without(prepared)))


def test_copies_and_files_keep_them(tmp_path: Path, calls):
    prepared = _prepared()
    want = _gradients(prepared)
    qtrace.save(prepared, tmp_path / "prepared.mge")
    for other in (
        copy.deepcopy(prepared),
        qtrace.load(tmp_path / "prepared.mge"),
        mge.load(str(tmp_path / "prepared.mge")),
    ):
        calls.clear()
        _assert_close(_gradients(other), want)
        assert len(calls) == 3
        np.testing.assert_array_equal(other(X).numpy(), prepared(X).numpy())


def test_files_may_name_no_other_function_of_the_room(tmp_path: Path):
    own = {name for name in QTRACE_FUNCTIONS if name.startswith("qtrace.gradients.")}
    assert {f"{conv2d.__module__}:{conv2d.__qualname__}"} == own
    prepared = _prepared()
    exchange_function(prepared, conv2d, conv.plain)
    qtrace.save(prepared, tmp_path / "prepared.mge")
    with pytest.raises(UnsafeFileError, match=r"qtrace\.gradients\.conv:plain"):
        qtrace.load(tmp_path / "prepared.mge")


@pytest.mark.parametrize("fold", [True, False])
def test_a_converted_graph_has_megengines_op(fold):
    converted = qtrace.convert(_prepared(fold=fold))
    called = [e.func for e in converted.graph.exprs() if isinstance(e, CallFunction)]
    assert called.count(F.conv2d) == 3
    assert conv2d not in called


def test_everything_sees_the_same_op_as_before():
    prepared = _prepared()
    plain = _without(prepared)
    for look in (qtrace.explain, qtrace.graph.lint, qtrace.graph.table):
        assert str(look(prepared)) == str(look(plain))
    assert "F.conv2d" in str(qtrace.graph.table(prepared))
    for function in (F.conv2d, conv2d):
        fits = [match(Op(function, shared=True), e.outputs[0]) for e in prepared.graph.exprs() if e.outputs]
        assert sum(map(bool, fits)) == 3


def test_a_trace_of_a_prepared_graph_calls_megengines_op():
    prepared = _prepared()
    again = qtrace.trace(prepared, BATCH, check=False)
    np.testing.assert_array_equal(again(X).numpy(), prepared(X).numpy())


@pytest.mark.parametrize("traced", [False, True])
def test_fast_gradients_of_a_float_network(traced, calls):
    network: Any = _network()
    if traced:
        network = qtrace.trace(network, BATCH, check=False)
    want, out = _gradients(network), network(X).numpy()
    assert calls == []
    with fast_gradients(network), fast_gradients(network):
        got = _gradients(network)
        np.testing.assert_array_equal(network(X).numpy(), out)
    assert len(calls) == 3
    _assert_close(got, want)
    _gradients(network)
    assert len(calls) == 3


def test_fast_gradients_of_megengines_quantization(calls):
    native = quantize_qat(M.Sequential(M.Conv2d(3, 4, 3), M.ConvBn2d(4, 4, 3)), inplace=False)
    with fast_gradients(native):
        _gradients(native)
    assert len(calls) == 2


def test_fast_gradients_end_with_an_error():
    native = _network()
    with contextlib.suppress(ZeroDivisionError), fast_gradients(native):
        raise ZeroDivisionError
    assert not any("calc_conv" in m.__dict__ for m in native.modules())
