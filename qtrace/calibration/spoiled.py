"""Sites whose range a number that stands for infinity spoils, such as a mask that is given at run time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from qtrace.errors import CalibrationError
from qtrace.observers.base import Observer

__all__ = ["FAR", "Values", "read_far", "refuse_spoiled"]

FAR = 1e4  # smaller numbers do not stand for infinity, unless the graph shows it
_GAP = 8.0  # between the numbers that stand for infinity and all others
_LEAST_STEPS = 4.0  # of the grid within the others: fewer than 3 bits


@dataclass(frozen=True)
class Values:
    """The values of a node that are far from all others, and these others.

    Attributes:
        node: the name of the node.
        far: the far value of the largest magnitude.
        near: the largest magnitude of the others.
    """

    node: str
    far: float
    near: float


def read_far(node: str, value: np.ndarray) -> Values | None:
    """Reads a value that reaches `FAR`; None if no gap parts its far numbers from the others.

    Zeros do not count: a mask of two numbers needs two integers.
    """
    sizes = np.abs(value)
    largest = float(sizes.max())
    near = float(sizes.max(where=sizes < largest / _GAP, initial=0.0))
    if largest < FAR or near == 0.0:
        return None
    return Values(node, float(value.flat[int(sizes.argmax())]), near)


def refuse_spoiled(
    values: Mapping[str, Values],
    observers: Mapping[str, Observer],
    places: Mapping[str, str],
    readers: Callable[[str], Iterable[str]],
) -> None:
    """Refuses statistics by which far values leave the others of their site next to no integers.

    Args:
        values: group of sites -> its far values.
        observers: group -> its observer, which chooses the range.
        places: node -> its op and source line.
        readers: returns the results of the ops that write the value of a node or read it as their site.

    Raises:
        CalibrationError: naming the site, its range, the magnitude of the other values, and the cure.
    """
    for group, far in values.items():
        observer = observers[group]
        if observer.scheme.per_channel:
            continue
        step = float(observer.qparams().scale.max())
        if far.near >= _LEAST_STEPS * step:
            continue
        lo, hi = (float(end) for end in observer.range())
        place = f", {places[far.node]}" if far.node in places else ""
        names = ", ".join(readers(far.node))
        raise CalibrationError(
            f"site {far.node}{place}: its range is {lo:.4g} to {hi:.4g} with a step of {step:.3g}, but "
            f"without numbers such as {far.far:.4g} no value exceeds {far.near:.3g}: call prepare with "
            "samples, or give a mask as a constant, so that the number is read as infinity; or "
            f"keep the site in float by a rule {{match: {{name: [{names}]}}, quantize: false}}."
        )
