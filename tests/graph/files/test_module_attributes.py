"""Attributes of MegEngine's modules in a file: ``load`` refuses a value that ``forward`` cannot take."""

from __future__ import annotations

import inspect
import pickle

import megengine as mge
import megengine.module as M
import megengine.traced_module as tm
import numpy as np
import pytest
from megengine.module import quantized
from megengine.module.normalization import GeneralNorm, GroupNorm, LayerNorm
from megengine.quantization import ema_fakequant_qconfig, quantize_qat
from megengine.traced_module.expr import Constant

from qtrace.fakequant.following.bias import BiasQuant
from qtrace.fakequant.following.bn_fold import BnFold
from qtrace.graph.files import allowlist
from qtrace.graph.files.allowlist import resolve
from qtrace.graph.files.module_attributes import _kinds, check_attributes
from qtrace.graph.files.serialize import load, save
from tests.each import each_of
from tests.graph.files.hostile import refusal, traced_net
from tests.nets import images, net

X = mge.Tensor(images(2, 2, 4, 4))
# module, attribute, value in the file, what the sentence says
WRONG = {
    "text stride": (
        M.Conv2d(2, 2, 1),
        "stride",
        "x",
        "the stride x: it must be a positive integer or a tuple of 2, each a positive",
    ),
    "zero stride": (M.Conv2d(2, 2, 1), "stride", (1, 0), "the stride (1, 0)"),
    "three strides": (M.Conv2d(2, 2, 1), "stride", (1, 1, 1), "the stride (1, 1, 1)"),
    "huge stride": (M.Conv2d(2, 2, 1), "stride", (1, 2**31), "the stride"),
    "no padding": (
        M.Conv2d(2, 2, 1),
        "padding",
        None,
        "the padding None: it must be an integer of at least 0 or a tuple of 2",
    ),
    "negative padding": (
        M.Conv1d(2, 2, 1),
        "padding",
        -1,
        "the padding -1: it must be an integer of at least 0",
    ),
    "no groups": (M.Conv2d(2, 2, 1), "groups", 0, "the groups 0: it must be a positive integer"),
    "other groups": (M.Conv2d(2, 2, 1), "groups", 2, "a weight of 4 axes: with groups=2 it must be one of 5"),
    "no weight": (M.Conv3d(2, 2, 1), "weight", None, "the weight None: it must be a Tensor"),
    "text bias": (M.Linear(2, 2), "bias", "b", "the bias b: it must be a Tensor or None"),
    "padding mode": (
        M.ConvRelu2d(2, 2, 1),
        "padding_mode",
        "mirror",
        "it must be one of zeros, reflect, replicate",
    ),
    "compute mode": (M.Linear(2, 2), "compute_mode", 3, "the compute_mode 3"),
    "output padding": (M.ConvTranspose2d(2, 2, 1), "output_padding", (1,), "the output_padding (1,)"),
    "text momentum": (M.BatchNorm2d(2), "momentum", "a", "the momentum a: it must be a number"),
    "negative eps": (M.BatchNorm2d(2), "eps", -1.0, "the eps -1.0: it must be a number of at least 0"),
    "eps that is no number": (LayerNorm(2), "eps", float("nan"), "the eps nan"),
    "no mean": (
        M.BatchNorm1d(2),
        "running_mean",
        None,
        "track_running_stats without running_mean and running_var",
    ),
    "no affine weight": (GroupNorm(1, 2), "weight", None, "affine without weight and bias"),
    "pool": (M.MaxPool2d(2), "kernel_size", (2, None), "the kernel_size (2, None)"),
    "pool mode": (
        M.AvgPool2d(2),
        "mode",
        "median",
        "the mode median: it must be a mode that MegEngine knows",
    ),
    "pool size": (M.AdaptiveAvgPool2d(1), "oshp", "1", "the oshp 1: it must be a positive integer or"),
    "softmax": (M.Softmax(1), "axis", 1.5, "the axis 1.5"),
    "slope": (M.LeakyReLU(), "negative_slope", None, "the negative_slope None"),
    "probability": (M.Dropout(0.5), "drop_prob", 7, "the drop_prob 7: it must be a number from 0 to 1"),
    "method": (M.Elemwise("add"), "method", "explode", "the method explode"),
    "pad": (M.Pad(((0, 0), (1, 1))), "pad_width", ((0,),), "the pad_width"),
    "upscaling": (M.PixelShuffle(2), "upscale_factor", 0, "the upscale_factor 0"),
    "phase of a bias": (BiasQuant("x", (2,)), "phase", "later", "the phase later: it must be one of"),
    "factor of a bias": (BiasQuant("x", (2,)), "factor", "1", "the factor 1: it must be a number"),
    "kind of a fold": (BnFold("x", "conv2d", {}, (2,)), "kind", "conv9", "the kind conv9: it must be one of"),
    "bias of a fold": (
        BnFold("x", "conv2d", {}, (2,)),
        "bias_quant",
        None,
        "the bias_quant None: it must be",
    ),
    "name": (M.ReLU(), "name", 3, "the name 3: it must be a string or None"),
    "keys": (M.Sequential(M.ReLU()), "layer_keys", [3], "the layer_keys"),
}


def write(module, path):
    """Pickles a traced network that has ``module`` for its attribute ``layer``."""
    traced = traced_net()
    traced.layer = module
    path.write_bytes(pickle.dumps(traced, 4))


@each_of("case", WRONG)
def test_an_attribute_that_forward_does_not_take_is_refused(tmp_path, case):
    module, name, value, reason = WRONG[case]
    path, right = tmp_path / "net.mge", module.__dict__[name]
    write(module, path)
    load(path)
    module.__dict__[name] = value
    try:
        write(module, path)
    finally:
        module.__dict__[name] = right
    refusal(path, f"its module layer, a {type(module).__name__}, has", reason)


