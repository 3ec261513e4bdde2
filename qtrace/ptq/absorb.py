"""Absorbs constant factors and sums into the layers around them; see `qtrace.preparation.passes.absorb`."""

from __future__ import annotations

from typing import ClassVar

from qtrace.plugins.options import Bool
from qtrace.preparation.passes.absorb import absorb
from qtrace.ptq.base import FloatAlgorithm, FloatTask, Report, report_of

__all__ = ["Absorb"]


class Absorb(FloatAlgorithm):
    """Absorbs products, sums and BatchNorms with stored numbers into the layers around them.

    It passes through moves, poolings, concats and ReLUs, as from the ``* stride`` of a detector to its last
    convolution, and from a BatchNorm to the convolution after it.

    Attributes:
        copies: give a call of a layer whose weight other calls read too a weight of its own.
    """

    after: ClassVar[tuple[str, ...]] = ("fuse_bn",)
    reason: ClassVar[str] = "it absorbs what fuse_bn leaves"

    copies: Bool = True

    def apply(self, task: FloatTask) -> Report:
        folds = task.config.qat is None or task.config.qat.bn.fold
        result = absorb(task.model, task.norms, copies=self.copies, norms=folds)
        task.norms.update(result.norms)
        return report_of(result, "the graph has no op with stored numbers")
