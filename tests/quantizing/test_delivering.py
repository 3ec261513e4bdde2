"""The file that is delivered is not slower than float, unless its size was asked for."""

from __future__ import annotations

from pathlib import Path

import megengine.functional as F
import megengine.module as M
import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

import qtrace
from qtrace.benchmarking.turns import Speed, summarize
from qtrace.config.recipe import as_qconfig
from qtrace.quantizing import delivering
from qtrace.quantizing.delivering import is_float_better, measure_file, timed_settings
from qtrace.quantizing.float_file import FloatFile
from qtrace.quantizing.structure import hash_structure
from qtrace.quantizing.times import MeasuredLabelling
from tests.nets import images, net

DATA = images(16, 3, 8, 8)
IN_FLOAT = Speed(1e-3, 1.0, 1.0, 1.0, 14)
SLOWER, SAME, FASTER = (Speed(1e-3 / r, r, r - 0.02, r + 0.02, 14) for r in (0.77, 0.99, 1.5))


def _module() -> M.Module:
    return net(lambda self, x: self.b(F.relu(self.a(x))), a=M.Conv2d(3, 8, 3), b=M.Conv2d(8, 4, 1))


def _rounds_in(path: Path) -> bool:
    return any(node.op_type == "QuantizeLinear" for node in onnx.load(path).graph.node)


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch):
    """Lets the quantized file have a speed."""

    def give(speed: Speed) -> None:
        monkeypatch.setattr(delivering, "compare_files", lambda *args, **options: [IN_FLOAT, speed])

    return give


@pytest.mark.parametrize(
    ("speed", "options", "in_float", "said"),
    [
        (SLOWER, {"recipe": "int8"}, True, "so the file is in float: `placement: small`"),
        (SLOWER, {"recipe": {"placement": "fastest"}}, True, "so the file is in float"),
        (SLOWER, {"recipe": {"placement": "small"}}, False, "gains its size alone"),
        (SLOWER, {"recipe": {"placement": "everything"}}, False, "gains its size alone"),
        (SLOWER, {"recipe": "w8a8"}, False, "gains its size alone"),
        (SLOWER, {"recipe": "int8", "keep": True}, False, "gains its size alone"),
        (SLOWER, {"recipe": "int8", "measure": False}, False, ""),
        (SAME, {"recipe": "int8"}, False, "no difference measured"),
        (FASTER, {"recipe": "int8"}, False, "measured  1.50x (1.48 to 1.52)"),
    ],
)
def test_what_is_delivered_and_said(tmp_path: Path, timed, speed, options, in_float, said) -> None:
    timed(speed)
    path = tmp_path / "out.onnx"
    result = qtrace.quantize(_module(), DATA, path, progress=False, **options)
    assert _rounds_in(path) is not in_float
    assert result.delivery.in_float is in_float
    assert said in "\n".join(result.summary())
    assert result.verify is not None
    assert result.verify.passed
    facts = result.delivery.to_dict()
    assert facts["delivered"] == ("float" if in_float else "quantized")
    assert ("measured  " in "\n".join(result.summary())) is (facts["speed"] is not None)


@pytest.mark.parametrize(
    ("recipe", "in_float"),
    [
        ("backend/ncnn", True),
        ("backend/tflite", True),
        ("backend/openvino", True),
        ("backend/openvino_avx2", False),
        ("backend/esp_dl", False),
    ],
)
def test_the_packaged_recipe_says_whether_speed_is_asked_for(recipe: str, in_float: bool) -> None:
    config = as_qconfig(recipe)
    assert is_float_better(SLOWER, config) == in_float
    assert not is_float_better(SAME, config)
    assert not is_float_better(SLOWER, as_qconfig({"backend": config.backend, "placement": "everything"}))


def test_what_cannot_be_timed_is_delivered_with_the_reason(tmp_path: Path) -> None:
    result = qtrace.quantize(_module(), DATA, tmp_path / "out.onnx", target="qnn", progress=False)
    assert "measured  no: no runtime here runs it as" in "\n".join(result.summary())
    assert _rounds_in(result.path)


def test_a_difference_within_the_spread_decides_nothing() -> None:
    config = as_qconfig({"placement": "balanced"})
    for speed in (Speed(1e-3, 0.9, 0.7, 1.1, 14), Speed(1e-3, 0.975, 0.97, 0.985, 400)):
        assert not delivering.choose_delivery(IN_FLOAT, speed, config, None).in_float


