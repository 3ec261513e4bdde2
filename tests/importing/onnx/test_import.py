"""`qtrace.from_onnx`: the graph equals the file, keeps its structure, and says what it cannot."""

from __future__ import annotations

import logging

import megengine as mge
import megengine.functional as F
import megengine.module as M
import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper, numpy_helper

import qtrace
from qtrace.data.batches import as_arguments
from qtrace.errors import GraphError, ImportingError
from qtrace.graph import lint
from qtrace.graph.interface import read_interface
from qtrace.graph.opaque import opaque_calls
from qtrace.graph.walk import owner
from qtrace.importing.onnx import control_flow, folding
from qtrace.importing.onnx.ops import moves
from qtrace.onnxfile import model as onnx_model
from tests.each import each_of
from tests.growth import assert_linear, calls_of
from tests.importing.onnx.networks import conv_bn, model, node, save, weights


def run_file(path, feeds):
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return session.run(None, feeds)


def run_graph(net, *arrays):
    result = net(*(mge.Tensor(a.astype(np.int32) if a.dtype == np.int64 else a) for a in arrays))
    return [t.numpy() for t in (result if isinstance(result, (tuple, list)) else [result])]


def check_equal(path, net, feeds, tolerance=1e-5):
    expected = run_file(path, feeds)
    for wanted, got in zip(expected, run_graph(net, *feeds.values()), strict=True):
        assert wanted.shape == got.shape
        np.testing.assert_allclose(got, wanted, rtol=0, atol=tolerance * max(np.abs(wanted).max(), 1e-30))


def test_layers_are_modules_in_a_tree_named_as_in_the_file(tmp_path):
    path = save(conv_bn(), tmp_path)
    net = qtrace.from_onnx(path)
    modules = {name: type(m) for name, m in net.named_modules() if name}
    assert modules["backbone.stage1.conv"] is M.Conv2d
    assert modules["backbone.stage1.bn"] is M.BatchNorm2d
    assert modules["backbone.stage2.conv"] is M.Conv2d
    assert modules["head.fc"] is M.Linear
    assert not lint(net)
    check_equal(path, net, {"image": weights(1, 3, 8, 8)})
    check_equal(path, net, {"image": weights(3, 3, 8, 8)})


def test_an_import_is_saved_loaded_and_quantized(tmp_path):
    path = save(conv_bn(), tmp_path)
    net = qtrace.from_onnx(path)
    qtrace.save(net, tmp_path / "float.mge")
    loaded = qtrace.load(tmp_path / "float.mge")
    x = weights(2, 3, 8, 8)
    np.testing.assert_allclose(run_graph(net, x)[0], run_graph(loaded, x)[0], rtol=1e-6)
    prepared = qtrace.prepare(loaded)
    qtrace.set_phase(prepared, "float")
    np.testing.assert_allclose(run_graph(prepared, x)[0], run_graph(loaded, x)[0], rtol=1e-4)
    qtrace.calibrate(prepared, [weights(2, 3, 8, 8, seed=i) for i in range(3)])
    exported = qtrace.export(qtrace.convert(prepared), tmp_path / "int8.onnx")
    assert qtrace.verify(exported, qtrace.convert(prepared), [x]).passed
    session = onnxruntime.InferenceSession(str(exported))
    assert [i.name for i in session.get_inputs()] == ["image"]
    assert [o.name for o in session.get_outputs()] == ["scores"]


def test_every_parameter_has_a_finite_gradient(tmp_path):
    net = qtrace.from_onnx(save(conv_bn(), tmp_path))
    manager = mge.autodiff.GradManager().attach(net.parameters())
    with manager:
        manager.backward(F.mean(net(mge.Tensor(weights(2, 3, 8, 8))) ** 2))
    for name, parameter in net.named_parameters():
        assert np.isfinite(parameter.grad.numpy()).all(), name
        assert np.abs(parameter.grad.numpy()).max() > 0, name


def test_two_nodes_of_one_weight_call_one_module(tmp_path):
    nodes = [node("Conv", "x conv.weight", "a"), node("Conv", "a conv.weight", "y")]
    proto = model(nodes, {"x": [1, 2, 8, 8]}, stored={"conv.weight": weights(2, 2, 3, 3)})
    net = qtrace.from_onnx(save(proto, tmp_path))
    assert [name for name, _ in net.named_parameters()] == ["conv.weight"]
    check_equal(save(proto, tmp_path), net, {"x": weights(1, 2, 8, 8)})


