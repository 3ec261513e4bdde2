"""The detector: its data, metric, geometry and gradients, and the demo as `make detector-demo` runs it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import megengine as mge
import numpy as np
import pytest

import qtrace
from examples.detector import boxes, data, demo, net, training
from examples.detector.metric import THRESHOLDS, Detections, average_precision, iou
from examples.detector.targets import assign
from qtrace.data import open_data
from tests.each import each_of

ROOT = Path(__file__).parent.parent
RECIPE = ROOT / "examples/detector/recipe.yaml"
LEVELS = ((16, 256), (8, 64), (4, 16))


# -- metric -----------------------------------------------------------------------------------------


def _box(left: float, wide: float = 10.0) -> list[float]:
    return [left, 0.0, left + wide, 10.0]


def _detections(*boxes_and_scores: tuple[list[float], float], label: int = 0) -> Detections:
    """Builds the detections of an image from (box, score) pairs, best first."""
    rows = np.array([b for b, _ in boxes_and_scores], float).reshape(-1, 4)
    return Detections(
        rows, np.array([s for _, s in boxes_and_scores], float), np.full(len(boxes_and_scores), label)
    )


def _table(detections: list[Detections], truth: list[list[list[float]]], classes: int = 1) -> np.ndarray:
    true = [np.array(t, float).reshape(-1, 4) for t in truth]
    labels = [np.zeros(len(t), int) for t in true]
    return average_precision(detections, true, labels, classes).table


def test_iou_of_boxes_side_by_side():
    overlaps = iou(np.array([_box(0)]), np.array([_box(0), _box(5), _box(10), _box(2, 5)]))
    np.testing.assert_allclose(overlaps, [[1, 1 / 3, 0, 1 / 2]])


@each_of(
    ("detections", "truth", "expected"),
    [
        ([_detections((_box(0), 0.9))], [[_box(0)]], 1.0),
        ([_detections()], [[_box(0)]], 0.0),
        # The best one is wrong: two of three right at every recall.
        ([_detections((_box(50), 0.9), (_box(0), 0.8), (_box(20), 0.7))], [[_box(0), _box(20)]], 2 / 3),
        # Right, wrong, right: precision 1 at the 51 recalls up to .50, then 2/3 at 50.
        (
            [_detections((_box(0), 0.9), (_box(50), 0.8), (_box(20), 0.7))],
            [[_box(0), _box(20)]],
            (51 + 100 / 3) / 101,
        ),
        # The same with the boxes in two images: the order is by score, over all images.
        (
            [_detections((_box(0), 0.9), (_box(50), 0.8)), _detections((_box(20), 0.7))],
            [[_box(0)], [_box(20)]],
            (51 + 100 / 3) / 101,
        ),
        # A second detection of a box is wrong, and counts when it comes before a right one.
        (
            [_detections((_box(0), 0.9), (_box(0), 0.8), (_box(20), 0.7))],
            [[_box(0), _box(20)]],
            (51 + 100 / 3) / 101,
        ),
        ([_detections((_box(0), 0.9), (_box(0), 0.8))], [[_box(0)]], 1.0),
        # One of three is found: 34 recalls from 0 to .33.
        ([_detections((_box(0), 0.9))], [[_box(0), _box(20), _box(40)]], 34 / 101),
        # One of ten: recall .10 is reached exactly.
        ([_detections((_box(0), 0.9))], [[_box(20 * i) for i in range(10)]], 11 / 101),
    ],
)
def test_average_precision_by_hand(detections, truth, expected):
    np.testing.assert_allclose(_table(detections, truth), np.full((10, 1), expected))


def test_a_box_counts_up_to_the_threshold_that_it_reaches():
    # 8 of 10 wide: IoU .8, reached at .50, .55 ... .80.
    table = _table([_detections((_box(0, 8), 0.9))], [[_box(0)]])
    np.testing.assert_array_equal(table[:, 0], THRESHOLDS <= 0.8 + 1e-9)


def test_a_detection_takes_the_free_box_that_it_overlaps_most():
    # Both detections overlap both boxes; the better one must leave the other its own.
    truth = [_box(0), _box(2)]
    detections = _detections((_box(2), 0.9), (_box(0), 0.8))
    np.testing.assert_array_equal(_table([detections], [truth]), np.ones((10, 1)))


def test_mean_leaves_out_classes_that_do_not_occur_and_counts_those_not_found():
    detections = [_detections((_box(0), 0.9)), _detections((_box(0), 0.9), label=2)]
    true = [np.array([_box(0)]), np.array([_box(0)])]
    precision = average_precision(detections, true, [np.array([0]), np.array([1])], classes=3)
    np.testing.assert_array_equal(precision.table[0], [1.0, 0.0, np.nan])
    assert precision.map == precision.ap50 == 50.0


# -- data -------------------------------------------------------------------------------------------


def test_data_is_the_same_every_time():
    part, again = data.load("validation", 6), data.load("validation", 3)
    np.testing.assert_array_equal(part.images[:3], again.images)
    for own, others in ((part.boxes, again.boxes), (part.labels, again.labels)):
        for a, b in zip(own, others, strict=False):
            np.testing.assert_array_equal(a, b)


def test_parts_have_no_image_in_common():
    images = [image.tobytes() for name in data.PARTS for image in data.load(name, 20).images]
    assert len(set(images)) == len(images) == 80


def test_boxes_lie_in_the_image_and_hold_their_shape():
    part = data.load("validation", 40)
    every = np.concatenate(part.boxes)
    assert every.min() >= 0
    assert every.max() <= data.SIZE
    assert set(np.concatenate(part.labels)) == set(range(len(data.CLASSES)))
    for own in part.boxes:
        overlaps = iou(own, own) - np.eye(len(own))
        assert overlaps.max(initial=0) < 0.06


def test_recipe_reads_images_as_the_network_was_trained(tmp_path: Path):
    part = data.load("calibration", 3)
    data.save_images(part, tmp_path / "images")
    preprocess = qtrace.load_recipe(RECIPE).preprocess
    (read,) = list(open_data(str(tmp_path / "images"), preprocess=preprocess, batch_size=3))
    np.testing.assert_array_equal(read[0], data.normalize(part.images))


# -- geometry ---------------------------------------------------------------------------------------


def _perfect_maps(part: data.Part) -> list[np.ndarray]:
    """Builds the maps of a network that has learned its targets exactly."""
    targets = assign(part.boxes, part.labels)
    centres, strides = boxes.points()
    count = len(centres)
    sides = np.zeros((len(part) * count, 4), np.float32)
    at = targets.positive % count
    sides[targets.positive, :2] = centres[at] - targets.boxes[:, :2]
    sides[targets.positive, 2:] = targets.boxes[:, 2:] - centres[at]
    sides[targets.positive] /= strides[at, None]
    kinds = (
        targets.classes * 20 - 10,
        sides.reshape(len(part), count, 4),
        np.full((len(part), count, 1), 10.0),
    )
    maps, start = [], 0
    for side, cells in LEVELS:
        for kind in kinds:
            piece = kind[:, start : start + cells].transpose(0, 2, 1)
            maps.append(piece.reshape(len(part), -1, side, side))
        start += cells
    return maps


def test_what_is_taught_decodes_to_the_truth():
    part = data.load("validation", 30)
    precision = boxes.evaluate(boxes.decode(_perfect_maps(part)), part)
    assert precision.map > 97


def test_boxes_are_mirrored_with_their_image():
    image, box = np.zeros((3, data.SIZE, data.SIZE), np.uint8), np.array([[10, 20, 30, 50]], np.float32)
    image[:, 20:50, 10:30] = 255
    turned, ((left, top, right, bottom),) = training.mirror(image, box)
    inside = turned[:, int(top) : int(bottom), int(left) : int(right)]
    assert inside.min() == 255
    assert inside.sum() == image.sum()


# -- gradients --------------------------------------------------------------------------------------


# -- demo -------------------------------------------------------------------------------------------


def test_weights_are_small_and_fit_the_network():
    assert net.WEIGHTS.stat().st_size < 3_000_000
    maps = net.pretrained()(mge.Tensor(np.zeros((1, 3, 64, 64), np.float32)))
    channels = (len(data.CLASSES), 4, 1)
    assert [m.shape for m in maps] == [(1, c, side, side) for side, _ in LEVELS for c in channels]


def test_misses_names_targets_that_are_not_met():
    rows = [
        demo.Row("float", 60.0, 80.0),
        demo.Row("PTQ W8A8", 59.5, 80.0, runtime=58.9),
        demo.Row("QAT W8A8", 59.8, 80.0, runtime=59.8),
        demo.Row("PTQ W4A4", 40.0, 60.0),
        demo.Row("QAT W4A4", 50.0, 60.0),
    ]
    assert demo.missed_targets(rows) == ["mAP of PTQ W8A8 in onnxruntime is 58.90, at least 59.00 needed"]


def _run(out: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "examples.detector.demo", "--out", str(out), *arguments]
    return subprocess.run(words, capture_output=True, text=True, cwd=ROOT)


@pytest.mark.slow
def test_quick_demo_leaves_every_artefact(tmp_path: Path):
    out = tmp_path / "out"
    run = _run(out, "--quick")
    assert run.returncode == 0, run.stderr
    named = {name for line in demo.ARTEFACTS for name in line} - {"weights.npz", "weights.json"}
    assert {p.name for p in out.iterdir()} == named | {"README.md"}
    variants = json.loads((out / "results.json").read_text())["variants"]
    assert [v["name"] for v in variants] == ["float", "PTQ W8A8", "QAT W8A8", "PTQ W4A4", "QAT W4A4"]
    assert all(abs(v["runtime"] - v["graph"]) < 1 for v in variants if v["runtime"] is not None)


@pytest.mark.slow
def test_a_demo_that_fails_leaves_nothing(tmp_path: Path):
    (tmp_path / "out").write_text("not a folder")
    run = _run(tmp_path / "out", "--quick")
    assert run.returncode != 0
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


@pytest.mark.long
def test_demo_meets_its_targets(tmp_path: Path):
    run = _run(tmp_path / "out")
    assert run.returncode == 0, run.stdout + run.stderr
    assert "All targets are met." in run.stdout
