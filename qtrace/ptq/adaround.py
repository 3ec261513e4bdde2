"""AdaRound: layer by layer, each weight is rounded up or down so that the layer's output keeps its values.

Rounding to nearest minimises the error of the weights, not that of what is computed from them. Here the
roundings of a layer are learned on ``min ||f(W x) - f(W~ x~)||**2``, x~ being the input from the quantized
and already rounded layers before, and f the activation behind (Nagel et al. 2020, "Up or Down? Adaptive
Rounding for Post-Training Quantization", eq. 25).
"""

from __future__ import annotations

from typing import ClassVar

from qtrace.graph.types import TracedModule
from qtrace.ptq.layers.quantized import Layer
from qtrace.ptq.learning.blocks import Block, single_layers
from qtrace.ptq.learning.learned_rounding import Recovering

__all__ = ["AdaRound"]


class AdaRound(Recovering):
    """Learns the roundings of each layer on its own; scales stay."""

    after: ClassVar[tuple[str, ...]] = ("output_cosine",)
    instead_of: ClassVar[tuple[str, ...]] = ("reconstruct",)
    reason: ClassVar[str] = "roundings are chosen once, with scales that stay"

    def blocks(self, model: TracedModule, layers: list[Layer]) -> list[Block]:
        return single_layers(model, layers)