def test_sizes_from_shapes_keep_the_batch_free(tmp_path):
    """As PyTorch writes `x.view(x.size(0), 4, -1).permute(0, 2, 1)`, with a token for each sample."""
    nodes = [
        node("Shape", "x", "s"),
        node("Gather", "s zero", "n", axis=0),
        node("Unsqueeze", "n axis", "n1"),
        node("Concat", "n1 rest", "target", axis=0),
        node("Reshape", "x target", "r"),
        node("Concat", "n1 token_shape", "expanded", axis=0),
        node("Expand", "token expanded", "t"),
        node("Concat", "t r", "y", axis=1),
    ]
    stored = {
        "zero": np.array(0),
        "axis": np.array([0]),
        "rest": np.array([4, 6]),
        "token_shape": np.array([1, 6]),
        "token": weights(1, 1, 6),
    }
    path = save(model(nodes, {"x": ["n", 2, 3, 4]}, stored=stored), tmp_path)
    net = qtrace.from_onnx(path)
    for batch in (1, 2, 5):
        check_equal(path, net, {"x": weights(batch, 2, 3, 4)})


def test_a_fixed_batch_folds_every_size(tmp_path):
    nodes = [node("Shape", "x", "s"), node("Cast", "s", "f", to=1), node("ReduceProd", "f", "p", keepdims=0),
             node("Div", "x p", "y")]  # fmt: skip
    path = save(model(nodes, {"x": ["n", 4]}), tmp_path)
    net = qtrace.from_onnx(path, {"x": (3, 4)}, batch=None)
    check_equal(path, net, {"x": weights(3, 4)})
    with pytest.raises(ImportingError, match=r"Div 'y' computes with 'p', fractions or a table of sizes"):
        qtrace.from_onnx(path, batch="x:0")


def test_a_batch_that_needs_a_number_is_fixed_and_named(tmp_path, caplog):
    nodes = [node("Reshape", "x t", "y")]
    path = save(model(nodes, {"x": ["n", 4]}, stored={"t": np.array([12])}), tmp_path)
    with caplog.at_level(logging.WARNING, "qtrace"):
        net = qtrace.from_onnx(path, {"x": (3, 4)})
    assert "axis 0 (n) of input x is fixed: Reshape 'y' gives a shape with another number" in caplog.text
    check_equal(path, net, {"x": weights(3, 4)})
    again = onnx.load(qtrace.export(net, tmp_path / "again.onnx"))
    assert [axis.dim_value for axis in again.graph.input[0].type.tensor_type.shape.dim] == [3, 4]
    with pytest.raises(qtrace.QtraceError, match=r"fixes it to .*axis 0 \(n\) of input x is fixed: "):
        as_arguments(weights(2, 4), net)


def test_another_axis_may_be_the_batch(tmp_path):
    path = save(model([node("Transpose", "x", "y", perm=[1, 0])], {"x": [4, "n"]}), tmp_path)
    net = qtrace.from_onnx(path, batch="x:1")
    check_equal(path, net, {"x": weights(4, 7)})


def test_int64_is_carried_as_int32_and_kept_in_the_interface(tmp_path):
    nodes = [node("Add", "i one", "j"), node("Cast", "j", "f", to=1), node("Mul", "f f", "y")]
    proto = model(
        nodes, {"i": [1, 4]}, ["j", "y"], {"one": np.array([1])}, dtypes={"i": np.int64, "j": np.int64}
    )
    path = save(proto, tmp_path)
    net = qtrace.from_onnx(path)
    check_equal(path, net, {"i": np.array([[1, -2, 3, 4]])})
    interface = read_interface(net)
    assert [(t.name, t.dtype) for t in (*interface.inputs, *interface.outputs)] == [
        ("i", "int64"), ("j", "int64"), ("y", "float32"),
    ]  # fmt: skip
    exported = qtrace.export(net, tmp_path / "again.onnx")
    assert np.array_equal(run_file(exported, {"i": np.array([[5, 6, 7, 8]])})[0], [[6, 7, 8, 9]])


def test_numbers_beyond_int32_are_refused_by_name(tmp_path):
    types = {"i": np.int64, "y": np.int64}
    proto = model([node("Add", "i big", "y")], {"i": [2]}, stored={"big": np.array([2**40])}, dtypes=types)
    net = qtrace.from_onnx(save(proto, tmp_path))
    with pytest.raises(GraphError, match=r"Add gives numbers that exceed int32"):
        run_graph(net, np.array([1, 2], np.int32))


