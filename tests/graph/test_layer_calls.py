"""A layer and the function that it calls are one operation for patterns and rules, written either way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import megengine as mge
import megengine.functional as F
import megengine.module as M
import numpy as np
import pytest

import qtrace
from qtrace.graph import (
    Anything,
    Const,
    GraphEditor,
    Op,
    Param,
    apply_rules,
    exprs,
    flatten,
    function_rule,
    lint,
    match,
)
from qtrace.graph.lint import LEFTOVERS
from qtrace.graph.operations import LAYERS, StoredTensor, read_layer
from qtrace.graph.walk import op_label, owner
from tests.each import each_of
from tests.nets import images, randomize

X = images(2, 4, 6, 6)
MADE: dict[type, Callable[[], M.Module]] = {
    M.Conv1d: lambda: M.Conv1d(4, 6, 3, padding=1),
    M.Conv2d: lambda: M.Conv2d(4, 6, 3, stride=(1, 2), padding=1, dilation=2, bias=False),
    M.Conv3d: lambda: M.Conv3d(2, 3, 2),
    M.ConvTranspose2d: lambda: M.ConvTranspose2d(4, 3, 3, stride=2, output_padding=1),
    M.ConvTranspose3d: lambda: M.ConvTranspose3d(2, 3, 2, stride=2),
    M.Embedding: lambda: M.Embedding(5, 3),
    M.LocalResponseNorm: lambda: M.LocalResponseNorm(3, 1.0, 1e-3, 0.5),
    M.SlidingWindow: lambda: M.SlidingWindow(2, 1, 2, 1),
    M.SlidingWindowTranspose: lambda: M.SlidingWindowTranspose((4, 6), 2, 0, 2, 1),
    M.Linear: lambda: M.Linear(6, 3),
    M.PReLU: lambda: M.PReLU(4),
    M.LayerNorm: lambda: M.LayerNorm((6,)),
    M.GroupNorm: lambda: M.GroupNorm(2, 4),
    M.InstanceNorm: lambda: M.InstanceNorm(4),
    M.BatchNorm1d: lambda: randomize(M.BatchNorm1d(4, eps=1e-3)),
    M.BatchNorm2d: lambda: randomize(M.BatchNorm2d(4, affine=True)),
    M.LeakyReLU: lambda: M.LeakyReLU(0.2),
    M.Softmax: lambda: M.Softmax(1),
    M.MaxPool2d: lambda: M.MaxPool2d(2),
    M.AvgPool2d: lambda: M.AvgPool2d(3, 2, 1, "average"),
    M.AdaptiveAvgPool2d: lambda: M.AdaptiveAvgPool2d((2, 3)),
    M.AdaptiveMaxPool2d: lambda: M.AdaptiveMaxPool2d(2),
    M.PixelShuffle: lambda: M.PixelShuffle(2),
    M.Pad: lambda: M.Pad(((0, 0), (0, 0), (1, 2), (0, 1)), "reflect"),
}
INPUTS = {
    M.Conv1d: images(2, 4, 6),
    M.BatchNorm1d: images(2, 4, 6),
    **dict.fromkeys((M.Conv3d, M.ConvTranspose3d), np.ones((1, 2, 3, 4, 4), np.float32)),
    M.Embedding: np.array([[0, 4, 2]], np.int32),
    M.SlidingWindowTranspose: images(1, 2, 2, 3, 2, 2),
}


class Layer(M.Module):
    """The layer as an attribute, so that its parameters have paths."""

    def __init__(self, layer: M.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Any) -> Any:
        return self.layer(x)


def traced(forward: Any, *x: np.ndarray) -> Any:
    return flatten(qtrace.trace(forward, *(x or (X,)), check=False))


def layer_of(kind: type[M.Module]) -> tuple[Any, np.ndarray]:
    layer = MADE.get(kind, kind)()
    layer.eval()
    x = INPUTS.get(kind, X)
    return traced(Layer(layer), x), x


@each_of("kind", LAYERS, ids=lambda kind: kind.__name__)
def test_a_layer_is_read_as_the_function_that_it_calls(kind: type[M.Module]) -> None:
    flat, x = layer_of(kind)
    call = read_layer(exprs(flat)[-1])
    assert call is not None
    args = [
        flat.layer.__dict__[a.path.rpartition(".")[2]] if isinstance(a, StoredTensor) else a
        for a in call.args[1:]
    ]
    result = call.function(mge.Tensor(x), *args, **call.options)
    np.testing.assert_array_equal(result.numpy(), flat(mge.Tensor(x)).numpy())


@each_of("kind", LAYERS, ids=lambda kind: kind.__name__)
def test_a_pattern_of_either_finds_the_other(kind: type[M.Module]) -> None:
    flat, x = layer_of(kind)
    call = read_layer(exprs(flat)[-1])
    assert call is not None
    function = LAYERS[kind][0]
    assert match(Op(function), flat.graph.outputs[0])
    stored = dict(flat.layer.named_tensors())

    class Written(M.Module):
        def __init__(self) -> None:
            super().__init__()
            for name, tensor in stored.items():
                setattr(self, name, tensor)

        def forward(self, x: Any) -> Any:
            rest = (
                getattr(self, a.path.rpartition(".")[2]) if isinstance(a, StoredTensor) else a
                for a in call.args[1:]
            )
            return getattr(F.nn, function.__name__)(
                x, *rest, **call.options
            )  # the tracer sees what a module holds

    written = traced(Written(), x)
    assert match(Op(kind, Anything("x")), written.graph.outputs[0])
    assert not match(Op(M.Identity), written.graph.outputs[0])


def test_a_subclass_and_a_layer_of_two_functions_are_no_match() -> None:
    class Own(M.Conv2d):
        def forward(self, inp: Any) -> Any:
            return super().forward(inp) * 2

    flat = flatten(qtrace.trace(Layer(Own(4, 4, 1)), X, check=False))
    assert not match(Op(F.conv2d), flat.graph.outputs[0])
    flat = traced(Layer(M.Conv2d(4, 4, 3, padding=1, padding_mode="reflect")))
    assert not match(Op(F.conv2d), flat.graph.outputs[0])


def test_a_weight_that_is_computed_is_no_layer() -> None:
    flat = traced(lambda x, w: F.conv2d(x, w * 2.0), X, images(3, 4, 3, 3))
    assert not match(Op(M.Conv2d, Anything()), flat.graph.outputs[0])


def test_parameters_of_a_called_layer_are_bound() -> None:
    flat = traced(Layer(M.Conv2d(4, 3, 3, stride=2)))
    found = match(
        Op(F.conv2d, Anything("x"), Param("w"), Param("b"), args={"stride": 2}), flat.graph.outputs[0]
    )
    assert found
    assert (found["w"].path, found["w"].shape) == ("layer.weight", (3, 4, 3, 3))
    assert found["b"].path == "layer.bias"
    flat = traced(Layer(M.Conv2d(4, 3, 3, bias=False)))
    assert match(Op(F.conv2d, Anything(), Param(), Const(None)), flat.graph.outputs[0])


class Net(M.Module):
    """Two spellings of conv and sigmoid."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = M.Conv2d(4, 4, 3, padding=1), M.Conv2d(4, 4, 3, padding=(1, 1))
        self.act = M.Sigmoid()

    def forward(self, x: Any) -> Any:
        y = self.act(self.first(x))
        return F.sigmoid(F.conv2d(y, self.second.weight, self.second.bias, padding=1))


