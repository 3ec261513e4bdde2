"""The ranges that a target fixes or bounds, for the qparams of a calibrated model."""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from qtrace.config import backends
from qtrace.fakequant.base import FakeQuant
from qtrace.numerics import choose
from qtrace.preparation.model import QuantizedModel
from qtrace.scheme import QParams, QScheme

__all__ = ["limit_ranges"]


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
