"""The engine torch: the gradients of losses that a graph in torch computes."""

from __future__ import annotations

import numpy as np

from qtrace.extras.torch.learning.adam import TorchAdam
from qtrace.extras.torch.learning.graph import TorchGraph
from qtrace.graph.types import TracedModule
from qtrace.learning.engine import LearningEngine, LearningStep

__all__ = ["TorchEngine", "torch_engine"]


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
