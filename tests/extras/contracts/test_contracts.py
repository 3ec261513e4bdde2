"""Contracts: planted violations are found at their nodes; what is mechanical is repaired, and then runs."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnxruntime.quantization import CalibrationDataReader, QuantType, quantize_static

import qtrace
from qtrace.errors import ExportError
from qtrace.extras.contracts import ContractReport, check_contract, fix_contract
from qtrace.extras.contracts.base import CONTRACTS
from qtrace.extras.contracts.qdq_graph import LAYERS, QUANTIZERS, QdqGraph
from tests.each import each_of
from tests.extras.contracts import planted
from tests.extras.contracts.planted import FORMS, Edit, build, other_domain, regrid
from tests.nets import ResNet, images, randomize

PICTURES = [images(2, 3, 32, 32), images(2, 3, 32, 32) * np.float32(0.9)]
SAMPLES = [np.random.default_rng(seed).normal(size=(1, 8, 6, 6)).astype(np.float32) * 2 for seed in range(3)]


@dataclass(frozen=True)
class Planted:
    """A violation.

    Attributes:
        form: the form that is broken.
        rule: the rule that finds it.
        node: the node that is named; "" for the file.
        edit: plants it.
        fixed: whether it is repaired.
        same: whether the repaired file has the integers of the file before the edit.
    """

    form: str
    rule: str
    node: str
    edit: Edit
    fixed: bool = True
    same: bool = False


CASES: dict[str, Planted] = {
    # TensorRT
    "uint8 around 128": Planted("tensorrt", "activation-types", "a_q", regrid("a", np.uint8, 128), same=True),
    "uint8 from 0": Planted("tensorrt", "activation-types", "b_q", regrid("b", np.uint8, 0)),
    "int8 with a zero point": Planted("tensorrt", "zero-points-are-0", "a_q", regrid("a", np.int8, 7)),
    "16 bits": Planted("tensorrt", "activation-types", "a_q", regrid("a", np.int16, 0, 1 / 256), fixed=False),
    "no zero point": Planted(
        "tensorrt", "written-zero-points", "a_q", planted.without_zero_points, same=True
    ),
    "axis with one scale": Planted("tensorrt", "no-needless-axis", "a_q", planted.needless_axis, same=True),
    "scales per channel of an activation": Planted(
        "tensorrt", "one-scale-per-activation", "a_q", planted.per_channel_activation
    ),
    "one zero point for many scales": Planted(
        "tensorrt", "matching-lengths", "conv1_w_dq", planted.unequal_lengths, same=True
    ),
    "computed scale": Planted("tensorrt", "constant-scales", "a_q", planted.computed_scale, fixed=False),
    "scale of 0": Planted("tensorrt", "positive-scales", "a_q", planted.zero_scale, fixed=False),
    "too few scales": Planted(
        "tensorrt", "fitting-scales", "conv1_w_dq", planted.too_few_scales, fixed=False
    ),
    "old opset": Planted("tensorrt", "opset", "", planted.old_opset, fixed=False),
    "Q of another domain": Planted("tensorrt", "no-other-domains", "a_q", other_domain("a_q"), same=True),
    "needless import": Planted("tensorrt", "no-other-domains", "", planted.idle_import, same=True),
    "op of another domain": Planted("tensorrt", "no-other-domains", "t", planted.foreign_op, fixed=False),
    "integer op": Planted("tensorrt", "qdq-form", "t", planted.integer_op, fixed=False),
    "int32 bias": Planted("tensorrt", "float-biases", "conv1", planted.int32_bias, same=True),
    "bias through Q and DQ": Planted("tensorrt", "float-biases", "conv1", planted.rounded_bias),
    "axis of Conv": Planted("tensorrt", "weight-axis", "conv2", planted.weight_axis("conv2", 1)),
    "axis of ConvTranspose": Planted("tensorrt", "weight-axis", "c2", planted.weight_axis("c2", 0)),
    "uint8 weight": Planted("tensorrt", "symmetric-weights", "conv2", planted.unsigned_weight, same=True),
    "weight with a zero point": Planted("tensorrt", "symmetric-weights", "conv2", planted.shifted_weight),
    "float weight": Planted(
        "tensorrt", "quantized-weights", "conv1", planted.float_weight("conv1"), same=True
    ),
    "rounded summand": Planted("tensorrt", "unrounded-summands", "sum", planted.rounded_summand, same=True),
    "rounded before a function": Planted(
        "tensorrt", "unrounded-functions", "a", planted.rounded_function, same=True
    ),
    "concat of two scales": Planted("tensorrt", "shared-scales", "d", planted.unequal_concat, same=True),
    # QNN
    "float bias": Planted("qnn", "int32-biases", "conv1", planted.float_bias, same=True),
    "int8 bias": Planted("qnn", "int32-biases", "conv1", planted.int8_bias),
    "bias of one scale": Planted("qnn", "accumulator-biases", "conv1", planted.bias_of_one_scale, same=True),
    "scales per channel of MatMul": Planted(
        "qnn", "weights-per-tensor", "y", planted.channel_weight("y", 1), same=True
    ),
    "bias of LayerNormalization per channel": Planted("qnn", "norm-biases", "n", planted.norm_bias),
    "tiny range": Planted("qnn", "smallest-range", "p_q", planted.tiny_range),
    "one summand in float": Planted("qnn", "both-inputs", "sum", planted.float_summand, fixed=False),
    "sigmoid's scale": Planted("qnn_a16", "fixed-sigmoid", "s", regrid("s", np.uint16, 0, 2), same=True),
    "tanh's zero point": Planted("qnn_a16", "fixed-tanh", "t", regrid("t", np.uint16, 0), same=True),
    "16-bit weight of MatMul": Planted("qnn_a16", "weight-bits", "y", planted.wide_weight, same=True),
    "16 bits at an old opset": Planted("qnn", "wide-types", "g_q", regrid("g", np.uint16, 30000, 1 / 256)),
    "two types in a sum": Planted("qnn_a16", "equal-types", "sum", regrid("a", np.uint8, 120), fixed=False),
    "two widths of a convolution": Planted(
        "qnn_a16", "equal-widths", "c1", regrid("c1", np.uint8, 120, 256), fixed=False
    ),
    # Ryzen AI
    "uint8 activations": Planted("ryzenai", "activation-types", "p_q", regrid("p", np.uint8, 128), same=True),
    "unsigned weight": Planted("ryzenai", "symmetric-weights", "conv2", planted.unsigned_weight, same=True),
    "concat in A8W8": Planted("ryzenai", "shared-scales", "d", planted.unequal_concat, same=True),
    "types of a sum in A16W8": Planted(
        "ryzenai_a16w8", "equal-types", "sum", regrid("conv2", np.int8, 0, 256), fixed=False
    ),
    "scale that is no power of two": Planted(
        "ryzenai_xint8", "power-of-two-scales", "a_q", regrid("a", np.int8, 0, 0.75), same=True
    ),
    "weight's scale that is no power of two": Planted(
        "ryzenai_xint8", "power-of-two-scales", "g_w_dq", planted.odd_weight_scale
    ),
    "float bias in XINT8": Planted("ryzenai_xint8", "int8-biases", "conv1", planted.float_bias, same=True),
    # onnxruntime
    "bias's scale": Planted("onnxruntime", "accumulator-biases", "conv1", planted.bias_scale),
    "bias with a zero point": Planted(
        "onnxruntime", "accumulator-biases", "conv1", planted.bias_zero_point, same=True
    ),
}


def _write(model: onnx.ModelProto, folder: Path) -> Path:
    path = folder / "m.onnx"
    onnx.save(model, str(path))
    return path


def _plant(case: Planted, folder: Path) -> Path:
    model = build(FORMS[case.form])
    case.edit(model)
    return _write(model, folder)


def _check(path: Path, case: Planted) -> ContractReport:
    return check_contract(path, FORMS[case.form].target)


def _integers(model: onnx.ModelProto) -> list[dict[str, np.ndarray]]:
    """The values of all integer tensors for each sample, in onnxruntime without optimizations."""
    exposed = onnx.ModelProto.FromString(model.SerializeToString())
    names = [n.output[0] for n in model.graph.node if n.op_type == "QuantizeLinear"]
    graph = QdqGraph(exposed)
    kinds = {q.node.output[0]: q.type for q in graph.quantizers()}
    exposed.graph.output.extend(onnx.helper.make_tensor_value_info(n, kinds[n], None) for n in names)
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(exposed.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return [dict(zip(names, session.run(names, {"x": x}), strict=True)) for x in SAMPLES]


def test_contract_cases_cover_every_target() -> None:
    assert len(CASES) >= 30
    assert sum(case.fixed for case in CASES.values()) >= 20
    assert {FORMS[case.form].target for case in CASES.values()} == set(CONTRACTS.known())


@each_of("form", FORMS)
def test_the_files_before_the_edits_keep_their_contract(form: str, tmp_path: Path) -> None:
    report = check_contract(_write(build(FORMS[form]), tmp_path), FORMS[form].target)
    assert report.findings == ()
    assert report.passed


@each_of("kind", CASES)
def test_a_planted_violation_is_found_at_its_node(kind: str, tmp_path: Path) -> None:
    case = CASES[kind]
    report = _check(_plant(case, tmp_path), case)
    assert not report.passed
    assert (case.rule, case.node) in {(finding.rule, finding.node) for finding in report.findings}
    assert all(finding.source and finding.text.endswith(".") for finding in report.findings)
    assert all(f.fixable for f in report.findings if f.rule == case.rule) == case.fixed
    assert f"{case.rule} (" in report.text()


@pytest.mark.quick(4)
@pytest.mark.parametrize("kind", [kind for kind, case in CASES.items() if case.fixed])
def test_a_repaired_file_keeps_the_contract_and_runs(kind: str, tmp_path: Path) -> None:
    case = CASES[kind]
    path = _plant(case, tmp_path)
    before = path.read_bytes()
    data, report = fix_contract(path, FORMS[case.form].target)
    assert path.read_bytes() == before
    assert report.fixed
    assert report.findings == ()
    fixed = onnx.load_from_string(data)
    onnx.checker.check_model(fixed, full_check=True)
    integers = _integers(fixed)
    if case.same:
        reference = _integers(build(FORMS[case.form]))
        for ours, theirs in zip(integers, reference, strict=True):
            assert ours.keys() == theirs.keys()
            for name in ours:
                assert np.abs(ours[name].astype(int) - theirs[name].astype(int)).max() <= 1, name
    _assert_constants_are_near(onnx.load_from_string(before), fixed)
    _assert_ranges_are_kept(onnx.load_from_string(before), fixed)


def _assert_constants_are_near(planted_model: onnx.ModelProto, fixed: onnx.ModelProto) -> None:
    """The weights and biases are those of the file that was repaired, to one step of their new scale."""
    old, new = QdqGraph(planted_model), QdqGraph(fixed)
    layers = {node.name: node for node in old.nodes(*LAYERS, "LayerNormalization")}
    compared = 0
    for node in new.nodes(*LAYERS, "LayerNormalization"):
        for index in range(1, len(node.input)):
            ours, theirs = new.operand(node, index), old.operand(layers[node.name], index)
            if ours is None or theirs is None or ours.values is None or theirs.values is None:
                continue
            step = np.float64(1e-6)
            if ours.dequantize is not None and ours.dequantize.grid is not None:
                step += ours.dequantize.grid.scale.max()
            assert np.abs(ours.values - theirs.values).max() <= step, (node.name, index)
            compared += 1
    assert compared > 10


def _assert_ranges_are_kept(planted_model: onnx.ModelProto, fixed: onnx.ModelProto) -> None:
    """A value within the range of an activation is, to one step of the new scale, what it is rounded to."""
    old, new = QdqGraph(planted_model), QdqGraph(fixed)
    before = {q.node.name: q.grid for q in map(old.quantizer, old.nodes("QuantizeLinear"))}
    for node in new.nodes("QuantizeLinear"):
        was, now = before[node.name], new.quantizer(node).grid
        assert now is not None
        if was is None or node.name in ("s_q", "t_q") or not new.quantizer(node).has_zero_point:
            continue
        # Without a zero point, the range that was meant is that of int8.
        if not old.quantizer(next(n for n in old.graph.node if n.name == node.name)).has_zero_point:
            continue
        low, high = (float(np.min(was.ends[0])), float(np.max(was.ends[1])))
        values = np.linspace(low, high, 999)
        rounded = now.dequantize(now.quantize(values))
        assert np.abs(rounded - values).max() <= now.scale.max() * 1.001, node.name


def test_several_violations_are_repaired_at_once(tmp_path: Path) -> None:
    model = build(FORMS["qnn"])
    path = _write(model, tmp_path)
    report = check_contract(path, "tensorrt")
    assert {"activation-types", "float-biases", "unrounded-summands"} <= {f.rule for f in report.findings}
    data, fixed = fix_contract(path, "tensorrt")
    assert fixed.passed
    assert len(fixed.fixed) >= len({f.node for f in report.findings})
    _integers(onnx.load_from_string(data))


def test_ops_that_fall_back_to_float_are_predicted(tmp_path: Path) -> None:
    model = build(FORMS["qnn"])
    planted.float_summand(model)
    report = check_contract(_write(model, tmp_path), "qnn")
    reasons = {op.node: op.reason for op in report.floats}
    assert reasons["conv2"] == "its result is not rounded"
    assert reasons["sum"] == "it breaks the rule both-inputs"
    assert "conv1" not in reasons
    assert "not run on the device" in report.text()


def test_a_float_layer_may_read_what_a_kernel_gives(tmp_path: Path) -> None:
    model = build(FORMS["onnxruntime"])
    planted.float_weight("y")(model)
    assert [f.rule for f in check_contract(_write(model, tmp_path), "onnxruntime").findings] == [
        "quantized-weights"
    ]
    model.graph.output[0].name = "y"  # which is not rounded then
    assert check_contract(_write(model, tmp_path), "onnxruntime").findings == ()


def test_the_prediction_for_onnxruntime_is_what_it_does(tmp_path: Path) -> None:
    """Ops that onnxruntime is said to compute in float by its contract alone, and by loading the file."""
    from qtrace.extras.contracts.checking import predict_floats

    model = build(FORMS["onnxruntime"])
    report = check_contract(_write(model, tmp_path), "onnxruntime")
    assert report.measured == "onnxruntime"
    counted = {"Conv", "ConvTranspose", "Add", "Gemm", "MatMul", "Concat", "Sigmoid", "GlobalAveragePool"}
    predicted = {
        op.node
        for op in predict_floats(QdqGraph(model), CONTRACTS.get("onnxruntime"), {})
        if op.op in counted
    }
    measured = {op.node for op in report.floats if op.op in counted}
    assert predicted == measured


class _Reader(CalibrationDataReader):
    """The samples, once, for onnxruntime's own quantizer."""

    def __init__(self) -> None:
        self._samples = iter(PICTURES)

    def get_next(self) -> dict[str, np.ndarray] | None:
        sample = next(self._samples, None)
        return None if sample is None else {"x": sample}