@pytest.mark.parametrize(
    ("dtype", "message"),
    [(onnx.TensorProto.COMPLEX64, "input 'x' is complex64, which MegEngine does not compute")],
)
def test_types_that_megengine_has_not_are_refused(tmp_path, dtype, message):
    proto = model([node("Identity", "x", "y")], {"x": [2]})
    for value in (*proto.graph.input, *proto.graph.output):
        value.type.tensor_type.elem_type = dtype
    with pytest.raises(ImportingError, match=message):
        qtrace.from_onnx(save(proto, tmp_path))


@pytest.mark.parametrize("dtype", [np.float16, np.float64], ids=["float16", "float64"])
def test_other_floats_between_casts_are_computed_as_float32(tmp_path, dtype):
    stored = {"conv.weight": weights(2, 2, 1, 1).astype(dtype)}
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    casts = [node("Cast", "x", "h", to=kind), node("Cast", "c", "y", to=onnx.TensorProto.FLOAT)]
    nodes = [casts[0], node("Conv", "h conv.weight", "c"), casts[1]]
    net = qtrace.from_onnx(save(model(nodes, {"x": [1, 2, 4, 4]}, stored=stored), tmp_path))
    x = weights(1, 2, 4, 4)
    expected = np.einsum("oihw,nixy->noxy", stored["conv.weight"].astype(np.float64), x)
    np.testing.assert_allclose(run_graph(net, x)[0], expected, atol=5e-6)


def test_float16_is_computed_as_float32(tmp_path):
    stored = {"conv.weight": weights(2, 2, 1, 1).astype(np.float16)}
    types = {"x": np.float16, "y": np.float16}
    path = save(
        model([node("Conv", "x conv.weight", "y")], {"x": [1, 2, 4, 4]}, stored=stored, dtypes=types),
        tmp_path,
    )
    net = qtrace.from_onnx(path)
    x = weights(1, 2, 4, 4).astype(np.float16)
    np.testing.assert_allclose(
        run_graph(net, x.astype(np.float32))[0], run_file(path, {"x": x})[0], atol=5e-3
    )
    assert read_interface(net).inputs[0].dtype == "float16"


def test_all_nodes_without_an_equal_are_named_at_once(tmp_path):
    nodes = [
        helper.make_node("NonMaxSuppression", ["x"], ["n"], name="nms", domain="own"),
        helper.make_node("Unique", ["x"], ["u"], name="unique", domain="own"),
        node("Relu", "x", "y"),
    ]
    proto = model(nodes, {"x": [4]}, ["n", "u", "y"])
    proto.opset_import.append(helper.make_opsetid("own", 1))
    with pytest.raises(ImportingError) as caught:
        qtrace.from_onnx(save(proto, tmp_path))
    assert "2 nodes have no equal" in str(caught.value)
    assert "own.NonMaxSuppression 'nms'" in str(caught.value)
    assert "own.Unique 'unique'" in str(caught.value)


def test_attributes_without_an_equal_are_kept(tmp_path):
    nodes = [
        node("MaxPool", "x", "a", name="dilated", kernel_shape=[2, 2], dilations=[2, 2]),
        node("Resize", "x _ scales", "b", name="crop", coordinate_transformation_mode="half_pixel_symmetric"),
        node("Relu", "a", "y"),
    ]
    stored = {"scales": np.array([1, 1, 2, 2], np.float32)}
    proto = model(nodes, {"x": [1, 1, 8, 8]}, ["y", "b"], stored)
    path = save(proto, tmp_path)
    net = qtrace.from_onnx(path)
    assert [owner(call).operators for call in opaque_calls(net)] == ["MaxPool", "Resize"]
    check_equal(path, net, {"x": weights(1, 1, 8, 8)})


def branch(op):
    output = helper.make_tensor_value_info(f"{op}_out", 1, None)
    return helper.make_graph([node(op, "x", f"{op}_out")], op, [], [output])


