"""A block of a prepared graph in torch: the loss of a step of learned rounding, and its gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from megengine.module import Module

from qtrace.extras.torch.learning.engine import TorchEngine
from qtrace.extras.torch.learning.fake_quants import quant_dequant, shaped, stored_parameters
from qtrace.fakequant.base import FakeQuant
from qtrace.fakequant.kernels import Learn, Levels
from qtrace.graph.types import Node
from qtrace.graph.walk import owner
from qtrace.ptq.rounding.block_run import BlockData, BlockGradients, BlockRun, DescentSettings


class TorchGradients(BlockGradients):
    """Computes steps in torch.

    Args:
        engine: the engine, on the whole graph.
        run, data, settings, unit: as for `BlockGradients`.
    """

    def __init__(
        self, engine: TorchEngine, run: BlockRun, data: BlockData, settings: DescentSettings, unit: float
    ) -> None:
        super().__init__(run, data, settings, unit, engine, self._exits, _tensor)
        self.graph, self._fixed = engine.graph, dict[Node, Any]()

    def _exits(self, entries: Sequence[Any], masks: Callable[[Any], Any] | None) -> list[Any]:
        """Computes the exits of the block as `BlockRun.forward` does."""
        block = self.run.block
        weights = {state.key: self.graph.leaf(state.parameter) for state in self.run.layers}
        values: dict[Node, Any] = {**dict(zip(block.entries, entries, strict=True)), **weights}
        for expr in block.exprs:
            inputs = [values[node] if node in values else self._outside(node) for node in expr.inputs]
            module = owner(expr)
            if isinstance(module, FakeQuant):
                results: Sequence[Any] = [self._round(module, inputs[1], masks)]
            else:
                results = self.graph.run_expr(expr, inputs) or ()
            values.update(zip(expr.outputs, results, strict=True))
        return [values[node] for node in block.exits]

    def _outside(self, node: Node) -> Any:
        """Returns what the block reads besides its entries: modules and values of only parameters."""
        if node not in self._fixed:
            value = self.run.twins.quantized.value(node, 0)
            fixed = isinstance(value, (Module, int, float, type(None)))
            self._fixed[node] = value if fixed else self.graph.constant(value)
        return self._fixed[node]

    def _round(self, module: FakeQuant, x: Any, masks: Callable[[Any], Any] | None) -> Any:
        scale, zero_point = stored_parameters(module, self.graph.leaf)
        if id(module) in self.run.scales:
            scale = self.graph.leaf(self.run.scales[id(module)][1])
        levels, learn = Levels.of(module.scheme), Learn() if scale.requires_grad else None
        values = shaped(module, x, self.graph.leaf)
        y = quant_dequant(
            values, scale.reshape(module.shape), zero_point.reshape(module.shape), levels, learn
        )
        return y if masks is None else x + (y - x) * masks(x)


def _tensor(values: np.ndarray) -> Any:
    """The tensor of torch for an array; torch takes none that is read only, such as a view of a batch."""
    return torch.from_numpy(np.require(values, requirements="W"))
