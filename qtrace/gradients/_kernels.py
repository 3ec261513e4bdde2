"""The two gradients of a 2-d convolution, computed by kernels of MegEngine that are fast on CPU.

With stride s, dilation d, places p of the window and its taps t::

    y[n,k,p]     = sum over c, t of w[k,c,t] * x[n,c, s*p + d*t - padding]
    dL/dw[k,c,t] = sum over n, p of dy[n,k,p] * x[n,c, s*p + d*t - padding]

so the weight's gradient is a matrix product of dy and im2col of x (Chellapilla et al. 2006, "High performance
convolutional neural networks for document processing"). The index is symmetric in (s, p) and (d, t):
windows as large as the output, with its places s apart, taken once for each tap, come in the order that the
product reads.

The input's gradient is the transposed convolution of dy. MegEngine has a good kernel for it without groups
and plain loops with groups; there, with stride 1, it is a convolution with the weights turned round.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import megengine.functional as F
from megengine import Tensor
from megengine.core._imperative_rt.core2 import apply
from megengine.core._trace_option import use_symbolic_shape
from megengine.core.ops import builtin

# The windows of one product fill at most 16 MB, whatever the batch: larger products read memory twice,
# smaller ones cost more calls.
_WINDOW_NUMBERS = 1 << 22

# The product of a matrix with fewer numbers takes less time than its call.
_TINY_PRODUCT_NUMBERS = 2048


@dataclass(frozen=True)
class Geometry:
    """The geometry of a convolution's windows; pairs are (vertical, horizontal).

    Attributes:
        stride: the step between windows.
        padding: rows and columns of zeros at each side of the input.
        dilation: the step between the taps of a window.
        groups: the number of groups of channels.
    """

    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]
    groups: int


def to_weight(x: Tensor, dy: Tensor, shape: tuple[int, ...], geometry: Geometry) -> Tensor:
    """Computes the gradient of the weight.

    Args:
        x: the input, (N, C, H, W) float32.
        dy: the gradient of the output, (N, K, OH, OW) float32.
        shape: the shape of the weight: (K, C, KH, KW) or (G, K/G, C/G, KH, KW).
        geometry: the geometry of the convolution.

    Returns:
        A float32 tensor of shape ``shape``.
    """
    if use_symbolic_shape():
        # A trace serves other batches and image sizes: no number here may come from the shape of x.
        windows = F.sliding_window(x, shape[-2:], geometry.padding, geometry.stride, geometry.dilation)
        return _one_product(dy, windows.transpose(1, 4, 5, 0, 2, 3), shape, geometry.groups).reshape(shape)
    images, channels = x.shape[:2]
    step = max(1, _WINDOW_NUMBERS // (channels * shape[-2] * shape[-1] * dy.shape[2] * dy.shape[3]))
    if step >= images:
        return _product(x, dy, shape, geometry).reshape(shape)
    total = _product(x[:step], dy[:step], shape, geometry)
    for start in range(step, images, step):
        total += _product(x[start : start + step], dy[start : start + step], shape, geometry)
    return total.reshape(shape)


def _product(x: Tensor, dy: Tensor, shape: tuple[int, ...], geometry: Geometry) -> Tensor:
    """Computes the gradient of the weight as (G, K/G, C/G * KH * KW)."""
    high, wide = shape[-2:]
    images, filters, *places = dy.shape
    groups = geometry.groups
    windows = F.sliding_window(x, tuple(places), geometry.padding, geometry.dilation, geometry.stride)
    if windows.shape[2:4] != (high, wide):  # the stride leaves rows that no window reaches
        windows = windows[:, :, :high, :wide]
    area = places[0] * places[1]
    # A product for each image and group and their sum, or one over all images, for which the factors must be
    # brought into another order: it pays where the products outgrow their factors, or are tiny.
    if area < filters // groups or math.prod(shape[-3:]) * area < _TINY_PRODUCT_NUMBERS:
        return _one_product(dy, windows.transpose(1, 2, 3, 0, 4, 5), shape, groups)
    rows = windows.reshape(images, groups, -1, area)
    return F.matmul(dy.reshape(images, groups, -1, area), rows, transpose_b=True).sum(axis=0)


def _one_product(dy: Tensor, windows: Tensor, shape: tuple[int, ...], groups: int) -> Tensor:
    """Computes `_product` by one product over all images; ``windows`` is (C, KH, KW, N, OH, OW)."""
    columns = windows.reshape(groups, math.prod(shape[-3:]), -1)
    filters = dy.transpose(1, 0, 2, 3).reshape(groups, shape[-4], -1)
    return F.matmul(filters, columns, transpose_b=True)


def to_input(x: Tensor, weight: Tensor, dy: Tensor, geometry: Geometry) -> Tensor:
    """Computes the gradient of the input.

    Args:
        x: the input, (N, C, H, W) float32; only its shape is read.
        weight: the weight, (K, C, KH, KW) or (G, K/G, C/G, KH, KW), float32.
        dy: the gradient of the output, (N, K, OH, OW) float32.
        geometry: the geometry of the convolution.

    Returns:
        A float32 tensor of the shape of ``x``.
    """
    kernel = weight._tuple_shape[-2:]
    spans = tuple(d * (k - 1) for d, k in zip(geometry.dilation, kernel, strict=True))
    padding = tuple(s - p for s, p in zip(spans, geometry.padding, strict=True))
    if geometry.groups > 1 and geometry.stride == (1, 1) and min(padding) >= 0:
        turned = weight[:, :, :, ::-1, ::-1].transpose(0, 2, 1, 3, 4)
        return F.conv2d(dy, turned, None, 1, padding, geometry.dilation, geometry.groups)
    op = builtin.ConvolutionBackwardData(
        stride_h=geometry.stride[0],
        stride_w=geometry.stride[1],
        pad_h=geometry.padding[0],
        pad_w=geometry.padding[1],
        dilate_h=geometry.dilation[0],
        dilate_w=geometry.dilation[1],
        mode="cross_correlation",
        compute_mode="default",
        sparse="dense" if geometry.groups == 1 else "group",
    )
    (shape,) = apply(builtin.GetVarShape(), x)
    return apply(op, weight, dy, shape)[0]
