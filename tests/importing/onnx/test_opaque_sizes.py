"""Sizes that the graph computes: as outputs, and as what kept nodes read."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from megengine import Tensor
from onnx import ModelProto, helper

import qtrace
from qtrace.errors import GraphError, ImportingError
from qtrace.graph.opaque import OpaqueOp, opaque_calls
from qtrace.onnxfile.local_session import SessionSettings
from qtrace.onnxfile.sessions import open_session
from tests.importing.onnx.opaque_net import SHAPE, Net


def _open(net: Net, *outputs: str) -> ModelProto:
    model = net.model(*outputs)
    axis = model.graph.input[0].type.tensor_type.shape.dim[0]
    axis.Clear()
    axis.dim_param = "N"
    return model


def _check(path: Path, out: Path) -> None:
    """Compares the graph and its export with the file, at the recorded size and at another one."""
    net = qtrace.from_onnx(path)
    written = qtrace.export(net, out)
    for rows in (SHAPE[0], 5):
        x = np.random.default_rng(rows).standard_normal((rows, *SHAPE[1:])).astype(np.float32)
        expected = open_session(path, SessionSettings(optimize=False)).run(None, {"x": x})
        results = net(Tensor(x))
        own = [t.numpy() for t in (results if isinstance(results, tuple) else (results,))]
        for values in (own, open_session(Path(written)).run(None, {"x": x})):
            for value, wanted in zip(values, expected, strict=True):
                assert value.shape == wanted.shape
                np.testing.assert_allclose(value, wanted, rtol=0, atol=1e-4)


@pytest.mark.parametrize("form", ["whole", "one", "scalar", "twice"])
def test_sizes_are_outputs_of_their_shape(form: str, tmp_path: Path) -> None:
    net = Net()
    sizes = net.add("Shape", [net.features])
    if form in ("one", "scalar"):
        sizes = net.add("Gather", [sizes, net.constant(np.array([0] if form == "one" else 0))])
    if form == "twice":
        sizes = net.add("Mul", [sizes, net.ints(2)])
    model = _open(net, net.features, sizes)
    model.graph.output[1].type.tensor_type.elem_type = onnx.TensorProto.INT64
    onnx.save(model, tmp_path / "net.onnx")
    _check(tmp_path / "net.onnx", tmp_path / "out.onnx")


@pytest.mark.parametrize("op", ["Resize", "CenterCropPad"])
def test_a_kept_node_reads_sizes_of_an_open_batch(op: str, tmp_path: Path) -> None:
    net = Net(18)
    start = net.add("Slice", [net.add("Shape", [net.features]), net.ints(0), net.ints(2)])
    sizes = net.add("Concat", [start, net.ints(5, 5)], axis=0)
    if op == "Resize":
        mode = {"mode": "linear", "coordinate_transformation_mode": "half_pixel", "antialias": 1}
        y = net.add("Resize", [net.features, "", "", sizes], **mode)
    else:
        y = net.add("CenterCropPad", [net.features, sizes])
    onnx.save(_open(net, net.conv(y)), tmp_path / "net.onnx")
    _check(tmp_path / "net.onnx", tmp_path / "out.onnx")
    assert opaque_calls(qtrace.from_onnx(tmp_path / "net.onnx"))


def test_a_kept_node_reads_sizes_that_values_decide(tmp_path: Path) -> None:
    net = Net(18)
    top = net.add("Cast", [net.add("ReduceMax", [net.features], keepdims=0)], to=onnx.TensorProto.INT64)
    side = net.add("Add", [net.add("Reshape", [top, net.ints(1)]), net.ints(4)])
    sizes = net.add("Concat", [net.ints(2, 4), side, side], axis=0)
    y = net.add("Resize", [net.features, "", "", sizes], mode="nearest")
    onnx.save(net.model(net.add("ReduceMax", [y], keepdims=0)), tmp_path / "net.onnx")
    net = qtrace.from_onnx(tmp_path / "net.onnx")
    x = np.random.default_rng(0).standard_normal(SHAPE).astype(np.float32)
    expected = open_session(tmp_path / "net.onnx").run(None, {"x": x})[0]
    np.testing.assert_allclose(net(Tensor(x)).numpy(), expected, rtol=0, atol=1e-4)


def _most(net: Net) -> str:
    """The seven largest of the values above 0, whose number the values decide."""
    flat = net.add("Reshape", [net.features, net.ints(-1)])
    places = net.add("Squeeze", [net.add("NonZero", [flat]), net.ints(0)])
    return str(net.add("TopK", [net.add("Gather", [flat, places]), net.ints(7)], 2)[0])


@pytest.mark.parametrize("read", [True, False])
def test_an_import_runs_no_kept_node_on_zeros(read: bool, tmp_path: Path) -> None:
    """Of zeros none is above 0, and TopK refuses to choose seven."""
    net = Net()
    y = _most(net)
    onnx.save(net.model(net.add("Mul", [y, net.weights(7)]) if read else y), tmp_path / "net.onnx")
    module = qtrace.from_onnx(tmp_path / "net.onnx")
    assert module.graph.outputs[0].shape == ((7,) if read else None)
    x = np.random.default_rng(0).standard_normal(SHAPE).astype(np.float32)
    expected = open_session(tmp_path / "net.onnx").run(None, {"x": x})[0]
    np.testing.assert_allclose(module(Tensor(x)).numpy(), expected, rtol=0, atol=1e-4)


def test_an_output_of_open_length_has_its_type_and_axes(tmp_path: Path) -> None:
    net = Net()
    flat = net.add("Reshape", [net.features, net.ints(-1)])
    places = net.add("Squeeze", [net.add("NonZero", [flat]), net.ints(0)])
    chosen = net.add("Gather", [flat, places])
    first = net.add(
        "Slice", [chosen, net.ints(0), net.add("Add", [net.add("Shape", [chosen]), net.ints(-1)])]
    )
    onnx.save(net.model(first), tmp_path / "net.onnx")
    module = qtrace.from_onnx(tmp_path / "net.onnx")
    assert module.graph.outputs[0].shape is None
    written = onnx.load(qtrace.export(module, tmp_path / "out.onnx"))
    assert len(written.graph.output[0].type.tensor_type.shape.dim) == 1


def test_a_kept_node_that_fails_hides_no_other_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise GraphError("the nodes fail.")

    monkeypatch.setattr(OpaqueOp, "stand_in", fail)
    monkeypatch.setattr(OpaqueOp, "infer", fail)
    net = Net()
    kept = net.add(
        "Resize", [net.features, "", "", net.ints(2, 4, 5, 5)], mode="nearest", nearest_mode="ceil"
    )
    unknown = net.add("Frobnicate", [net.features], domain="own.ops")
    onnx.save(net.model(kept, unknown), tmp_path / "net.onnx")
    with pytest.raises(ImportingError) as caught:
        qtrace.from_onnx(tmp_path / "net.onnx")
    assert "the nodes fail" in str(caught.value)
    assert "own.ops.Frobnicate" in str(caught.value)


@pytest.mark.quick(2)
@pytest.mark.parametrize("op", ["Scaler", "Imputer", "Binarizer", "Normalizer"])
def test_layers_behind_an_op_of_scikit_learn_are_no_part_of_it(op: str, tmp_path: Path) -> None:
    """ONNX's rules say nothing of its shape: the whole network was kept with it, and stayed in float."""
    net = Net()
    options = {
        "Scaler": {"offset": [1.0], "scale": [0.5]},
        "Imputer": {"imputed_value_floats": [0.0], "replaced_value_float": 0.25},
        "Binarizer": {"threshold": 0.5},
        "Normalizer": {"norm": "L2"},
    }
    rows = net.add("Reshape", [net.features, net.ints(-1, 8)])
    y = net.add(op, [rows], domain="ai.onnx.ml", **options[op])
    onnx.save(_open(net, net.add("Relu", [net.add("MatMul", [y, net.weights(8, 6)])])), tmp_path / "net.onnx")
    _check(tmp_path / "net.onnx", tmp_path / "out.onnx")
    module = qtrace.from_onnx(tmp_path / "net.onnx")
    assert [expr.inputs[0].owner.operators for expr in opaque_calls(module)] == [f"ai.onnx.ml.{op}"]


def test_the_refusal_of_an_output_that_is_no_tensor_has_a_cure(tmp_path: Path) -> None:
    net = Net()
    rows = net.add("Softmax", [net.add("Reshape", [net.features, net.ints(-1, 2)])])
    labels = net.add("ZipMap", [rows], domain="ai.onnx.ml", classlabels_int64s=[3, 5])
    model = net.model(rows, labels)
    keys = helper.make_map_type_proto(onnx.TensorProto.INT64, helper.make_tensor_type_proto(1, None))
    model.graph.output[1].type.CopyFrom(helper.make_sequence_type_proto(keys))
    onnx.save(model, tmp_path / "net.onnx")
    with pytest.raises(ImportingError, match=rf"zipmap.*up to '{rows}' by from_onnx\(outputs=\)"):
        qtrace.from_onnx(tmp_path / "net.onnx")
    assert qtrace.from_onnx(tmp_path / "net.onnx", outputs=[rows]).graph.outputs[0].shape[1] == 2