@pytest.mark.quick(1)
@pytest.mark.parametrize("kind", [QuantType.QUInt8, QuantType.QInt8], ids=lambda kind: kind.name)
def test_files_of_onnxruntimes_quantizer_are_checked_and_repaired(kind: QuantType, tmp_path: Path) -> None:
    """It leaves out each Relu whose result is rounded to integers that begin at 0; a repair writes it."""
    traced = qtrace.trace(randomize(ResNet(16, (1, 1))), PICTURES[0][:1], check=False)
    source, path = str(qtrace.export(traced, tmp_path / "float.onnx")), tmp_path / "theirs.onnx"
    quantize_static(source, str(path), _Reader(), activation_type=kind, weight_type=QuantType.QInt8)
    assert check_contract(path, "onnxruntime").findings == ()
    assert check_contract(path, "qnn").findings == ()
    for target in ("tensorrt", "ryzenai", "ryzenai_xint8"):
        assert not check_contract(path, target).passed
        data, report = fix_contract(path, target)
        assert report.findings == ()
        (theirs, ours) = (
            ort.InferenceSession(file, providers=["CPUExecutionProvider"]).run(None, {"x": PICTURES[0]})[0]
            for file in (path.read_bytes(), data)
        )
        assert np.square(theirs - ours).sum() < 3e-3 * np.square(theirs).sum()


