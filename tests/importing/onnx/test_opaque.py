"""Nodes without an equal in MegEngine: they come in as they are in the file, and go out so."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import megengine as mge
import numpy as np
import onnx
import pytest
from megengine.jit import trace as jit_trace
from onnx import ModelProto, TensorProto, helper, numpy_helper

import qtrace
from qtrace.errors import GraphError, ImportingError, QtraceError, QtraceWarning
from qtrace.graph.opaque import OpaqueOp, opaque_calls, say_stopped_gradients
from qtrace.graph.types import TracedModule
from qtrace.onnxfile.fragment import check_fragment
from qtrace.onnxfile.local_session import SessionSettings
from qtrace.onnxfile.model import captured_names, rename_tensors
from qtrace.onnxfile.sessions import open_session
from tests.each import each_of
from tests.importing.onnx import networks, opaque_flows, opaque_layers
from tests.importing.onnx.opaque_net import SHAPE, Net

FORMS = {**opaque_layers.FORMS, **opaque_flows.FORMS}
# Forms that MegEngine has: nothing is kept.
MAIN = (
    *("gru_reset", "lstm_activations", "map_ms_gelu", "map_resize_nearest_half_pixel", "roialign_avg"),
    *("if_captured", "loop_while", "loop_of_collected", "scan", "nonzero_output", "nonzero_sum", "nms_all"),
    *("sequence", "optional", "ml_labels", "integers", "function_call", "topk_computed"),
    *("maxpool_indices", "two_behind_one"),
)


def run_file(path: Path, x: np.ndarray) -> list[np.ndarray]:
    return open_session(path, SessionSettings(optimize=False, threads=1)).run(None, {"x": x})


def run_graph(net: TracedModule, x: np.ndarray) -> list[np.ndarray]:
    results = net(mge.Tensor(x))
    return [t.numpy() for t in (results if isinstance(results, (tuple, list)) else [results])]


def assert_equal(results: list[np.ndarray], expected: list[np.ndarray]) -> None:
    for result, value in zip(results, expected, strict=True):
        assert result.shape == value.shape
        bound = 1e-4 * max(1.0, float(np.abs(value).max(initial=0)))
        np.testing.assert_allclose(result, value, rtol=0, atol=bound)


def batch(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(SHAPE).astype(np.float32)


def save(model: ModelProto, path: Path) -> Path:
    onnx.save(model, path)
    return path


@pytest.mark.quick(3)
@pytest.mark.parametrize("name", MAIN)
def test_opaque_node_survives_import_and_export(name: str, tmp_path: Path) -> None:
    """The graph, and the file that it is exported to, give what the file gives, for other values, too."""
    path = save(FORMS[name](), tmp_path / "net.onnx")
    net = qtrace.from_onnx(path)
    assert opaque_calls(net)
    out = qtrace.export(net, tmp_path / "out.onnx")
    for seed in (0, 1):
        expected = run_file(path, batch(seed))
        assert_equal(run_graph(net, batch(seed)), expected)
        assert_equal(run_file(Path(out), batch(seed)), expected)
    assert not qtrace.graph.lint(net)


# onnxruntime moves a transposition behind this Resize and then refuses it: see docs/reference/traps.md.
_NOT_LOADED = {"map_resize_cubic_outside"}
_QUANTIZED = sorted(set(FORMS) - _NOT_LOADED)
_SAMPLED = _QUANTIZED[::8]
# Sizes that integers decide, and a node that onnxruntime refuses between roundings.
_QUICK = (
    "convtranspose_output_shape",
    "loop_of_collected",
    "map_averagepool_dilated",
    "random_crop_of_sizes",
    "topk_computed",
)


def _marks(name: str) -> tuple[Any, ...]:
    if name in _QUICK:
        return ()
    return (pytest.mark.slow if name in _SAMPLED else pytest.mark.long,)


@pytest.mark.parametrize("name", [pytest.param(n, marks=_marks(n)) for n in _QUANTIZED])
def test_all_forms_are_quantized_and_verified(name: str, tmp_path: Path) -> None:
    path = save(FORMS[name](), tmp_path / "net.onnx")
    expected = run_file(path, batch(9))
    net = qtrace.from_onnx(path)
    assert_equal(run_graph(net, batch(9)), expected)
    data = [{"x": batch(seed)} for seed in range(2)]
    result = qtrace.quantize(path, data, tmp_path / "int8.onnx", allow_broken=True, progress=False)
    assert result.verify is not None
    assert result.verify.passed
    open_session(tmp_path / "int8.onnx").run(None, {"x": batch(9)})


def crnn(rows: int | str = "N") -> ModelProto:
    """A network of a convolution, an LSTM and a linear layer; a clip keeps the LSTM as it is in the file."""
    net = Net()
    net.nodes[0].name = "stem/Conv"
    steps = net.add(
        "Transpose", [net.add("ReduceMean", [net.features], axes=[2], keepdims=0)], perm=[2, 0, 1]
    )
    weights = [net.weights(2, 24, 4), net.weights(2, 24, 6), net.weights(2, 48)]
    attributes: dict[str, Any] = {"hidden_size": 6, "direction": "bidirectional", "clip": 100.0}
    every = net.add("LSTM", [steps, *weights], 3, **attributes)[0]
    net.nodes[-1].output[1:] = ["", ""]
    merged = net.add("Reshape", [net.add("Transpose", [every], perm=[2, 0, 1, 3]), net.ints(0, 8, 12)])
    model = net.model(net.linear(merged, 12))
    if rows != SHAPE[0]:
        axis = model.graph.input[0].type.tensor_type.shape.dim[0]
        axis.Clear()
        axis.dim_param = str(rows)
    return model


def test_recurrent_layers_stay_in_float_and_the_rest_is_quantized(tmp_path: Path) -> None:
    path = save(crnn(), tmp_path / "crnn.onnx")
    data = [{"x": batch(seed)} for seed in range(3)]
    result = qtrace.quantize(path, data, tmp_path / "int8.onnx", progress=False)
    assert result.verify is not None
    assert result.verify.passed
    text = str(qtrace.explain(result.prepared))
    assert "opaque" in text
    assert "kept" in text
    own, written = (
        next(node for node in onnx.load(p).graph.node if node.op_type == "LSTM")
        for p in (path, tmp_path / "int8.onnx")
    )
    assert written.name == own.name
    assert list(written.attribute) == list(own.attribute)
    kinds = [node.op_type for node in onnx.load(tmp_path / "int8.onnx").graph.node]
    assert "QuantizeLinear" in kinds
    x = np.concatenate([batch(5), batch(6)])
    floats, integers = run_file(path, x)[0], run_file(tmp_path / "int8.onnx", x)[0]
    assert np.square(floats).sum() > 1000 * np.square(floats - integers).sum()


def test_the_batch_stays_open(tmp_path: Path) -> None:
    net = qtrace.from_onnx(save(crnn(), tmp_path / "crnn.onnx"))
    (call,) = opaque_calls(net)
    assert tuple(call.outputs[0].shape) == (8, 2, 1, 6)
    x = np.concatenate([batch(1), batch(2)])
    assert_equal(run_graph(net, x), run_file(tmp_path / "crnn.onnx", x))
    infos = onnx.load(qtrace.export(net, tmp_path / "out.onnx")).graph.output
    assert infos[0].type.tensor_type.shape.dim[0].dim_param == "N"


def test_export_copies_the_node_unchanged(tmp_path: Path) -> None:
    path = save(opaque_flows.FORMS["if_captured"](), tmp_path / "net.onnx")
    written = onnx.load(qtrace.export(qtrace.from_onnx(path), tmp_path / "out.onnx"))
    own, copied = (
        next(n for n in model.graph.node if n.op_type == "If") for model in (onnx.load(path), written)
    )
    names = {a: b for a, b in zip(captured_names(own), captured_names(copied), strict=True) if a != b}
    for old, new in ((own.input, copied.input), (own.output, copied.output)):
        names |= dict(zip(old, new, strict=True))
    rename_tensors(own, names)
    own.name = copied.name
    assert own == copied
    again = qtrace.from_onnx(tmp_path / "out.onnx")
    assert_equal(run_graph(again, batch(0)), run_file(path, batch(0)))


def test_nodes_that_several_values_share_are_written_once(tmp_path: Path) -> None:
    path = save(opaque_flows.FORMS["two_behind_one"](), tmp_path / "net.onnx")
    written = onnx.load(qtrace.export(qtrace.from_onnx(path), tmp_path / "out.onnx"))
    assert [node.op_type for node in written.graph.node].count("NonZero") == 1


def test_a_shape_that_values_decide_is_not_recorded(tmp_path: Path) -> None:
    net = qtrace.from_onnx(save(opaque_flows.FORMS["nonzero_output"](), tmp_path / "net.onnx"))
    assert net.graph.outputs[1].shape is None
    written = onnx.load(qtrace.export(net, tmp_path / "out.onnx"))
    assert all(axis.dim_param for axis in written.graph.output[1].type.tensor_type.shape.dim)


def test_the_safe_loader_reads_it(tmp_path: Path) -> None:
    net = qtrace.from_onnx(save(crnn(), tmp_path / "crnn.onnx"))
    assert run_graph(net, batch(0))  # the session is no part of the file
    qtrace.save(net, tmp_path / "net.mge")
    assert_equal(run_graph(qtrace.load(tmp_path / "net.mge"), batch(0)), run_graph(net, batch(0)))


def _external(model: ModelProto) -> None:
    tensor = model.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="/etc/passwd")


def test_the_safe_loader_refuses_what_is_no_model(tmp_path: Path) -> None:
    net = qtrace.from_onnx(save(crnn(), tmp_path / "crnn.onnx"))
    (op,) = [module for module in net.modules() if isinstance(module, OpaqueOp)]
    model = onnx.ModelProto.FromString(op.model)
    _external(model)
    unknown = onnx.ModelProto.FromString(op.model)
    unknown.graph.node[0].op_type = "Nothing"
    wrong = (b"no model", b"", model.SerializeToString(), unknown.SerializeToString(), "text")
    for value in wrong:
        op.model = value
        qtrace.save(net, tmp_path / "bad.mge")
        with pytest.raises(QtraceError, match="lstm"):
            qtrace.load(tmp_path / "bad.mge")
    assert check_fragment(model.SerializeToString()) == "reads tensors of another file"


def test_the_safe_loader_refuses_functions() -> None:
    """A function may hold tensors of other files, in its own Constant nodes; no import writes functions."""
    tensor = TensorProto(name="k", data_type=TensorProto.FLOAT, dims=[4])
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="secret.bin")
    nodes = [
        helper.make_node("Constant", [], ["k"], value=tensor),
        helper.make_node("Add", ["a", "k"], ["b"]),
    ]
    function = helper.make_function("own", "F", ["a"], ["b"], nodes, [helper.make_opsetid("", 17)])
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [4]) for name in "xy"]
    graph = helper.make_graph([helper.make_node("F", ["x"], ["y"], domain="own")], "g", ends[:1], ends[1:])
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("own", 1)]
    model = helper.make_model(graph, opset_imports=opsets, functions=[function], ir_version=8)
    assert check_fragment(model.SerializeToString()) == "defines functions"


def test_training_warns_that_gradients_stop_at_opaque_nodes(tmp_path: Path) -> None:
    net = qtrace.from_onnx(save(crnn(), tmp_path / "crnn.onnx"))
    prepared = qtrace.prepare(net)
    qtrace.calibrate(prepared, [batch(0), batch(1)])
    with pytest.warns(QtraceWarning, match="no gradient passes"):
        qtrace.set_phase(prepared, "train")
    gradients = mge.autodiff.GradManager().attach(list(prepared.parameters()))
    with gradients, warnings.catch_warnings():
        warnings.simplefilter("error", QtraceWarning)  # it is said once
        gradients.backward((prepared(mge.Tensor(batch(0))) ** 2).mean())
    weights = {n: p.grad is not None for n, p in prepared.named_parameters() if n.endswith(".weight")}
    assert sorted(weights.values()) == [False, True]


@pytest.mark.parametrize("training", [True, False])
def test_plain_training_says_that_gradients_stop(tmp_path: Path, training: bool) -> None:
    net = qtrace.from_onnx(save(crnn(), tmp_path / "crnn.onnx"))
    net.train(training)
    x, parameters = mge.Tensor(batch(0)), list(net.parameters())
    with warnings.catch_warnings():
        warnings.simplefilter("error", QtraceWarning)
        net(x)  # no gradient is recorded
        gradients = mge.autodiff.GradManager().attach(parameters)
        net(x)
    with gradients, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        gradients.backward(net(x).sum() + net(x).sum())
    assert [w.filename for w in caught if "no gradient passes" in str(w.message)] == [__file__]
    behind = [n for n, p in net.named_parameters() if p.grad is not None]
    assert 0 < len(behind) < len(parameters)
    again = qtrace.from_onnx(tmp_path / "crnn.onnx")
    gradients = mge.autodiff.GradManager().attach([p for n, p in again.named_parameters() if n in behind])
    with gradients, warnings.catch_warnings():
        warnings.simplefilter("error", QtraceWarning)  # no gradient would have to pass
        gradients.backward(again(x).sum())


def test_nothing_is_said_without_parameters_before_it(tmp_path: Path) -> None:
    net = Net()
    net.nodes.clear()
    net.stored.clear()
    y = net.add("Celu", ["x"])
    crop = net.add("Resize", [y, "", "", net.ints(2, 3, 5, 5)], mode="nearest", nearest_mode="ceil")
    model = net.model(net.conv(crop, 3))
    module = qtrace.from_onnx(save(model, tmp_path / "net.onnx"))
    assert opaque_calls(module)
    assert not say_stopped_gradients(module)


def test_jit_trace_is_refused(tmp_path: Path) -> None:
    net = qtrace.from_onnx(save(crnn(), tmp_path / "crnn.onnx"))
    with pytest.raises(GraphError, match=r"LSTM is run by onnxruntime, which jit\.trace cannot capture"):
        jit_trace(lambda x: net(x))(mge.Tensor(batch(0)))


def test_other_formats_refuse_opaque_nodes_by_name(tmp_path: Path) -> None:
    net = Net()
    y = net.add("Resize", [net.features, "", "", net.ints(2, 4, 5, 5)], mode="nearest", nearest_mode="ceil")
    module = qtrace.from_onnx(save(net.model(y), tmp_path / "net.onnx"))
    for name in ("net.tflite", "net.param"):
        with pytest.raises(QtraceError, match="cannot become (TFLite|ncnn)"):
            qtrace.export(module, tmp_path / name)


def test_what_onnxruntime_cannot_run_is_one_sentence(tmp_path: Path) -> None:
    net = Net()
    path = save(net.model(net.add("Frobnicate", [net.features], domain="own.ops")), tmp_path / "net.onnx")
    with pytest.raises(ImportingError, match=r"own\.ops\.Frobnicate .*has no equal.*refused by onnxruntime"):
        qtrace.from_onnx(path)


def test_a_form_of_an_older_opset_is_converted_or_refused(tmp_path: Path) -> None:
    net = Net(11)
    sizes = net.ints(2, 4, 5, 5)
    empty = net.constant(np.zeros(0, np.float32))
    y = net.add("Resize", [net.features, empty, empty, sizes], mode="nearest", nearest_mode="ceil")
    path = save(net.model(y), tmp_path / "net.onnx")
    module = qtrace.from_onnx(path)
    written = qtrace.export(module, tmp_path / "out.onnx")
    assert_equal(run_file(Path(written), batch(0)), run_file(path, batch(0)))
    net = Net(18)
    y = net.add("Resize", [net.features, "", "", net.ints(2, 4, 5, 5)], mode="linear", antialias=1)
    newer = qtrace.from_onnx(save(net.model(y), tmp_path / "newer.onnx"))
    with pytest.raises(QtraceError, match="opset"):
        qtrace.export(newer, tmp_path / "old.onnx", opset=17)


@each_of("name", ["rows_rotary", "rows_rotary_interleaved", "rows_rmsnorm"])
def test_an_op_that_onnx_writes_by_others_is_not_kept(name: str, tmp_path: Path) -> None:
    path = save(FORMS[name](), tmp_path / "net.onnx")
    net = qtrace.from_onnx(path)
    assert not opaque_calls(net)
    assert_equal(run_graph(net, batch(0)), run_file(path, batch(0)))


def test_a_form_is_converted_to_the_opset_that_integers_need(tmp_path: Path) -> None:
    """Integers of 16 bits need opset 21, in which Resize is another than in the file's 18."""
    net = Net(18)
    mode = {"mode": "linear", "coordinate_transformation_mode": "half_pixel", "antialias": 1}
    y = net.add("Resize", [net.features, "", "", net.ints(2, 4, 5, 5)], **mode)
    module = qtrace.from_onnx(save(net.model(net.conv(y)), tmp_path / "net.onnx"))
    prepared = qtrace.prepare(module, {"activation": {"bits": 16}}, progress=False)
    qtrace.calibrate(prepared, [batch(0)], progress=False)
    converted = qtrace.convert(prepared)
    written = qtrace.export(converted, tmp_path / "out.onnx")
    assert onnx.load(written).opset_import[0].version == 21
    assert_equal(run_file(Path(written), batch(0)), [converted(mge.Tensor(batch(0))).numpy()])
    with pytest.raises(QtraceError, match="opset=18"):
        qtrace.export(converted, tmp_path / "old.onnx", opset=18)


