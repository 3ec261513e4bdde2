"""Adam of ``qtrace.gradients`` by torch's kernels, which use all cores, on the same numpy arrays."""

from __future__ import annotations

import numpy as np
import torch

from qtrace.gradients.adam import Adam
from qtrace.ptq.torch.rounding import row_slices

__all__ = ["TorchAdam"]


class TorchAdam(Adam):
    """Adam (Kingma and Ba 2015, algorithm 1) for one array, which torch changes in place."""

    def step(self, gradient: np.ndarray, factor: float = 1.0) -> None:
        """Moves the value by one step against ``gradient``; ``factor`` scales the learning rate."""
        self.steps += 1
        arrays = (self.value, self.first, self.second, gradient, np.float32(self.lr))
        value, first, second, slope, lr = (torch.from_numpy(np.asarray(array)) for array in arrays)
        rate, share = factor / (1.0 - 0.9**self.steps), 1.0 - 0.999**self.steps
        for rows in row_slices(value):
            part = slope[rows]
            first[rows].lerp_(part, 0.1)
            second[rows].mul_(0.999).addcmul_(part, part, value=0.001)
            size = (second[rows] / share).sqrt_().add_(1e-8)
            by_row = lr.ndim == value.ndim > 0 and lr.shape[0] > 1
            value[rows].sub_((first[rows] * (lr[rows] if by_row else lr)).div_(size), alpha=rate)

    @staticmethod
    def square_sum(values: np.ndarray) -> float:
        """Returns the sum of squares, summed in float64."""
        return float(torch.linalg.vector_norm(torch.from_numpy(np.asarray(values)), dtype=torch.float64)) ** 2
