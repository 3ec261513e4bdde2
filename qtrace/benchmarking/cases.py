"""What is timed for a cost table: networks of some layers each, over a grid of shapes.

A layer stands in the surroundings that it has in a real network. Float convolutions come in chains, so that
they run in onnxruntime's blocked layout and the reordering at both ends does not count. Integer ops come
between QuantizeLinear and DequantizeLinear nodes that fuse.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from qtrace.benchmarking.net import MIDDLE, SCALE, Net
from qtrace.costs import FLOAT, INTEGER, OpShape

__all__ = ["Build", "Case", "Slot", "alone", "between_convs", "boundaries", "conv", "conv_branches"]

_REPEATS = 3


@dataclass(frozen=True)
class Slot:
    """One timed op of a network.

    Attributes:
        prefix: the beginning of the names of its nodes.
        op: its shapes.
        form: the form in which it has to run.
        each: whether every node with this prefix is such an op of its own.
    """

    prefix: str
    op: OpShape
    form: str
    each: bool = False


@dataclass(frozen=True)
class Case:
    """A network whose slots are timed.

    Attributes:
        model: the serialized network.
        inputs: input name -> shape.
        slots: what is timed.
    """

    model: bytes
    inputs: dict[str, tuple[int, ...]]
    slots: tuple[Slot, ...]


def conv(form: str, inputs: int, outputs: int, kernel: int, side: int, groups: int = 1) -> Case:
    """A chain of convolutions of stride 1 with Relu, from ``inputs`` to ``outputs`` channels and back."""
    net, slots = Net(), []
    integer = form == INTEGER
    x = net.input((1, inputs, side, side))
    x = net.quantize(x, zero_point=0) if integer else x
    for index in range(2 * _REPEATS - 2):
        ends = (inputs, outputs) if index % 2 == 0 else (outputs, inputs)
        op = _conv_shape(*ends, kernel, (side, side), 1, groups)
        slots.append(Slot(f"m{index}.", op, form))
        x = _conv_node(net, x, op, slots[-1].prefix, integer)
    return Case(net.serialize(x), net.inputs, tuple(slots))


def conv_branches(
    form: str, inputs: int, outputs: int, kernel: int, side: int, groups: int = 1, stride: int = 2
) -> Case:
    """Convolutions that read one tensor, for strides and channels that make no chain.

    Args:
        form: the form of the convolutions.
        inputs: the input channels.
        outputs: the output channels.
        kernel: the side of the window.
        side: the side of the output.
        groups: the number of groups.
        stride: the stride.
    """
    net, slots, results = Net(), [], []
    integer = form == INTEGER
    x = net.input((1, inputs, side * stride, side * stride))
    x = net.quantize(x, zero_point=0) if integer else x
    if groups > 1:  # a depthwise layer follows a convolution, which leaves its result in the layout it needs
        head = _conv_shape(inputs, inputs, 1, (side * stride, side * stride), 1, 1)
        x = _conv_node(net, x, head, "", integer)
    for index in range(2):
        op = _conv_shape(inputs, outputs, kernel, (side * stride, side * stride), stride, groups)
        slots.append(Slot(f"m{index}.", op, form))
        results.append(_conv_node(net, x, op, slots[-1].prefix, integer))
    return Case(net.serialize(*results), net.inputs, tuple(slots))


def _conv_shape(
    inputs: int, outputs: int, kernel: int, size: tuple[int, int], stride: int, groups: int
) -> OpShape:
    padded = [(n + 2 * (kernel // 2) - kernel) // stride + 1 for n in size]
    weight = (outputs, inputs // groups, kernel, kernel)
    return OpShape(
        "conv2d",
        ((1, inputs, *size),),
        ((1, outputs, *padded),),
        weight=weight,
        stride=(stride, stride),
        groups=groups,
    )


def _conv_node(net: Net, x: str, op: OpShape, prefix: str, integer: bool) -> str:
    """Adds a convolution with Relu, and its rounding if it is an integer one."""
    shape = (op.outputs[0][1], *op.weight[1:])
    net.measure("")
    if integer:
        parameters = [net.weight(shape), net.bias(shape[0])]
    else:
        parameters = [net.random(shape), net.random(shape[:1])]
    net.measure(prefix.rstrip("."))
    kernel = op.weight[-1]
    y = net.node(
        "Conv",
        [x, *parameters],
        kernel_shape=[kernel, kernel],
        strides=list(op.stride),
        pads=[kernel // 2] * 4,
        group=op.groups,
    )
    y = net.node("Relu", [y])
    net.measure("")
    return net.quantize(y, zero_point=0) if integer else y


Build = Callable[[Net, list[str], bool], str]
"""Adds one op to a network, given its data operands and whether they are integers; returns the result."""


def between_convs(op: OpShape, form: str, build: Build, *, scale: float = SCALE, zero: int = MIDDLE) -> Case:
    """Ops of one shape, each between convolutions of its own, whose layout a runtime may keep.

    Args:
        op: the shapes, all of four axes.
        form: the form.
        build: adds the op.
        scale: the scale of the results.
        zero: the zero point of the results.
    """
    net, integer, results, slots = Net(), form != FLOAT, [], []
    source = net.input(op.inputs[0])
    source = net.quantize(source) if integer else source
    for index in range(_REPEATS):
        slots.append(_slot(op, form, index))
        names = [_pixelwise(net, _resized(net, source, op, shape), shape[1], integer) for shape in _data(op)]
        net.measure(f"m{index}")
        y = build(net, names, integer)
        net.measure("")
        y = net.quantize(y, scale, zero) if integer else y
        results.append(_pixelwise(net, y, op.outputs[0][1], integer))
    return Case(net.serialize(*results), net.inputs, tuple(slots))


def alone(op: OpShape, form: str, build: Build, *, scale: float = SCALE, zero: int = MIDDLE) -> Case:
    """Ops of one shape that read inputs of the network; see `between_convs`."""
    net, integer, results, slots = Net(), form != FLOAT, [], []
    for index in range(_REPEATS):
        slots.append(_slot(op, form, index))
        names = [net.input(shape) for shape in _data(op)]
        names = [net.quantize(name) for name in names] if integer else names
        net.measure(f"m{index}")
        y = build(net, names, integer)
        net.measure("")
        results.append(net.quantize(y, scale, zero) if integer else y)
    return Case(net.serialize(*results), net.inputs, tuple(slots))


def boundaries(channels: int, side: int) -> Case:
    """Float and integer convolutions in turns: the roundings between them, and the changes of layout."""
    shape = (1, channels, side, side)
    net, slots = Net(), []
    x = _pixelwise(net, net.input(shape), channels, False)
    for index in range(_REPEATS):
        names = [f"{kind}{index}" for kind in ("quantize", "dequantize")]
        slots += [
            Slot(f"{name}.", OpShape(name.rstrip("0123456789"), (shape,), (shape,)), FLOAT) for name in names
        ]
        net.measure(names[0])
        x = net.only_quantize(x, zero_point=0)
        net.measure("")
        x = _pixelwise(net, net.dequantize(x, zero_point=0), channels, True, rounded=False)
        x = net.only_quantize(x, zero_point=0)
        net.measure(names[1])
        x = net.dequantize(x, zero_point=0)
        net.measure("")
        x = _pixelwise(net, x, channels, False)
    moved = OpShape("reorder", (shape,), (shape,))
    slots += [Slot("Reorder", moved, FLOAT, each=True), Slot("Transpose", moved, INTEGER, each=True)]
    return Case(net.serialize(x), net.inputs, tuple(slots))


def _slot(op: OpShape, form: str, index: int) -> Slot:
    """Returns the slot of an op; onnxruntime names the node that it fuses from GELU's pieces itself."""
    return Slot("Gelu", op, form, each=True) if op.kind == "gelu" else Slot(f"m{index}.", op, form)


def _data(op: OpShape) -> tuple[tuple[int, ...], ...]:
    return op.inputs[:1] if op.stored else op.inputs


def _resized(net: Net, source: str, op: OpShape, shape: tuple[int, ...]) -> str:
    """Returns ``source``, or an input of the network for an operand of another shape."""
    return source if shape == op.inputs[0] else net.input(shape)


def _pixelwise(net: Net, x: str, channels: int, integer: bool, rounded: bool = True) -> str:
    """Adds a cheap convolution of each channel by itself; with its Relu, nothing behind it fuses into it."""
    if integer:
        parameters = [net.weight((channels, 1, 1, 1)), net.bias(channels)]
    else:
        parameters = [net.random((channels, 1, 1, 1)), net.random((channels,))]
    y = net.node("Conv", [x, *parameters], kernel_shape=[1, 1], group=channels)
    y = net.node("Relu", [y])
    return net.quantize(y, zero_point=0) if integer and rounded else y
