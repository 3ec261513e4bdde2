"""What is timed for a cost table: small networks, over a grid of shapes, as the exporters write them.

A layer stands in the surroundings that it has in a real network. Float convolutions come in chains, so that
they run in onnxruntime's blocked layout and the reordering at both ends does not count. Integer ops come
between roundings that fuse.
"""

from __future__ import annotations

import contextlib
import logging
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.kernels import graphs
from benchmarks.kernels.graphs import Surroundings
from qtrace.calibration.calibrate import calibrate
from qtrace.config import QConfig
from qtrace.costs import FLOAT, INTEGER, PLAIN_MAX_POOL, OpShape
from qtrace.export import export
from qtrace.graph.types import TracedModule
from qtrace.preparation.passes.convert import convert
from qtrace.preparation.prepare import prepare

__all__ = [
    "ROUNDING",
    "Case",
    "Slot",
    "alone",
    "between_convs",
    "boundaries",
    "conv",
    "conv_branches",
    "export_kernels",
    "feeds",
]

Shape = tuple[int, ...]
ROUNDING = "rounding."
"""The beginning of the names of QuantizeLinear and DequantizeLinear, which are no part of an op."""


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
        parts: the beginning of the names of a part -> its surroundings, and the op that it is about.
        form: the form in which it has to run; `INTEGER` where there are both, with roundings between.
        slots: what is timed.
    """

    parts: Mapping[str, tuple[Surroundings, OpShape]]
    form: str
    slots: tuple[Slot, ...] = ()

    def write_onnx(self, backend: str = "onnxruntime") -> tuple[bytes, dict[str, Shape]]:
        """Returns the network as an ONNX file, and its inputs: name -> shape.

        A node has the name of its result, so that a profile says which op a kernel is part of; the names of
        roundings begin with `ROUNDING`.

        Args:
            backend: the target.
        """
        import onnx

        traced = graphs.build(self.parts)
        rules = [rule for name, part in self.parts.items() for rule in _rules(name, *part)]
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "kernels.onnx"
            model = onnx.load(export_kernels(traced, self.form, path, backend, rules))
        for node in model.graph.node:
            rounds = node.op_type in ("QuantizeLinear", "DequantizeLinear")
            node.name = f"{ROUNDING}{node.output[0]}" if rounds else node.output[0]
        return bytes(model.SerializeToString()), _inputs(traced)


def _rules(name: str, surroundings: Surroundings, op: OpShape) -> list[dict[str, Any]]:
    """Returns the rules of a part: what stays float, and what is rounded though its neighbours are not."""
    if surroundings is graphs.in_turns:
        return [{"match": {"name": f"{name}f*"}, "quantize": False}]
    if op.kind == "softmax":  # stays float where it is not asked for
        return [{"match": {"op": op.kind}, "quantize": True}]
    return []


_MOVES = ("reshape", "transpose", PLAIN_MAX_POOL)
"""Kinds that hold integers where their neighbours do."""


def export_kernels(
    traced: TracedModule, form: str, path: Path, backend: str, rules: list[dict[str, Any]] | None = None
) -> Path:
    """Writes a network in a form, for a target.

    Args:
        traced: the network.
        form: `FLOAT`, or another form for one on integers.
        path: the file to write.
        backend: the target.
        rules: rules of the config.
    """
    if form == FLOAT:
        return export(traced, path)
    plain = {"activation": "minmax", "weight": "minmax"}
    settings = {"backend": backend, "observers": plain, "rules": rules or []}
    if backend == "openvino":  # takes the kernels whose products saturate, exactly
        settings["weight"] = {"bits": 7}
    config = QConfig.model_validate(settings)
    batch = feeds(_inputs(traced))
    with _silent():
        prepared = prepare(traced, config, samples=[batch], progress=False)
        calibrate(prepared, [batch], progress=False, engine="megengine")
        return export(convert(prepared), path)


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Keeps notes on kernels out of the log, where they would pass for notes on the user's network."""
    logger = logging.getLogger("qtrace")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _inputs(traced: TracedModule) -> dict[str, Shape]:
    return {node.name: tuple(node.shape) for node in traced.graph.inputs[1:]}


def feeds(inputs: dict[str, Shape]) -> dict[str, np.ndarray]:
    """Returns random values for inputs, name -> shape."""
    random = np.random.default_rng(0)
    return {name: random.normal(size=shape).astype(np.float32) for name, shape in inputs.items()}


def conv(form: str, inputs: int, outputs: int, kernel: int, side: int, groups: int = 1) -> Case:
    """A chain of convolutions of stride 1 with Relu, from ``inputs`` to ``outputs`` channels and back."""
    op = _convolution(inputs, outputs, kernel, side, groups, 1)
    slots = (Slot(f"m{index}", each, form) for index, each in enumerate(graphs.chained(op)))
    return Case({"": (graphs.chain, op)}, form, tuple(slots))


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
    op = _convolution(inputs, outputs, kernel, side * stride, groups, stride)
    slots = tuple(Slot(f"m{index}", op, form) for index in range(2))
    return Case({"": (graphs.branches, op)}, form, slots)


def _convolution(inputs: int, outputs: int, kernel: int, side: int, groups: int, stride: int) -> OpShape:
    out = (side + 2 * (kernel // 2) - kernel) // stride + 1
    shapes = ((1, inputs, side, side),), ((1, outputs, out, out),)
    return OpShape("conv2d", *shapes, (outputs, inputs // groups, kernel, kernel), (stride, stride), groups)


def between_convs(op: OpShape, form: str) -> Case:
    """Ops of one shape, each between convolutions of its own, whose layout a runtime may keep."""
    return Case({"": (graphs.surrounded, op)}, form, _slots(op, form))


def alone(op: OpShape, form: str) -> Case:
    """Ops of one shape that read inputs of the network, or, if they move integers, sums of these."""
    moves = form != FLOAT and op.kind in _MOVES
    return Case({"": (graphs.between_sums if moves else graphs.stand_alone, op)}, form, _slots(op, form))


def _slots(op: OpShape, form: str) -> tuple[Slot, ...]:
    """Returns the slots of an op; onnxruntime names the node that it fuses from GELU's pieces itself."""
    if op.kind == "gelu":
        return (Slot("Gelu", op, form, each=True),)
    return tuple(Slot(f"m{index}", op, form) for index in range(graphs.REPEATS))


def boundaries(channels: int, side: int) -> Case:
    """Float and integer convolutions in turns: the roundings between them, and the changes of layout."""
    shape = (1, channels, side, side)
    op = OpShape("quantize", (shape,), (shape,))
    back, moved = replace(op, kind="dequantize"), replace(op, kind="reorder")
    slots = [
        *(Slot(f"{ROUNDING}{name}_relu_int", op, FLOAT) for name in ("f", "f0", "f1")),
        *(Slot(f"{ROUNDING}i{i}_relu_q", back, FLOAT) for i in range(graphs.REPEATS)),
        Slot("Reorder", moved, FLOAT, each=True),
        Slot("Transpose", moved, INTEGER, each=True),
    ]
    return Case({"": (graphs.in_turns, op)}, INTEGER, tuple(slots))
