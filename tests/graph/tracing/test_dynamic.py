"""Axes of a module's inputs that stay open: checked at other sizes, recorded, declared by exports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import megengine as mge
import megengine.functional as F
import megengine.module as M
import numpy as np
import onnx
import onnxruntime as ort
import pytest

import qtrace
from qtrace.errors import QtraceWarning, TraceError
from qtrace.graph import flatten, load, save
from qtrace.graph.open_axes import OpenAxis, read_open_axes
from qtrace.inspection.analysis import analyze
from tests.each import each_of
from tests.nets import images, net, randomize

X = images(2, 3, 16, 24)
OPEN = {"x": {0: "N", 2: "H", -1: "W"}}


def unet() -> M.Module:
    def forward(self: Any, x: Any) -> Any:
        low = F.relu(self.down(x))
        up = F.nn.interpolate(self.deep(low), size=x.shape[2:], mode="nearest")
        return self.head(F.concat([x, up], axis=1)), F.mean(low, axis=(2, 3))

    return randomize(
        net(
            forward,
            down=M.Conv2d(3, 4, 3, 2, 1),
            deep=M.Conv2d(4, 4, 3, padding=1),
            head=M.Conv2d(7, 2, 1),
        )
    )


def dims(value: onnx.ValueInfoProto) -> list[int | str]:
    return [d.dim_param or d.dim_value for d in value.type.tensor_type.shape.dim]


def test_the_open_axes_reach_the_file_and_every_size_is_right(tmp_path: Path) -> None:
    traced = qtrace.trace(unet(), X, dynamic=OPEN)
    prepared = qtrace.prepare(traced, {"placement": "everything"})
    qtrace.calibrate(prepared, [(X,), (images(1, 3, 20, 12, seed=1),)], progress=False)
    converted = qtrace.convert(prepared)
    path = qtrace.export(converted, tmp_path / "net.onnx")
    graph = onnx.load(str(path)).graph
    assert dims(graph.input[0]) == ["N", 3, "H", "W"]
    assert [dims(output) for output in graph.output] == [["N", 2, "H", "W"], ["N", 4]]
    session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    for shape in ((1, 3, 16, 24), (3, 3, 34, 20), (2, 3, 8, 50)):
        x = images(*shape, seed=2)
        for mine, theirs in zip(converted(mge.Tensor(x)), session.run(None, {"x": x}), strict=True):
            assert mine.shape == theirs.shape
            np.testing.assert_allclose(mine.numpy(), theirs, atol=0.05)
    assert qtrace.verify(path, converted, [(X,)]).passed


def test_values_are_repeated_along_open_axes(tmp_path: Path) -> None:
    """Nearest upsampling by ``repeat``, as diffusion networks write it."""

    def forward(self: Any, x: Any) -> Any:
        return F.repeat(F.repeat(self.conv(x), 2, 2), 3, 3)

    module = randomize(net(forward, conv=M.Conv2d(3, 4, 3, padding=1)))
    traced = qtrace.trace(module, X, dynamic=OPEN)
    path = qtrace.export(traced, tmp_path / "net.onnx")
    assert dims(onnx.load(str(path)).graph.input[0]) == ["N", 3, "H", "W"]
    x = images(3, 3, 10, 14, seed=2)
    (theirs,) = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"]).run(None, {"x": x})
    np.testing.assert_allclose(module(mge.Tensor(x)).numpy(), theirs, atol=1e-5)


def test_record_of_open_axes_survives_save_and_load(tmp_path: Path) -> None:
    traced = qtrace.trace(unet(), X, dynamic=OPEN)
    axes = (OpenAxis("x", 0, "N", "N"), OpenAxis("x", 2, "H", "H"), OpenAxis("x", 3, "W", "W"))
    save(traced, tmp_path / "net.mge")
    for each in (traced, flatten(traced), qtrace.prepare(traced), load(tmp_path / "net.mge")):
        record = read_open_axes(each)
        assert record is not None
        assert record.axes == axes
    assert read_open_axes(qtrace.trace(unet(), X)) is None


@pytest.mark.parametrize("name", ["net.tflite", "net.prototxt"])
def test_a_format_with_numbers_for_sizes_says_so(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    conv = net(lambda self, x: self.conv(x), conv=M.Conv2d(3, 2, 1))
    qtrace.export(qtrace.trace(conv, X, dynamic=OPEN), tmp_path / name)
    assert "so the file fixes axis 2 of x at 16, axis 3 of x at 24" in caplog.text
    caplog.clear()
    qtrace.export(qtrace.trace(conv, X), tmp_path / name)
    assert not caplog.text


def test_a_size_that_the_trace_bakes_is_refused() -> None:
    baked = net(lambda self, x: x.reshape(-1, 3 * int(x.shape[2]), 24))
    with pytest.warns(QtraceWarning, match="holds a size of the example as a number"):
        qtrace.trace(baked, X)  # right for this size
    with pytest.raises(TraceError, match=r"dynamic, at x \[3, 3, 32, 24\]"):
        qtrace.trace(baked, X, dynamic={"x": {0: "N", 2: "H"}})


def test_a_size_at_which_the_module_fails_is_refused() -> None:
    table = net(lambda self, x: x + self.table, table=mge.Parameter(np.ones((1, 3, 16, 24), np.float32)))
    with pytest.raises(TraceError, match="itself fails on dynamic, at x"):
        qtrace.trace(table, X, dynamic=OPEN)
    qtrace.trace(table, X, dynamic={"x": {0: "batch"}})


def test_axes_of_one_name_have_one_size() -> None:
    both = net(lambda self, x, mask: x * mask)
    mask = np.ones((2, 1, 16, 24), np.float32)
    traced = qtrace.trace(both, X, mask=mask, dynamic={"x": {2: "H"}, "mask": {2: "H"}})
    record = read_open_axes(traced)
    assert record is not None
    assert [(axis.input, axis.size) for axis in record.axes] == [("x", "H"), ("mask", "H")]
    with pytest.raises(TraceError, match="'S' is 16 at axis 2 of x and 24 at axis 3 of x"):
        qtrace.trace(both, X, mask, dynamic={"x": {2: "S", 3: "S"}})


@each_of(
    ("dynamic", "message"),
    [
        ({"y": {2: "H"}}, "'y' is no Tensor among the inputs; there are: x"),
        ({"x": {4: "H"}}, r"x has the shape \(2, 3, 16, 24\), and no axis 4"),
        ({"x": {"H": 2}}, "no axis 'H'"),
        ({"x": {2: ""}}, "needs a name such as 'H'"),
    ],
)
def test_what_names_no_axis_is_refused(dynamic: Any, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        qtrace.trace(unet(), X, dynamic=dynamic)


def test_inspect_and_explain_show_which_sizes_are_open() -> None:
    traced = qtrace.trace(unet(), X, dynamic=OPEN)
    analysis = analyze(traced)
    shapes = {op.op: op.shape for op in analysis.ops}
    assert shapes["F.conv2d"] == ("N", 2, "H", "W")  # the last one
    assert ("N", 4, -1, -1) in [op.shape for op in analysis.ops]
    assert "Nx7xHxW" in analysis.table(None)
    assert "sizes: x is Nx3xHxW, recorded at 2x3x16x24" in analysis.table(None)
    prepared = qtrace.prepare(traced)
    for explanation in (qtrace.explain(traced), qtrace.explain(prepared)):
        assert "x is Nx3xHxW, recorded at 2x3x16x24" in explanation.summary()
    assert "Nx" not in analyze(qtrace.trace(unet(), X)).table(None)


def test_a_file_that_takes_pixels_is_open_too(tmp_path: Path) -> None:
    conv = randomize(net(lambda self, x: self.conv(x), conv=M.Conv2d(3, 2, 1)))
    preprocess = {"size": [3, 16, 24], "mean": [120.0, 110.0, 100.0], "std": [58.0, 57.0, 56.0]}
    prepared = qtrace.prepare(qtrace.trace(conv, X, dynamic=OPEN), {"preprocess": preprocess})
    converted = qtrace.convert(qtrace.calibrate(prepared, [(X,)], progress=False))
    path = qtrace.export(converted, tmp_path / "net.onnx", preprocess=True)
    assert dims(onnx.load(str(path)).graph.input[0]) == ["N", "H", "W", 3]
    session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    (result,) = session.run(None, {"x": np.zeros((1, 8, 50, 3), np.uint8)})
    assert result.shape == (1, 2, 8, 50)
