"""Faults planted in exported files: verify catches each, and bisect finds the op and names the cause."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import megengine.functional as F
import megengine.module as M
import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

import qtrace
from qtrace.graph.types import TracedModule
from tests.nets import images, net

BATCHES = [images(4, 4, 8, 8, seed=s) for s in range(2)]


def _converted(recipe: str, batches: list[np.ndarray]) -> TracedModule:
    def forward(self: M.Module, x: object) -> object:
        y = F.relu(self.a(x))
        return self.fc(F.flatten(F.max_pool2d(F.relu(self.b(y) + y), 2), 1))

    parts = {"a": M.Conv2d(4, 4, 3, padding=1), "b": M.Conv2d(4, 4, 3, padding=1), "fc": M.Linear(64, 5)}
    prepared = qtrace.prepare(qtrace.trace(net(forward, **parts), batches[0], check=False), recipe)
    return qtrace.convert(qtrace.calibrate(prepared, batches, progress=False))


@pytest.fixture(scope="module")
def for_onnx() -> TracedModule:
    return _converted("onnxruntime", BATCHES)


@pytest.fixture(scope="module")
def for_ncnn() -> TracedModule:
    return _converted("backend/ncnn", BATCHES)


def _stored(model: onnx.ModelProto, name: str, change: Callable[[np.ndarray], np.ndarray]) -> None:
    tensor = next(t for t in model.graph.initializer if t.name == name)
    value = numpy_helper.to_array(tensor)
    tensor.CopyFrom(numpy_helper.from_array(np.asarray(change(value), value.dtype), name))


def _rounded_down(model: onnx.ModelProto) -> None:
    """Another rounding of b's input: what QuantizeLinear reads is a whole number of steps already."""
    graph = model.graph
    index, node = next((i, n) for i, n in enumerate(graph.node) if n.output[0] == "relu_out_int")
    names = [f"planted_{i}" for i in range(3)]
    steps = [
        helper.make_node("Div", [node.input[0], node.input[1]], [names[0]]),
        helper.make_node("Floor", [names[0]], [names[1]]),
        helper.make_node("Mul", [names[1], node.input[1]], [names[2]]),
    ]
    node.input[0] = names[2]
    for step in reversed(steps):
        graph.node.insert(index, step)


# Fault -> how it is planted, the site that differs first, the op that is named, what the cause begins with.
ONNX_FAULTS: dict[str, tuple[Callable[[onnx.ModelProto], None], str, str, str]] = {
    "rounding mode": (_rounded_down, "relu_out_q", "F.conv2d", "rounding: the runtime rounds down"),
    "bias scale off by 2": (
        lambda m: _stored(m, "b_bias_scale", lambda v: v * 2),
        "b_out_q",
        "F.conv2d",
        "bias: each channel",
    ),
    "swapped axis": (
        lambda m: _stored(m, "a_weight_int", lambda v: v.swapaxes(2, 3)),
        "relu_out_q",
        "F.conv2d",
        "",
    ),
    "dropped zero point": (
        lambda m: _stored(m, "x_zero_point", lambda v: v * 0),
        "x_q",
        "input",
        "zero point: every value is off by",
    ),
}


def test_files_without_a_fault_pass(for_onnx: TracedModule, for_ncnn: TracedModule, tmp_path: Path) -> None:
    path = qtrace.export(for_onnx, tmp_path / "m.onnx")
    assert qtrace.verify(path, for_onnx, BATCHES).passed
    assert qtrace.bisect(path, for_onnx, BATCHES) is None
    assert qtrace.verify(qtrace.export(for_ncnn, tmp_path / "m.param"), for_ncnn, BATCHES).passed


@pytest.mark.quick(2)
@pytest.mark.parametrize("fault", ONNX_FAULTS)
def test_in_onnx(fault: str, for_onnx: TracedModule, tmp_path: Path) -> None:
    plant, site, op, cause = ONNX_FAULTS[fault]
    path = qtrace.export(for_onnx, tmp_path / "m.onnx")
    model = onnx.load(path)
    plant(model)
    onnx.save(model, path)
    report = qtrace.verify(path, for_onnx, BATCHES)
    assert not report.passed, report.table()
    _found(path, for_onnx, (site, op, cause))


def _found(path: Path, converted: TracedModule, wanted: tuple[str, str, str]) -> None:
    site, op, cause = wanted
    found = qtrace.bisect(path, converted, BATCHES)
    assert found is not None
    assert (found.site, found.op, found.stage) == (site, op, "plain"), found.table()
    assert found.causes[0].startswith(cause), found.table()
    assert found.check.side == "runtime", found.table()
    assert any(exact != round(exact) for _, exact, _, _ in found.examples), "rounded before it is shown"
    # What reads and rounds it, and both sides' integers.
    assert op == "input" or sum("scale" in text for text in found.inputs) >= 2, found.inputs
    assert "graph" in found.table()
    assert "runtime" in found.table()


def test_a_transposed_result_is_reported_as_layout(for_onnx: TracedModule, tmp_path: Path) -> None:
    path = qtrace.export(for_onnx, tmp_path / "m.onnx")
    model = onnx.load(path)
    node = next(n for n in model.graph.node if n.output[0] == "relu_out_int")
    turn = helper.make_node("Transpose", [node.input[0]], ["planted"], perm=[0, 1, 3, 2])
    model.graph.node.insert(list(model.graph.node).index(node), turn)
    node.input[0] = "planted"
    onnx.save(model, path)
    assert not qtrace.verify(path, for_onnx, BATCHES).passed
    _found(path, for_onnx, ("relu_out_q", "F.conv2d", "layout"))