def test_a_product_that_a_branch_reads_is_not_joined(tmp_path: Path) -> None:
    """A product behind which a sum stands, and that the body of an If reads, too."""
    net = Net()
    product = net.linear(net.rows(net.features), 32)
    total = net.add("Add", [product, net.weights(5)])
    branch = helper.make_graph(
        [helper.make_node("Relu", [product], ["r"])],
        "branch",
        [],
        [helper.make_tensor_value_info("r", TensorProto.FLOAT, None)],
    )
    large = net.add("Greater", [net.add("ReduceSum", [total], keepdims=0), net.constant(np.float32(0))])
    y = net.add("If", [large], then_branch=branch, else_branch=branch)
    path = save(net.model(y, total), tmp_path / "net.onnx")
    assert_equal(run_graph(qtrace.from_onnx(path), batch(0)), run_file(path, batch(0)))


def test_names_of_bodies_do_not_clash() -> None:
    """A tensor of a body keeps its meaning where one outside gets its name."""
    nodes = [helper.make_node("Neg", ["outer"], ["own"]), helper.make_node("Add", ["own", "outer"], ["r"])]
    body = helper.make_graph(nodes, "b", [], [helper.make_tensor_value_info("r", TensorProto.FLOAT, None)])
    node = helper.make_node("If", ["c"], ["y"], then_branch=body, else_branch=body)
    rename_tensors(node, {"outer": "own"})
    assert captured_names(node) == ["own"]
    inner = node.attribute[0].g.node
    assert inner[0].input[0] == "own"
    assert inner[0].output[0] != "own"
    assert list(inner[1].input) == [inner[0].output[0], "own"]


