"""Smoothing: the float model stays, channels meet as SmoothQuant says, and only what gains is kept."""

from __future__ import annotations

from typing import Any

import megengine as mge
import megengine.functional as F
import megengine.module as M
import numpy as np
import pytest

import qtrace
from qtrace import QConfig
from qtrace.preparation.model import read_record
from qtrace.ptq import smooth
from tests.nets import images, left_lines, net


def _multiply(parameter: Any, axis: int, channels: list[int], factor: float) -> None:
    value = parameter.numpy().copy()
    np.moveaxis(value, axis, 0)[channels] *= factor
    parameter._reset(mge.Parameter(value))


def _convs() -> M.Module:
    """Two channels behind the first layer are large, and the second layer reads them with small weights."""
    module = net(
        lambda self, x: self.c(F.max_pool2d(F.relu(self.b(F.relu(self.a(x)))), 2)),
        a=M.Conv2d(4, 8, 3, padding=1),
        b=M.Conv2d(8, 8, 3, padding=1),
        c=M.Conv2d(8, 6, 1),
    )
    changes = ((module.a.weight, 0, 40), (module.a.bias, 1, 40), (module.b.weight, 1, 1 / 40))
    for parameter, axis, factor in changes:
        _multiply(parameter, axis, [1, 5], factor)
    return module


def _norms() -> M.Module:
    module = net(
        lambda self, x: self.out(F.relu(self.linear(self.norm(x)))),
        linear=M.Linear(8, 12),
        out=M.Linear(12, 4),
    )
    _multiply(module.linear.weight, 1, [2], 1 / 30)
    module.norm = M.LayerNorm(8)
    module.norm.weight._reset(mge.Parameter(np.float32([1, 1, 30, 1, 1, 1, 1, 1])))
    module.norm.bias._reset(mge.Parameter(np.linspace(-1, 1, 8, dtype=np.float32)))
    return module


def _prepared(module: M.Module, batches: Any, *ptq: Any, **config: Any) -> Any:
    traced = qtrace.trace(module, batches[0], check=False)
    config = {"backend": "generic", "weight": {"axis": 0}, **config}
    return qtrace.prepare(traced, QConfig(ptq=ptq, **config), samples=batches)


def _noise(module: M.Module, prepared: Any, batches: list[np.ndarray], others: list[np.ndarray]) -> float:
    qtrace.calibrate(prepared, batches, progress=False)
    errors = [module(mge.Tensor(x)).numpy() - prepared(mge.Tensor(x)).numpy() for x in others]
    return float(np.mean(np.square(np.concatenate(errors).astype(np.float64))))


CONV = [images(4, 4, 8, 8, seed=s) for s in range(4)]
TOKENS = [images(4, 5, 8, seed=s) for s in range(4)]


@pytest.mark.parametrize(("build", "data"), [(_convs, CONV), (_norms, TOKENS)])
def test_noise_falls_on_other_data_and_the_float_model_stays(build: Any, data: list[np.ndarray]) -> None:
    module = build()
    others = [images(*data[0].shape, seed=10 + seed) for seed in range(3)]
    plain, smoothed = _prepared(module, data), _prepared(module, data, "smooth")
    report = read_record(smoothed).ptq[0]
    assert any("on held-back samples the error falls by" in line for line in report["changed"])
    assert all(e["after"] >= e["before"] for e in report["errors"])
    x = mge.Tensor(data[1])
    qtrace.set_phase(smoothed, "float")
    np.testing.assert_allclose(smoothed(x).numpy(), module(x).numpy(), rtol=1e-3, atol=1e-3)
    assert _noise(module, smoothed, data, others) < 0.7 * _noise(module, plain, data, others)


def test_factors_are_those_of_the_paper() -> None:
    module = _convs()
    prepared = _prepared(module, CONV, {"smooth": {"alpha": 0.7}})
    read = np.concatenate([F.relu(module.a(mge.Tensor(x))).numpy() for x in CONV])
    read = read[np.arange(len(read)) % 4 != 3].max(axis=(0, 2, 3))
    weight = np.abs(module.b.weight.numpy()).max(axis=(0, 2, 3))
    expected = read**0.7 / weight**0.3
    ratio = prepared.b.weight.numpy() / module.b.weight.numpy()
    factor = ratio.mean(axis=(0, 2, 3))
    np.testing.assert_allclose(factor / factor[0], expected / expected[0], rtol=1e-4)
    line = next(line for line in read_record(prepared).ptq[0]["changed"] if "a_out -> b_out" in line)
    assert "channels divided by" in line