@pytest.mark.parametrize(("high", "in_float"), [(0.93, True), (0.99, False)])
def test_beside_other_programs_what_is_probably_slower_is_not_delivered(high: float, in_float: bool) -> None:
    """The range is wider by what they may shift, to either side."""
    config, prepared = as_qconfig({"placement": "balanced"}), qtrace.trace(_module(), DATA[:1])
    speed = Speed(1e-3, 0.85, 0.75, high * 1.1, 40, busy=True)
    delivery = delivering.choose_delivery(IN_FLOAT, speed, config, prepared)
    assert delivery.in_float is in_float
    assert ("is probably slower than float here, so the file is in float" in delivery.sentence()) is in_float


def test_the_range_of_a_ratio_covers_both_rounds_and_outliers_do_not_count() -> None:
    quiet, loud = [1.0] * 30, [1.0] * 28 + [9.0] * 2
    reference, own = summarize([[quiet, [0.5] * 30], [loud, [0.8] * 30]])
    assert (reference.ratio, reference.low, reference.high) == (1.0, 1.0, 1.0)
    assert (own.low, own.high) == (1.25, 2.0)
    assert own.faster
    assert not own.slower


def test_few_turns_that_differ_decide_nothing() -> None:
    (_, own) = summarize([[[1.0] * 7, [1.5, 1.4, 1.6, 1.5, 0.9, 1.5, 1.5]]])
    assert own.ratio < 0.7
    assert not own.slower


def _labellings(structure: str, float_speed: Speed) -> list[MeasuredLabelling]:
    own = MeasuredLabelling("predicted", ("a",), 1e-3, 30.0, IN_FLOAT, (1e-3, 1e-3), structure)
    return [own, MeasuredLabelling("float", (), 2e-3, 99.0, float_speed, (0.0, 0.0), "other")]


def _measure(path: Path, prepared, traced, config, **options) -> delivering.Delivery:
    with FloatFile(traced, config, path.suffix) as twin:
        return measure_file(path, prepared, twin, **options)


@pytest.mark.parametrize(
    ("float_speed", "ratio", "in_float"),
    [(Speed(2e-3, 0.5, 0.4, 0.625, 9, busy=True), 2.0, False), (Speed(5e-4, 2.0, 1.6, 2.5, 9), 0.5, True)],
)
def test_a_file_that_was_measured_as_a_labelling_is_not_measured_again(
    tmp_path: Path, monkeypatch, float_speed: Speed, ratio: float, in_float: bool
) -> None:
    """Ranges and weights are others than those of the labelling, and the ops are the same."""
    monkeypatch.setattr(delivering, "compare_files", _refuse)
    traced, config = qtrace.trace(_module(), DATA[:1]), as_qconfig("int8")
    prepared, paths = [], [tmp_path / f"{number}.onnx" for number in range(2)]
    for number, path in enumerate(paths):
        prepared.append(qtrace.prepare(traced, config))
        qtrace.calibrate(prepared[-1], [DATA * (number + 1.5)], progress=False)
        qtrace.export(qtrace.convert(prepared[-1]), path)
    labellings = _labellings(hash_structure(paths[0]), float_speed)
    found = _measure(paths[1], prepared[1], traced, config, labellings=labellings)
    assert found.speed == Speed(1e-3, ratio, 1 / float_speed.high, 1 / float_speed.low, 9, float_speed.busy)
    assert found.float_seconds == float_speed.seconds
    assert found.in_float is in_float
    assert (found.prepared is None) is not in_float
    kept = _measure(paths[1], prepared[1], traced, config, keep=True, labellings=labellings)
    assert not kept.in_float


def test_another_file_than_the_labelling_is_measured(tmp_path: Path, timed) -> None:
    timed(FASTER)
    traced, config = qtrace.trace(_module(), DATA[:1]), as_qconfig("int8")
    prepared = qtrace.prepare(traced, config)
    qtrace.calibrate(prepared, [DATA], progress=False)
    path = qtrace.export(qtrace.convert(prepared), tmp_path / "net.onnx")
    nodes = hash_structure(path).partition(".")[0]
    others = [_labellings("another", FASTER), _labellings(hash_structure(path), FASTER)[:1]]
    for labellings in ((), *others, _labellings(f"{nodes}.other", FASTER)):
        assert _measure(path, prepared, traced, config, labellings=labellings).speed == FASTER


@pytest.mark.parametrize(("suffix", "given"), [(".onnx", True), (".param", True), (".tflite", False)])
def test_a_network_with_open_axes_is_timed_at_the_traced_sizes(suffix: str, given: bool) -> None:
    """A TFLite file has no open sizes, and its channels are last."""
    opened = qtrace.trace(_module(), DATA[:1], dynamic={"x": {0: "N", 2: "H", 3: "W"}})
    assert timed_settings(opened, suffix).shapes == ({"x": (1, 3, 8, 8)} if given else {})
    assert timed_settings(qtrace.trace(_module(), DATA[:1])).shapes == {}


