"""Positions of a layer's output that stand for all, and what a layer reads and gives there.

Rows of a convolution are views of arrays that have the positions last, as its maps have them. Copying these
takes a fifth of the time of turning them, and products of matrices take both.
"""

from __future__ import annotations

import numpy as np

from qtrace.ops import OpCall

__all__ = ["draw_positions", "products", "read_rows", "result_rows"]

# One of as many positions in the padding is set to 0 by itself; more of them with all others.
_FEW = 24


def draw_positions(size: int, places: int, seed: tuple[int, ...]) -> np.ndarray:
    """Draws one position of each of ``places`` equal parts of a feature map; all if there are so few.

    Equal distances would meet the same columns in each row of a map whose width they divide.

    Args:
        size: number of positions.
        places: the most positions that are drawn.
        seed: integers that decide, from the batch and the layer, so that every run draws the same.
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
    down = np.arange(shape[-2])[:, None] * dilation[0] + positions // columns * stride[0] - top
    across = np.arange(shape[-1])[:, None] * dilation[1] + positions % columns * stride[1] - left
    inside = ((down >= 0) & (down < height))[:, None] & ((across >= 0) & (across < width))
    down, across = np.clip(down, 0, height - 1), np.clip(across, 0, width - 1)
    index = (down[:, None] * width + across).reshape(-1)
    maps, outside = x.reshape(samples, channels, -1), np.flatnonzero(~inside)
    windows = _take(maps, index) if len(outside) else _picked(maps, index)
    if _FEW * len(outside) > len(index):
        windows *= inside.reshape(-1)
    elif len(outside):
        windows[:, :, outside] *= False
    return _rows(windows.reshape(samples, channels, -1, len(positions)), shape[0] if len(shape) == 5 else 1)


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
    rows = _picked(y.reshape(len(y), y.shape[1], -1), positions)
    return _rows(rows.reshape(len(y), y.shape[1], 1, len(positions)), groups)


def _rows(values: np.ndarray, groups: int) -> np.ndarray:
    """Turns (N, C, K, P) into the rows of each of G groups, (G, N * P, C / G * K), a view of the reverse."""
    samples, channels, kernel, count = values.shape
    split = values.reshape(samples, groups, channels // groups, kernel, count).transpose(1, 2, 3, 0, 4)
    return split.reshape(groups, channels // groups * kernel, samples * count).transpose(0, 2, 1)


def products(rows: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Multiplies rows (G, P, D) by weights (G, O, D): (G, P, O), in the order of the rows in memory."""
    if rows.strides[2] > rows.strides[1]:
        return np.asarray((weight @ rows.transpose(0, 2, 1)).transpose(0, 2, 1))
    return np.asarray(rows @ weight.transpose(0, 2, 1))


def _picked(maps: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Returns positions of maps (N, C, P), or the maps themselves if these are all in their order."""
    size = maps.shape[2]
    return maps if np.array_equal(positions, np.arange(size)) else _take(maps, positions)


def _take(maps: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Returns positions of maps (N, C, P), all of which exist: numpy is faster if it checks none."""
    return np.take(maps, positions, axis=2, mode="clip")
