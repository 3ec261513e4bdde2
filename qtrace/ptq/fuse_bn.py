"""Folds BatchNorm into the layer before it; see `qtrace.preparation.passes.fuse_bn`."""

from __future__ import annotations

from qtrace.preparation.passes.fuse_bn import fuse_bn
from qtrace.ptq.base import FloatAlgorithm, FloatTask, Report, report_of

__all__ = ["FuseBn"]


class FuseBn(FloatAlgorithm):
    """Folds every BatchNorm that directly follows a layer (Jacob et al. 2018, section 3.2)."""

    def apply(self, task: FloatTask) -> Report:
        result = fuse_bn(task.model)
        task.norms.update(result.norms)
        return report_of(result, "the graph has no BatchNorm")