def test_smooth_leaves_layers_without_gain(monkeypatch: pytest.MonkeyPatch) -> None:
    module, report = _convs(), None

    def worse(self: Any, alpha: float) -> np.ndarray:
        return np.geomspace(1e-3, 1e3, 8)

    monkeypatch.setattr(smooth._Trial, "factor", worse)
    prepared = _prepared(module, CONV, "smooth")
    report = read_record(prepared).ptq[0]
    assert not report["changed"]
    assert sum("the error on held-back samples does not fall" in line for line in left_lines(report)) == 2
    np.testing.assert_array_equal(prepared.b.weight.numpy(), module.b.weight.numpy())


def test_smooth_reports_why_layers_are_left() -> None:
    traced = qtrace.trace(_convs(), CONV[0], check=False)
    prepared = qtrace.prepare(traced, QConfig(backend="generic", ptq=["smooth"]))
    assert left_lines(read_record(prepared).ptq[0]) == ["it needs data: give prepare(..., samples=batches)"]
    per_tensor = _prepared(_convs(), CONV, "smooth", weight={"axis": None})
    assert "has one scale" in left_lines(read_record(per_tensor).ptq[0])[0]
    rules = [{"match": {"op": "conv2d"}, "quantize": False}]
    in_float = _prepared(_convs(), CONV, "smooth", rules=rules)
    assert "is not rounded" in left_lines(read_record(in_float).ptq[0])[0]
    single = _prepared(net(lambda self, x: self.a(x), a=M.Conv2d(4, 4, 1)), CONV, "smooth")
    assert "no layer reads a tensor" in left_lines(read_record(single).ptq[0])[0]

    module = _norms()
    both = net(lambda self, x: self.out(self.norm(x)) + self.norm(x).mean(), out=M.Linear(8, 4))
    both.norm = module.norm

    def used_twice(self: Any, x: Any) -> Any:
        y = self.norm(x)
        return self.out(y) + y.mean()

    type(both).forward = used_twice
    left = left_lines(read_record(_prepared(both, TOKENS, "smooth")).ptq[0])
    assert any("not only linear layers read it" in line for line in left)
    bare = net(lambda self, x: self.out(self.norm(x)), out=M.Linear(8, 4))
    bare.norm = M.LayerNorm(8, affine=False)
    left = left_lines(read_record(_prepared(bare, TOKENS, "smooth")).ptq[0])
    assert any("its LayerNorm has no weight" in line for line in left)

    shared = net(lambda self, x: self.out(self.norm(self.out(self.norm(x)))), out=M.Linear(8, 8))
    shared.norm = module.norm
    left = left_lines(read_record(_prepared(shared, TOKENS, "smooth")).ptq[0])
    assert any("its LayerNorm is called several times" in line for line in left)


def test_a_layer_norm_of_parameters_is_smoothed_too() -> None:
    module = _norms()
    values = {"scale": module.norm.weight, "shift": module.norm.bias}

    def forward(self: Any, x: Any) -> Any:
        normalized = F.nn.layer_norm(x, (8,), True, weight=self.scale, bias=self.shift, eps=1e-5)
        return self.out(F.relu(self.linear(normalized)))

    written_out = net(forward, linear=M.Linear(8, 12), out=M.Linear(12, 4))
    for name, value in values.items():
        setattr(written_out, name, mge.Parameter(value.numpy()))
    _multiply(written_out.linear.weight, 1, [2], 1 / 30)
    smoothed = _prepared(written_out, TOKENS, "smooth")
    assert "channels divided by" in read_record(smoothed).ptq[0]["changed"][0]
    qtrace.set_phase(smoothed, "float")
    x = mge.Tensor(TOKENS[0])
    np.testing.assert_allclose(smoothed(x).numpy(), written_out(x).numpy(), rtol=1e-3, atol=1e-3)
