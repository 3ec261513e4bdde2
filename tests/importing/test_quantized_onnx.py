"""A quantized ONNX file becomes a prepared module with its sites, and verifies against its runtime."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import megengine as mge
import megengine.functional as F
import megengine.module as M
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import qtrace
from qtrace.errors import ImportingError
from qtrace.extras.finetune import FinetuneSettings
from qtrace.onnxfile.kernels import products_saturate
from tests.nets import net

ort = pytest.importorskip("onnxruntime")
SHAPE = (2, 3, 8, 8)


def _tensor(name: str, *shape: int) -> onnx.TensorProto:
    values = np.random.default_rng(len(name)).standard_normal(shape) * 0.2
    return numpy_helper.from_array(values.astype(np.float32), name)


def _float_net(path: Path) -> Path:
    """A small net with a fused Relu, moves, a branch, a depthwise layer, Gemm and MatMul."""
    nodes = [
        helper.make_node("Conv", ["x", "stem.conv.weight", "stem.conv.bias"], ["c1"], pads=[1] * 4),
        helper.make_node("Relu", ["c1"], ["r1"]),
        helper.make_node("MaxPool", ["r1"], ["p1"], kernel_shape=[2, 2], strides=[2, 2]),
        helper.make_node("Conv", ["p1", "dw.weight"], ["c2"], group=8, pads=[1] * 4),
        helper.make_node("Sigmoid", ["c2"], ["s2"]),
        helper.make_node("Mul", ["c2", "s2"], ["m2"]),
        helper.make_node("Add", ["m2", "p1"], ["a2"]),
        helper.make_node("Concat", ["a2", "p1"], ["cc"], axis=1),
        helper.make_node("GlobalAveragePool", ["cc"], ["g"]),
        helper.make_node("Flatten", ["g"], ["f"]),
        helper.make_node("Gemm", ["f", "fc.weight", "fc.bias"], ["y0"], transB=1),
        helper.make_node("MatMul", ["y0", "mm.weight"], ["y"]),
    ]
    stored = [
        *(_tensor("stem.conv.weight", 8, 3, 3, 3), _tensor("stem.conv.bias", 8)),
        *(_tensor("dw.weight", 8, 1, 3, 3), _tensor("fc.weight", 6, 16)),
        *(_tensor("fc.bias", 6), _tensor("mm.weight", 6, 4)),
    ]  # fmt: skip
    return _save(path, nodes, stored, 2)


def _save(path: Path, nodes: list[Any], stored: list[Any], rank: int, opset: int = 13) -> Path:
    info = helper.make_tensor_value_info
    ends = [info("x", TensorProto.FLOAT, SHAPE)], [info("y", TensorProto.FLOAT, [None] * rank)]
    graph = helper.make_graph(nodes, "net", *ends, stored)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)])
    model.ir_version = 8 if opset < 20 else 10
    onnx.save(model, path)
    return path


def _batches(count: int = 2) -> list[np.ndarray]:
    return [np.random.default_rng(i).standard_normal(SHAPE).astype(np.float32) for i in range(count)]


def _quantize(folder: Path, **options: Any) -> Path:
    from onnxruntime import quantization as q

    class Reader(q.CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            self.batches = iter([{"x": batch} for batch in _batches(4)])

        def get_next(self) -> Any:
            return next(self.batches, None)

    path = folder / "int8.onnx"
    q.quantize_static(_float_net(folder / "float.onnx"), path, Reader(), **options)
    return path


def _run(path: Path, x: np.ndarray) -> np.ndarray:
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    return np.asarray(ort.InferenceSession(str(path), options).run(None, {"x": x})[0])


def _parameters(path: Path) -> Counter[tuple[Any, ...]]:
    """The bytes of scale, zero point and stored integers of each node of a pair."""
    model = onnx.load(path)
    stored = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
    pairs = [n for n in model.graph.node if n.op_type in ("QuantizeLinear", "DequantizeLinear")]
    arrays = [[stored[i] for i in n.input if i in stored] for n in pairs]
    return Counter(tuple((a.dtype.name, a.shape, a.tobytes()) for a in found) for found in arrays)


@pytest.mark.parametrize("activations", ["QUInt8", "QInt8", "QUInt16"])
@pytest.mark.parametrize("form", ["QDQ", "QOperator"])
def test_files_of_onnxruntime_give_equal_outputs(tmp_path: Path, form: str, activations: str) -> None:
    from onnxruntime.quantization import QuantFormat, QuantType

    if form == "QOperator" and activations != "QUInt8":
        pytest.skip("onnxruntime has QOperator kernels for uint8")
    path = _quantize(
        tmp_path, quant_format=QuantFormat[form], activation_type=QuantType[activations], per_channel=True
    )
    prepared = qtrace.from_onnx(path)
    converted = qtrace.convert(prepared)
    exported = tmp_path / "again.onnx"
    qtrace.export(converted, exported)
    # The kernels of signed weights, which a file of QLinear ops has without optimizations, too, may saturate.
    exact = not products_saturate()
    assert qtrace.verify(exported, converted, _batches(), optimized=exact).passed
    for x in _batches():
        assert np.array_equal(_run(exported, x), converted(mge.Tensor(x)).numpy())
        if form == "QOperator" and not exact:
            continue
        assert np.array_equal(_run(path, x), _run(exported, x))
    names = {name for name, _ in prepared.named_parameters()}
    assert {"stem.conv.weight", "dw.weight", "fc.bias", "mm.weight"} <= names
    if form == "QDQ":  # the file of the other tool itself, op by op
        report = qtrace.verify(path, converted, _batches(), optimized=exact)
        assert report.passed
        most = int(activations == "QUInt16")  # float32 sums of 16 bits depend on their order
        assert all(tally.worst <= most for tally in report.sites["op_by_op"].values())


def test_an_export_comes_back_byte_for_byte(tmp_path: Path) -> None:
    prepared = qtrace.prepare(qtrace.from_onnx(_float_net(tmp_path / "float.onnx")))
    qtrace.calibrate(prepared, _batches(), progress=False)
    first, second = tmp_path / "first.onnx", tmp_path / "second.onnx"
    qtrace.export(qtrace.convert(prepared), first)
    again = qtrace.from_onnx(first)
    qtrace.export(qtrace.convert(again), second)
    assert _parameters(first) == _parameters(second)
    assert sum(_parameters(first).values()) > 20
    assert np.array_equal(_run(first, _batches()[0]), _run(second, _batches()[0]))
    assert [n for n, _ in again.named_parameters()] == [n for n, _ in prepared.named_parameters()]


def test_layers_and_norms_of_tokens_come_back_under_their_names(tmp_path: Path) -> None:
    """A linear layer of tokens is a product and a sum in the file, a norm is pieces, a place two moves."""
    modules = {"norm": M.LayerNorm(8), "qkv": M.Linear(8, 24), "out": M.Linear(8, 4)}

    def forward(self: Any, x: mge.Tensor) -> mge.Tensor:
        parts = F.transpose(F.reshape(self.qkv(self.norm(x)), (-1, 3, 3, 8)), (2, 0, 1, 3))
        return self.out(parts[0] + parts[2])

    x = np.random.default_rng(0).standard_normal((2, 3, 8)).astype(np.float32)
    prepared = qtrace.prepare(qtrace.trace(net(forward, **modules), x))
    qtrace.calibrate(prepared, [x], progress=False)
    first, second = tmp_path / "first.onnx", tmp_path / "second.onnx"
    qtrace.export(qtrace.convert(prepared), first)
    (info,) = onnx.load(first).graph.input
    again = qtrace.from_onnx(first, {info.name: x.shape})
    qtrace.export(qtrace.convert(again), second)
    assert _parameters(first) == _parameters(second)
    assert {n for n, _ in again.named_parameters()} == {n for n, _ in prepared.named_parameters()}
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    runs = [ort.InferenceSession(str(p), options).run(None, {info.name: x}) for p in (first, second)]
    assert all(np.array_equal(a, b) for a, b in zip(*runs, strict=True))


def test_an_imported_module_is_compared_explained_and_trained(tmp_path: Path) -> None:
    from onnxruntime.quantization import QuantFormat, QuantType

    path = _quantize(tmp_path, quant_format=QuantFormat.QDQ, activation_type=QuantType.QUInt8)
    prepared = qtrace.from_onnx(path)
    comparison = qtrace.compare(prepared, _batches())
    # The Relu that onnxruntime leaves out is in the float network, so that little is lost.
    assert comparison.outputs[0].sqnr_db > 20
    assert min(site.sqnr_db for site in comparison.sites if site.site == "r1") > 20
    notes = {note.name: note for note in qtrace.explain(prepared).annotation.notes}
    assert notes["p1"].state == "carried"
    assert notes["a2"].state == "int"
    settings = FinetuneSettings(steps=3)
    assert qtrace.finetune(prepared, _batches(), settings, progress=False).settings.steps == 3
    converted = qtrace.convert(prepared)
    qtrace.export(converted, tmp_path / "trained.onnx")
    assert qtrace.verify(tmp_path / "trained.onnx", converted, _batches()).passed


def _conv(path: Path, pair: tuple[Any, ...], bias_scale: float = 0.002, opset: int = 13) -> Path:
    """A convolution with rounded input (as ``pair`` says), int8 weight and int32 bias."""
    array = numpy_helper.from_array
    stored = [
        *(array(pair[0], "s"), array(pair[1], "z"), array(np.float32(0.1), "ws"), array(np.int8(0), "wz")),
        array(np.arange(-12, 12, dtype=np.int8).reshape(8, 3, 1, 1), "w_quantized"),
        *(array(np.arange(8, dtype=np.int32) * 50 + 7, "b"), array(np.float32(bias_scale), "bs")),
    ]  # fmt: skip
    attributes = pair[2] if len(pair) > 2 else {}
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "s", "z"], ["xi"], name="round_x", **attributes),
        helper.make_node("DequantizeLinear", ["xi", "s", "z"], ["xq"], name="back_x", **attributes),
        helper.make_node("DequantizeLinear", ["w_quantized", "ws", "wz"], ["wq"]),
        helper.make_node("DequantizeLinear", ["b", "bs"], ["bq"]),
        helper.make_node("Conv", ["xq", "wq", "bq"], ["y"]),
    ]
    return _save(path, nodes, stored, 4, opset)


def test_stored_integers_are_kept(tmp_path: Path) -> None:
    scale = np.float32(0.02)
    path = _conv(tmp_path / "a.onnx", (scale, np.uint8(3)), float(scale * np.float32(0.1)))
    qtrace.export(qtrace.convert(qtrace.from_onnx(path)), tmp_path / "b.onnx", weights="int8")
    stored = {t.name: numpy_helper.to_array(t) for t in onnx.load(tmp_path / "b.onnx").graph.initializer}
    integers = {name: array for name, array in stored.items() if name.endswith("_int")}
    (weight,) = (a for a in integers.values() if a.dtype == np.int8)
    (bias,) = (a for a in integers.values() if a.dtype == np.int32)
    assert np.array_equal(weight.reshape(-1), np.arange(-12, 12))
    assert np.array_equal(bias, np.arange(8) * 50 + 7)


def test_a_bias_with_another_scale_is_refused(tmp_path: Path) -> None:
    path = _conv(tmp_path / "a.onnx", (np.float32(0.02), np.uint8(3)), bias_scale=0.0031)
    with pytest.raises(ImportingError, match="b has other integers .* product of the scales"):
        qtrace.from_onnx(path)


def test_roundings_without_an_equal_are_refused_together(tmp_path: Path) -> None:
    scales = np.array([0.02, 0.03, 0.04], np.float32)
    path = _conv(tmp_path / "a.onnx", (scales, np.zeros(3, np.uint8), {"axis": 1}))
    with pytest.raises(ImportingError, match="bias of a layer whose input or weight is not rounded"):
        qtrace.from_onnx(path)
    fp8 = helper.make_tensor("z", TensorProto.FLOAT8E4M3FN, [], [0.0])
    _conv(path, (np.float32(0.02), np.uint8(3)), opset=19)
    model = onnx.load(path)
    for tensor in model.graph.initializer:
        if tensor.name == "z":
            tensor.CopyFrom(fp8)
    more = [helper.make_node("DequantizeLinear", ["w_quantized", "s3"], ["u"], name="later", axis=0)]
    model.graph.node.extend(more)
    model.graph.initializer.append(numpy_helper.from_array(np.full((3,), 0.1, np.float32), "s3"))
    onnx.save(model, path)
    with pytest.raises(ImportingError, match="(?s)'later' has 3 scales"):
        qtrace.from_onnx(path)


def _integer_ends(path: Path, begin: bool, end: bool, operator: bool = False) -> Path:
    """A convolution in 8 bits whose file takes or gives integers, as tools write it for microcontrollers."""
    array = numpy_helper.from_array
    stored = [
        *(array(np.float32(0.02), "s"), array(np.uint8(3), "z"), array(np.float32(0.1), "ws")),
        *(array(np.int8(0), "wz"), array(np.arange(-12, 12, dtype=np.int8).reshape(8, 3, 1, 1), "w")),
    ]
    make = helper.make_node
    nodes = [] if begin else [make("QuantizeLinear", ["x", "s", "z"], ["xi"], name="round_x")]
    first, last = "x" if begin else "xi", "y" if end else "yi"
    if operator:
        nodes += [make("QLinearConv", [first, "s", "z", "w", "ws", "wz", "s", "z"], [last], name="conv")]
    else:
        nodes += [
            make("DequantizeLinear", [first, "s", "z"], ["xq"], name="back_x"),
            make("DequantizeLinear", ["w", "ws", "wz"], ["wq"]),
            make("Conv", ["xq", "wq"], ["c"]),
            make("QuantizeLinear", ["c", "s", "z"], [last], name="round_y"),
        ]
    nodes += [] if end else [make("DequantizeLinear", ["yi", "s", "z"], ["y"], name="back_y")]
    info, kinds = helper.make_tensor_value_info, {True: TensorProto.UINT8, False: TensorProto.FLOAT}
    ends = [info("x", kinds[begin], SHAPE)], [info("y", kinds[end], [None] * 4)]
    model = helper.make_model(
        helper.make_graph(nodes, "net", *ends, stored), opset_imports=[helper.make_opsetid("", 13)]
    )
    model.ir_version = 8
    onnx.save(model, path)
    return path


@pytest.mark.parametrize("operator", [False, True])
def test_integers_at_the_ends_of_a_file(tmp_path: Path, operator: bool) -> None:
    path = _integer_ends(tmp_path / "a.onnx", True, False, operator)  # what reads the integers is kept
    integers = np.random.default_rng(0).integers(0, 255, SHAPE).astype(np.uint8)
    result = qtrace.from_onnx(path)(mge.Tensor(integers)).numpy()
    np.testing.assert_allclose(result, _run(path, integers), rtol=0, atol=1.01 * 0.02)
    path = _integer_ends(tmp_path / "b.onnx", False, True, operator)
    if operator:
        assert qtrace.from_onnx(path)(mge.Tensor(_batches()[0])).dtype == np.uint8
    else:
        with pytest.raises(ImportingError, match="output 'y' is integers: end the file with a Dequantize"):
            qtrace.from_onnx(path)
    path, x = _integer_ends(tmp_path / "c.onnx", False, False, operator), _batches()[0]
    converted = qtrace.convert(qtrace.from_onnx(path))
    step = 0.02  # onnxruntime's integer kernel rounds a half in another way than its float kernel
    np.testing.assert_allclose(converted(mge.Tensor(x)).numpy(), _run(path, x), rtol=0, atol=1.01 * step)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["resnet_basic", "mobilenet_v2_relu6", "yolox", "vit"])
def test_networks_come_back_byte_for_byte(tmp_path: Path, name: str) -> None:
    from tests.zoo.catalog import CNN
    from tests.zoo.detectors.entries import DETECTORS
    from tests.zoo.transformers.entries import TRANSFORMERS

    (entry,) = (entry for entry in (*CNN, *DETECTORS, *TRANSFORMERS) if entry.name == name)
    example: Any = entry.example()
    config = qtrace.load_recipe(entry.recipe).without_placement()
    prepared = qtrace.prepare(qtrace.trace(entry.build(), *map(mge.Tensor, example)), config)
    qtrace.calibrate(prepared, entry.calibration()[:1], progress=False)
    first, second = tmp_path / "first.onnx", tmp_path / "second.onnx"
    qtrace.export(qtrace.convert(prepared), first)
    (info,) = onnx.load(first).graph.input
    again = qtrace.from_onnx(first, {info.name: example[0].shape})
    qtrace.export(qtrace.convert(again), second)
    assert _parameters(first) == _parameters(second)
    sites = {n for n, _ in prepared.named_parameters()}
    assert {n for n, _ in again.named_parameters()} == sites
    feeds = {info.name: example[0]}
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    runs = [ort.InferenceSession(str(p), options).run(None, feeds) for p in (first, second)]
    assert all(np.array_equal(x, y) for x, y in zip(*runs, strict=True))
