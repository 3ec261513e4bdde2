"""A prediction counts the nodes that onnxruntime runs: kernels, roundings and changes of layout."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from qtrace.benchmarking.prediction import predict, read_graph
from qtrace.benchmarking.runners import RunnerSettings, open_file
from qtrace.costs import FLOAT, INTEGER, CostTable
from qtrace.errors import ExportError
from tests.benchmarking.nets import NETS, write
from tests.benchmarking.onnx_net import Net

TABLE = CostTable.load("onnxruntime")


def _run(path):
    """The ops that onnxruntime runs, as the kinds of a prediction."""
    kinds = Counter()
    for node in open_file(path, None, RunnerSettings()).profile(1)[0]:
        if node.op == "Transpose":
            kinds["reorder", INTEGER] += 1
        elif node.op.startswith("Reorder"):
            kinds["reorder", FLOAT] += 1
        elif node.op in ("QuantizeLinear", "DequantizeLinear"):
            kinds[node.op.removesuffix("Linear").lower(), FLOAT] += 1
        else:
            kinds["op", INTEGER if node.inputs[0][0] == "uint8" else FLOAT] += 1
    return kinds


def _predicted(path):
    kinds = Counter()
    for op in predict(read_graph(path), TABLE).ops:
        if op.form != "fused":
            form = FLOAT if op.form == FLOAT else INTEGER
            kinds[op.kind if op.kind in ("reorder", "quantize", "dequantize") else "op", form] += 1
    return kinds


@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("integer", [False, True], ids=["float", "integer"])
def test_predicted_nodes_are_those_that_run(tmp_path, name, integer):
    path = write(tmp_path / "net.onnx", name, integer)
    assert _predicted(path) == _run(path)


def test_the_time_is_the_sum_of_ops_and_run(tmp_path):
    prediction = predict(read_graph(write(tmp_path / "net.onnx", "plain", True)), TABLE)
    assert prediction.seconds == pytest.approx(sum(op.seconds for op in prediction.ops) + TABLE.per_run)
    convs = sum(op.seconds for op in prediction.ops if op.kind == "conv2d")
    assert prediction.share(["conv2d"]) == pytest.approx(convs / prediction.seconds)
    assert prediction.unknown == ()


def test_an_op_without_a_kind_is_named(tmp_path):
    net = Net()
    x = net.input((1, 4))
    path = tmp_path / "net.onnx"
    path.write_bytes(net.serialize(net.node("Selu", [x])))
    prediction = predict(read_graph(path), TABLE)
    assert prediction.unknown == ("Selu",)
    assert prediction.seconds == TABLE.per_run


def _product(net: Net) -> str:
    weight = net.store(np.ones((4, 8), np.int8))
    scale, zero = net.store(np.float32(0.1)), net.store(np.int8(0))
    weight = net.node("DequantizeLinear", [weight, scale, zero])
    return net.node("Gemm", [net.quantize(net.input((2, 4))), weight])


def test_an_integer_product_may_write_floats(tmp_path):
    net = Net()
    path = tmp_path / "net.onnx"
    path.write_bytes(net.serialize(_product(net)))
    forms = {op.kind: op.form for op in predict(read_graph(path), TABLE).ops}
    assert forms == {"quantize": FLOAT, "linear": INTEGER}
    assert "dequantize" not in forms


def test_prediction_skips_folded_nodes_but_times_group_norms(tmp_path):
    net = Net()
    ones = net.node("Reshape", [net.random((4, 1)), net.store(np.array([4], np.int64))])
    path = tmp_path / "net.onnx"
    path.write_bytes(net.serialize(net.node("InstanceNormalization", [net.input((1, 4, 8, 8)), ones, ones])))
    prediction = predict(read_graph(path), TABLE)
    assert [(op.kind, op.form) for op in prediction.ops] == [("softmax", FLOAT)]
    assert prediction.unknown == ()


def test_another_file_is_one_sentence(tmp_path):
    path = tmp_path / "net.onnx"
    path.write_bytes(b"\x08\xff nonsense")
    with pytest.raises(ExportError, match="is not an ONNX file"):
        read_graph(path)
