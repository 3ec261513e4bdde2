"""MegEngine's broadcasting kernels take views for contiguous memory: a trace copies the views first."""

from __future__ import annotations

import logging
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

import qtrace
from qtrace.errors import TraceError
from qtrace.graph.tracing.trace import trace
from qtrace.graph.types import CallFunction, TracedModule
from tests.each import each_of
from tests.graph.planted import peek
from tests.nets import images, net

pytestmark = pytest.mark.usefixtures("synchronous")

RNG = np.random.default_rng(0)
GRID = np.abs(RNG.normal(size=(1, 10, 2))).astype(np.float32) + 0.5
OPS: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda a, b: a + b,
    "reversed add": lambda a, b: b + a,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b,
    "pow": lambda a, b: a**b,
    "maximum": lambda a, b: (F.maximum if isinstance(a, mge.Tensor) else np.maximum)(a, b),
    "minimum": lambda a, b: (F.minimum if isinstance(a, mge.Tensor) else np.minimum)(a, b),
}
# A view of (batch, 10, 6) values, and the shape of what is broadcast over it.
VIEWS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "first of the last axis": (np.s_[..., :2], (1, 10, 2)),
    "last of the last axis": (np.s_[..., 4:], (1, 10, 2)),
    "a vector": (np.s_[..., 2:4], (2,)),
    "middle axis": (np.s_[:, 2:5], (1, 3, 6)),
    "a place of the middle axis": (np.s_[:, 0], (1, 6)),
    "two axes": (np.s_[:, 2:5, :2], (2,)),
    "every second sample": (np.s_[::2], (1, 10, 6)),
    "a new axis": (np.s_[:, None, :, :2], (1, 1, 10, 2)),
}


def _copies(traced: TracedModule) -> int:
    return sum(isinstance(e, CallFunction) and e.func is F.nn.pad for e in traced.graph.exprs())


def _samples(batch: int) -> np.ndarray:
    return np.abs(np.random.default_rng(1).normal(size=(batch, 10, 6))).astype(np.float32) + 0.5


@each_of("batch", [1, 8])
@each_of("name", VIEWS)
def test_a_view_and_what_is_broadcast(name: str, batch: int) -> None:
    """Traced at one batch size, right at every other one."""
    index, shape = VIEWS[name]
    other = np.abs(np.random.default_rng(2).normal(size=shape)).astype(np.float32) + 0.5
    model = net(lambda self, x: self.other + x[index], other=mge.Tensor(other))
    traced = trace(model, _samples(batch))
    assert _copies(traced) == 1
    for size in (1, 2, 8):
        x = _samples(size)
        np.testing.assert_array_equal(traced(mge.Tensor(x)).numpy(), other + x[index])


@each_of("name", OPS)
def test_ops(name: str) -> None:
    model = net(lambda self, x: OPS[name](x[..., :2], self.other), other=mge.Tensor(GRID))
    x = _samples(8)
    output = trace(model, x)(mge.Tensor(x)).numpy()
    np.testing.assert_allclose(output, OPS[name](x[..., :2], GRID), rtol=1e-5)


@each_of(
    "forward",
    [
        lambda self, x: F.broadcast_to(self.other, (x.shape[0], 10, 2)) + self.other,
        lambda self, x: F.split(x, 3, axis=2)[1] + self.other,
        lambda self, x: F.expand_dims(x[..., :2], 1) + self.other,
        lambda self, x: F.reshape(x[..., :2], (-1, 2)) + self.other[0, 0],
    ],
    ids=["broadcast", "split", "expand_dims", "reshape"],
)
def test_other_views(forward: Callable[..., Any]) -> None:
    traced = trace(net(forward, other=mge.Tensor(GRID)), _samples(2))
    x = mge.Tensor(_samples(8))
    one = np.concatenate([traced(mge.Tensor(_samples(8)[i : i + 1])).numpy() for i in range(8)])
    np.testing.assert_array_equal(traced(x).numpy(), one)


@each_of(
    "forward",
    [
        lambda self, x: x + self.other,  # no view
        lambda self, x: x[..., :3] * F.sigmoid(x[..., 3:]),  # nothing is broadcast
        lambda self, x: x[..., :2] * 2.0 + 1.0,
        lambda self, x: x[..., :2] + x[..., 2:3],  # along the last axis
        lambda self, x: x[..., ::2] + self.other[..., :3],  # places of the last axis: another kernel
        lambda self, x: x[:, :5] * F.mean(x[:, :5], axis=2, keepdims=True),
        lambda self, x: F.concat([x[:, ::2], x[:, 1::2]], axis=2),
        lambda self, x: x[1:] + self.other,
    ],
)
def test_no_copy_where_kernels_are_right(forward: Callable[..., Any]) -> None:
    model = net(forward, other=mge.Tensor(RNG.normal(size=(1, 10, 6)).astype(np.float32)))
    assert _copies(trace(model, _samples(4))) == 0