@pytest.mark.parametrize("pattern", [lambda x: F.sigmoid(x), lambda x: M.Sigmoid()(x)])
def test_a_rule_finds_both_spellings_of_an_activation(pattern: Any) -> None:
    flat = traced(randomize(Net()))
    rule = function_rule(pattern, lambda x: F.tanh(x / 2.0) * 0.5 + 0.5, name="tanh")
    before = flat(mge.Tensor(X)).numpy()
    assert sum(result.applied for result in apply_rules(flat, [rule])) == 2
    assert {problem.code for problem in lint(flat)} <= LEFTOVERS
    np.testing.assert_allclose(flat(mge.Tensor(X)).numpy(), before, atol=1e-6)


def test_a_rule_finds_both_spellings_of_a_convolution_with_its_parameters() -> None:
    """The weights of the layers stay parameters under their paths."""
    flat = traced(randomize(Net()))

    def pattern(x: Any, w: Any, b: Any) -> Any:
        return F.sigmoid(F.conv2d(x, w, b, padding=1))

    def replacement(x: Any, w: Any, b: Any) -> Any:
        return F.sigmoid(F.conv2d(x, w * 2.0, b * 2.0, padding=1) * 0.5)

    example = [X, np.zeros((4, 4, 3, 3), np.float32), np.zeros((1, 4, 1, 1), np.float32)]
    before, names = flat(mge.Tensor(X)).numpy(), set(dict(flat.named_parameters()))
    results = apply_rules(flat, [function_rule(pattern, replacement, example=example)])
    assert sum(result.applied for result in results) == 2
    assert {problem.code for problem in lint(flat)} <= LEFTOVERS
    assert set(dict(flat.named_parameters())) == names
    assert not any(type(owner(expr)) is M.Conv2d for expr in exprs(flat))
    assert [op_label(expr) for expr in exprs(flat)].count("F.conv2d") == 2
    np.testing.assert_allclose(flat(mge.Tensor(X)).numpy(), before, atol=1e-6)


