"""A small network as data: steps on values, with the groups of columns that its outputs consist of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

__all__ = ["Program", "Recorder", "Step", "Value"]


@dataclass(frozen=True)
class Step:
    """One op.

    Attributes:
        op: its kind; `megengine_text` and `onnx_text` have a method for each.
        inputs: the indices of the steps that it reads.
        options: its other arguments.
        shape: the shape of its result, with the batch.
    """

    op: str
    inputs: tuple[int, ...]
    options: dict[str, Any]
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Value:
    """The result of a step while a program is recorded.

    Attributes:
        index: the step.
        shape: the shape, with the batch.
        groups: for each element the step whose values it shows, moved and joined but not changed.
    """

    index: int
    shape: tuple[int, ...]
    groups: np.ndarray


@dataclass(frozen=True)
class Program:
    """A network.

    Attributes:
        steps: its steps; inputs come first.
        outputs: the values that it returns.
        naming: how names are made, see `names_of`.
        shift: what is added to the images.
        spread: the standard deviation of the images, about.
    """

    steps: tuple[Step, ...]
    outputs: tuple[Value, ...]
    naming: str = "plain"
    shift: float = 0.0
    spread: float = 1.0
    hazards: tuple[str, ...] = field(default=(), compare=False)

    @property
    def groups(self) -> list[tuple[int, int]]:
        """Lists the groups as pairs of an output and the step whose values they are."""
        return [(n, int(g)) for n, out in enumerate(self.outputs) for g in np.unique(out.groups)]

    def control(self) -> Program:
        """Returns the network without its hazards: each group is an output, nothing is masked."""
        steps = tuple(
            replace(step, options={**step.options, "exact": True}) if "exact" in step.options else step
            for step in self.steps
        )
        outputs = tuple(
            Value(g, steps[g].shape, np.full(steps[g].shape, g))
            for g in dict.fromkeys(g for _, g in self.groups)
        )
        return replace(self, steps=steps, outputs=outputs)


class Recorder:
    """Records a program; each method adds a step and returns its value."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.hazards: list[str] = []

    def add(
        self,
        op: str,
        inputs: Sequence[Value],
        shape: Sequence[int],
        groups: np.ndarray | None = None,
        **options: Any,
    ) -> Value:
        """Adds a step; without ``groups`` its values are a group of their own."""
        index = len(self.steps)
        self.steps.append(Step(op, tuple(v.index for v in inputs), options, tuple(int(n) for n in shape)))
        return Value(index, self.steps[-1].shape, np.full(shape, index) if groups is None else groups)

    def input(self, kind: str, *shape: int, **options: Any) -> Value:
        return self.add("input", (), shape, kind=kind, **options)

    def conv(self, x: Value, width: int, kernel: int = 3, stride: int = 1, **options: Any) -> Value:
        size = [(n + 2 * (kernel // 2) - kernel) // stride + 1 for n in x.shape[2:]]
        options = {"layer": f"conv{len(self.steps)}", "bias": True, "parts": 1, "dead": False, **options}
        return self.add(
            "conv", [x], (x.shape[0], width, *size), width=width, kernel=kernel, stride=stride, **options
        )

    def norm(self, x: Value, layer: str | None = None) -> Value:
        return self.add("norm", [x], x.shape, layer=layer or f"norm{len(self.steps)}")

    def linear(self, x: Value, width: int, **options: Any) -> Value:
        """``x @ weight + bias``; ``divided=(begin, end, number)`` divides the weights of these inputs."""
        options = {"layer": f"linear{len(self.steps)}", "bias": None, "divided": None, **options}
        return self.add("linear", [x], (*x.shape[:-1], width), width=width, **options)

    def unary(self, kind: str, x: Value, **options: Any) -> Value:
        return self.add(kind, [x], x.shape, **options)

    def scaled(self, x: Value, factor: float, offset: float = 0.0, **options: Any) -> Value:
        return self.add("scaled", [x], x.shape, factor=factor, offset=offset, **options)

    def binary(self, kind: str, a: Value, b: Value) -> Value:
        return self.add(kind, [a, b], np.broadcast_shapes(a.shape, b.shape))

    def matmul(self, a: Value, b: Value) -> Value:
        return self.add("matmul", [a, b], (*a.shape[:-1], b.shape[-1]))

    def concat(self, parts: Sequence[Value], axis: int) -> Value:
        groups = np.concatenate([part.groups for part in parts], axis)
        return self.add("concat", parts, groups.shape, groups, axis=axis)

    def stack(self, parts: Sequence[Value], axis: int) -> Value:
        groups = np.stack([part.groups for part in parts], axis)
        return self.add("stack", parts, groups.shape, groups, axis=axis)

    def assigned(self, parts: Sequence[Value], axis: int) -> Value:
        """A concat that is written as items of a tensor of zeros."""
        groups = np.concatenate([part.groups for part in parts], axis)
        sizes = [part.shape[axis] for part in parts]
        return self.add("assigned", parts, groups.shape, groups, axis=axis, sizes=sizes)

    def reshape(self, x: Value, *shape: int) -> Value:
        groups = x.groups.reshape(shape)
        return self.add("reshape", [x], groups.shape, groups)

    def transpose(self, x: Value, *order: int) -> Value:
        groups = x.groups.transpose(order)
        return self.add("transpose", [x], groups.shape, groups, order=order)

    def part(self, x: Value, axis: int, begin: int, end: int) -> Value:
        groups = x.groups.take(range(begin, end), axis)
        return self.add("part", [x], groups.shape, groups, axis=axis, begin=begin, end=end)

    def reduced(self, kind: str, x: Value, axis: int) -> Value:
        return self.add(kind, [x], x.shape[:axis] + x.shape[axis + 1 :], axis=axis)

    def masked(self, x: Value, **options: Any) -> Value:
        """Gives elements of the last axis the value ``value``, by addition, where or multiplication."""
        keep = options.pop("keep", None)
        self.hazards.append(f"mask {options['form']} {options['value']:g} {options['place']}")
        inputs = [x] if keep is None else [x, keep]
        return self.add("masked", inputs, x.shape, exact=False, **options)

    def pooled(self, x: Value, **options: Any) -> Value:
        """Max pooling with a border of minus infinity."""
        size = [
            (n + options["before"] + options["after"] - options["kernel"]) // options["stride"] + 1
            for n in x.shape[2:]
        ]
        return self.add("pooled", [x], (*x.shape[:2], *size), exact=False, **options)
