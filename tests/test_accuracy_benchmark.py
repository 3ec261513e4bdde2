"""The pieces of the accuracy benchmark; its figures come from ``python -m benchmarks.accuracy``."""

from __future__ import annotations

import json

import megengine as mge
import numpy as np
import onnx
import pytest

import qtrace
from benchmarks.accuracy import __main__ as command
from benchmarks.accuracy import eight_bits, imbalance, mixed_precision, peers, subjects
from benchmarks.accuracy.fitting import fit
from benchmarks.accuracy.judging import in_onnxruntime
from benchmarks.accuracy.native import NATIVE, load_float
from benchmarks.accuracy.networks import CLASSIFIERS
from benchmarks.accuracy.rows import Row, add_recovered_share, markdown, sqnr_db
from examples import digits
from qtrace.onnxfile.kernels import products_saturate
from qtrace.sensitivity.layers import RaisableLayer, Raise
from qtrace.sensitivity.mixed import MixedPrecision
from tests.each import each_of

# The groups of a layer that is nowhere, and its sizes.
NOTHING = (frozenset(), frozenset(), "", frozenset(), 1, 4, 4)


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", CLASSIFIERS)
def test_committed_weights_reach_the_stated_accuracy(name):
    stated = json.loads((subjects.WEIGHTS / f"{name}.json").read_text())
    _, validation, _, _ = subjects.split()
    predicted = digits.predict(subjects.subject(name, quick=True).net, validation.images)
    accuracy = 100 * np.mean(predicted == validation.labels)
    assert accuracy == pytest.approx(stated["validation_accuracy"], abs=0.6)  # one image, on another CPU
    assert stated["validation_accuracy"] >= 97.0


def test_parts_of_the_data_are_disjoint():
    parts = subjects.split()
    images = [{image.tobytes() for image in part.images} for part in parts]
    assert [len(part.images) for part in parts] == [1000, 197, 100, 500]
    assert len(set().union(*images)) == sum(map(len, images))


@pytest.mark.quick(1)
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
        net = imbalance.stretch_channels(subjects.subject("mobilenet", quick=True).net, spread)
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
    references = [np.array([3.0, 4.0]), np.array([10.0])]
    outputs = [np.array([3.0, 4.5]), np.array([9.0])]
    assert sqnr_db(references, outputs) == pytest.approx((20.0 + 20.0) / 2)
    with pytest.raises(ValueError, match="cannot be compared"):
        sqnr_db(references, [np.zeros(3), np.zeros(1)])


@each_of(("sqnr", "loss", "met"), [(41.0, 0.2, True), (40.9, 0.2, False), (41.0, 0.4, False)])
def test_eight_bits_must_be_a_decibel_ahead_and_lose_little(sqnr, loss, met):
    ours = Row("W8A8 PTQ", "net", "qtrace", sqnr, 97.0, loss)
    others = [
        Row("W8A8 PTQ", "net", "a", 40.0),
        Row("W8A8 PTQ", "net", "b"),
        Row("W8A8 PTQ", "net", "c", 39.0),
    ]
    row = eight_bits.add_target(ours, others)
    assert row.met is met
    assert ("met" if met else "MISSED") in markdown([row])


@each_of(("loss", "met"), [(0.2, True), (-0.4, True), (0.3, False), (2.0, False)])
def test_recovered_is_the_share_of_what_was_lost(loss, met):
    row = add_recovered_share(Row("check", "net", "tuned", 15.0, 97.0, loss), 1.0, 0.8)
    assert (row.met, row.target) == (met, "80 % of the loss recovered")
    assert f"{100 * (1 - loss):.0f} % of the loss recovered" in row.note
    shown = add_recovered_share(Row("check", "net", "tuned", 15.0, 97.0, loss), 1.0)
    assert (shown.met, shown.target, shown.note) == (None, "", row.note)


def test_where_nothing_was_lost_no_share_is_met():
    for lost in (0.0, -0.2, None):
        row = add_recovered_share(Row("check", "net", "tuned", 15.0, 97.0, 0.0, note="first"), lost, 0.8)
        assert (row.met, row.note) == (None, "first, nothing was lost")