class Decode(M.Module):
    """Boxes of a detector: centers on a grid, sizes, scores."""

    def __init__(self, stride: np.ndarray) -> None:
        super().__init__()
        self.grid, self.stride = mge.Tensor(GRID), mge.Tensor(stride)

    def forward(self, x: mge.Tensor) -> mge.Tensor:
        centers = (x[..., :2] + self.grid) * self.stride
        sizes = F.exp(x[..., 2:4]) * self.stride
        return F.concat([centers, sizes, x[..., 4:]], axis=-1)


@each_of("width", [1, 2])
@each_of("compiled", [None, True, False], ids=["eager", "symbolic", "imperative"])
def test_values_and_gradients_of_a_decode(compiled: bool | None, width: int) -> None:
    """Also where the gradient of a product arrives as a view, from a concatenation."""
    stride = np.abs(np.random.default_rng(3).normal(size=(1, 10, width))).astype(np.float32) + 0.5
    x, weights = _samples(8), np.random.default_rng(4).normal(size=(8, 10, 6)).astype(np.float32)
    traced = trace(net(lambda self, x: self.decode(x * 1.0), decode=Decode(stride)), x[:1])
    parameter = mge.Parameter(x)
    manager = GradManager().attach([parameter])

    def step() -> mge.Tensor:
        with manager:
            out = traced(parameter)
            manager.backward((out * mge.Tensor(weights)).sum())
        return out

    run = step if compiled is None else jit_trace(step, symbolic=compiled)
    for _ in range(3):
        parameter.grad = None
        out = run()
    want = np.concatenate([(x[..., :2] + GRID) * stride, np.exp(x[..., 2:4]) * stride, x[..., 4:]], -1)
    gradient = weights.copy()
    gradient[..., :2] *= stride
    gradient[..., 2:4] *= np.exp(x[..., 2:4]) * stride
    np.testing.assert_allclose(out.numpy(), want, rtol=1e-5)
    np.testing.assert_allclose(parameter.grad.numpy(), gradient, rtol=1e-5, atol=1e-6)


def test_the_gradient_of_a_product_behind_a_sum() -> None:
    x = _samples(8)
    traced = trace(net(lambda self, x: (x * self.grid).sum(axis=0), grid=mge.Tensor(GRID)), x[..., :2])
    parameter = mge.Parameter(x[..., :2])
    with GradManager().attach([parameter]) as manager:
        manager.backward((traced(parameter) * 2.0).sum())
    np.testing.assert_allclose(parameter.grad.numpy(), np.broadcast_to(2 * GRID, (8, 10, 2)), rtol=1e-6)


def test_a_view_that_a_submodule_reads(caplog: pytest.LogCaptureFixture) -> None:
    """One graph, called with a view and with a whole tensor."""
    add = net(lambda self, x: x + self.grid, grid=mge.Tensor(GRID))
    model = net(lambda self, x: self.add(F.exp(x[..., :2])) + self.add(x[..., 2:4]), add=add)
    x = _samples(8)
    with caplog.at_level(logging.INFO, "qtrace"):
        traced = trace(model, x)
    np.testing.assert_allclose(
        traced(mge.Tensor(x)).numpy(), np.exp(x[..., :2]) + x[..., 2:4] + 2 * GRID, rtol=1e-5
    )
    assert _copies(traced) == 1
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "test_copies.py:" in record.getMessage()
    assert "the module itself computes wrong values (output 0 is off by up to" in record.getMessage()


def test_a_module_with_right_values_is_a_note_only(caplog: pytest.LogCaptureFixture) -> None:
    model = net(lambda self, x: F.transpose(x, (0, 2, 1))[..., :2] + self.grid, grid=mge.Tensor(GRID[:, :6]))
    with caplog.at_level(logging.INFO, "qtrace"):
        trace(model, _samples(8))
    assert [r.levelno for r in caplog.records] == [logging.INFO]


def test_a_wrong_trace_is_still_reported_where_there_are_copies() -> None:
    def forward(self, x):
        y = x[..., :2] + self.grid
        return y * 2.0 if peek(x.mean()) > 0.0 else F.exp(y)

    with pytest.raises(TraceError, match="F.exp|__mul__"):
        trace(net(forward, grid=mge.Tensor(GRID)), RNG.normal(size=(8, 10, 6)).astype(np.float32))


