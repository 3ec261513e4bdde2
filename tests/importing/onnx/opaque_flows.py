"""Networks around control flow, values of unknown shape, sequences, text and integers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, helper

from tests.importing.onnx.opaque_net import Net

__all__ = ["FORMS"]

FORMS: dict[str, Callable[[], ModelProto]] = {}


def form(function: Callable[[], ModelProto]) -> Callable[[], ModelProto]:
    FORMS[function.__name__.strip("_")] = function
    return function


def _forms(name: str, options: dict[str, Any], make: Callable[..., ModelProto]) -> None:
    for key, value in options.items():
        FORMS[f"{name}_{key}"] = lambda value=value: make(value)  # type: ignore[misc]


def _body(
    nodes: Sequence[NodeProto],
    inputs: Sequence[tuple[str, int, Any]],
    outputs: Sequence[tuple[str, int, Any]],
) -> Any:
    infos = [[helper.make_tensor_value_info(*value) for value in values] for values in (inputs, outputs)]
    return helper.make_graph(list(nodes), "body", *infos)


def _condition(net: Net) -> str:
    total = net.add("ReduceSum", [net.features], keepdims=0)
    return str(net.add("Greater", [total, net.constant(np.float32(40))]))


@form
def if_captured() -> ModelProto:
    """Both branches read the features and a weight of the graph around them."""
    net = Net()
    weight = net.weights(4, 1, 1)
    bodies = {
        name: _body(
            [helper.make_node(op, [net.features, weight], ["r"])],
            [],
            [("r", TensorProto.FLOAT, (2, 4, 8, 8))],
        )
        for name, op in (("then_branch", "Mul"), ("else_branch", "Add"))
    }
    return net.model(net.conv(net.add("If", [_condition(net)], **bodies)))


@form
def if_of_two_shapes() -> ModelProto:
    net = Net()
    bodies = {
        name: _body(
            [helper.make_node("ReduceMax", [net.features], ["r"], axes=[2], keepdims=keep)],
            [],
            [("r", TensorProto.FLOAT, None)],
        )
        for name, keep in (("then_branch", 1), ("else_branch", 0))
    }
    kept = net.add("If", [_condition(net)], **bodies)
    total = net.add("ReduceSum", [kept], keepdims=0)
    return net.model(net.add("Mul", [net.conv(net.features), total]))


@form
def loop_while() -> ModelProto:
    """A loop that runs as often as a value says, and keeps the shape of its state."""
    net = Net()
    count = net.add("Cast", [net.add("ReduceMax", [net.features], keepdims=0)], to=TensorProto.INT64)
    body = _body(
        [
            helper.make_node("Identity", ["going"], ["still"]),
            helper.make_node("Mul", ["state", net.constant(np.float32(0.9))], ["next"]),
        ],
        [("i", TensorProto.INT64, ()), ("going", TensorProto.BOOL, ()), ("state", TensorProto.FLOAT, None)],
        [("still", TensorProto.BOOL, ()), ("next", TensorProto.FLOAT, None)],
    )
    return net.model(net.conv(net.add("Loop", [count, "", net.features], body=body)))


@form
def loop_of_collected() -> ModelProto:
    """A loop whose result is as long as a value says."""
    net = Net()
    count = net.add("Cast", [net.add("ReduceMax", [net.features], keepdims=0)], to=TensorProto.INT64)
    more = net.add("Add", [count, net.constant(np.int64(1))])
    body = _body(
        [
            helper.make_node("Identity", ["going"], ["still"]),
            helper.make_node("ReduceMean", [net.features], ["mean"], axes=[2, 3], keepdims=0),
        ],
        [("i", TensorProto.INT64, ()), ("going", TensorProto.BOOL, ())],
        [("still", TensorProto.BOOL, ()), ("mean", TensorProto.FLOAT, (2, 4))],
    )
    collected = net.add("Loop", [more, ""], body=body)
    return net.model(
        net.conv(net.features), net.linear(net.add("ReduceMax", [collected], axes=[0], keepdims=0), 4)
    )


@form
def scan() -> ModelProto:
    net = Net()
    body = _body(
        [helper.make_node("Add", ["s", "e"], ["n"]), helper.make_node("Tanh", ["n"], ["o"])],
        [("s", TensorProto.FLOAT, (2, 32)), ("e", TensorProto.FLOAT, (2, 32))],
        [("n", TensorProto.FLOAT, (2, 32)), ("o", TensorProto.FLOAT, (2, 32))],
    )
    start = net.constant(np.zeros((2, 32), np.float32))
    last, every = net.add("Scan", [start, net.steps(net.features)], 2, body=body, num_scan_inputs=1)
    return net.model(net.linear(every, 32), last)


@form
def nonzero_output() -> ModelProto:
    """An output whose shape the values decide."""
    net = Net()
    marked = net.add("Greater", [net.features, net.constant(np.float32(0.4))])
    places = net.add("Cast", [net.add("NonZero", [marked])], to=TensorProto.FLOAT)
    return net.model(net.conv(net.features), places)


@form
def nonzero_sum() -> ModelProto:
    """A shape that the values decide, between tensors of known shapes."""
    net = Net()
    flat = net.add("Reshape", [net.features, net.ints(-1)])
    places = net.add("Squeeze", [net.add("NonZero", [flat]), net.ints(0)])
    mean = net.add("ReduceMean", [net.add("Gather", [flat, places])], keepdims=0)
    return net.model(net.conv(net.add("Sub", [net.features, mean])))


@form
def unique() -> ModelProto:
    net = Net()
    rounded = net.add("Round", [net.features])
    values = net.add("Unique", [rounded])
    return net.model(net.conv(net.features), net.add("ReduceSum", [values], keepdims=1))


@form
def compress() -> ModelProto:
    net = Net()
    rows = net.add("Reshape", [net.features, net.ints(8, 64)])
    strong = net.add(
        "Greater", [net.add("ReduceMax", [rows], axes=[1], keepdims=0), net.constant(np.float32(1))]
    )
    chosen = net.add("Compress", [rows, strong], axis=0)
    return net.model(net.conv(net.features), net.linear(chosen, 64))


def _nms(options: tuple[bool, int]) -> ModelProto:
    limited, corner = options
    net = Net()
    boxes = net.add("Reshape", [net.conv(net.features), net.ints(2, 64, 4)])
    scores = net.add("Reshape", [net.add("Sigmoid", [net.features]), net.ints(2, 4, 64)])
    more = [net.constant(np.array([3])), net.constant(np.array([0.5], np.float32))]
    more += [net.constant(np.array([0.6], np.float32))] if limited else []
    chosen = net.add("NonMaxSuppression", [boxes, scores, *more], center_point_box=corner)
    picked = net.add("GatherND", [scores, chosen])
    return net.model(boxes, net.add("ReduceMax", [picked], keepdims=0) if limited else picked)


_forms("nms", {"all": (False, 0), "limited": (True, 0), "centers": (False, 1)}, _nms)


@form
def topk_computed() -> ModelProto:
    net = Net()
    count = net.add("Cast", [net.add("ReduceMax", [net.features], keepdims=1)], to=TensorProto.INT64)
    wanted = net.add("Max", [net.add("Reshape", [count, net.ints(1)]), net.ints(1)])
    values, _ = net.add("TopK", [net.rows(net.features), wanted], 2, axis=1)
    return net.model(net.linear(values, 32))


@form
def topk_on_an_axis() -> ModelProto:
    net = Net()
    values, places = net.add("TopK", [net.rows(net.features), net.ints(3)], 2, axis=1, largest=0)
    floats = net.add("Cast", [places], to=TensorProto.FLOAT)
    return net.model(net.linear(values, 32), floats)


@form
def sequence() -> ModelProto:
    net = Net()
    halves = net.add("SplitToSequence", [net.features, net.constant(np.array(2))], axis=1)
    longer = net.add("SequenceInsert", [halves, net.add("SequenceAt", [halves, net.constant(np.array(0))])])
    joined = net.add("ConcatFromSequence", [longer], axis=1)
    return net.model(net.conv(joined, 6))


@form
def sequence_map() -> ModelProto:
    net = Net()
    halves = net.add("SplitToSequence", [net.features, net.constant(np.array(2))], axis=1)
    body = _body(
        [helper.make_node("Sin", ["e"], ["r"])],
        [("e", TensorProto.FLOAT, None)],
        [("r", TensorProto.FLOAT, None)],
    )
    mapped = net.add("SequenceMap", [halves], body=body)
    return net.model(net.add("ConcatFromSequence", [mapped], axis=1))


@form
def optional() -> ModelProto:
    net = Net(18)
    boxed = net.add("Optional", [net.features])
    return net.model(net.conv(net.add("OptionalGetElement", [boxed])))


@form
def integers() -> ModelProto:
    """Integers and booleans go into a kept node and come out of it."""
    net = Net()
    marked = net.add("Greater", [net.features, net.constant(np.float32(0.4))])
    numbers = net.add("Cast", [marked], to=TensorProto.INT64)
    shifted = net.add(
        "BitShift",
        [net.add("Cast", [numbers], to=TensorProto.UINT8), net.constant(np.uint8(2))],
        direction="LEFT",
    )
    return net.model(net.conv(net.add("Cast", [shifted], to=TensorProto.FLOAT)))


@form
def bitwise() -> ModelProto:
    net = Net(18)
    numbers = net.add("Cast", [net.features], to=TensorProto.INT32)
    y = net.add("BitwiseXor", [numbers, net.constant(np.int32(3))])
    return net.model(net.conv(net.add("Cast", [y], to=TensorProto.FLOAT)))


@form
def function_call() -> ModelProto:
    """A function of the model whose body has an op that is kept."""
    net = Net()
    net.domains["own"] = 1
    function = helper.make_function(
        "own",
        "Curve",
        ["a"],
        ["b"],
        [helper.make_node("Det", ["a"], ["d"]), helper.make_node("Atan", ["d"], ["b"])],
        [helper.make_opsetid("", 17)],
    )
    y = net.add("Curve", [net.features], domain="own")
    return net.model(net.conv(net.features), y, functions=[function])


@form
def two_behind_one() -> ModelProto:
    """Two kept nodes behind a value of unknown shape, which is computed once."""
    net = Net()
    flat = net.add("Reshape", [net.features, net.ints(-1)])
    places = net.add("Squeeze", [net.add("NonZero", [flat]), net.ints(0)])
    chosen = net.add("Gather", [flat, places])
    low, high = (net.add(op, [chosen], keepdims=0) for op in ("ReduceMin", "ReduceMax"))
    return net.model(net.conv(net.add("Div", [net.add("Sub", [net.features, low]), high])))


@form
def random_crop_of_sizes() -> ModelProto:
    """A slice whose ends are computed from values."""
    net = Net()
    end = net.add("Cast", [net.add("ReduceMax", [net.features], keepdims=1)], to=TensorProto.INT64)
    ends = net.add("Add", [net.add("Reshape", [end, net.ints(1)]), net.ints(2)])
    part = net.add("Slice", [net.features, net.ints(0), ends, net.ints(3)])
    return net.model(net.conv(net.features), net.add("ReduceMean", [part], keepdims=0))
