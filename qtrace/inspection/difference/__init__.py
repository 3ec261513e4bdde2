"""What differs between two quantized modules, recipes or ONNX files: sites, integers, figures, nodes."""

from __future__ import annotations

from qtrace.inspection.difference.configs import ConfigChange, compare_configs
from qtrace.inspection.difference.models import compare_models
from qtrace.inspection.difference.report import (
    Difference,
    FigurePair,
    IntegerChange,
    OpChange,
    ScaleChange,
    SchemeChange,
)

__all__ = [
    "ConfigChange",
    "Difference",
    "FigurePair",
    "IntegerChange",
    "OpChange",
    "ScaleChange",
    "SchemeChange",
    "compare_configs",
    "compare_models",
]
