"""Block reconstruction with dropped quantization: learns roundings and activation scales of a block together.

Layers of a block correct each other's errors, so the error is measured at its output (Li et al. 2021, "BRECQ:
Pushing the Limit of Post-Training Quantization by Block Reconstruction"). In every step each value of an
activation stays unrounded with the probability ``drop``, inside the block and at its input. So the result
does not overfit to the rounding noise of the calibration data. Source: Wei et al. 2022, "QDrop: Randomly
Dropping Quantization for Extremely Low-bit Post-Training Quantization". Scales follow the gradient of LSQ
(Esser et al. 2020, eq. 3).

A block starts from the roundings that each of its layers learns on its own output (``warm``). Blocks that
start from the fractions are less accurate than `adaround` (docs/measured/accuracy.md).
"""

from __future__ import annotations

import dataclasses
from typing import Annotated, ClassVar

from pydantic import Field

from qtrace.graph.types import TracedModule
from qtrace.plugins.options import Bool, Float, Int
from qtrace.ptq.layers.quantized import QuantizedLayer
from qtrace.ptq.rounding.block_run import Block, DescentSettings, structural_blocks
from qtrace.ptq.rounding.blockwise import LearnedRounding

__all__ = ["Reconstruct"]


class Reconstruct(LearnedRounding):
    """Learns the structural blocks of a graph: the exprs between bottleneck tensors.

    Attributes:
        drop: the share of activations that stay unrounded in a step; 0 for none (BRECQ).
        scale_lr: learning rate of activation scales, as a share of each scale; 0 keeps them.
        warm: whether each layer is learned by itself before its block, as in ``adaround``.
        max_layers: a block with more layers is learned layer by layer.
    """

    instead_of: ClassVar[tuple[str, ...]] = ("adaround",)

    drop: Annotated[Float, Field(ge=0, lt=1)] = 0.5
    scale_lr: Annotated[Float, Field(ge=0)] = 1e-3
    warm: Bool = True
    max_layers: Annotated[Int, Field(gt=0)] = 12

    def blocks(self, model: TracedModule, layers: list[QuantizedLayer]) -> list[Block]:
        return structural_blocks(model, layers, self.max_layers)

    def learns_layers_first(self, block: Block) -> bool:
        return self.warm and len(block.layers) > 1

    def settings(self) -> DescentSettings:
        return dataclasses.replace(LearnedRounding.settings(self), drop=self.drop, scale_lr=self.scale_lr)