def test_a_branch_on_a_constant_is_taken(tmp_path):
    branches = {"then_branch": branch("Relu"), "else_branch": branch("Neg")}
    nodes = [
        node("Shape", "x", "s"),
        node("Size", "s", "rank"),
        node("Equal", "rank two", "flat"),
        node("If", "flat", "y", **branches),
    ]
    path = save(model(nodes, {"x": [2, 3]}, stored={"two": np.array(2)}), tmp_path)
    check_equal(path, qtrace.from_onnx(path), {"x": weights(2, 3)})
    nodes = [
        node("ReduceMax", "x", "m", keepdims=0),
        node("Cast", "m", "flag", to=9),
        node("If", "flag", "y", name="choice", **branches),
    ]
    path = save(model(nodes, {"x": [2, 3]}), tmp_path)
    for sign in (1, 0):  # of a value that depends on the input, both are kept
        check_equal(path, qtrace.from_onnx(path), {"x": sign * np.abs(weights(2, 3))})


def test_a_loop_of_constant_length_is_written_out(tmp_path):
    value = helper.make_tensor_value_info
    body = helper.make_graph(
        [node("Add", "state step", "next"), node("Identity", "going", "still"), node("Relu", "next", "kept")],
        "body",
        [value("i", 7, []), value("going", 9, []), value("state", 1, [2])],
        [value("still", 9, []), value("next", 1, [2]), value("kept", 1, [2])],
    )
    nodes = [node("Loop", "count going x", "last all", body=body)]
    stored = {"count": np.array(3), "going": np.array(True), "step": weights(2)}
    path = save(model(nodes, {"x": [2]}, ["last", "all"], stored), tmp_path)
    check_equal(path, qtrace.from_onnx(path), {"x": weights(2, seed=4)})


def test_functions_of_the_file_are_inlined(tmp_path):
    function = helper.make_function(
        "local", "Twice", ["a"], ["b"], [node("Add", "a a", "b")], [helper.make_opsetid("", 17)]
    )
    call = helper.make_node("Twice", ["x"], ["y"], domain="local")
    path = save(model([call], {"x": [3]}, functions=[function]), tmp_path)
    check_equal(path, qtrace.from_onnx(path), {"x": weights(3)})


def test_external_data_are_read_from_the_folder(tmp_path):
    proto = model([node("MatMul", "x fc.weight", "y")], {"x": [1, 64]}, stored={"fc.weight": weights(64, 64)})
    onnx.save_model(
        proto, str(tmp_path / "net.onnx"), save_as_external_data=True, location="net.bin", size_threshold=0
    )
    net = qtrace.from_onnx(tmp_path / "net.onnx")
    check_equal(tmp_path / "net.onnx", net, {"x": weights(1, 64)})
    (tmp_path / "net.bin").write_bytes(b"short")
    with pytest.raises(ImportingError, match=r"net\.bin is not whole: net\.onnx needs 16384 bytes of it"):
        qtrace.from_onnx(tmp_path / "net.onnx")
    (tmp_path / "net.bin").unlink()
    with pytest.raises(ImportingError, match=r"net\.bin does not exist: it holds the tensors of net\.onnx"):
        qtrace.from_onnx(tmp_path / "net.onnx")


@each_of("location", ["../secret.bin", "/etc/passwd", "a/../../secret.bin", "link.bin"])
def test_external_data_outside_of_the_folder_are_refused(tmp_path, location):
    folder = tmp_path / "model"
    folder.mkdir()
    (tmp_path / "secret.bin").write_bytes(bytes(16))
    (folder / "link.bin").symlink_to(tmp_path / "secret.bin")
    proto = model([node("Add", "x w", "y")], {"x": [4]}, stored={"w": weights(4)})
    tensor = proto.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = onnx.TensorProto.EXTERNAL
    for key, value in (("location", location), ("offset", "0"), ("length", "16")):
        tensor.external_data.add(key=key, value=value)
    with pytest.raises(ImportingError, match="which is not a file in its own folder"):
        qtrace.from_onnx(save(proto, folder))


def huge_dims(proto):
    proto.graph.initializer[0].dims[:] = [2**40]


def negative_dims(proto):
    proto.graph.initializer[0].dims[:] = [-4]


def cyclic(proto):
    proto.graph.node[0].input[0] = "y"


def unknown_op(proto):
    proto.graph.node[0].op_type = "Nothing"


def other_type(proto):
    proto.graph.initializer[0].data_type = 999


def two_outputs(proto):
    proto.graph.node.add().CopyFrom(proto.graph.node[0])


def old(proto):
    proto.opset_import[0].version = 3


def large_result(proto):
    proto.graph.node.insert(0, node("Expand", "w big", "huge"))
    proto.graph.node[1].input[1] = "huge"
    proto.graph.initializer.add().CopyFrom(numpy_helper.from_array(np.array([10**6, 10**6, 4]), "big"))


