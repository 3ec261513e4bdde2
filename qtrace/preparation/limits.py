"""The ranges that a target fixes, bounds or runs faster, for the qparams of a calibrated model."""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from qtrace.config import backends
from qtrace.fakequant.base import FakeQuant
from qtrace.graph.walk import users
from qtrace.numerics import choose
from qtrace.preparation.model import QuantizedModel
from qtrace.scheme import QParams, QScheme

__all__ = ["centre_ranges", "limit_ranges"]


def centre_ranges(model: QuantizedModel) -> tuple[str, ...]:
    """Makes ranges symmetric where the placement says so, and layers are slower with a zero point.

    The zero point of such an unsigned range is its middle, so that `convert` can store it as signed integers
    with zero point 0. Ranges from 0 on have none.

    Args:
        model: a prepared model; its fake quants are changed in place. Those without qparams are skipped, and
            those whose scales the model brings.

    Returns:
        The groups that were changed.
    """
    placement = model.annotation.placement
    if placement is None or not placement.centred:
        return ()
    changed = []
    for group in sorted(_read_by_layers(model) - set(model.record.native)):
        fake_quant = model.fake_quants[group]
        scheme = fake_quant.scheme
        if scheme.signed or scheme.symmetric or scheme.per_channel or not fake_quant.calibrated:
            continue
        qparams = fake_quant.qparams()
        scale, zero_point = float(qparams.scale), int(qparams.zero_point)
        ends = (-zero_point * scale, (scheme.qmax - zero_point) * scale)
        wanted = choose(*ends, scheme.replace(symmetric=True))
        if zero_point and qparams.zero_point != wanted.zero_point:
            fake_quant.set_qparams(QParams(scheme, wanted.scale, wanted.zero_point))
            changed.append(group)
    return tuple(changed)


def _read_by_layers(model: QuantizedModel) -> set[str]:
    """Returns the groups that layers read which are slower with a zero point."""
    layers = backends.get(model.annotation.backend).slower_with_zero_point
    kinds = {note.name: note.kind for note in model.annotation.notes}
    readers = [(site.group, site.consumers) for site in model.sites if site.sort == "activation"]
    carried = model.annotation.carried.items()
    readers += [(group, tuple(users(model.nodes[name]))) for name, group in carried]
    return {
        group
        for group, exprs in readers
        if any(kinds.get(out.name) in layers for expr in exprs for out in expr.outputs)
    }


def limit_ranges(model: QuantizedModel) -> tuple[str, ...]:
    """Gives activations the ranges that the backend fixes, or at least its smallest range.

    Args:
        model: a prepared model; its fake quants are changed in place. Those without qparams are skipped.

    Returns:
        The groups that were changed.
    """
    backend = backends.get(model.annotation.backend)
    if not backend.fixed_results and not backend.smallest_range:
        return ()
    kinds = {note.name: note.kind for note in model.annotation.notes}
    nodes: dict[str, list[str]] = defaultdict(list)
    for site in model.annotation.sites:
        if site.sort == "activation":
            nodes[site.group].append(site.node)
    changed = []
    for group, names in nodes.items():
        fake_quant = model.fake_quants[group]
        if not fake_quant.calibrated:
            continue
        fixed = {
            backend.fixed_results.get(kinds.get(name, ""), {}).get(fake_quant.scheme.bits) for name in names
        }
        ends = fixed.pop() if len(fixed) == 1 else None
        if ends is not None:
            wanted = choose(*ends, fake_quant.scheme)
        else:
            wanted = _widened(fake_quant, backend.smallest_range)
        if wanted != fake_quant.qparams():
            fake_quant.set_qparams(wanted)
            changed.append(group)
    return tuple(changed)


def _widened(fake_quant: FakeQuant, smallest: float) -> QParams:
    """Returns the qparams with the scale at which the range is at least ``smallest``."""
    qparams, scheme = fake_quant.qparams(), fake_quant.scheme
    scale = np.maximum(qparams.scale, _smallest_scale(scheme, smallest))
    return QParams(scheme, scale.astype(np.float32), qparams.zero_point)


def _smallest_scale(scheme: QScheme, smallest: float) -> np.float32:
    scale = np.float32(smallest / (scheme.qmax - scheme.qmin))
    if scheme.power_of_two and scale > 0:
        return np.float32(2.0 ** np.ceil(np.log2(scale)))
    return scale
