"""The float networks with their data: each part of the data is used for one purpose only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import megengine as mge
import megengine.module as M
import numpy as np

from benchmarks.accuracy.networks import CLASSIFIERS
from examples import digits

__all__ = [
    "NAMES",
    "WEIGHTS",
    "Runner",
    "Subject",
    "batches",
    "in_megengine",
    "split",
    "subject",
    "training_inputs",
]

WEIGHTS = Path(__file__).parent / "weights"
NAMES = (*CLASSIFIERS, "detector")

# From a batch of inputs to the outputs.
Runner = Callable[[np.ndarray], Sequence[np.ndarray]]

# The last of the images that may be trained on; they say what training has reached.
VALIDATION = 197


@dataclass(frozen=True)
class Subject:
    """A float network with its data and its metric.

    Attributes:
        name: the network.
        net: the network, in eval mode.
        calibration: inputs, N x ...; without labels.
        test: inputs that nothing was chosen on, for noise and metric.
        metric: accuracy or mAP in percent, from a runner, on the test part.
        unit: the name of the metric.
    """

    name: str
    net: M.Module
    calibration: np.ndarray
    test: np.ndarray
    metric: Callable[[Runner], float]
    unit: str


def split() -> tuple[digits.Part, digits.Part, digits.Part, digits.Part]:
    """The digits: to train (1,000), to validate (197), to calibrate (100), to test (500)."""
    data = digits.load()
    images, labels = data.train.images, data.train.labels
    train = digits.Part(images[:-VALIDATION], labels[:-VALIDATION])
    validation = digits.Part(images[-VALIDATION:], labels[-VALIDATION:])
    return train, validation, data.calibration, data.test


def training_inputs(subject: Subject, count: int) -> np.ndarray:
    """Up to ``most`` inputs of the training part, without their labels."""
    if subject.name != "detector":
        return split()[0].images[:count]
    from examples.detector import data

    return data.normalize(data.load("train", count).images)


def subject(name: str, quick: bool = False) -> Subject:
    """The network ``name`` with its committed weights; ``quick`` takes little of the data."""
    return _detector(quick) if name == "detector" else _classifier(name, quick)


def _classifier(name: str, quick: bool) -> Subject:
    net = CLASSIFIERS[name]()
    with np.load(WEIGHTS / f"{name}.npz") as stored:
        net.load_state_dict({key: stored[key] for key in stored.files})
    net.eval()
    _, _, calibration, test = split()
    limit = 50 if quick else None

    def accuracy(run: Runner) -> float:
        scores = np.concatenate([run(batch)[0] for batch in batches(test.images[:limit], 100)])
        return 100 * float(np.mean(scores.argmax(axis=1) == test.labels[:limit]))

    return Subject(name, net, calibration.images[:limit], test.images[:limit], accuracy, "accuracy")


def _detector(quick: bool) -> Subject:
    from examples.detector import boxes, data
    from examples.detector.net import pretrained

    part = data.load("test", 50 if quick else None)
    calibration = data.load("calibration", 8 if quick else None)

    def precision(run: Runner) -> float:
        return boxes.evaluate(boxes.detect(run, part), part).map

    return Subject(
        "detector",
        pretrained(),
        data.normalize(calibration.images),
        data.normalize(part.images),
        precision,
        "mAP",
    )


def batches(inputs: np.ndarray, size: int = 50) -> list[np.ndarray]:
    """``inputs`` in batches, the last one smaller if need be."""
    return [inputs[i : i + size] for i in range(0, len(inputs), size)]


def in_megengine(model: Any) -> Runner:
    """A module or graph with one output or several."""

    def run(inputs: np.ndarray) -> list[np.ndarray]:
        outputs = model(mge.Tensor(inputs))
        return [o.numpy() for o in (outputs if isinstance(outputs, (tuple, list)) else (outputs,))]

    return run
