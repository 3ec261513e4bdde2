"""Cross-layer equalization: the float output is kept, ranges meet as the paper says, high biases move on."""

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
from qtrace.ptq.layers import outputs
from qtrace.ptq.layers.scaling import Parameters, channel_groups, precision, weight_sqnr
from qtrace.scheme import QScheme
from tests.each import each_of
from tests.nets import MobileNetV2, ResNet, images, left_lines, net, randomize

PER_TENSOR = {"axis": None}


def _prepared(module: M.Module, x: np.ndarray, *ptq: Any) -> Any:
    traced = qtrace.trace(module, x, check=False)
    return qtrace.prepare(traced, QConfig(weight=PER_TENSOR, ptq=ptq))


def test_a_fault_in_the_rounding_of_weights_surfaces(monkeypatch: pytest.MonkeyPatch) -> None:
    def faulty(*_: Any) -> Any:
        raise ValueError("a fault")

    monkeypatch.setattr(outputs, "rounded_weight", faulty)
    layers = {"a": M.Conv2d(3, 4, 1), "b": M.Conv2d(4, 2, 1)}
    with pytest.raises(ValueError, match="^a fault$"):
        _prepared(net(lambda self, x: self.b(F.relu(self.a(x))), **layers), images(1, 3, 4, 4), "equalize")


def _report(prepared: Any, name: str) -> dict[str, Any]:
    return next(r for r in read_record(prepared).ptq if r["algorithm"] == name)


def _stretched(layer: Any, axis: int, low: float, high: float, seed: int = 1) -> None:
    """Gives the channels of a layer very different ranges."""
    value = layer.weight.numpy()
    factor = np.exp(np.random.default_rng(seed).uniform(np.log(low), np.log(high), value.shape[axis]))
    shape = [1] * value.ndim
    shape[axis] = -1
    layer.weight._reset(mge.Parameter((value * factor.reshape(shape)).astype(np.float32)))


NETS = {
    "residual": (lambda: ResNet(width=4, blocks=(1, 1)), (2, 3, 32, 32)),
    "grouped": (
        lambda: net(
            lambda self, x: self.c(F.leaky_relu(self.b(F.relu(self.a(x))), 0.2)),
            a=M.Conv2d(4, 6, 3, groups=2),
            b=M.Conv2d(6, 6, 3, groups=3),
            c=M.Conv2d(6, 2, 1),
        ),
        (2, 4, 9, 9),
    ),
    "transposed": (
        lambda: net(
            lambda self, x: self.c(F.relu(self.b(F.relu(self.a(x))))),
            a=M.Conv2d(4, 6, 3),
            b=M.ConvTranspose2d(6, 6, 2, 2, groups=2),
            c=M.ConvTranspose2d(6, 2, 2),
        ),
        (2, 4, 9, 9),
    ),
    "prelu, linear": (
        lambda: net(
            lambda self, x: self.c(self.p(self.b(F.flatten(F.adaptive_avg_pool2d(self.a(x), 1), 1)))),
            a=M.Conv2d(4, 6, 3),
            b=M.Linear(6, 8),
            p=M.PReLU(),
            c=M.Linear(8, 2),
        ),
        (2, 4, 9, 9),
    ),
}


@pytest.mark.parametrize("name", NETS)
def test_the_float_output_is_kept_and_weights_lose_less(name: str) -> None:
    build, shape = NETS[name]
    module, x = randomize(build()), images(*shape)
    for i, layer in enumerate(m for m in module.modules() if isinstance(m, (M.Conv2d, M.Linear))):
        _stretched(layer, 0, 0.05, 2.0, seed=i)
    expected = module(mge.Tensor(x)).numpy()
    prepared = _prepared(module, x, "fuse_bn", {"equalize": {"absorb": False}})
    assert np.abs(prepared(mge.Tensor(x)).numpy() - expected).max() <= 1e-5 * np.abs(expected).max()
    errors = _report(prepared, "equalize")["errors"]
    gains = [e["after"] - e["before"] for e in errors]
    assert errors
    assert np.mean(gains) > 0.2


