"""Recurrent layers with ONNX's default activations; other forms stay as they are in the file."""

from __future__ import annotations

from typing import Any

from qtrace.graph import recurrent
from qtrace.graph.recurrent import DIRECTIONS, OnnxRecurrent
from qtrace.graph.types import TensorNode
from qtrace.importing.onnx.call import Call, Lowering
from qtrace.importing.onnx.values import Stored

__all__ = ["LOWERINGS"]

_GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
_ACTIVATIONS = {"LSTM": ["sigmoid", "tanh", "tanh"], "GRU": ["sigmoid", "tanh"], "RNN": ["tanh"]}
_RESULTS = ("sequence", "hidden", "cell")
_LENGTHS, _HIDDEN, _CELL, _PEEPHOLES = 4, 5, 6, 7


def _recurrent(call: Call) -> Any:
    op = call.node.op
    direction = _text(call.attribute("direction", "forward"))
    nonlinearity = _check_form(call, op, direction)
    reset_after = bool(call.attribute("linear_before_reset", 0)) if op == "GRU" else False
    ways, gates = len(DIRECTIONS[direction]), _GATES[op]
    weight, recurrence = call.stored(1), call.stored(2)
    size = int(call.attribute("hidden_size", recurrence.array.shape[-1]))
    shapes: list[tuple[int, ...]] = [(ways, gates * size, call.shape(0)[2]), (ways, gates * size, size)]
    tensors = {"weight": weight, "recurrence": recurrence}
    if call.has(3):
        tensors["bias"] = call.stored(3)
        shapes.append((ways, 2 * gates * size))
    for stored, shape in zip(tensors.values(), shapes, strict=True):
        if stored.array.shape != shape:
            call.contradict(f"reads {stored.name!r} {list(stored.array.shape)}, where {list(shape)} belongs")
    bias = shapes[2] if call.has(3) else None
    module = OnnxRecurrent(op.lower(), shapes[0], shapes[1], bias, direction, reset_after, nonlinearity)
    states = [_state(call, index) for index in (_HIDDEN, _CELL)[: 2 if op == "LSTM" else 1]]
    while states and states[-1] is None:
        states.pop()
    # A list of names, one for each result: the outputs that the file leaves out are unnamed.
    outputs = [*call.result_names, *[""] * 3][: 3 if op == "LSTM" else 2]
    names: Any = [name or f"{call.name}_{end}" for name, end in zip(outputs, _RESULTS, strict=False)]
    results = _shared(call, module, tensors, states, names)
    if results is None:
        results = call.module(module, tensors, call.tensor(0), *states, name=names)
    return tuple(results)[: len(call.node.outputs)]


def _shared(
    call: Call, module: OnnxRecurrent, tensors: dict[str, Stored], states: list[Any], names: Any
) -> Any:
    """Calls a function of the parameters of another layer if the node shares some with it; None if not."""
    found = {name: call.layers.parameter_of(stored) for name, stored in tensors.items()}
    if call.layers.has_module(module, tensors) or not any(node is not None for node in found.values()):
        return None
    nodes = [call.layers.tensor(tensors[name]) if node is None else node for name, node in found.items()]
    weights = [*nodes, *[None] * (3 - len(nodes))]
    states = [*states, *[None] * ((2 if module.kind == "lstm" else 1) - len(states))]
    arguments = (call.tensor(0), *weights, *states, module.direction)
    if module.kind == "lstm":
        return call.function(recurrent.lstm, *arguments, name=names)
    if module.kind == "gru":
        return call.function(recurrent.gru, *arguments, module.linear_before_reset, name=names)
    return call.function(recurrent.rnn, *arguments, module.nonlinearity, name=names)


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _check_form(call: Call, op: str, direction: str) -> str:
    """Refuses the forms that MegEngine's graph lacks; returns the function of an RNN."""
    if direction not in DIRECTIONS:
        call.contradict(f"has the direction {direction!r}")
    ways = len(DIRECTIONS[direction])
    given = call.attribute("activations", None)
    names = [_text(name).lower() for name in given or _ACTIVATIONS[op] * ways]
    if op == "RNN" and names in (["relu"] * ways, ["tanh"] * ways):
        nonlinearity = names[0]
    elif names == _ACTIVATIONS[op] * ways:
        nonlinearity = "tanh"
    else:
        call.refuse(f"has the activations {', '.join(names)}")
    for name in ("activation_alpha", "activation_beta"):
        call.attribute(name, None)  # which sigmoid, tanh and relu do not read
    if call.attribute("clip", None) is not None:
        call.refuse("clips its gates")
    if call.attribute("layout", 0):
        call.refuse("has samples on its first axis, which onnxruntime does not run")
    if op == "LSTM" and call.attribute("input_forget", 0):
        call.refuse("couples its input and forget gates")
    if call.has(_PEEPHOLES):
        call.refuse("has peepholes")
    if call.has(_LENGTHS) and not _is_full(call):
        call.refuse("reads the lengths of its sequences")
    if not call.is_float(0):
        call.refuse(f"computes with {call.dtype(0).name}")
    return nonlinearity


def _is_full(call: Call) -> bool:
    """Returns whether stored lengths say that every sequence has all steps of the input."""
    lengths = call.values[_LENGTHS]
    fixed = len({shape[:2] for shape in call.shapes(0)}) == 1
    return isinstance(lengths, Stored) and fixed and bool((lengths.array == call.shape(0)[0]).all())


def _state(call: Call, index: int) -> TensorNode | None:
    """Returns a first state; None for one that is left out, or is stored as zeros."""
    if not call.has(index):
        return None
    value = call.values[index]
    if isinstance(value, Stored) and not value.array.any():
        return None
    return call.tensor(index)


LOWERINGS: dict[str, Lowering] = dict.fromkeys(_GATES, _recurrent)
