"""Hard sigmoid: ``clip(slope * x + offset, 0, 1)``, with slope 1 / 6 (MobileNetV3) or 0.2 (ONNX, Keras).

Source: Howard et al. 2019, "Searching for MobileNetV3", section 5.2: h-sigmoid(x) = ReLU6(x + 3) / 6. Written
as ``clip(x + 3, 0, 6) / 6`` (PyTorch before opset 14, Paddle, TensorFlow), as ``clip(x / 6 + 0.5, 0, 1)``
(Keras) and with Paddle's slope of 0.2. For s > 0,
``s * clip(k * x + b, 0, h) = clip(s * k * x + s * b, 0, s * h)``.
"""

from __future__ import annotations

import megengine.functional as F

from qtrace.graph import functions
from qtrace.graph.algebra import AnyOf, AnyTensor, Number, Operation, Product, Sum, close
from qtrace.graph.composites.base import CompositeCall, CompositeRule
from qtrace.graph.pattern import Pattern, PatternMatch

__all__ = ["RULES", "HardSigmoid", "clipped_line", "line"]


def clipped_line(x: Pattern) -> Pattern:
    """Builds the pattern of ``clip(k * x + b, low, high)``, as one clip, as relu6 or as two bounds."""
    inner = AnyOf(Sum(Product(x, scale="k"), constant="b"), Sum(x, constant="b"))
    low, high = Number("low"), Number("high")
    return AnyOf(
        Operation("clip", inner, low, high),
        Operation("minimum", Operation("maximum", inner, low), high),
        Operation("maximum", Operation("minimum", inner, high), low),
        Operation("minimum", Operation("relu", inner), high),
    )


def line(match: PatternMatch) -> tuple[float, float, float, float]:
    """Returns slope, offset, lower and upper bound of the clipped line, with the factor after it."""
    s = match.get("s", 1.0)
    k, b, low, high = match.get("k", 1.0), match["b"], match.get("low", 0.0), match["high"]
    return s * k, s * b, s * low, s * high


class HardSigmoid(CompositeRule):
    """``clip(slope * x + offset, 0, 1)``."""

    title = "hard sigmoid"
    formula = "clip(x + 3, 0, 6) / 6; clip(slope * x + 0.5, 0, 1)"
    becomes = "F.hsigmoid, or functions.hard_sigmoid for a slope other than 1 / 6"
    pattern = AnyOf(Product(clipped_line(AnyTensor("x")), scale="s"), clipped_line(AnyTensor("x")))

    def obstacle(self, match: PatternMatch) -> str | None:
        """Refuses another offset than 0.5, other bounds than 0 and 1, and a falling line."""
        slope, offset, low, high = line(match)
        if not 0.0 < slope < 1.0 or match.get("s", 1.0) <= 0.0:
            return f"its line has the slope {slope:g}, that of a hard sigmoid is between 0 and 1"
        if not (close(low, 0.0) and close(high, 1.0)):
            return f"its values lie between {low:g} and {high:g}, those of a hard sigmoid between 0 and 1"
        if not close(offset, 0.5):
            return f"it is {offset:g} at x = 0, a hard sigmoid is 0.5"
        return None

    def call(self, match: PatternMatch) -> CompositeCall:
        """Calls `F.hsigmoid` for the slope 1 / 6."""
        slope = line(match)[0]
        if close(slope, 1.0 / 6.0):
            return CompositeCall(F.hsigmoid, (match["x"],))
        return CompositeCall(functions.hard_sigmoid, (match["x"], slope, 0.5))


RULES = (HardSigmoid(),)
