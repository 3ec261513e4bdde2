"""The file that is delivered is not slower than float, unless its size was asked for."""

from __future__ import annotations

from pathlib import Path

import megengine.functional as F
import megengine.module as M
import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper
from onnxruntime.quantization import quantize_dynamic

import qtrace
from qtrace.benchmarking.files import Speed, summarize
from qtrace.config.recipe import as_qconfig
from qtrace.preparation.placement import labelling
from qtrace.quantizing import delivering
from qtrace.quantizing.delivering import is_too_slow, measure_file, rounds_for_speed, timed_settings
from qtrace.quantizing.figures import note_graph
from qtrace.quantizing.file_runs import FloatFile
from qtrace.quantizing.reporting import LogReporter
from tests.importing.onnx.networks import model, node, save, weights
from tests.nets import images, net, randomize

DATA = images(16, 32, 16, 16)
IN_FLOAT = Speed(1e-3, 1.0, 1.0, 1.0, 14)
SLOWER, SAME, FASTER = (Speed(1e-3 / r, r, r - 0.02, r + 0.02, 14) for r in (0.77, 0.99, 1.5))


def _module() -> M.Module:
    return net(lambda self, x: self.b(F.relu(self.a(x))), a=M.Conv2d(32, 64, 3), b=M.Conv2d(64, 32, 3))


def _rounds_in(path: Path) -> bool:
    return any(node.op_type == "QuantizeLinear" for node in onnx.load(path).graph.node)


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch):
    """Lets the quantized file have a speed."""

    def give(speed: Speed) -> None:
        monkeypatch.setattr(delivering, "compare_files", lambda *args, **options: [IN_FLOAT, speed])

    return give


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("speed", "options", "in_float", "said"),
    [
        (SLOWER, {"recipe": "int8"}, True, "so the file is in float: `placement: small`"),
        (SLOWER, {"recipe": {"placement": "fastest"}}, True, "so the file is in float"),
        (SLOWER, {"recipe": {"placement": "small"}}, False, "is slower than float here"),
        (SLOWER, {"recipe": {"placement": "everything"}}, False, "is slower than float here"),
        (SLOWER, {"recipe": "w8a8"}, False, "is slower than float here"),
        (SLOWER, {"recipe": "int8", "keep": True}, False, "is slower than float here"),
        (SLOWER, {"recipe": "int8", "measure": False}, False, ""),
        (SAME, {"recipe": "int8"}, False, "no difference measured"),
        (FASTER, {"recipe": "int8"}, False, "measured  1.50x (1.48 to 1.52)"),
    ],
)
def test_quantize_delivers_by_speed_and_states_it(
    tmp_path: Path, timed, speed, options, in_float, said
) -> None:
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