def test_the_editor_takes_a_bound_parameter_as_a_node() -> None:
    flat = traced(Layer(M.Conv2d(4, 3, 1)))
    found = match(Op(F.conv2d, Anything("x"), Param("w"), Param("b")), flat.graph.outputs[0])
    assert found
    before = flat(mge.Tensor(X)).numpy()
    with GraphEditor(flat) as editor:
        old = exprs(flat)[-1]
        editor.replace_expr(
            old, editor.call_function(F.conv2d, found["x"], found["w"], found["b"], after=old)
        )
    assert op_label(exprs(flat)[-1]) == "F.conv2d"
    np.testing.assert_array_equal(flat(mge.Tensor(X)).numpy(), before)


class Normed(M.Module):
    """Two spellings of a convolution with BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = M.Conv2d(4, 4, 1), M.BatchNorm2d(4)
        self.other, self.norm = M.Conv2d(4, 4, 1), M.BatchNorm2d(4, eps=1e-3)

    def forward(self, x: Any) -> Any:
        n = self.norm
        x = self.other(self.bn(self.conv(x)))
        return F.nn.batch_norm(x, n.running_mean, n.running_var, n.weight, n.bias, eps=1e-3)


def test_both_spellings_of_a_batch_norm_match_the_class_and_a_rule() -> None:
    flat = traced(randomize(Normed()))
    pattern = Op(M.BatchNorm2d, Op(M.Conv2d, Anything("x")))
    norms = [expr.outputs[0] for expr in exprs(flat) if "batch" in op_label(expr).lower()]
    assert len(norms) == 2
    assert all(match(pattern, node) for node in norms)
    assert match(Op(M.BatchNorm2d, Anything(), args={"eps": 1e-3}), norms[1])
    assert not match(Op(M.BatchNorm2d, Anything(), args={"eps": 1e-3}), norms[0])
    assert not any(match(Op(M.BatchNorm1d, Anything()), node) for node in norms)

    def formula(x: Any, mean: Any, var: Any, w: Any, b: Any) -> Any:
        return F.nn.batch_norm(x, mean, var, w, b, eps=1e-3)

    def replacement(x: Any, mean: Any, var: Any, w: Any, b: Any) -> Any:
        return (x - mean) / F.sqrt(var + 1e-3) * w + b

    channels = [np.ones((1, 4, 1, 1), np.float32)] * 4
    before = flat(mge.Tensor(X)).numpy()
    results = apply_rules(flat, [function_rule(formula, replacement, example=[X, *channels])])
    assert sum(result.applied for result in results) == 1  # the other one has the eps 1e-5
    np.testing.assert_allclose(flat(mge.Tensor(X)).numpy(), before, atol=1e-5)


def test_a_batch_norm_that_computes_something_else_is_no_match() -> None:
    frozen = randomize(M.BatchNorm2d(4, freeze=True))
    flat = traced(Layer(frozen))
    assert not match(Op(F.nn.batch_norm), flat.graph.outputs[0])

    class Batch(M.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bn = randomize(M.BatchNorm2d(4))

        def forward(self, x: Any) -> Any:
            n = self.bn
            return F.nn.batch_norm(x, None, None, n.weight, n.bias, training=True)

    flat = traced(Batch())
    assert not match(Op(M.BatchNorm2d, Anything()), flat.graph.outputs[0])
