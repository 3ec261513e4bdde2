"""Cross-layer equalization, with absorption of high biases.

Where ``f(s * x) = s * f(x)``, the channels of a tensor between two layers may be scaled: the layer before is
divided by s, the layer after multiplied. With ``s = sqrt(r1 / r2)`` of the ranges of their weights, every
channel uses the same share of a common range in both. Source: Nagel et al. 2019, "Data-Free Quantization
Through Weight Equalization and Bias Correction", section 4.1. Tensors that are added belong together and are scaled
together. A bias that lifts nearly all values of a channel above 0 is absorbed by the next layer (section
4.1.3). With ``c = max(0, mean - 3 * deviation)`` of the BatchNorm's statistics, ``relu(y)`` is
``relu(y - c) + c`` for all but one value in a thousand.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import megengine.functional as F
import numpy as np
from pydantic import Field

from qtrace import ops
from qtrace.graph.edit import GraphEditor
from qtrace.graph.walk import exprs
from qtrace.ops import OpCall
from qtrace.plugins.options import Bool, Float, Int
from qtrace.preparation.annotation import Site
from qtrace.preparation.passes.annotate import annotate
from qtrace.ptq.base import FloatAlgorithm, FloatTask, Left, Report, SiteNoise
from qtrace.ptq.layers.outputs import RandomOutputs, output_errors
from qtrace.ptq.layers.scaling import ChannelGroup, Parameters, channel_groups, factors, site_sqnr

__all__ = ["Equalize"]


class Equalize(FloatAlgorithm):
    """Equalizes the weight ranges of layers across the tensors between them.

    Attributes:
        relu6: "keep" changes no tensor after a ReLU6; "relu" replaces every ReLU6 by ReLU, which changes
            what the float model computes where it clips.
        absorb: absorb high biases after BatchNorms whose statistics are known.
        iterations: the most passes over all groups.
        tolerance: stop once no scale changes by more than this share.
    """

    after: ClassVar[tuple[str, ...]] = ("fuse_bn", "reparameterize")
    reason: ClassVar[str] = "equalize needs layers whose BatchNorm is folded"

    relu6: Literal["keep", "relu"] = "keep"
    absorb: Bool = True
    iterations: Annotated[Int, Field(gt=0)] = 20
    tolerance: Annotated[Float, Field(gt=0)] = 1e-3

    def apply(self, task: FloatTask) -> Report:
        sites = weight_sites(task)
        outputs = RandomOutputs(task.model, sites)
        ratios = outputs.ratios()
        changed = _relu_for_relu6(task) if self.relu6 == "relu" else []
        groups = channel_groups(task.model)
        scalable = [g for g in groups if not g.reason]
        left = [Left(f"{g.name} ({g.describe()})", g.reason) for g in groups if g.reason]
        if not groups:
            left.append(Left("", "no two layers follow each other"))
        parameters = Parameters(task.model)
        calls = {c.out.name: c for g in scalable for c in (*g.writers, *g.readers)}
        before = _errors(parameters, calls, sites)
        spread = {g.name: np.ones(g.channels) for g in scalable}
        for _ in range(self.iterations):
            steps = [equalize_group(parameters, g, spread) for g in scalable]
            if max(steps, default=0.0) <= self.tolerance:
                break
        changed += [f"{g.name} ({g.describe()}): {_describe_factor(spread[g.name])}" for g in scalable]
        if self.absorb:
            absorbed, not_absorbed = _absorb(parameters, scalable, task.norms, spread)
            changed, left = changed + absorbed, left + not_absorbed
        parameters.store()
        after = _errors(parameters, calls, sites)
        errors = tuple(SiteNoise(name, before[name], after[name]) for name in before)
        gained = output_errors(ratios, outputs.ratios()) if changed else ()
        return Report(tuple(changed), tuple(left), errors, gained, outputs.measured)


def weight_sites(task: FloatTask) -> dict[str, Site]:
    """Returns the site of each quantized weight by the name of its node."""
    sites = annotate(task.model, task.config).sites
    return {s.node: s for s in reversed(sites) if s.sort == "weight"}


def equalize_group(parameters: Parameters, group: ChannelGroup, spread: dict[str, np.ndarray]) -> float:
    """Equalizes one group and multiplies its factors into ``spread``; returns the largest relative step."""
    factor = factors(parameters, group)
    parameters.scale(group, factor)
    spread[group.name] = spread[group.name] * factor
    return float(np.abs(np.log(factor)).max())


def _errors(
    parameters: Parameters, calls: dict[str, OpCall], sites: dict[str, Site]
) -> dict[str, float | None]:
    """Returns the error of each quantized weight in dB by the name of its node."""
    weights = {c.weight.name: c for c in calls.values() if c.weight is not None and c.weight.name in sites}
    return {name: site_sqnr(parameters, call, sites[name]) for name, call in weights.items()}


def _describe_factor(factor: np.ndarray) -> str:
    return f"channels divided by {factor.min():.3g} to {factor.max():.3g}"


def _relu_for_relu6(task: FloatTask) -> list[str]:
    """Replaces every ReLU6, also where it is written as a clip; returns a line for each."""
    changed = []
    with GraphEditor(task.model) as editor:
        for expr in exprs(task.model):
            call = ops.read(expr)
            if call is None or not _is_relu6(call):
                continue
            name = call.out.name
            new = editor.call_function(F.relu, call.inputs[0], after=expr, like=call.out)
            editor.replace_expr(expr, new)
            changed.append(f"{name}: ReLU6 replaced by ReLU")
    return changed


def _is_relu6(call: OpCall) -> bool:
    return call.kind == "relu6" or (
        call.kind == "clip" and call.attrs["lower"] == 0.0 and call.attrs["upper"] == 6.0
    )


def _absorb(
    parameters: Parameters,
    groups: list[ChannelGroup],
    norms: dict[str, tuple[np.ndarray, np.ndarray]],
    spread: dict[str, np.ndarray],
) -> tuple[list[str], list[Left]]:
    """Absorbs high biases into the next layers; returns a line a group, and what was left."""
    changed, left = [], []
    for group in groups:
        statistics = [norms.get(c.out.name) for c in group.writers]
        if len(statistics) != 1 or statistics[0] is None:
            continue
        mean, deviation = (v / spread[group.name] for v in statistics[0])
        high = np.maximum(0.0, mean - 3.0 * deviation)
        if not high.any():
            continue
        reason = _why_not_absorbed(group)
        if reason is not None:
            left.append(Left(group.name, f"{np.count_nonzero(high)} high biases stay: {reason}"))
            continue
        parameters.add_to_bias(group.writers[0], -high)
        for call in group.readers:
            parameters.add_to_bias(call, _constant_output(parameters.weight(call), call, high))
        changed.append(
            f"{group.name}: {np.count_nonzero(high)} high biases handed on, {high.max():.3g} at most"
        )
    return changed, left


def _why_not_absorbed(group: ChannelGroup) -> str | None:
    others = [c.kind for c in group.through if c.kind not in ("relu", "leaky_relu", "prelu")]
    if others or len(group.through) != 1:
        return f"{', '.join(others) or 'more than one op'} stands between the layers"
    if group.writers[0].bias is None:
        return f"{group.writers[0].out.name} has no bias"
    for call in group.readers:
        if call.kind == "conv_transpose2d":
            return f"not every value of {call.out.name} is computed from as many of its inputs"
        if any(call.attrs.get("padding", ())):
            return f"{call.out.name} pads with 0, not with what is taken away"
        if call.bias is None:
            return f"{call.out.name} has no bias"
    return None


def _constant_output(weight: np.ndarray, call: OpCall, high: np.ndarray) -> np.ndarray:
    """Returns the outputs of a layer without bias for an input of ``high`` (C,) everywhere."""
    if call.kind == "linear":
        return np.asarray(np.einsum("oi,i->o", weight, high))  # not by BLAS, whose threads split sums
    plain = 3 if call.kind == "conv1d" else 4
    summed = weight.reshape(*weight.shape[: -(plain - 2)], -1).sum(axis=-1)
    grouped = summed if weight.ndim > plain else summed[None]
    outputs = np.einsum("goi,gi->go", grouped, high.reshape(grouped.shape[0], -1))
    return np.asarray(outputs.reshape(-1))
