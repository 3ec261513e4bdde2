"""Names of inputs and outputs, preprocessing inside the file, and the script beside it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import cv2
import megengine.functional as F
import megengine.module as M
import numpy as np
import onnx
import onnxruntime
import pytest

import qtrace
from qtrace.config import Preprocess
from qtrace.data.images import fit, normalize
from qtrace.errors import ConfigError, ExportError
from qtrace.export.example import write_example
from tests.nets import net

PIXELS = {
    "size": [3, 12, 16],
    "mean": [123.7, 116.3, 103.5],
    "std": [58.4, 57.1, 57.4],
    "channels": "rgb",
}
RANDOM = np.random.default_rng(0)
IMAGES = RANDOM.integers(0, 256, (2, 12, 16, 3)).astype(np.uint8)


def _forward(self, x):
    y = F.relu(self.a(x))
    return self.b(y), F.mean(y, axis=(2, 3))


def _model(backend="onnxruntime", **preprocess):
    parts = {"a": M.Conv2d(3, 8, 3, padding=1), "b": M.Conv2d(8, 4, 3, padding=1)}
    settings = Preprocess(**{**PIXELS, **preprocess})
    x = normalize(IMAGES.transpose(0, 3, 1, 2), settings)
    config = {"backend": backend, "preprocess": {**PIXELS, **preprocess}}
    prepared = qtrace.prepare(qtrace.trace(net(_forward, **parts), x, check=False), config)
    return qtrace.convert(qtrace.calibrate(prepared, [x], progress=False)), x


def _session(path: Path) -> onnxruntime.InferenceSession:
    return onnxruntime.InferenceSession(str(path))


def test_names_of_the_ends(tmp_path):
    model, x = _model()
    plain = _session(qtrace.export(model, tmp_path / "plain.onnx")).run(None, {"x": x})
    path = qtrace.export(
        model, tmp_path / "named.onnx", input_names=["image"], output_names=["boxes", "scores"]
    )
    session = _session(path)
    assert [i.name for i in session.get_inputs()] == ["image"]
    assert [o.name for o in session.get_outputs()] == ["boxes", "scores"]
    for a, b in zip(session.run(None, {"image": x}), plain, strict=True):
        np.testing.assert_array_equal(a, b)
    assert qtrace.verify(path, model, [x]).passed


def test_names_that_tensors_inside_have_already(tmp_path):
    model, _ = _model()
    path = qtrace.export(model, tmp_path / "m.onnx", output_names=["relu_out", "x_int"])
    assert [o.name for o in _session(path).get_outputs()] == ["relu_out", "x_int"]


def test_float_files_have_chosen_names_too(tmp_path):
    traced = qtrace.trace(
        net(lambda self, x: F.relu(self.a(x)), a=M.Conv2d(3, 4, 1)), np.zeros((1, 3, 4, 4), "f"), check=False
    )
    path = qtrace.export(traced, tmp_path / "f.onnx", output_names=["features"])
    assert [o.name for o in _session(path).get_outputs()] == ["features"]


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"output_names": ["boxes"]}, "output_names has 1 names for 2 tensors: give one for each of b_out, "),
        ({"output_names": ["a", "a"]}, "output_names gives two tensors one name"),
        ({"input_names": [3]}, "input_names names tensors by text, not by 3"),
        ({"preprocess": 1}, "preprocess=1 is no choice"),
    ],
)
def test_wrong_names_of_ends_are_refused(options, message, tmp_path):
    model, _ = _model()
    with pytest.raises(ExportError, match=message):
        qtrace.export(model, tmp_path / "m.onnx", **options)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.quick(1)
@pytest.mark.parametrize("scale", [1.0, 1 / 255])
def test_preprocessing_in_the_file(scale, tmp_path):
    model, x = _model(scale=scale)
    path = qtrace.export(model, tmp_path / "m.onnx", preprocess=True, input_names=["pixels"])
    session = _session(path)
    (info,) = session.get_inputs()
    assert (info.name, info.type, info.shape) == ("pixels", "tensor(uint8)", ["N", 12, 16, 3])
    assert "channels rgb" in onnx.load(path).graph.input[0].doc_string
    plain = _session(qtrace.export(model, tmp_path / "plain.onnx")).run(None, {"x": x})
    for a, b in zip(session.run(None, {"pixels": IMAGES}), plain, strict=True):
        assert np.abs(a - b).max() <= 0.02 * np.abs(b).max()  # a tie of the first rounding may fall otherwise
    report = qtrace.verify(path, model, [x])
    assert report.passed
    assert report.worst_lsb() <= 1


def test_preprocessing_needs_a_recipe_with_it(tmp_path):
    x = np.zeros((1, 3, 4, 4), np.float32)
    traced = qtrace.trace(net(lambda self, x: self.a(x), a=M.Conv2d(3, 4, 1)), x, check=False)
    model = qtrace.convert(qtrace.calibrate(qtrace.prepare(traced), [x + 1], progress=False))
    with pytest.raises(ExportError, match="add preprocess: .* to the recipe"):
        qtrace.export(model, tmp_path / "m.onnx", preprocess=True)
    model, _ = _model(size=[3, 24, 16])
    with pytest.raises(ExportError, match=r"the recipe says \[3, 24, 16\], and the model has 1 inputs"):
        qtrace.export(model, tmp_path / "m.onnx", preprocess=True)


@pytest.mark.quick(1)
@pytest.mark.parametrize(("suffix", "embedded"), [(".onnx", False), (".onnx", True), (".tflite", False)])
def test_the_script_beside_the_file_runs(suffix, embedded, tmp_path):
    model, _ = _model("tflite" if suffix == ".tflite" else "onnxruntime")
    path = qtrace.export(model, tmp_path / f"m{suffix}", **({"preprocess": True} if embedded else {}))
    ends = [("x", "uint8" if embedded else "float32", (1, 12, 16, 3) if embedded else (1, 3, 12, 16))]
    script, text = write_example(path, ends, Preprocess(**PIXELS), embedded)
    assert len(text.splitlines()) <= 24
    script.write_text(text)
    cv2.imwrite(str(tmp_path / "image.png"), IMAGES[0][..., ::-1])
    if suffix == ".tflite":  # its batch is that of the trace
        text = text.replace("x.transpose(2, 0, 1)[None]", "x.transpose(2, 0, 1)[None].repeat(2, 0)")
        script.write_text(text.replace("transpose(2, 0, 1)[None])", "transpose(2, 0, 1)[None].repeat(2, 0))"))
    done = subprocess.run(
        [sys.executable, script.name, "image.png"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("largest at") == 2


def test_a_script_without_preprocessing_reads_arrays(tmp_path):
    model, x = _model()
    path = qtrace.export(model, tmp_path / "m.onnx")
    script, text = write_example(path, [("x", "float32", (1, 3, 12, 16))])
    script.write_text(text)
    np.save(tmp_path / "x.npy", x)
    done = subprocess.run(
        [sys.executable, script.name, "x.npy"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.stdout.count("float32") == 2, done.stderr
    with pytest.raises(ExportError, match="examples are written for"):
        write_example(tmp_path / "m.param", [])


@pytest.mark.parametrize(("at", "top", "left"), [("around", 4, 0), ("end", 0, 0)])
def test_letterbox_keeps_the_aspect_and_fills_up(at, top, left):
    settings = Preprocess(**{**PIXELS, "size": [3, 16, 16]}, resize="letterbox", fill=7, fill_at=at)
    image = RANDOM.integers(100, 256, (16, 32, 3)).astype(np.uint8)
    fitted = fit(image, settings)
    assert fitted.shape == (16, 16, 3)
    expected = cv2.resize(image, (16, 8), interpolation=cv2.INTER_LINEAR)[..., ::-1]
    np.testing.assert_array_equal(fitted[top : top + 8, left : left + 16], expected)
    assert (np.delete(fitted, np.s_[top : top + 8], axis=0) == 7).all()
    with pytest.raises(ConfigError, match="fill does nothing with resize: stretch"):
        Preprocess(**PIXELS, fill=7)
