"""The choice of boxes inside a detector's file, against greedy suppression in float64."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path

import megengine.functional as F
import megengine.module as M
import numpy as np
import onnx
import onnxruntime
import pytest

import qtrace
from qtrace.errors import ExportError
from qtrace.export.detections import Suppression
from qtrace.export.example import write_example
from qtrace.graph.types import TracedModule
from qtrace.preparation.model import QuantizedModel, is_quantized
from tests.nets import net

RANDOM = np.random.default_rng(0)
CLASSES = 3


def _rows(x):
    return F.transpose(F.reshape(x, (x.shape[0], x.shape[1], -1)), (0, 2, 1))


def _whole(self, x):
    """The head of a YOLOX: center, size, objectness, classes."""
    y = _rows(self.a(F.relu(self.stem(x))))
    box = F.concat([y[:, :, :2] * 4 + 8, F.exp(y[:, :, 2:4]) * 4], axis=2)
    return F.concat([box, F.sigmoid(y[:, :, 4:])], axis=2)


def _apart(self, x):
    y = _rows(self.a(F.relu(self.stem(x))))
    corner = y[:, :, :2] * 4
    boxes = F.concat([corner, corner + F.exp(y[:, :, 2:4]) * 4], axis=2)
    return F.sigmoid(y[:, :, 5:]), boxes, F.sigmoid(y[:, :, 4:5])


def _detector(
    forward, batch: int, backend: str = "onnxruntime"
) -> tuple[TracedModule, TracedModule, np.ndarray]:
    x = RANDOM.normal(size=(batch, 3, 6, 7)).astype(np.float32)
    parts = {"stem": M.Conv2d(3, 8, 3, padding=1), "a": M.Conv2d(8, 5 + CLASSES, 1)}
    traced = qtrace.trace(net(forward, **parts), x, check=False)
    prepared = qtrace.prepare(traced, {"backend": backend})
    return traced, qtrace.convert(qtrace.calibrate(prepared, [x], progress=False)), x


def _suppress(boxes: np.ndarray, scores: np.ndarray, choice: Suppression) -> list[tuple[int, int]]:
    """Returns (box, class) of the boxes of an image that are kept, by score."""
    label, best = scores.argmax(1), scores.max(1)
    kept: list[int] = []
    for box in np.argsort(-best, kind="stable"):
        rivals = [k for k in kept if label[k] == label[box]]
        if best[box] > choice.score and all(_iou(boxes[box], boxes[k]) <= choice.iou for k in rivals):
            kept.append(int(box))
    return [(k, int(label[k])) for k in kept[: choice.limit]]


def _iou(a: np.ndarray, b: np.ndarray) -> float:
    sides = np.clip(np.minimum(a[2:], b[2:]) - np.maximum(a[:2], b[:2]), 0, None)
    common = float(np.prod(sides))
    return common / (float(np.prod(a[2:] - a[:2])) + float(np.prod(b[2:] - b[:2])) - common)


def _check_greedy(kept: list[int], boxes: np.ndarray, scores: np.ndarray, choice: Suppression) -> None:
    """Integers make equal scores, whose order is free: every box left out is below one that is kept."""
    label, best = scores.argmax(1), scores.max(1)
    assert all(a >= b for a, b in itertools.pairwise(best[kept]))
    for box in np.flatnonzero(best > choice.score):
        rivals = [k for k in kept if k != box and label[k] == label[box]]
        beaten = [k for k in rivals if _iou(boxes[box], boxes[k]) > choice.iou]
        if box in kept:
            assert not beaten
        else:
            full = len(kept) == choice.limit and best[kept[-1]] >= best[box]
            assert full or any(best[k] >= best[box] for k in beaten)


def _decoded(outputs: list[np.ndarray], choice: Suppression) -> tuple[np.ndarray, np.ndarray]:
    """Returns corners and scores, from the outputs of the graph."""
    if choice.scores is None:
        (raw,) = (o.astype(np.float64) for o in outputs)
        half = raw[..., 2:4] / 2
        corners = np.concatenate([raw[..., :2] - half, raw[..., :2] + half], axis=2)
        return corners, raw[..., 5:] * raw[..., 4:5]
    scores, corners, factor = (o.astype(np.float64) for o in outputs)
    return corners, scores * factor if choice.objectness else scores


def _expected(outputs: list[np.ndarray], choice: Suppression) -> list[tuple[np.ndarray, float, int, int]]:
    """Returns corners, score, class and image of each row, from the outputs of the graph."""
    corners, scores = _decoded(outputs, choice)
    return [
        (corners[image, box], float(scores[image, box].max()), label, image)
        for image in range(len(corners))
        for box, label in _suppress(corners[image], scores[image], choice)
    ]


WHOLE = {"form": "cxcywh", "iou": 0.3, "score": 0.2, "limit": 20}
CASES = {
    "whole": (_whole, WHOLE),
    "few": (_whole, {**WHOLE, "limit": 3}),
    "none": (_whole, {**WHOLE, "score": 0.999}),
    "apart": (_apart, {"iou": 0.2, "score": 0.3}),
    "objectness": (_apart, {"iou": 0.2, "score": 0.2, "limit": 7}),
}


def _names(model: TracedModule) -> list[str]:
    if not is_quantized(model):
        return [node.name for node in model.graph.outputs]
    return [QuantizedModel(model).unrounded_name(node) for node in model.graph.outputs]


def _option(case: str, names: list[str]) -> dict[str, object]:
    option = dict(CASES[case][1])
    if len(names) == 1:
        return {**option, "boxes": names[0]}
    extra = {"objectness": names[2]} if case == "objectness" else {}
    return {**option, "scores": names[0], "boxes": names[1], **extra}


@pytest.mark.quick(2)
@pytest.mark.parametrize("stage", ["float", "int8"])
@pytest.mark.parametrize("case", CASES)
def test_onnx(case, stage, tmp_path):
    traced, model, x = _detector(CASES[case][0], batch=2)
    names = [f"out_{n}" for n in range(len(model.graph.outputs))]
    option = _option(case, names)
    path = qtrace.export(
        traced if stage == "float" else model, tmp_path / "m.onnx", output_names=names, nms=option
    )
    values = onnxruntime.InferenceSession(str(path)).run(None, {"x": x})
    boxes, scores, classes, images = values[len(names) :]
    expected = _expected(values[: len(names)], Suppression.of(option))
    assert (case == "none") == (not expected)
    assert len(boxes) == len(expected)
    for row, (corners, score, label, image) in enumerate(expected):
        np.testing.assert_allclose(boxes[row], corners, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(scores[row], score, rtol=1e-5)
        assert (classes[row], images[row]) == (label, image)
    if stage == "int8":
        report = qtrace.verify(path, model, [x])
        assert report.passed
        assert report.worst_lsb() <= 1


@pytest.mark.quick(2)
@pytest.mark.parametrize("stage", ["float", "int8"])
@pytest.mark.parametrize("case", CASES)
def test_tflite(case, stage, tmp_path):
    from ai_edge_litert.interpreter import Interpreter

    traced, model, x = _detector(CASES[case][0], batch=1, backend="tflite")
    option = _option(case, _names(model))
    path = qtrace.export(traced if stage == "float" else model, tmp_path / "m.tflite", nms=option)
    interpreter = Interpreter(str(path))
    run = interpreter.get_signature_runner()
    (given,) = run.get_input_details()
    values = run(**{given: np.ascontiguousarray(x.transpose(0, 2, 3, 1))})
    choice = Suppression.of(option)
    (corners,), (scores,) = _decoded([values[name] for name in _names(model)], choice)
    count = int(values["detection_count"])
    assert (case == "none") == (count == 0)
    assert values["detection_boxes"].shape == (choice.limit, 4)
    assert not values["detection_scores"][count:].any()
    kept = [int(np.abs(corners - row).max(1).argmin()) for row in values["detection_boxes"][:count]]
    _check_greedy(kept, corners, scores, choice)
    np.testing.assert_allclose(values["detection_boxes"][:count], corners[kept], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(values["detection_scores"][:count], scores[kept].max(1), rtol=1e-5)
    np.testing.assert_array_equal(values["detection_classes"][:count], scores[kept].argmax(1))
    if stage == "int8":
        assert qtrace.verify(path, model, [x]).passed


def test_the_script_beside_a_file_that_finds_no_boxes_runs(tmp_path):
    traced, _, x = _detector(_whole, batch=1)
    path = qtrace.export(traced, tmp_path / "m.onnx", nms={"boxes": _names(traced)[0], "score": 9})
    np.save(tmp_path / "x.npy", x)
    script, text = write_example(path, [("x", "float32", x.shape)])
    script.write_text(text)
    command = [sys.executable, script.name, "x.npy"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("largest at nowhere") == 4


MISTAKES = [
    (3, "nms=3 is no choice: give a mapping with boxes, scores"),
    ({"boxes": "y", "iuo": 1}, "nms takes no key 'iuo'; it knows: boxes, scores"),
    ({"scores": "y"}, "nms needs boxes: the name of the output"),
    ({"boxes": "y"}, "nms names 'y', which is no output: name one of a, b, c"),
    ({"boxes": "a", "scores": "a"}, r"nms: boxes are of shape \(N, A, 4\), and a is \(2, 42, 3\)"),
    (
        {"boxes": "b"},
        r"nms: boxes are of shape \(N, A, 5 \+ classes\) where scores names no output, and b is",
    ),
    ({"boxes": "b", "scores": "a", "iou": 1.5}, "nms: iou=1.5 is no overlap"),
    ({"boxes": "b", "scores": "a", "score": "x"}, "nms: score is a number, not 'x'"),
    ({"boxes": "b", "scores": "a", "limit": 0}, "nms: limit=0 is no number of boxes"),
    ({"boxes": "b", "scores": "a", "form": "yx"}, "nms: form='yx' is no choice: choose xyxy or cxcywh"),
    ({"boxes": "b", "objectness": "c"}, "nms: objectness belongs to scores"),
    ({"boxes": 4}, "nms: boxes is the name of an output, not 4"),
    ({"boxes": "b", "scores": "a", "objectness": "a"}, r"nms: objectness is of shape \(2, 42, 1\), and a is"),
]


@pytest.mark.quick(2)
@pytest.mark.parametrize(("option", "message"), MISTAKES)
def test_wrong_nms_options_are_refused(option, message, tmp_path):
    traced, _, _ = _detector(_apart, batch=2)
    with pytest.raises(ExportError, match=message):
        qtrace.export(traced, tmp_path / "m.onnx", output_names=["a", "b", "c"], nms=option)
    assert list(tmp_path.iterdir()) == []


def test_names_that_are_taken(tmp_path):
    traced, _, _ = _detector(_apart, batch=2)
    names = ["a", "detection_boxes", "c"]
    with pytest.raises(ExportError, match="nms adds the output detection_boxes, which is there: rename it"):
        qtrace.export(
            traced, tmp_path / "m.onnx", output_names=names, nms={"boxes": "detection_boxes", "scores": "a"}
        )


def test_tflite_takes_one_image(tmp_path):
    traced, model, _ = _detector(_whole, batch=2, backend="tflite")
    option = {"boxes": _names(model)[0]}
    with pytest.raises(ExportError, match="needs batches of one, and the model was traced with 2"):
        qtrace.export(traced, tmp_path / "m.tflite", nms=option)


def test_the_opset_of_the_file(tmp_path):
    traced, _, x = _detector(_whole, batch=1)
    option = {"boxes": "y", **WHOLE}
    files = [tmp_path / f"{opset}.onnx" for opset in (13, 18, 21)]
    results = []
    for file in files:
        qtrace.export(traced, file, output_names=["y"], nms=option, opset=int(file.stem))
        assert onnx.load(Path(file)).opset_import[0].version == int(file.stem)
        results.append(onnxruntime.InferenceSession(str(file)).run(None, {"x": x}))
    for result in results[1:]:
        for a, b in zip(results[0], result, strict=True):
            np.testing.assert_array_equal(a, b)
