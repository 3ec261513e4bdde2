"""Metrics of a graph's outputs: compared with the float graph's, or by the user's own function.

A detector's are its losses against its own float graph, by level: class, box, objectness.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from qtrace.comparing.groups import ColumnGroup
from qtrace.comparing.sums import ErrorSums, Outputs, column_errors
from qtrace.errors import SHOWN_LINES, ConfigError, shorten_list
from qtrace.graph.types import TensorNode, TracedModule
from qtrace.preparation.model import QuantizedModel
from qtrace.verification.runs import output_names

Metric = Callable[[Outputs, Outputs], float]
"""From the float graph's outputs and the quantized graph's to a number; more is better."""


Own = Callable[[Any], float]
"""A user's metric: gets a graph that computes what the source module computes, and returns a number."""


def choose(metric: str | Metric, own: Own | None) -> tuple[str, Metric, Own | None]:
    """Returns a metric's name, the function that compares outputs, and the one that runs the graph itself.

    Args:
        metric: ``sqnr``, ``agreement``, or a function that compares.
        own: the user's metric, which replaces ``metric``.

    Raises:
        ConfigError: for an unknown name.
    """
    if own is not None:
        name = getattr(own, "__name__", "metric")
        return name, sqnr, _checked(own, name)
    if callable(metric):
        return getattr(metric, "__name__", type(metric).__name__), metric, None
    if metric == "detection":
        raise ConfigError(
            "the metric detection must know which outputs are what: give a DetectionLoss with its levels, on "
            "the command line --level."
        )
    known: dict[str, Metric] = {"sqnr": sqnr, "agreement": agreement}
    if metric not in known:
        raise ConfigError(
            f"unknown metric {metric!r}; known: {', '.join(known)}, detection, or name a function of your "
            "own as 'pkg.mod:function'."
        )
    return metric, known[metric], None


def sqnr(reference: Outputs, test: Outputs, groups: Sequence[ColumnGroup] | None = None) -> float:
    """Signal-to-quantization-noise ratio in dB, of the worst column group of all outputs.

    An output that packs unlike quantities has a group for each, and no group counts more for having larger
    values. Outputs that are not floats, or whose shapes differ, do not count.

    Args:
        reference: for each batch the float outputs.
        test: for each batch the outputs in their place.
        groups: the column groups of the outputs; None for those that the values show.
    """
    return column_errors(reference, test, groups).sqnr_db()


def agreement(reference: Outputs, test: Outputs) -> float:
    """The share of samples, in percent, whose largest value of the first output has the same index.

    Raises:
        ConfigError: when the first output lacks axes of samples and classes, or its rows depend on values.
    """
    sums = ErrorSums()
    for exact, rounded in zip(reference, test, strict=True):
        if exact[0].shape != rounded[0].shape:
            raise ConfigError(
                f"the metric agreement needs one row a sample, but the first output has shape "
                f"{exact[0].shape} in float and {rounded[0].shape} quantized: use another metric."
            )
        sums.add(exact[0], rounded[0], classes=True)
    if sums.agreement is None:
        raise ConfigError(
            f"the metric agreement compares the classes of samples, but the first output of shape "
            f"{reference[0][0].shape} lacks an axis of classes: use another metric."
        )
    return 100.0 * sums.agreement


def _checked(function: Own, name: str) -> Own:
    def checked(model: Any) -> float:
        value = function(model)
        try:
            number = float(value)
        except (TypeError, ValueError):
            raise ConfigError(
                f"metric {name} returned {type(value).__name__}: return a number, more being better."
            ) from None
        if not np.isfinite(number):
            raise ConfigError(f"metric {name} returned {number}: return a finite number.")
        return number

    return checked


Parts = tuple[dict[str, float], ...]
"""For each level its losses by name: class, box, and objectness where there is one."""

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Level:
    """The outputs of one level of a detector, by their numbers among the graph's outputs or by their names.

    Names are the nodes' own, which an exported file has too.

    Attributes:
        classes: logits, N x C x ..., or N x ... x C with ``axis`` -1.
        boxes: regression, with its 4 values on the same axis; or several fours, of anchors or distributions.
        objectness: logits with 1 value, or None where the detector has none (then the classes tell).
        axis: the axis of the channels.
    """

    classes: int | str
    boxes: int | str
    objectness: int | str | None = None
    axis: int = 1

    def named(self) -> dict[str, int | str]:
        """Returns loss -> output."""
        outputs = {"class": self.classes, "box": self.boxes}
        return outputs if self.objectness is None else {**outputs, "objectness": self.objectness}


