"""The result of a pass, and the algorithms of a config that change the float graph."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from qtrace.config import QConfig
from qtrace.config.checking import Algorithm, algorithms
from qtrace.graph.tracing.copies import find_copies, insert_copies
from qtrace.graph.types import TracedModule

# The result of a pass: its changes, and the candidates that it left unchanged.


@dataclass(frozen=True)
class Left:
    """A candidate that a pass or an algorithm did not change.

    Attributes:
        site: name of the candidate, most often of an op's output; "" for the whole graph.
        reason: why it was not changed, as a clause.
    """

    site: str
    reason: str

    def __str__(self) -> str:
        """Returns the site and the reason in one line."""
        return f"{self.site}: {self.reason}" if self.site else self.reason


@dataclass(frozen=True)
class PassResult:
    """The changes of a pass to the module that it edited in place.

    Attributes:
        changed: one line for each change.
        left: candidates that the pass did not change, with the reason.
        norms: output node of a layer -> mean and standard deviation of its channels, each (C,) float64, from
            the BatchNorm that was folded into the layer.
    """

    changed: tuple[str, ...]
    left: tuple[Left, ...] = ()
    norms: Mapping[str, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)


# The algorithms of a config that change the float graph, before sites are chosen.


@dataclass(frozen=True)
class SiteNoise:
    """The error of one site before and after an algorithm.

    Attributes:
        site: a weight's site, or the output of a layer or of the model.
        before: SQNR in dB before the algorithm; None without noise.
        after: SQNR in dB after the algorithm; None without noise.
    """

    site: str
    before: float | None
    after: float | None


@dataclass(frozen=True)
class Report:
    """The changes that an algorithm made, and the SQNR before and after them.

    Attributes:
        changed: one line for each change.
        left: candidates that the algorithm did not change, with the reason.
        errors: SQNR of the sites that the algorithm worked on, in graph order.
        outputs: SQNR of the model's outputs; empty if they were not measured.
        measured: the data on which ``outputs`` were measured.
        algorithm: name of the algorithm; `named_report` sets it.
        options: options of the algorithm as plain data; `named_report` sets them.
    """

    changed: tuple[str, ...] = ()
    left: tuple[Left | str, ...] = ()
    errors: tuple[SiteNoise, ...] = ()
    outputs: tuple[SiteNoise, ...] = ()
    measured: str = ""
    algorithm: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Returns the report as plain data."""
        return {
            "algorithm": self.algorithm,
            "options": dict(self.options),
            "changed": list(self.changed),
            "left": [vars(i if isinstance(i, Left) else Left("", i)) for i in self.left],
            "errors": [vars(error) for error in self.errors],
            "outputs": [vars(error) for error in self.outputs],
            "measured": self.measured,
        }


@dataclass(frozen=True)
class FloatTask:
    """The input of an algorithm of the float stage.

    Attributes:
        model: the flat, expanded float graph; it is changed in place.
        config: the config.
        norms: output node of a layer -> mean and standard deviation of its channels, each (C,) float64, from
            the BatchNorm that ``fuse_bn`` folded into the layer.
        samples: arguments of calls with a few images, for algorithms that declare ``reads_samples``.
    """

    model: TracedModule
    config: QConfig
    norms: dict[str, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)
    samples: Sequence[Any] = ()


def reads_samples(config: QConfig) -> bool:
    """Returns whether an algorithm of the float stage reads samples."""
    return any(algorithm.reads_samples for _, algorithm in algorithms(config))


def change_float(
    model: TracedModule, config: QConfig, samples: Sequence[Any] = ()
) -> tuple[dict[str, Any], ...]:
    """Runs the algorithms of the float stage on a flat, expanded graph; returns their reports.

    Algorithms of the calibrated stage prepare the graph for what they will do after calibration. Views that
    MegEngine's kernels misread once an op between is gone are copied, as in a trace.

    Args:
        model: the graph; it is changed in place.
        config: the config.
        samples: arguments of calls with a few images.
    """
    task = FloatTask(model, config, samples=samples)
    reports = []
    for name, algorithm in algorithms(config):
        if algorithm.stage == "calibrated":
            algorithm.ready(task)
        else:
            report = algorithm.apply(task)
            if report.changed:
                copy_views(model)  # at once: the next algorithm may run the graph
            reports.append(named_report(report, name, algorithm))
    return tuple(reports)


def copy_views(model: TracedModule) -> None:
    """Inserts the copies that MegEngine's kernels need where a pass removed what stood after a view."""
    insert_copies(model, find_copies(model))


def named_report(report: Report, name: str, algorithm: Algorithm) -> dict[str, Any]:
    """Returns `report` as plain data, with the name and the options of `algorithm`."""
    return dataclasses.replace(report, algorithm=name, options=algorithm.to_dict()).to_dict()
