"""The gradients of `conv2d` and of recurrent layers for networks that are no prepared graphs."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import megengine.functional as F
import megengine.module as M
from megengine import Tensor

from qtrace.gradients.conv import conv2d
from qtrace.gradients.recurrent import cell_forward, layer_forward


@contextmanager
def fast_gradients(model: M.Module) -> Iterator[None]:
    """Gives the layers of ``model`` gradients that are fast and right on CPU within the block.

    For the training of float networks on CPU; prepared graphs need no block. ``Conv2d`` gets the gradients of
    `conv2d`. ``LSTM``, ``RNN``, ``LSTMCell`` and ``RNNCell`` get right ones: MegEngine 1.13 has a wrong one
    for ``LSTM`` on CPU, and none for ``LSTMCell``. What the layers compute stays the same; recurrent layers
    run without dropout. Layers with methods of their own, and calls of functions, are left as they are, as
    is an ``LSTM`` with ``proj_size``, whose gradient stays wrong: a warning names it.

    Args:
        model: a network or a traced network. It should not be copied or saved within the block.
    """
    changed = []
    for path, module in model.named_modules():
        if type(module) is M.LSTM and module.proj_size > 0:
            warnings.warn(
                f"{path or 'the network'} is an LSTM with proj_size, whose gradient is wrong in MegEngine on "
                "CPU: write the layer with F.linear, F.split, F.sigmoid and F.tanh to train it.",
                stacklevel=3,
            )
        name, function = _replacement(module)
        if name and name not in module.__dict__:
            module.__dict__[name] = functools.partial(function, module)
            changed.append((module, name))
    try:
        yield
    finally:
        for module, name in changed:
            module.__dict__.pop(name, None)


def _replacement(module: M.Module) -> tuple[str, Any]:
    """Returns the name of the method that is replaced in ``module``, "" for none, and the function."""
    if getattr(type(module), "calc_conv", None) is M.Conv2d.calc_conv:
        return "calc_conv", _calc_conv
    if type(module) in (M.LSTM, M.RNN) and not getattr(module, "proj_size", 0):
        return "apply_op", layer_forward
    return ("forward", cell_forward) if type(module) in (M.LSTMCell, M.RNNCell) else ("", None)


def _calc_conv(layer: Any, inp: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Replaces ``Conv2d.calc_conv``: the same computation by `conv2d`."""
    padding = layer.padding
    if layer.padding_mode != "zeros":
        inp, padding = F.nn.pad(inp, layer.get_pad_witdth(), layer.padding_mode), 0
    modes = (layer.conv_mode, layer.compute_mode)
    return conv2d(inp, weight, bias, layer.stride, padding, layer.dilation, layer.groups, *modes)
