"""The arithmetic of second-order rounding: what a layer reads, and roundings that make up for each other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from scipy.linalg import LinAlgError, cholesky
from scipy.linalg.lapack import dtrtri

from qtrace.numerics import round_to
from qtrace.ops import OpCall
from qtrace.scheme import QParams

__all__ = ["JOINT", "Moments", "added", "grouped", "moments", "nearest", "parts", "rounded", "spacing"]

# Columns that are rounded before the others hear of it: the larger product is what processors are good at.
_BLOCK = 128

# Inputs that make up for each other. The cost of a factorisation grows with their cube: this bounds it.
JOINT = 1152

# Rows that are multiplied at once: more of them take more memory, and no less time.
_ROWS = 1024

# The products are summed in float32: what is left of them about the means is uncertain by less than this.
_LOST = 1e-5


@dataclass(frozen=True)
class Moments:
    """Sums over the places that a layer's weight is multiplied with, for G groups of D inputs and O outputs.

    Attributes:
        count: of the places.
        read: the sum of what is read there, float64 (G, D).
        missed: the sum of what the layer should give there and does not, (G, O).
        square: the sum of the products of what is read with itself, (G, D, D).
        cross: of what is read with what is missed, (G, D, O).
    """

    count: int
    read: np.ndarray
    missed: np.ndarray
    square: np.ndarray
    cross: np.ndarray

    @classmethod
    def of(cls, read: np.ndarray, missed: np.ndarray) -> Moments:
        """Of values (G, P, D) and (G, P, O) at P places."""
        turned = read.transpose(0, 2, 1)
        sums = (part.sum(axis=1, dtype=np.float64) for part in (read, missed))
        return cls(read.shape[1], *sums, *((turned @ part).astype(np.float64) for part in (read, missed)))

    def __add__(self, other: Moments) -> Moments:
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return Moments(*(mine + its for mine, its in pairs))

    def __rmul__(self, factor: int) -> Moments:
        return Moments(*(factor * mine for mine in vars(self).values()))

    def centered(self) -> Moments:
        """The same about the means: what is left for the weights where a bias takes the means."""
        mean = self.read / max(self.count, 1)
        square = self.square - mean[:, :, None] * self.read[:, None, :]
        square += (_LOST * (mean * self.read).mean(axis=1))[:, None, None] * np.eye(square.shape[-1])
        cross = self.cross - mean[:, :, None] * self.missed[:, None, :]
        return Moments(self.count, 0 * self.read, 0 * self.missed, square, cross)


def added(first: list[Moments], second: list[Moments]) -> list[Moments]:
    """The sums of the moments of each part; ``first`` may be empty."""
    return [a + b for a, b in zip(first, second, strict=True)] if first else second


def parts(inputs: int) -> list[slice]:
    """The neighbours among the inputs of a layer that are rounded together."""
    return [slice(start, min(start + JOINT, inputs)) for start in range(0, inputs, JOINT)]


def grouped(weight: np.ndarray) -> np.ndarray:
    """A weight as (G, O, D): G is 1 but for the 5 axes that MegEngine gives a convolution in groups."""
    groups = weight.shape[0] if weight.ndim == 5 else 1
    inputs = weight.shape[-3:] if weight.ndim > 2 else weight.shape[-1:]
    return weight.reshape(groups, -1, int(np.prod(inputs)))


def moments(x: np.ndarray, want: np.ndarray, call: OpCall, weight: np.ndarray, places: int) -> list[Moments]:
    """The moments of each of the `parts` of a layer's inputs, over a batch.

    Args:
        x: what the layer reads, N x C x H x W of a convolution, ... x C of a linear layer.
        want: what it should give; but for its bias.
        call: the layer.
        weight: of the layer, in its shape.
        places: at most so many places of each sample count.

    Returns:
        One for each part. Of a layer with several, O is 0: what one part misses depends on the others.
    """
    rows = grouped(weight)
    split = parts(rows.shape[-1])
    total: list[Moments] = []
    for read, wanted in _pairs(x, want, call, weight.shape, places):
        missed = wanted[..., :0]
        if len(split) == 1:
            missed = wanted - read @ rows.transpose(0, 2, 1).astype(np.float32)
        found = [Moments.of(np.ascontiguousarray(read[..., p]), missed) for p in split]
        total = added(total, found)
    return total


def spacing(want: np.ndarray, call: OpCall, places: int) -> int:
    """One of how many places counts in `moments`."""
    return 1 if call.kind == "linear" else -(-want.shape[2] * want.shape[3] // places)


def _pairs(
    x: np.ndarray, want: np.ndarray, call: OpCall, shape: tuple[int, ...], places: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """What is read, (G, P, D), and wanted, (G, P, O), some samples at a time: patches take much memory."""
    if call.kind == "linear":
        yield x.reshape(1, -1, x.shape[-1]), want.reshape(1, -1, want.shape[-1])
        return
    (top, left), stride, dilation = (call.attrs[n] for n in ("padding", "stride", "dilation"))
    padded = np.pad(x, ((0, 0), (0, 0), (top, top), (left, left)))
    window = tuple((k - 1) * d + 1 for k, d in zip(shape[-2:], dilation, strict=True))
    groups = shape[0] if len(shape) == 5 else 1
    size = want.shape[2] * want.shape[3]
    kept = np.arange(0, size, spacing(want, call, places))
    several = max(1, _ROWS // len(kept))
    for start in range(0, len(x), several):
        part = slice(start, start + several)
        seen = sliding_window_view(padded[part], window, axis=(2, 3))  # type: ignore[call-overload]
        seen = seen[:, :, :: stride[0], :: stride[1], :: dilation[0], :: dilation[1]]
        seen = seen[:, :, kept // want.shape[3], kept % want.shape[3]]
        n, c, p, *kernel = seen.shape
        read = seen.reshape(n, groups, c // groups, p, *kernel).transpose(1, 0, 3, 2, 4, 5)
        out = want[part].reshape(n, groups, -1, size)[..., kept].transpose(1, 0, 3, 2)
        yield read.reshape(groups, n * p, -1), out.reshape(groups, n * p, -1)


def rounded(
    rows: np.ndarray,
    hessians: list[np.ndarray],
    scale: np.ndarray,
    zero: np.ndarray,
    qparams: QParams,
    damp: float,
) -> np.ndarray:
    """The rows on their grids, so that what they compute changes little.

    Args:
        rows: float64 (O, D).
        hessians: float64, of each of the `parts` of the columns, which are rounded together.
        scale, zero: of each row, float64 (O, 1).
        qparams: whose scheme it is.
        damp: as in `Gptq`.
    """
    pairs = zip(parts(rows.shape[1]), hessians, strict=True)
    found = [_together(rows[:, p], hessian, (scale, zero, qparams), damp) for p, hessian in pairs]
    return np.concatenate(found, axis=1)


def _together(
    rows: np.ndarray, hessian: np.ndarray, grid: tuple[np.ndarray, np.ndarray, QParams], damp: float
) -> np.ndarray:
    diagonal = np.diagonal(hessian)
    if not diagonal.any():
        return nearest(rows, *grid)
    # The inputs that count most are rounded first, while many others can make up for them.
    order = np.argsort(-diagonal, kind="stable")
    upper = _damped_factor(hessian[np.ix_(order, order)], damp)
    # Turned, so that an input's weights lie side by side.
    free, result = np.ascontiguousarray(rows[:, order].T), np.empty_like(rows)
    scale, zero, qparams = grid
    turned = scale.reshape(1, -1), zero.reshape(1, -1), qparams
    for start in range(0, len(order), _BLOCK):
        stop = min(start + _BLOCK, len(order))
        errors = np.empty((stop - start, len(rows)))
        for i in range(start, stop):
            near = nearest(free[i : i + 1], *turned)[0]
            result[:, order[i]] = near
            error = errors[i - start] = (free[i] - near) / upper[i, i]
            free[i + 1 : stop] -= upper[i, i + 1 : stop, None] * error
        free[stop:] -= upper[start:stop, stop:].T @ errors
    return result


def _damped_factor(matrix: np.ndarray, damp: float) -> np.ndarray:
    """The `_factor` of a matrix with ``damp`` of its mean diagonal added to the diagonal, or more if need be.

    About the means, what a layer reads of constant inputs is nothing but rounding errors of the sums, which
    need not be positive definite: the damping grows until the factor exists.
    """
    added = damp * float(np.abs(np.diagonal(matrix)).mean())
    while True:
        try:
            return _factor(matrix + added * np.eye(len(matrix)))
        except LinAlgError:
            added *= 10.0


def _factor(matrix: np.ndarray) -> np.ndarray:
    """The upper Cholesky factor of the inverse, ``U^T U``: the inverse of R where ``R R^T`` is the matrix.

    R is upper too: turned about both diagonals it is the Cholesky factor of the matrix turned likewise.
    """
    turned = cholesky(matrix[::-1, ::-1], lower=True)
    inverse, _ = dtrtri(turned[::-1, ::-1])
    return np.ascontiguousarray(inverse)


def nearest(rows: np.ndarray, scale: np.ndarray, zero: np.ndarray, qparams: QParams) -> np.ndarray:
    """The rows (O, D) rounded to nearest, with the scale and zero point of each, which broadcast to them."""
    scheme = qparams.scheme
    integers = round_to(rows / scale, scheme.rounding) + zero
    return np.asarray((np.clip(integers, scheme.qmin, scheme.qmax) - zero) * scale)