def no_output(proto):
    del proto.graph.output[:]


@each_of(
    "edit",
    [huge_dims, negative_dims, cyclic, unknown_op, other_type, two_outputs, old, large_result, no_output],
)
def test_hostile_files_are_refused_in_a_sentence(tmp_path, edit):
    proto = model([node("Add", "x w", "y")], {"x": [4]}, stored={"w": weights(4)})
    edit(proto)
    with pytest.raises(ImportingError) as caught:
        qtrace.from_onnx(save(proto, tmp_path))
    assert "\n" not in str(caught.value)
    assert str(tmp_path) in str(caught.value)


def test_wrong_names_and_shapes_are_refused(tmp_path):
    path = save(model([node("Relu", "x", "y")], {"x": ["n", 3, "h", "w"]}), tmp_path)
    with pytest.raises(ImportingError, match=r"leaves sizes of 'x' \[n, 3, h, w\] open"):
        qtrace.from_onnx(path)
    with pytest.raises(ImportingError, match=r"there is no input 'z'; the inputs are 'x'"):
        qtrace.from_onnx(path, {"z": (1, 3, 4, 4)})
    with pytest.raises(
        ImportingError, match=r"cannot have the shape \[1, 4, 4, 4\]: the file declares \[n, 3, h, w\]"
    ):
        qtrace.from_onnx(path, {"x": (1, 4, 4, 4)})
    for shape in (["n", 3, "h", "w"], (1, 3, None, 4), "1x3x4x4", 4, (1, 3, 4.5, 4)):
        with pytest.raises(
            ImportingError, match=r"the shape of input 'x' is a sequence of whole numbers, not "
        ):
            qtrace.from_onnx(path, {"x": shape})
    with pytest.raises(ImportingError, match=r"batch='q:0' names no axis of an input: write it as 'x:0'"):
        qtrace.from_onnx(path, {"x": (1, 3, 4, 4)}, batch="q:0")
    with pytest.raises(ImportingError, match="is not a file"):
        qtrace.from_onnx(tmp_path / "missing.onnx")
    (tmp_path / "text.onnx").write_text("no model")
    with pytest.raises(ImportingError, match="is not an ONNX file|not a valid ONNX model"):
        qtrace.from_onnx(tmp_path / "text.onnx")


@pytest.mark.parametrize("order", ["product bias", "bias product"])
def test_a_product_and_a_sum_are_one_linear_layer(tmp_path, order):
    stored = {"fc.weight": weights(4, 3), "fc.bias": weights(3)}
    inputs = order.replace("bias", "fc.bias")
    nodes = [node("MatMul", "x fc.weight", "product"), node("Add", inputs, "y")]
    path = save(model(nodes, {"x": [2, 5, 4]}, stored=stored), tmp_path)
    net = qtrace.from_onnx(path)
    assert type(net.fc) is M.Linear
    assert sorted(name for name, _ in net.named_parameters()) == ["fc.bias", "fc.weight"]
    check_equal(path, net, {"x": weights(2, 5, 4)})
    shared = save(
        model([*nodes, node("Relu", "product", "z")], {"x": [2, 5, 4]}, ["y", "z"], stored), tmp_path
    )
    check_equal(shared, qtrace.from_onnx(shared), {"x": weights(2, 5, 4)})


@pytest.mark.parametrize("dtype", [np.float16, np.float64], ids=["float16", "float64"])
def test_a_type_lasts_through_a_linear_layer(tmp_path, dtype):
    """With its bias it became float32, which the next constant did not fit: the file was refused."""
    nodes = [node("MatMul", "x w", "m"), node("Add", "m b", "h"), node("Div", "h two", "y")]
    arrays = {"w": weights(4, 4), "b": weights(4), "two": np.array(2)}
    stored = {name: array.astype(dtype) for name, array in arrays.items()}
    proto = model(nodes, {"x": ["N", 3, 4]}, stored=stored, dtypes={"x": dtype, "y": dtype})
    net = qtrace.from_onnx(save(proto, tmp_path), {"x": (1, 3, 4)})
    x = weights(2, 3, 4).astype(dtype)
    expected = (x.astype(np.float64) @ stored["w"] + stored["b"]) / 2
    np.testing.assert_allclose(net(mge.Tensor(x.astype(np.float32))).numpy(), expected, atol=1e-5)
    assert read_interface(net).outputs[0].dtype == np.dtype(dtype).name


