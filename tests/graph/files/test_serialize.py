"""Saving and loading: the model that comes back is the model that was saved."""

from __future__ import annotations

import megengine as mge
import megengine.functional as F
import megengine.module as M
import megengine.traced_module as tm
import numpy as np
import pytest
from megengine.core.tensor.dtype import QuantDtypeMeta, _builtin_quant_dtypes, bfloat16, qint8
from megengine.quantization import ema_fakequant_qconfig, quantize, quantize_qat
from megengine.quantization.utils import QuantMode, create_qparams
from megengine.traced_module.expr import Constant, is_getattr
from megengine.traced_module.fake_quant import FakeQuantize

import qtrace
from qtrace.errors import UnsafeFileError
from qtrace.graph.files.serialize import load, save
from tests.growth import assert_linear, calls_of


class Block(M.Module):
    def __init__(self, channels):
        super().__init__()
        self.conv = M.Conv2d(channels, channels, 3, padding=1)
        self.bn = M.BatchNorm2d(channels)
        self.gain = mge.Parameter(np.full((1, channels, 1, 1), 1.5, np.float32))

    def forward(self, x):
        return F.relu(self.bn(self.conv(x))) * self.gain + x


class Net(M.Module):
    """What nets do: modules, functions, tensor methods, Apply exprs, constants, nested outputs."""

    def __init__(self):
        super().__init__()
        self.stem = M.Sequential(M.ConvBnRelu2d(3, 8, 3, padding=1), M.MaxPool2d(2))
        self.blocks = [Block(8), Block(8)]
        self.sync = M.SyncBatchNorm(8)
        self.weight = mge.Parameter(np.random.RandomState(1).randn(8, 8, 1, 1).astype("float32"))
        self.hidden = [(M.Linear(8, 8), "not in parameters()")]  # becomes a Constant
        self.add = M.Elemwise("add")

    def forward(self, x, extra):
        y = self.sync(self.blocks[1](self.blocks[0](self.stem(x))))
        y = F.conv2d(y, self.weight, padding=(1, 1))
        left, right = F.split(y, 2, axis=1)
        up = F.vision.interpolate(y, scale_factor=2.0, mode="nearest")
        flat = up.reshape(up.shape[0], up.shape[1], -1)  # GetVarShape: an Apply expr
        pooled = self.hidden[0][0](flat[..., ::2].mean(axis=2))
        total = self.add(pooled, mge.Tensor(np.arange(8, dtype="float32"))) + mge.Tensor(x.mean())  # __new__
        grid = F.broadcast_to(F.arange(0, 4), (2, 4)).astype("float16")
        return {
            "cat": F.concat([left, right], axis=1)[:, 1:],
            "list": [total, grid.astype(bfloat16).astype("float32")],
        }, extra["k"][0]


def inputs():
    rng = np.random.RandomState(0)
    return mge.Tensor(rng.randn(2, 3, 8, 8).astype("float32")), {"k": [mge.Tensor(np.float32(2.0))]}


def leaves(value):
    if isinstance(value, dict):
        value = [value[key] for key in sorted(value)]
    if isinstance(value, (list, tuple)):
        return [leaf for item in value for leaf in leaves(item)]
    return [value.numpy()]


def assert_same(a, b):
    a, b = leaves(a), leaves(b)
    assert len(a) == len(b)
    assert all(x.dtype == y.dtype and x.tobytes() == y.tobytes() for x, y in zip(a, b, strict=True))


def traced_net(flat=False):
    net = Net()
    net.eval()
    traced = tm.trace_module(net, *inputs())
    return traced.flatten() if flat else traced


@pytest.mark.parametrize("flat", [False, True])
def test_outputs_graph_and_parameters_come_back(tmp_path, flat):
    traced = traced_net(flat)
    assert {type(e).__name__ for e in traced.graph.exprs()} >= {
        "Apply",
        "Constant",
        "CallFunction",
        "GetAttr",
    }
    save(traced, tmp_path / "net.mge")
    loaded = load(tmp_path / "net.mge")
    assert_same(loaded(*inputs()), traced(*inputs()))
    assert str(loaded.graph) == str(mge.load(str(tmp_path / "net.mge")).graph)
    assert {k: v.numpy().tobytes() for k, v in loaded.named_tensors()} == {
        k: v.numpy().tobytes() for k, v in traced.named_tensors()
    }
    save(loaded, tmp_path / "again.mge")
    assert_same(load(tmp_path / "again.mge")(*inputs()), traced(*inputs()))
    if not flat:
        assert_same(loaded.flatten()(*inputs()), traced(*inputs()))


@pytest.mark.parametrize("protocol", [3, 4, 5])
def test_mge_save_is_read_and_mge_load_reads_ours(tmp_path, protocol):
    traced = traced_net()
    path = str(tmp_path / "net.mge")
    mge.save(traced, path, pickle_protocol=protocol)
    assert_same(load(path)(*inputs()), traced(*inputs()))
    save(traced, path, force=True)  # MegEngine wrote the file that stands there
    assert_same(mge.load(path)(*inputs()), traced(*inputs()))


