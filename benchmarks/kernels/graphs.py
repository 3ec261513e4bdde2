"""The kernels of a cost table as graphs: each op as a user's network has it, in the surroundings of one.

A graph is prepared, calibrated and exported as any other. What is timed is therefore what exporters write,
with its layouts, its roundings and the form that an op has in the file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import megengine.functional as F
import numpy as np

from qtrace.costs import OpShape
from qtrace.graph import GraphBuilder
from qtrace.graph.types import TensorNode, TracedModule

__all__ = [
    "FUNCTIONS",
    "REPEATS",
    "Surroundings",
    "between_sums",
    "branches",
    "build",
    "chain",
    "chained",
    "in_a_row",
    "in_turns",
    "stand_alone",
    "surrounded",
]

Shape = tuple[int, ...]
_Add: TypeAlias = "Callable[[GraphBuilder, OpShape, str, Sequence[TensorNode]], TensorNode]"
_Rest: TypeAlias = "Callable[[], Iterable[TensorNode]]"
Surroundings: TypeAlias = "Callable[[GraphBuilder, OpShape, str], _Rest]"
"""Adds the inputs of a network about an op, whose names begin with the third argument; what it returns adds
the rest, and gives the outputs."""
REPEATS = 3
"""The ops of one shape in a network."""
_VALUES = np.random.default_rng(0).normal(0.0, 0.1, 4099).astype(np.float32)


def _function(function: Callable[..., Any], *args: Any, **kwargs: Any) -> _Add:
    """Returns what adds a call of ``function`` on the operands."""
    return lambda graph, _, name, data: graph.call_function(function, *data, *args, name=name, **kwargs)


def _mish(graph: GraphBuilder, _: OpShape, name: str, data: Sequence[TensorNode]) -> TensorNode:
    gate = graph.call_function(F.softplus, *data, name=f"{name}_softplus")
    gate = graph.call_function(F.tanh, gate, name=f"{name}_tanh")
    return _node(graph.call_function(F.mul, *data, gate, name=name))


FUNCTIONS: dict[str, _Add] = {
    "relu": _function(F.relu),
    "clip": _function(F.clip, 0.5, 5.0),
    "leaky_relu": _function(F.leaky_relu, 0.1),
    "sigmoid": _function(F.sigmoid),
    "tanh": _function(F.tanh),
    "hsigmoid": _function(F.hsigmoid),
    "silu": _function(F.silu),
    "hswish": _function(F.hswish),
    "mish": _mish,
    "gelu": _function(F.gelu),
    "exp": _function(F.exp),
}
"""The kinds with one operand and a result of its shape."""


def _binary(function: Callable[..., Any]) -> _Add:
    def add(graph: GraphBuilder, op: OpShape, name: str, data: Sequence[TensorNode]) -> TensorNode:
        operands: list[Any] = list(data)
        if op.stored and op.inputs[1]:
            operands.append(graph.parameter(f"{name}_stored", np.full(op.inputs[1], 0.7, np.float32)))
        elif op.stored:
            operands.append(0.7)
        return _node(graph.call_function(function, *operands, name=name))

    return add


def _weight(graph: GraphBuilder, path: str, shape: Sequence[int]) -> TensorNode:
    """Adds a parameter of random values, without a draw from MegEngine's generator."""
    return graph.parameter(path, np.resize(_VALUES, tuple(shape)))


def _layer_parameters(
    graph: GraphBuilder, name: str, weight: Sequence[int], bias: Sequence[int]
) -> tuple[TensorNode, TensorNode]:
    return _weight(graph, f"{name}_weight", weight), _weight(graph, f"{name}_bias", bias)


