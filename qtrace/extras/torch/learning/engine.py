"""The engine torch: Adam, and the gradients of losses that a graph in torch computes."""

from __future__ import annotations

import math

import numpy as np
import torch

from qtrace.extras.torch.learning.fake_quants import row_slices
from qtrace.extras.torch.learning.graph import TorchGraph
from qtrace.graph.types import TracedModule
from qtrace.learning import Adam, LearningEngine, LearningStep

__all__ = ["TorchAdam", "TorchEngine", "torch_engine"]

_FEW = 2**12  # values for which numpy's calls, which are shorter, take less time


class TorchAdam(Adam):
    """Adam (Kingma and Ba 2015, algorithm 1) for one array, which torch changes in place."""

    def step(self, gradient: np.ndarray, factor: float = 1.0, share: float = 1.0) -> None:
        """Moves the value by one step against ``gradient``.

        Args:
            gradient: the gradient.
            factor: the factor of the learning rate.
            share: the factor of the gradient.
        """
        if self.value.size <= _FEW:
            super().step(gradient, factor, share)
            return
        self.steps += 1
        arrays = (self.value, self.first, self.second, gradient, np.float32(self.lr))
        value, first, second, slope, lr = (torch.from_numpy(np.asarray(array)) for array in arrays)
        rate, root = factor / (1.0 - 0.9**self.steps), math.sqrt(1.0 - 0.999**self.steps)
        by_row = lr.ndim == value.ndim > 0 and lr.shape[0] > 1
        for rows in row_slices(value):
            part = slope[rows] if share == 1.0 else slope[rows] * share
            first[rows].lerp_(part, 0.1)
            second[rows].mul_(0.999).addcmul_(part, part, value=0.001)
            size = second[rows].sqrt().div_(root).add_(1e-8)
            value[rows].sub_((first[rows] * (lr[rows] if by_row else lr)).div_(size), alpha=rate)

    def is_finite(self) -> bool:
        """Returns whether all values are numbers; a sum of them tells, unless it overflows."""
        if self.value.size <= _FEW:
            return super().is_finite()
        value = torch.from_numpy(np.asarray(self.value))
        return math.isfinite(value.sum().item()) or bool(value.isfinite().all())

    @staticmethod
    def square_sum(values: np.ndarray, unit: np.ndarray) -> float:
        """Returns the sum of the squares of ``values * unit``; each row is summed in float32."""
        if values.size <= _FEW:
            return Adam.square_sum(values, unit)
        rows, scale = torch.from_numpy(np.asarray(values)), torch.from_numpy(np.asarray(unit))
        if scale.numel() > 1 and scale.numel() != scale.shape[0]:
            rows, scale = rows * scale, torch.ones(())
        rows = rows.reshape(rows.shape[0] if rows.ndim else 1, -1)
        squares = torch.linalg.vecdot(rows, rows).double() * scale.double().reshape(-1).square()
        total = squares.sum().item()
        return total if math.isfinite(total) else Adam.square_sum(values, unit)


class TorchEngine(LearningEngine):
    """Computes steps in torch.

    Args:
        graph: the graph whose parameters learn; the losses run it, or its exprs.
    """

    name = "torch"
    reads_arrays = True
    adam = TorchAdam

    def __init__(self, graph: TorchGraph) -> None:
        self.graph = graph

    def gradients(self, step: LearningStep) -> list[np.ndarray | None]:
        """Computes the losses and the gradients; see `LearningEngine`."""
        with self.graph.learning(step.parameters, step.values):
            computed = step.losses(*step.inputs)
            if computed[0].requires_grad:
                computed[0].backward()
            gradients = [self.graph.gradient(parameter) for parameter in step.parameters]
        return [*(loss.detach().numpy() for loss in computed), *gradients]


def torch_engine(model: TracedModule) -> TorchEngine:
    """Returns the engine of a calibrated graph.

    Raises:
        UnsupportedError: when an op lacks a form in torch.
    """
    return TorchEngine(TorchGraph(model))
