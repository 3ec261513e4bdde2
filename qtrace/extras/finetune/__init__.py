"""A quantized graph learns from its float twin, on data without labels, as ``qtrace finetune`` does."""

from __future__ import annotations

from typing import TYPE_CHECKING

from qtrace.plugins import load_when_used

if TYPE_CHECKING:
    from qtrace.extras.finetune.data import FinetuneSettings
    from qtrace.extras.finetune.evaluation import Evaluation
    from qtrace.extras.finetune.finetune import FineTuned, OutputChange, finetune
    from qtrace.extras.finetune.training import Retreat
    from qtrace.extras.finetune.twins import Frozen

load_when_used(
    __name__,
    {
        "qtrace.extras.finetune.evaluation": "Evaluation",
        "qtrace.extras.finetune.finetune": "finetune FineTuned OutputChange",
        "qtrace.extras.finetune.training": "Retreat",
        "qtrace.extras.finetune.data": "FinetuneSettings",
        "qtrace.extras.finetune.twins": "Frozen",
    },
)
