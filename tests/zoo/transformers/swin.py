"""Swin: attention inside of windows, which every second block shifts."""

from __future__ import annotations

import megengine as mge
import megengine.functional as F
import megengine.module as M
import numpy as np
from megengine import Tensor

from tests.zoo.transformers.vit import Mlp

__all__ = ["Swin"]


def split_windows(x: Tensor, window: int) -> Tensor:
    """(N, H, W, C) as (N * windows, window * window, C)."""
    count, height, width, channels = x.shape
    x = x.reshape(count, height // window, window, width // window, window, channels)
    return x.transpose(0, 1, 3, 2, 4, 5).reshape(-1, window * window, channels)


def join_windows(x: Tensor, window: int, height: int, width: int) -> Tensor:
    """The inverse of ``split_windows``."""
    x = x.reshape(-1, height // window, width // window, window, window, x.shape[-1])
    return F.transpose(x, (0, 1, 3, 2, 4, 5)).reshape(-1, height, width, x.shape[-1])


def relative_index(window: int) -> np.ndarray:
    """For every pair of cells of a window, the row of the table of biases."""
    cells = np.stack(np.meshgrid(np.arange(window), np.arange(window), indexing="ij")).reshape(2, -1)
    apart = cells[:, :, None] - cells[:, None, :] + window - 1
    return (apart[0] * (2 * window - 1) + apart[1]).astype(np.int32)


def shift_mask(size: int, window: int, shift: int) -> np.ndarray:
    """-100 between cells that are neighbours only because of the shift: (windows, cells, cells)."""
    region = np.zeros((size, size), np.float32)
    parts = (slice(0, -window), slice(-window, -shift), slice(-shift, None))
    for number, (rows, columns) in enumerate((a, b) for a in parts for b in parts):
        region[rows, columns] = number
    count = size // window
    region = region.reshape(count, window, count, window).transpose(0, 2, 1, 3).reshape(count * count, -1)
    return np.where(region[:, None, :] == region[:, :, None], 0.0, -100.0).astype(np.float32)


class WindowAttention(M.Module):
    """Attention with a learned bias for every relative position."""

    def __init__(self, width: int, window: int, heads: int) -> None:
        super().__init__()
        self.heads, self.scale = heads, (width // heads) ** -0.5
        self.relative_position_bias_table = mge.Parameter(
            np.zeros(((2 * window - 1) ** 2, heads), np.float32)
        )
        self.index = mge.Tensor(relative_index(window).reshape(-1))
        self.qkv, self.proj = M.Linear(width, 3 * width), M.Linear(width, width)
        self.softmax = M.Softmax(axis=-1)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        count, cells, width = x.shape
        qkv = self.qkv(x).reshape(count, cells, 3, self.heads, -1).transpose(2, 0, 3, 1, 4)
        q, k, v = qkv[0] * self.scale, qkv[1], qkv[2]
        score = F.matmul(q, k.transpose(0, 1, 3, 2))
        bias = self.relative_position_bias_table[self.index].reshape(cells, cells, self.heads)
        score = score + F.expand_dims(bias.transpose(2, 0, 1), 0)
        if mask is not None:
            windows = mask.shape[0]
            score = score.reshape(count // windows, windows, self.heads, cells, cells)
            score = score + F.expand_dims(F.expand_dims(mask, 1), 0)
            score = score.reshape(-1, self.heads, cells, cells)
        mixed = F.matmul(self.softmax(score), v).transpose(0, 2, 1, 3).reshape(count, cells, width)
        return self.proj(mixed)


class Block(M.Module):
    """A block on (N, L, C) tokens of a square map."""

    def __init__(self, width: int, size: int, window: int, shift: int) -> None:
        super().__init__()
        self.size, self.window, self.shift = size, window, shift
        self.norm1, self.norm2 = M.LayerNorm(width), M.LayerNorm(width)
        self.attn, self.mlp = WindowAttention(width, window, 2), Mlp(width)
        self.attn_mask = mge.Tensor(shift_mask(size, window, shift)) if shift else None

    def forward(self, x: Tensor) -> Tensor:
        count, length, width = x.shape
        y = self.norm1(x).reshape(count, self.size, self.size, width)
        if self.shift:
            y = F.roll(y, (-self.shift, -self.shift), axis=(1, 2))
        y = self.attn(split_windows(y, self.window), self.attn_mask)
        y = join_windows(y, self.window, self.size, self.size)
        if self.shift:
            y = F.roll(y, (self.shift, self.shift), axis=(1, 2))
        x = x + y.reshape(count, length, width)
        return x + self.mlp(self.norm2(x))


class Merging(M.Module):
    """Four neighbours become one token of twice the width."""

    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.size = size
        self.norm, self.reduction = M.LayerNorm(4 * width), M.Linear(4 * width, 2 * width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        count, _, width = x.shape
        x = x.reshape(count, self.size, self.size, width)
        corners = [x[:, row::2, column::2, :] for column in (0, 1) for row in (0, 1)]
        x = F.concat(corners, -1).reshape(count, -1, 4 * width)
        return self.reduction(self.norm(x))


class Swin(M.Module):
    """Two stages of a plain and a shifted block; the map's size is fixed."""

    def __init__(self, size: int = 32, width: int = 8, window: int = 4, classes: int = 5) -> None:
        super().__init__()
        fine, coarse = size // 4, size // 8
        self.proj, self.norm0 = M.Conv2d(3, width, 4, 4), M.LayerNorm(width)
        self.stage1 = M.Sequential(Block(width, fine, window, 0), Block(width, fine, window, window // 2))
        self.merge = Merging(width, fine)
        self.stage2 = M.Sequential(Block(2 * width, coarse, window, 0))
        self.norm, self.head = M.LayerNorm(2 * width), M.Linear(2 * width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm0(F.flatten(self.proj(x), 2).transpose(0, 2, 1))
        x = self.norm(self.stage2(self.merge(self.stage1(x))))
        return self.head(F.flatten(F.mean(x, axis=1, keepdims=True), 1))
