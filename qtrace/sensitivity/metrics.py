"""How good a graph's outputs are: beside the float graph's, or as the user's own function finds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from qtrace.errors import ConfigError

__all__ = ["DetectionLoss", "Level", "Metric", "Own", "agreement", "choose", "sqnr"]

Outputs = Sequence[Sequence[np.ndarray]]
"""For each batch the tensors that the graph gives."""

Metric = Callable[[Outputs, Outputs], float]
"""From the float graph's outputs and the quantized graph's to a number; more is better."""


Own = Callable[[Any], float]
"""A user's metric: gets a graph that computes what the source module computes, and returns a number."""


def choose(metric: str | Metric, own: Own | None) -> tuple[str, Metric, Own | None]:
    """The name of a metric, the function that compares outputs, and the one that runs the graph itself.

    Args:
        metric: ``sqnr``, ``agreement``, or a function that compares.
        own: the user's, which goes before the other.

    Raises:
        ConfigError: for an unknown name.
    """
    if own is not None:
        name = getattr(own, "__name__", "metric")
        return name, sqnr, _checked(own, name)
    if callable(metric):
        return getattr(metric, "__name__", type(metric).__name__), metric, None
    known: dict[str, Metric] = {"sqnr": sqnr, "agreement": agreement}
    if metric not in known:
        raise ConfigError(
            f"unknown metric {metric!r}; known: {', '.join(known)}, or name a function of your own as "
            "'pkg.mod:function'."
        )
    return metric, known[metric], None


def sqnr(reference: Outputs, test: Outputs) -> float:
    """Signal-to-quantization-noise ratio in dB, of the mean noise relative to the signal over all outputs.

    ``-10 log10(mean_i(sum (q_i - f_i)**2 / sum f_i**2))`` over the outputs i: none counts more for having
    larger values. Outputs that are not floats, or whose shapes differ, have no say.
    """
    shares = []
    for index in range(len(reference[0])):
        signal = noise = 0.0
        for ours, theirs in zip(reference, test, strict=True):
            f, q = ours[index], theirs[index]
            if f.dtype.kind == "f" and f.shape == q.shape:
                signal += float(np.sum(np.square(f, dtype=np.float64)))
                noise += float(np.sum(np.square(q.astype(np.float64) - f)))
        if signal > 0:
            shares.append(noise / signal)
    mean = float(np.mean(shares)) if shares else 0.0
    return float("inf") if mean == 0 else float(-10 * np.log10(mean))


def agreement(reference: Outputs, test: Outputs) -> float:
    """The share of samples, in percent, whose largest value of the first output has the same index."""
    same = total = 0
    for ours, theirs in zip(reference, test, strict=True):
        f, q = (value[0].reshape(len(value[0]), -1) for value in (ours, theirs))
        same += int(np.sum(f.argmax(1) == q.argmax(1)))
        total += len(f)
    return 100.0 * same / total


@dataclass(frozen=True)
class Level:
    """The outputs of one level of a detector, by their indices among the graph's outputs.

    Attributes:
        classes: logits, N x C x ..., or N x ... x C with ``axis`` -1.
        boxes: regression, with its 4 values on the same axis.
        objectness: logits with 1 value, or None where the detector has none (then the classes tell).
        axis: where the channels are.
    """

    classes: int
    boxes: int
    objectness: int | None = None
    axis: int = 1


@dataclass(frozen=True)
class DetectionLoss:
    """The losses of a detector against its own float graph, where that one finds something.

    A place is matched when the float graph's score there, ``sigmoid(objectness) * max sigmoid(class)``, is at
    least ``threshold``; on a level without any, the best one counts. Over the matched places::

        class       mean binary cross entropy of sigmoid(q) to sigmoid(f), less that of f to itself
        box         mean |q - f| over the 4 values, relative to the mean |f|
        objectness  as for class, over all places of the level

    Attributes:
        levels: one for each level of the pyramid.
        threshold: of the float score.
    """

    levels: tuple[Level, ...]
    threshold: float = 0.3

    def __call__(self, reference: Outputs, test: Outputs) -> float:
        """Minus the sum of all losses, so that more is better."""
        return 0.0 - sum(sum(part.values()) for part in self.parts(reference, test))

    def parts(self, reference: Outputs, test: Outputs) -> tuple[dict[str, float], ...]:
        """The losses of each level by name: class, box, and objectness where there is one.

        Raises:
            ConfigError: when a level names an output that the graph does not have.
        """
        return tuple(self._level(level, reference, test) for level in self.levels)

    def _level(self, level: Level, reference: Outputs, test: Outputs) -> dict[str, float]:
        f, q = ({n: _rows(side, i, level.axis) for n, i in _named(level)} for side in (reference, test))
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


def _named(level: Level) -> list[tuple[str, int]]:
    named = [("class", level.classes), ("box", level.boxes)]
    return named if level.objectness is None else [*named, ("objectness", level.objectness)]


def _rows(outputs: Outputs, index: int, axis: int) -> np.ndarray:
    """One output over all batches as places x channels, float64."""
    if not 0 <= index < len(outputs[0]):
        raise ConfigError(f"a level names output {index}, but the graph gives {len(outputs[0])} tensors.")
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