def graph_facts(traced):
    """Everything about the graphs that MegEngine's own ``__setstate__`` decides."""
    facts = []
    for module in traced.modules():
        for graph in (getattr(module, "argdef_graph_map", None) or {}).values():
            for expr in graph.exprs():
                facts.append(
                    (type(expr).__name__, expr._id, str(expr), len(expr.inputs), expr.top_graph is not None)
                )
            for node in graph.nodes():
                facts.append((node._id, node._name, node._qualname, str(getattr(node, "shape", ""))))
                facts.append((str(getattr(node, "dtype", "")), str(getattr(node, "device", ""))))
                facts.append(
                    (node.expr._id, [user._id for user in node.users], len(getattr(node, "actual_node", ())))
                )
                facts.append((type(getattr(node, "owner", None)).__name__, node.top_graph is not None))
            facts.append((sorted(graph._namespace.used_names), graph._total_ids))
    return facts


@pytest.mark.parametrize("flat", [False, True])
def test_restoring_in_linear_time_gives_what_megengine_gives(tmp_path, flat):
    path = str(tmp_path / "net.mge")
    save(traced_net(flat), path)
    assert graph_facts(load(path)) == graph_facts(mge.load(path))


def test_modules_in_constants_come_back(tmp_path):
    traced = traced_net(flat=True)
    index, getter = next(
        (i, e) for i, e in enumerate(traced.graph._exprs) if is_getattr(e) and e.name == "add"
    )
    node = getter.outputs[0]
    constant = Constant(M.Elemwise("add"), "const_add")
    constant.outputs, node.expr, traced.graph._exprs[index] = [node], constant, constant
    traced.graph.inputs[0].users.remove(getter)
    del traced.add
    traced._update_ref()
    save(traced, tmp_path / "net.mge")
    assert "_m_dump_modulestate" not in vars(constant.value)
    loaded = load(tmp_path / "net.mge")
    assert type(loaded.graph._exprs[index].value) is M.Elemwise
    assert_same(loaded(*inputs()), traced(*inputs()))


def test_saving_leaves_no_notes_on_the_model(tmp_path):
    traced = traced_net()
    before = {name: set(vars(module)) for name, module in traced.named_modules()}
    save(traced, tmp_path / "net.mge")
    assert {name: set(vars(module)) for name, module in traced.named_modules()} == before


def test_loaded_parameters_train(tmp_path):
    traced = traced_net()
    save(traced, tmp_path / "net.mge")
    loaded = load(tmp_path / "net.mge")
    manager = mge.autodiff.GradManager().attach(loaded.parameters())
    with manager:
        manager.backward(loaded(*inputs())[0]["cat"].sum())
    assert all(p.grad is not None for name, p in loaded.named_parameters() if name.startswith("blocks"))


class Small(M.Module):
    def __init__(self):
        super().__init__()
        self.quant, self.conv, self.dequant = M.QuantStub(), M.ConvBnRelu2d(3, 4, 3), M.DequantStub()

    def forward(self, x):
        return self.dequant(self.conv(self.quant(x)))


@pytest.mark.parametrize("converted", [False, True])
def test_native_qat_and_quantized_modules_run_after_load(tmp_path, converted):
    """FakeQuantize asserts that its dtype *is* the one of the qparams; mge.load breaks that identity."""
    x = inputs()[0]
    net = quantize_qat(Small(), qconfig=ema_fakequant_qconfig)
    net(x)
    net.eval()
    if converted:
        net = quantize(net)
        net.eval()
    traced = tm.trace_module(net, x)
    save(traced, tmp_path / "qat.mge")
    loaded = load(tmp_path / "qat.mge")
    assert_same(loaded(x), traced(x))
    for module in loaded.modules():
        if hasattr(module, "dtype") and not converted:
            assert module.dtype is _builtin_quant_dtypes[module.dtype.name]


