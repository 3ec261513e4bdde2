"""Metrics of a graph's outputs: compared with the float graph's, or by the user's own function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from qtrace.errors import ConfigError
from qtrace.metrics import ErrorSums
from qtrace.outputs import ColumnGroup, GroupedErrors, find_groups

__all__ = [
    "IntegerErrors",
    "Metric",
    "Outputs",
    "Own",
    "agreement",
    "choose",
    "column_errors",
    "integer_errors",
    "sqnr",
]

Outputs = Sequence[Sequence[np.ndarray]]
"""For each batch the tensors that the graph gives."""

Metric = Callable[[Outputs, Outputs], float]
"""From the float graph's outputs and the quantized graph's to a number; more is better."""


Own = Callable[[Any], float]
"""A user's metric: gets a graph that computes what the source module computes, and returns a number."""


@dataclass(frozen=True)
class IntegerErrors:
    """How well an output of integers, such as indices, agrees with the float graph's.

    Attributes:
        output: the place of the output among the graph's outputs.
        equal: the share of equal values.
        sqnr_db: their SQNR in dB; numbers may be close without being equal, indices are not.
    """

    output: int
    equal: float
    sqnr_db: float


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


def column_errors(
    reference: Outputs, test: Outputs, groups: Sequence[ColumnGroup] | None = None
) -> GroupedErrors:
    """Returns the errors of all column groups; the arguments are the same as for `sqnr`."""
    errors = GroupedErrors(find_groups(None, reference) if groups is None else groups)
    for exact, rounded in zip(reference, test, strict=True):
        errors.add(exact, rounded)
    return errors


def integer_errors(reference: Outputs, test: Outputs) -> tuple[IntegerErrors, ...]:
    """Returns the errors of each output of integers; batches in which its shapes differ are left out."""
    errors = []
    for index, value in enumerate(reference[0]):
        if value.dtype.kind not in "iub":
            continue
        equal, count, sums = 0, 0, ErrorSums()
        for exact, rounded in zip(reference, test, strict=True):
            if exact[index].shape == rounded[index].shape:
                equal += int(np.sum(exact[index] == rounded[index]))
                count += exact[index].size
                sums.add(exact[index], rounded[index])
        if count:
            errors.append(IntegerErrors(index, equal / count, sums.sqnr_db))
    return tuple(errors)


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
