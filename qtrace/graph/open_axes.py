"""The open axes of a traced module: axes of its inputs that may have any size when the graph runs.

They are recorded by name, so that an export declares them again. Axes of one name have one size. The record
is a plain attribute of the traced module, as JSON text, which ``flatten``, ``prepare``, ``convert``, ``save``
and ``load`` keep.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial

import numpy as np

from qtrace.graph.failures import parsing
from qtrace.graph.types import Node, TensorNode, TracedModule

__all__ = [
    "BATCH",
    "FixedAxis",
    "OpenAxes",
    "OpenAxis",
    "growth",
    "other_sizes",
    "power_of_two",
    "read_open_axes",
    "repeat_to",
    "resize_axes",
    "write_open_axes",
]

_ATTRIBUTE = "open_axes"
BATCH = "N"  # the name of the batch where a file or a user gives none
_LARGEST_POWER = 64
_VISIBLE = 32  # by so much a map of one thirty-second of an input's size changes by one
# An axis of more places is a signal, whose windows may be some hundred places apart: it grows by a share.
_LONGEST_OF_MAPS, _VISIBLE_SHARE = 1024, 8


@dataclass(frozen=True)
class OpenAxis:
    """An axis of an input that may have any size.

    Attributes:
        input: the name of the input's node.
        axis: the axis.
        size: what the axis shares its size with: axes with equal texts have one size, or keep their ratio.
        name: the name in files; "" if the axis is unnamed.
    """

    input: str
    axis: int
    size: str
    name: str

    @property
    def label(self) -> str:
        """The name in files and in texts: a made one if the axis is unnamed."""
        return self.name or (BATCH if self.axis == 0 else f"{self.input}_{self.axis}")


@dataclass(frozen=True)
class FixedAxis:
    """An axis that a file leaves open, and that an op of the graph fixes.

    Attributes:
        input: the name of the input's node.
        axis: the axis.
        name: the name in the file; "" if the axis is unnamed.
        reason: which op needs the number, and why, as the end of a sentence.
    """

    input: str
    axis: int
    name: str
    reason: str

    def __str__(self) -> str:
        name = f" ({self.name})" if self.name else ""
        return f"axis {self.axis}{name} of input {self.input} is fixed: {self.reason}"


@dataclass(frozen=True)
class OpenAxes:
    """The open axes of a graph.

    Attributes:
        axes: the open axes of the inputs, the batch among them.
        fixed: the axes that the file or the user leaves open, and that an op fixes.
    """

    axes: tuple[OpenAxis, ...]
    fixed: tuple[FixedAxis, ...] = ()

    def of(self, node: Node) -> dict[int, OpenAxis]:
        """Returns the open axes of an input of the graph by their position."""
        return {axis.axis: axis for axis in self.axes if axis.input == node.name}

    def only_batch(self) -> bool:
        """Returns whether no axis but the first one of inputs is open."""
        return all(axis.axis == 0 for axis in self.axes)


def write_open_axes(traced: TracedModule, record: OpenAxes) -> None:
    """Attaches ``record`` to ``traced``."""
    setattr(traced, _ATTRIBUTE, json.dumps(asdict(record), sort_keys=True))


def read_open_axes(traced: TracedModule) -> OpenAxes | None:
    """Returns the open axes that ``traced`` records; None if nothing is recorded.

    Axes of inputs that the graph no longer has are left out.

    Raises:
        GraphError: when the record is damaged.
    """
    text = getattr(traced, _ATTRIBUTE, None)
    if text is None:
        return None
    with parsing("the open axes that the model carries are", "import or trace it again"):
        document = json.loads(text)
        axes = tuple(OpenAxis(**item) for item in document["axes"])
        fixed = tuple(FixedAxis(**item) for item in document["fixed"])
        texts = [t for a in axes for t in (a.input, a.size, a.name)]
        if not all(isinstance(t, str) for t in texts) or not all(isinstance(a.axis, int) for a in axes):
            raise ValueError("its names are no text")
    ranks = {n.name: len(n.shape or ()) for n in traced.graph.inputs if isinstance(n, TensorNode)}
    known = tuple(a for a in axes if 0 <= a.axis < ranks.get(a.input, 0))
    return OpenAxes(known, tuple(a for a in fixed if a.input in ranks))


def repeat_to(array: np.ndarray, shape: Sequence[int]) -> np.ndarray:
    """Returns an array of ``shape`` that repeats the values of ``array``, or cuts them off."""
    for axis, size in enumerate(shape):
        array = np.take(array, np.arange(size), axis=axis, mode="wrap")
    return array


def power_of_two(size: int) -> int:
    """Returns the largest power of two that divides a size, up to 64: a network halves it so often."""
    return min(size & -size, _LARGEST_POWER)


def growth(size: int) -> int:
    """Returns by how much a size grows to another one at which a network still runs, and computes otherwise.

    It is a multiple of the largest power of two that divides the size, up to 64, so that a network which
    halves the size as often still runs. It is at least 32, half of a small size, or an eighth of a long
    signal: a smaller growth would not change the size of a coarse map or the number of a signal's windows,
    which would pass for one that does not depend on the input.
    """
    power = power_of_two(size)
    visible = size // _VISIBLE_SHARE if size > _LONGEST_OF_MAPS else min(_VISIBLE, size // 2)
    return power * max(1, -(-visible // power))


def resize_axes(
    shapes: Mapping[str, Sequence[int]], axes: Sequence[OpenAxis], resize: Callable[[int, int | None], int]
) -> dict[str, tuple[int, ...]]:
    """Returns shapes at other sizes of some open axes.

    Axes that share their size keep their ratio: each is a whole multiple of a common unit.

    Args:
        shapes: input -> its shape.
        axes: the open axes.
        resize: returns another unit for a unit and its number; the number of a batch is None.
    """
    units: dict[str, int] = {}
    for axis in axes:
        units[axis.size] = math.gcd(units.get(axis.size, 0), int(shapes[axis.input][axis.axis]))
    batches = {axis.size for axis in axes if axis.axis == 0}
    order = [size for size in units if size not in batches]
    others = {name: list(shape) for name, shape in shapes.items()}
    for axis in axes:
        unit, size = units[axis.size], others[axis.input][axis.axis]
        number = None if axis.size in batches else order.index(axis.size)
        others[axis.input][axis.axis] = size // unit * resize(unit, number)
    return {name: tuple(shape) for name, shape in others.items()}


def other_sizes(
    shapes: Mapping[str, Sequence[int]], axes: Sequence[OpenAxis], count: int = 2, distinct: bool = True
) -> list[dict[str, tuple[int, ...]]]:
    """Returns shapes of inputs at other sizes of their open axes.

    A size grows by multiples of its `growth`. The batch, the first axis, grows by one.

    Args:
        shapes: input -> its shape.
        axes: the open axes.
        count: how many shapes to return for each input.
        distinct: whether each open size grows by another multiple.
    """

    def grow(times: int, unit: int, number: int | None) -> int:
        return unit + (times if number is None else growth(unit) * (times + number * distinct))

    return [resize_axes(shapes, axes, partial(grow, times)) for times in range(1, count + 1)]
