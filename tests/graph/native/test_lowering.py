"""MegEngine's quantized modules become float layers that compute the same, and their scales are kept."""

from __future__ import annotations

import copy

import megengine as mge
import megengine.functional as F
import megengine.module as M
import numpy as np
import pytest
from megengine.module import qat as Q
from megengine.quantization import disable_fake_quant, ema_fakequant_qconfig, quantize, quantize_qat
from megengine.traced_module import TracedModule, trace_module

import qtrace
from qtrace.errors import GraphError, TraceError
from qtrace.graph.native import drop_ranges, lower, read_ranges
from qtrace.preparation.model import QuantizedModel
from tests.native_nets import images, trained


class Kinds(M.Module):
    """Every kind of layer that MegEngine quantizes, in a list, in a dict and as attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant = M.QuantStub(), M.DequantStub()
        self.listed = [M.ConvRelu2d(3, 8, 3, padding=1), M.Conv2d(8, 8, 3, padding=1, groups=2)]
        self.by_name = {"a": M.ConvTransposeBnRelu2d(8, 4, 2, 2)}
        self.grouped = M.ConvTransposeBn2d(8, 4, 2, 2, groups=2)
        self.plain, self.pointwise = M.ConvTranspose2d(8, 4, 2, 2), M.ConvTransposeRelu2d(4, 4, 1)
        self.padded = M.ConvBnRelu2d(12, 12, 3, padding=1, groups=3, padding_mode="reflect")
        self.twice = M.ConvBn2d(12, 12, 1)
        self.join, self.product, self.sigmoid = M.Concat(), M.Elemwise("MUL"), M.Elemwise("SIGMOID")
        self.mean = M.AdaptiveAvgPool2d(1)
        self.fc1, self.fc2 = M.LinearBnRelu1d(12, 12, bias=True), M.LinearBn1d(12, 12, bias=True)
        self.fc3, self.fc4 = M.LinearRelu(12, 8), M.Linear(8, 4, bias=False)

    def forward(self, x: mge.Tensor) -> mge.Tensor:
        x = self.quant(x)
        for layer in self.listed:
            x = layer(x)
        x = self.join([self.by_name["a"](x), self.grouped(x), self.pointwise(self.plain(x))], 1)
        x = self.twice(self.twice(self.padded(x)))
        x = F.flatten(self.mean(self.product(x, self.sigmoid(x))), 1)
        return self.dequant(self.fc4(self.fc3(self.fc2(self.fc1(x)))))


@pytest.fixture(scope="module")
def kinds() -> M.Module:
    return trained(Kinds())


def test_the_float_layers_compute_what_the_qat_modules_compute_without_rounding(kinds: M.Module) -> None:
    x = mge.Tensor(images(7))
    plain = copy.deepcopy(kinds)
    disable_fake_quant(plain)
    before = kinds(x).numpy()
    traced = qtrace.trace(kinds, x, check=False)
    np.testing.assert_array_equal(traced(x).numpy(), plain(x).numpy())
    np.testing.assert_array_equal(kinds(x).numpy(), before)  # the model of the user is as it was
    assert not [m for m in traced.modules() if isinstance(m, (M.BatchNorm2d, Q.QATModule))]


def test_every_scale_is_the_one_that_quantize_would_take(kinds: M.Module) -> None:
    ranges = read_ranges(qtrace.trace(kinds, images(7), check=False))
    assert ranges is not None
    integers = quantize(kinds, inplace=False)
    for path, layer in integers.named_modules():
        if hasattr(layer, "output_dtype"):
            taken = ranges.layers[path]
            assert taken.activation is not None
            assert float(taken.activation.scale) == layer.output_dtype.metadata["mgb_dtype"]["scale"]
        if hasattr(layer, "weight"):
            assert taken.weight is not None
            assert float(taken.weight.scale) == layer.weight.dtype.metadata["mgb_dtype"]["scale"]
    assert ranges.layers["dequant"].activation is None
    assert not any(layer.notes for layer in ranges.layers.values())


def test_a_quantized_model_brings_the_same_scales_and_its_own_integers(kinds: M.Module) -> None:
    integers = quantize(kinds, inplace=False)
    traced = qtrace.trace(integers, images(7), check=False)
    own, other = read_ranges(traced), read_ranges(qtrace.trace(kinds, images(7), check=False))
    assert own is not None
    assert other is not None
    for path, layer in own.layers.items():
        same = other.layers[path]
        assert (layer.activation, layer.weight) == (same.activation, same.weight)
        assert (layer.kind, same.kind) == (layer.kind, layer.kind.replace("quantized", "qat"))
    for path, layer in integers.named_modules():
        if hasattr(layer, "weight"):
            scale = np.float32(layer.weight.dtype.metadata["mgb_dtype"]["scale"])
            floats = dict(traced.named_parameters())[f"{path}.weight"].numpy()
            stored = layer.weight.astype("float32").numpy().reshape(floats.shape)
            np.testing.assert_array_equal(floats, stored)
            np.testing.assert_array_equal(np.round(floats / scale) * scale, floats)


def test_matmul_of_a_batch() -> None:
    module = M.Sequential(M.BatchMatMulActivation(2, 4, 3, nonlinear_mode="relu"))
    qat = quantize_qat(module, qconfig=ema_fakequant_qconfig)
    x = images(1, 2, 4, 3)
    qat(mge.Tensor(x))
    qat.eval()
    layers = [qat, quantize(qat, inplace=False)]
    (float_net, ranges), (other, same) = (lower(layer) for layer in layers)
    assert ranges is not None
    assert same is not None
    assert ranges.layers["0"].weight == same.layers["0"].weight
    step = float(ranges.layers["0"].weight.scale)  # type: ignore[union-attr]
    difference = np.abs(float_net[0].weight.numpy() - other[0].weight.numpy())
    assert other[0].weight.shape == (2, 3, 4)
    assert difference.max() <= step * 0.501


def test_a_trace_by_megengine_is_taken_as_well(kinds: M.Module) -> None:
    x = mge.Tensor(images(7))
    traced = qtrace.trace(trace_module(copy.deepcopy(kinds), x), check=False)
    other = qtrace.trace(kinds, x, check=False)
    assert read_ranges(traced) == read_ranges(other)
    np.testing.assert_array_equal(traced(x).numpy(), other(x).numpy())
    nodes = [n for e in traced.graph.exprs() for n in e.outputs if hasattr(n, "module_type")]
    layers = [n for n in nodes if not isinstance(n.owner, TracedModule)]
    assert layers
    assert all(n.module_type is type(n.owner) for n in layers)


class Own(Q.Conv2d):
    """A QAT module of the user's own."""

    def forward(self, inp: mge.Tensor) -> mge.Tensor:
        return self.apply_quant_activation(F.relu6(self.calc_conv_qat(inp)))