@each_of("opset", [12, 14, 16])
def test_a_normalization_that_onnxruntime_has_fused_is_read(tmp_path, opset):
    """Its optimizer writes LayerNormalization into files whose opset has no such op."""
    nodes = [
        node("MatMul", "x w", "m"),
        node("LayerNormalization", "m scale bias", "y", epsilon=1e-5),
    ]
    stored = {"w": weights(8, 6), "scale": weights(6), "bias": weights(6)}
    proto = model(nodes, {"x": ["N", 8]}, ["y"], stored, opset=opset)
    path = save(proto, tmp_path)
    net = qtrace.from_onnx(path)
    assert any(isinstance(module, M.LayerNorm) for module in net.modules())
    check_equal(path, net, {"x": weights(4, 8)})
    proto.graph.node[1].op_type = "GroupNormalization"  # of opset 18, which onnxruntime has not before
    with pytest.raises(ImportingError, match="not a valid ONNX model"):
        qtrace.from_onnx(save(proto, tmp_path))


TIED = {
    "look-up, then product": [
        node("Gather", "e ids", "rows"),
        node("Transpose", "e", "t", perm=[1, 0]),
        node("MatMul", "rows t", "y"),
    ],
    "look-up, then Gemm": [
        node("Gather", "e ids", "rows"),
        node("ReduceMean", "rows", "mean", axes=[1], keepdims=0),
        node("Gemm", "mean e", "y", transB=1),
    ],
    "product, then look-up": [
        node("Gather", "f ids", "rows"),
        node("MatMul", "rows e", "scores"),
        node("ArgMax", "scores", "best", axis=2, keepdims=0),
        node("Transpose", "e", "t", perm=[1, 0]),
        node("Gather", "t best", "y"),
    ],
    "look-up, then a part": [
        node("Gather", "e ids", "rows"),
        node("Slice", "e zero two", "part"),
        node("Add", "rows part", "y"),
    ],
    "copy of another name": [
        node("Identity", "e", "copy"),
        node("Gather", "e ids", "rows"),
        node("ReduceMean", "rows", "mean", axes=[1], keepdims=0),
        node("Gemm", "mean copy", "y", transB=1),
    ],
}


@each_of("form", TIED)
def test_one_initializer_is_one_parameter_and_one_tensor_of_the_files(form, tmp_path):
    nodes = TIED[form]
    stored = {"e": weights(48, 48), "f": weights(48, 48, seed=1), "zero": np.zeros(1, np.int64)}
    stored |= {"two": np.full(1, 2)}
    read = {name for part in nodes for name in part.input}
    stored = {name: array for name, array in stored.items() if name in read}
    proto = model(nodes, {"ids": ["n", 2]}, stored=stored, opset=13, dtypes={"ids": np.int64})
    path, ids = save(proto, tmp_path), np.array([[0, 3], [39, 5], [7, 7]])
    count = sum(array.size > 1000 for array in stored.values())
    net = qtrace.from_onnx(path, {"ids": ids.shape})
    check_equal(path, net, {"ids": ids})
    assert sum(int(np.prod(p.shape)) > 1000 for p in net.parameters()) == count
    layers = any(part.op_type in ("MatMul", "Gemm") for part in nodes)
    for recipe in (None, "w8", "int8") if layers else (None,):
        file = tmp_path / f"{recipe}.onnx"
        written = net if recipe is None else qtrace.prepare(net, qtrace.load_recipe(recipe))
        if recipe is not None:
            written = qtrace.convert(qtrace.calibrate(written, [ids.astype(np.int32)], progress=False))
        qtrace.export(written, file)
        assert sum(np.prod(t.dims) > 1000 for t in onnx.load(file).graph.initializer) == count
        expected, result = (run_file(name, {"ids": ids})[0] for name in (path, file))
        if form != "product, then look-up" or recipe is None:  # close scores change places
            assert np.abs(result - expected).max() < 0.06 * np.abs(expected).max()


