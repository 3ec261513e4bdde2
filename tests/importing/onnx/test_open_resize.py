"""A resize whose form fits the recorded sizes alone is kept as in the file, and its axes stay open."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

import qtrace
from qtrace.errors import ExportError, GraphError, QtraceError
from qtrace.graph.opaque import opaque_calls, say_stopped_gradients
from qtrace.graph.open_axes import read_open_axes
from qtrace.graph.types import TracedModule
from qtrace.graph.walk import owner
from qtrace.importing.onnx.ops.resize import nearest_places
from qtrace.onnxfile.local_session import SessionSettings
from qtrace.onnxfile.sessions import open_session
from tests.each import each_of


def _resized_file(path: Path, form: str, **attributes: Any) -> Path:
    """Writes a network that resizes features to the sizes of its input.

    ``form`` is "half" for features of half the size, "same" for such as differ from it at odd sizes alone.
    """
    rng = np.random.default_rng(0)
    weights = {"w": rng.normal(size=(8, 3, 3, 3)), "v": rng.normal(size=(4, 8, 3, 3))}
    stored = [numpy_helper.from_array(value.astype("float32"), name) for name, value in weights.items()]
    numbers = {"two": [2], "four": [4], "zero": [0]}
    stored += [numpy_helper.from_array(np.int64(value), name) for name, value in numbers.items()]
    nodes = [helper.make_node("Conv", ["x", "w"], ["c"], strides=[2, 2], pads=[1, 1, 1, 1])]
    if form == "same":
        stored.append(numpy_helper.from_array(rng.normal(size=(8, 8, 2, 2)).astype("float32"), "t"))
        nodes[0] = helper.make_node("Conv", ["x", "w"], ["p"], strides=[2, 2], pads=[0, 0, 1, 1])
        nodes.append(helper.make_node("ConvTranspose", ["p", "t"], ["c"], strides=[2, 2]))
    nodes += [
        helper.make_node("Shape", ["x"], ["sizes"]),
        helper.make_node("Slice", ["sizes", "two", "four", "zero"], ["image"]),
        helper.make_node("Shape", ["c"], ["own"]),
        helper.make_node("Slice", ["own", "zero", "two", "zero"], ["others"]),
        helper.make_node("Concat", ["others", "image"], ["target"], axis=0),
        helper.make_node("Resize", ["c", "", "", "target"], ["u"], **attributes),
        helper.make_node("Conv", ["u", "v"], ["y"], pads=[1, 1, 1, 1]),
    ]
    ends = [helper.make_tensor_value_info("x", 1, ["n", 3, "h", "w"])]
    graph = helper.make_graph(nodes, "net", ends, [helper.make_tensor_value_info("y", 1, None)], stored)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    onnx.save(model, path)
    return path


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    ("form", "attributes"),
    [
        ("half", {"mode": "nearest"}),
        ("half", {"mode": "nearest", "coordinate_transformation_mode": "asymmetric"}),
        ("same", {"mode": "nearest"}),
        ("same", {"mode": "linear"}),
        ("same", {"mode": "cubic"}),
    ],
)
@pytest.mark.parametrize("size", [(16, 20), (16, 16), (15, 18)])
def test_a_resize_that_is_unlike_at_other_sizes_is_kept(
    form: str, attributes: dict[str, Any], size: tuple[int, int], tmp_path: Path
) -> None:
    """The axes were fixed where the mismatch showed at other sizes than the recorded ones."""
    path = _resized_file(tmp_path / "net.onnx", form, **attributes)
    traced = qtrace.from_onnx(path, {"x": (1, 3, *size)})
    record = read_open_axes(traced)
    assert record is not None
    assert not record.fixed
    written = qtrace.export(traced, tmp_path / "out.onnx")
    for shape in ((1, 16, 20), (2, 33, 10), (1, 15, 19), (2, 65, 70)):
        x = np.random.default_rng(0).standard_normal((shape[0], 3, *shape[1:])).astype(np.float32)
        files = (open_session(Path(name), SessionSettings(optimize=False)) for name in (path, written))
        expected, got = (file.run(None, {"x": x})[0] for file in files)
        np.testing.assert_allclose(got, expected, rtol=0, atol=1e-4)


CURE = r"kept as in the file only for its open axes, so import the file with fixed=True \(--fixed\)"


def _imported(folder: Path, **options: Any) -> TracedModule:
    path = _resized_file(folder / "net.onnx", "half", **options)
    return qtrace.from_onnx(path, {"x": (1, 3, 16, 20)})


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", ["net.tflite", "net.param", "net.prototxt"])
def test_formats_of_fixed_sizes_say_how_a_kept_resize_has_a_form(name: str, tmp_path: Path) -> None:
    traced = _imported(tmp_path, mode="nearest")
    qtrace.save(traced, tmp_path / "net.mge")
    for net in (traced, qtrace.load(tmp_path / "net.mge")):
        with pytest.raises(ExportError, match=f"{CURE}"):
            qtrace.export(net, tmp_path / name)
    fixed = qtrace.from_onnx(tmp_path / "net.onnx", {"x": (1, 3, 16, 20)}, fixed=True)
    if name != "net.prototxt":  # Caffe has whole factors alone
        qtrace.export(fixed, tmp_path / name)


@pytest.mark.parametrize("source", ["graph", "file"])
@pytest.mark.parametrize("name", ["out.tflite", "out.param", "out.mge"])
def test_a_kept_resize_is_refused_before_the_calibration(
    name: str, source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    net: Any = _imported(tmp_path, mode="nearest")
    if source == "file":
        qtrace.save(net, tmp_path / "net.mge")
        net = tmp_path / "net.mge"
    monkeypatch.setattr("qtrace.quantizing.calibrator.calibrate", None)
    data = np.random.default_rng(0).standard_normal((8, 3, 16, 20)).astype(np.float32)
    with pytest.raises(GraphError, match=f"u has a form only in ONNX files: it is {CURE}"):
        qtrace.quantize(net, data, tmp_path / name, progress=False)


def test_a_resize_without_a_form_at_fixed_sizes_has_no_such_cure(tmp_path: Path) -> None:
    traced = _imported(tmp_path, mode="linear", antialias=1)
    with pytest.raises(ExportError, match="cannot become ncnn: end the graph before it"):
        qtrace.export(traced, tmp_path / "net.param")
    assert "fixed=True" not in say_stopped_gradients(traced)


def test_the_warning_of_training_says_how_gradients_pass(tmp_path: Path) -> None:
    traced = _imported(tmp_path, mode="nearest")
    assert re.search(f"no gradient passes u, .* alone; it is {CURE}", say_stopped_gradients(traced))
    assert not say_stopped_gradients(
        qtrace.from_onnx(tmp_path / "net.onnx", {"x": (1, 3, 16, 20)}, fixed=True)
    )


def test_a_file_whose_kept_node_has_no_truth_value_is_refused(tmp_path: Path) -> None:
    traced = _imported(tmp_path, mode="nearest")
    (expr,) = opaque_calls(traced)
    op: Any = owner(expr)
    op.for_open_axes = "yes"
    qtrace.save(traced, tmp_path / "net.mge")
    with pytest.raises(QtraceError, match="for_open_axes that is no truth value"):
        qtrace.load(tmp_path / "net.mge")


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    ("op", "mode", "scales"),
    [
        ("Upsample", "linear", (1, 1, 2, 2)),
        ("Resize", "linear", (1, 1, 2, 3)),
        ("Resize", "linear", (1, 1, 0.4, 2)),
        ("Resize", "nearest", (1, 1, 1.5, 1.5)),
        ("Resize", "nearest", (1, 1, 0.4, 0.7)),
    ],
)
def test_a_kept_resize_of_an_old_file_finds_the_same_places(
    op: str, mode: str, scales: tuple[float, ...], tmp_path: Path
) -> None:
    """ONNX's converter gives it the places that are the default of newer opsets."""
    source = _old_resize(tmp_path, op, mode, scales)
    written = qtrace.export(qtrace.from_onnx(source), tmp_path / "out.onnx")
    x = np.random.default_rng(0).standard_normal((2, 2, 7, 10)).astype(np.float32)
    files = (open_session(path, SessionSettings(optimize=False)) for path in (source, written))
    expected, got = (file.run(None, {"x": x})[0] for file in files)
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-5)


