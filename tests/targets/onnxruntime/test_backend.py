"""Which schemes onnxruntime is said to run: those that an export can write and a kernel computes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import megengine as mge
import megengine.functional as F
import megengine.module as M
import pytest

import qtrace
from qtrace.config import backends
from qtrace.graph import functions
from qtrace.verification.runtimes import get as get_runtime
from tests.each import each_of
from tests.nets import images, net

REFUSED = [
    ("activation", {"narrow": True}, "narrow ranges"),
    ("activation", {"narrow": True, "signed": True, "symmetric": True}, "narrow ranges"),
    ("activation", {"axis": 1}, "per-channel scales"),
    ("activation", {"bits": 5}, "5 bits"),
    ("activation", {"rounding": "half_away"}, "half_away rounding"),
    ("weight", {"symmetric": False}, "per-channel scales with a zero point each"),
    (
        "weight",
        {"symmetric": False, "signed": False, "narrow": False},
        "per-channel scales with a zero point",
    ),
    ("weight", {"bits": 9}, "9 bits"),
]
ALLOWED = [
    ("activation", {}),
    ("activation", {"signed": True, "symmetric": True}),
    ("weight", {}),
    ("weight", {"narrow": False}),
    ("weight", {"axis": None, "symmetric": False}),
    ("weight", {"bits": 4}),
]


@each_of(("sort", "changes", "reason"), REFUSED)
def test_refuses(sort: str, changes: dict[str, Any], reason: str) -> None:
    backend = backends.get("onnxruntime")
    problem = backend.problem(sort, getattr(backend, sort).replace(**changes))
    assert problem is not None
    assert problem.startswith(reason)


@each_of(("sort", "changes"), ALLOWED)
def test_runs(sort: str, changes: dict[str, Any]) -> None:
    backend = backends.get("onnxruntime")
    assert backend.problem(sort, getattr(backend, sort).replace(**changes)) is None


# A kind -> what computes it from the result of a convolution.
OPS: dict[str, Callable[[Any, Any], Any]] = {
    "conv_transpose2d": lambda self, y: self.up(y),
    "sub": lambda self, y: y - self.b(y),
    "div": lambda self, y: y / (F.abs(self.b(y)) + 1.0),
    "mean": lambda self, y: F.mean(y, axis=3, keepdims=True),
    "interpolate": lambda self, y: F.vision.interpolate(y, scale_factor=2, mode="bilinear"),
    "silu": lambda self, y: F.silu(y),
    "hswish": lambda self, y: F.hswish(y),
    "hsigmoid": lambda self, y: F.hsigmoid(y),
    "hard_sigmoid": lambda self, y: functions.hard_sigmoid(y),
    "mish": lambda self, y: functions.mish(y),
    "tanh": lambda self, y: F.tanh(y),
    "add": lambda self, y: y + self.b(y),
    "mul": lambda self, y: y * self.b(y),
    "avg_pool2d": lambda self, y: F.avg_pool2d(y, 2),
    "sigmoid": lambda self, y: F.sigmoid(y),
    "leaky_relu": lambda self, y: F.leaky_relu(y, 0.1),
    "concat": lambda self, y: F.concat([y, self.b(y)], 1),
}


@pytest.mark.quick(2)
@pytest.mark.parametrize("kind", OPS)
def test_explain_predicts_which_ops_onnxruntime_computes_in_float(kind: str, tmp_path: Path) -> None:
    def forward(self: M.Module, x: Any) -> Any:
        return F.max_pool2d(OPS[kind](self, self.a(x)), 1)

    layers = {"a": M.Conv2d(4, 4, 3), "b": M.Conv2d(4, 4, 1), "up": M.ConvTranspose2d(4, 4, 2, 2)}
    module = net(forward, **layers, scale=mge.Parameter([0.7]), shift=mge.Parameter([0.1]))
    x = images(2, 4, 8, 8)
    recipe = {"rules": [{"match": {"op": kind}, "quantize": True}]}
    prepared = qtrace.prepare(qtrace.trace(module, x, check=False), recipe)
    converted = qtrace.convert(qtrace.calibrate(prepared, [x], progress=False))
    path = qtrace.export(converted, tmp_path / "m.onnx")
    kernels = get_runtime(path).kernels
    assert kernels is not None
    in_float = bool([name for name, op, _ in kernels(path).floats if op != "Add" or kind == "add"])
    assert in_float == (kind in backends.get("onnxruntime").float_kernels)
    figures = qtrace.explain(prepared).to_dict()["summary"]["float_kernels"]
    assert figures == ({kind: 1} if in_float else {})
    text = qtrace.explain(prepared).summary(None)
    assert ("1 of these ops in float kernels (1 " in text) == in_float
    assert "on integers:   simulated by the rules of backend onnxruntime" in text


def test_every_kind_that_is_computed_in_float_is_measured() -> None:
    assert backends.get("onnxruntime").float_kernels <= set(OPS)
