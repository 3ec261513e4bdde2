"""Patterns of formulas: sums, products and operations, whatever order, association and form they have.

    >>> x = AnyTensor("x")
    >>> gate = Operation("clip", Sum(x, constant="shift"), Number("low"), Number("high"))
    >>> pattern = Product(x, gate, scale="scale")

matches ``x * clip(x + 3, 0, 6) / 6``, ``F.relu6(3 + x) * (x * (1 / 6))`` and every other way to write it.
Constants may be numbers, constants of the trace, or stored tensors with one entry.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from qtrace.graph.operations import OperationReader, is_stored
from qtrace.graph.pattern import Compound, Matcher, PartialMatch, Pattern, show
from qtrace.graph.types import Constant, Expr, GetAttr, Input, TensorNode
from qtrace.graph.walk import op_label

_DEPTH = 5  # nested calls that one sum or product may open
_PRODUCTS = frozenset(("mul", "div", "neg", "pow", "square", "sqrt"))
_SUMS = frozenset(("add", "sub", "neg"))
_TOLERANCE = float(np.finfo(np.float32).resolution)  # relative


def close(value: float, expected: float) -> bool:
    """Returns whether two constants are equal within the precision of float32."""
    return math.isclose(value, expected, rel_tol=_TOLERANCE, abs_tol=1e-12)


class AnyTensor(Compound):
    """Any node that holds a tensor: an input, a stored tensor or the result of a call."""

    def matches(self, matcher: Matcher, value: Any, state: PartialMatch) -> Iterator[PartialMatch]:
        """Yields ``state`` with the node."""
        if isinstance(value, TensorNode):
            yield state.bind(self, value)
        else:
            matcher.fail(show(value), "is a constant argument, expected a tensor", state)


class StoredOperand(Compound):
    """A parameter, a buffer or a constant of the trace."""

    def matches(self, matcher: Matcher, value: Any, state: PartialMatch) -> Iterator[PartialMatch]:
        """Yields ``state`` with the node."""
        if is_stored(value):
            yield state.bind(self, value)
        else:
            matcher.fail(show(value), "is computed, expected a stored tensor", state)


class Number(Compound):
    """A constant number; it must equal ``value`` if there is one. The name is bound to the float."""

    def __init__(self, name: str | None = None, value: float | None = None) -> None:
        super().__init__(name)
        self.value = value

    def matches(self, matcher: Matcher, value: Any, state: PartialMatch) -> Iterator[PartialMatch]:
        """Yields ``state`` with the number."""
        number = value if isinstance(value, float) else matcher.reader.number(value)
        if number is None:
            matcher.fail(show(value), "is no constant number", state)
        elif self.value is not None and not close(number, self.value):
            matcher.fail(show(value), f"is {number:g}, expected {self.value:g}", state)
        else:
            yield state.bind(self, number)


class AnyOf(Compound):
    """The first of several patterns that matches."""

    def __init__(self, *patterns: Pattern, name: str | None = None) -> None:
        super().__init__(name)
        self.patterns = patterns

    def roots(self) -> frozenset[str] | None:
        """Returns the roots of all patterns."""
        roots = [p.roots() if isinstance(p, Compound) else None for p in self.patterns]
        known = [kinds for kinds in roots if kinds is not None]
        return frozenset().union(*known) if len(known) == len(roots) else None

    def needs(self) -> frozenset[str]:
        """Returns the kinds that all patterns need."""
        return frozenset.intersection(*map(_needs, self.patterns))

    def matches(self, matcher: Matcher, value: Any, state: PartialMatch) -> Iterator[PartialMatch]:
        """Yields the matches of every pattern."""
        for pattern in self.patterns:
            for inner in matcher.match_value(pattern, value, state):
                yield inner.bind(self, value)


class Operation(Compound):
    """An operation of a kind that ``operations.py`` reads, in any of its forms.

    Args:
        kind: the kind of the operation.
        *operands: patterns of all operands.
        name: binds the output.
        shared: whether exprs outside of the match may use the output.
    """

    def __init__(self, kind: str, *operands: Pattern, name: str | None = None, shared: bool = False) -> None:
        super().__init__(name)
        self.kind, self.operands, self.shared = kind, operands, shared

    def roots(self) -> frozenset[str] | None:
        """Returns the kind of the operation."""
        return frozenset((self.kind,))

    def needs(self) -> frozenset[str]:
        """Returns the kind of the operation and what the operands need."""
        return frozenset((self.kind,)).union(*map(_needs, self.operands))

    def matches(self, matcher: Matcher, value: Any, state: PartialMatch) -> Iterator[PartialMatch]:
        """Yields the matches of the operands."""
        operation = matcher.reader.operation(value)
        if operation is None or operation.kind != self.kind or len(operation.operands) != len(self.operands):
            matcher.fail(show(value), f"{_produced(value)}, expected {self.kind}", state)
        elif value.expr in matcher.rewritten:
            matcher.fail(show(value), f"{op_label(value.expr)} was rewritten already", state)
        else:
            inner = state.bind(self, value, value.expr)
            yield from _match_all(matcher, self.operands, operation.operands, inner)


@dataclass(frozen=True)
class Power:
    """A factor of a product with an exponent: ``Power(y, -1)`` for a division by y, 0.5 for a root."""

    pattern: Pattern
    exponent: float


@dataclass(frozen=True)
class Minus:
    """A term of a sum that is subtracted."""

    pattern: Pattern


class Product(Compound):
    """A product of factors, powers of them, and numbers: multiplications, divisions, roots and negations.

    Args:
        *factors: patterns of all factors that are no numbers, in any order.
        scale: the name that the product of the numbers gets; None for a product without them.
        name: binds the output.
    """

    def __init__(self, *factors: Pattern | Power, scale: str | None = None, name: str | None = None) -> None:
        super().__init__(name)
        self.parts = tuple((f.pattern, f.exponent) if isinstance(f, Power) else (f, 1.0) for f in factors)
        self.number = None if scale is None else Number(scale)

    def roots(self) -> frozenset[str] | None:
        """Returns the operations that `_factors` opens."""
        return _PRODUCTS

    def needs(self) -> frozenset[str]:
        """Returns what the factors need."""
        return frozenset().union(*(_needs(pattern) for pattern, _ in self.parts))

    def matches(self, matcher: Matcher, value: Any, state: PartialMatch) -> Iterator[PartialMatch]:
        """Yields the matches of the factors in every order."""
        yield from _match_parts(self, matcher, value, state, _factors, 1.0, "a product")


class Sum(Compound):
    """A sum of terms and numbers: additions, subtractions and negations.

    Args:
        *terms: patterns of all terms that are no numbers, in any order.
        constant: the name that the sum of the numbers gets; None for a sum without them.
        name: binds the output.
    """

    def __init__(self, *terms: Pattern | Minus, constant: str | None = None, name: str | None = None) -> None:
        super().__init__(name)
        self.parts = tuple((t.pattern, -1.0) if isinstance(t, Minus) else (t, 1.0) for t in terms)
        self.number = None if constant is None else Number(constant)

    def roots(self) -> frozenset[str] | None:
        """Returns the operations that `_terms` opens."""
        return _SUMS

    def needs(self) -> frozenset[str]:
        """Returns what the terms need."""
        return frozenset().union(*(_needs(pattern) for pattern, _ in self.parts))

    def matches(self, matcher: Matcher, value: Any, state: PartialMatch) -> Iterator[PartialMatch]:
        """Yields the matches of the terms in every order."""
        yield from _match_parts(self, matcher, value, state, _terms, 0.0, "a sum")


@dataclass(frozen=True)
class _Opened:
    """A sum or product as its parts.

    Attributes:
        number: the sum or product of the constants; None without constants.
        parts: nodes with their exponents or signs.
        exprs: the calls that were opened.
    """

    number: float | None
    parts: tuple[tuple[Any, float], ...]
    exprs: tuple[Expr, ...] = ()


def _needs(pattern: Pattern) -> frozenset[str]:
    return pattern.needs() if isinstance(pattern, Compound) else frozenset()


def _match_all(
    matcher: Matcher, patterns: Sequence[Pattern], values: Sequence[Any], state: PartialMatch
) -> Iterator[PartialMatch]:
    if not patterns:
        yield state
        return
    for inner in matcher.match_value(patterns[0], values[0], state):
        yield from _match_all(matcher, patterns[1:], values[1:], inner)


def _match_parts(
    pattern: Any, matcher: Matcher, value: Any, state: PartialMatch, opened: Any, neutral: float, noun: str
) -> Iterator[PartialMatch]:
    """Yields the matches of a sum or product: of every way to open ``value``, in every order of its parts."""
    reason = f"{_produced(value)}, expected {noun}"
    most = sum(max(1, math.ceil(abs(weight))) for _, weight in pattern.parts)  # x * x is the power 2 of x
    for candidate in opened(matcher.reader, value, 1.0, _DEPTH, most):
        if not candidate.exprs:
            continue
        exprs = tuple(dict.fromkeys(candidate.exprs))
        parts = _merged(candidate.parts, add=noun == "a product")
        if any(e in matcher.rewritten for e in exprs):
            continue
        reason = f"is {noun} of other parts than expected"
        number = neutral if candidate.number is None else candidate.number
        if pattern.number is None and not close(number, neutral):
            continue
        inner = state.bind(pattern, value, *exprs)
        if pattern.number is not None:
            bound = list(matcher.match_value(pattern.number, number, inner))
            if not bound:
                continue
            inner = bound[0]
        for order in itertools.permutations(parts):
            if len(order) != len(pattern.parts):
                break
            pairs = list(zip(pattern.parts, order, strict=True))
            if all(close(weight, w) for (_, weight), (_, w) in pairs):
                yield from _match_all(matcher, [p for (p, _), _ in pairs], [v for _, (v, _) in pairs], inner)
    matcher.fail(show(value), reason, state)


def _merged(parts: Sequence[tuple[Any, float]], add: bool) -> list[tuple[Any, float]]:
    """Adds the exponents of equal factors; the terms of a sum stay apart."""
    if not add:
        return list(parts)
    exponents: dict[Any, float] = {}
    for node, exponent in parts:
        exponents[node] = exponents.get(node, 0.0) + exponent
    return list(exponents.items())


def _both(left: Iterator[_Opened], right: Any, expr: Expr, parts: int, multiply: bool) -> Iterator[_Opened]:
    for first in left:
        for second in right(parts - len(first.parts)):
            numbers = [n for n in (first.number, second.number) if n is not None]
            number = (math.prod(numbers) if multiply else math.fsum(numbers)) if numbers else None
            yield _Opened(number, (*first.parts, *second.parts), (expr, *first.exprs, *second.exprs))


def _factors(
    reader: OperationReader, value: Any, exponent: float, depth: int, parts: int
) -> Iterator[_Opened]:
    """Yields the ways to write ``value ** exponent`` as a product, those that open most calls first."""
    number = reader.number(value)
    if number is not None:
        if number > 0.0 or (exponent.is_integer() and number != 0.0) or (number == 0.0 and exponent > 0.0):
            yield _Opened(number**exponent, ())
        if isinstance(value, TensorNode) and parts:
            yield _Opened(None, ((value, exponent),))
        return
    operation = reader.operation(value)
    # The root of a product is no product of roots where factors are negative.
    if operation is not None and depth and exponent.is_integer():
        a, *others = operation.operands
        expr, kind = value.expr, operation.kind
        if kind in ("mul", "div"):
            sign = exponent if kind == "mul" else -exponent
            left = _factors(reader, a, exponent, depth - 1, parts)
            yield from _both(
                left, lambda n: _factors(reader, others[0], sign, depth - 1, n), expr, parts, True
            )
        elif kind == "neg":
            for inner in _factors(reader, a, exponent, depth - 1, parts):
                minus = (-1.0) ** exponent * (1.0 if inner.number is None else inner.number)
                yield _Opened(minus, inner.parts, (expr, *inner.exprs))
        elif kind in ("pow", "square", "sqrt"):
            power = {"square": 2.0, "sqrt": 0.5}.get(kind) or reader.number(others[0])
            for inner in [] if power is None else _factors(reader, a, exponent * power, depth - 1, parts):
                yield _Opened(inner.number, inner.parts, (expr, *inner.exprs))
    if isinstance(value, TensorNode) and parts:
        yield _Opened(None, ((value, exponent),))


def _terms(reader: OperationReader, value: Any, sign: float, depth: int, parts: int) -> Iterator[_Opened]:
    """Yields the ways to write ``sign * value`` as a sum, those that open most calls first."""
    number = reader.number(value)
    if number is not None:
        yield _Opened(sign * number, ())
        if isinstance(value, TensorNode) and parts:
            yield _Opened(None, ((value, sign),))
        return
    operation = reader.operation(value)
    if operation is not None and depth:
        a, *others = operation.operands
        expr = value.expr
        if operation.kind in ("add", "sub"):
            other = sign if operation.kind == "add" else -sign
            left = _terms(reader, a, sign, depth - 1, parts)
            yield from _both(
                left, lambda n: _terms(reader, others[0], other, depth - 1, n), expr, parts, False
            )
        elif operation.kind == "neg":
            for inner in _terms(reader, a, -sign, depth - 1, parts):
                yield _Opened(inner.number, inner.parts, (expr, *inner.exprs))
    if isinstance(value, TensorNode) and parts:
        yield _Opened(None, ((value, sign),))


def _produced(value: Any) -> str:
    """Describes how a value comes about, as the beginning of a reason."""
    if not isinstance(value, TensorNode):
        return "is a constant argument"
    if isinstance(value.expr, Input):
        return "is a graph input"
    if isinstance(value.expr, (GetAttr, Constant)):
        return f"is a {op_label(value.expr)}"
    return f"produced by {op_label(value.expr)}"
