"""The arithmetic of second-order rounding: what a layer reads, and roundings that make up for each other."""

from __future__ import annotations

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from qtrace.numerics import round_to
from qtrace.ops import OpCall
from qtrace.scheme import QParams

__all__ = ["JOINT", "correlations", "nearest", "rounded"]

# Columns that are rounded before the others hear of it: the larger product is what processors are good at.
_BLOCK = 128

# Inputs that make up for each other. The cost of a factorisation grows with their cube: this bounds it.
JOINT = 1152


def correlations(x: np.ndarray, call: OpCall, shape: tuple[int, ...], places: int) -> np.ndarray:
    """``X X^T`` of what the rows of a layer's weight are multiplied with, summed over a batch.

    Args:
        x: what the layer reads, N x C x H x W of a convolution, ... x C of a linear layer.
        call: the layer.
        shape: of its weight.
        places: at most so many places of each sample count.

    Returns:
        float64 (G, D, D) for G groups of D inputs.
    """
    if call.kind == "linear":
        flat = x.reshape(-1, x.shape[-1]).astype(np.float64)
        return np.asarray(flat.T @ flat)[None]
    (top, left), stride, dilation = (call.attrs[n] for n in ("padding", "stride", "dilation"))
    padded = np.pad(x, ((0, 0), (0, 0), (top, top), (left, left)))
    window = tuple((k - 1) * d + 1 for k, d in zip(shape[-2:], dilation, strict=True))
    groups = shape[0] if len(shape) == 5 else 1
    total = np.zeros((groups, *(2 * [int(np.prod(shape[-3:]))])))
    for sample in padded:  # one by one: patches take many times the memory of a map
        seen = sliding_window_view(sample, window, axis=(1, 2))  # type: ignore[call-overload]
        seen = seen[:, :: stride[0], :: stride[1], :: dilation[0], :: dilation[1]]
        seen = seen.reshape(len(sample), -1, *seen.shape[3:])
        seen = seen[:, :: -(-seen.shape[1] // places)]
        patches = seen.reshape(groups, -1, *seen.shape[1:]).transpose(0, 2, 1, 3, 4)
        patches = patches.reshape(groups, patches.shape[1], -1).astype(np.float32)
        total += patches.transpose(0, 2, 1) @ patches
    return total


def rounded(
    rows: np.ndarray, hessian: np.ndarray, scale: np.ndarray, zero: np.ndarray, qparams: QParams, damp: float
) -> np.ndarray:
    """The rows on their grids, so that what they compute changes little.

    Args:
        rows: float64 (O, D). Of more than `JOINT` columns, that many neighbours at a time are rounded
            together.
        hessian: float64 (D, D).
        scale, zero: of each row, float64 (O, 1).
        qparams: whose scheme it is.
        damp: as in `Gptq`.
    """
    parts = [slice(start, start + JOINT) for start in range(0, rows.shape[1], JOINT)]
    found = [_together(rows[:, p], hessian[p, p], (scale, zero, qparams), damp) for p in parts]
    return np.concatenate(found, axis=1)


def _together(
    rows: np.ndarray, hessian: np.ndarray, grid: tuple[np.ndarray, np.ndarray, QParams], damp: float
) -> np.ndarray:
    diagonal = np.diagonal(hessian)
    if not diagonal.any():
        return nearest(rows, *grid)
    # The inputs that count most are rounded first, while many others can make up for them.
    order = np.argsort(-diagonal, kind="stable")
    inverse = np.linalg.inv(hessian[np.ix_(order, order)] + damp * diagonal.mean() * np.eye(len(order)))
    upper = np.linalg.cholesky((inverse + inverse.T) / 2).T
    free, result = rows[:, order].copy(), np.empty_like(rows)
    for start in range(0, len(order), _BLOCK):
        stop = min(start + _BLOCK, len(order))
        errors = np.empty((len(rows), stop - start))
        for i in range(start, stop):
            column = free[:, i : i + 1]
            result[:, order[i]] = near = nearest(column, *grid)[:, 0]
            errors[:, i - start] = (column[:, 0] - near) / upper[i, i]
            free[:, i + 1 : stop] -= np.outer(errors[:, i - start], upper[i, i + 1 : stop])
        free[:, stop:] -= errors @ upper[start:stop, stop:]
    return result


def nearest(rows: np.ndarray, scale: np.ndarray, zero: np.ndarray, qparams: QParams) -> np.ndarray:
    """The rows (O, D) rounded to nearest, with the scale and zero point of each, (O, 1)."""
    scheme = qparams.scheme
    integers = round_to(rows / scale, scheme.rounding) + zero
    return np.asarray((np.clip(integers, scheme.qmin, scheme.qmax) - zero) * scale)
