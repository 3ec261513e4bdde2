"""Rounding that is learned: up or down for each weight, relaxed to a number between 0 and 1.

A weight becomes ``s * clip(floor(w / s) + h(V), qmin - z, qmax - z)`` with the rectified sigmoid
``h(V) = clip(sigmoid(V) * (zeta - gamma) + gamma, 0, 1)``, zeta = 1.1, gamma = -0.1, and the regulariser
``sum(1 - |2 h(V) - 1|**beta)`` drives every h to 0 or 1 as beta falls (Nagel et al. 2020, "Up or Down?
Adaptive Rounding for Post-Training Quantization", eq. 22 to 25). All in numpy: the gradient of the loss with
respect to the weight comes from elsewhere.
"""

from __future__ import annotations

import math

import numpy as np

__all__ = ["SoftRounding", "annealed"]

_ZETA, _GAMMA = 1.1, -0.1
_SPAN = _ZETA - _GAMMA


class SoftRounding:
    """The roundings of one weight.

    Args:
        weight: the float weight, any shape.
        scale: positive, broadcastable to ``weight``.
        zero_point: integers, likewise.
        bounds: the smallest and the largest integer.

    Attributes:
        v: what is learned, of the shape of ``weight``; at first h(v) is the fraction of ``w / s``.
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
        """Starts from roundings that are known instead of the fractions.

        Args:
            weight: on the grid, each value rounded up or down.
            certain: h where it was rounded up, and 1 - h where it was rounded down: decided values would not
                learn, since h has no gradient at 0 and 1.
        """
        up = np.where(weight / self.scale - self.low > 0.5, certain, 1.0 - certain)
        self.v = np.log((up - _GAMMA) / (_ZETA - up)).astype(self.v.dtype)

    def up(self) -> np.ndarray:
        """h(V): how far each weight is rounded up, 0 to 1."""
        return np.clip(_SPAN * _sigmoid(self.v) + _GAMMA, 0.0, 1.0)

    def soft(self) -> np.ndarray:
        """The weight with its roundings as they are."""
        return self._weight(self.up())

    def hard(self) -> np.ndarray:
        """The weight with every rounding decided: integers times the scale."""
        return self._weight((self.up() >= 0.5).astype(self.v.dtype))

    def _weight(self, up: np.ndarray) -> np.ndarray:
        return np.asarray(np.clip(self.low + up, *self.bounds) * self.scale).astype(self.v.dtype)

    def gradient(self, of_weight: np.ndarray, beta: float, strength: float) -> np.ndarray:
        """The gradient of loss plus regulariser with respect to `v`.

        Args:
            of_weight: the gradient of the loss with respect to `soft`.
            beta: the exponent of the regulariser.
            strength: its factor; 0 for none.
        """
        sigmoid = _sigmoid(self.v)
        up = _SPAN * sigmoid + _GAMMA
        inside = (up > 0.0) & (up < 1.0)
        moves = (self.low + up >= self.bounds[0]) & (self.low + up <= self.bounds[1])
        total = of_weight * self.scale * moves
        if strength:
            away = 2.0 * up - 1.0
            total = total - strength * 2.0 * beta * np.abs(away) ** (beta - 1.0) * np.sign(away)
        return np.asarray(total * (inside * _SPAN * sigmoid * (1.0 - sigmoid))).astype(self.v.dtype)

    def regulariser(self, beta: float) -> float:
        """``sum(1 - |2 h - 1|**beta)``."""
        return float(np.sum(1.0 - np.abs(2.0 * self.up() - 1.0) ** beta))


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return np.asarray(1.0 / (1.0 + np.exp(-x)))


def annealed(done: float, warmup: float, beta: tuple[float, float]) -> float | None:
    """The exponent of the regulariser: falls along a cosine; None before it sets in.

    Args:
        done: the share of the iterations that are done, 0 to 1.
        warmup: the share without regulariser.
        beta: the exponent at its start and at the end.
    """
    if done < warmup:
        return None
    part = (done - warmup) / max(1.0 - warmup, 1e-9)
    return beta[1] + 0.5 * (beta[0] - beta[1]) * (1.0 + math.cos(math.pi * part))