def _refuse(*args: object, **options: object) -> None:
    raise AssertionError("measured again")


@pytest.mark.slow
def test_a_network_of_a_real_size_is_timed_and_delivered_faster_than_float(tmp_path: Path) -> None:
    layers = {"a": M.Conv2d(3, 64, 3, padding=1), "b": M.Conv2d(64, 64, 3, padding=1)}
    module = net(lambda self, x: self.b(F.relu(self.b(F.relu(self.a(x))))), **layers)
    result = qtrace.quantize(
        module, images(16, 3, 64, 64), tmp_path / "out.onnx", recipe="int8", progress=False
    )
    speed = result.delivery.speed
    assert speed is not None
    assert speed.low <= speed.ratio <= speed.high
    assert result.delivery.in_float is speed.slower


def _own_file(folder: Path, op: str, domain: str) -> Path:
    """Writes a network between whose convolutions stands an op of ONNX, or of another domain."""
    rng = np.random.default_rng(0)
    weights = {"a": (16, 3, 3, 3), "b": (8, 16, 1, 1)}
    stored = [numpy_helper.from_array(rng.normal(size=s).astype("float32"), n) for n, s in weights.items()]
    nodes = [
        helper.make_node("Conv", ["x", "a"], ["h"]),
        helper.make_node(op, ["h"], ["g"], domain=domain),
        helper.make_node("Conv", ["g", "b"], ["y"]),
    ]
    ends = [
        helper.make_tensor_value_info("x", 1, ["N", 3, 8, 8]),
        helper.make_tensor_value_info("y", 1, None),
    ]
    graph = helper.make_graph(nodes, "own", ends[:1], ends[1:], stored)
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=8), folder / "own.onnx")
    return folder / "own.onnx"


@pytest.mark.parametrize("placement", ["everything", "balanced"])  # integers, and float
@pytest.mark.parametrize(
    ("op", "domain", "own", "ratio"),
    [
        ("HardSwish", "", SLOWER, 0.77),
        ("HardSwish", "", FASTER, 1.5),
        ("Relu", "", SLOWER, None),  # nothing is taken apart: the own file is float as exported
        ("Gelu", "com.microsoft", SLOWER, None),  # it is kept
    ],
)
def test_the_file_is_measured_beside_that_of_the_user_too(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    placement: str,
    op: str,
    domain: str,
    own: Speed,
    ratio: float | None,
) -> None:
    """The float file of an export has in pieces what other tools fuse, and is slower than the user's."""
    source = _own_file(tmp_path, op, domain)

    def compare(files: list[Path], **options: object) -> list[Speed]:
        return [IN_FLOAT, own if files[0] == source else FASTER]

    monkeypatch.setattr(delivering, "compare_files", compare)
    config = {"placement": placement}
    result = qtrace.quantize(source, DATA, tmp_path / "out.onnx", recipe=config, progress=False)
    beside = result.delivery.beside_own
    assert (beside.ratio if beside is not None else None) == ratio
    assert (result.to_dict()["beside_own_file"] or {}).get("ratio") == ratio
    assert ("keep that one for speed" in result.delivery.sentence()) == (ratio == 0.77)
    assert ("1.30x as fast as this one" in "\n".join(result.summary())) == (ratio == 0.77)


def test_a_float16_file_is_not_replaced_for_its_speed_on_a_cpu(tmp_path: Path) -> None:
    """Its ops gain their time elsewhere; the float file that is measured beside it is in float32."""
    traced = qtrace.trace(_module(), DATA[:2])
    rules = [{"match": {"name": "b*"}, "quantize": False}]
    config = as_qconfig({"placement": "fastest", "float": "fp16", "rules": rules})
    rounding = config.model_copy(update={"placement": None})
    prepared = qtrace.calibrate(qtrace.prepare(traced, rounding), [DATA], progress=False)
    path = qtrace.export(qtrace.convert(prepared), tmp_path / "net.onnx")

    def slow(files: list[Path], **_: object) -> list[Speed]:
        halves = [any(t.data_type == 10 for t in onnx.load(file).graph.initializer) for file in files]
        assert halves == [False, True]
        return [IN_FLOAT, SLOWER]

    for float_type, in_float in (("fp16", False), (None, True)):
        changed = config.model_copy(update={"float": float_type})
        assert _measure(path, prepared, traced, changed, timer=slow).in_float == in_float
