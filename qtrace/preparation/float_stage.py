"""The algorithms of a config that change the float graph, before sites are chosen."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from qtrace.config import QConfig
from qtrace.config.algorithm import Algorithm, algorithms
from qtrace.graph.types import TracedModule
from qtrace.preparation.passes.base import Left

__all__ = ["FloatTask", "Report", "SiteError", "change_float", "named_report"]


@dataclass(frozen=True)
class SiteError:
    """The error of one site before and after an algorithm.

    Attributes:
        site: a weight's site, or the output of a layer or of the model.
        before: signal to quantization noise ratio in dB; None where there was no noise.
        after: the same afterwards.
    """

    site: str
    before: float | None
    after: float | None


@dataclass(frozen=True)
class Report:
    """What an algorithm did.

    Attributes:
        changed: one line for everything that it changed.
        left: everything that looked like work but was left alone, with the reason.
        errors: the sites that it worked on, in graph order.
        outputs: the outputs of the model; empty where they were not measured.
        measured: what ``outputs`` were measured on.
        algorithm: its name; set by the one who runs it.
        options: its options as plain data; likewise.
    """

    changed: tuple[str, ...] = ()
    left: tuple[Left | str, ...] = ()
    errors: tuple[SiteError, ...] = ()
    outputs: tuple[SiteError, ...] = ()
    measured: str = ""
    algorithm: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """The report as plain data."""
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
    """What an algorithm of the float stage works on.

    Attributes:
        model: the flat, expanded float graph; it is changed in place.
        config: the config.
        norms: output node of a layer -> mean and standard deviation of its channels, each (C,) float64, as
            the BatchNorm said that was folded into it. Filled by ``fuse_bn``.
    """

    model: TracedModule
    config: QConfig
    norms: dict[str, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)


def change_float(model: TracedModule, config: QConfig) -> tuple[dict[str, Any], ...]:
    """Runs the algorithms of the float stage on a flat, expanded graph; returns their reports.

    Algorithms of the calibrated stage make room for what they will need.
    """
    task = FloatTask(model, config)
    reports = []
    for name, algorithm in algorithms(config):
        if algorithm.stage == "calibrated":
            algorithm.ready(task)
        else:
            reports.append(named_report(algorithm.apply(task), name, algorithm))
    return tuple(reports)


def named_report(report: Report, name: str, algorithm: Algorithm) -> dict[str, Any]:
    """Returns `report` as plain data, with the name and the options of `algorithm`."""
    return dataclasses.replace(report, algorithm=name, options=algorithm.to_dict()).to_dict()
