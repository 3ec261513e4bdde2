"""The pieces of the accuracy benchmark; its figures come from ``python -m benchmarks.accuracy``."""

from __future__ import annotations

import json

import megengine as mge
import numpy as np
import onnx
import pytest

from benchmarks.accuracy import __main__ as command
from benchmarks.accuracy import eight_bits, imbalance, peers, subjects
from benchmarks.accuracy.fitting import fit
from benchmarks.accuracy.judging import in_onnxruntime
from benchmarks.accuracy.native import NATIVE, load_float
from benchmarks.accuracy.networks import CLASSIFIERS
from benchmarks.accuracy.rows import Row, markdown, sqnr_db
from examples import digits


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_committed_weights_reach_the_stated_accuracy(name):
    stated = json.loads((subjects.WEIGHTS / f"{name}.json").read_text())
    _, validation, _, _ = subjects.split()
    seen = digits.predict(subjects.subject(name, quick=True).net, validation.images)
    accuracy = 100 * np.mean(seen == validation.labels)
    assert accuracy == pytest.approx(stated["validation_accuracy"], abs=0.6)  # one image, on another CPU
    assert stated["validation_accuracy"] >= 97.0


def test_parts_of_the_data_are_disjoint():
    parts = subjects.split()
    seen = [{image.tobytes() for image in part.images} for part in parts]
    assert [len(part.images) for part in parts] == [1000, 197, 100, 500]
    assert len(set().union(*seen)) == sum(map(len, seen))


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_native_twin_computes_the_same(name):
    subject = subjects.subject(name, quick=True)
    native = NATIVE[name]()
    load_float(native, subject.net)
    native.eval()
    images = mge.Tensor(subject.test)
    np.testing.assert_allclose(native(images).numpy(), subject.net(images).numpy(), rtol=1e-3, atol=1e-3)


def test_planted_network_computes_what_it_computed_with_relu():
    def outputs(spread: float) -> np.ndarray:
        net = imbalance.planted(subjects.subject("mobilenet", quick=True).net, spread)
        return net(mge.Tensor(subjects.split()[3].images[:50])).numpy()

    np.testing.assert_allclose(outputs(64.0), outputs(1.0), rtol=1e-3, atol=1e-3)


@pytest.mark.usefixtures("synchronous")
def test_fit_lowers_the_loss_and_repeats():
    def trained() -> tuple[mge.module.Module, digits.Part]:
        mge.random.seed(0)
        part = digits.Part(subjects.split()[0].images[:128], subjects.split()[0].labels[:128])
        net = digits.Net(2)
        net.train()
        fit(net, [(list(net.parameters()), 0.01, 0.0)], part, steps=12, seed=0, title="test")
        net.eval()
        return net, part

    (net, part), (again, _) = trained(), trained()
    images = mge.Tensor(part.images)
    np.testing.assert_array_equal(net(images).numpy(), again(images).numpy())
    chance = np.log(10)
    logits = net(images).numpy()
    loss = np.log(np.exp(logits).sum(axis=1)) - logits[np.arange(128), part.labels]
    assert loss.mean() < chance


def test_sqnr_is_the_mean_over_the_outputs():
    want = [np.array([3.0, 4.0]), np.array([10.0])]
    have = [np.array([3.0, 4.5]), np.array([9.0])]
    assert sqnr_db(want, have) == pytest.approx((20.0 + 20.0) / 2)
    with pytest.raises(ValueError, match="cannot be compared"):
        sqnr_db(want, [np.zeros(3), np.zeros(1)])


@pytest.mark.parametrize(("sqnr", "loss", "met"), [(41.0, 0.2, True), (40.9, 0.2, False), (41.0, 0.4, False)])
def test_eight_bits_must_be_a_decibel_ahead_and_lose_little(sqnr, loss, met):
    mine = Row("W8A8 PTQ", "net", "qtrace", sqnr, 97.0, loss)
    others = [
        Row("W8A8 PTQ", "net", "a", 40.0),
        Row("W8A8 PTQ", "net", "b"),
        Row("W8A8 PTQ", "net", "c", 39.0),
    ]
    row = eight_bits.judged(mine, others)
    assert row.met is met
    assert ("met" if met else "MISSED") in markdown([row])


def test_the_form_for_nncf_computes_the_same_and_shares_no_parameter(tmp_path):
    random = np.random.RandomState(0)
    stored = {"weight": random.randn(2, 2, 1, 1), "bias": random.randn(2)}
    graph = onnx.helper.make_graph(
        [
            onnx.helper.make_node("Conv", ["x", "weight", "bias"], ["fine"], "first"),
            onnx.helper.make_node("Conv", ["fine", "weight", "bias"], ["coarse"], "second"),
        ],
        "head",
        [onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [1, 2, 4, 4])],
        [
            onnx.helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, [1, 2, 4, 4])
            for n in ("fine", "coarse")
        ],
        [onnx.numpy_helper.from_array(v.astype(np.float32), name) for name, v in stored.items()],
    )
    opset = [onnx.helper.make_opsetid("", 13)]
    onnx.save(onnx.helper.make_model(graph, ir_version=8, opset_imports=opset), str(tmp_path / "float.onnx"))
    other = peers.for_nncf(tmp_path / "float.onnx", tmp_path / "for_nncf.onnx")
    x = random.randn(1, 2, 4, 4).astype(np.float32)
    want, have = in_onnxruntime(tmp_path / "float.onnx")(x), in_onnxruntime(other)(x)
    for one, two in zip(want, have, strict=True):
        np.testing.assert_array_equal(one, two)
    nodes = onnx.load(str(other)).graph.node
    layers = [node for node in nodes if node.op_type == "Conv"]
    assert set(layers[0].input[1:]).isdisjoint(layers[1].input[1:])
    outputs = {"fine", "coarse"}
    assert {node.op_type for node in nodes if outputs & set(node.output)} == {"Identity"}


@pytest.mark.slow
def test_quick_run_keeps_its_rows_and_names_a_missing_peer(tmp_path, capsys):
    target = tmp_path / "accuracy.json"
    arguments = ["--quick", "--json", str(target), "--net", "resnet"]
    assert command.main([*arguments, "--only", "w8a8"]) == 0
    rows = json.loads(target.read_text())["w8a8 resnet"]["rows"]
    assert {"float", "onnxruntime.quantization, Entropy"} <= {row["method"] for row in rows}
    assert all(row["sqnr"] > 20 for row in rows if row["sqnr"] is not None)
    printed = capsys.readouterr().out
    assert all(row["method"] in printed for row in rows)
    assert command.main(["--json", str(target), "--table"]) == 0
    assert capsys.readouterr().out == printed
