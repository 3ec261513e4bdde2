"""Biases of layers: adds missing ones, and moves them within the range of the int32 accumulator."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from megengine import Parameter

from qtrace import ops
from qtrace.fakequant.following.bias import BIAS_LIMIT, BiasQuant
from qtrace.graph.edit import GraphEditor
from qtrace.graph.finish import order_together
from qtrace.graph.module_tree import set_parameter
from qtrace.graph.types import GetAttr, TracedModule
from qtrace.graph.walk import exprs, get_module, owner, users
from qtrace.ops import OpCall
from qtrace.preparation.passes.fuse_bn import bias_shape, free_bias
from qtrace.ptq.layers.held_back import Gain, OutputErrors, gain_text
from qtrace.ptq.layers.quantized import LAYERS, QuantizedLayer, calls_by_weight, write

__all__ = ["add_biases", "correct_bias", "move_bias"]


# A correction is a multiple of this share (as a power of two) of the error of the output.
_STEP_BITS = 12


def add_biases(model: TracedModule) -> None:
    """Gives layers without a bias a bias of zeros, unless a BatchNorm follows; used in the float stage."""
    with GraphEditor(model) as editor:
        for calls in calls_by_weight(model):
            source = calls[0].weight.expr if calls[0].weight is not None else None
            if not isinstance(source, GetAttr) or not _can_have_bias(model, calls):
                continue
            path = free_bias(model, source.name)
            channels = int(calls[0].out.shape[LAYERS[calls[0].kind]])
            zeros = np.zeros(channels, np.float32).reshape(bias_shape(calls[0].kind))
            set_parameter(model, path, Parameter(zeros))
            for call in calls:
                editor.set_argument(call.expr, "bias", editor.get_attr(path))


def _can_have_bias(model: TracedModule, calls: list[OpCall]) -> bool:
    """Whether the calls that share a weight lack a bias and can get one."""
    for call in calls:
        if call.kind != calls[0].kind or call.kind not in LAYERS or call.bias is not None:
            return False
        followers = [ops.read(u) for u in users(call.out)]
        if any(f is not None and f.kind == "batch_norm" for f in followers):
            return False
    group = [call.expr for call in calls]
    if set(users(calls[0].weight)) != set(group):
        return False
    return len(group) == 1 or order_together(exprs(model), [group]) is not None


def correct_bias(
    model: TracedModule,
    layer: QuantizedLayer,
    errors: OutputErrors,
    fitted: np.ndarray,
    held: Mapping[int, OutputErrors],
) -> tuple[float | None, str]:
    """Adds the mean error of each channel to the bias, unless that raises the error on held-back batches.

    Args:
        model: the quantized graph.
        layer: a layer with a bias.
        errors: the errors of the layer's output in all batches.
        fitted: the mean error of each channel, (C,), in the batches that are not held back.
        held: those in each batch that is held back.

    Returns:
        The largest change of the bias (None if it stays), and a clause on the held-back batches or "".
    """
    text = ""
    if held:
        gain = Gain.of([(e.noise(), e.noise(fitted)) for e in held.values()])
        text = gain_text(*gain.noises, tuple(held))
        if not gain.supported:
            return None, text
    return move_bias(model, layer, _coarse(errors)), text


def _coarse(errors: OutputErrors) -> np.ndarray:
    """Returns the mean error of each channel in steps far below the error: last bits decide no integer."""
    spread = np.sqrt(errors.square / max(errors.count * errors.total.size, 1))
    step = 2.0 ** (np.floor(np.log2(max(spread, 1e-30))) - _STEP_BITS)
    return np.asarray(np.round(errors.mean / step) * step)


def move_bias(model: TracedModule, layer: QuantizedLayer, shift: np.ndarray) -> float:
    """Adds ``shift`` (C,) to the bias of ``layer``; returns the largest change."""
    assert layer.bias is not None
    old = get_module(model, layer.bias).numpy().astype(np.float64).reshape(-1)
    new = _within_int32(layer, old + shift)
    write(model, layer.bias, new)
    return float(np.abs(new - old).max())


def _within_int32(layer: QuantizedLayer, bias: np.ndarray) -> np.ndarray:
    """Clips ``bias`` to the int32 accumulators of all calls, since a dead channel's scale may be tiny."""
    for call in layer.calls:
        assert call.bias is not None
        source = call.bias.expr
        module = owner(source)
        if isinstance(module, BiasQuant):
            activation, weight = (node.owner for node in source.args[2:])
            scale = module.scale(activation, weight)[0].numpy().astype(np.float64).reshape(-1)
            bias = np.clip(bias, -BIAS_LIMIT * scale, BIAS_LIMIT * scale)
    return bias
