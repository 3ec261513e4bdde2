"""Biases of layers: those that are missing, and moves that fit into an accumulator."""

from __future__ import annotations

import numpy as np
from megengine import Parameter

from qtrace import ops
from qtrace.fakequant._bias import BIAS_LIMIT, BiasQuant
from qtrace.graph.edit import GraphEditor, set_parameter
from qtrace.graph.types import GetAttr, TracedModule
from qtrace.graph.walk import exprs, get_module, owner, users
from qtrace.passes.fuse_bn import bias_shape, free_bias
from qtrace.ptq._layers import LAYERS, Layer, write

__all__ = ["add_biases", "move_bias"]


def add_biases(model: TracedModule) -> None:
    """Gives layers without a bias one of zeros, but those that a BatchNorm follows, in the float stage."""
    with GraphEditor(model) as editor:
        for expr in exprs(model):
            call = ops.read(expr)
            if call is None or call.kind not in LAYERS or call.bias is not None or call.weight is None:
                continue
            source = call.weight.expr
            if not isinstance(source, GetAttr) or len(list(users(call.weight))) > 1:
                continue
            follower = [ops.read(u) for u in users(call.out)]
            if any(f is not None and f.kind == "batch_norm" for f in follower):
                continue
            path = free_bias(model, source.name)
            channels = int(call.out.shape[LAYERS[call.kind]])
            zeros = np.zeros(channels, np.float32).reshape(bias_shape(call.kind))
            set_parameter(model, path, Parameter(zeros))
            editor.set_argument(expr, "bias", editor.get_attr(path))


def move_bias(model: TracedModule, layer: Layer, shift: np.ndarray) -> float:
    """Adds ``shift`` (one number a channel) to the bias of ``layer``; returns the largest change."""
    assert layer.bias is not None
    old = get_module(model, layer.bias).numpy().astype(np.float64).reshape(-1)
    new = _within_int32(layer, old + shift)
    write(model, layer.bias, new)
    return float(np.abs(new - old).max())


def _within_int32(layer: Layer, bias: np.ndarray) -> np.ndarray:
    """``bias`` as far as it fits into the int32 of its accumulator: a dead channel's scale may be tiny."""
    assert layer.call.bias is not None
    source = layer.call.bias.expr
    module = owner(source)
    if not isinstance(module, BiasQuant):
        return bias
    activation, weight = (node.owner for node in source.args[2:])
    scale = module.scale(activation, weight)[0].numpy().astype(np.float64).reshape(-1)
    return np.clip(bias, -BIAS_LIMIT * scale, BIAS_LIMIT * scale)
