"""The float ONNX model and its parameter files: names, numbers, refusals; nothing half-written is left."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

import megengine as mge
import megengine.functional as F
import megengine.module as M
import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import helper, numpy_helper

import qtrace
from qtrace import QConfig
from qtrace.errors import ExportError
from qtrace.graph.types import TracedModule
from qtrace.plugins import installed
from tests.nets import Inverted, ResNet, images, net, randomize

AIMET = ("aimet-0.6.1", "aimet-1.0.0", "aimet-2.0.0")


def _converted(module: M.Module, x: np.ndarray, config: Any = None) -> TracedModule:
    prepared = qtrace.prepare(qtrace.trace(module, x, check=False), config)
    return qtrace.convert(qtrace.calibrate(prepared, [x], progress=False))


def _small(**config: Any) -> TracedModule:
    x = images(2, 4, 8, 8)
    return _converted(net(lambda self, x: F.relu(self.c(x)), c=M.Conv2d(4, 6, 3)), x, QConfig(**config))


def _export(converted: TracedModule, folder: Path, params: str | None) -> tuple[Any, Any]:
    """The model and the text of its parameter file."""
    path = qtrace.export(converted, folder / "m.onnx", format="onnx_float", params=params)
    assert path == folder / "m.onnx"
    others = [p for p in folder.iterdir() if p != path]
    assert len(others) == int(params is not None), others
    return onnx.load(path), (others[0].read_text() if others else None)


def _tensors(model: Any) -> set[str]:
    graph = model.graph
    names = {t.name for t in (*graph.initializer, *graph.input, *graph.output)}
    return names | {o for n in graph.node for o in n.output}


def test_the_model_alone_computes_what_the_module_does_in_float(tmp_path: Path) -> None:
    x, module = images(2, 3, 32, 32), randomize(ResNet(4, (1, 1, 1, 1)))
    model, _ = _export(_converted(module, x), tmp_path, None)
    assert {n.op_type for n in model.graph.node}.isdisjoint({"QuantizeLinear", "DequantizeLinear"})
    (y,) = ort.InferenceSession(model.SerializeToString()).run(None, {"x": x})
    np.testing.assert_allclose(y, module(mge.Tensor(x)).numpy(), atol=1e-5)


CASES = {
    "aimet-0.6.1": "onnxruntime",
    "aimet-1.0.0": "onnxruntime",
    "aimet-2.0.0": "onnxruntime",
    "tensorrt": "backend/tensorrt_10",
    "tensorrt-10": "backend/tensorrt_10",
    "mgeconvert": "onnxruntime",
}


@pytest.mark.quick(1)
@pytest.mark.parametrize("params", CASES)
def test_every_name_is_a_tensor_of_the_model(params: str, tmp_path: Path) -> None:
    x = images(2, 4, 16, 16)
    block, fc = Inverted(4, 4, 1, 2), M.Linear(4, 3)
    module = net(lambda self, x: self.fc(F.mean(F.max_pool2d(self.block(x), 2), (2, 3))), block=block, fc=fc)
    converted = _converted(module, x, CASES[params])
    model, text = _export(converted, tmp_path, params)
    names = _read(params, text)
    assert set(names) <= _tensors(model)
    annotation = qtrace.explain(converted).annotation
    activations = {s.node for s in annotation.sites if s.sort == "activation"} | set(annotation.carried)
    assert len(activations) > 5
    assert activations <= set(names)
    if params not in ("tensorrt", "tensorrt-10"):
        assert {s.node for s in annotation.sites if s.sort == "weight"} <= set(names)


def _read(params: str, text: str) -> dict[str, list[Any]]:
    """Tensor -> bits, scales, zero points in the unsigned convention, and the axis (None: not said)."""
    if params in ("tensorrt", "tensorrt-10"):
        header, *lines = text.splitlines()
        assert header == "TRT-8503-EntropyCalibration2"
        pairs = (line.split(": ") for line in lines)
        return {n: [8, struct.unpack(">f", bytes.fromhex(v)), [128], None] for n, v in pairs}
    data = json.loads(text)
    if params == "mgeconvert":
        return {n: [e["qmax"] - e["qmin"], [e["scale"]], [e["zero_point"]], None] for n, e in data.items()}
    if params == "aimet-2.0.0":
        return {e["name"]: _onnx_entry(e) for e in data["encodings"]}
    groups = [data["activation_encodings"], data["param_encodings"]]
    if params == "aimet-1.0.0":
        entries_by_name = {e["name"]: e for group in groups for e in group}
        return {n: [e["bw"], e["scale"], [-o for o in e["offset"]], None] for n, e in entries_by_name.items()}
    entries_by_name = {n: entries for group in groups for n, entries in group.items()}
    return {n: [e[0]["bitwidth"], *_by_range(e), None] for n, e in entries_by_name.items()}


def _onnx_entry(entry: dict[str, Any]) -> list[Any]:
    kind = entry["output_dtype"]
    bits = int(kind.rpartition("int")[2])
    shift = 0 if kind.startswith("u") else 1 << (bits - 1)
    scale = np.reshape(entry["y_scale"], -1)
    zero = np.reshape(entry.get("y_zero_point", np.zeros(scale.shape)), -1)
    return [bits, scale.tolist(), (zero + shift).astype(int).tolist(), entry.get("axis")]


def _by_range(entries: list[dict[str, Any]]) -> tuple[list[float], list[int]]:
    scales = [(e["max"] - e["min"]) / (2 ** e["bitwidth"] - 1) for e in entries]
    return scales, [round(-e["min"] / s) for e, s in zip(entries, scales, strict=True)]


@pytest.mark.quick(1)
@pytest.mark.parametrize("params", AIMET)
def test_model_and_file_together_give_the_integers_of_the_graph(params: str, tmp_path: Path) -> None:
    """Fake quants put where the file says give what the file with QuantizeLinear nodes gives."""
    x = images(2, 3, 32, 32)
    converted = _converted(randomize(ResNet(4, (1, 1, 1, 1))), x)
    model, text = _export(converted, tmp_path, params)
    # A folder of its own: the two models have the same name.
    (tmp_path / "q").mkdir()
    integers = qtrace.export(converted, tmp_path / "q" / "m.onnx")
    simulated = _simulate(model, _read(params, text))
    fresh = images(4, 3, 32, 32, seed=5)
    (simulated_output,) = _session(simulated).run(None, {"x": fresh})
    (expected,) = _session(onnx.load(integers)).run(None, {"x": fresh})
    step = np.diff(np.unique(expected)).min()
    assert np.abs(simulated_output - expected).max() <= 1.01 * step
    assert np.mean(np.abs(simulated_output - expected) < 0.01 * step) > 0.9


def _session(model: Any) -> Any:
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    return ort.InferenceSession(model.SerializeToString(), options)


def _simulate(model: Any, entries: dict[str, list[Any]]) -> Any:
    """The model with its parameters rounded and a fake quant behind every activation in ``entries``."""
    graph, behind = model.graph, {}
    for tensor in graph.initializer:
        if tensor.name in entries:
            bits, scale, zero, axis = entries.pop(tensor.name)
            value = numpy_helper.to_array(tensor)
            shape = [1] * value.ndim
            if len(scale) > 1:
                shape[0 if axis is None else axis] = -1
            s, z = (np.reshape(v, shape).astype(np.float32) for v in (scale, np.array(zero, np.float64)))
            z = z.astype(np.float64)
            q = np.clip(np.rint(value / s).astype(np.float64) + z, 0, 2.0**bits - 1) - z
            tensor.CopyFrom(numpy_helper.from_array((q * s).astype(np.float32), tensor.name))
    nodes = []
    for name, (_, scale, zero, _axis) in entries.items():
        graph.initializer.append(numpy_helper.from_array(np.float32(scale[0]), f"{name}_s"))
        graph.initializer.append(numpy_helper.from_array(np.uint8(zero[0]), f"{name}_z"))
        nodes.append(helper.make_node("QuantizeLinear", [name, f"{name}_s", f"{name}_z"], [f"{name}_i"]))
        nodes.append(helper.make_node("DequantizeLinear", [f"{name}_i", *nodes[-1].input[1:]], [f"{name}_r"]))
        behind[name] = f"{name}_r"
    for node in graph.node:
        node.input[:] = [behind.get(i, i) for i in node.input]
    ordered = [*graph.node]
    for pair in zip(nodes[::2], nodes[1::2], strict=True):
        place = next((i for i, n in enumerate(ordered) if pair[0].input[0] in n.output), -1)
        ordered[place + 1 : place + 1] = pair
    del graph.node[:]
    graph.node.extend(ordered)
    graph.output[0].name = behind[graph.output[0].name]
    return model


def test_the_numbers_of_one_site(tmp_path: Path) -> None:
    converted = _small()
    x = converted.qsites.x.qparams()
    scale, zero = float(x.scale), int(x.zero_point)
    weight = converted.qsites.c_weight.qparams().scale.tolist()
    (tmp_path / "a").mkdir()
    data = json.loads(_export(converted, tmp_path / "a", "aimet-0.6.1")[1])
    entry = {"bitwidth": 8, "dtype": "int", "is_symmetric": "False", "offset": -zero, "scale": scale}
    ends = {"min": -zero * scale, "max": (255 - zero) * scale}
    assert data["activation_encodings"]["x"] == [{**entry, **ends}]
    assert [e["scale"] for e in data["param_encodings"]["c_weight"]] == weight
    assert {e["offset"] for e in data["param_encodings"]["c_weight"]} == {-128}
    assert data["param_encodings"]["c_weight"][0]["is_symmetric"] == "True"
    assert data["param_encodings"]["c_bias"][0]["bitwidth"] == 32
    (tmp_path / "b").mkdir()
    data = json.loads(_export(converted, tmp_path / "b", "aimet-1.0.0")[1])
    (entry,) = (e for e in data["activation_encodings"] if e["name"] == "x")
    assert entry == {
        "name": "x",
        "dtype": "INT",
        "bw": 8,
        "is_sym": False,
        "enc_type": "PER_TENSOR",
        "scale": [scale],
        "offset": [-zero],
    }
    assert {e["enc_type"] for e in data["param_encodings"]} == {"PER_CHANNEL"}
    (tmp_path / "c").mkdir()
    data = json.loads(_export(converted, tmp_path / "c", "aimet-2.0.0")[1])
    entries = {e["name"]: e for e in data["encodings"]}
    assert entries["x"] == {"name": "x", "output_dtype": "uint8", "y_scale": scale, "y_zero_point": zero}
    assert entries["c_weight"] == {"name": "c_weight", "output_dtype": "int8", "y_scale": weight, "axis": 0}


def test_a_transposed_weight_has_its_channels_on_axis_1(tmp_path: Path) -> None:
    x = images(2, 4, 8, 8)
    converted = _converted(net(lambda self, x: self.fc(x), fc=M.Linear(8, 5)), x)
    model, text = _export(converted, tmp_path, "aimet-2.0.0")
    entries = {e["name"]: e for e in json.loads(text)["encodings"]}
    assert set(entries) <= _tensors(model)
    shapes = {t.name: tuple(t.dims) for t in model.graph.initializer}
    (name,) = (n for n, e in entries.items() if e.get("axis") == 1)
    assert shapes[name] == (8, 5)
    assert len(entries[name]["y_scale"]) == 5


def test_an_ncnn_table_speaks_of_layers(tmp_path: Path) -> None:
    x = images(2, 3, 32, 32)
    module = net(
        lambda self, x: self.fc(F.flatten(F.relu(self.c(x)), 1)), c=M.Conv2d(3, 6, 3), fc=M.Linear(5400, 4)
    )
    converted = _converted(module, x, "backend/ncnn")
    model, text = _export(converted, tmp_path, "ncnn")
    lines = dict(line.split(" ", 1) for line in text.splitlines())
    layers = [n.name for n in model.graph.node if n.op_type in ("Conv", "Gemm")]
    assert list(lines) == [*(f"{n}_param_0" for n in layers), *layers]
    want = 1 / converted.qsites.c_weight.qparams().scale.astype(np.float64)
    np.testing.assert_allclose(np.array(lines["c_out_Conv_param_0"].split(), float), want, rtol=1e-8)
    np.testing.assert_allclose(float(lines["c_out_Conv"]), 1 / float(converted.qsites.x.qparams().scale))


def test_clipped_weights_have_the_same_integers_in_the_full_range(tmp_path: Path) -> None:
    converted = _small(observers={"weight": "mse"}, weight={"bits": 4})
    model, _ = _export(converted, tmp_path, "aimet-2.0.0")
    (weight,) = (numpy_helper.to_array(t) for t in model.graph.initializer if t.name == "c_weight")
    scale = converted.qsites.c_weight.qparams().scale.reshape(-1, 1, 1, 1)
    assert np.abs(weight / scale).max() <= 7 + 1e-5
    original = np.abs(converted.c.weight.numpy() / scale)
    assert original.max() > 7.5, "the observer clipped nothing: the test shows nothing"


INT8 = {"signed": True, "symmetric": True}
REFUSED = {
    "affine in a cache": (
        "tensorrt-10",
        {},
        r"site x is uint8 affine, but .* cache .*: prepare with backend ten",
    ),
    "4-bit weights in a cache": (
        "tensorrt-10",
        {"activation": INT8, "weight": {"bits": 4}},
        r"site c_weight is int4 .* 8 bits only: use 8 bits there, or export format onnx",
    ),
    "per-tensor weights in a cache": (
        "tensorrt-10",
        {"activation": INT8, "weight": {"axis": None}},
        r"site c_weight is int8 sym .*each channel a scale: set axis: 0",
    ),
    "scales that a cache cannot tell": (
        "tensorrt-10",
        {"activation": INT8, "weight": {"power_of_two": True}},
        r"site c_weight .*largest magnitude: use the observer minmax",
    ),
    "affine for ncnn": ("ncnn", {}, r"site x is uint8 affine, but an ncnn table .*recipe backend/ncnn"),
    "3 bits in AIMET 2": (
        "aimet-2.0.0",
        {"weight": {"bits": 3}},
        r"site c_weight is int3 .*know 2, 4, 8, 16 bits",
    ),
    "narrow activations": (
        "aimet-1.0.0",
        {"backend": "ncnn"},
        r"site x is int8 sym narrow .*always use the lowest integer: set narrow: false",
    ),
}


@pytest.mark.quick(3)
@pytest.mark.parametrize("case", REFUSED)
def test_what_a_file_cannot_say_is_refused_by_site_and_nothing_is_written(case: str, tmp_path: Path) -> None:
    params, config, message = REFUSED[case]
    with pytest.raises(ExportError, match=message):
        _export(_small(**config), tmp_path, params)
    assert list(tmp_path.iterdir()) == []


def test_a_tensor_with_two_schemes_is_refused(tmp_path: Path) -> None:
    x = images(2, 4, 8, 8)
    module = net(lambda self, x: self.a(x) + self.b(x), a=M.Conv2d(4, 6, 3), b=M.Conv2d(4, 6, 3))
    rules = [{"match": {"name": "a_out"}, "activation": {"symmetric": True}}]
    with pytest.raises(ExportError, match=r"quantizes tensor x otherwise than site .* export format onnx"):
        _export(_converted(module, x, QConfig(rules=rules)), tmp_path, "aimet-2.0.0")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("recipe", "params"),
    [
        *(("backend/onnxruntime", p) for p in AIMET),
        ("backend/tensorrt_10", "tensorrt-10"),
        ("backend/ncnn", "ncnn"),
        ("backend/megengine", "mgeconvert"),
    ],
)
def test_a_head_for_several_levels_has_no_entry_for_its_bias(
    recipe: str, params: str, tmp_path: Path
) -> None:
    def forward(self: M.Module, x: mge.Tensor) -> tuple[mge.Tensor, mge.Tensor]:
        fine = F.relu(self.a(x))
        return self.head(fine), self.head(F.relu(self.b(fine)))

    parts = {n: M.Conv2d(4, 4, 3, padding=1) for n in ("a", "b", "head")}
    converted = _converted(net(forward, **parts), images(2, 4, 8, 8), recipe)
    model, text = _export(converted, tmp_path, params)
    assert "head_bias" in _tensors(model)
    assert "head_bias" not in text
    if params in AIMET:
        assert '"head_weight"' in text
        assert '"a_bias"' in text


def test_a_tensor_that_is_also_read_in_float_is_refused(tmp_path: Path) -> None:
    x = images(2, 4, 8, 8)
    module = net(lambda self, x: self.a(x) + F.exp(x), a=M.Conv2d(4, 4, 3, padding=1))
    with pytest.raises(ExportError, match=r"site x.* rounds x for exp_out too, which reads it in float"):
        _export(_converted(module, x), tmp_path, "aimet-2.0.0")


def test_the_old_name_of_the_cache_writes_it_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    converted = _small(backend="tensorrt_10")
    files = []
    for params in ("tensorrt-10", "tensorrt"):
        caplog.clear()
        (tmp_path / params).mkdir()
        _export(converted, tmp_path / params, params)
        files.append((tmp_path / params / "m.cache").read_text())
        assert ("export format onnx" in caplog.text) == (params == "tensorrt")
    assert files[0] == files[1]


def test_unknown_kinds_and_options(tmp_path: Path) -> None:
    converted = _small()
    with pytest.raises(ExportError, match="unknown parameter file 'tensort'; known: aimet-0.6.1, .*"):
        _export(converted, tmp_path, "tensort")
    with pytest.raises(ExportError, match="format onnx_float lacks option 'parms'; it knows: params"):
        qtrace.export(converted, tmp_path / "m.onnx", format="onnx_float", parms="tensorrt")
    with pytest.raises(ExportError, match="format onnx lacks option 'params'; it knows: "):
        qtrace.export(converted, tmp_path / "m.onnx", params="tensorrt")
    assert set(CASES) | {"ncnn"} == set(installed("qtrace.parameters"))


def test_both_files_appear_or_none(tmp_path: Path) -> None:
    (tmp_path / "m.encodings").mkdir()
    with pytest.raises(ExportError, match="is a folder: name a file"):
        qtrace.export(_small(), tmp_path / "m.onnx", format="onnx_float", params="aimet-2.0.0")
    assert [p.name for p in tmp_path.iterdir()] == ["m.encodings"]
    (tmp_path / "m.encodings").rmdir()
    os.mkfifo(tmp_path / "m.encodings")
    with pytest.raises(ExportError, match="is a device or a pipe: name a file"):
        qtrace.export(_small(), tmp_path / "m.onnx", format="onnx_float", params="aimet-2.0.0")
    with pytest.raises(ExportError, match=r"x+\.onnx cannot be written: File name too long"):
        qtrace.export(_small(), tmp_path / f"{'x' * 300}.onnx")
    assert [p.name for p in tmp_path.iterdir()] == ["m.encodings"]