@pytest.mark.quick(1)
@pytest.mark.parametrize(("prefer", "row"), [(None, "balanced"), ("speed", "fastest"), ("accuracy", "float")])
def test_the_three_rows_are_said_and_the_preferred_one_is_written(
    tmp_path: Path, timed, prefer: str | None, row: str
) -> None:
    timed(FASTER)
    path = tmp_path / "out.onnx"
    result = qtrace.quantize(_module(), DATA, path, recipe="int8", prefer=prefer, progress=False)
    lines = result.summary()
    start = next(i for i, line in enumerate(lines) if line.startswith("choice"))
    names = [line.lstrip("* ").split()[0] for line in lines[start + 1 : start + 4]]
    assert names == ["fastest", "balanced", "float"]
    assert [line.startswith("*") for line in lines[start + 1 : start + 4]] == [n == row for n in names]
    assert _rounds_in(path) == (row != "float")
    facts = note_graph(result.prepared, LogReporter())["choice"]
    assert facts["chosen"] == row
    assert [own["name"] for own in facts["rows"]] == names
    assert facts["rows"][0]["speed"] > 1.05
    assert facts["rows"][2]["sqnr"] is None


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("speeds", "delivered", "said"),
    [
        ((SLOWER, FASTER), "quantized", "balanced is slower than float here, so fastest is written"),
        ((SLOWER, SLOWER), "float", "so the file is in float"),
        ((SAME,), "quantized", "no difference measured"),
    ],
)
def test_a_file_that_is_too_slow_becomes_the_row_above_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, speeds: tuple[Speed, ...], delivered: str, said: str
) -> None:
    """It was in float at once, although more integers may be what is faster."""
    monkeypatch.setattr(labelling, "_PRICE_OF_A_DB", 0.2)  # so that a loud channel is worth its time
    turns = iter(speeds)
    monkeypatch.setattr(delivering, "compare_files", lambda *args, **options: [IN_FLOAT, next(turns)])
    layers = {name: M.Conv2d(n, m, 3) for name, n, m in (("a", 32, 64), ("b", 64, 64), ("c", 64, 32))}
    module = randomize(net(lambda self, x: self.c(F.relu(self.b(self.a(x)))), **layers), 0)
    sizes = np.where(np.arange(64) == 3, 30, 1).astype(np.float32)
    module.a.weight._reset(module.a.weight.numpy() * sizes.reshape(64, 1, 1, 1))
    module.b.weight._reset(module.b.weight.numpy() / sizes.reshape(1, 64, 1, 1) ** 2)
    result = qtrace.quantize(
        module, DATA, tmp_path / "out.onnx", recipe={"placement": "balanced"}, progress=False
    )
    assert next(turns, None) is None
    assert said in "\n".join(result.summary())
    assert result.to_dict()["delivered"] == delivered
    assert _rounds_in(result.path) is (delivered == "quantized")
    assert result.verify is not None
    assert result.verify.passed
    assert result.placement is not None
    chosen = "fastest" if len(speeds) == 2 and delivered == "quantized" else "balanced"
    assert result.placement.chosen == chosen


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
    assert rounds_for_speed(config) == in_float
    assert not rounds_for_speed(as_qconfig({"backend": config.backend, "placement": "everything"}))


@pytest.mark.parametrize(
    ("speed", "slow"),
    [
        (SLOWER, True),
        (SAME, False),
        (Speed(1e-3, 0.9, 0.7, 1.1, 14), False),
        (Speed(1e-3, 0.96, 0.955, 0.97, 400), False),  # less than 5 %
        (Speed(1e-3, 0.85, 0.75, 0.99, 40, busy=True), False),
    ],
)
def test_a_file_is_too_slow_by_five_percent_beyond_doubt(speed: Speed, slow: bool) -> None:
    assert is_too_slow(speed) == slow


def test_what_cannot_be_timed_is_delivered_with_the_reason(tmp_path: Path) -> None:
    result = qtrace.quantize(_module(), DATA, tmp_path / "out.onnx", target="qnn", progress=False)
    assert "measured  no: no runtime here runs it as" in "\n".join(result.summary())
    assert _rounds_in(result.path)


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


def _measure(path: Path, prepared, traced, config, **options) -> delivering.Delivery:
    with FloatFile(traced, config, path.suffix) as twin:
        return measure_file(path, prepared, twin, **options)


@pytest.mark.parametrize(("suffix", "given"), [(".onnx", True), (".param", True), (".tflite", False)])
def test_a_network_with_open_axes_is_timed_at_the_traced_sizes(suffix: str, given: bool) -> None:
    """A TFLite file has no open sizes, and its channels are last."""
    opened = qtrace.trace(_module(), DATA[:1], dynamic={"x": {0: "N", 2: "H", 3: "W"}})
    assert timed_settings(opened, suffix).shapes == ({"x": (1, 32, 16, 16)} if given else {})
    assert timed_settings(qtrace.trace(_module(), DATA[:1], check=False)).shapes == {}


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
    weights = {"a": (16, 32, 3, 3), "b": (8, 16, 1, 1)}
    stored = [numpy_helper.from_array(rng.normal(size=s).astype("float32"), n) for n, s in weights.items()]
    nodes = [
        helper.make_node("Conv", ["x", "a"], ["h"]),
        helper.make_node(op, ["h"], ["g"], domain=domain),
        helper.make_node("Conv", ["g", "b"], ["y"]),
    ]
    ends = [
        helper.make_tensor_value_info("x", 1, ["N", 32, 16, 16]),
        helper.make_tensor_value_info("y", 1, None),
    ]
    graph = helper.make_graph(nodes, "own", ends[:1], ends[1:], stored)
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=8), folder / "own.onnx")
    return folder / "own.onnx"