def test_a_qat_module_of_ones_own_is_refused_by_name() -> None:
    net = M.Sequential(M.Conv2d(3, 4, 3), M.ReLU())
    qat = quantize_qat(net, qconfig=ema_fakequant_qconfig, mapping={M.Conv2d: Own})
    with pytest.raises(
        TraceError, match=r"layers of MegEngine's own .* does not know: 0 \(.*Own\): give the"
    ):
        qtrace.trace(qat, images(7), check=False)
    qat.eval()
    traced = trace_module(qat, mge.Tensor(images(7)))
    with pytest.raises(GraphError, match=r"prepare cannot take the model: .* 0 \(trace of a qat module\)"):
        qtrace.prepare(traced)


def test_a_model_that_cannot_be_copied_is_refused() -> None:
    net = quantize_qat(M.Sequential(M.Conv2d(3, 4, 3)), qconfig=ema_fakequant_qconfig)
    net.lock = (i for i in range(3))
    with pytest.raises(TraceError, match="cannot be copied, so its quantized layers cannot be replaced"):
        qtrace.trace(net, images(7), check=False)


def test_scales_can_be_dropped(kinds: M.Module) -> None:
    traced = qtrace.trace(kinds, images(7), check=False)
    drop_ranges(traced)
    drop_ranges(traced)
    assert read_ranges(traced) is None
    fake_quants = QuantizedModel(qtrace.prepare(traced)).fake_quants.values()
    assert fake_quants
    assert not any(fake_quant.calibrated for fake_quant in fake_quants)


def test_a_float_model_is_returned_itself() -> None:
    net = M.Sequential(M.Conv2d(3, 4, 3))
    assert lower(net) == (net, None)
    assert read_ranges(qtrace.trace(net, images(7), check=False)) is None
