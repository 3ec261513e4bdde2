"""A random program as the text of an ONNX file."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.fuzz.silent.naming import Names, layer_seed
from tests.fuzz.silent.programs import Program, Step

__all__ = ["onnx_text"]

HEADER = """\
import numpy as np
from onnx import TensorProto, helper

from tests.fuzz.silent.pieces import mask, normal, statistics, visible
from tests.importing.onnx.networks import model

float32 = np.float32
nodes, stored = [], {}
"""
_OPS = {
    "relu": "Relu",
    "sigmoid": "Sigmoid",
    "exp": "Exp",
    "tanh": "Tanh",
    "add": "Add",
    "sub": "Sub",
    "mul": "Mul",
    "maximum": "Max",
    "matmul": "MatMul",
}


def onnx_text(program: Program, batch: str | int | None = None) -> str:
    """Returns text that defines ``network``, a model; its first axis is called ``batch``, or has its size."""
    return _Text(program, batch).text()


class _Text:
    def __init__(self, program: Program, batch: str | int | None) -> None:
        self.program, self.batch = program, batch
        self.names = Names(program.naming, python=False)
        self.lines: list[str] = []
        self.stored: dict[str, str] = {}
        self.count = 0

    def text(self) -> str:
        inputs = {}
        for index, step in enumerate(self.program.steps):
            if step.op == "input":
                inputs[self._name(index)] = [self.batch or step.shape[0], *step.shape[1:]]
                continue
            self.result = self._name(index)
            write: Callable[[Step, list[str]], None] = getattr(self, f"_{step.op}")
            write(step, [self._name(i) for i in step.inputs])
        outputs = [self._name(value.index) for value in self.program.outputs]
        dtypes = {self._name(i): _DTYPES[s.op] for i, s in enumerate(self.program.steps) if s.op in _DTYPES}
        listed = ", ".join(f"{name!r}: {dtype}" for name, dtype in dtypes.items() if name in outputs)
        stored = "".join(f"stored[{name!r}] = {text}\n" for name, text in self.stored.items())
        return (
            f"{HEADER}{''.join(f'{line}{chr(10)}' for line in self.lines)}{stored}"
            f"network = model(nodes, {inputs}, {outputs}, stored, dtypes={{{listed}}})\n"
        )

    def _name(self, index: int) -> str:
        return self.names.value(index, self.program.steps[index].options.get("layer"))

    def _node(self, op: str, inputs: list[str], outputs: list[str] | None = None, **attributes: Any) -> str:
        outputs = outputs or [self.result]
        listed = "".join(f", {key}={value!r}" for key, value in attributes.items())
        self.lines.append(f"nodes.append(helper.make_node({op!r}, {inputs}, {outputs}{listed}))")
        return outputs[0]

    def _new(self, op: str, inputs: list[str], **attributes: Any) -> str:
        self.count += 1
        return self._node(op, inputs, [f"t{self.count}"], **attributes)

    def _store(self, text: str, name: str | None = None) -> str:
        if name is None:
            self.count += 1
            name = f"s{self.count}"
        self.stored.setdefault(name, text)
        return name

    def _number(self, number: float) -> str:
        return self._store(f"float32({str(number)!r})")

    def _conv(self, step: Step, inputs: list[str]) -> None:
        o, inside = step.options, self.program.steps[step.inputs[0]].shape[1]
        name, k, seed = self.names.layer(o["layer"]), o["kernel"], layer_seed(o["layer"])
        shape = f"{o['width']}, {inside // o['parts']}, {k}, {k}"
        tensors = [self._store(f"normal({seed}, {shape}, dead={o['dead']})", f"{name}.weight")]
        if o["bias"]:
            tensors.append(self._store(f"normal({seed + 1}, {o['width']}, dead={o['dead']})", f"{name}.bias"))
        self._node(
            "Conv", [*inputs, *tensors], pads=[k // 2] * 4, strides=[o["stride"]] * 2, group=o["parts"]
        )

    def _norm(self, step: Step, inputs: list[str]) -> None:
        name = self.names.layer(step.options["layer"])
        values = f"statistics({layer_seed(step.options['layer'])}, {step.shape[1]})"
        fields = ("weight", "bias", "running_mean", "running_var")
        tensors = [self._store(f"{values}[{i}]", f"{name}.{field}") for i, field in enumerate(fields)]
        self._node("BatchNormalization", [*inputs, *tensors])

    def _linear(self, step: Step, inputs: list[str]) -> None:
        o, inside = step.options, self.program.steps[step.inputs[0]].shape[-1]
        divided = None if o.get("exact") else o["divided"]
        name, seed = self.names.layer(o["layer"]), layer_seed(o["layer"])
        weight = self._store(f"normal({seed}, {o['width']}, {inside}, divided={divided}).T", f"{name}.weight")
        if o["bias"] is None:
            self._node("MatMul", [*inputs, weight])
            return
        product = self._new("MatMul", [*inputs, weight])
        bias = self.names.layer(o["bias"])
        first = f"{bias}.bias" not in self.stored
        self._store(f"np.linspace(-0.5, 0.5, {o['width']}, dtype=float32)", f"{bias}.bias")
        read = f"{bias}.bias" if first else self._new("Identity", [f"{bias}.bias"])
        self._node("Add", [product, read])

    def _layer_norm(self, step: Step, inputs: list[str]) -> None:
        ones = self._store(f"np.ones({step.shape[-1]}, float32)")
        zeros = self._store(f"np.zeros({step.shape[-1]}, float32)")
        self._node("LayerNormalization", [*inputs, ones, zeros], axis=-1)

    def _relu(self, step: Step, inputs: list[str]) -> None:
        self._node(_OPS[step.op], inputs)

    _sigmoid = _exp = _tanh = _add = _sub = _mul = _maximum = _matmul = _relu

    def _silu(self, step: Step, inputs: list[str]) -> None:
        self._node("Mul", [inputs[0], self._new("Sigmoid", inputs)])

    def _gelu(self, step: Step, inputs: list[str]) -> None:
        error = self._new("Erf", [self._new("Div", [*inputs, self._number(2**0.5)])])
        shifted = self._new("Add", [error, self._number(1.0)])
        self._node("Mul", [self._new("Mul", [*inputs, shifted]), self._number(0.5)])

    def _softmax(self, step: Step, inputs: list[str]) -> None:
        self._node("Softmax", inputs, axis=step.options.get("axis", -1))

    def _scaled(self, step: Step, inputs: list[str]) -> None:
        o = step.options
        factor = self._number(1.0 if o.get("exact") else o["factor"])
        if not o["offset"]:
            self._node("Mul", [*inputs, factor])
            return
        self._node("Add", [self._new("Mul", [*inputs, factor]), self._number(o["offset"])])

    def _concat(self, step: Step, inputs: list[str]) -> None:
        self._node("Concat", inputs, axis=step.options["axis"])

    _assigned = _concat

    def _stack(self, step: Step, inputs: list[str]) -> None:
        axis = self._store(f"np.array([{step.options['axis']}])")
        parts = [self._new("Unsqueeze", [name, axis]) for name in inputs]
        self._node("Concat", parts, axis=step.options["axis"])

    def _reshape(self, step: Step, inputs: list[str]) -> None:
        shape = [0, *step.shape[1:]]
        self._node("Reshape", [*inputs, self._store(f"np.array({shape})")])

    def _transpose(self, step: Step, inputs: list[str]) -> None:
        self._node("Transpose", inputs, perm=list(step.options["order"]))

    def _uint8(self, step: Step, inputs: list[str]) -> None:
        scaled = self._new("Mul", [*inputs, self._number(40.0)])
        clipped = self._new("Clip", [scaled, self._number(0.0), self._number(255.0)])
        self._node("Cast", [clipped], to=6)

    def _same(self, step: Step, inputs: list[str]) -> None:
        self._node("Identity", inputs)

    def _part(self, step: Step, inputs: list[str]) -> None:
        o = step.options
        numbers = [self._store(f"np.array([{o[key]}])") for key in ("begin", "end", "axis")]
        self._node("Slice", [*inputs, *numbers])

    def _max(self, step: Step, inputs: list[str]) -> None:
        self._node("ReduceMax", inputs, axes=[step.options["axis"]], keepdims=0)

    def _mean(self, step: Step, inputs: list[str]) -> None:
        self._node("ReduceMean", inputs, axes=[step.options["axis"]], keepdims=0)

    def _argmax(self, step: Step, inputs: list[str]) -> None:
        self._node("ArgMax", inputs, axis=step.options["axis"], keepdims=0)

    def _topk(self, step: Step, inputs: list[str]) -> None:
        count = self._store(f"np.array([{step.options['count']}])")
        self.count += 1
        self._node("TopK", [*inputs, count], [self.result, f"i{self.count}"])

    def _topk_indices(self, step: Step, inputs: list[str]) -> None:
        count = self._store(f"np.array([{step.options['count']}])")
        self.count += 1
        self._node("TopK", [*inputs, count], [f"i{self.count}", self.result])

    def _constant(self, step: Step, inputs: list[str]) -> None:
        value = self._store(f"np.linspace(-1, 1, {step.shape[0]}, dtype=float32)")
        self._node("Identity", [value])

    def _masked(self, step: Step, inputs: list[str]) -> None:
        o, seed, count = step.options, step.inputs[0], step.shape[-1]
        if o["exact"]:
            self._node("Identity", inputs[:1])
            return
        value = f"float({str(o['value'])!r})"
        stored = f"mask({seed}, {count}, {value})" if o["form"] == "add" else f"visible({seed}, {count})"
        row = inputs[1] if len(inputs) > 1 else self._store(stored + _CAST.get(o["form"], ""), f"mask{seed}")
        if o["form"] == "add":
            self._node("Add", [inputs[0], row])
        elif o["form"] == "multiply":
            dropped = self._new("Sub", [self._number(1.0), row])
            low = self._new("Mul", [dropped, self._number(o["value"])])
            self._node("Add", [self._new("Mul", [inputs[0], row]), low])
        else:
            row = self._new("Greater", [row, self._number(0.5)]) if len(inputs) > 1 else row
            self._node("Where", [row, inputs[0], self._number(o["value"])])

    def _pooled(self, step: Step, inputs: list[str]) -> None:
        o = step.options
        window = {"kernel_shape": [o["kernel"]] * 2, "strides": [o["stride"]] * 2}
        form = "pad" if o["exact"] else o["form"]
        if form == "auto":
            self._node("MaxPool", inputs, auto_pad="SAME_UPPER" if o["after"] else "SAME_LOWER", **window)
        elif form == "pad":
            value = 0.0 if o["exact"] else o["value"]
            pads = self._store(f"np.array({[0, 0, o['before'], o['before'], 0, 0, o['after'], o['after']]})")
            self._node("MaxPool", [self._new("Pad", [*inputs, pads, self._number(value)])], **window)
        else:
            self._node("MaxPool", inputs, pads=[o["before"]] * 2 + [o["after"]] * 2, **window)


_DTYPES = {"argmax": "np.int64", "topk_indices": "np.int64", "uint8": "np.int32"}
_CAST = {"multiply": ".astype(float32)"}