def test_two_layers_meet_at_the_geometric_mean_of_their_ranges() -> None:
    """Nagel et al. 2019, eq. 9-11: s = sqrt(r1 / r2), both ranges become sqrt(r1 * r2)."""
    module = net(lambda self, x: self.b(F.relu(self.a(x))), a=M.Conv2d(4, 6, 3), b=M.Conv2d(6, 5, 1))
    _stretched(module.a, 0, 0.01, 1.0)
    one = np.abs(module.a.weight.numpy().astype(np.float64)).max(axis=(1, 2, 3))
    two = np.abs(module.b.weight.numpy().astype(np.float64)).max(axis=(0, 2, 3))
    prepared = _prepared(module, images(2, 4, 8, 8), {"equalize": {"absorb": False}})
    (group,) = [g for g in channel_groups(prepared) if not g.reason] or [None]
    for path, axes in (("a", (1, 2, 3)), ("b", (0, 2, 3))):
        weight = np.abs(getattr(prepared, path).weight.numpy()).max(axis=axes)
        np.testing.assert_allclose(weight, np.sqrt(one * two), rtol=1e-5)
    assert group is None  # weights are computed by fake quants now


def test_a_dead_channel_keeps_its_scale() -> None:
    module = net(lambda self, x: self.b(F.relu(self.a(x))), a=M.Conv2d(4, 6, 3), b=M.Conv2d(6, 5, 1))
    value = module.a.weight.numpy().copy()
    value[2] = 0.0
    module.a.weight._reset(mge.Parameter(value))
    before = module.b.weight.numpy()[:, 2]
    prepared = _prepared(module, images(2, 4, 8, 8), "equalize")
    np.testing.assert_array_equal(prepared.b.weight.numpy()[:, 2], before)
    assert np.isfinite(prepared.a.weight.numpy()).all()


def test_relu6_is_kept_or_replaced_as_asked() -> None:
    module, x = randomize(MobileNetV2(0.25, blocks=(1, 2, 1))), images(1, 3, 32, 32)
    kept_report = _report(_prepared(module, x, "fuse_bn", "equalize"), "equalize")
    assert any("relu6" in line and "does not scale" in line for line in left_lines(kept_report))
    prepared = _prepared(module, x, "fuse_bn", {"equalize": {"relu6": "relu", "absorb": False}})
    report = _report(prepared, "equalize")
    assert any("ReLU6 replaced by ReLU" in line for line in report["changed"])
    assert left_lines(report) == []
    assert "relu6" not in {n.kind for n in read_record(prepared).annotation.notes}


@each_of("axes", [(2, 3), (-1, -2), (1, 2, 3)])
def test_a_mean_is_passed_through_unless_it_mixes_channels(axes: tuple[int, ...]) -> None:
    module = net(
        lambda self, x: self.b(F.mean(F.relu(self.a(x)), axes, keepdims=True)),
        a=M.Conv2d(4, 6, 1),
        b=M.Conv2d(1 if 1 in axes else 6, 5, 1),
    )
    report = _report(_prepared(randomize(module), images(2, 4, 8, 8), "equalize"), "equalize")
    assert left_lines(report) == (["no two layers follow each other"] if 1 in axes else [])


def _high(padding: int) -> M.Module:
    module = net(
        lambda self, x: self.b(F.relu(self.bn(self.a(x)))),
        a=M.Conv2d(4, 6, 1, bias=False),
        bn=M.BatchNorm2d(6),
        b=M.Conv2d(6, 5, 3, padding=padding),
    )
    high = np.array([9, 0, 8, -1, 7, 0.2], np.float32).reshape(module.bn.bias.shape)
    module.bn.bias._reset(mge.Parameter(high))
    return module


def test_a_high_bias_is_handed_on_where_nothing_clips() -> None:
    module, x = _high(0), 0.2 * images(2, 4, 8, 8)
    expected = module(mge.Tensor(x)).numpy()
    prepared = _prepared(module, x, "fuse_bn", "equalize")
    report = _report(prepared, "equalize")
    assert any("3 high biases handed on" in line for line in report["changed"])
    output = prepared(mge.Tensor(x)).numpy()
    assert np.abs(output - expected).max() <= 1e-5 * np.abs(expected).max()


