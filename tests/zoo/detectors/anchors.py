"""Grids, anchors and box codes, made in the graph from the shapes of the feature maps."""

from __future__ import annotations

import math

import megengine.functional as F
import numpy as np
from megengine import Tensor

__all__ = ["Anchors", "as_rows", "decode_distances", "decode_offsets", "points"]


def as_rows(x: Tensor, values: int) -> Tensor:
    """(N, A * values, H, W) as (N, H * W * A, values)."""
    count, _, height, width = x.shape
    x = x.reshape(count, -1, values, height, width)
    return F.transpose(x, (0, 3, 4, 1, 2)).reshape(count, -1, values)


def _grid(x: Tensor, stride: int, offset: float) -> tuple[Tensor, Tensor]:
    """The x and y of every cell, each a vector of height times width values."""
    height, width = x.shape[-2:]
    column = F.arange(0, height, dtype="float32") * stride + offset * stride
    row = F.arange(0, width, dtype="float32") * stride + offset * stride
    across = F.broadcast_to(F.expand_dims(row, 0), (height, width))
    down = F.broadcast_to(F.expand_dims(column, 1), (height, width))
    return across.reshape(-1), F.flatten(down)


def points(maps: list[Tensor], strides: tuple[int, ...]) -> list[Tensor]:
    """The centres of the cells of every level, (H * W, 2)."""
    grids = [_grid(x, stride, 0.5) for x, stride in zip(maps, strides, strict=True)]
    return [F.stack([across, down], axis=1) for across, down in grids]


class Anchors:
    """Anchors of some ratios and scales at every cell; not a Module."""

    def __init__(
        self, strides: tuple[int, ...], ratios: tuple[float, ...], scales: tuple[float, ...] = (4.0,)
    ) -> None:
        self.strides = strides
        self.shapes = [(s / math.sqrt(r), s * math.sqrt(r)) for s in scales for r in ratios]

    def __call__(self, maps: list[Tensor]) -> list[Tensor]:
        return [self.level(x, stride) for x, stride in zip(maps, self.strides, strict=True)]

    def level(self, x: Tensor, stride: int) -> Tensor:
        sizes = np.array(self.shapes, np.float32) * stride / 2
        base = Tensor(np.concatenate([-sizes, sizes], axis=1))
        across, down = _grid(x, stride, 0.0)
        shifts = F.stack([across, down, across, down], axis=1)
        return (F.expand_dims(shifts, 1) + F.expand_dims(base, 0)).reshape(-1, 4)


def decode_offsets(anchors: Tensor, offsets: Tensor) -> Tensor:
    """Corners of boxes from anchors (K, 4) and centre/size offsets (N, K, 4)."""
    width = anchors[:, 2] - anchors[:, 0]
    height = anchors[:, 3] - anchors[:, 1]
    x = anchors[:, 0] + 0.5 * width
    y = anchors[:, 1] + 0.5 * height
    dx, dy = offsets[..., 0], offsets[..., 1]
    dw = F.minimum(offsets[..., 2], math.log(16.0))
    dh = F.minimum(offsets[..., 3], math.log(16.0))
    half_width, half_height = F.exp(dw) * width * 0.5, F.exp(dh) * height * 0.5
    x, y = dx * width + x, dy * height + y
    corners = [x - half_width, y - half_height, x + half_width, y + half_height]
    return F.stack(corners, axis=-1)


def decode_distances(centres: Tensor, distances: Tensor) -> Tensor:
    """Corners of boxes from points (K, 2) and left/top/right/bottom distances (N, K, 4)."""
    low = F.expand_dims(centres, 0) - distances[..., :2]
    high = F.expand_dims(centres, 0) + distances[..., 2:]
    return F.concat([low, high], axis=-1)
