"""The option ``nms``: a file of a detector that chooses its boxes itself, by non-maximum suppression.

Each box takes its best class, and the boxes of one class suppress each other, greedily by score, as YOLOX's
and torchvision's batched suppression do. Boxes are moved apart by class, by more than the image is wide, so
that one suppression serves all classes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from typing import Any

from qtrace.errors import ExportError

NMS = "qtrace_nms"
"""The prefix of the nodes that choose boxes."""

_FORMS = ("xyxy", "cxcywh")
_COORDINATES, _OBJECTNESS = 4, 1  # columns of a box, before those of the classes


@dataclass(frozen=True)
class Suppression:
    """How boxes are chosen.

    Attributes:
        boxes: the output with the boxes, (N, A, 4). Without ``scores`` it has all columns of a YOLOX head,
            (N, A, 4 + 1 + C): box, objectness, score of each class.
        scores: the output with the scores of the classes, (N, A, C); None if ``boxes`` has them.
        objectness: the output with a factor of all scores of a box, (N, A, 1); None for none.
        form: ``xyxy`` for two corners, ``cxcywh`` for center and size.
        iou: boxes of a class that overlap a better one by more than this are suppressed.
        score: boxes whose best score is not above this are left out.
        limit: the most boxes of an image.
    """

    boxes: str
    scores: str | None = None
    objectness: str | None = None
    form: str = "xyxy"
    iou: float = 0.5
    score: float = 0.05
    limit: int = 100

    def __post_init__(self) -> None:
        for name in ("boxes", "scores", "objectness"):
            value = getattr(self, name)
            if not (isinstance(value, str) or (value is None and name != "boxes")):
                raise ExportError(f"nms: {name} is the name of an output, not {value!r}.")
        if self.scores is None and self.objectness is not None:
            raise ExportError("nms: objectness belongs to scores: name the output with the scores, too.")
        if self.form not in _FORMS:
            raise ExportError(f"nms: form={self.form!r} is no choice: choose {' or '.join(_FORMS)}.")
        for name in ("iou", "score"):
            if not _is_number(getattr(self, name)):
                raise ExportError(f"nms: {name} is a number, not {getattr(self, name)!r}.")
        if not 0 <= self.iou <= 1:
            raise ExportError(f"nms: iou={self.iou!r} is no overlap: choose a number from 0 to 1.")
        if type(self.limit) is not int or self.limit < 1:
            raise ExportError(f"nms: limit={self.limit!r} is no number of boxes: choose 1 or more.")

    @classmethod
    def of(cls, option: Any) -> Suppression:
        """Reads the option: a mapping with the attributes as keys.

        Raises:
            ExportError: for another type, an unknown key, or a value out of range.
        """
        if isinstance(option, cls):
            return option
        keys = [field.name for field in fields(cls)]
        if not isinstance(option, Mapping):
            raise ExportError(f"nms={option!r} is no choice: give a mapping with {', '.join(keys)}.")
        if unknown := [key for key in option if key not in keys]:
            raise ExportError(f"nms takes no key {unknown[0]!r}; it knows: {', '.join(keys)}.")
        if missing := [f.name for f in fields(cls) if f.default is MISSING and f.name not in option]:
            raise ExportError(f"nms needs {missing[0]}: the name of the output with the boxes.")
        return cls(**option)


@dataclass(frozen=True)
class Heads:
    """Which columns of which outputs are boxes, objectness and scores.

    Attributes:
        boxes: the number of the output with the boxes, which are its first four columns.
        scores: the number of the output with the scores.
        objectness: the number of the output with the objectness; None for none.
        first: the first column of the scores.
        factor: the column of the objectness.
        classes: the number of classes.
        anchors: the number of boxes, A.
        columns: the number of columns of the output with the boxes.
    """

    boxes: int
    scores: int
    objectness: int | None
    first: int
    factor: int
    classes: int
    anchors: int
    columns: int

    @property
    def outputs(self) -> tuple[int, ...]:
        """The numbers of all outputs that are read, each once."""
        numbers = (self.boxes, self.scores, self.objectness)
        return tuple(sorted({number for number in numbers if number is not None}))


def find_heads(choice: Suppression, outputs: Sequence[tuple[str, Sequence[int]]]) -> Heads:
    """Finds the outputs that ``choice`` names.

    Args:
        choice: how boxes are chosen.
        outputs: name and shape of each output of the model.

    Raises:
        ExportError: for an unknown output, or one of another shape.
    """
    names = [name for name, _ in outputs]
    shapes = {name: tuple(int(n) for n in shape) for name, shape in outputs}
    for name in (choice.boxes, choice.scores, choice.objectness):
        if name is not None and name not in names:
            raise ExportError(f"nms names {name!r}, which is no output: name one of {', '.join(names)}.")
    boxes = shapes[choice.boxes]
    whole = choice.scores is None
    least = _COORDINATES + _OBJECTNESS + 1 if whole else _COORDINATES
    if len(boxes) != 3 or (boxes[2] < least if whole else boxes[2] != least):
        wanted = "(N, A, 5 + classes) where scores names no output" if whole else "(N, A, 4)"
        raise ExportError(f"nms: boxes are of shape {wanted}, and {choice.boxes} is {boxes}.")
    place = names.index(choice.boxes)
    if choice.scores is None:
        classes = boxes[2] - _COORDINATES - _OBJECTNESS
        first = _COORDINATES + _OBJECTNESS
        return Heads(place, place, place, first, _COORDINATES, classes, boxes[1], boxes[2])
    scores = shapes[choice.scores]
    if len(scores) != 3 or scores[:2] != boxes[:2]:
        raise ExportError(
            f"nms: scores are of shape (N, A, classes) with the N and A of the boxes, {boxes}, and "
            f"{choice.scores} is {scores}."
        )
    factor = None
    if choice.objectness is not None:
        factor = names.index(choice.objectness)
        if shapes[choice.objectness] != (*boxes[:2], 1):
            raise ExportError(
                f"nms: objectness is of shape {(*boxes[:2], 1)}, and {choice.objectness} is "
                f"{shapes[choice.objectness]}."
            )
    return Heads(place, names.index(choice.scores), factor, 0, 0, scores[2], boxes[1], boxes[2])


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