@dataclass(frozen=True)
class DetectionLoss:
    """The losses of a detector against its own float graph, where that one finds something.

    A place is matched when the float graph's score there, ``sigmoid(objectness) * max sigmoid(class)``, is at
    least ``threshold``. On a level without any, the best one counts. Over the matched places::

        class       mean binary cross entropy of sigmoid(q) to sigmoid(f), less that of f to itself
        box         mean |q - f| over its values, relative to the mean |f|
        objectness  as for class, over all places of the level

    Attributes:
        levels: one for each level of the pyramid.
        threshold: the smallest float score of a matched place.

    Raises:
        ConfigError: without a level, or for a threshold that is no score.
    """

    levels: tuple[Level, ...]
    threshold: float = 0.3

    def __post_init__(self) -> None:
        """Refuses what cannot be."""
        if not self.levels:
            raise ConfigError("a detection loss needs the outputs of a level at least: name them.")
        if not 0 <= self.threshold <= 1:
            raise ConfigError(f"the threshold of a detection loss is {self.threshold}: give a score, 0 to 1.")

    def __call__(self, reference: Outputs, test: Outputs) -> float:
        """Minus the sum of all losses, so that more is better."""
        return self.total(self.parts(reference, test))

    @staticmethod
    def total(parts: Parts) -> float:
        """Minus the sum of losses."""
        return 0.0 - sum(sum(part.values()) for part in parts)

    def parts(self, reference: Outputs, test: Outputs) -> Parts:
        """The losses of each level by name: class, box, and objectness where there is one.

        Raises:
            ConfigError: when a level names an output that the graph does not have, or whose shape is not that
                of such an output.
        """
        shapes = [value.shape for value in reference[0]]
        _check(self.levels, shapes, ())
        return tuple(self._level(level, reference, test) for level in self.levels)

    def of(self, prepared: TracedModule | QuantizedModel) -> DetectionLoss:
        """Returns a copy whose outputs are the numbers of this graph's outputs.

        Raises:
            ConfigError: as for `parts`.
        """
        model = QuantizedModel.of(prepared)
        names = output_names(model)
        numbers = {name: index for index, name in enumerate(names)}
        levels = tuple(_numbered(level, numbers) for level in self.levels)
        _check(levels, [_shape(node) for node in model.module.graph.outputs], names)
        return dataclasses.replace(self, levels=levels)

    def _level(self, level: Level, reference: Outputs, test: Outputs) -> dict[str, float]:
        f, q = (
            {loss: _rows(side, int(output), level.axis) for loss, output in level.named().items()}
            for side in (reference, test)
        )
        score = _sigmoid(f["class"]).max(axis=1)
        if "objectness" in f:
            score = score * _sigmoid(f["objectness"])[:, 0]
        matched = score >= self.threshold
        if not matched.any():
            matched = score >= score.max()
        losses = {
            "class": _divergence(f["class"][matched], q["class"][matched]),
            "box": float(
                np.mean(np.abs(q["box"][matched] - f["box"][matched]))
                / max(float(np.mean(np.abs(f["box"][matched]))), 1e-12)
            ),
        }
        if "objectness" in f:
            losses["objectness"] = _divergence(f["objectness"], q["objectness"])
        return losses


def _numbered(level: Level, numbers: Mapping[str, int]) -> Level:
    """The level with known names as numbers; others stay, and are refused by `_check`."""
    classes, boxes, *more = (numbers.get(o, o) if isinstance(o, str) else o for o in level.named().values())
    return dataclasses.replace(level, classes=classes, boxes=boxes, objectness=more[0] if more else None)


def _check(levels: Iterable[Level], shapes: Sequence[Shape | None], names: Sequence[str]) -> None:
    """Refuses outputs that are not there or not of the shape that they must have, where that is known."""
    for level in levels:
        places: dict[str, Shape] = {}
        for loss, output in level.named().items():
            if isinstance(output, str) or not 0 <= output < len(shapes):
                raise ConfigError(
                    f"a level names output {output if isinstance(output, int) else repr(output)}, but the "
                    f"graph gives {len(shapes)} tensors{_listed(names)}."
                )
            shape = shapes[output]
            if shape is not None:
                spoken = f"output {output}{f' ({names[output]})' if names else ''} of shape {shape}"
                places[spoken] = _places(level.axis, loss, shape, spoken)
        if len(set(places.values())) > 1:
            raise ConfigError(
                f"{' and '.join(places)} are not of one level: but for axis {level.axis}, shapes must agree."
            )


def _places(axis: int, loss: str, shape: Shape, spoken: str) -> Shape:
    """The shape without the channels, which must be as many as a loss takes."""
    if not -len(shape) <= axis < len(shape):
        raise ConfigError(f"{spoken} lacks axis {axis}, the channels of a level.")
    values = shape[axis]
    if (loss == "box" and values % 4) or (loss == "objectness" and values != 1):
        wanted = "a multiple of 4" if loss == "box" else "1"
        raise ConfigError(
            f"{spoken} cannot be the {loss} of a level: it has {values} values on axis {axis}, not {wanted}."
        )
    at = axis % len(shape)
    return shape[:at] + shape[at + 1 :]


def _listed(names: Sequence[str]) -> str:
    """Outputs for a message, where their names are known."""
    listed = shorten_list((f"{index} {name}" for index, name in enumerate(names)), limit=SHOWN_LINES)
    return f": {listed}" if names else ""


def _shape(node: object) -> Shape | None:
    shape = node.shape if isinstance(node, TensorNode) else None
    return None if shape is None else tuple(int(n) for n in shape)


def _rows(outputs: Outputs, index: int, axis: int) -> np.ndarray:
    """One output over all batches as places x channels, float64."""
    parts = [np.moveaxis(batch[index].astype(np.float64), axis, -1) for batch in outputs]
    return np.concatenate([part.reshape(-1, part.shape[-1]) for part in parts])


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 0.5 * (np.tanh(0.5 * x) + 1.0)


def _divergence(f: np.ndarray, q: np.ndarray) -> float:
    """Mean Kullback-Leibler divergence of two Bernoulli variables with these logits."""
    p = _sigmoid(f)
    return float(np.mean(_entropy(p, q) - _entropy(p, f)))


def _entropy(p: np.ndarray, logits: np.ndarray) -> np.ndarray:
    """Binary cross entropy of probabilities and logits."""
    return np.maximum(logits, 0) - logits * p + np.log1p(np.exp(-np.abs(logits)))
