"""What stays float in float16: the file, what stays float32 in it, and its run beside the graph."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import megengine as mge
import megengine.functional as F
import megengine.module as M
import numpy as np
import onnx
import pytest
from onnx import TensorProto, numpy_helper

import qtrace
from qtrace.calibration.algorithms import fingerprint
from qtrace.calibration.collecting import collect
from qtrace.errors import ExportError
from qtrace.extras.contracts import check_contract
from qtrace.extras.device import dumped_tensors
from qtrace.graph.types import TracedModule
from qtrace.preparation.float16 import choose_float16
from qtrace.preparation.model import QuantizedModel
from qtrace.verification.runtimes import get as get_runtime
from tests.nets import net

X = np.random.default_rng(0).normal(size=(4, 3, 16, 16)).astype(np.float32)
ROWS = np.random.default_rng(1).normal(size=(4, 6, 32)).astype(np.float32)
ALL_FLOAT = {"match": {"name": "*"}, "quantize": False}
RUNTIMES = ("onnxruntime", "openvino")


def _convs(self: Any, x: Any) -> Any:
    x = F.relu(self.a(x))
    x = F.relu(self.c(x + F.relu(self.b(x))))
    x = F.relu(self.d(F.max_pool2d(x, 2, 2)))
    return self.e(F.flatten(F.avg_pool2d(x, 8), 1))


@pytest.fixture(scope="module")
def convs() -> TracedModule:
    layers = {"a": M.Conv2d(3, 16, 3, padding=1), "b": M.Conv2d(16, 16, 3, padding=1)}
    layers |= {"c": M.Conv2d(16, 16, 3, padding=1), "d": M.Conv2d(16, 32, 3, padding=1)}
    return qtrace.trace(net(_convs, **layers, e=M.Linear(32, 10)), X)


def _converted(traced: TracedModule, data: Any, *rules: Any, **config: Any) -> TracedModule:
    prepared = qtrace.prepare(traced, {"float": "fp16", "rules": list(rules), **config})
    return qtrace.convert(qtrace.calibrate(prepared, [data], progress=False))


def _traced(forward: Any, *data: np.ndarray, **children: Any) -> TracedModule:
    return qtrace.trace(net(forward, **children), *data)


def _export(converted: TracedModule, folder: Path, name: str = "net.onnx", **options: Any) -> onnx.ModelProto:
    return onnx.load(qtrace.export(converted, folder / name, **options))


def _reasons(converted: TracedModule) -> dict[str, str]:
    return {choice.op: choice.reason for choice in choose_float16(QuantizedModel(converted))}


def _types(model: onnx.ModelProto) -> dict[str, int]:
    """Name -> type of every tensor, as ONNX infers them."""
    graph = onnx.shape_inference.infer_shapes(model, strict_mode=True, data_prop=True).graph
    infos = (*graph.input, *graph.output, *graph.value_info)
    types = {info.name: info.type.tensor_type.elem_type for info in infos}
    return {**types, **{tensor.name: tensor.data_type for tensor in graph.initializer}}


def _halves(model: onnx.ModelProto) -> set[str]:
    """The types of nodes that give float16."""
    types = _types(model)
    return {node.op_type for node in model.graph.node if types[node.output[0]] == TensorProto.FLOAT16}


def _verified(folder: Path, converted: TracedModule, data: Any, runtime: str = "onnxruntime") -> Any:
    return qtrace.verify(folder / "net.onnx", converted, [data], runtime=runtime)


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize("rule", [{"match": {"name": ["b*", "c*"]}, "quantize": False}, ALL_FLOAT])
def test_what_stays_float_is_float16(runtime: str, rule: Any, convs: TracedModule, tmp_path: Path) -> None:
    converted = _converted(convs, X, rule)
    model = _export(converted, tmp_path)
    assert not any(_reasons(converted).values())
    assert "Conv" in _halves(model)
    floats = [t for t in model.graph.initializer if t.data_type == TensorProto.FLOAT]
    assert all(t.name.endswith("_scale") for t in floats)  # of QuantizeLinear and DequantizeLinear alone
    ends = (*model.graph.input, *model.graph.output)
    assert {end.type.tensor_type.elem_type for end in ends} == {TensorProto.FLOAT}
    report = _verified(tmp_path, converted, X, runtime)
    assert report.passed, report.table()
    count = len(_reasons(converted))
    assert f"float16: {count} ops of the file, as the graph rounds them" in report.summary()
    assert report.to_dict()["float16"] == count


def test_a_file_without_floats_is_the_same(convs: TracedModule, tmp_path: Path) -> None:
    converted = _converted(convs, X)
    both = [_export(converted, tmp_path, f"{kind}.onnx", float=kind) for kind in ("fp16", "fp32")]
    assert both[0] == both[1]
    assert _reasons(converted) == {}


def test_the_file_is_half_as_large(convs: TracedModule, tmp_path: Path) -> None:
    converted = _converted(convs, X, ALL_FLOAT)
    sizes = []
    for kind in ("fp16", "fp32"):
        model = _export(converted, tmp_path, f"{kind}.onnx", float=kind)
        sizes.append(sum(len(t.raw_data) for t in model.graph.initializer if "ints" not in t.name))
    assert 2 * sizes[0] == sizes[1]


def test_float32_may_be_asked_for(convs: TracedModule, tmp_path: Path) -> None:
    converted = _converted(convs, X, ALL_FLOAT)
    assert _halves(_export(converted, tmp_path)) > {"Conv"}
    assert _halves(_export(converted, tmp_path, "other.onnx", float="fp32")) == set()


def test_a_network_that_was_not_calibrated_for_it_is_refused(convs: TracedModule, tmp_path: Path) -> None:
    prepared = qtrace.prepare(convs, {"rules": [{"match": {"name": "b*"}, "quantize": False}]})
    converted = qtrace.convert(qtrace.calibrate(prepared, [X], progress=False))
    with pytest.raises(ExportError, match="float16 needs the ranges .* calibrate with float: fp16"):
        _export(converted, tmp_path, float="fp16")
    with pytest.raises(
        ExportError, match=r"float='half' is no choice of the export: choose one of fp32, fp16"
    ):
        _export(converted, tmp_path, float="half")
    with pytest.raises(ExportError, match="lacks option 'float' for a plain traced module"):
        _export(convs, tmp_path, float="fp16")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("suffix", "name"), [(".tflite", "tflite"), (".param", "ncnn")])
def test_other_formats_refuse_float16(suffix: str, name: str, convs: TracedModule, tmp_path: Path) -> None:
    converted = _converted(convs, X, ALL_FLOAT, backend=name)
    path = tmp_path / f"net{suffix}"
    with pytest.raises(
        ExportError, match=f"format {name} writes what stays float in float32, and the recipe"
    ):
        qtrace.export(converted, path)
    with pytest.raises(ExportError, match=f"format {name} writes .* leave out float=fp16"):
        qtrace.export(converted, path, float="fp16")
    assert list(tmp_path.iterdir()) == []
    assert qtrace.export(converted, path, float="fp32").exists()


def test_dot_and_msc_export_of_float16_recipes(convs: TracedModule, tmp_path: Path) -> None:
    converted = _converted(convs, X, ALL_FLOAT)
    for name in ("net.dot", "net.msc"):
        assert qtrace.export(converted, tmp_path / name, name[-3:]).exists()


# -- what stays float32 -----------------------------------------------------------------------------


def test_large_values_stay_float32(tmp_path: Path) -> None:
    """A mask of -1e9, and results beyond float16: neither NaN nor infinity comes out."""

    def forward(self: Any, x: Any) -> Any:
        scores = F.matmul(self.a(x), self.b(x), transpose_b=True)
        shown = F.maximum(x[..., :6], self.first) > 0.5  # one at least
        seen = F.softmax(F.where(shown, scores, F.full_like(scores, -1e9)), axis=-1)
        return F.matmul(seen, self.c(x) * 3e4), scores * 1e-12

    layers = {name: M.Linear(32, 32) for name in "abc"}
    layers["first"] = mge.Parameter(np.eye(1, 6, dtype=np.float32))
    converted = _converted(_traced(forward, ROWS, **layers), ROWS, ALL_FLOAT)
    reasons = _reasons(converted)
    model = _export(converted, tmp_path)
    assert reasons["a_out"] == reasons["b_out"] == reasons["c_out"] == ""
    assert reasons["mul_out"] == reasons["matmul_out_1"] == "its values come near 65504, where float16 ends"
    assert reasons["softmax_out"] == "it holds a number that stands for infinity"
    assert reasons["mul_out_1"].startswith("its values are so small")
    values = [numpy_helper.to_array(t) for t in model.graph.initializer]
    assert all(np.isfinite(v).all() for v in values if v.dtype.kind == "f")
    assert np.abs([v for v in values if v.dtype == np.float16 and not v.ndim]).max(initial=0) < 6.5e4
    for runtime in RUNTIMES:
        report = _verified(tmp_path, converted, ROWS, runtime)
        assert report.passed, report.summary()


def test_sums_norms_and_steep_functions_stay_float32(tmp_path: Path) -> None:
    def forward(self: Any, x: Any) -> Any:
        x = self.b(self.norm(self.a(x)))
        return F.mean(x, axis=1), F.exp(x), F.sqrt(F.abs(x)), x / (F.abs(x) + 1e-12)

    layers = {"a": M.Linear(32, 32), "b": M.Linear(32, 8), "norm": M.LayerNorm(32)}
    converted = _converted(_traced(forward, ROWS, **layers), ROWS, ALL_FLOAT)
    kinds = {choice.kind: choice.reason for choice in choose_float16(QuantizedModel(converted))}
    assert kinds["linear"] == ""
    assert kinds["layer_norm"].startswith("it adds up squares")
    assert kinds["mean"].startswith("it adds up many values")
    assert kinds["exp"] == kinds["sqrt"] != ""
    assert kinds["div"] == "it divides by computed values, which may be too small for float16"
    _export(converted, tmp_path)
    assert _verified(tmp_path, converted, ROWS).passed


def test_small_weights_stay_float32(tmp_path: Path) -> None:
    module = net(lambda self, x: self.b(F.relu(self.a(x)) * 1e5), a=M.Linear(32, 16), b=M.Linear(16, 8))
    module.a.weight._reset(mge.Parameter(module.a.weight.numpy() * 1e-7))
    module.a.bias._reset(mge.Parameter(module.a.bias.numpy() * 1e-7))
    converted = _converted(qtrace.trace(module, ROWS, check=False), ROWS, ALL_FLOAT)
    reasons = _reasons(converted)
    assert reasons["a_out"].startswith("its values are so small")
    assert reasons["b_out"] == ""
    _export(converted, tmp_path)
    assert _verified(tmp_path, converted, ROWS).passed


def test_positions_stay_float32(tmp_path: Path) -> None:
    """Floats that become numbers of rows: 2049 is no number of float16."""

    def forward(self: Any, x: Any) -> Any:
        places = (F.abs(self.a(x))[..., 0] * 3000.0).astype("int32")
        return places, self.b(x)

    converted = _converted(_traced(forward, ROWS, a=M.Linear(32, 4), b=M.Linear(32, 4)), ROWS, ALL_FLOAT)
    reasons = _reasons(converted)
    assert reasons["a_out"] == "its values become positions, counts or choices"
    assert reasons["b_out"] == ""
    _export(converted, tmp_path)
    report = _verified(tmp_path, converted, ROWS)
    assert report.passed, report.summary()


def test_moves_between_float32_ops_are_not_rounded() -> None:
    forward = lambda self, x: F.exp(F.transpose(F.exp(x), (0, 2, 1)))  # noqa: E731
    reasons = _reasons(_converted(_traced(forward, ROWS), ROWS, ALL_FLOAT))
    assert "it moves values between ops that are not in float16" in reasons.values()


def test_a_range_beyond_the_first_batch_counts() -> None:
    forward = lambda self, x: F.relu(self.a(x))  # noqa: E731
    traced = _traced(forward, ROWS, a=M.Linear(32, 8))
    prepared = qtrace.prepare(traced, {"float": "fp16", "rules": [ALL_FLOAT]})
    for batches, fits in (([ROWS, ROWS], True), ([ROWS, ROWS * 1e5], False)):
        converted = qtrace.convert(qtrace.calibrate(prepared, batches, progress=False))
        assert (not any(_reasons(converted).values())) == fits


def test_explain_names_what_stays_float32(convs: TracedModule, tmp_path: Path) -> None:
    forward = lambda self, x: F.exp(self.b(F.relu(self.a(x)) * 3e5) * 1e-5)  # noqa: E731
    traced = _traced(forward, ROWS, a=M.Linear(32, 16), b=M.Linear(16, 8))
    converted = _converted(traced, ROWS, ALL_FLOAT)
    explanation = qtrace.explain(converted)
    lines = explanation.summary(None).split("\n")
    assert "float16: 2 of 6 ops that stay float" in lines
    assert "  float32: 1 exp: small errors of what it reads become large ones of its result" in lines
    assert any(line.startswith("  float32: 2 mul, 1 linear: its values come near 65504") for line in lines)
    told = {name: str(explanation.why(name)[0].text()) for name in ("a_out", "b_out")}
    assert "ONNX files have it in float16." in told["a_out"]
    assert "ONNX files have it in float32, not in float16: its values come near 65504" in told["b_out"]
    assert [c["op"] for c in explanation.to_dict()["float16"] if not c["reason"]] == ["a_out", "relu_out"]
    prepared = qtrace.prepare(traced, {"float": "fp16", "rules": [ALL_FLOAT]})
    assert "the ranges of a calibration decide" in qtrace.explain(prepared).summary()
    assert "float16" not in qtrace.explain(qtrace.prepare(traced)).summary()


def test_workers_and_resumed_runs_give_the_ranges_of_one(convs: TracedModule, tmp_path: Path) -> None:
    """The ranges are statistics as all others: they merge, and a checkpoint without them is another one."""
    prepared = qtrace.prepare(convs, {"float": "fp16", "rules": [ALL_FLOAT]})
    batches = [(0, X), (1, X * 30), (2, X * 0.1)]
    first, second = (collect(prepared, part).statistics for part in (batches[1:], batches[:1]))
    qtrace.calibrate(prepared, [], statistics=first.merge(second), progress=False)
    ranges = QuantizedModel(prepared).record.float_ranges
    qtrace.calibrate(prepared, [batch for _, batch in batches], progress=False)
    assert ranges == QuantizedModel(prepared).record.float_ranges
    assert max(ranges.values()) > 50
    plain = qtrace.prepare(convs, {"rules": [ALL_FLOAT]})
    assert fingerprint(prepared) != fingerprint(plain)


def test_ranges_are_kept_in_files(convs: TracedModule, tmp_path: Path) -> None:
    converted = _converted(convs, X, ALL_FLOAT)
    qtrace.save(converted, tmp_path / "net.mge")
    loaded = qtrace.load(tmp_path / "net.mge")
    assert choose_float16(QuantizedModel(loaded)) == choose_float16(QuantizedModel(converted))
    assert _halves(_export(loaded, tmp_path)) > {"Conv"}


def test_values_that_are_not_finite_stay_float32() -> None:
    """An infinity in the middle, which later ops make finite, is no fault of the data."""
    forward = lambda self, x: F.sigmoid(F.log(F.abs(x)))  # noqa: E731
    data = ROWS.copy()
    data[0, 0, 0] = 0.0
    reasons = _reasons(_converted(_traced(forward, ROWS), data, ALL_FLOAT))
    assert reasons["sigmoid_out"] == "its values come near 65504, where float16 ends"


# -- neighbours -------------------------------------------------------------------------------------


def test_methods_of_linear_layers(tmp_path: Path) -> None:
    """Weights alone, blocks of 4 bits, and the range of each batch beside floats."""
    forward = lambda self, x: self.d(F.relu(self.c(F.relu(self.b(F.relu(self.a(x)))))))  # noqa: E731
    layers = {name: M.Linear(32, 32) for name in "abcd"}
    traced = _traced(forward, ROWS, **layers)
    block = {"bits": 4, "block": 32, "narrow": False}
    rules = [
        {"match": {"name": "b*"}, "quantize": True, "method": "dynamic"},
        {"match": {"name": "c*"}, "quantize": True, "method": "weight_only"},
        {"match": {"name": "d*"}, "quantize": True, "method": "weight_only", "weight": block},
    ]
    for backend in ("onnxruntime", "generic"):
        converted = _converted(traced, ROWS, ALL_FLOAT, *rules, backend=backend)
        model = _export(converted, tmp_path, force=True)
        assert "a_out" in {p.key: p.value for p in model.metadata_props}["qtrace.float16"].split("\n")
        report = _verified(tmp_path, converted, ROWS)
        assert report.passed, f"{backend} {report.table()}"


def test_one_weight_of_an_int8_and_a_float_op(tmp_path: Path) -> None:
    """The integers come from the float32 weight; the float op has it in float16."""

    def forward(self: Any, x: Any) -> Any:
        return F.linear(x, self.a.weight) + F.relu(F.matmul(x, F.transpose(self.a.weight, (1, 0))))

    traced = _traced(forward, ROWS, a=M.Linear(32, 32))
    names = [c.name for c in qtrace.explain(traced).annotation.notes if c.kind == "matmul"]
    converted = _converted(traced, ROWS, {"match": {"name": names}, "quantize": False})
    model = _export(converted, tmp_path)
    assert "MatMul" in _halves(model)
    for runtime in RUNTIMES:
        report = _verified(tmp_path, converted, ROWS, runtime)
        assert report.passed, report.table()


def test_token_ids_and_open_axes(tmp_path: Path) -> None:
    ids = np.random.default_rng(2).integers(0, 50, (3, 7)).astype(np.int32)

    def forward(self: Any, x: Any) -> Any:
        return self.b(F.gelu(self.a(self.table(x))))

    layers = {"table": M.Embedding(50, 16), "a": M.Linear(16, 24), "b": M.Linear(24, 5)}
    converted = _converted(_traced(forward, ids, **layers), ids, ALL_FLOAT)
    model = _export(converted, tmp_path)
    assert {"Gather", "Gemm"} & _halves(model) == {"Gather"} or "MatMul" in _halves(model)
    assert model.graph.input[0].type.tensor_type.elem_type == TensorProto.INT32
    for runtime in RUNTIMES:
        assert _verified(tmp_path, converted, ids, runtime).passed


def test_an_output_that_others_read_and_one_that_is_an_input(tmp_path: Path) -> None:
    def forward(self: Any, x: Any) -> Any:
        y = self.a(x)
        return x, y, self.b(F.relu(y)), F.exp(y)

    converted = _converted(_traced(forward, ROWS, a=M.Linear(32, 8), b=M.Linear(8, 4)), ROWS, ALL_FLOAT)
    model = _export(converted, tmp_path)
    assert {o.type.tensor_type.elem_type for o in model.graph.output} == {TensorProto.FLOAT}
    for runtime in RUNTIMES:
        report = _verified(tmp_path, converted, ROWS, runtime)
        assert report.passed, report.summary()


KINDS = {
    "attention": lambda self, x: (
        F.nn.scaled_dot_product_attention(x, x, x)
        if hasattr(F.nn, "scaled_dot_product_attention")
        else F.matmul(F.softmax(F.matmul(x, x, transpose_b=True) * 0.1, axis=-1), x)
    ),
    "moves": lambda self, x: F.concat(
        [F.roll(self.a(x), 1, 1), F.split(self.a(x), 2, axis=1)[0], F.stack([x, x], 1)[:, 0]], axis=1
    ),
    "functions": lambda self, x: F.silu(self.a(x)) + F.hswish(self.a(x)) * F.sigmoid(x) - F.tanh(x) / 3.0,
    "bounds": lambda self, x: F.clip(F.maximum(F.relu6(self.a(x)), -1e9), -1e30, 1e30),
    "pads": lambda self, x: F.nn.pad(self.a(x), ((0, 0), (1, 1), (0, 0)), constant_value=0.5),
}


@pytest.mark.quick(2)
@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize("kind", KINDS)
def test_kinds(kind: str, runtime: str, tmp_path: Path) -> None:
    converted = _converted(_traced(KINDS[kind], ROWS, a=M.Linear(32, 32)), ROWS, ALL_FLOAT)
    model = _export(converted, tmp_path)
    assert not any(_reasons(converted).values()), _reasons(converted)
    assert _halves(model) - {"Cast"}
    report = _verified(tmp_path, converted, ROWS, runtime)
    assert report.passed, report.summary()


IMAGES = {
    "resize": lambda self, x: self.b(F.nn.interpolate(self.a(x), scale_factor=2.0)),
    "nearest": lambda self, x: self.b(F.nn.interpolate(self.a(x), scale_factor=2.0, mode="nearest")),
    "transposed": lambda self, x: self.t(self.a(x)),
    "pool": lambda self, x: (
        self.b(F.nn.adaptive_avg_pool2d(self.a(x), 4)) + F.avg_pool2d(self.a(x), 4)[:, :4]
    ),
    "prelu": lambda self, x: self.b(F.prelu(self.a(x), self.slope)) + F.nn.pixel_shuffle(self.a(x), 1)[:, :4],
}


@pytest.mark.quick(2)
@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize("kind", IMAGES)
def test_kinds_of_images(kind: str, runtime: str, tmp_path: Path) -> None:
    layers = {"a": M.Conv2d(3, 8, 3, padding=1), "b": M.Conv2d(8, 4, 1), "t": M.ConvTranspose2d(8, 4, 2, 2)}
    slope = mge.Parameter(np.full(1, 0.25, np.float32))
    converted = _converted(_traced(IMAGES[kind], X, **layers, slope=slope), X, ALL_FLOAT)
    model = _export(converted, tmp_path)
    assert not any(_reasons(converted).values()), _reasons(converted)
    assert "Conv" in _halves(model)
    report = _verified(tmp_path, converted, X, runtime)
    assert report.passed, report.summary()


# -- verify -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", [{"match": {"name": ["b*", "c*"]}, "quantize": False}, ALL_FLOAT])
def test_a_wrong_weight_is_noticed(rule: Any, convs: TracedModule, tmp_path: Path) -> None:
    converted = _converted(convs, X, rule)
    model = _export(converted, tmp_path)
    tensor = next(t for t in model.graph.initializer if t.name == "b_weight")
    values = numpy_helper.to_array(tensor).copy()
    assert values.dtype == np.float16
    values[3] *= -1
    tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))
    onnx.save(model, tmp_path / "net.onnx")
    assert not _verified(tmp_path, converted, X).passed


def test_a_wrong_integer_behind_float16_is_noticed(convs: TracedModule, tmp_path: Path) -> None:
    """The tolerance is that of float16, not a step of the grid."""
    converted = _converted(convs, X, {"match": {"name": ["b*", "c*"]}, "quantize": False})
    model = _export(converted, tmp_path)
    tensor = next(t for t in model.graph.initializer if t.name == "c_bias_flat")
    step = QuantizedModel(converted).rounded["c_out_q"].qparams.scale
    values = numpy_helper.to_array(tensor) + np.float16(0.5 * step)
    tensor.CopyFrom(numpy_helper.from_array(values.astype(np.float16), tensor.name))
    onnx.save(model, tmp_path / "net.onnx")
    assert not _verified(tmp_path, converted, X).passed


# -- files --------------------------------------------------------------------------------------------


def _file(
    folder: Path, kind: int, *nodes: Any, outputs: tuple[str, ...] = ("y",), **stored: np.ndarray
) -> Path:
    dtype = np.float16 if kind == TensorProto.FLOAT16 else np.float32
    tensors = [
        numpy_helper.from_array(v.astype(dtype) if v.dtype.kind == "f" else v, n) for n, v in stored.items()
    ]
    ends = [onnx.helper.make_tensor_value_info("x", kind, ["N", 8, 6, 6])]
    results = [onnx.helper.make_tensor_value_info(name, kind, None) for name in outputs]
    graph = onnx.helper.make_graph(list(nodes), "net", ends, results, tensors)
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, folder / "source.onnx")
    return folder / "source.onnx"


MAPS = np.random.default_rng(3).normal(size=(4, 8, 6, 6)).astype(np.float32)
KERNEL = np.random.default_rng(4).normal(size=(8, 8, 3, 3)).astype(np.float32) / 8
_node = onnx.helper.make_node


def test_a_file_in_float16_comes_out_as_one(tmp_path: Path) -> None:
    """Without Casts at its ends, which files in float32 need to keep their types."""
    nodes = [
        _node("Conv", ["x", "w"], ["a"], pads=[1, 1, 1, 1]),
        _node("Relu", ["a"], ["b"], name="named", doc_string="of the file"),
        _node("Conv", ["b", "v"], ["y"], pads=[1, 1, 1, 1]),
    ]
    path = _file(tmp_path, TensorProto.FLOAT16, *nodes, w=KERNEL, v=KERNEL)
    converted = _converted(qtrace.from_onnx(path, {"x": (2, 8, 6, 6)}), MAPS, ALL_FLOAT)
    model = _export(converted, tmp_path)
    assert [node.op_type for node in model.graph.node] == ["Conv", "Relu", "Conv"]
    assert [node.doc_string for node in model.graph.node] == ["", "of the file", ""]
    ends = (*model.graph.input, *model.graph.output)
    assert {end.type.tensor_type.elem_type for end in ends} == {TensorProto.FLOAT16}
    assert {t.data_type for t in model.graph.initializer} == {TensorProto.FLOAT16}
    for runtime in RUNTIMES:
        report = _verified(tmp_path, converted, MAPS, runtime)
        assert report.passed, report.summary()
    wide = _export(converted, tmp_path, "wide.onnx", float="fp32")
    assert [node.op_type for node in wide.graph.node] == ["Cast", "Conv", "Relu", "Conv", "Cast"]


def test_kept_nodes_and_branches_read_float32(tmp_path: Path) -> None:
    """A node that is kept as in the file, and a body that reads a tensor around it."""
    inside = onnx.helper.make_tensor_value_info("t", TensorProto.FLOAT, None)
    other = onnx.helper.make_tensor_value_info("e", TensorProto.FLOAT, None)
    then = onnx.helper.make_graph([_node("Neg", ["b"], ["t"])], "then", [], [inside])
    orelse = onnx.helper.make_graph([_node("Identity", ["b"], ["e"])], "else", [], [other])
    nodes = [
        _node("Conv", ["x", "w"], ["a"], pads=[1, 1, 1, 1]),
        _node("Relu", ["a"], ["b"]),
        _node("ReduceMax", ["b"], ["m"], keepdims=0),
        _node("Greater", ["m", "bound"], ["large"]),
        _node("If", ["large"], ["c"], then_branch=then, else_branch=orelse),
        _node("Conv", ["c", "v"], ["y"], pads=[1, 1, 1, 1]),
    ]
    bound = np.array(0.1, np.float32)
    path = _file(tmp_path, TensorProto.FLOAT, *nodes, w=KERNEL, v=KERNEL, bound=bound)
    converted = _converted(qtrace.from_onnx(path, {"x": (2, 8, 6, 6)}), MAPS, ALL_FLOAT)
    model = _export(converted, tmp_path)
    assert "If" in {node.op_type for node in model.graph.node}
    assert "Conv" in _halves(model)
    for runtime in ("onnxruntime",):
        report = _verified(tmp_path, converted, MAPS, runtime)
        assert report.passed, report.summary()


@pytest.mark.quick(1)
@pytest.mark.parametrize("factor", [1.0, 40.0])
def test_a_batch_of_larger_values_has_a_tolerance_of_its_own(
    factor: float, convs: TracedModule, tmp_path: Path
) -> None:
    converted = _converted(convs, X * factor, {"match": {"name": ["b*", "c*"]}, "quantize": False})
    _export(converted, tmp_path)
    report = qtrace.verify(tmp_path / "net.onnx", converted, [X * 0.01, X * factor])
    assert report.passed, report.table()


def test_dumped_tensors_of_a_float16_file(convs: TracedModule, tmp_path: Path) -> None:
    """A device dumps integers; which ops are in float16 is read from the file."""
    converted = _converted(convs, X, {"match": {"name": ["b*", "c*"]}, "quantize": False})
    path = qtrace.export(converted, tmp_path / "net.onnx")
    session = get_runtime(path, "onnxruntime").open(path, False)
    run = session.run([X])
    arrays = {f"sites/{name}": value for name, value in run.integers.items()}
    np.savez(tmp_path / "dump.npz", **arrays)
    report = qtrace.verify(path, converted, [X], runtime=dumped_tensors(tmp_path / "dump.npz", converted))
    assert report.float16 == 2
    assert report.passed, report.table()


def test_preprocessing_and_targets(convs: TracedModule, tmp_path: Path) -> None:
    """Pixels in, and the contracts of targets."""
    preprocess = {"size": [3, 16, 16], "mean": [0, 0, 0], "std": [1, 1, 1], "scale": 0.01}
    converted = _converted(convs, X, ALL_FLOAT, preprocess=preprocess)
    model = _export(converted, tmp_path, preprocess=True)
    assert model.graph.input[0].type.tensor_type.elem_type == TensorProto.UINT8
    assert _verified(tmp_path, converted, X).passed
    rule = {"match": {"name": ["b*", "c*"]}, "quantize": False}
    for target in ("tensorrt", "qnn", "ryzenai"):
        converted = _converted(convs, X, rule, backend=target)
        path = qtrace.export(converted, tmp_path / f"{target}.onnx")
        assert "Conv" in _halves(onnx.load(path))
        assert check_contract(path, target).passed
        assert qtrace.verify(path, converted, [X]).passed


def test_products_that_may_add_up_too_far_stay_float32() -> None:
    """The results are small, as the terms have both signs; an accumulator of float16 overflows on the way."""
    forward = lambda self, x: (self.a(x), F.matmul(x * 300.0, x * 300.0, transpose_b=True))  # noqa: E731
    traced = _traced(forward, ROWS, a=M.Linear(32, 4))
    traced.a.weight._reset(mge.Parameter(np.tile([900.0, -900.0], (4, 16)).astype(np.float32)))
    pairs = np.repeat(ROWS[..., ::2], 2, -1)
    reasons = {
        choice.op: choice for choice in choose_float16(QuantizedModel(_converted(traced, pairs, ALL_FLOAT)))
    }
    assert reasons["a_out"].detail.startswith("its products may add up to ")
    assert reasons["matmul_out"].reason == reasons["a_out"].reason


def test_compared_values_and_recurrent_layers_stay_float32() -> None:
    forward = lambda self, x: (F.where(self.a(x) > 0.1, x, -x), self.r(self.b(x))[0])  # noqa: E731
    layers = {"a": M.Linear(32, 32), "b": M.Linear(32, 32), "r": M.LSTM(32, 8)}
    reasons = _reasons(_converted(_traced(forward, ROWS, **layers), ROWS, ALL_FLOAT))
    assert reasons["a_out"] == "its values become positions, counts or choices"
    assert reasons["b_out"] == ""
    assert "it has no form in float16 here" in reasons.values()


def test_a_quantized_file_comes_in_again(convs: TracedModule, tmp_path: Path) -> None:
    """With its integers; what was float16 is float32 in the next file."""
    converted = _converted(convs, X, {"match": {"name": ["b*", "c*"]}, "quantize": False})
    path = qtrace.export(converted, tmp_path / "net.onnx")
    again = qtrace.convert(qtrace.from_onnx(path, {"x": X.shape}))
    model = _export(again, tmp_path, "again.onnx")
    assert _halves(model) == set()
    report = qtrace.verify(tmp_path / "again.onnx", again, [X])
    assert (report.passed, report.worst_lsb()) == (True, 0)
    first, second = (module(mge.Tensor(X)).numpy() for module in (converted, again))
    assert np.abs(first - second).max() < 0.02 * np.abs(first).max()
