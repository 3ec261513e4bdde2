"""The algorithms that change the float graph without changing what it computes.

See `qtrace.preparation.passes.folding` for what is folded.
"""

from __future__ import annotations

from typing import ClassVar

from qtrace.plugins.options import Bool
from qtrace.preparation.passes.absorb import absorb
from qtrace.preparation.passes.base import PassResult
from qtrace.preparation.passes.folding import fuse_bn, fuse_scale
from qtrace.preparation.passes.reparameterize import reparameterize
from qtrace.ptq.base import FloatAlgorithm, FloatTask, Report, report_of

__all__ = [
    "Absorb",
    "FuseBn",
    "Reparameterize",
]


# Absorbs constant factors and sums into the layers around them; see `qtrace.preparation.passes.absorb`.


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


# Folds BatchNorm, and stored scales and shifts, into the layer before them.


class FuseBn(FloatAlgorithm):
    """Folds every BatchNorm that directly follows a layer (Jacob et al. 2018, section 3.2).

    A stored scale and shift after a layer, such as PP-LCNetV3's LearnableAffineBlock, is folded, too.
    """

    def apply(self, task: FloatTask) -> Report:
        norms = fuse_bn(task.model)
        task.norms.update(norms.norms)
        scales = fuse_scale(task.model, task.norms)
        task.norms.update(scales.norms)
        both = PassResult((*norms.changed, *scales.changed), (*norms.left, *scales.left))
        return report_of(both, "the graph has no BatchNorm")


# Merges parallel convolutions whose results are added; see `qtrace.preparation.passes.reparameterize`.


class Reparameterize(FloatAlgorithm):
    """Merges parallel convolutions and BatchNorms of one tensor (Ding et al. 2021, section 3.3)."""

    after: ClassVar[tuple[str, ...]] = ("fuse_bn",)
    reason: ClassVar[str] = "it merges convolutions once their BatchNorms are folded"

    def apply(self, task: FloatTask) -> Report:
        result = reparameterize(task.model)
        for changed in result.changed:
            task.norms.pop(changed.partition(":")[0], None)
        return report_of(result, "the graph adds no convolutions of one tensor")
