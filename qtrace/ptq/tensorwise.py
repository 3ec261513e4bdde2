"""Equalization for weights with one scale a tensor, of the layers that lose precision by it.

Under one scale a channel with range r loses ``log2(max(r) / r)`` bits compared with a scale of its own.
Layers that lose more than ``bits`` are equalized with the layers before and after them (Nagel et al. 2019,
section 4.1). This is done only if the sum of the rounding errors of all these layers falls, since scaling a
tensor for one layer may cost another. The report names layers that still lose bits, for a recipe to give them
more.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

import numpy as np
from pydantic import Field

from qtrace import ops
from qtrace.graph.types import GetAttr
from qtrace.graph.walk import exprs
from qtrace.ops import OpCall
from qtrace.plugins.options import Float, Int
from qtrace.preparation.annotation import Site
from qtrace.ptq.base import FloatAlgorithm, FloatTask, Left, Report, SiteNoise
from qtrace.ptq.equalize import weight_sites
from qtrace.ptq.layers.outputs import RandomOutputs, output_errors
from qtrace.ptq.layers.scaling import ChannelGroup, Parameters, channel_groups, factors, precision, site_sqnr

__all__ = ["Tensorwise"]


class Tensorwise(FloatAlgorithm):
    """Equalizes layers that lose bits to a scale that all channels share, if that lowers the error.

    Attributes:
        bits: the bits that the channels of a layer may lose on average.
        iterations: the most passes over all groups.
    """

    after: ClassVar[tuple[str, ...]] = ("fuse_bn", "reparameterize")
    instead_of: ClassVar[tuple[str, ...]] = ("equalize",)
    reason: ClassVar[str] = "tensorwise equalizes layers whose BatchNorm is folded, those that need it"

    bits: Annotated[Float, Field(ge=0)] = 1.0
    iterations: Annotated[Int, Field(gt=0)] = 10

    def apply(self, task: FloatTask) -> Report:
        sites = weight_sites(task)
        calls = _per_tensor(task, sites)
        if not calls:
            return Report(left=(Left("", "no layer has a weight with one scale for all channels"),))
        parameters = Parameters(task.model)
        lost = {name: _lost_bits(parameters, call) for name, call in calls.items()}
        noise = {name: site_sqnr(parameters, c, sites[_weight(c)]) for name, c in calls.items()}
        outputs = RandomOutputs(task.model, sites)
        ratios = outputs.ratios()
        groups = channel_groups(task.model, every=True)
        candidates = [g for g in groups if g.writers and g.readers and not g.reason]
        selected = [g for g in candidates if self._loses_bits(g, lost)]
        for _ in range(self.iterations):
            steps = [_improve(parameters, group, sites) for group in selected]
            if not any(steps):
                break
        parameters.store()
        changed, left = [], []
        for name, call in calls.items():
            now = _lost_bits(parameters, call)
            if lost[name] - now > 0.01:
                changed.append(f"{name}: loses {now:.2f} bits in the mean, {lost[name]:.2f} before")
            if now > self.bits:
                left.append(Left(name, f"{_reason(call, groups)}; {now:.2f} bits stay lost"))
        errors = tuple(
            SiteNoise(_weight(c), noise[name], site_sqnr(parameters, c, sites[_weight(c)]))
            for name, c in calls.items()
        )
        output_changes = output_errors(ratios, outputs.ratios()) if changed else ()
        return Report(tuple(changed), tuple(left), errors, output_changes, outputs.measured)

    def _loses_bits(self, group: ChannelGroup, lost: dict[str, float]) -> bool:
        return any(lost.get(c.out.name, 0.0) > self.bits for c in (*group.writers, *group.readers))


def _weight(call: OpCall) -> str:
    assert call.weight is not None
    return call.weight.name


def _per_tensor(task: FloatTask, sites: dict[str, Site]) -> dict[str, OpCall]:
    """Maps the output of each layer whose weight is a parameter with one scale to its call."""
    calls = {}
    for expr in exprs(task.model):
        call = ops.read(expr)
        if call is None or call.weight is None or not isinstance(call.weight.expr, GetAttr):
            continue
        site = sites.get(call.weight.name)
        if site is not None and not site.channel_axes and call.channel_axes:
            calls[call.out.name] = call
    return calls


def _lost_bits(parameters: Parameters, call: OpCall) -> float:
    """Returns the bits that the output channels of a layer lose on average."""
    return float(np.mean(precision(parameters.ranges(call, True))))


def _improve(parameters: Parameters, group: ChannelGroup, sites: dict[str, Site]) -> bool:
    """Equalizes a group if the errors of its layers fall by a hundredth at least; returns whether it did."""
    calls = {c.out.name: c for c in (*group.writers, *group.readers) if _weight(c) in sites}
    factor = factors(parameters, group)
    before = sum(_share(parameters, c, sites) for c in calls.values())
    parameters.scale(group, factor)
    if sum(_share(parameters, c, sites) for c in calls.values()) < 0.99 * before:
        return True
    parameters.scale(group, 1.0 / factor)
    return False


def _share(parameters: Parameters, call: OpCall, sites: dict[str, Site]) -> float:
    """Returns the noise of a weight as a share of its power."""
    sqnr = site_sqnr(parameters, call, sites[_weight(call)])
    return 0.0 if sqnr is None else float(10.0 ** (-sqnr / 10.0))


def _reason(call: OpCall, groups: list[ChannelGroup]) -> str:
    """Returns why a layer still loses bits."""
    written = [g for g in groups if any(c.out.name == call.out.name for c in g.writers)]
    if not written or not (written[0].reason or written[0].readers):
        return "no layer reads its output through ops that scale"
    return written[0].reason or "equalizing more would cost the other layers more"
