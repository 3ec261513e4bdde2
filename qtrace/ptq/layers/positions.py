"""Positions of a layer's output that stand for all, and what a layer reads and gives there."""

from __future__ import annotations

import numpy as np

from qtrace.ops import OpCall

__all__ = ["draw_positions", "read_rows", "result_rows"]

# One of as many positions in the padding is set to 0 by itself; more of them with all others.
_FEW = 24


def draw_positions(size: int, places: int, seed: tuple[int, ...]) -> np.ndarray:
    """Draws one position of each of ``places`` equal parts of a feature map; all if there are so few.

    Equal distances would meet the same columns in each row of a map whose width they divide.

    Args:
        size: number of positions.
        places: the most positions that are drawn.
        seed: integers that decide; those of the batch and the layer, so that every run draws the same.
    """
    if size <= places:
        return np.arange(size)
    edges = np.arange(places + 1) * size // places
    return np.random.default_rng(seed).integers(edges[:-1], edges[1:])


def read_rows(x: np.ndarray, call: OpCall, shape: tuple[int, ...], positions: np.ndarray) -> np.ndarray:
    """Returns what a layer reads for some positions of its output: (G, N * P, D) of G groups and D inputs.

    Args:
        x: the input of the layer, (N, C, H, W) for a convolution, (N, ..., C) for a linear layer.
        call: the layer.
        shape: the shape of its weight.
        positions: indices of the positions of a sample.
    """
    if call.kind == "linear":
        rows = x.reshape(len(x), -1, x.shape[-1])[:, positions]
        return rows.reshape(1, -1, x.shape[-1])
    (top, left), stride, dilation = (call.attrs[n] for n in ("padding", "stride", "dilation"))
    samples, channels, height, width = x.shape
    columns = (width + 2 * left - dilation[1] * (shape[-1] - 1) - 1) // stride[1] + 1
    down = (positions // columns * stride[0] - top)[:, None] + np.arange(shape[-2]) * dilation[0]
    across = (positions % columns * stride[1] - left)[:, None] + np.arange(shape[-1]) * dilation[1]
    inside = ((down >= 0) & (down < height))[:, :, None] & ((across >= 0) & (across < width))[:, None, :]
    down, across = np.clip(down, 0, height - 1), np.clip(across, 0, width - 1)
    index = (down[:, :, None] * width + across[:, None, :]).reshape(-1)
    groups, maps = shape[0] if len(shape) == 5 else 1, x.reshape(samples, channels, -1)
    if groups == channels:
        # The windows of a channel are then in the order of its rows, and larger than the map.
        maps = np.ascontiguousarray(maps.transpose(1, 0, 2))
    windows = _take(maps, index)
    outside = np.flatnonzero(~inside)
    if _FEW * len(outside) > len(index):
        windows *= inside.reshape(-1)
    elif len(outside):
        windows[:, :, outside] *= False
    if groups == channels:
        return windows.reshape(groups, samples * len(positions), -1)
    windows = windows.reshape(samples, groups, channels // groups, len(positions), -1)
    rows = windows.transpose(1, 0, 3, 2, 4)
    return rows.reshape(groups, samples * len(positions), -1)


def result_rows(y: np.ndarray, axis: int, groups: int, positions: np.ndarray) -> np.ndarray:
    """Returns the output of a layer at some positions: (G, N * P, O).

    Args:
        y: the output.
        axis: its axis that counts channels: 1, or -1 where it is the last.
        groups: number of groups.
        positions: indices of the positions of a sample.
    """
    if axis == -1:
        return y.reshape(len(y), -1, y.shape[-1])[:, positions].reshape(1, -1, y.shape[-1])
    rows = _take(y.reshape(len(y), y.shape[1], -1), positions)
    split = rows.reshape(len(y), groups, -1, len(positions)).transpose(1, 0, 3, 2)
    return split.reshape(groups, len(y) * len(positions), -1)


def _take(maps: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Returns positions of maps (N, C, P), all of which exist: numpy is faster if it checks none."""
    return np.take(maps, positions, axis=2, mode="clip")