def _convolve(graph: GraphBuilder, op: OpShape, name: str, data: Sequence[TensorNode]) -> TensorNode:
    outputs, inputs, *window = op.weight
    split = (op.groups, outputs // op.groups, inputs, *window) if op.groups > 1 else op.weight
    parameters = _layer_parameters(graph, name, split, (1, outputs, 1, 1))
    sizes = {"stride": op.stride, "padding": window[0] // 2, "groups": op.groups}
    return _node(graph.call_function(F.conv2d, *data, *parameters, **sizes, name=name))


def _transposed(graph: GraphBuilder, op: OpShape, name: str, data: Sequence[TensorNode]) -> TensorNode:
    parameters = _layer_parameters(graph, name, op.weight, (1, op.weight[1], 1, 1))
    sizes = {"stride": op.stride, "padding": (op.weight[-1] - op.stride[0]) // 2}
    return _node(graph.call_function(F.conv_transpose2d, *data, *parameters, **sizes, name=name))


def _linear(graph: GraphBuilder, op: OpShape, name: str, data: Sequence[TensorNode]) -> TensorNode:
    parameters = _layer_parameters(graph, name, op.weight, op.weight[:1])
    return _node(graph.call_function(F.linear, *data, *parameters, name=name))


def _layer_norm(graph: GraphBuilder, op: OpShape, name: str, data: Sequence[TensorNode]) -> TensorNode:
    shape = op.inputs[0][-1:]
    parameters = _layer_parameters(graph, name, shape, shape)
    return _node(graph.call_function(F.nn.layer_norm, *data, shape, True, *parameters, name=name))


def _pool(function: Callable[..., Any]) -> _Add:
    """Adds a pooling with as many results as strides fit into the input."""

    def add(graph: GraphBuilder, op: OpShape, name: str, data: Sequence[TensorNode]) -> TensorNode:
        window, stride = op.weight[0], op.stride[0]
        return _node(graph.call_function(function, *data, window, stride, (window - 1) // 2, name=name))

    return add


def _resize(mode: str) -> _Add:
    return _function(F.vision.interpolate, scale_factor=2, mode=mode, align_corners=None)


_OTHERS: dict[str, _Add] = {
    "add": _binary(F.add),
    "mul": _binary(F.mul),
    "sub": _binary(F.sub),
    "div": _binary(F.div),
    "conv2d": _convolve,
    "conv_transpose2d": _transposed,
    "linear": _linear,
    "matmul": _function(F.matmul),
    "layer_norm": _layer_norm,
    "softmax": _function(F.softmax, axis=-1),
    "max_pool2d": _pool(F.max_pool2d),
    "avg_pool2d": _pool(F.avg_pool2d),
    "adaptive_avg_pool2d": _function(F.adaptive_avg_pool2d, 1),
    "mean": _function(F.mean, axis=[2, 3], keepdims=True),
    "interpolate": _resize("nearest"),
    "interpolate, bilinear": _resize("bilinear"),
    "concat": lambda graph, _, name, data: graph.call_function(F.concat, list(data), 1, name=name),
    "reshape": lambda graph, op, name, data: graph.call_function(F.reshape, *data, op.outputs[0], name=name),
    "transpose": _function(F.transpose, (0, 2, 3, 1)),
    "split": lambda graph, op, name, data: graph.call_method(
        "__getitem__", *data, (slice(None), slice(0, op.outputs[0][1])), name=name
    ),
}


def _node(value: Any) -> TensorNode:
    assert isinstance(value, TensorNode)
    return value


def add_op(graph: GraphBuilder, op: OpShape, name: str, data: Sequence[TensorNode]) -> TensorNode:
    """Adds an op of a cost table, and returns its result.

    Args:
        graph: the graph.
        op: its kind and shapes; several kernels of an op, as ``max_pool2d, plain`` is one, are one op here.
        name: the name of the result, and the beginning of all names of the op.
        data: its computed operands.
    """
    add = FUNCTIONS.get(op.kind) or _OTHERS.get(op.kind) or _OTHERS[op.kind.partition(",")[0]]
    return _node(add(graph, op, name, data))


def _layer(graph: GraphBuilder, op: OpShape, name: str, x: TensorNode) -> TensorNode:
    """Adds a convolution with Relu."""
    return _node(graph.call_function(F.relu, add_op(graph, op, name, [x]), name=f"{name}_relu"))


def _pixelwise(graph: GraphBuilder, x: TensorNode, shape: Shape, name: str) -> TensorNode:
    """Adds a cheap convolution of each channel by itself; with its Relu, nothing after it fuses into it.

    Its results are not 0, so that they may be divided by.
    """
    channels = shape[1]
    # A convolution of one group lacks an axis of groups.
    sizes = (channels, 1, 1, 1, 1) if channels > 1 else (1, 1, 1, 1)
    weight = graph.parameter(f"{name}_weight", np.full(sizes, 0.1, np.float32))
    bias = graph.parameter(f"{name}_bias", np.ones((1, channels, 1, 1), np.float32))
    y = graph.call_function(F.conv2d, x, weight, bias, groups=channels, name=name)
    return _node(graph.call_function(F.relu, y, name=f"{name}_relu"))


def _computed(op: OpShape) -> tuple[Shape, ...]:
    """Returns the shapes of the operands that are no stored tensors."""
    return op.inputs[:1] if op.stored else op.inputs


def chain(graph: GraphBuilder, op: OpShape, name: str) -> _Rest:
    """Convolutions of stride 1 in a row, to the channels of ``op`` and back, twice."""
    x = graph.input(f"{name}x", op.inputs[0])

    def add() -> Iterator[TensorNode]:
        y = x
        for index, each in enumerate(chained(op)):
            y = _layer(graph, each, f"{name}m{index}", y)
        yield y

    return add


def chained(op: OpShape) -> Iterator[OpShape]:
    """Yields the convolutions of `chain`."""
    outputs, inputs, *window = op.weight
    back = (inputs * op.groups, outputs // op.groups, *window)
    for _ in range(2):
        yield op
        yield OpShape(op.kind, op.outputs, op.inputs, back, op.stride, op.groups)


def branches(graph: GraphBuilder, op: OpShape, name: str) -> _Rest:
    """Two convolutions that read one tensor, for strides and channels that make no chain."""
    (shape,) = op.inputs
    x = graph.input(f"{name}x", shape)

    def add() -> Iterator[TensorNode]:
        y = x
        if (
            op.groups > 1
        ):  # a depthwise layer follows a convolution, whose result has the layout that it needs
            head = OpShape("conv2d", (shape,), (shape,), (shape[1], shape[1], 1, 1), (1, 1))
            y = _layer(graph, head, f"{name}c", x)
        yield from [_layer(graph, op, f"{name}m{index}", y) for index in range(2)]

    return add


def surrounded(graph: GraphBuilder, op: OpShape, name: str) -> _Rest:
    """Ops of one shape, each between convolutions of its own, whose layout a runtime may keep."""
    shapes = _computed(op)
    source = graph.input(f"{name}x", shapes[0])
    places = [(index, n, shape) for index in range(REPEATS) for n, shape in enumerate(shapes)]
    inputs = [
        source if shape == shapes[0] else graph.input(f"{name}x{index}_{n}", shape)
        for index, n, shape in places
    ]

    def add() -> Iterator[TensorNode]:
        data = [
            _pixelwise(graph, x, shape, f"{name}a{index}_{n}")
            for x, (index, n, shape) in zip(inputs, places, strict=True)
        ]
        for index in range(REPEATS):
            own = data[index * len(shapes) : (index + 1) * len(shapes)]
            result = add_op(graph, op, f"{name}m{index}", own)
            yield _pixelwise(graph, result, op.outputs[0], f"{name}b{index}")

    return add


def stand_alone(graph: GraphBuilder, op: OpShape, name: str) -> _Rest:
    """Ops of one shape that read inputs of the network and give outputs."""
    inputs = [
        [graph.input(f"{name}x{index}_{n}", shape) for n, shape in enumerate(_computed(op))]
        for index in range(REPEATS)
    ]
    return lambda: (add_op(graph, op, f"{name}m{index}", data) for index, data in enumerate(inputs))


def between_sums(graph: GraphBuilder, op: OpShape, name: str) -> _Rest:
    """Ops that move values, which are integers there because a sum comes before and after each."""
    (shape,), (out,) = op.inputs, op.outputs
    inputs = [graph.input(f"{name}x{index}", shape) for index in range(REPEATS)]

    def add() -> Iterator[TensorNode]:
        for index, x in enumerate(inputs):
            y = add_op(graph, OpShape("add", (shape, ()), (shape,), stored=True), f"{name}a{index}", [x])
            y = add_op(graph, op, f"{name}m{index}", [y])
            yield add_op(graph, OpShape("add", (out, ()), (out,), stored=True), f"{name}b{index}", [y])

    return add


def in_turns(graph: GraphBuilder, op: OpShape, name: str) -> _Rest:
    """Convolutions in turns, of which those called ``f`` shall stay float: roundings stand between."""
    (shape,) = op.inputs
    x = graph.input(f"{name}x", shape)

    def add() -> Iterator[TensorNode]:
        y = _pixelwise(graph, x, shape, f"{name}f")
        for index in range(REPEATS):
            y = _pixelwise(graph, y, shape, f"{name}i{index}")
            y = _pixelwise(graph, y, shape, f"{name}f{index}")
        yield y

    return add


def in_a_row(graph: GraphBuilder, op: OpShape, name: str, count: int = 1) -> _Rest:
    """Ops with one operand, each of which reads the result of the one before."""
    x = graph.input(f"{name}x", op.inputs[0])

    def add() -> Iterator[TensorNode]:
        y = x
        for index in range(count):
            y = add_op(graph, op, f"{name}m{index}", [y])
        yield y

    return add


def build(parts: Mapping[str, tuple[Surroundings, OpShape]]) -> TracedModule:
    """Returns a network of parts that do not depend on each other.

    Args:
        parts: the beginning of all names of a part -> its surroundings and op.
    """
    graph = GraphBuilder("Kernels")
    rests = [add(graph, op, name) for name, (add, op) in parts.items()]
    outputs = tuple(output for rest in rests for output in rest())
    return graph.finish(outputs if len(outputs) > 1 else outputs[0])
