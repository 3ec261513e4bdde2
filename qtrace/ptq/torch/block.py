"""A block of a prepared graph in torch: the loss of a step of learned rounding, and its gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from megengine import Parameter
from megengine.module import Module

from qtrace.fakequant.base import FakeQuant
from qtrace.fakequant.kernels.kernel import Learn, Levels
from qtrace.graph.types import Node
from qtrace.graph.walk import owner
from qtrace.ptq.learning.block_run import BlockData, BlockRun
from qtrace.ptq.learning.descent import DescentSettings, draw_mask, draw_step
from qtrace.ptq.torch.fake_quants import shaped, stored_parameters
from qtrace.ptq.torch.graph import TorchGraph
from qtrace.ptq.torch.rounding import quant_dequant

__all__ = ["TorchGradients"]


class TorchGradients:
    """Computes loss and gradients of one step; see `qtrace.ptq.learning.descent.Gradients`.

    Args:
        graph: the whole graph in torch.
        run: the block with its parameters.
        data: the inputs of the block and the references of its outputs.
        settings: the settings of the descent.
        parameters: the parameters of MegEngine whose gradients are computed, with the values of the moment.
        unit: the mean squared error that counts as 1.
    """

    def __init__(
        self,
        graph: TorchGraph,
        run: BlockRun,
        data: BlockData,
        settings: DescentSettings,
        parameters: Sequence[Parameter],
        unit: float,
    ) -> None:
        self.graph, self.run, self.data, self.settings = graph, run, data, settings
        self.parameters, self.unit = parameters, unit
        self._fixed: dict[Node, Any] = {}

    def __call__(self, rng: np.random.Generator, drop: float) -> tuple[float, list[np.ndarray]]:
        """Draws images and masks; returns the loss and the gradient of every parameter."""
        entries, references = draw_step(self.data, self.settings, rng, drop)
        leaves = {id(p): torch.from_numpy(p.numpy().copy()).requires_grad_() for p in self.parameters}
        masks = (lambda x: torch.from_numpy(draw_mask(rng, x.shape, drop))) if self.settings.drop else None
        exits = self._forward([_tensor(value) for value in entries], leaves, masks)
        errors = [
            torch.sum((value - _tensor(reference)) ** 2)
            for value, reference in zip(exits, references, strict=True)
        ]
        loss = sum(errors[1:], errors[0]) / (self.unit * sum(math.prod(r.shape) for r in references))
        loss.backward()
        gradients = [
            np.zeros(p.shape, np.float32) if (grad := leaves[id(p)].grad) is None else grad.numpy()
            for p in self.parameters
        ]
        return float(loss.detach()), gradients

    def _forward(
        self, entries: Sequence[Any], leaves: dict[int, Any], masks: Callable[[Any], Any] | None
    ) -> list[Any]:
        """Computes the exits of the block as `BlockRun.forward` does."""
        block = self.run.block
        weights = {state.key: leaves[id(state.parameter)] for state in self.run.layers}
        values: dict[Node, Any] = {**dict(zip(block.entries, entries, strict=True)), **weights}
        for expr in block.exprs:
            inputs = [values[node] if node in values else self._outside(node) for node in expr.inputs]
            module = owner(expr)
            if isinstance(module, FakeQuant):
                results: Sequence[Any] = [self._round(module, inputs[1], leaves, masks)]
            else:
                results = self.graph.run_expr(expr, inputs) or ()
            values.update(zip(expr.outputs, results, strict=True))
        return [values[node] for node in block.exits]

    def _outside(self, node: Node) -> Any:
        """Returns what the block reads besides its entries: modules and values of parameters alone."""
        if node not in self._fixed:
            value = self.run.twins.quantized.value(node, 0)
            fixed = isinstance(value, (Module, int, float, type(None)))
            self._fixed[node] = value if fixed else self.graph.constant(value)
        return self._fixed[node]

    def _round(
        self, module: FakeQuant, x: Any, leaves: dict[int, Any], masks: Callable[[Any], Any] | None
    ) -> Any:
        learned = self.run.scales.get(id(module))
        learns = learned is not None and id(learned[1]) in leaves
        scale, zero_point = stored_parameters(module, self.graph.constant)
        if learned is not None:
            scale = leaves[id(learned[1])] if learns else self.graph.constant(learned[1])
        levels, learn = Levels.of(module.scheme), Learn() if learns else None
        values = shaped(module, x, self.graph.constant)
        y = quant_dequant(
            values, scale.reshape(module.shape), zero_point.reshape(module.shape), levels, learn
        )
        return y if masks is None else x + (y - x) * masks(x)


def _tensor(values: np.ndarray) -> Any:
    """The tensor of torch for an array; torch takes none that is read only, such as a view of a batch."""
    return torch.from_numpy(np.require(values, requirements="W"))
