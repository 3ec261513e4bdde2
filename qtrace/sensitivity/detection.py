"""The losses of a detector against its own float graph, by level: class, box, objectness."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from qtrace.errors import ConfigError
from qtrace.graph.types import TensorNode, TracedModule
from qtrace.preparation.model import QuantizedModel
from qtrace.sensitivity.metrics import Outputs
from qtrace.verification.runs import output_names

__all__ = ["DetectionLoss", "Level", "Parts"]

Parts = tuple[dict[str, float], ...]
"""For each level its losses by name: class, box, and objectness where there is one."""

Shape = tuple[int, ...]

_MOST_TOLD = 24  # outputs that a message lists


@dataclass(frozen=True)
class Level:
    """The outputs of one level of a detector, by their numbers among the graph's outputs or by their names.

    Names are the nodes' own, which an exported file has too.

    Attributes:
        classes: logits, N x C x ..., or N x ... x C with ``axis`` -1.
        boxes: regression, with its 4 values on the same axis; or several fours, of anchors or distributions.
        objectness: logits with 1 value, or None where the detector lacks it (then the classes tell).
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

        class       mean binary cross entropy of sigmoid(q) to sigmoid(f), less f's to itself
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
    if not names:
        return ""
    more = ", ..." if len(names) > _MOST_TOLD else ""
    return ": " + ", ".join(f"{index} {name}" for index, name in enumerate(names[:_MOST_TOLD])) + more


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
