"""The factor on the gradient of a learned step size."""

from __future__ import annotations

import math
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from qtrace.plugins.options import Bool, Float, show
from qtrace.scheme import QScheme

__all__ = ["StepGain", "step_gain"]


def _gain(value: Any) -> Any:
    number = isinstance(value, (int, float)) and math.isfinite(value) and value > 0
    if not isinstance(value, bool) and not number:
        raise ValueError(f"choose true (1 / sqrt(N * Q)), false (1) or a number above 0, not {show(value)}.")
    return value


StepGain = Annotated[Bool | Annotated[Float, Field(gt=0)], BeforeValidator(_gain)]
"""The option ``grad_scale``: true, false or a number above 0."""


def step_gain(grad_scale: bool | float, scheme: QScheme, numel: int) -> float:
    """Returns ``1 / sqrt(N * Q)`` of Esser et al. 2020, section 2.2, or the option's own factor.

    With this factor, an optimizer step changes a scale and the weights by about the same share.

    Args:
        grad_scale: True for the paper's factor, False for 1, or the factor itself.
        scheme: the scheme; Q is the number of its positive levels, or of all levels if it is affine.
        numel: N, the number of values of a parameter, or of one sample of an activation, that share the
            scale.
    """
    if grad_scale is True:
        levels = scheme.qmax if scheme.symmetric else scheme.qmax - scheme.qmin
        return 1.0 / math.sqrt(numel * levels)
    return 1.0 if grad_scale is False else grad_scale
