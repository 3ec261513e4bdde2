"""Hard swish: ``x * clip(x + 3, 0, 6) / 6``.

Source: Howard et al. 2019, "Searching for MobileNetV3", section 5.2. paddle2onnx and PyTorch before opset 14
write Add, Clip, Mul, Div, MegEngine models ``x * F.relu6(x + 3) / 6``. Others multiply by 1 / 6 anywhere, or
multiply x by a hard sigmoid.
"""

from __future__ import annotations

import megengine.functional as F

from qtrace.graph.algebra import AnyOf, AnyTensor, Operation, Product, close
from qtrace.graph.composites.base import CompositeCall, CompositeRule
from qtrace.graph.composites.hard_sigmoid import clipped_line, line
from qtrace.graph.pattern import PatternMatch

__all__ = ["RULES", "HardSwish"]

_X = AnyTensor("x")


class HardSwish(CompositeRule):
    """``x * clip(x + 3, 0, 6) / 6``."""

    title = "hard swish"
    formula = "x * clip(x + 3, 0, 6) / 6"
    becomes = "F.hswish"
    pattern = AnyOf(
        Product(_X, Operation("hsigmoid", _X)),
        Product(_X, clipped_line(_X), scale="s"),
        Product(_X, clipped_line(_X)),
    )

    def obstacle(self, match: PatternMatch) -> str | None:
        """Refuses other numbers than 3, 0, 6 and 6, apart from a common factor."""
        if match.get("b") is None:  # x * hsigmoid(x)
            return None
        names = ("slope", "value at x = 0", "lower bound", "upper bound")
        values = (1.0 / 6.0, 0.5, 0.0, 1.0)
        for name, value, expected in zip(names, line(match), values, strict=True):
            if not close(value, expected):
                return f"its gate has the {name} {value:.6g}, that of a hard swish {expected:.6g}"
        return None if match.get("s", 1.0) > 0.0 else "its factor is negative"

    def call(self, match: PatternMatch) -> CompositeCall:
        """Calls `F.hswish`."""
        return CompositeCall(F.hswish, (match["x"],))


RULES = (HardSwish(),)