def _no_rounding(model: onnx.ModelProto) -> None:
    del model.graph.node[:]
    model.graph.node.append(onnx.helper.make_node("Identity", ["x"], ["y_dq"]))


def _refused(edit: Callable[[onnx.ModelProto], None], folder: Path) -> Path:
    model = build(FORMS["qnn"])
    edit(model)
    return _write(model, folder)


def test_files_that_are_none_of_a_kind_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"m\.onnx does not exist"):
        check_contract(tmp_path / "m.onnx", "qnn")
    with pytest.raises(ExportError, match=r"M\.ONNX does not exist"):
        check_contract(tmp_path / "M.ONNX", "qnn")
    with pytest.raises(ExportError, match=r"m\.mge is not an ONNX file by its name"):
        check_contract(tmp_path / "m.mge", "qnn")
    path = _refused(_no_rounding, tmp_path)
    with pytest.raises(ExportError, match="lacks QuantizeLinear and DequantizeLinear: name a quantized"):
        check_contract(path, "qnn")
    with pytest.raises(
        ExportError, match="unknown contract 'qn'; known: onnxruntime, qnn, ryzenai, ryzenai_xint8, t"
    ):
        check_contract(path, "qn")
    path.write_bytes(b"text")
    with pytest.raises(ExportError, match="is not an ONNX file"):
        check_contract(path, "qnn")