def _bin(path: Path, old: np.ndarray, new: np.ndarray) -> None:
    """Replaces numbers in the weights of a net."""
    file = path.with_suffix(".bin")
    data = file.read_bytes()
    assert data.count(old.tobytes()) == 1
    file.write_bytes(data.replace(old.tobytes(), np.ascontiguousarray(new, old.dtype).tobytes()))


def _ncnn_bias(path: Path, converted: TracedModule) -> None:
    container = converted.qsites
    scale = (container.x.qparams().scale * container.a_weight.qparams().scale).astype(np.float64)
    steps = converted.a.bias.numpy().reshape(-1).astype(np.float64) / scale
    bias = (np.sign(steps) * np.floor(np.abs(steps) + 0.5) * scale).astype(np.float32)
    _bin(path, bias, bias * 2)


def _ncnn_axis(path: Path, converted: TracedModule) -> None:
    qparams = converted.qsites.a_weight.qparams()
    value = converted.a.weight.numpy()
    steps = value / qparams.scale.reshape(-1, 1, 1, 1)
    integers = (np.sign(steps) * np.floor(np.abs(steps) + 0.5)).astype(np.int8)
    _bin(path, integers, integers.swapaxes(2, 3))


def _ncnn_scale(path: Path, converted: TracedModule) -> None:
    """The rounding of the input with half its scale: as a shift that was forgotten."""
    scale = np.float32(1) / converted.qsites.x.qparams().scale.astype(np.float32)
    file = path.with_suffix(".bin")
    data = file.read_bytes()
    place = data.index(np.float32(scale).tobytes())  # the Quantize layer stands before the convolution
    file.write_bytes(data[:place] + np.float32(2 * scale).tobytes() + data[place + 4 :])


def _ncnn_rounded_down(path: Path, converted: TracedModule) -> None:
    """Another rounding of the input: what Quantize reads is a whole number of steps already."""
    scale = converted.qsites.x.qparams().scale.item()
    magic, counts, *lines = path.read_text().splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("Quantize"))
    words = lines[at].split()
    steps = [
        f"BinaryOp planted_0 1 1 {words[4]} planted_0 0=3 1=1 2={scale:.9e}",
        "UnaryOp planted_1 1 1 planted_0 planted_1 0=2",
        f"BinaryOp planted_2 1 1 planted_1 planted_2 0=2 1=1 2={scale:.9e}",
    ]
    words[4] = "planted_2"
    lines[at : at + 1] = [*steps, " ".join(words)]
    counts = " ".join(str(int(n) + 3) for n in counts.split())
    path.write_text("\n".join([magic, counts, *lines]) + "\n")


NCNN_FAULTS = {
    "rounding mode": (_ncnn_rounded_down, "x_q", "input", "rounding: the runtime rounds down"),
    "bias off by 2": (_ncnn_bias, "relu_out__b_out_q", "F.conv2d", "bias: each channel"),
    "swapped axis": (_ncnn_axis, "relu_out__b_out_q", "F.conv2d", ""),
    "scale off by 2": (_ncnn_scale, "x_q", "input", "scale: the runtime's values are 2"),
}


@pytest.mark.quick(2)
@pytest.mark.parametrize("fault", NCNN_FAULTS)
def test_in_ncnn(fault: str, for_ncnn: TracedModule, tmp_path: Path) -> None:
    plant, *wanted = NCNN_FAULTS[fault]
    path = qtrace.export(for_ncnn, tmp_path / "m.param")
    plant(path, for_ncnn)
    assert not qtrace.verify(path, for_ncnn, BATCHES).passed
    _found(path, for_ncnn, tuple(wanted))


def test_swapped_axes_in_a_megengine_dump(tmp_path: Path) -> None:
    converted = _converted("backend/megengine", BATCHES)
    path = qtrace.export(converted, tmp_path / "m.mge", format="megengine")
    assert qtrace.verify(path, converted, BATCHES).passed
    assert qtrace.bisect(path, converted, BATCHES) is None
    steps = converted.a.weight.numpy() / converted.qsites.a_weight.qparams().scale
    integers = (np.sign(steps) * np.floor(np.abs(steps) + 0.5)).astype(np.int8)
    data = path.read_bytes()
    assert data.count(integers.tobytes()) == 1
    swapped = np.ascontiguousarray(integers.swapaxes(2, 3))
    path.write_bytes(data.replace(integers.tobytes(), swapped.tobytes()))
    assert not qtrace.verify(path, converted, BATCHES).passed
    found = qtrace.bisect(path, converted, BATCHES)
    assert found is not None
    assert (found.op, found.path, found.stage) == ("F.conv2d", "a", "plain"), found.table()
    assert found.check.side == "runtime", found.table()


def test_the_histogram_counts_every_difference(for_onnx: TracedModule, tmp_path: Path) -> None:
    path = qtrace.export(for_onnx, tmp_path / "m.onnx")
    model = onnx.load(path)
    ONNX_FAULTS["rounding mode"][0](model)
    onnx.save(model, path)
    report = qtrace.verify(path, for_onnx, BATCHES)
    tally = report.sites["op_by_op"]["relu_out_q"]
    assert set(tally.histogram) <= {-1, 1}
    assert tally.histogram[-1] > 0.1 * tally.values
    assert sum(report.histogram().values()) == sum(
        t.values - t.equal for t in report.sites["op_by_op"].values()
    )
    assert "-1 LSB x" in report.summary()
    assert (
        dataclasses.asdict(tally)["histogram"]
        == report.to_dict()["sites"]["op_by_op"]["relu_out_q"]["histogram"]
    )
