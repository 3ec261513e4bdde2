"""The gradients of `conv2d` for networks that are no prepared graphs."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import megengine.functional as F
import megengine.module as M
from megengine import Tensor

from qtrace.gradients.conv import conv2d

__all__ = ["fast_gradients"]


@contextmanager
def fast_gradients(model: M.Module) -> Iterator[None]:
    """Gives the ``Conv2d`` layers of ``model`` the gradients of `conv2d` within the block.

    For the training of float networks on CPU; prepared graphs need no block. What the layers compute stays
    the same. Layers with a ``calc_conv`` of their own, and calls of functions, are left as they are.

    Args:
        model: a network or a traced network. It should not be copied or saved within the block.
    """
    layers = [m for m in model.modules() if getattr(type(m), "calc_conv", None) is M.Conv2d.calc_conv]
    changed = [m for m in layers if "calc_conv" not in m.__dict__]
    for layer in changed:
        layer.__dict__["calc_conv"] = functools.partial(_calc_conv, layer)
    try:
        yield
    finally:
        for layer in changed:
            layer.__dict__.pop("calc_conv", None)


def _calc_conv(layer: Any, inp: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Replaces ``Conv2d.calc_conv``: the same computation by `conv2d`."""
    padding = layer.padding
    if layer.padding_mode != "zeros":
        inp, padding = F.nn.pad(inp, layer.get_pad_witdth(), layer.padding_mode), 0
    modes = (layer.conv_mode, layer.compute_mode)
    return conv2d(inp, weight, bias, layer.stride, padding, layer.dilation, layer.groups, *modes)