def _grid(*maps: mge.Tensor) -> mge.Tensor:
    grids = []
    for values in maps:
        high, wide = values.shape[2], values.shape[3]
        rows = F.broadcast_to(F.reshape(F.arange(high), (-1, 1)), (high, wide))
        columns = F.broadcast_to(F.reshape(F.arange(wide), (1, -1)), (high, wide))
        grids.append(F.reshape(F.stack((columns, rows), 2), (1, -1, 2)))
    return F.concat(grids, 1)


@pytest.mark.quick(1)
@pytest.mark.parametrize("level", [0, 2])
def test_a_decode_in_place(level: int) -> None:
    """As YOLOX publishes it: ``F.arange`` in a queue gives wrong values now and then; the trace is right."""

    def forward(self, x):
        maps = [F.sigmoid(x), F.max_pool2d(x, 2), F.avg_pool2d(x, 4)]
        rows = F.transpose(F.concat([F.flatten(m, 2) for m in maps], axis=2), (0, 2, 1))
        rows[..., :2] = (rows[..., :2] + _grid(*maps)) * 8.0
        rows[..., 2:4] = F.exp(rows[..., 2:4]) * 8.0
        return rows

    x = RNG.normal(size=(8, 6, 8, 8)).astype(np.float32)
    want = net(forward)(mge.Tensor(x)).numpy()
    np.testing.assert_allclose(
        want[0, :64, 0], (1 / (1 + np.exp(-x[0, 0].ravel())) + np.tile(range(8), 8)) * 8, 1e-5
    )
    mge.config.async_level = level
    for _ in range(4):
        traced = trace(net(forward), x)
    assert mge.config.async_level == level
    for _ in range(8):
        np.testing.assert_allclose(traced(mge.Tensor(x)).numpy(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.quick(1)
@pytest.mark.parametrize("form", ["m.onnx", "m.tflite"])
def test_copies_are_free_in_files(form: str, tmp_path: Path) -> None:
    """They carry the parameters of what they copy; a file has no op for them."""

    def forward(self, x):
        y = F.transpose(F.flatten(self.conv(x), 2), (0, 2, 1))
        return (self.last(y)[..., :2] + self.grid) * 2.0

    grid = mge.Tensor(RNG.normal(size=(1, 16, 2)).astype(np.float32))
    model = net(forward, conv=M.Conv2d(3, 6, 1), last=M.Linear(6, 6), grid=grid)
    traced = trace(model, images(2, 3, 4, 4))
    assert _copies(traced) == 1
    qtrace.save(traced, tmp_path / "t.mge")
    recipe = "backend/onnxruntime" if form == "m.onnx" else "backend/tflite"
    prepared = qtrace.prepare(qtrace.load(tmp_path / "t.mge"), recipe)
    sites = [s.node for s in qtrace.explain(prepared).annotation.sites]
    assert not any("_copy" in name for name in sites)
    converted = qtrace.convert(qtrace.calibrate(prepared, [images(2, 3, 4, 4)], progress=False))
    path = qtrace.export(converted, tmp_path / form)
    report = qtrace.verify(path, converted, [images(2, 3, 4, 4, seed=1)], min_sqnr_db=20)
    assert report.passed, report.table()
    assert b"Pad" not in path.read_bytes()


@pytest.mark.quick(2)
@pytest.mark.parametrize("cut", [np.s_[:, 0:1], np.s_[:, 0], np.s_[:, :3], np.s_[0:1, 1:2]])
def test_the_gradient_of_a_norm_does_not_stop_at_a_view(cut: Any) -> None:
    module = net(
        lambda self, x: self.h(self.n(self.f(x)[cut])), f=M.Linear(8, 8), n=M.LayerNorm(8), h=M.Linear(8, 4)
    )
    x = RNG.normal(size=(1, 5, 8)).astype(np.float32)
    traced = trace(module, x)
    assert _copies(traced) == 1
    prepared = qtrace.prepare(traced, samples=[x])  # measures noise by gradients
    qtrace.calibrate(prepared, [x], progress=False)
    qtrace.set_phase(prepared, "train")
    manager = GradManager().attach(list(prepared.parameters()))
    with manager:
        manager.backward((prepared(mge.Tensor(x)) ** 2).mean())
    assert all(np.isfinite(p.grad.numpy()).all() for p in prepared.parameters() if p.grad is not None)
