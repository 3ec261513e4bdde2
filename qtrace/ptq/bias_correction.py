"""Bias correction: takes from each bias what rounding has added to the mean of its channel.

Rounding errors of weights and inputs do not cancel: ``E[y~] - E[y]`` is not 0, and each layer hands its shift
on to the next. Subtracting it from the bias removes it exactly (Nagel et al. 2019, "Data-Free Quantization
Through Weight Equalization and Bias Correction", section 4.2 and appendix D: the empirical form). Layers are
taken in the order of the graph, each on inputs that come from the quantized and corrected layers before it.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from megengine import Parameter
from tqdm import tqdm

from qtrace import ops
from qtrace.graph.edit import GraphEditor, set_parameter
from qtrace.graph.types import GetAttr
from qtrace.graph.walk import exprs, users
from qtrace.passes.fuse_bn import bias_shape, free_bias
from qtrace.ptq._layers import LAYERS, Layer, Twins, layers, move_bias, per_channel
from qtrace.ptq.base import CalibratedAlgorithm, CalibratedTask, FloatTask, Noise, Report, SiteError

__all__ = ["BiasCorrection"]


class BiasCorrection(CalibratedAlgorithm):
    """Corrects the bias of every quantized layer by the mean error of its channels on calibration data."""

    after: ClassVar[tuple[str, ...]] = ("output_cosine", "adaround", "reconstruct", "gptq", "bn_reestimate")
    reason: ClassVar[str] = "bias_correction takes away what the roundings leave, once these are chosen"

    def ready(self, task: FloatTask) -> None:
        """Gives layers without a bias one of zeros."""
        with GraphEditor(task.model) as editor:
            for expr in exprs(task.model):
                call = ops.read(expr)
                if call is None or call.kind not in LAYERS or call.bias is not None or call.weight is None:
                    continue
                source = call.weight.expr
                if not isinstance(source, GetAttr) or len(list(users(call.weight))) > 1:
                    continue
                follower = [ops.read(u) for u in users(call.out)]
                if any(f is not None and f.kind == "batch_norm" for f in follower):
                    continue
                path = free_bias(task.model, source.name)
                channels = int(call.out.shape[LAYERS[call.kind]])
                zeros = np.zeros(channels, np.float32).reshape(bias_shape(call.kind))
                set_parameter(task.model, path, Parameter(zeros))
                editor.set_argument(expr, "bias", editor.get_attr(path))

    def apply(self, task: CalibratedTask) -> Report:
        found, left = layers(task.model)
        twins = Twins(task)
        changed, errors = [], []
        for layer in tqdm(found, desc="bias_correction", unit="layer", disable=not task.progress):
            if layer.bias is None:
                left.append(f"{layer.name}: it has no bias")
                continue
            error, largest = _correct(task, twins, layer)
            errors.append(error)
            changed.append(f"{layer.name}: bias moved by {largest:.3g} at most")
        if not found and not left:
            left.append("no layer has quantized weights")
        return Report(tuple(changed), tuple(left), tuple(errors))


def _correct(task: CalibratedTask, twins: Twins, layer: Layer) -> tuple[SiteError, float]:
    """Corrects one layer; returns its error and the largest correction."""
    twins.advance(layer.call.expr)
    before, after = Noise(layer.name), Noise(layer.name)
    shift, count = np.zeros(1), 0
    for want, have in twins.outputs(layer.call.expr):
        before.add(want, have)
        rows = per_channel(want.astype(np.float64) - have, layer.axis)
        shift, count = shift + rows.sum(axis=1), count + rows.shape[1]
    largest = move_bias(task.model, layer, shift / count)
    twins.quantized.changed()
    for want, have in twins.outputs(layer.call.expr):
        after.add(want, have)
    return SiteError(layer.name, before.decibels, after.decibels), largest
