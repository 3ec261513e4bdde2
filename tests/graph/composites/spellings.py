"""Composes small networks and compares them with their pieces."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import megengine as mge
import numpy as np
from megengine.autodiff import GradManager

import qtrace
from qtrace.graph import compose
from qtrace.graph.flatten import flatten
from qtrace.graph.lint import check
from qtrace.graph.rewrite import RuleResult
from qtrace.graph.types import TracedModule
from qtrace.graph.walk import exprs, op_label
from tests.nets import net

__all__ = ["Composed", "Spelling", "assert_composed", "assert_refused", "composed", "labels"]

ROWS = (np.random.default_rng(5).normal(size=(2, 6, 4, 8)) * 2.5).astype(np.float32)


@dataclass(frozen=True)
class Spelling:
    """One way to write a composite.

    Attributes:
        forward: ``forward(self, x)``.
        attributes: attributes of the module, most often stored tensors.
        x: the example.
    """

    forward: Callable[..., Any]
    attributes: Mapping[str, Any] = field(default_factory=dict)
    x: np.ndarray = field(default_factory=lambda: ROWS)


@dataclass(frozen=True)
class Composed:
    """A network before and after ``compose``."""

    pieces: TracedModule
    traced: TracedModule
    results: list[RuleResult]
    x: np.ndarray


def composed(spelling: Spelling | Callable[..., Any]) -> Composed:
    """Traces a network, and composes a copy of it."""
    if not isinstance(spelling, Spelling):
        function = spelling
        spelling = Spelling(lambda self, x: function(x))
    module = net(spelling.forward, **spelling.attributes)
    pieces = flatten(qtrace.trace(module, spelling.x, check=False))
    traced = flatten(pieces)
    return Composed(pieces, traced, compose(traced), spelling.x)


def labels(traced: TracedModule) -> list[str]:
    """The callees of all calls, without attributes and constants."""
    return [label for e in exprs(traced) if (label := op_label(e)) not in ("getattr", "constant")]


def assert_composed(
    spelling: Spelling | Callable[..., Any], *callees: str, applied: str, lost: tuple[str, ...] = ()
) -> Composed:
    """The network becomes these calls, computes the same to 1e-6, and trains.

    Args:
        spelling: the pieces.
        *callees: the calls that they become.
        applied: the rule that replaces them.
        lost: parameters that were constants of the formula.
    """
    result = composed(spelling)
    assert labels(result.traced) == list(callees), result.results
    assert applied in [r.rule for r in result.results if r.applied]
    check(result.traced)
    names = [n.name for n in result.pieces.graph.outputs]
    assert [n.name for n in result.traced.graph.outputs] == names
    expected, actual = (t(mge.Tensor(result.x)).numpy() for t in (result.pieces, result.traced))
    largest = max(float(np.abs(expected).max()), 1.0)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-6 * largest)
    old, new = (_gradients(t, result.x) for t in (result.pieces, result.traced))
    assert {n for n in old if n not in new} == set(lost)
    for name, gradient in new.items():
        assert np.isfinite(gradient).all(), name
        tolerance = 1e-4 * max(float(np.abs(old[name]).max()), 1.0)
        np.testing.assert_allclose(gradient, old[name], rtol=0, atol=tolerance, err_msg=name)
    return result


def _gradients(traced: TracedModule, x: np.ndarray) -> dict[str, np.ndarray]:
    """The gradients of the input and of the parameters that the output depends on."""
    tensor = mge.Tensor(x)
    parameters = {"x": tensor, **dict(traced.named_parameters())}
    manager = GradManager().attach(list(parameters.values()))
    with manager:
        y = traced(tensor)
        weights = np.random.default_rng(1).normal(size=[int(n) for n in y.shape]).astype(np.float32)
        manager.backward((y * mge.Tensor(weights)).sum())
    gradients = {n: p.grad.numpy() for n, p in parameters.items() if p.grad is not None}
    for parameter in parameters.values():
        parameter.grad = None
    return gradients


def assert_refused(spelling: Spelling | Callable[..., Any], rule: str, reason: str = "") -> None:
    """No rule applies; ``rule`` gives the reason, unless the form is already that of something else."""
    result = composed(spelling)
    assert labels(result.traced) == labels(result.pieces)
    assert not any(r.applied for r in result.results)
    reasons = [r.reason for r in result.results if r.rule == rule]
    if reason:
        assert any(reason in r for r in reasons), result.results
    else:
        assert reasons == []