def test_a_copy_is_a_graph_of_its_own(tmp_path: Path) -> None:
    net = qtrace.from_onnx(save(crnn(), tmp_path / "crnn.onnx"))
    source = qtrace.graph.to_source(net)
    assert "OpaqueOp" in str(source)
    with warnings.catch_warnings():
        warnings.simplefilter("error", QtraceWarning)
        assert_equal(run_graph(qtrace.prepare(net), batch(0)), run_graph(qtrace.prepare(net), batch(0)))
    stored = [numpy_helper.to_array(t) for t in onnx.load(tmp_path / "crnn.onnx").graph.initializer]
    assert len(stored) > 5


@pytest.mark.parametrize("first", ["n", 1])
@pytest.mark.parametrize("aligned", [0, 1])
def test_a_grid_of_one_sample_is_kept(first: str | int, aligned: int, tmp_path: Path) -> None:
    """ONNX's body of AffineGrid drops a batch of one, in a branch of it."""
    nodes = [
        networks.node("Shape", "x", "sizes"),
        networks.node("AffineGrid", "theta sizes", "grid", align_corners=aligned),
        networks.node("GridSample", "x grid", "y", align_corners=aligned),
    ]
    inputs = {"x": (first, 3, 8, 8), "theta": (first, 2, 3)}
    source = networks.save(networks.model(nodes, inputs, opset=20), tmp_path)
    written = qtrace.export(qtrace.from_onnx(source), tmp_path / "out.onnx")
    rng = np.random.default_rng(0)
    for count in (1,) if first == 1 else (1, 3):
        x, shift = rng.normal(size=(count, 3, 8, 8)), rng.normal(size=(count, 2, 3)) * 0.1
        feeds = {"x": x.astype(np.float32), "theta": (np.eye(2, 3) + shift).astype(np.float32)}
        files = (open_session(path, SessionSettings(optimize=False)) for path in (source, written))
        expected, got = (file.run(None, feeds) for file in files)
        assert_equal(got, expected)
