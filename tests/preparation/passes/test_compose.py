"""``prepare`` sees composites as one op, in any spelling, and says so."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import megengine as mge
import megengine.functional as F
import megengine.module as M
import numpy as np
import pytest

import qtrace
from qtrace.graph import functions
from qtrace.graph.types import CallFunction, TracedModule
from qtrace.graph.walk import exprs
from qtrace.preparation.model import read_record
from qtrace.preparation.passes import compose
from qtrace.preparation.prepare import plan
from tests.nets import images, net

X = images(2, 8, 8, 8)


def _between(function: Callable[..., Any]) -> M.Module:
    """A convolution before and behind ``function``."""
    layers = {"a": M.Conv2d(8, 8, 3, padding=1), "b": M.Conv2d(8, 8, 1)}
    return net(lambda self, x: self.b(function(self.a(x))), **layers)


def _assert_exported(prepared: TracedModule, folder: Path) -> None:
    """Calibrates the model, saves and loads it, and compares its ONNX file with onnxruntime."""
    qtrace.calibrate(prepared, [X], progress=False)
    qtrace.save(prepared, folder / "m.mge")
    converted = qtrace.convert(qtrace.load(folder / "m.mge"))
    report = qtrace.verify(qtrace.export(converted, folder / "m.onnx"), converted, [X])
    assert report.passed, report.summary()
    assert report.worst_lsb() <= 1


ONE_OP = {
    "hswish": lambda x: x * F.relu6(x + 3) / 6,
    "hsigmoid": lambda x: F.clip(x + 3, 0, 6) / 6,
    "silu": lambda x: x * F.sigmoid(x),
    "hard_sigmoid": lambda x: F.clip(x * 0.2 + 0.5, 0, 1),
    "mish": lambda x: x * F.tanh(F.softplus(x)),
    "gelu": lambda x: 0.5 * x * (1.0 + functions.erf(x / 1.41421356)),
    "gelu_tanh": lambda x: 0.5 * x * (1.0 + F.tanh(0.7978845608 * (x + 0.044715 * x**3))),
}
FLOAT = ("gelu", "gelu_tanh")


@pytest.mark.quick(3)
@pytest.mark.parametrize("kind", ONE_OP)
def test_pieces_are_one_op_within_one_step_of_onnxruntime(kind: str, tmp_path: Path) -> None:
    traced = qtrace.trace(_between(ONE_OP[kind]), X, check=False)
    notes = [n for n in plan(traced).notes if n.kind not in ("conv2d", "identity")]
    assert [n.kind for n in notes] == [kind]
    assert [n.state for n in notes] == ["float" if kind in FLOAT else "int"]
    prepared = qtrace.prepare(traced)
    assert any(line.endswith("in one op") for line in read_record(prepared).log)
    np.testing.assert_allclose(
        prepared(mge.Tensor(X)).numpy(), traced(mge.Tensor(X)).numpy(), rtol=0, atol=1e-5
    )
    _assert_exported(prepared, tmp_path)


def _attention(x: mge.Tensor) -> mge.Tensor:
    rows = x.reshape(-1, 8, 64)
    return functions.scaled_dot_product_attention(rows, rows * 0.5, rows, None, 0.125).reshape(-1, 8, 8, 8)


def _masked(x: mge.Tensor) -> mge.Tensor:
    rows = x.reshape(-1, 8, 64)
    mask = F.mean(rows, axis=2, keepdims=True)
    return functions.scaled_dot_product_attention(rows, rows, rows, mask).reshape(-1, 8, 8, 8)


def _windowed(x: mge.Tensor) -> mge.Tensor:
    rows = x.reshape(-1, 4, 64)
    bias = F.mean(rows, axis=2, keepdims=True)
    mask = mge.Tensor(np.linspace(-1, 1, 32, dtype=np.float32).reshape(1, 2, 4, 4))
    attended = functions.scaled_dot_product_attention(rows, rows, rows, mask, 0.125, bias)
    return attended.reshape(-1, 8, 8, 8)


def _depth(order: tuple[int, int, int]) -> Callable[[mge.Tensor], mge.Tensor]:
    return lambda x: functions.space_to_depth(x, 2, order)[:, 4:12]


IN_PIECES: dict[str, tuple[Callable[..., Any], str]] = {
    "attention": (_attention, "scaled_dot_product_attention"),
    "attention with a mask": (_masked, "scaled_dot_product_attention"),
    "attention in windows": (_windowed, "scaled_dot_product_attention"),
    "channel shuffle": (lambda x: functions.channel_shuffle(x, 4), "channel_shuffle"),
    "space to depth": (_depth((0, 1, 2)), "space_to_depth"),
    "space to depth by columns": (_depth((1, 0, 2)), "space_to_depth"),
    "space to depth by channels": (_depth((2, 0, 1)), "space_to_depth"),
}


@pytest.mark.quick(3)
@pytest.mark.parametrize("name", IN_PIECES)
def test_functions_whose_pieces_have_integer_kernels_are_written_in_pieces(name: str, tmp_path: Path) -> None:
    forward, function = IN_PIECES[name]
    traced = qtrace.trace(_between(forward), X, check=False)
    prepared = qtrace.prepare(traced)
    assert any(line.endswith(f"{function} in pieces") for line in read_record(prepared).log)
    assert function not in {e.func.__name__ for e in exprs(prepared) if isinstance(e, CallFunction)}
    for x in (X, X[:1]):
        expected = traced(mge.Tensor(x)).numpy()
        np.testing.assert_allclose(prepared(mge.Tensor(x)).numpy(), expected, rtol=0, atol=1e-5)
    _assert_exported(prepared, tmp_path)


@pytest.mark.quick(3)
@pytest.mark.parametrize("name", IN_PIECES)
def test_each_composed_function_is_written_as_one_onnx_op(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compose, "_WRITERS", {})
    prepared = qtrace.prepare(qtrace.trace(_between(IN_PIECES[name][0]), X, check=False))
    assert IN_PIECES[name][1] in {e.func.__name__ for e in exprs(prepared) if isinstance(e, CallFunction)}
    _assert_exported(prepared, tmp_path)


@pytest.mark.parametrize("backend", ["onnxruntime", "tflite"])
def test_a_scale_and_shift_is_a_product_and_a_sum_which_all_formats_have(backend: str) -> None:
    stored = {"s": mge.Parameter(np.full((1, 8, 1, 1), 0.7, np.float32)), "b": mge.Parameter([0.1])}
    layers = {"a": M.Conv2d(8, 8, 1), "c": M.Conv2d(8, 8, 1)}
    for forward in (
        lambda self, x: self.c(F.relu(self.a(x)) * self.s + self.b),
        lambda self, x: self.c(functions.scale_and_shift(F.relu(self.a(x)), self.s, self.b)),
    ):
        annotation = plan(qtrace.trace(net(forward, **layers, **stored), X), {"backend": backend})
        kinds = [n.kind for n in annotation.notes if n.kind not in ("conv2d", "relu")]
        assert kinds == ["mul", "add"]


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "erf": lambda self, x: functions.erf(x),
    "rms_norm": lambda self, x: functions.rms_norm(x, self.s, 1),
    "rms_norm without weight": lambda self, x: functions.rms_norm(x),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_is_traced_saved_and_exported_as_one_op(name: str, tmp_path: Path) -> None:
    stored = {"s": mge.Parameter(np.full((1, 8, 1, 1), 0.7, np.float32)), "b": mge.Parameter([0.1])}
    layers = {"a": M.Conv2d(8, 8, 1), "c": M.Conv2d(8, 8, 1)}
    module = net(lambda self, x: self.c(FUNCTIONS[name](self, self.a(x))), **layers, **stored)
    prepared = qtrace.prepare(qtrace.trace(module, X, check=False))
    called = [e.func.__name__ for e in exprs(prepared) if isinstance(e, CallFunction)]
    assert called.count(name.split()[0]) == 1
    _assert_exported(prepared, tmp_path)


def test_what_stays_in_pieces_is_logged_with_the_reason() -> None:
    prepared = qtrace.prepare(qtrace.trace(_between(lambda x: x * F.relu6(x + 2.9) / 6), X, check=False))
    lines = [line for line in read_record(prepared).log if "no HardSwish" in line]
    assert len(lines) == 1
    assert "its gate has the value at x = 0 0.483333" in lines[0]
