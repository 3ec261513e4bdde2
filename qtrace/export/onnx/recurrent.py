"""ONNX for recurrent layers: LSTM, GRU and RNN nodes, one for each layer of a stack."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from qtrace.errors import ExportError
from qtrace.export.onnx.types import Emitter, emit_several, parameter_source
from qtrace.export.onnx.writer import OnnxWriter
from qtrace.graph.recurrent import DIRECTIONS
from qtrace.graph.types import TensorNode
from qtrace.ops import OpCall

__all__ = ["RECURRENT"]

_OPS = {"lstm": "LSTM", "gru": "GRU", "rnn": "RNN"}
_TURNED = {"lstm": (0, 3, 1, 2), "rnn": (0,)}  # MegEngine's gates i f g o in ONNX's order i o f c


def _recurrent(w: OnnxWriter, call: OpCall) -> None:
    if "weights" in call.attrs:
        _Stack(w, call).write()
    elif "recurrence" in call.attrs:
        _layer(w, call)
    else:
        raise ExportError(
            f"{call.out.name}: {call.kind} cannot become ONNX with a projected hidden state, or as a "
            "constant: end the graph before it, or write it with linear layers"
        )


def _layer(w: OnnxWriter, call: OpCall) -> None:
    """Writes a layer of an imported graph as the node that it was."""
    a = call.attrs
    inputs = [w.name(a["x"]), w.name(a["weight"]), w.name(a["recurrence"])]
    inputs += ["" if node is None else w.name(node) for node in (a["bias"], None, a["hidden"], a.get("cell"))]
    names = _add(w, call, inputs, a["direction"], int(a["recurrence"].shape[2]), _read(call.outputs))
    w.names.update((node, name) for node, name in zip(call.outputs, names, strict=True) if name)


def _read(nodes: Iterable[TensorNode]) -> list[str]:
    """Returns the names of the results, "" for those that nothing reads."""
    return [node.name if node.users or node in node.top_graph._outputs else "" for node in nodes]


def _add(
    w: OnnxWriter, call: OpCall, inputs: list[str], direction: str, size: int, outputs: Sequence[str]
) -> list[str]:
    """Adds a node; results and inputs that are not there are "", and left out at the end."""
    attributes: dict[str, Any] = {"hidden_size": size}
    if direction != "forward":
        attributes["direction"] = direction
    if call.attrs.get("linear_before_reset"):
        attributes["linear_before_reset"] = 1
    if call.attrs.get("nonlinearity", "tanh") != "tanh":
        attributes["activations"] = ["Relu"] * len(DIRECTIONS[direction])
    while not inputs[-1]:
        inputs.pop()
    count = max((i + 1 for i, name in enumerate(outputs) if name), default=1)
    if not any(outputs):
        outputs = [call.out.name]
    names = emit_several(w, _OPS[call.kind], inputs, outputs[:count], **attributes)
    return [*names, *[""] * (len(outputs) - count)]


class _Stack:
    """Writes MegEngine's LSTM or RNN, whose layers are nodes that read each other."""

    def __init__(self, w: OnnxWriter, call: OpCall) -> None:
        self.w, self.call, self.a, self.base = w, call, call.attrs, call.out.name
        self.count, self.size = int(self.a["num_layers"]), int(self.a["hidden_size"])
        self.direction = "bidirectional" if self.a["bidirectional"] else "forward"
        self.ways = len(DIRECTIONS[self.direction])

    def write(self) -> None:
        """Writes all layers, and the results in the order of axes that MegEngine has."""
        w, batch_first = self.w, bool(self.a["batch_first"])
        source = self.a["x"]
        name = w.name(source)
        if batch_first:
            name = w.node("Transpose", [name], w.fresh(source.name), perm=[1, 0, 2])
        kinds = ("hidden", "cell") if self.call.kind == "lstm" else ("hidden",)
        starts = [self._starts(self.a[kind]) for kind in kinds]
        read = _read(self.call.outputs)
        ends: list[list[str]] = [[] for _ in kinds]
        for layer, tensors in enumerate(self._weights(int(source.shape[2]))):
            inputs = [name, *tensors, "", *(start[layer] for start in starts)]
            names = [w.fresh(self.base)] + [w.fresh(self.base) if wanted else "" for wanted in read[1:]]
            y, *last = _add(w, self.call, inputs, self.direction, self.size, names)
            for states, end in zip(ends, last, strict=True):
                states.append(end)
            final = layer == self.count - 1
            name = self._joined(y, batch_first and final, self.base if final else w.fresh(self.base))
        w.names[self.call.outputs[0]] = name
        for node, states, wanted in zip(self.call.outputs[1:], ends, read[1:], strict=True):
            if wanted and len(states) == 1:
                w.names[node] = states[0]
            elif wanted:
                w.emit("Concat", states, node, axis=0)

    def _joined(self, y: str, batch_first: bool, output: str) -> str:
        """Joins directions and values of (steps, directions, samples, values)."""
        w = self.w
        if self.ways == 1 and not batch_first:
            return w.node("Squeeze", [y, w.ints([1])], output)
        turned = w.node(
            "Transpose", [y], w.fresh(self.base), perm=[2, 0, 1, 3] if batch_first else [0, 2, 1, 3]
        )
        if self.ways == 1:
            return w.node("Squeeze", [turned, w.ints([2])], output)
        return w.node("Reshape", [turned, w.ints([0, 0, self.ways * self.size])], output)

    def _starts(self, node: TensorNode | None) -> list[str]:
        """Returns the first states of each layer; "" for zeros."""
        if node is None:
            return [""] * self.count
        name = self.w.name(node)
        if self.count == 1:
            return [name]
        parts = [self.w.fresh(node.name) for _ in range(self.count)]
        return emit_several(self.w, "Split", [name, self.w.ints([self.ways] * self.count)], parts, axis=0)

    def _weights(self, values: int) -> list[list[str]]:
        """Returns the weights and biases of each layer, cut from the parameter of all."""
        node = self.a["weights"]
        array = self.w.value(node)
        if array is None:
            raise ExportError(
                f"{self.base}: {self.call.kind} cannot become ONNX with computed weights: store them."
            )
        flat, place = array.reshape(-1), 0
        gates = len(_TURNED[self.call.kind])
        path = str(parameter_source(self.call, "weights").expr.name).rpartition(".")[0]  # type: ignore[union-attr]
        layers = []

        def take(*shape: int) -> np.ndarray:
            nonlocal place
            begin, place = place, place + int(np.prod(shape))
            part = flat[begin:place].reshape(gates, self.size, *shape[1:])
            return part[list(_TURNED[self.call.kind])].reshape(shape)

        for layer in range(self.count):
            inputs = values if layer == 0 else self.ways * self.size
            shapes: list[tuple[int, ...]] = [(gates * self.size, inputs), (gates * self.size, self.size)]
            shapes += [(gates * self.size,)] * 2 if self.a["bias"] else []
            parts = [[take(*shape) for shape in shapes] for _ in range(self.ways)]
            arrays = [np.stack(several) for several in zip(*parts, strict=True)]
            named = {"W": arrays[0], "R": arrays[1]}
            if self.a["bias"]:
                named["B"] = np.concatenate(arrays[2:], axis=1)
            names = [self.w.constant(f"{path}.{key}_l{layer}", value) for key, value in named.items()]
            layers.append([*names, *[""] * (3 - len(names))])
        return layers


RECURRENT: dict[str, Emitter] = dict.fromkeys(_OPS, _recurrent)
