"""A random program as the text of a MegEngine module."""

from __future__ import annotations

from collections.abc import Callable

from tests.fuzz.silent.naming import Names, layer_seed
from tests.fuzz.silent.programs import Program, Step

__all__ = ["megengine_text"]

HEADER = """\
import megengine as mge
import megengine.functional as F
import megengine.module as M
import numpy as np

from tests.fuzz.silent.pieces import filled, mask, visible


class Net(M.Module):
    def __init__(self):
        super().__init__()
"""
_BINARY = {"add": "+", "sub": "-", "mul": "*"}
_BUFFERS = {"buffer": "mge.Tensor", "parameter": "mge.Parameter"}


def megengine_text(program: Program) -> str:
    """Returns text that defines ``network``."""
    return _Text(program).text()


class _Text:
    def __init__(self, program: Program) -> None:
        self.program = program
        self.names = Names(program.naming, python=True)
        self.layers: dict[str, str] = {}
        self.lines: list[str] = []

    def text(self) -> str:
        inputs = []
        for index, step in enumerate(self.program.steps):
            if step.op == "input":
                inputs.append(self._name(index))
                continue
            write: Callable[[Step, list[str]], str] = getattr(self, f"_{step.op}")
            line = write(step, [self._name(i) for i in step.inputs])
            self.lines.append(f"{self._name(index)} = {line}")
        layers = "".join(f"        {line}\n" for line in self.layers.values())
        body = "".join(f"        {line}\n" for line in self.lines)
        outputs = ", ".join(self._name(value.index) for value in self.program.outputs)
        return (
            f"{HEADER}{layers or '        pass'}\n    def forward(self, {', '.join(inputs)}):\n{body}"
            f"        return {outputs}\n\n\nnetwork = Net()\nnetwork.eval()\n"
        )

    def _name(self, index: int) -> str:
        return self.names.value(index)

    def _layer(self, name: str, text: str) -> str:
        attribute = self.names.layer(name)
        if not attribute.isidentifier():
            attribute = name
        self.layers.setdefault(name, f"self.{attribute} = {text}")
        return f"self.{attribute}"

    def _conv(self, step: Step, inputs: list[str]) -> str:
        o, inside = step.options, self.program.steps[step.inputs[0]].shape[1]
        text = (
            f"filled(M.Conv2d({inside}, {o['width']}, {o['kernel']}, {o['stride']}, {o['kernel'] // 2}, "
            f"groups={o['parts']}, bias={o['bias']}), {layer_seed(o['layer'])}, dead={o['dead']})"
        )
        return f"{self._layer(o['layer'], text)}({inputs[0]})"

    def _norm(self, step: Step, inputs: list[str]) -> str:
        name = step.options["layer"]
        text = f"filled(M.BatchNorm2d({step.shape[1]}), {layer_seed(name)})"
        return f"{self._layer(name, text)}({inputs[0]})"

    def _linear(self, step: Step, inputs: list[str]) -> str:
        o, inside = step.options, self.program.steps[step.inputs[0]].shape[-1]
        divided = None if o.get("exact") else o["divided"]
        seed = layer_seed(o["layer"])
        text = f"filled(M.Linear({inside}, {o['width']}, bias=False), {seed}, divided={divided})"
        call = f"{self._layer(o['layer'], text)}({inputs[0]})"
        if o["bias"] is None:
            return call
        bias = f"mge.Parameter(np.linspace(-0.5, 0.5, {o['width']}, dtype=np.float32))"
        return f"{call} + {self._layer(o['bias'], bias)}"

    def _layer_norm(self, step: Step, inputs: list[str]) -> str:
        name = f"ln{step.inputs[0]}"
        return f"{self._layer(name, f'M.LayerNorm({step.shape[-1]})')}({inputs[0]})"

    def _relu(self, step: Step, inputs: list[str]) -> str:
        return f"F.{step.op}({inputs[0]})"

    _sigmoid = _silu = _exp = _tanh = _gelu = _relu

    def _softmax(self, step: Step, inputs: list[str]) -> str:
        return f"F.softmax({inputs[0]}, axis={step.options.get('axis', -1)})"

    def _scaled(self, step: Step, inputs: list[str]) -> str:
        o = step.options
        factor = 1.0 if o.get("exact") else o["factor"]
        return f"{inputs[0]} * {factor!r}" + (f" + {o['offset']!r}" if o["offset"] else "")

    def _add(self, step: Step, inputs: list[str]) -> str:
        return f" {_BINARY[step.op]} ".join(inputs)

    _sub = _mul = _add

    def _maximum(self, step: Step, inputs: list[str]) -> str:
        return f"F.maximum({inputs[0]}, {inputs[1]})"

    def _matmul(self, step: Step, inputs: list[str]) -> str:
        return f"F.matmul({inputs[0]}, {inputs[1]})"

    def _concat(self, step: Step, inputs: list[str]) -> str:
        return f"F.{step.op}([{', '.join(inputs)}], axis={step.options['axis']})"

    _stack = _concat

    def _assigned(self, step: Step, inputs: list[str]) -> str:
        axis, begin = step.options["axis"], 0
        whole = f"w{len(self.lines)}"
        shape = f"({inputs[0]}.shape[0], {', '.join(map(str, step.shape[1:]))})"
        self.lines.append(f"{whole} = F.zeros({shape})")
        for part, size in zip(inputs, step.options["sizes"], strict=True):
            index = ":, " * axis + f"{begin}:{begin + size}"
            self.lines.append(f"{whole}[{index}] = {part}")
            begin += size
        return f"{whole} * 1.0"

    def _reshape(self, step: Step, inputs: list[str]) -> str:
        shape = f"({inputs[0]}.shape[0], {', '.join(map(str, step.shape[1:]))},)"
        return f"F.reshape({inputs[0]}, {shape})"

    def _transpose(self, step: Step, inputs: list[str]) -> str:
        return f"F.transpose({inputs[0]}, {step.options['order']})"

    def _uint8(self, step: Step, inputs: list[str]) -> str:
        return f'F.clip({inputs[0]} * 40.0, 0, 255).astype("uint8")'

    def _same(self, step: Step, inputs: list[str]) -> str:
        return inputs[0]

    def _part(self, step: Step, inputs: list[str]) -> str:
        o = step.options
        return f"{inputs[0]}[{':, ' * o['axis']}{o['begin']}:{o['end']}]"

    def _max(self, step: Step, inputs: list[str]) -> str:
        return f"F.{step.op}({inputs[0]}, axis={step.options['axis']})"

    _mean = _argmax = _max

    def _topk(self, step: Step, inputs: list[str]) -> str:
        return f"F.topk({inputs[0]}, {step.options['count']}, descending=True)[0]"

    def _topk_indices(self, step: Step, inputs: list[str]) -> str:
        return f"F.topk({inputs[0]}, {step.options['count']}, descending=True)[1]"

    def _constant(self, step: Step, inputs: list[str]) -> str:
        return f"mge.Tensor(np.linspace(-1, 1, {step.shape[0]}, dtype=np.float32))"

    def _masked(self, step: Step, inputs: list[str]) -> str:
        o = step.options
        if o["exact"]:
            return f"{inputs[0]} * 1.0"
        count, value = (
            step.shape[-1],
            f"float({str(o['value'])!r})" if o["value"] < -1e38 else repr(o["value"]),
        )
        seed = step.inputs[0]
        stored = f"mask({seed}, {count}, {value})" if o["form"] == "add" else f"visible({seed}, {count})"
        if o["form"] == "multiply":
            stored = f"{stored}.astype(np.float32)"
        if len(inputs) > 1:
            row = inputs[1]
        elif o["place"] == "constant":
            row = f"mge.Tensor({stored})"
        else:
            row = self._layer(f"mask{seed}", f"{_BUFFERS[o['place']]}({stored})")
        if o["form"] == "add":
            return f"{inputs[0]} + {row}"
        if o["form"] == "multiply":
            self.lines.append(f"k{seed} = {row}")
            return f"{inputs[0]} * k{seed} + (1 - k{seed}) * {value}"
        condition = f"F.broadcast_to({row}, {inputs[0]}.shape)"
        if len(inputs) > 1:
            condition = f"F.broadcast_to({row} > 0.5, {inputs[0]}.shape)"
        return f"F.where({condition}, {inputs[0]}, F.full_like({inputs[0]}, {value}))"

    def _pooled(self, step: Step, inputs: list[str]) -> str:
        o = step.options
        value = 0.0 if o["exact"] else o["value"]
        value = f"float({str(value)!r})" if value < -1e38 else repr(value)
        border = f"({o['before']}, {o['after']})"
        return (
            f"F.max_pool2d(F.nn.pad({inputs[0]}, ((0, 0), (0, 0), {border}, {border}), "
            f"constant_value={value}), {o['kernel']}, {o['stride']})"
        )
