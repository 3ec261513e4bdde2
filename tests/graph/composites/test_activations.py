"""Activation functions in pieces become one call, in every spelling; other functions stay as they are."""

from __future__ import annotations

import math

import megengine as mge
import megengine.functional as F
import megengine.module as M
import numpy as np
import pytest

from qtrace.graph.functions import erf
from tests.each import each_of
from tests.graph.composites.spellings import Spelling, assert_composed, assert_refused

ROOT = math.sqrt(2.0)
TANH = math.sqrt(2.0 / math.pi)


def _stored(**values: float) -> dict[str, mge.Tensor]:
    return {name: mge.Tensor(np.full((1,), value, np.float32)) for name, value in values.items()}


HARD_SWISH = {
    "megengine": lambda x: x * F.relu6(x + 3) / 6,
    "paddle2onnx": lambda x: F.div(F.mul(x, F.clip(F.add(x, 3.0), 0.0, 6.0)), 6.0),
    "pytorch opset 9": lambda x: x * (F.clip(x + 3.0, 0.0, 6.0) / 6.0),
    "a multiplied sixth": lambda x: x * (F.clip(x + 3.0, 0.0, 6.0) * (1.0 / 6.0)),
    "a float32 sixth": lambda x: x * F.clip(x + 3.0, 0.0, 6.0) * 0.16666667,
    "clip first": lambda x: F.relu6(3 + x) * x / 6,
    "x divided": lambda x: F.relu6(3 + x) * (x / 6),
    "sixth first": lambda x: (1 / 6) * x * F.relu6(x + 3),
    "hard sigmoid": lambda x: x * F.hsigmoid(x),
    "hard sigmoid by slope": lambda x: x * F.clip(x / 6 + 0.5, 0, 1),
    "two bounds": lambda x: x * F.minimum(F.maximum(x + 3, 0), 6) / 6,
    "two bounds, the other order": lambda x: x * F.maximum(0.0, F.minimum(6.0, x + 3)) / 6,
    "relu and bound": lambda x: x * F.minimum(F.relu(x + 3), 6) / 6,
    "in place": lambda x: _in_place(x),
    "constants of the trace": lambda x: (
        x * F.clip(x + mge.Tensor(3.0), 0, 6) / mge.Tensor(np.full((1, 1, 1, 1), 6.0, np.float32))
    ),
    "stored tensors": Spelling(
        lambda self, x: x * F.relu6(x + self.three) * self.sixth, _stored(three=3.0, sixth=1 / 6)
    ),
    "parameters": Spelling(
        lambda self, x: x * F.relu6(x + self.three) / self.six,
        {"three": mge.Parameter([3.0]), "six": mge.Parameter([6.0])},
    ),
    "of a product": lambda x: _hard_swish(x * 2.0),
    "of a quotient": lambda x: _hard_swish(x / 3.0),
}


def _hard_swish(x: mge.Tensor) -> mge.Tensor:
    return x * F.relu6(x + 3) / 6


def _in_place(x: mge.Tensor) -> mge.Tensor:
    y = x + 3
    y = F.relu6(y)
    y *= x
    y /= 6
    return y


@each_of("name", HARD_SWISH)
def test_hard_swish(name: str) -> None:
    before = {"of a product": ["Tensor.__mul__"], "of a quotient": ["Tensor.__truediv__"]}.get(name, [])
    lost = ("three", "six") if name == "parameters" else ()
    assert_composed(HARD_SWISH[name], *before, "F.hswish", applied="HardSwish", lost=lost)


HARD_SIGMOID = {
    "pytorch": lambda x: F.clip(x + 3, 0, 6) / 6,
    "relu6": lambda x: F.relu6(x + 3.0) / 6.0,
    "by slope": lambda x: F.clip(x / 6 + 0.5, 0, 1),
    "float32 slope": lambda x: F.clip(x * 0.16666667 + 0.5, 0, 1),
    "reversed": lambda x: (1 / 6) * F.relu6(3 + x),
    "two bounds": lambda x: F.minimum(F.maximum(x * (1 / 6) + 0.5, 0.0), 1.0),
}


@each_of("name", HARD_SIGMOID)
def test_hard_sigmoid(name: str) -> None:
    assert_composed(HARD_SIGMOID[name], "F.hsigmoid", applied="HardSigmoid")


def test_paddles_hard_sigmoid_keeps_its_slope() -> None:
    result = assert_composed(
        lambda x: F.clip(x * 0.2 + 0.5, 0, 1), "qtrace.graph.functions.hard_sigmoid", applied="HardSigmoid"
    )
    assert result.traced.graph.outputs[0].expr.args[1:] == (0.2, 0.5)


SILU = {
    "megengine": lambda x: x * F.sigmoid(x),
    "reversed": lambda x: F.mul(F.sigmoid(x), x),
    "exp": lambda x: x / (1 + F.exp(-x)),
    "exp of a product": lambda x: x / (F.exp(x * -1.0) + 1.0),
    "factor of 1 / (1 + exp)": lambda x: x * (1 / (1 + F.exp(-x))),
    "module": Spelling(lambda self, x: x * self.gate(x), {"gate": M.Sigmoid()}),
}


@each_of("name", SILU)
def test_silu(name: str) -> None:
    assert_composed(SILU[name], "F.silu", applied="Silu")


@pytest.mark.parametrize("forward", [lambda x: 1 / (1 + F.exp(-x)), lambda x: (1 + F.exp(F.neg(x))) ** -1.0])
def test_sigmoid(forward: object) -> None:
    assert_composed(forward, "F.sigmoid", applied="Sigmoid")


MISH = {
    "softplus": lambda x: x * F.tanh(F.softplus(x)),
    "log1p": lambda x: F.tanh(F.log1p(F.exp(x))) * x,
    "log": lambda x: x * F.tanh(F.log(1 + F.exp(x))),
}


