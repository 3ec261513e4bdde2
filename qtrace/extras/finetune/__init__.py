"""A quantized graph learns from its float twin, on data without labels, as ``qtrace finetune`` does."""

from __future__ import annotations

from typing import TYPE_CHECKING

from qtrace.plugins import load_when_used

if TYPE_CHECKING:
    from qtrace.extras.finetune.evaluation import Evaluation
    from qtrace.extras.finetune.finetune import finetune
    from qtrace.extras.finetune.report import FineTuned, OutputChange
    from qtrace.extras.finetune.settings import FinetuneSettings
    from qtrace.extras.finetune.training import Retreat
    from qtrace.extras.finetune.watching import Frozen

__all__ = ["Evaluation", "FineTuned", "FinetuneSettings", "Frozen", "OutputChange", "Retreat", "finetune"]

load_when_used(
    __name__,
    {
        "qtrace.extras.finetune.evaluation": "Evaluation",
        "qtrace.extras.finetune.finetune": "finetune",
        "qtrace.extras.finetune.report": "FineTuned OutputChange",
        "qtrace.extras.finetune.training": "Retreat",
        "qtrace.extras.finetune.settings": "FinetuneSettings",
        "qtrace.extras.finetune.watching": "Frozen",
    },
)