def test_a_resize_whose_places_no_newer_opset_has_is_refused(tmp_path: Path) -> None:
    source = _old_resize(tmp_path, "Resize", "nearest", (1, 1, 0.4, 1.5))
    with pytest.raises(ExportError, match="which has opset 10, and has no form of opset"):
        qtrace.export(qtrace.from_onnx(source), tmp_path / "out.onnx")


def _old_resize(folder: Path, op: str, mode: str, scales: tuple[float, ...]) -> Path:
    """Writes a file of the last opset in which a resize does not say how it finds its places."""
    stored = numpy_helper.from_array(np.array(scales, np.float32), "s")
    node = helper.make_node(op, ["x", "s"], ["y"], mode=mode)
    ends = [
        helper.make_tensor_value_info("x", 1, ["n", 2, 7, 10]),
        helper.make_tensor_value_info("y", 1, None),
    ]
    graph = helper.make_graph([node], "net", ends[:1], ends[1:], [stored])
    imports = [helper.make_opsetid("", 9 if op == "Upsample" else 10)]
    onnx.save(helper.make_model(graph, opset_imports=imports, ir_version=8), folder / "net.onnx")
    return folder / "net.onnx"


@each_of(
    "nearest, places",
    [
        ("floor", [0, 0, 0, 0, 1, 1, 1, 1]),
        ("ceil", [0, 1, 1, 1, 1, 1, 1, 1]),
        ("round_prefer_floor", [0, 0, 0, 1, 1, 1, 1, 1]),
        ("round_prefer_ceil", [0, 0, 1, 1, 1, 1, 1, 1]),
        ("other", None),
    ],
)
def test_places_are_rounded_as_the_mode_says(nearest: str, places: list[int] | None) -> None:
    found = nearest_places(2, 8, 4.0, "asymmetric", nearest)
    assert (found if found is None else found.tolist()) == places