def test_layers_of_several_forms_share_a_kernel(tmp_path):
    nodes = [
        node("Conv", "x w", "a", pads=[1, 1, 1, 1]),
        node("Conv", "x w", "b", pads=[2, 2, 2, 2], dilations=[2, 2]),
        node("Add", "a b", "c"),
        node("ConvTranspose", "c w", "y"),
    ]
    path = save(model(nodes, {"x": [2, 4, 9, 9]}, stored={"w": weights(4, 4, 3, 3)}), tmp_path)
    net = qtrace.from_onnx(path)
    check_equal(path, net, {"x": weights(2, 4, 9, 9)})
    assert [tuple(p.shape) for p in net.parameters()] == [(4, 4, 3, 3)]


def nested_functions(levels: int) -> onnx.ModelProto:
    """A chain of functions each of which calls the next one twice."""
    functions = []
    for level in range(levels):
        op, domain = (f"f{level + 1}", "f") if level + 1 < levels else ("Relu", "")
        parts = [helper.make_node(op, [a], [b], domain=domain) for a, b in ("at", "tb")]
        opsets = [helper.make_opsetid("", 17), helper.make_opsetid("f", 1)]
        functions.append(helper.make_function("f", f"f{level}", ["a"], ["b"], parts, opsets))
    ends = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["n", 4]) for name in "xy"]
    call = helper.make_node("f0", ["x"], ["y"], domain="f")
    graph = helper.make_graph([call], "net", ends[:1], ends[1:])
    return helper.make_model(graph, functions=functions, opset_imports=opsets, ir_version=8)


def nested_loops(depth: int, trips: int, end: str = "") -> list[onnx.NodeProto]:
    """Loops inside of each other, each of which runs ``trips`` times."""
    inside = [helper.make_node("Relu", [f"in{end}n"], [f"out{end}n"])]
    if depth > 1:
        inside = nested_loops(depth - 1, trips, f"{end}n")
    values = ((f"k{end}", onnx.TensorProto.INT64, []), (f"go{end}", onnx.TensorProto.BOOL, []))
    inputs = [helper.make_tensor_value_info(*value) for value in values]
    state = helper.make_tensor_value_info(f"in{end}n", onnx.TensorProto.FLOAT, None)
    results = [
        helper.make_tensor_value_info(f"still{end}", onnx.TensorProto.BOOL, []),
        helper.make_tensor_value_info(f"out{end}n", onnx.TensorProto.FLOAT, None),
    ]
    again = helper.make_node("Identity", [f"go{end}"], [f"still{end}"])
    body = helper.make_graph([again, *inside], f"body{end}", [*inputs, state], results)
    count = helper.make_node("Constant", [], [f"trips{end}"], value=numpy_helper.from_array(np.array(trips)))
    return [count, helper.make_node("Loop", [f"trips{end}", "", f"in{end}"], [f"out{end}"], body=body)]


@pytest.mark.parametrize("levels", [15, 34])
def test_nodes_are_counted_before_functions_are_inlined(tmp_path, levels):
    path = tmp_path / "functions.onnx"
    onnx.save(nested_functions(levels), path)
    with pytest.raises(ImportingError, match=r"more than 50,000 nodes|nested more than 16 deep"):
        qtrace.from_onnx(path)


def test_a_recursive_function_is_refused(tmp_path):
    file = nested_functions(2)
    file.functions[1].node[0].op_type, file.functions[1].node[0].domain = "f0", "f"
    onnx.save(file, tmp_path / "net.onnx")
    with pytest.raises(ImportingError, match="nested more than 16 deep"):
        qtrace.from_onnx(tmp_path / "net.onnx")


def test_loops_share_one_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(control_flow, "_MAX_WRITTEN", 100)
    monkeypatch.setattr(control_flow, "MAX_NODES", 200)
    ends = {"inputs": {"in": (1, 4)}, "outputs": ["out"]}
    net = qtrace.from_onnx(save(model(nested_loops(1, 30), **ends), tmp_path, "short.onnx"))
    assert not opaque_calls(net)
    net = qtrace.from_onnx(save(model(nested_loops(1, 60), **ends), tmp_path, "kept.onnx"))
    assert len(opaque_calls(net)) == 1
    for depth, trips in ((2, 10), (1, 10**9)):
        path = save(model(nested_loops(depth, trips), **ends), tmp_path, "long.onnx")
        with pytest.raises(ImportingError, match="its loops run more than 200 nodes: shorten or cut them"):
            qtrace.from_onnx(path)


