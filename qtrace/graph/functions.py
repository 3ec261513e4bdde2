"""Functions that MegEngine lacks and that composites of a graph become: each is one call in a traced graph.

A model that calls one of these functions traces it as one op. Saved models name them, so that the names are
part of the file format (``files/allowlist.py``).
"""

from __future__ import annotations

import math

import megengine.functional as F
from megengine import Tensor
from megengine.core.ops.builtin import Elemwise
from megengine.functional.elemwise import _elwise
from megengine.traced_module import wrap


@wrap
def erf(x: Tensor) -> Tensor:
    """Computes the error function ``2 / sqrt(pi) * integral of exp(-t * t) from 0 to x`` of each value."""
    return _elwise(x, mode=Elemwise.Mode.ERF)


@wrap
def gelu_tanh(x: Tensor) -> Tensor:
    """Computes ``0.5 * x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x**3)))``."""
    return x * 0.5 * (F.tanh((x * x * 0.044715 + 1.0) * x * math.sqrt(2.0 / math.pi)) + 1.0)


@wrap
def hard_sigmoid(x: Tensor, slope: float = 0.2, offset: float = 0.5) -> Tensor:
    """Computes ``clip(slope * x + offset, 0, 1)``; `F.hsigmoid` has the slope 1 / 6."""
    return F.clip(x * slope + offset, 0.0, 1.0)


@wrap
def log_softmax(x: Tensor, axis: int = -1) -> Tensor:
    """Computes ``log(softmax(x))`` along ``axis``.

    `F.logsoftmax` adds the largest value to the logarithm of the sum, which then has only the digits that the
    largest value leaves.
    """
    below = x - F.max(x.detach(), axis=axis, keepdims=True)
    return below - F.log(F.sum(F.exp(below), axis=axis, keepdims=True))


@wrap
def mish(x: Tensor) -> Tensor:
    """Computes ``x * tanh(log(1 + exp(x)))``."""
    return x * F.tanh(F.softplus(x))


@wrap
def rms_norm(x: Tensor, weight: Tensor | None = None, axis: int = -1, eps: float = 1e-6) -> Tensor:
    """Computes ``x / sqrt(mean(x * x) + eps) * weight``.

    Args:
        x: any tensor.
        weight: broadcastable to ``x``; None for a factor of 1.
        axis: the axis of the mean.
        eps: is added to the mean.
    """
    result = x / F.sqrt(F.mean(x * x, axis=axis, keepdims=True) + eps)
    return result if weight is None else result * weight


@wrap
def scale_and_shift(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """Computes ``x * scale + shift``, with tensors that broadcast to ``x``."""
    return x * scale + shift


@wrap
def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    scale: float = 1.0,
    bias: Tensor | None = None,
) -> Tensor:
    """Computes ``softmax(scale * query @ transposed key + bias + mask) @ value`` over the last two axes.

    Args:
        query: (..., L, D).
        key: (..., S, D).
        value: (..., S, V).
        mask: is added to the scores; broadcastable to (..., L, S). One with an axis more, (1, W, ..., L, S),
            is a mask of W windows of an image, which follow each other on the first axis of the scores.
        scale: factor of the scores.
        bias: is added to the scores before the mask; broadcastable to (..., L, S).

    Returns:
        The values weighted by attention, (..., L, V).
    """
    scores = F.matmul(query, key, transpose_b=True)
    if scale != 1.0:
        scores = scores * scale
    if bias is not None:
        scores = scores + bias
    if mask is not None and mask.ndim > scores.ndim:
        sizes = scores._tuple_shape[1:]
        windows = F.reshape(scores, (-1, mask._tuple_shape[1], *sizes)) + mask
        scores = F.reshape(windows, (-1, *sizes))
    elif mask is not None:
        scores = scores + mask
    return F.matmul(F.softmax(scores, axis=[-1]), value)  # a list: right for scores below -87, too


@wrap
def channel_shuffle(x: Tensor, groups: int) -> Tensor:
    """Interleaves ``groups`` groups of channels of ``x``, (N, C, ...).

    Channel i of group g becomes channel ``i * groups + g``.
    """
    shape = x.shape
    grouped = F.reshape(x, (shape[0], groups, x._tuple_shape[1] // groups, -1))
    return F.reshape(F.transpose(grouped, (0, 2, 1, 3)), shape)


@wrap
def space_to_depth(x: Tensor, block: int, order: tuple[int, int, int] = (0, 1, 2)) -> Tensor:
    """Moves each block of ``block`` x ``block`` places of an image (N, C, H, W) into the channels.

    Args:
        x: the image; ``block`` divides its height and width.
        block: height and width of a block.
        order: order of the row in the block (0), the column in the block (1) and the channel (2) in the new
            channel number, the slowest first. ONNX's SpaceToDepth has (0, 1, 2), (2, 0, 1) inverts
            `F.pixel_shuffle`, (1, 0, 2) is the order of YOLOX's Focus.

    Returns:
        The image, (N, C * block * block, H / block, W / block).
    """
    batch = x.shape[0]
    _, channels, height, width = x._tuple_shape
    parts = F.reshape(x, (batch, channels, height // block, block, width // block, block))
    axes = (3, 5, 1)
    moved = F.transpose(parts, (0, *(axes[i] for i in order), 2, 4))
    return F.reshape(moved, (batch, channels * block * block, height // block, width // block))
