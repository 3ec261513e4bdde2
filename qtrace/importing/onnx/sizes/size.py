"""A size that depends on open axes: an axis of a tensor, or arithmetic on such sizes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from qtrace.graph.types import TensorNode

__all__ = [
    "Number",
    "Size",
    "SizeError",
    "absolute",
    "axis_size",
    "combine",
    "is_fixed",
    "rounded",
    "value_at",
    "whole",
]

_MAX_TERM = 2**12  # of a fraction, so that its product with a size fits int32
_MAX_VALUE = 2**30


class SizeError(Exception):
    """Arithmetic on a size is not exact in int32; the text says why, as a clause."""


@dataclass(frozen=True, eq=False)
class Size:
    """A number that depends on open axes: an integer that the graph computes, times a fixed fraction.

    Attributes:
        op: ``axis``, or an integer operation: add, sub, mul, floordiv, mod, min, max.
        parts: the operands; of ``axis`` the tensor and the axis.
        values: the integer for each probe of the builder.
        factor: the fraction.
    """

    op: str
    parts: tuple[Any, ...]
    values: tuple[int, ...]
    factor: Fraction = Fraction(1)

    @property
    def numbers(self) -> tuple[Fraction, ...]:
        """The whole number for each probe."""
        return tuple(value * self.factor for value in self.values)


Number = int | float | bool | Size


def axis_size(node: TensorNode, axis: int, values: tuple[int, ...]) -> int | Size:
    """Returns the size of an axis of a tensor, which is a number where it is the same for all probes."""
    return values[0] if len(set(values)) == 1 else Size("axis", (node, axis), values)


def value_at(number: Number, probe: int) -> int | float:
    """Returns the number for one probe of the builder."""
    if not isinstance(number, Size):
        return number
    value = number.numbers[min(probe, len(number.values) - 1)]
    return int(value) if value.denominator == 1 else float(value)


def is_fixed(number: Number) -> bool:
    """Returns whether a number depends on no open axis."""
    return not isinstance(number, Size)


def combine(op: str, left: Number, right: Number, integers: bool) -> Number:
    """Computes with two numbers of which one at least is a `Size`.

    Args:
        op: the op in ONNX: Add, Sub, Mul, Div, Mod, Min or Max.
        left: the first operand.
        right: the second operand.
        integers: whether both are integers in the file, whose quotients are rounded.

    Raises:
        SizeError: when the result is no exact multiple of an integer.
    """
    if op == "Mul":
        return _product(left, right)
    if op == "Div" and not integers:
        return _quotient(left, right)
    if op == "Div":
        return _integer("floordiv", whole(left), _positive(whole(right)))
    if op == "Mod":
        return _integer("mod", whole(left), _positive(whole(right)))
    if op not in _SUMS:
        raise SizeError(f"computes {op} of a size")
    (one, other), denominator = _on_one_denominator(left, right)
    return _times(_integer(_SUMS[op], one, other), Fraction(1, denominator))


def rounded(op: str, number: Size) -> int | Size:
    """Returns a number rounded to an integer by Floor, Ceil, Round, or Cast, which cuts off.

    Raises:
        SizeError: when it is negative, or Round would have to choose between two integers.
    """
    top, below = number.factor.numerator, number.factor.denominator
    if below == 1:
        return whole(number)
    if op == "Round":
        raise SizeError("rounds a fraction of a size to the nearest integer")
    if op == "Cast" and min(number.values) * top < 0:
        raise SizeError("cuts off a negative size")
    scaled = _integer("mul", _bare(number), top) if top != 1 else _bare(number)
    if op == "Ceil":
        scaled = _integer("add", scaled, below - 1)
    return _integer("floordiv", scaled, below)


def absolute(number: Number) -> Number:
    """Returns the magnitude of a number.

    Raises:
        SizeError: when it may be negative.
    """
    if isinstance(number, Size) and min(number.numbers) < 0:
        raise SizeError("takes the magnitude of a negative size")
    return number if isinstance(number, Size) else abs(number)


def whole(number: Number) -> int | Size:
    """Returns a number as an integer that the graph computes.

    Raises:
        SizeError: when it is no integer.
    """
    if not isinstance(number, Size):
        if number != int(number):
            raise SizeError(f"computes with the number {number:g} and a size")
        return int(number)
    if number.factor == 1:
        return number
    if number.factor.denominator != 1:
        raise SizeError(f"needs {number.factor} of a size as an integer")
    return _integer("mul", _bare(number), number.factor.numerator)


_SUMS = {"Add": "add", "Sub": "sub", "Min": "min", "Max": "max"}
_FUNCTIONS: Mapping[str, Callable[[int, int], int]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "floordiv": lambda a, b: a // b,
    "mod": lambda a, b: a % b,
    "min": min,
    "max": max,
}


def _bare(size: Size) -> Size:
    return Size(size.op, size.parts, size.values)


def _integer(op: str, left: int | Size, right: int | Size) -> int | Size:
    """Returns an integer operation, or its result if both numbers are fixed or it changes nothing."""
    if not isinstance(left, Size) and not isinstance(right, Size):
        return _FUNCTIONS[op](left, right)
    if right == 0 and op in ("add", "sub"):
        return left
    if right == 1 and op in ("mul", "floordiv"):
        return left
    if left == (0 if op == "add" else 1) and op in ("add", "mul"):
        return right
    if op in ("floordiv", "mod") and min(_values(left, 1)) < 0:
        raise SizeError("divides a negative size")
    probes = max(len(n.values) for n in (left, right) if isinstance(n, Size))
    pairs = zip(_values(left, probes), _values(right, probes), strict=True)
    values = tuple(_FUNCTIONS[op](a, b) for a, b in pairs)
    if any(abs(value) > _MAX_VALUE for value in values):
        raise SizeError("computes a size beyond int32")
    return Size(op, (left, right), values)


def _values(number: int | Size, probes: int) -> tuple[int, ...]:
    return number.values if isinstance(number, Size) else (number,) * probes


def _positive(number: int | Size) -> int | Size:
    if min(_values(number, 1)) < 1:
        raise SizeError("divides by a number that is not positive")
    return number


def _fraction(number: float) -> Fraction:
    if not math.isfinite(number):
        raise SizeError(f"computes with the number {number} and a size")
    exact = Fraction(number)
    if max(abs(exact.numerator), exact.denominator) > _MAX_TERM:
        raise SizeError(f"multiplies a size by {number:g}, which no small fraction expresses")
    return exact


def _times(number: int | Size, factor: Fraction) -> Number:
    if not isinstance(number, Size):
        result = number * factor
        return int(result) if result.denominator == 1 else float(result)
    product = number.factor * factor
    if max(abs(product.numerator), product.denominator) > _MAX_TERM:
        raise SizeError(f"multiplies a size by {float(product):g}, which no small fraction expresses")
    return Size(number.op, number.parts, number.values, product)


def _product(left: Number, right: Number) -> Number:
    if isinstance(left, Size) and isinstance(right, Size):
        return _times(_integer("mul", _bare(left), _bare(right)), left.factor * right.factor)
    size, number = (left, right) if isinstance(left, Size) else (right, left)
    if number == 0:
        return 0
    assert isinstance(size, Size)
    assert not isinstance(number, Size)
    return _times(size, _fraction(number))


def _quotient(left: Number, right: Number) -> Number:
    if isinstance(right, Size):
        raise SizeError("divides by a size without rounding to an integer")
    if right == 0 or not isinstance(left, Size):
        raise SizeError("divides by zero")
    return _times(left, 1 / _fraction(right))


def _on_one_denominator(left: Number, right: Number) -> tuple[list[int | Size], int]:
    """Returns two numbers as integers over one denominator."""
    factors = [n.factor if isinstance(n, Size) else _fraction(n) for n in (left, right)]
    common = math.lcm(*(factor.denominator for factor in factors))
    parts: list[int | Size] = []
    for number, factor in zip((left, right), factors, strict=True):
        times = factor * common
        bare = _bare(number) if isinstance(number, Size) else 1
        parts.append(_integer("mul", bare, int(times)) if isinstance(bare, Size) else int(times))
    return parts, common