@each_of("name", MISH)
def test_mish(name: str) -> None:
    assert_composed(MISH[name], "qtrace.graph.functions.mish", applied="Mish")


GELU = {
    "pytorch": lambda x: x * (erf(x / ROOT) + 1.0) * 0.5,
    "paddle": lambda x: x * 0.5 * (1.0 + erf(x * 0.70710678)),
    "tf2onnx": lambda x: 0.5 * x * (1.0 + erf(x / 1.4142135381698608)),
    "half outside": lambda x: 0.5 * (x * (1 + erf(x / ROOT))),
    "half at the sum": lambda x: x * (0.5 * (erf(x / ROOT) + 1)),
    "the normal distribution": lambda x: x * (0.5 + 0.5 * erf(x / ROOT)),
    "x divided": lambda x: (x / 2) * (erf(x / ROOT) + 1),
}


@each_of("name", GELU)
def test_gelu(name: str) -> None:
    assert_composed(GELU[name], "F.gelu", applied="Gelu")


GELU_TANH = {
    "gpt2": lambda x: 0.5 * x * (1.0 + F.tanh(TANH * (x + 0.044715 * F.pow(x, 3.0)))),
    "operator": lambda x: 0.5 * x * (1.0 + F.tanh(TANH * (x + 0.044715 * x**3))),
    "products": lambda x: x * 0.5 * (F.tanh((x + x * x * x * 0.044715) * TANH) + 1),
    "factored": lambda x: 0.5 * x * (1 + F.tanh(x * TANH * (1 + 0.044715 * x * x))),
    "distributed": lambda x: 0.5 * x * (1 + F.tanh(TANH * x + TANH * 0.044715 * x**3)),
    "the sum halved": lambda x: x * (0.5 + 0.5 * F.tanh(TANH * (x + 0.044715 * x**3))),
}


@each_of("name", GELU_TANH)
def test_gelu_by_tanh(name: str) -> None:
    assert_composed(GELU_TANH[name], "qtrace.graph.functions.gelu_tanh", applied="GeluTanh")


NEAR_MISSES = {
    "hard swish of 2.9": (
        lambda x: x * F.clip(x + 2.9, 0, 6) / 6,
        "HardSwish",
        "its gate has the value at x = 0 0.483333",
    ),
    "hard swish up to 5": (
        lambda x: x * F.clip(x + 3, 0, 5) / 6,
        "HardSwish",
        "its gate has the upper bound 0.833333, that of a hard swish 1",
    ),
    "hard swish without the sixth": (
        lambda x: x * F.relu6(x + 3),
        "HardSwish",
        "its gate has the slope 1, that of a hard swish 0.166667",
    ),
    "hard sigmoid of 0.4": (
        lambda x: F.clip(x * 0.2 + 0.4, 0, 1),
        "HardSigmoid",
        "it is 0.4 at x = 0, a hard sigmoid is 0.5",
    ),
    "hard sigmoid to 6": (lambda x: F.relu6(x * 0.5 + 3), "HardSigmoid", "its values lie between 0 and 6"),
    "falling hard sigmoid": (
        lambda x: F.clip(x * -0.2 + 0.5, 0, 1),
        "HardSigmoid",
        "its line has the slope -0.2",
    ),
    "quick gelu": (lambda x: x * F.sigmoid(1.702 * x), "Silu", "its sigmoid reads 1.702 * x"),
    "sigmoid of 2": (lambda x: 1 / (2 + F.exp(-x)), "Sigmoid", "it has the number 2 where a sigmoid has 1"),
    "silu of another": (lambda x: x * F.sigmoid(x.mean(axis=1, keepdims=True)), "Silu", ""),
    "mish of 2": (lambda x: x * F.tanh(F.log(2 + F.exp(x))), "Mish", "its logarithm reads 2 + exp(x)"),
    "gelu of x": (lambda x: x * (erf(x * 1.5) + 1) * 0.5, "Gelu", "its factor in the error function is 1.5"),
    "gelu twice": (
        lambda x: x * (erf(x / ROOT) + 1) * 1.5,
        "Gelu",
        "its factor of the error function is 1.5",
    ),
    "gelu without 1": (lambda x: x * (erf(x / ROOT) + 2) * 0.5, "Gelu", "its constant term is 1, that of"),
    "gelu by another cube": (
        lambda x: 0.5 * x * (1.0 + F.tanh(TANH * (x + 0.05 * x**3))),
        "GeluTanh",
        "its cubic factor in tanh",
    ),
    "the root of a square": (lambda x: F.sqrt(x * x) * F.sigmoid(x), "Silu", ""),
}


@each_of("name", NEAR_MISSES)
def test_near_misses_of_activations_stay_uncomposed(name: str) -> None:
    assert_refused(*NEAR_MISSES[name])


def test_constants_that_widen_the_result_are_no_composite() -> None:
    x = np.ones((1, 6), np.float32)
    wide = {"three": mge.Tensor(np.full((1, 1, 1), 3.0, np.float32))}
    spelling = Spelling(lambda self, x: x * F.relu6(x + self.three) / 6, wide, x)
    assert_refused(spelling, "HardSwish", "its constants change the shape from (1, 6) to (1, 1, 6)")


def test_a_piece_that_is_used_elsewhere_stays() -> None:
    def forward(x: mge.Tensor) -> mge.Tensor:
        gate = F.relu6(x + 3)
        return x * gate / 6 + gate

    assert_refused(forward, "HardSwish")


def test_a_learnable_factor_of_1_stays_learnable() -> None:
    swish = Spelling(lambda self, x: x * F.sigmoid(x * self.beta), {"beta": mge.Parameter([1.0])})
    assert_refused(swish, "Silu")
