"""AdamW on one flat vector.

MegEngine's own runs more than a thousand small kernels a step, which take as long as the backward pass here.
"""

from __future__ import annotations

from collections.abc import Sequence

import megengine as mge
import numpy as np


class Adam:
    """AdamW over some parameters, in numpy.

    Args:
        groups: each group's parameters, learning rate and weight decay.
        betas: decay rates of the means of gradients and of their squares.
    """

    def __init__(
        self,
        groups: Sequence[tuple[Sequence[mge.Parameter], float, float]],
        betas: tuple[float, float] = (0.9, 0.99),
    ) -> None:
        self.parameters = [p for group, _, _ in groups for p in group]
        sizes = [sum(int(np.prod(p.shape)) for p in group) for group, _, _ in groups]
        self.rates = np.repeat(np.array([rate for _, rate, _ in groups], np.float32), sizes)
        self.decays = np.repeat(np.array([decay for _, _, decay in groups], np.float32), sizes)
        self.values = np.concatenate([p.numpy().ravel() for p in self.parameters])
        self.mean, self.square = np.zeros_like(self.values), np.zeros_like(self.values)
        self.betas, self.steps = betas, 0

    def step(self, share: float) -> None:
        """Moves the parameters at ``share`` of the learning rate and forgets their gradients."""
        grads = [np.zeros(p.shape, np.float32) if p.grad is None else p.grad.numpy() for p in self.parameters]
        grad = np.concatenate([g.ravel() for g in grads])
        self.steps += 1
        for average, new, beta in ((self.mean, grad, self.betas[0]), (self.square, grad**2, self.betas[1])):
            average += (1 - beta) * (new - average)
        mean, square = (
            average / (1 - beta**self.steps)
            for average, beta in zip((self.mean, self.square), self.betas, strict=True)
        )
        self.values -= share * self.rates * (mean / (np.sqrt(square) + 1e-8) + self.decays * self.values)
        start = 0
        for parameter, old in zip(self.parameters, grads, strict=True):
            parameter[...] = self.values[start : start + old.size].reshape(old.shape)
            parameter.grad = None
            start += old.size