def test_a_high_bias_stays_before_padding() -> None:
    report = _report(_prepared(_high(1), images(2, 4, 8, 8), "fuse_bn", "equalize"), "equalize")
    assert any("3 high biases stay: b_out pads with 0" in line for line in left_lines(report))


def test_precision_and_noise_by_hand() -> None:
    np.testing.assert_allclose(precision(np.array([4.0, 1.0, 0.5, 0.0])), [0, 2, 3])
    weight = np.random.default_rng(0).uniform(-1, 1, (2, 5000))
    weight[0] *= 2.0**-4
    scheme = QScheme(8, signed=True, symmetric=True)
    alone, together = (weight_sqnr(weight[:1], s, ()) for s in (scheme, scheme))
    assert alone == together
    # Uniform rounding noise of step 1/127: 10 log10(mean(w^2) * 12 * 127^2), 53 dB for a full range.
    assert weight_sqnr(weight[1:], scheme, ()) == pytest.approx(10 * np.log10(12 * 127**2 / 3), abs=0.3)
    rows = [weight_sqnr(weight, scheme, axes) for axes in ((), (0,))]
    assert rows[1] > rows[0]


def test_parameters_write_nothing_before_they_are_stored() -> None:
    module = net(lambda self, x: self.b(F.relu(self.a(x))), a=M.Conv2d(4, 6, 3), b=M.Conv2d(6, 5, 1))
    traced = qtrace.trace(module, images(2, 4, 8, 8), check=False)
    parameters = Parameters(traced)
    before = traced.a.weight.numpy()
    assert parameters["a.weight"].dtype == np.float64
    np.testing.assert_array_equal(traced.a.weight.numpy(), before)


def test_the_report_has_the_error_of_the_output_which_the_ratio_of_a_weight_does_not_show() -> None:
    """Channels that are small in one weight and enlarged in the next are erased by one scale for all."""
    module = net(lambda self, x: self.b(F.relu(self.a(x))), a=M.Conv2d(4, 8, 3), b=M.Conv2d(8, 5, 1))
    stretch = np.exp2(-2.0 * np.arange(8)).astype(np.float32)
    for layer, shape, factor in ((module.a, (8, 1, 1, 1), stretch), (module.b, (1, 8, 1, 1), 1 / stretch)):
        layer.weight._reset(mge.Parameter(layer.weight.numpy() * factor.reshape(shape)))
    module.a.bias._reset(mge.Parameter(module.a.bias.numpy() * stretch.reshape(1, 8, 1, 1)))
    x = images(2, 4, 8, 8)
    float_output = module(mge.Tensor(x)).numpy()
    prepared = _prepared(module, x, {"equalize": {"absorb": False}})
    report = _report(prepared, "equalize")
    (output,) = report["outputs"]
    assert output["site"] == "b_out"
    assert output["after"] - output["before"] > 20.0
    assert all(abs(e["after"] - e["before"]) < 12.0 for e in report["errors"])
    # What the report promises is what the graph with rounded weights gives on other inputs.
    qtrace.calibrate(prepared, [x], progress=False)
    for site in ("x", "relu_out", "b_out"):
        getattr(prepared.qsites, site).phase = "float"
    error = prepared(mge.Tensor(x)).numpy() - float_output
    measured = 10 * np.log10(np.sum(float_output**2) / np.sum(error**2))
    assert measured == pytest.approx(output["after"], abs=4.0)
    text = "\n".join(qtrace.explain(prepared).algorithms())
    ratios = f"b_out {output['before']:.1f} -> {output['after']:.1f} dB"
    assert f"outputs: {ratios} (SQNR on random inputs, with rounded weights and float activations)" in text
    assert "sites, each by itself: " in text
    assert "in the middle" not in text


def test_without_a_change_no_output_is_reported() -> None:
    module = net(lambda self, x: F.sigmoid(self.a(x)), a=M.Conv2d(4, 6, 3))
    prepared = _prepared(module, images(2, 4, 8, 8), "equalize")
    assert _report(prepared, "equalize")["outputs"] == []
    assert not any("outputs" in line for line in qtrace.explain(prepared).algorithms())
