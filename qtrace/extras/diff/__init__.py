"""What differs between two quantized modules, recipes or ONNX files: sites, integers, figures, nodes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from qtrace.plugins import load_when_used

if TYPE_CHECKING:
    from qtrace.extras.diff.models import (
        ConfigChange,
        Difference,
        FigurePair,
        IntegerChange,
        OpChange,
        ScaleChange,
        SchemeChange,
        compare_configs,
        compare_models,
    )

load_when_used(
    __name__,
    {
        "qtrace.extras.diff.models": (
            "ConfigChange compare_configs compare_models Difference FigurePair"
            " IntegerChange OpChange ScaleChange SchemeChange"
        ),
    },
)
