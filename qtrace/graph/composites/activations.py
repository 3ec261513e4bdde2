"""Activations that exporters write in pieces.

The docstring of a rule has its formula and its source. Hard swish comes before the hard sigmoid in it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import megengine.functional as F

from qtrace.graph import functions
from qtrace.graph.algebra import AnyOf, AnyTensor, Number, Operation, Power, Product, Sum, close
from qtrace.graph.composites import CompositeCall, CompositeRule
from qtrace.graph.pattern import Pattern, PatternMatch


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
    """Hard sigmoid: ``clip(slope * x + offset, 0, 1)``, with slope 1 / 6 (MobileNetV3) or 0.2 (ONNX, Keras).

    Source: Howard et al. 2019, "Searching for MobileNetV3", section 5.2: h-sigmoid(x) = ReLU6(x + 3) / 6.
    Written as ``clip(x + 3, 0, 6) / 6`` (PyTorch before opset 14, Paddle, TensorFlow), as ``clip(x / 6 + 0.5,
    0, 1)`` (Keras) and with Paddle's slope of 0.2. For s > 0, ``s * clip(k * x + b, 0, h) = clip(s * k * x +
    s * b, 0, s * h)``.
    """

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


_X = AnyTensor("x")


class HardSwish(CompositeRule):
    """Hard swish: ``x * clip(x + 3, 0, 6) / 6``.

    Source: Howard et al. 2019, "Searching for MobileNetV3", section 5.2. paddle2onnx and PyTorch before opset
    14 write Add, Clip, Mul, Div, MegEngine models ``x * F.relu6(x + 3) / 6``. Others multiply by 1 / 6
    anywhere, or multiply x by a hard sigmoid.
    """

    title = "hard swish"
    formula = "x * clip(x + 3, 0, 6) / 6"
    becomes = "F.hswish"
    function = F.hswish
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


def _powers(x: Pattern) -> Pattern:
    """Builds the pattern of ``c + exp(-x)``."""
    return Sum(Operation("exp", Product(x, scale="minus")), constant="one")


class Sigmoid(CompositeRule):
    """Sigmoid: ``1 / (1 + exp(-x))``, as models by hand write it."""

    title = "sigmoid"
    formula = "1 / (1 + exp(-x))"
    becomes = "F.sigmoid"
    function = F.sigmoid
    pattern: Pattern = Product(Power(_powers(_X), -1.0), scale="s")

    def obstacle(self, match: PatternMatch) -> str | None:
        """Refuses other numbers than 1 and -1."""
        for name, expected in (("minus", -1.0), ("one", 1.0), ("s", 1.0)):
            if not close(match.get(name, expected), expected):
                return f"it has the number {match[name]:g} where a sigmoid has {expected:g}"
        return None


class Silu(Sigmoid):
    """SiLU: ``x / (1 + exp(-x))``, which is ``x`` times the sigmoid.

    Source: Elfwing et al. 2018, "Sigmoid-weighted linear units"; Ramachandran et al. 2017, "Searching for
    activation functions" (swish). PyTorch, Paddle and YOLO's exporters write Mul and Sigmoid; models by hand
    ``x / (1 + exp(-x))``. A swish with another slope, such as ``x * sigmoid(1.702 * x)``, is no SiLU.
    """

    title = "SiLU (swish)"
    formula = "x * sigmoid(x); x / (1 + exp(-x))"
    becomes = "F.silu"
    function = F.silu
    pattern = AnyOf(
        Product(_X, Operation("sigmoid", _X)),
        Product(_X, Operation("sigmoid", Product(_X, scale="slope"))),
        Product(_X, Power(_powers(_X), -1.0)),
    )

    def obstacle(self, match: PatternMatch) -> str | None:
        """Refuses a sigmoid of a multiple of x."""
        slope = match.get("slope", 1.0)
        if not close(slope, 1.0):
            return f"its sigmoid reads {slope:g} * x, that of SiLU x"
        return super().obstacle(match)


_EXP = Operation("exp", _X)
_SOFTPLUS = AnyOf(
    Operation("softplus", _X),
    Operation("log1p", _EXP),
    Operation("log", Sum(_EXP, constant="one")),
)


class Mish(CompositeRule):
    """Mish: ``x * tanh(softplus(x))`` with ``softplus(x) = log(1 + exp(x))``.

    Source: Misra 2019, "Mish: a self regularized non-monotonic activation function". PyTorch before opset 18
    and Paddle write Softplus, Tanh and Mul; TensorFlow and models by hand write the logarithm.
    """

    title = "Mish"
    formula = "x * tanh(softplus(x))"
    becomes = "functions.mish"
    function = functions.mish
    pattern = Product(_X, Operation("tanh", _SOFTPLUS))

    def obstacle(self, match: PatternMatch) -> str | None:
        """Refuses another number than 1 in the logarithm."""
        summand = match.get("one", 1.0)
        return (
            None
            if close(summand, 1.0)
            else f"its logarithm reads {summand:g} + exp(x), that of softplus 1 + exp(x)"
        )


def _gelu_obstacle(
    match: PatternMatch, function: str, inside: Mapping[str, tuple[float, float]]
) -> str | None:
    """Compares the numbers of both forms of GELU with what they must be, each under its name."""
    half = match.get("half", 1.0)
    values = {
        f"factor of {function}": (half * match.get("factor", 1.0), 0.5),
        "constant term": (half * match["one"], 0.5),
        **inside,
    }
    for name, (value, expected) in values.items():
        if not close(value, expected):
            return f"its {name} is {value:.6g}, that of GELU {expected:.6g}"
    return None


_ERF = Operation("erf", Product(_X, scale="inner"))


class Gelu(CompositeRule):
    """GELU by the error function: ``0.5 * x * (1 + erf(x / sqrt(2)))``.

    Source: Hendrycks and Gimpel 2016, "Gaussian error linear units". PyTorch before opset 20 and Paddle write
        Div, Erf, Add, Mul, Mul. Tf2onnx and models by hand put the factor 0.5 elsewhere, or write
    ``x * (0.5 + 0.5 * erf)``.
    """

    title = "GELU"
    formula = "0.5 * x * (1 + erf(x / sqrt(2)))"
    becomes = "F.gelu"
    function = F.gelu
    pattern = AnyOf(
        Product(_X, Sum(_ERF, constant="one"), scale="half"),
        Product(_X, Sum(Product(_ERF, scale="factor"), constant="one")),
    )

    def obstacle(self, match: PatternMatch) -> str | None:
        """Refuses other numbers than 0.5, 1 and 1 / sqrt(2)."""
        inner = match["inner"], 1.0 / math.sqrt(2.0)
        return _gelu_obstacle(match, "the error function", {"factor in the error function": inner})


_CUBIC = AnyOf(
    Product(Sum(_X, Product(Power(_X, 3.0), scale="cubic")), scale="inner"),
    Product(_X, Sum(Product(Power(_X, 2.0), scale="cubic"), constant="linear"), scale="inner"),
    Sum(Product(_X, scale="inner"), Product(Power(_X, 3.0), scale="whole")),
)
_TANH = Operation("tanh", _CUBIC)


class GeluTanh(CompositeRule):
    """GELU by tanh: ``0.5 * x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x**3)))``.

    Source: Hendrycks and Gimpel 2016, "Gaussian error linear units", section 2. TensorFlow and GPT-2 write
    the power, others ``x * (1 + 0.044715 * x * x)`` or ``x * x * x``.
    """

    title = "GELU (tanh)"
    formula = "0.5 * x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x**3)))"
    becomes = "functions.gelu_tanh"
    function = functions.gelu_tanh
    pattern = AnyOf(
        Product(_X, Sum(_TANH, constant="one"), scale="half"),
        Product(_X, Sum(Product(_TANH, scale="factor"), constant="one")),
    )

    def obstacle(self, match: PatternMatch) -> str | None:
        """Refuses numbers that differ from the formula."""
        inner, root = match["inner"], math.sqrt(2.0 / math.pi)
        whole = match.get("whole", inner * match.get("cubic", 0.0))
        inside = {
            "linear factor in tanh": (inner * match.get("linear", 1.0), root),
            "cubic factor in tanh": (whole, 0.044715 * root),
        }
        return _gelu_obstacle(match, "tanh", inside)


RULES = (HardSwish(), HardSigmoid(), Silu(), Sigmoid(), Mish(), Gelu(), GeluTanh())
