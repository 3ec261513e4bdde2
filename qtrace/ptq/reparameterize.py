"""Merges parallel convolutions whose results are added; see `qtrace.preparation.passes.reparameterize`."""

from __future__ import annotations

from typing import ClassVar

from qtrace.preparation.passes.reparameterize import reparameterize
from qtrace.ptq.base import FloatAlgorithm, FloatTask, Report, report_of

__all__ = ["Reparameterize"]


class Reparameterize(FloatAlgorithm):
    """Merges parallel convolutions and BatchNorms of one tensor (Ding et al. 2021, section 3.3)."""

    after: ClassVar[tuple[str, ...]] = ("fuse_bn",)
    reason: ClassVar[str] = "it merges convolutions once their BatchNorms are folded"

    def apply(self, task: FloatTask) -> Report:
        result = reparameterize(task.model)
        for changed in result.changed:
            task.norms.pop(changed.partition(":")[0], None)
        return report_of(result, "the graph adds no convolutions of one tensor")
