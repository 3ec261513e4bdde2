"""The difference of two quantized modules, site by site."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from megengine.module import Module

from qtrace.extras.diff.report import (
    Difference,
    FigurePair,
    IntegerChange,
    OpChange,
    ScaleChange,
    SchemeChange,
    compare_configs,
)
from qtrace.graph.dataflow import evaluate_fixed
from qtrace.preparation.figures import read_figures
from qtrace.preparation.model import QuantizedModel, QuantizedSite
from qtrace.scheme import QParams

__all__ = ["compare_models"]

_FIGURES = {
    "parameter bytes": "bytes",
    "parameter bytes in float": "float_bytes",
    "MACs": "macs",
    "MACs on integers": "integer_macs",
}
_TIMES = {"predicted ms": "milliseconds", "predicted ms in float": "float_milliseconds"}

Pair = tuple[QuantizedSite, QuantizedSite]


def compare_models(first: Module | QuantizedModel, second: Module | QuantizedModel) -> Difference:
    """Compares two calibrated prepared modules, or converted ones; sites and ops are paired by name.

    Args:
        first: the first module.
        second: the second module.

    Raises:
        GraphError: when a module is not quantized.
        CalibrationError: when a site was never calibrated.
    """
    a, b = QuantizedModel.of(first), QuantizedModel.of(second)
    mine, others = ({site.name: site for site in view.sites} for view in (a, b))
    pairs = [(site, others[name]) for name, site in mine.items() if name in others]
    return Difference(
        config=compare_configs(a.config, b.config),
        ops=tuple(_ops(a, b)),
        gone=tuple(name for name in mine if name not in others),
        come=tuple(name for name in others if name not in mine),
        schemes=tuple(_schemes(pairs)),
        scales=tuple(sorted(_scales(pairs), key=lambda change: -change.lsb)),
        integers=tuple(_integers(a, b, pairs)),
        figures=tuple(_figures(a, b)),
    )


def _ops(a: QuantizedModel, b: QuantizedModel) -> Iterator[OpChange]:
    """Yields the ops that run in another way."""
    others = {note.name: note for note in b.annotation.notes}
    for note in a.annotation.notes:
        other = others.get(note.name)
        if other is not None and other.state != note.state:
            reason = other.reason if other.state == "float" else note.reason
            yield OpChange(note.name, note.kind or note.op, note.state, other.state, reason)


def _schemes(pairs: list[Pair]) -> Iterator[SchemeChange]:
    for a, b in pairs:
        if a.plan is not None and b.plan is not None and a.plan.scheme != b.plan.scheme:
            yield SchemeChange(a.name, a.sort, a.plan.scheme.describe(), b.plan.scheme.describe())


def _scales(pairs: list[Pair]) -> Iterator[ScaleChange]:
    """Yields the groups of sites with one scheme whose scale or zero point differs."""
    seen = set()
    for a, b in pairs:
        if (
            a.plan is None or b.plan is None or (a.group, b.group) in seen
        ):  # the scale of a bias follows others
            continue
        seen.add((a.group, b.group))
        change = _scale(a, a.qparams, b.qparams)
        if change is not None:
            yield change


def _scale(site: QuantizedSite, a: QParams, b: QParams) -> ScaleChange | None:
    if a.scheme != b.scheme or a.scale.shape != b.scale.shape or a == b:
        return None
    size = np.atleast_1d(a.scale).astype(np.float64)
    borders = (_borders(a) - _borders(b)) / size
    moved = np.abs(borders).max(axis=0)
    worst = int(moved.argmax())
    differing = (a.scale != b.scale) | (a.zero_point != b.zero_point)
    return ScaleChange(
        site=site.name,
        sort=site.sort,
        lsb=float(moved[worst]),
        first=float(size[worst]),
        second=float(np.atleast_1d(b.scale)[worst]),
        zero_point=int(np.atleast_1d(b.zero_point - a.zero_point)[worst]),
        channels=int(np.count_nonzero(differing)),
        of=size.size,
    )


def _borders(qparams: QParams) -> np.ndarray:
    """Returns the ends of the range of each channel, float64 of shape (2, channels)."""
    ends = np.array([[qparams.scheme.qmin], [qparams.scheme.qmax]], np.float64)
    return (ends - np.atleast_1d(qparams.zero_point)) * np.atleast_1d(qparams.scale).astype(np.float64)


def _integers(a: QuantizedModel, b: QuantizedModel, pairs: list[Pair]) -> Iterator[IntegerChange]:
    """Yields the weights and biases whose integers differ."""
    stored = [pair for pair in pairs if all(site.static or site.sort != "activation" for site in pair)]
    values = [evaluate_fixed(v.module, (pair[i].node for pair in stored)) for i, v in enumerate((a, b))]
    for pair in stored:
        x, y = (_grid(site, values[i]) for i, site in enumerate(pair))
        if x.shape != y.shape:
            yield IntegerChange(pair[0].name, pair[0].sort, x.size, x.size, None)
        elif not np.array_equal(x, y):
            apart = np.abs(x.astype(np.int64) - y)
            count = int(np.count_nonzero(apart))
            yield IntegerChange(pair[0].name, pair[0].sort, count, apart.size, int(apart.max()))


def _grid(site: QuantizedSite, values: dict[Any, Any]) -> np.ndarray:
    return site.integers(values[site.node].numpy())


def _figures(a: QuantizedModel, b: QuantizedModel) -> Iterator[FigurePair]:
    first, second = read_figures(a.module), read_figures(b.module)
    for name, attribute in _FIGURES.items():
        yield FigurePair(name, getattr(first, attribute), getattr(second, attribute))
    if first.placement is None and second.placement is None:
        return
    for name, attribute in _TIMES.items():
        times = [None if p is None else getattr(p, attribute) for p in (first.placement, second.placement)]
        yield FigurePair(name, times[0], times[1])
