"""Second-order rounding: moments of inputs, roundings that compensate errors, and ridge regression."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace

import numpy as np
from scipy.linalg import LinAlgError, cho_factor, cho_solve, cholesky

from qtrace.numerics import round_to
from qtrace.process import Together
from qtrace.scheme import QParams

# Columns that are rounded before the others are updated, in one large matrix product; and those before the
# others of their block are: one by one, updates are bound by memory.
_BLOCK_COLUMNS = 128
_STEP_COLUMNS = 16

# Inputs that compensate each other. It limits the cost of a factorization, which grows with the cube.
MAX_JOINT_INPUTS = 1152

# Bound of the relative error of centered products, since products are summed in float32.
_CENTERING_ERROR = 1e-5


@dataclass(frozen=True)
class SecondMoments:
    """Sums over the positions of a layer's windows, for G groups of D inputs and O outputs.

    Attributes:
        count: number of positions.
        read: the sum of the inputs, float64 (G, D).
        missed: the sum of the residuals: reference minus output, (G, O).
        square: the sum of the products of the inputs with each other, (G, D, D).
        cross: the sum of the products of inputs and residuals, (G, D, O).
    """

    count: int
    read: np.ndarray
    missed: np.ndarray
    square: np.ndarray
    cross: np.ndarray

    @classmethod
    def of(cls, read: np.ndarray, missed: np.ndarray) -> SecondMoments:
        """Sums inputs (G, P, D) and residuals (G, P, O) over P positions."""
        turned = read.transpose(0, 2, 1)
        sums = (part.sum(axis=1, dtype=np.float64) for part in (read, missed))
        return cls(read.shape[1], *sums, *((turned @ part).astype(np.float64) for part in (read, missed)))

    def with_rows(self, read: np.ndarray, missed: np.ndarray, weight: float) -> SecondMoments:
        """Adds ``weight`` times the moments of further rows, in the arrays of this object: it is used up."""
        if weight != 1:
            return self + weight * SecondMoments.of(read, missed)
        turned = read.transpose(0, 2, 1)
        for products, part in ((self.square, read), (self.cross, missed)):
            products += turned @ part
        first, second = (part.sum(axis=1, dtype=np.float64) for part in (read, missed))
        sums = (self.read + first, self.missed + second)
        return SecondMoments(self.count + read.shape[1], *sums, self.square, self.cross)

    def __add__(self, other: SecondMoments) -> SecondMoments:
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return SecondMoments(*(first + second for first, second in pairs))

    def __rmul__(self, factor: float) -> SecondMoments:
        return SecondMoments(*(factor * value for value in vars(self).values()))

    def centered(self) -> SecondMoments:
        """Returns the moments about the means, which a bias takes."""
        mean = self.read / max(self.count, 1)
        square = self.square - mean[:, :, None] * self.read[:, None, :]
        add_to_diagonals(square, _CENTERING_ERROR * (mean * self.read).mean(axis=1))
        cross = self.cross - mean[:, :, None] * self.missed[:, None, :]
        return SecondMoments(self.count, 0 * self.read, 0 * self.missed, square, cross)


def add_to_diagonals(matrices: np.ndarray, values: np.ndarray) -> None:
    """Adds a value (G,) to the diagonal of each of the matrices (G, D, D)."""
    index = np.arange(matrices.shape[-1])
    matrices[:, index, index] += values[:, None]


Grid = tuple[np.ndarray, np.ndarray, QParams]
"""Scale and zero point of each row, float64 (rows, 1), or of each weight, and their parameters."""


def added(first: list[SecondMoments], second: list[SecondMoments]) -> list[SecondMoments]:
    """Adds the moments of each part; ``first`` may be empty."""
    return [a + b for a, b in zip(first, second, strict=True)] if first else second


def parts(inputs: int) -> list[slice]:
    """Splits the inputs of a layer into neighbours that are rounded together."""
    starts = range(0, max(inputs, 1), MAX_JOINT_INPUTS)
    return [slice(start, min(start + MAX_JOINT_INPUTS, inputs)) for start in starts]


def grouped(weight: np.ndarray) -> np.ndarray:
    """Returns a weight as (G, O, D); G is 1 unless it is the weight of a grouped convolution, with 5 axes."""
    groups = weight.shape[0] if weight.ndim == 5 else 1
    inputs = weight.shape[-3:] if weight.ndim > 2 else weight.shape[-1:]
    return weight.reshape(groups, -1, int(np.prod(inputs)))


def rounded(
    rows: np.ndarray,
    hessians: list[np.ndarray],
    scale: np.ndarray,
    zero: np.ndarray,
    qparams: QParams,
    damp: float,
    together: Together | None = None,
) -> np.ndarray:
    """Rounds the rows of a weight so that their outputs change little.

    Args:
        rows: the rows of the weight, float64 (O, D).
        hessians: the second moments, float64, of each of the `parts` of the columns.
        scale: the scale of each row, float64 (O, 1), or of each weight, (O, D).
        zero: the zero points, of the shape of ``scale``.
        qparams: the parameters with the scheme of the weight.
        damp: the damping of `Gptq`.
        together: the threads that compute; None for this one.
    """

    def run(pair: tuple[slice, np.ndarray]) -> np.ndarray:
        part, hessian = pair
        grid = (_columns(scale, part), _columns(zero, part), qparams)
        return _round_part(rows[:, part], hessian, grid, damp)

    pairs = zip(parts(rows.shape[1]), hessians, strict=True)
    return np.concatenate((together or Together(1)).map(run, pairs), axis=1)


def _columns(grid: np.ndarray, part: slice | np.ndarray) -> np.ndarray:
    """Returns the columns ``part`` of scales or zero points; all of them if a row has one."""
    return grid if grid.shape[1] == 1 else grid[:, part]


def _round_part(rows: np.ndarray, hessian: np.ndarray, grid: Grid, damp: float) -> np.ndarray:
    diagonal = np.diagonal(hessian)
    if not diagonal.any():
        return nearest(rows, *grid)
    # The inputs that count most are rounded first, while many others can compensate their errors.
    order = np.argsort(-diagonal, kind="stable")
    shares = _damped_shares(hessian[np.ix_(order, order)], damp)
    # Transposed, so that the weights of an input are contiguous.
    exact = np.ascontiguousarray(rows[:, order].T)
    free, near, errors = exact.copy(), np.empty_like(exact), np.empty_like(exact)
    scale, zero = (np.ascontiguousarray(_columns(part, order).T) for part in grid[:2])
    for start in range(0, len(order), _BLOCK_COLUMNS):
        stop = min(start + _BLOCK_COLUMNS, len(order))
        for first in range(start, stop, _STEP_COLUMNS):
            last = min(first + _STEP_COLUMNS, stop)
            for i in range(first, last):
                at = i if len(scale) > 1 else 0
                near[i] = nearest(free[i], scale[at], zero[at], grid[2])
                np.subtract(exact[i], near[i], out=errors[i])
                free[i + 1 : last] += shares[i, i + 1 : last, None] * errors[i]
            free[last:stop] += shares[first:last, last:stop].T @ errors[first:last]
        free[stop:] += shares[start:stop, stop:].T @ errors[start:stop]
    result = np.empty_like(rows)
    result[:, order] = near.T
    return result


def rounded_groups(rows: np.ndarray, hessians: np.ndarray, grid: Grid, damp: float) -> np.ndarray:
    """Rounds the rows of many groups at once, as `rounded` does for one group with few inputs.

    Args:
        rows: the rows of the weight, float64 (G, O, D).
        hessians: the second moments of each group, float64 (G, D, D).
        grid: scale and zero point of each row, float64 (G * O, 1), and their parameters.
        damp: the damping of `Gptq`.
    """
    groups, outputs, inputs = rows.shape
    diagonal = np.diagonal(hessians, axis1=1, axis2=2)
    used = diagonal.any(axis=1)
    # Inputs that are always 0 compensate nothing: rounding to nearest, which the unit matrix gives.
    squares = np.where(used[:, None, None], hessians, np.eye(inputs))
    order = np.argsort(-np.diagonal(squares, axis1=1, axis2=2), axis=1, kind="stable")
    squares = np.take_along_axis(np.take_along_axis(squares, order[:, :, None], 1), order[:, None, :], 2)
    shares = _all_damped_shares(squares, damp)
    exact = np.take_along_axis(rows, order[:, None, :], 2).transpose(2, 0, 1)
    free = exact.copy()
    scale, zero = (part.reshape(groups, outputs) for part in grid[:2])
    result = np.empty_like(free)
    for i in range(inputs):
        result[i] = nearest(free[i], scale, zero, grid[2])
        free[i + 1 :] += shares[:, i, i + 1 :].T[:, :, None] * (exact[i] - result[i])
    new = np.empty_like(rows)
    np.put_along_axis(new, order[:, None, :].repeat(outputs, 1), result.transpose(1, 2, 0), 2)
    return new


def _all_damped_shares(matrices: np.ndarray, damp: float) -> np.ndarray:
    """Computes `_damped_shares` of many small matrices (G, D, D)."""
    damped = matrices.copy()
    add_to_diagonals(damped, damp * np.abs(np.diagonal(matrices, axis1=1, axis2=2)).mean(axis=1))
    try:
        factors = np.linalg.cholesky(damped[:, ::-1, ::-1])[:, ::-1, ::-1]
    except np.linalg.LinAlgError:
        return np.stack([_damped_shares(matrix, damp) for matrix in matrices])
    return np.asarray(factors / np.diagonal(factors, axis1=1, axis2=2)[:, None, :])


def _damped_shares(matrix: np.ndarray, damp: float) -> np.ndarray:
    """Computes `_shares` of a matrix with ``damp`` of its mean diagonal added to the diagonal, or more.

    The centered moments of constant inputs are rounding errors of the sums, and need not be positive
    definite. The damping then grows until the factor exists.
    """
    shift = damp * float(np.abs(np.diagonal(matrix)).mean())
    while True:
        damped = matrix.copy()
        add_to_diagonals(damped[None], np.array([shift]))
        try:
            return _shares(damped)
        except LinAlgError:
            shift *= 10.0


def _shares(matrix: np.ndarray) -> np.ndarray:
    """Computes what part of the error of an input i each input j after it takes over, (D, D) at (i, j > i).

    With ``matrix = R R^T`` for an upper triangular R they are ``R_ij / R_jj``. They weigh errors against the
    exact weights, where GPTQ weighs those against the moved ones by the factor of the inverse matrix. Both
    round alike (Chee et al. 2023, "QuIP: 2-Bit Quantization of Large Language Models With Guarantees",
    theorem 6). With rows and columns reversed, R is the Cholesky factor of the reversed matrix.
    """
    reversed_factor = cholesky(matrix.T[::-1, ::-1], lower=True, check_finite=False)
    factor = reversed_factor[::-1, ::-1]
    return np.ascontiguousarray(factor) / np.diagonal(factor)


def nearest(rows: np.ndarray, scale: np.ndarray, zero: np.ndarray, qparams: QParams) -> np.ndarray:
    """Rounds weights to nearest; ``scale`` and ``zero`` broadcast to them."""
    scheme = qparams.scheme
    integers = round_to(rows / scale, scheme.rounding) + zero
    return np.asarray((np.clip(integers, scheme.qmin, scheme.qmax) - zero) * scale)


# As shares of the mean of the diagonal; the first ones change hardly anything.
DAMPINGS = (10.0, 1.0, 0.1, 0.01, 0.001, 0.0001)

# Outputs whose errors choose the damping, which is one number for all: evenly spaced ones.
_DECIDING = 64


def correction(
    first: SecondMoments, second: SecondMoments, together: Together | None = None
) -> tuple[np.ndarray, float | None]:
    """Computes a correction of a weight, with the damping that is best in two-fold cross-validation.

    The error falls with the damping and rises again where it is too small: it is followed from the middle of
    `DAMPINGS` to its lowest point.

    Args:
        first: the sums of one half of the samples, about the means if a bias takes these.
        second: the sums of the other half.
        together: the threads that compute; None for this one.

    Returns:
        The correction, float64 (G, D, O), fitted to both halves, and its damping; zeros and None if the best
        damping does not lower the error of the outputs that decide.
    """
    together = together or Together(1)
    some = [_some_outputs(sums) for sums in (first, second)]
    pairs = (some, some[::-1])

    @functools.cache
    def error(index: int) -> float:
        return sum(together.map(functools.partial(_crossed, DAMPINGS[index]), pairs))

    best = (len(DAMPINGS) - 1) // 2
    while best > 0 and math.isinf(error(best)):  # larger ones may not be
        best -= 1
    for step in (1, -1):
        while 0 <= best + step < len(DAMPINGS) and error(best + step) < error(best):
            best += step
    both = first + second
    if not error(best) < 0:
        return np.zeros_like(both.cross), None
    return ridge(both, DAMPINGS[best]), DAMPINGS[best]


def _some_outputs(sums: SecondMoments) -> SecondMoments:
    """Returns the moments of the outputs of each group that choose the damping."""
    apart = max(1, -(-sums.cross.shape[2] // _DECIDING))
    return replace(sums, missed=sums.missed[:, ::apart], cross=sums.cross[:, :, ::apart])


def ridge(sums: SecondMoments, damping: float) -> np.ndarray:
    """Solves for D (G, D, O) that minimizes ``|missed - D read|^2 + damping * mean(diagonal) |D|^2``.

    The damping grows where it is too small for the rounding errors of the sums: the centered moments of
    inputs that hardly change consist of these, and need not be positive definite.
    """
    while True:
        try:
            return _solve(sums, damping)
        except LinAlgError:
            damping *= 10.0


def _solve(sums: SecondMoments, damping: float) -> np.ndarray:
    """Solves as `ridge` does.

    Raises:
        LinAlgError: when a matrix is not positive definite.
    """
    size = sums.square.shape[-1]
    power = np.trace(sums.square, axis1=1, axis2=2) / size
    damped = sums.square.copy()
    add_to_diagonals(damped, np.where(power > 0, power, 1.0) * damping)
    if len(damped) > 1:  # many small systems, of the groups of a convolution
        return np.asarray(np.linalg.solve(damped, sums.cross))
    pairs = zip(damped, sums.cross, strict=True)
    solved = [cho_solve(cho_factor(matrix, lower=True), right) for matrix, right in pairs]
    return np.stack(solved) if solved else np.zeros_like(sums.cross)


def _crossed(damping: float, halves: tuple[SecondMoments, SecondMoments]) -> float:
    """Returns the growth of the squared error on one half by a correction that is fitted to the other one.

    It is infinite where the damping is too small for the rounding errors of the sums; see `ridge`.
    """
    fitted, other = halves
    try:
        return _change(_solve(fitted, damping), other)
    except LinAlgError:
        return math.inf


def _change(fitted: np.ndarray, other: SecondMoments) -> float:
    """Returns the growth of the squared error on the samples of ``other``."""
    return float(np.sum(fitted * (other.square @ fitted - 2 * other.cross)))
