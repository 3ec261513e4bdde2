"""Divisions of integers, at which onnxruntime ends the process by a divisor of 0 or an overflow."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

__all__ = ["describe_division_fault", "divides_by_inputs"]

_OPS = ("Div", "Mod")


def _divisions(model: Any) -> list[tuple[str, str, str]]:
    """Returns the op, dividend and divisor of each division."""
    own = (node for node in model.graph.node if node.domain in ("", "ai.onnx") and node.op_type in _OPS)
    return [(node.op_type, node.input[0], node.input[1]) for node in own]


def divides_by_inputs(model: Any) -> bool:
    """Returns whether a model divides by integers that are inputs of it."""
    from onnx import helper

    kinds = {i.name: i.type.tensor_type.elem_type for i in model.graph.input}
    divisors = [kinds[divisor] for _, _, divisor in _divisions(model) if divisor in kinds]
    return any(np.dtype(helper.tensor_dtype_to_np_dtype(kind)).kind in "iu" for kind in divisors)


def describe_division_fault(model: Any, feeds: Mapping[str, np.ndarray]) -> str:
    """Returns why onnxruntime would not survive a division, as a sentence's end; "" if it does.

    Args:
        model: the model; divisors that it computes itself are not looked at.
        feeds: input -> its value.
    """
    from onnx import numpy_helper

    divisions = _divisions(model)
    if not divisions:
        return ""
    stored = {t.name: t for t in model.graph.initializer}

    def value(name: str) -> np.ndarray | None:
        if name in feeds:
            return feeds[name]
        return np.asarray(numpy_helper.to_array(stored[name])) if name in stored else None

    for op, dividend, divisor in divisions:
        numbers = value(divisor)
        if numbers is None or numbers.dtype.kind not in "iu":
            continue
        if not numbers.all():
            return f"{op} divides integers by 0"
        over = value(dividend)
        if numbers.dtype.kind == "i" and over is not None and (numbers == -1).any():
            lowest = np.iinfo(numbers.dtype).min
            if (over == lowest).any():
                return f"{op} divides {lowest} by -1, which exceeds {numbers.dtype}"
    return ""