def _damage(model: onnx.ModelProto, rng: random.Random) -> None:
    node, tensor = rng.choice(model.graph.node), rng.choice(model.graph.initializer)
    names = [*(t.name for t in model.graph.initializer), *(n.output[0] for n in model.graph.node), "", "none"]
    choice = rng.randrange(7)
    if choice == 0 and node.input:
        node.input[rng.randrange(len(node.input))] = rng.choice(names)
    elif choice == 1 and node.input:
        del node.input[rng.randrange(len(node.input))]
    elif choice == 2:
        node.op_type = rng.choice(["Conv", "Add", *QUANTIZERS, "Concat", "Mul", "Tanh"])
    elif choice == 3:
        tensor.data_type = rng.choice([1, 2, 3, 5, 6, 7, 16, 22, 99])
    elif choice == 4:
        tensor.raw_data = tensor.raw_data[: rng.randrange(len(tensor.raw_data) + 1)]
    elif choice == 5:
        del tensor.dims[:]
        tensor.dims.extend(rng.choice([0, 1, 2, 16]) for _ in range(rng.randrange(4)))
    else:
        node.attribute.append(onnx.helper.make_attribute("axis", rng.choice([-9, -1, 0, 1, 77])))


@pytest.mark.quick(1)
@pytest.mark.parametrize("seed", range(4))
def test_a_damaged_file_is_checked_or_refused(seed: int, tmp_path: Path) -> None:
    """No other error than ours; edits of a random file never end it."""
    rng, outcomes = random.Random(seed), set()
    for _ in range(15):
        model = build(FORMS[rng.choice(list(FORMS))])
        for _ in range(rng.randint(1, 3)):
            _damage(model, rng)
        path = _write(model, tmp_path)
        for target in CONTRACTS.known():
            try:
                fix_contract(path, target)
                outcomes.add("checked")
            except ExportError:
                outcomes.add("refused")
    assert outcomes == {"checked", "refused"}


def test_nodes_out_of_order_are_refused(tmp_path: Path) -> None:
    model = build(FORMS["qnn"])
    node = planted.node(model, "sum")
    node.input[0] = "b"
    with pytest.raises(ExportError, match=r"Add sum reads b before it is computed: sort the nodes"):
        check_contract(_write(model, tmp_path), "qnn")