def test_constants_that_a_file_computes_share_one_limit(tmp_path, monkeypatch):
    """What grows counts, over all nodes; what only moves or converts numbers does not."""
    monkeypatch.setattr(folding, "_MAX_STORED", 100)
    stored = {"c": np.ones(40, np.float32), "two": np.array([2])}
    moved = [node("Neg", end, f"{end}n") for end in ("c", "cn", "cnn", "cnnn")]
    for nodes, fits in (
        ([*moved, node("Tile", "cnnnn two", "t")], True),
        ([node("Concat", "c c", "u", axis=0), node("Concat", "u u", "t", axis=0)], False),
        ([node("Tile", "c two", f"t{i}") for i in range(3)] + [node("Identity", "t2", "t")], False),
    ):
        nodes += [node("ReduceSum", "t", "k", keepdims=0), node("Add", "x k", "y")]
        path = save(model(nodes, {"x": ["n", 4]}, stored=stored), tmp_path)
        if fits:
            check_equal(path, qtrace.from_onnx(path), {"x": np.ones((2, 4), np.float32)})
            continue
        with pytest.raises(
            ImportingError, match=r"constant of the shape \[\d+\], more than qtrace stores\.$"
        ):
            qtrace.from_onnx(path)


@pytest.mark.parametrize("count", ["", "most"])
def test_a_loop_that_values_end_has_a_limit(tmp_path, monkeypatch, count):
    monkeypatch.setattr(onnx_model, "MAX_NODES", 20)
    make, infos = helper.make_node, helper.make_tensor_value_info
    body = helper.make_graph(
        [
            make("Add", ["s", "c"], ["s2"]),
            make("ReduceMax", ["s2"], ["m"], keepdims=0),
            make("Less", ["m", "end"], ["go2"]),
        ],
        "body",
        [infos("i", 7, []), infos("go", 9, []), infos("s", 1, None)],
        [infos("go2", 9, []), infos("s2", 1, None)],
    )
    nodes = [node("Abs", "x", "c"), make("Loop", [count, "always", "c"], ["y"], body=body)]
    nodes.insert(0, make("Size", ["x"], ["most0"]))
    nodes.insert(1, make("Mul", ["most0", "many"], ["most"]))
    stored = {"always": np.array(True), "end": np.float32(9), "many": np.array(10**9)}
    path = save(model(nodes, {"x": ["n", "w"]}, stored=stored), tmp_path)
    net = qtrace.from_onnx(path, {"x": (1, 4)})
    check_equal(path, net, {"x": np.ones((2, 6), np.float32)})
    with pytest.raises(GraphError, match="Loop: its loops run more than 20 times with these values"):
        net(mge.Tensor(np.zeros((2, 6), np.float32)))


def wide(kind: str, size: int) -> dict:
    """A node with many inputs or outputs."""
    names = [f"v{i}" for i in range(size)]
    column = dict.fromkeys(names, (2, 1))
    split = helper.make_node("Split", ["x"], names, axis=1)
    total, doubled = (helper.make_node("Sum", read, ["y"]) for read in (names, ["x"] * size))
    joined = helper.make_node("Concat", names, ["y"], axis=1)
    return {
        "inputs": {"nodes": [total], "inputs": column, "outputs": ["y"]},
        "repeated": {"nodes": [doubled], "inputs": {"x": (2, 1)}, "outputs": ["y"]},
        "joined": {"nodes": [joined], "inputs": column, "outputs": ["y"]},
        "outputs": {"nodes": [split], "inputs": {"x": (2, size)}, "outputs": names},
    }[kind]


@each_of("kind", ["inputs", "repeated", "joined", "outputs"])
def test_work_is_linear_in_the_values_of_a_node(tmp_path, kind):
    paths = {n: save(model(opset=11, **wide(kind, n)), tmp_path, f"{n}.onnx") for n in (100, 400)}
    qtrace.from_onnx(paths[100])
    assert_linear({n: calls_of(lambda p=path: qtrace.from_onnx(p)) for n, path in paths.items()})


def test_an_uneven_split_into_many_parts_is_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(moves, "_MAX_SECTIONS", 3)
    for sizes, kept in (([1, 1, 2], 0), ([1, 1, 1, 2], 1), ([2] * 5, 0)):
        names = [f"v{i}" for i in range(len(sizes))]
        split = helper.make_node("Split", ["x"], names, axis=1, split=sizes)
        path = save(model([split], {"x": (2, sum(sizes))}, names, opset=11), tmp_path)
        net = qtrace.from_onnx(path)
        assert len(opaque_calls(net)) == kept
        check_equal(path, net, {"x": weights(2, sum(sizes))})
