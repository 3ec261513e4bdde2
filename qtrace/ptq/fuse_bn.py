"""Folds BatchNorm, and stored scales and shifts, into the layer before them.

See `qtrace.preparation.passes.folding` and `qtrace.preparation.passes.folding`.
"""

from __future__ import annotations

from qtrace.preparation.passes.base import PassResult
from qtrace.preparation.passes.folding import fuse_bn, fuse_scale
from qtrace.ptq.base import FloatAlgorithm, FloatTask, Report, report_of

__all__ = ["FuseBn"]


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