def test_dtype_metas_are_one_object(tmp_path):
    def fake_quant(dtype):
        module = FakeQuantize(dtype)
        zero = mge.Tensor(np.float32(0.0))
        module.set_qparams(
            create_qparams(QuantMode.SYMMERTIC, module.dtype, mge.Tensor(np.float32(0.1)), zero)
        )
        return module

    class Two(M.Module):
        def __init__(self):
            super().__init__()
            self.fq8, self.fq6 = (
                fake_quant("qint8"),
                fake_quant(QuantDtypeMeta("qint6", None, "int8", -32, 31)),
            )

        def forward(self, x):
            return self.fq6(self.fq8(x))

    x = inputs()[0]
    traced = tm.trace_module(Two(), x)
    node = traced.graph.outputs[0]
    node.qparams = create_qparams(
        QuantMode.ASYMMERTIC, QuantDtypeMeta("qint6", None, "int8", -32, 31), None, None
    )
    traced.graph.inputs[1].qparams = create_qparams(QuantMode.SYMMERTIC, "qint8", mge.Tensor(1.0), None)
    save(traced, tmp_path / "two.mge")
    loaded = load(tmp_path / "two.mge")
    assert_same(loaded(x), traced(x))
    assert loaded.fq8.dtype is loaded.fq8.qparams.dtype_meta is _builtin_quant_dtypes["qint8"]
    assert loaded.graph.inputs[1].qparams.dtype_meta is _builtin_quant_dtypes["qint8"]
    assert loaded.fq6.dtype is loaded.fq6.qparams.dtype_meta is loaded.graph.outputs[0].qparams.dtype_meta
    assert loaded.graph.outputs[0].qparams.mode is QuantMode.ASYMMERTIC


def test_quantized_tensors_and_plain_attributes_survive(tmp_path):
    traced = traced_net()
    traced.notes = {
        "recipe": ["resnet50", 3, 0.5, None, True, b"raw", (1, 2)],
        "scales": np.arange(6.0).reshape(2, 3),
    }
    traced.q = mge.Tensor(np.ones((2, 2), np.float32)).astype(qint8(0.5))
    traced.big_endian, traced.scalar = np.arange(3, dtype=">f4"), np.float64(0.25)
    traced.names = np.array([["cat", "Hündin"]])
    save(traced, tmp_path / "net.mge")
    loaded = load(tmp_path / "net.mge")
    assert loaded.notes["recipe"] == traced.notes["recipe"]
    np.testing.assert_array_equal(loaded.notes["scales"], traced.notes["scales"])
    loaded.notes["scales"][0] = 7  # writable, as from pickle
    assert loaded.q.dtype.metadata == traced.q.dtype.metadata
    assert loaded.big_endian.tolist() == [0, 1, 2]
    assert type(loaded.scalar) is np.float64
    assert loaded.names.tolist() == [["cat", "Hündin"]]


class Handed(M.Module):
    def forward(self, x, other):
        return x * other.weight


class Hands(M.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.linear = Handed(), M.Linear(3, 3)

    def forward(self, x):
        return self.inner(x, self.linear)


def test_a_module_handed_to_a_submodule(tmp_path):
    """The graph of the submodule does not know whose attribute it reads; that of its caller does."""
    x = mge.Tensor(np.arange(9, dtype="float32").reshape(3, 3))
    traced = tm.trace_module(Hands(), x)
    save(traced, tmp_path / "net.mge")
    assert_same(load(tmp_path / "net.mge")(x), traced(x))
    next(e for e in traced.inner.graph._exprs if is_getattr(e)).name = "load_state_dict"
    mge.save(traced, str(tmp_path / "attack.mge"))
    with pytest.raises(UnsafeFileError, match="reads the attribute load_state_dict"):
        load(tmp_path / "attack.mge")


def test_prepared_calibrated_and_converted_models(tmp_path):
    x, path = inputs()[0], tmp_path / "model.mge"

    def again(model):
        save(model, path)
        loaded = load(path)
        assert_same(loaded(x), model(x))
        return loaded

    block = Block(3)
    block.eval()
    for recipe in ("onnxruntime", "megengine", "w4a4_lsq"):
        prepared = again(qtrace.prepare(qtrace.trace(block, x, check=False), recipe))
        qtrace.calibrate(prepared, [x.numpy()])
        calibrated = again(prepared)
        qtrace.set_phase(calibrated, "train")
        again(calibrated)
        again(qtrace.convert(load(path)))


class Chain(M.Module):
    def __init__(self, length):
        super().__init__()
        self.layers = [M.ReLU() for _ in range(length)]

    def forward(self, x):
        for layer in self.layers:
            x = layer(x) + 1
        return x


def test_a_chain_of_a_thousand_exprs(tmp_path):
    x = mge.Tensor(np.zeros((1, 2), np.float32))
    traced = tm.trace_module(Chain(350), x).flatten()
    assert len(traced.graph._exprs) == 1050
    save(traced, tmp_path / "chain.mge")
    loaded = load(tmp_path / "chain.mge")
    assert_same(loaded(x), traced(x))


@pytest.mark.slow
def test_save_and_load_are_linear(tmp_path):
    x = mge.Tensor(np.zeros((1, 2), np.float32))
    counts = {}
    for layers in (200, 800):
        traced = tm.trace_module(Chain(layers), x).flatten()
        save(traced, tmp_path / "chain.mge")
        loaded = load(tmp_path / "chain.mge")
        assert_same(loaded(x), traced(x))
        counts[layers] = calls_of(
            lambda t=traced: (save(t, tmp_path / "chain.mge"), load(tmp_path / "chain.mge"))
        )
    assert_linear(counts)