@pytest.mark.quick(1)
@pytest.mark.parametrize(("speed", "in_float"), [(SLOWER, True), (SAME, False), (FASTER, False)])
def test_the_file_of_the_user_is_what_it_is_measured_against(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, speed: Speed, in_float: bool
) -> None:
    """An export has in pieces what other tools fuse: its own float file may be slower than the user's."""
    source, asked = _own_file(tmp_path, "HardSwish", ""), []

    def compare(files: list[Path], **options: object) -> list[Speed]:
        asked.append(files[0])
        return [IN_FLOAT, speed]

    monkeypatch.setattr(delivering, "compare_files", compare)
    monkeypatch.setattr(delivering, "rounds_for_speed", lambda config: True)
    config = {"placement": "everything"}
    result = qtrace.quantize(source, DATA, tmp_path / "out.onnx", recipe=config, progress=False)
    assert asked == [source]
    assert result.delivery.in_float == in_float
    assert "by your file" in result.delivery.sentence()
    assert result.to_dict()["speed"]["reference"] == "your file"


def test_next_to_the_file_of_the_user_no_float_file_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It cost a second of a run that needs no other float file, as where the network selects rows."""
    traced = qtrace.trace(_module(), DATA[:2], check=False)
    own = qtrace.export(traced, tmp_path / "own.onnx")
    config = as_qconfig({"placement": "everything"})
    prepared = qtrace.calibrate(qtrace.prepare(traced, config), [DATA], progress=False)
    path = qtrace.export(qtrace.convert(prepared), tmp_path / "out.onnx")
    monkeypatch.setattr(FloatFile, "path", property(lambda twin: pytest.fail("a float file is written")))
    delivery = _measure(path, prepared, traced, config, own=own, timer=lambda *_, **__: [IN_FLOAT, SAME])
    assert delivery.speed is SAME


def test_a_float16_file_is_not_replaced_for_its_speed_on_a_cpu(tmp_path: Path) -> None:
    """Its ops gain their time elsewhere; the float file that is measured beside it is in float32."""
    traced = qtrace.trace(_module(), DATA[:2], check=False)
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


def test_a_file_larger_than_its_source_says_by_how_much_and_why(tmp_path: Path, timed) -> None:
    stored = {"w": weights(64, 64), "v": weights(64, 8)}
    nodes = [node("MatMul", "x w", "h"), node("Relu", "h", "r"), node("MatMul", "r v", "y")]
    source = save(model(nodes, {"x": ["n", 64]}, stored=stored), tmp_path)
    quantize_dynamic(source, tmp_path / "dynamic.onnx")
    timed(SLOWER)
    data = np.random.default_rng(0).normal(size=(16, 64)).astype(np.float32)
    options = {"recipe": "w8", "progress": False}
    result = qtrace.quantize(tmp_path / "dynamic.onnx", data, tmp_path / "q.onnx", **options)
    sizes = [(tmp_path / name).stat().st_size for name in ("q.onnx", "dynamic.onnx")]
    (line,) = (line for line in result.summary() if line.startswith("size: "))
    assert f"{sizes[0] / sizes[1]:.2f} times the" in line
    assert "+0.0 kB" not in line
    assert "of dynamic.onnx, through " in line
    assert "gains its size" not in str(result)
    small = qtrace.quantize(source, data, tmp_path / "small.onnx", **options)
    assert not any(line.startswith("size: ") for line in small.summary())
    assert "the file is slower than your file here" in str(small)