@each_of(
    ("layers", "by_noise", "reached", "met"),
    [(3, 4, -0.9, True), (4, 4, -0.9, False), (3, 4, -1.1, False)],
)
def test_mixed_precision_must_reach_its_goal_by_fewer_layers(layers, by_noise, reached, met):
    raised = tuple(RaisableLayer(str(n), (), "conv2d", "", 1, *NOTHING) for n in range(layers))
    config, how = qtrace.QConfig(), Raise.parse("w8a8")
    search = MixedPrecision(
        "loss", 0.0, -2.0, raised, how, (), reached, config, target=-1.0, by_noise=by_noise
    )
    row = mixed_precision.add_target(Row("mixed", "detector", "raised"), search)
    assert row.met is met
    assert f"{layers} layers; in the order of noise {by_noise}" in row.note
    assert ("loss 1.1, allowed 1" in row.note) is (reached < -1.0)


def test_training_inputs_are_no_others():
    resnet, detector = subjects.subject("resnet", quick=True), subjects.subject("detector", quick=True)
    train = subjects.split()[0]
    inputs = subjects.training_inputs(resnet, 2000)
    np.testing.assert_array_equal(inputs, train.images)
    images = {image.tobytes() for image in subjects.training_inputs(detector, 20)}
    assert len(images) == 20
    assert images.isdisjoint(image.tobytes() for image in (*detector.calibration, *detector.test))


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
    other = peers.adapt_for_nncf(tmp_path / "float.onnx", tmp_path / "for_nncf.onnx")
    x = random.randn(1, 2, 4, 4).astype(np.float32)
    references, adapted = in_onnxruntime(tmp_path / "float.onnx")(x), in_onnxruntime(other)(x)
    for expected, actual in zip(references, adapted, strict=True):
        np.testing.assert_array_equal(expected, actual)
    nodes = onnx.load(str(other)).graph.node
    layers = [node for node in nodes if node.op_type == "Conv"]
    assert set(layers[0].input[1:]).isdisjoint(layers[1].input[1:])
    outputs = {"fine", "coarse"}
    assert {node.op_type for node in nodes if outputs & set(node.output)} == {"Identity"}


@pytest.mark.long
@pytest.mark.parametrize(("group", "net"), [("finetune", "resnet"), ("mixed", "detector")])
def test_quick_run_of_a_group_has_a_target(tmp_path, group, net):
    target = tmp_path / "accuracy.json"
    arguments = ["--quick", "--json", str(target), "--net", net, "--only", group]
    assert command.main(arguments) == 0
    rows = [Row(**row) for row in json.loads(target.read_text())[f"{group} {net}"]["rows"]]
    assert rows[0].method == "float"
    assert all(row.sqnr is not None and row.sqnr > 5 for row in rows[1:])
    assert [bool(row.target) for row in rows] == [False, False, True]


@pytest.mark.long
def test_quick_run_keeps_keeps_its_rows_and_names_a_missing_peer(tmp_path, capsys):
    target = tmp_path / "accuracy.json"
    arguments = ["--quick", "--json", str(target), "--net", "resnet"]
    assert command.main([*arguments, "--only", "w8a8"]) == 0
    rows = json.loads(target.read_text())["w8a8 resnet"]["rows"]
    assert {"float", "onnxruntime.quantization, Entropy"} <= {row["method"] for row in rows}
    ours = [row["sqnr"] for row in rows if row["method"].startswith("qtrace")]
    assert len(ours) == 2
    assert all(sqnr > 20 for sqnr in ours)
    # Files of peers have int8 weights, whose products with uint8 saturate on a processor without VNNI.
    theirs = [row["sqnr"] for row in rows if row["sqnr"] is not None]
    assert all(np.isfinite(sqnr) if products_saturate() else sqnr > 20 for sqnr in theirs)
    printed = capsys.readouterr().out
    assert all(row["method"] in printed for row in rows)
    assert command.main(["--json", str(target), "--table"]) == 0
    assert capsys.readouterr().out == printed
