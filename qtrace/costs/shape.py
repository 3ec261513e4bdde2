"""The shapes that the time of an op depends on, and the forms in which a runtime computes it."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

__all__ = ["FLOAT", "FORMS", "INTEGER", "INTEGER_7", "LOOKUP", "PLAIN_MAX_POOL", "OpShape", "numel"]

FLOAT, INTEGER, LOOKUP = "float", "integer", "lookup"
FORMS = (FLOAT, INTEGER, LOOKUP)
"""Float kernel, integer kernel, look-up table on integers."""
INTEGER_7 = "integer of 7 bits"
"""`INTEGER` with weights of 7 bits, where a processor has other kernels for 8: a form only of fits."""
PLAIN_MAX_POOL = "max_pool2d, plain"
"""The kind of max pooling on integers in the plain layout, which has a slow kernel in onnxruntime."""

Shape = tuple[int, ...]


@dataclass(frozen=True)
class OpShape:
    """What the time of an op depends on.

    Attributes:
        kind: the kind of the op, as in ``qtrace.ops``, or ``quantize``, ``dequantize``, ``reorder`` (a change
            of layout: of floats in the form `FLOAT`, of integers in `INTEGER`) or ``interpolate, bilinear``.
        inputs: the shapes of the data operands.
        outputs: the shapes of the outputs.
        weight: the shape of the stored weight in MegEngine's layout, of a pooling the sizes of its window; ()
            without one.
        stride: the steps of the window; () without one.
        groups: the number of groups of a convolution.
        stored: whether the second operand is a stored constant.
    """

    kind: str
    inputs: tuple[Shape, ...]
    outputs: tuple[Shape, ...]
    weight: Shape = ()
    stride: Shape = ()
    groups: int = 1
    stored: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields without those that have their defaults, for JSON."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {f.name: values[f.name] for f in fields(self) if values[f.name] != f.default}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> OpShape:
        """Reads what `to_dict` wrote.

        Raises:
            ValueError: when a field has another type.
            KeyError: when a field is missing.
        """
        return cls(
            kind=_checked(data["kind"], str),
            inputs=_shapes(data["inputs"]),
            outputs=_shapes(data["outputs"]),
            weight=_shape(data.get("weight", [])),
            stride=_shape(data.get("stride", [])),
            groups=_checked(data.get("groups", 1), int),
            stored=_checked(data.get("stored", False), bool),
        )


def numel(shape: Shape) -> int:
    """Returns the number of elements of a tensor."""
    return math.prod(shape)


def _shapes(value: Any) -> tuple[Shape, ...]:
    return tuple(_shape(shape) for shape in _checked(value, list))


def _shape(value: Any) -> Shape:
    sizes = [_checked(size, int) for size in _checked(value, list)]
    if any(size < 0 for size in sizes):
        raise ValueError("a negative size")
    return tuple(sizes)


def _checked(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise ValueError(f"{value!r} in place of a value of type {kind.__name__}")
    return value
