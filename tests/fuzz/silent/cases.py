"""A random network, what is done with it, and the text that repeats it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from hypothesis import strategies as st

from tests.fuzz.silent.drawing import programs
from tests.fuzz.silent.megengine_text import megengine_text
from tests.fuzz.silent.onnx_text import onnx_text
from tests.fuzz.silent.pieces import samples
from tests.fuzz.silent.programs import Program

__all__ = ["CALIBRATED", "EVALUATED", "Case", "cases"]

CALIBRATED, EVALUATED = range(4), range(100, 102)  # seeds of batches
RECIPES: tuple[str | Mapping[str, Any] | None, ...] = (
    None,
    None,
    {"placement": "everything"},
    "backend/onnxruntime",
    "backend/tflite",
    "backend/ncnn",
    "backend/openvino",
    "backend/tensorrt",
    "backend/qnn",
    "vit",
)


@dataclass(frozen=True)
class Case:
    """A network and what is done with it.

    Attributes:
        program: the network.
        onnx: whether it comes as an ONNX file.
        batch: the name of the file's first axis; None for a fixed one.
        recipe: what `qtrace.prepare` gets.
        runtime: "" for none; "onnxruntime" compares its outputs, "verify" calls `qtrace.verify`.
    """

    program: Program
    onnx: bool
    batch: str | None = None
    recipe: str | Mapping[str, Any] | None = None
    runtime: str = ""

    @property
    def source(self) -> str:
        """The text that defines the network."""
        return onnx_text(self.program, self.batch) if self.onnx else megengine_text(self.program)

    @cached_property
    def inputs(self) -> list[dict[str, Any]]:
        steps = [step for step in self.program.steps if step.op == "input"]
        return [{"shape": step.shape, **step.options} for step in steps]

    def batches(self, seeds: Sequence[int]) -> list[tuple[np.ndarray, ...]]:
        """Samples of all inputs, a batch for each seed."""
        return [tuple(samples(seed=seed, **each) for each in self.inputs) for seed in seeds]

    def runnable(self) -> str:
        """A text that repeats the case with nothing of this package but its numbers."""
        inputs = ", ".join(f"samples(seed=s, **{each!r})" for each in self.inputs)
        if self.onnx:
            start = "Path('net.onnx').write_bytes(network.SerializeToString())\n"
            start += "traced = qtrace.from_onnx('net.onnx')"
            runs = "onnxruntime.InferenceSession('net.onnx')"
            exact = f"{runs}.run(None, dict(zip([i.name for i in network.graph.input], x)))"
        else:
            start = "traced = qtrace.trace(network, *[mge.Tensor(v) for v in batches[0]])"
            exact = "network(*[mge.Tensor(v) for v in x])"
        return f"""{self.source}
from pathlib import Path

import megengine as mge
import onnxruntime
import qtrace
from tests.fuzz.silent.pieces import samples

batches = [({inputs},) for s in {list(CALIBRATED)}]
{start}
prepared = qtrace.prepare(traced, {self.recipe!r}, samples=batches)
qtrace.calibrate(prepared, batches, progress=False)
converted = qtrace.convert(prepared)
s = {EVALUATED[0]}
x = ({inputs},)
exact = {exact}
rounded = converted(*[mge.Tensor(v) for v in x])
print(exact, rounded, sep="\\n")
# groups of the outputs: {[(n, str(name)) for n, name in self.program.groups]}; runtime {self.runtime!r}
"""


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """A network in either form, a recipe, and in one of three cases a runtime."""
    recipe = draw(st.sampled_from(RECIPES))
    runtime = draw(st.sampled_from(("", "onnxruntime", "", "verify")))
    onnx = draw(st.booleans())
    batch = draw(st.sampled_from((None, "N"))) if onnx else None
    return Case(draw(programs(onnx)), onnx, batch, recipe, runtime)