def test_a_missing_attribute_is_refused(tmp_path):
    conv = M.Conv2d(2, 2, 1)
    del conv.groups
    write(conv, tmp_path / "net.mge")
    refusal(tmp_path / "net.mge", "its module layer, a Conv2d, lacks groups")


def test_a_module_within_modules_is_named_by_its_path(tmp_path):
    inner = M.Sequential(M.ReLU(), M.Conv2d(2, 2, 1))
    traced = tm.trace_module(net(lambda self, x: self.body(x), body=inner), X)
    getattr(traced.body, "1").dilation = "wide"
    path = tmp_path / "net.mge"
    path.write_bytes(pickle.dumps(traced, 4))
    refusal(path, "its module body.1, a Conv2d, has the dilation wide")


def test_a_module_in_a_constant_is_checked(tmp_path):
    traced = tm.trace_module(net(lambda self, x: self.add(x, x), add=M.Elemwise("add")), X)
    getter = traced.graph._exprs[0]
    constant = Constant(M.Elemwise("add"), "const_add")
    constant.outputs, getter.outputs[0].expr, traced.graph._exprs[0] = getter.outputs, constant, constant
    traced.graph.inputs[0].users.remove(getter)
    del traced.add
    traced._update_ref()
    path = tmp_path / "net.mge"
    save(traced, path)
    load(path)
    constant.value.method = "explode"
    path.write_bytes(pickle.dumps(traced, 4))
    refusal(path, "its module Elemwise, a Elemwise, has the method explode")


def test_a_class_is_no_attribute(tmp_path):
    traced = tm.trace_module(M.Sequential(M.Conv2d(2, 2, 1)), X)
    traced.activation = "mark"
    path = tmp_path / "net.mge"
    text, name = b"X\x04\x00\x00\x00mark", b"cmegengine.module.conv\nConv2d\n"
    path.write_bytes(pickle.dumps(traced, 3).replace(text, name))
    refusal(path, "a TracedModule in it holds megengine.module.conv:Conv2d where data belong")


def test_numbers_of_numpy_and_older_versions_are_taken(tmp_path):
    conv, pool, norm = M.Conv2d(2, 2, 1), M.MaxPool2d(2), M.BatchNorm2d(2)
    conv.stride, pool.stride, norm.eps = [np.int64(1), 1], (2, np.int32(2)), np.float32(1e-3)
    del conv.padding_mode
    without = [M.BatchNorm2d(2, affine=False), GroupNorm(1, 2, affine=False), M.Linear(2, 2, bias=False)]
    for module in (conv, pool, norm, *without):
        write(module, tmp_path / "net.mge")
        assert isinstance(load(tmp_path / "net.mge").layer, type(module))


def test_a_number_that_was_set_after_the_constructor_is_taken(tmp_path):
    conv = M.Conv2d(2, 2, 3)
    conv.stride, conv.padding = 2, 1
    write(conv, tmp_path / "net.mge")
    loaded = load(tmp_path / "net.mge").layer
    x = mge.tensor(np.ones((1, 2, 8, 8), np.float32))
    np.testing.assert_array_equal(loaded(x).numpy(), conv(x).numpy())


def test_a_quantized_model_of_megengine_loads(tmp_path):
    module = M.Sequential(M.QuantStub(), M.ConvBnRelu2d(2, 2, 1), M.Elemwise("relu"), M.DequantStub())
    quantize_qat(module, qconfig=ema_fakequant_qconfig)
    module.eval()
    path = tmp_path / "net.mge"
    save(tm.trace_module(module, X), path)
    load(path)


# Arguments of constructors that are not 2.
ARGUMENTS = {
    "dtype": "qint8",
    "method": "add",
    "normalized_shape": (2,),
    "normalized_axis": [1],
    "pad_width": ((0, 0), (1, 1)),
    "no_trans": True,
    "oshp": 1,
}
# Attributes of no consequence, or of a type that other checks know.
UNCHECKED = {"training", "_modules", "_forward_hooks", "_forward_pre_hooks", "group", "orig_scale"}
ABSTRACT = {"Module", "QATModule", "QuantizedModule", "Observer"}


def made(cls):
    """A module as its constructor makes it."""
    if cls in (M.LSTM, M.RNN):
        return cls(2, 2)
    if issubclass(cls, (quantized.Concat, quantized.QuantStub, quantized.Linear)):
        return cls()
    parameters = list(inspect.signature(cls.__init__).parameters.values())[1:]
    variable = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    needed = [p.name for p in parameters if p.default is p.empty and p.kind not in variable]
    if cls is GeneralNorm:
        needed = ["normalized_shape", "normalized_axis"]
    return cls(**{name: ARGUMENTS.get(name, 2) for name in needed})


@each_of("key", sorted(allowlist.MODULES))
def test_every_attribute_of_every_module_is_in_the_table(key):
    cls = resolve(key)
    if cls.__name__ in ABSTRACT:
        assert inspect.isabstract(cls)
        return
    module = made(cls)
    if cls.__module__.startswith("megengine.module.quantized.linear"):
        module.weight = mge.Parameter(np.ones((2, 2), np.float32))
    check_attributes(module, "layer")
    attributes = {name for name in module.__dict__ if name not in UNCHECKED}
    assert attributes == set(_kinds(cls)), attributes ^ set(_kinds(cls))
    for name in attributes - {"name", "_name", "_short_name", "quantize_disabled"}:
        right = module.__dict__[name]
        module.__dict__[name] = object()
        with pytest.raises(Exception, match=f"its module layer, a {cls.__name__}, has the {name} a object"):
            check_attributes(module, "layer")
        module.__dict__[name] = right
