"""Learned rounding: up or down for each weight, relaxed to a number between 0 and 1.

A weight becomes ``s * clip(floor(w / s) + h(V), qmin - z, qmax - z)`` with the rectified sigmoid ``h(V) =
clip(sigmoid(V) * (zeta - gamma) + gamma, 0, 1)``, zeta = 1.1, gamma = -0.1, and the regularizer ``sum(1 - |2
h(V) - 1|**beta)`` drives every h to 0 or 1 as beta falls (Nagel et al. 2020, "Up or Down? Adaptive Rounding
for Post-Training Quantization", eq. 22 to 25). All in numpy: the caller computes the gradient of the loss
with respect to the weight.
"""

from __future__ import annotations

import math

import numpy as np

__all__ = ["SoftRounding", "anneal"]

_ZETA, _GAMMA = 1.1, -0.1
_SPAN = _ZETA - _GAMMA


class SoftRounding:
    """The roundings of one weight.

    Args:
        weight: the float weight, any shape.
        scale: positive scales, broadcastable to ``weight``.
        zero_point: integer zero points, broadcastable to ``weight``.
        bounds: the smallest and the largest integer.

    Attributes:
        v: the learned variable, of the shape of ``weight``; initially h(v) is the fraction of ``w / s``.
    """

    def __init__(
        self, weight: np.ndarray, scale: np.ndarray, zero_point: np.ndarray, bounds: tuple[int, int]
    ) -> None:
        self.scale = scale
        self.bounds = bounds[0] - zero_point, bounds[1] - zero_point
        exact = weight / scale
        self.low = np.floor(exact)
        fraction = exact - self.low
        self.v = np.log((fraction - _GAMMA) / (_ZETA - fraction)).astype(weight.dtype)

    def lean_to(self, weight: np.ndarray, certain: float = 0.8) -> None:
        """Starts from the roundings of ``weight`` instead of the fractions.

        Args:
            weight: the rounded weight.
            certain: the value of h for a weight that is rounded up; 1 - h for one that is rounded down. It is
                below 1, since h lacks a gradient at 0 and 1.
        """
        up = np.where(weight / self.scale - self.low > 0.5, certain, 1.0 - certain)
        self.v = np.log((up - _GAMMA) / (_ZETA - up)).astype(self.v.dtype)

    def up(self) -> np.ndarray:
        """Returns h(V), the share of a step by which each weight is rounded up, 0 to 1."""
        return np.clip(_SPAN * _sigmoid(self.v) + _GAMMA, 0.0, 1.0)

    def soft(self) -> np.ndarray:
        """Returns the weight with its relaxed roundings."""
        return self._weight(self.up())

    def hard(self) -> np.ndarray:
        """Returns the weight with h rounded to 0 or 1: integers times the scale."""
        return self._weight((self.up() >= 0.5).astype(self.v.dtype))

    def _weight(self, up: np.ndarray) -> np.ndarray:
        return np.asarray(np.clip(self.low + up, *self.bounds) * self.scale).astype(self.v.dtype)

    def gradient(self, of_weight: np.ndarray, beta: float, strength: float) -> np.ndarray:
        """Computes the gradient of loss plus regularizer with respect to `v`.

        Args:
            of_weight: the gradient of the loss with respect to `soft`.
            beta: the exponent of the regularizer.
            strength: the factor of the regularizer; 0 for none.
        """
        sigmoid = _sigmoid(self.v)
        up = _SPAN * sigmoid + _GAMMA
        inside = (up > 0.0) & (up < 1.0)
        moves = (self.low + up >= self.bounds[0]) & (self.low + up <= self.bounds[1])
        total = of_weight * self.scale * moves
        if strength:
            offset = 2.0 * up - 1.0
            total = total - strength * 2.0 * beta * np.abs(offset) ** (beta - 1.0) * np.sign(offset)
        return np.asarray(total * (inside * _SPAN * sigmoid * (1.0 - sigmoid))).astype(self.v.dtype)


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return np.asarray(1.0 / (1.0 + np.exp(-x)))


def anneal(progress: float, warmup: float, beta: tuple[float, float]) -> float | None:
    """Returns the exponent of the regularizer, which falls along a cosine; None before it starts.

    Args:
        progress: the share of completed iterations, 0 to 1.
        warmup: the share of iterations without the regularizer.
        beta: the exponent of the regularizer at its start and at the end.
    """
    if progress < warmup:
        return None
    fraction = (progress - warmup) / max(1.0 - warmup, 1e-9)
    return beta[1] + 0.5 * (beta[0] - beta[1]) * (1.0 + math.cos(math.pi * fraction))
