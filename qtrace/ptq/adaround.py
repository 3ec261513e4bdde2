"""AdaRound: rounds each weight up or down so that the output of its layer changes least, layer by layer.

Rounding to nearest minimizes the error of the weights, not of the layer's output. AdaRound learns the
roundings of a layer on ``min ||f(W x) - f(W~ x~)||**2``. Here x~ is the input from the layers before, which
are rounded already, and f the activation after. Source: Nagel et al. 2020, "Up or Down? Adaptive Rounding for
Post-Training Quantization", eq. 25.
"""

from __future__ import annotations

from typing import ClassVar

from qtrace.graph.types import TracedModule
from qtrace.ptq.layers.quantized import QuantizedLayer
from qtrace.ptq.rounding.block_run import Block, single_layers
from qtrace.ptq.rounding.blockwise import LearnedRounding

__all__ = ["AdaRound"]


class AdaRound(LearnedRounding):
    """Learns the roundings of each layer on its own; scales stay."""

    instead_of: ClassVar[tuple[str, ...]] = ("reconstruct",)

    def blocks(self, model: TracedModule, layers: list[QuantizedLayer]) -> list[Block]:
        return single_layers(model, layers)
