"""The networks with their data: each gives a traced graph, inputs, and the metrics of its task."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

import qtrace
from benchmarks.accuracy import subjects
from benchmarks.deployed.rows import TIMED, TRAINED, TRAINED_NETS, VARIANTS, VARIANTS_TIMED
from examples.ocr import decoding, lines, metric, package, pages

__all__ = ["Network", "load", "variants_of"]

CLASSIFIER = "ch_ppocr_mobile_v2.0_cls_infer.onnx"

# From a batch of inputs to the outputs.
Run = Callable[[np.ndarray], Sequence[np.ndarray]]
# The metrics of a file, beside those of the float file.
Metrics = Callable[[Run, Run], dict[str, float]]

# Images to calibrate on, to compare outputs on, and to judge the task on.
_LINES, _PAGES, _TURNED = (48, 64, 300), (32, 24, 48), (64, 100, 300)
_TURNED_SIZE = (48, 192)
_BATCH = 8


@dataclass(frozen=True)
class Network:
    """A network on its way to files.

    Attributes:
        name: its name.
        traced: the float graph, traced with one sample.
        original: the file that it was imported from; None for a network of MegEngine.
        calibration: the inputs to calibrate on.
        test: inputs that nothing was chosen on.
        metrics: the metrics of the task.
        trained: whether outputs and task mean something.
    """

    name: str
    traced: Any
    original: Path | None
    calibration: np.ndarray
    test: np.ndarray
    metrics: Metrics
    trained: bool = True


def variants_of(name: str) -> tuple[str, ...]:
    """Returns the variants that are measured of a network."""
    return VARIANTS_TIMED if name in TIMED else VARIANTS


def load(name: str) -> Network:
    """Builds or imports a network, with its data."""
    if name in TRAINED:
        return {"recogniser": _recogniser, "detector": _detector, "classifier": _classifier}[name]()
    return _subject(name) if name in TRAINED_NETS else _timed(name)


def _imported(name: str, file: str, calibration: np.ndarray, test: np.ndarray, metrics: Metrics) -> Network:
    path = package.models_folder() / file
    traced = qtrace.from_onnx(path, {"x": (1, *test.shape[1:])}, batch="x:0")
    return Network(name, traced, path, calibration, test, metrics)


def _recogniser() -> Network:
    test = lines.load("test", _LINES[2])
    inputs, truth = lines.normalize(test), [line.text for line in test]
    characters = decoding.read_characters(package.models_folder() / package.RECOGNISER)

    def judge(run: Run, exact: Run) -> dict[str, float]:
        texts = [text for batch in _batches(inputs) for text in decoding.decode(run(batch)[0], characters)]
        return {
            "line accuracy": metric.line_accuracy(texts, truth),
            "character error rate": metric.character_error_rate(texts, truth),
        }

    calibration = lines.normalize(lines.load("calibration", _LINES[0]))
    return _imported("recogniser", package.RECOGNISER, calibration, inputs[: _LINES[1]], judge)


def _detector() -> Network:
    inputs = pages.normalize(pages.load("test", _PAGES[2]))

    def judge(run: Run, exact: Run) -> dict[str, float]:
        maps, reference = (np.concatenate([f(b)[0] for b in _batches(inputs)]) for f in (run, exact))
        return {"IoU": metric.text_iou(maps, reference)}

    calibration = pages.normalize(pages.load("calibration", _PAGES[0]))
    return _imported("detector", package.DETECTOR, calibration, inputs[: _PAGES[1]], judge)


def _classifier() -> Network:
    inputs, turned = turned_lines("test", _TURNED[2])

    def judge(run: Run, exact: Run) -> dict[str, float]:
        ours, floats = (np.concatenate([f(b)[0].argmax(1) for b in _batches(inputs)]) for f in (run, exact))
        return {
            "accuracy": 100 * float(np.mean(ours == turned)),
            "agreement": 100 * float(np.mean(ours == floats)),
        }

    calibration, _ = turned_lines("calibration", _TURNED[0])
    return _imported("classifier", CLASSIFIER, calibration, inputs[: _TURNED[1]], judge)


def turned_lines(part: str, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns ``count`` lines, every second one turned by 180 degrees, and 1 for those.

    A line keeps its ratio if it is not wider than the input of the network, and stands at the left.
    """
    height, width = _TURNED_SIZE
    inputs = np.zeros((count, 3, height, width), np.float32)
    for index, line in enumerate(lines.load(part, count)):
        pixels = line.pixels[:, : line.width]
        columns = min(width, line.width)
        pixels = pixels[::-1, ::-1] if index % 2 else pixels
        image = Image.fromarray(np.ascontiguousarray(pixels))
        pixels = np.asarray(image.resize((columns, height), Image.Resampling.BILINEAR), np.float32)
        inputs[index, :, :, :columns] = pixels.transpose(2, 0, 1) / np.float32(127.5) - 1
    return inputs, np.arange(count) % 2


def _subject(name: str) -> Network:
    """A network of MegEngine with committed weights."""
    kind = "detector" if name == "shapes detector" else name.split()[0]
    subject = subjects.subject(kind)
    traced = qtrace.trace(subject.net, subject.calibration[:1], check=False)

    def judge(run: Run, exact: Run) -> dict[str, float]:
        return {subject.unit: float(subject.metric(run))}

    return Network(name, traced, None, subject.calibration[:64], subject.test[:100], judge)


def _timed(name: str) -> Network:
    from benchmarks.deployed.nets import build
    from tests.zoo.parts import pictures

    kind, _, size = name.rpartition(" ")
    images = pictures(8, 3, int(size), int(size), seed=2)
    test = pictures(2, 3, int(size), int(size), seed=3)
    traced = qtrace.trace(build(kind), images[:1], check=False)
    return Network(name, traced, None, images, test, lambda run, exact: {}, trained=False)


def _batches(inputs: np.ndarray) -> list[np.ndarray]:
    return [inputs[i : i + _BATCH] for i in range(0, len(inputs), _BATCH)]
