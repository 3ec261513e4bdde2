"""Shapes of the inputs: what the file declares, what the user says, and the axis that stays free."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from qtrace.errors import ImportingError
from qtrace.graph.kernels import MAX_RANK
from qtrace.graph.open_axes import OpenAxis, resize_axes
from qtrace.importing.onnx.model import MAX_ELEMENTS, Graph, GraphInput

_CARRIED = {
    **{name: name for name in ("float32", "int32", "int16", "int8", "uint8", "bool")},
    **dict.fromkeys(("int64", "uint16", "uint32", "uint64"), "int32"),
    **dict.fromkeys(("float16", "bfloat16", "float64"), "float32"),
}


@dataclass(frozen=True)
class InputShape:
    """An input with all sizes known.

    Attributes:
        name: the name in the file.
        dtype: the dtype in the file.
        shape: the recorded shape.
        batch_axis: the axis of the batch if it stays free; None if it does not.
        declared: the sizes that the file fixes, with None for each axis that it leaves open.
        open: axis that stays open -> what it shares its size with; the batch is among them.
        names: axis that the file leaves open -> its name there, "" if unnamed.
    """

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    batch_axis: int | None
    declared: tuple[int | None, ...]
    open: Mapping[int, str] = field(default_factory=dict)
    names: Mapping[int, str] = field(default_factory=dict)

    @property
    def carried(self) -> np.dtype[Any]:
        """The dtype of the node that carries the input."""
        return np.dtype(_CARRIED[self.dtype.name])


def resolve_inputs(
    graph: Graph, shapes: Mapping[str, Sequence[int]] | None, batch: str | None, fixed: bool = False
) -> tuple[InputShape, ...]:
    """Finds the shape of every input.

    Args:
        graph: the graph of the file.
        shapes: the user's shapes by input name.
        batch: see `qtrace.from_onnx`.
        fixed: see `qtrace.from_onnx`.

    Raises:
        ImportingError: when an input is unknown, lacks a shape, or has a type that MegEngine lacks.
    """
    user_shapes = dict(shapes or {})
    names = [value.name for value in graph.inputs]
    for name in user_shapes:
        if name not in names:
            raise ImportingError(f"there is no input {name!r}; the inputs are {', '.join(map(repr, names))}.")
    for value in graph.inputs:
        if value.dtype.name not in _CARRIED:
            raise ImportingError(
                f"input {value.name!r} is {value.dtype.name}, which MegEngine does not compute: "
                "convert the network to float32 first."
            )
    free = _free_axis(graph, batch)
    open_inputs = [
        f"{value.name!r} {_declared(value)}"
        for value in graph.inputs
        if value.name not in user_shapes and not _is_complete(value, free)
    ]
    if open_inputs:
        raise ImportingError(
            f"the file leaves sizes of {', '.join(open_inputs)} open: give the shape of each with "
            "shapes={'name': (1, 3, ...)}, or --shape name=1x3x... on the command line."
        )
    inputs = [_resolve(value, user_shapes.get(value.name), free) for value in graph.inputs]
    if fixed or (batch is None):
        return tuple(inputs)
    return _leave_open(inputs)


def open_sizes(inputs: Sequence[InputShape]) -> tuple[str, ...]:
    """Returns the sizes that stay open, without the batch."""
    batches = {item.open[item.batch_axis] for item in inputs if item.batch_axis is not None}
    return tuple(dict.fromkeys(s for item in inputs for s in item.open.values() if s not in batches))


def axes_of(inputs: Sequence[InputShape]) -> list[OpenAxis]:
    """Returns the open axes of the inputs, by the names of the file."""
    return [OpenAxis(i.name, axis, size, i.names[axis]) for i in inputs for axis, size in i.open.items()]


def resize_inputs(
    inputs: Sequence[InputShape], resize: Callable[[int, int | None], int]
) -> tuple[InputShape, ...]:
    """Returns the inputs at other sizes of their open axes; see `qtrace.graph.open_axes.resize_axes`."""
    shapes = resize_axes({item.name: item.shape for item in inputs}, axes_of(inputs), resize)
    return tuple(replace(item, shape=shapes[item.name]) for item in inputs)


def fix_axes(inputs: Sequence[InputShape], sizes: Container[str]) -> tuple[InputShape, ...]:
    """Fixes the axes that have one of some open sizes at the recorded number."""
    return tuple(
        replace(item, open={axis: size for axis, size in item.open.items() if size not in sizes})
        for item in inputs
    )


def _leave_open(inputs: Sequence[InputShape]) -> tuple[InputShape, ...]:
    """Leaves every axis open that the file leaves open; axes of one name and one number share their size."""
    numbers: dict[str, set[int]] = {}
    for item in inputs:
        for axis, name in item.names.items():
            numbers.setdefault(name, set()).add(item.shape[axis])
    result = []
    for item in inputs:
        opened = dict(item.open)
        for axis, name in item.names.items():
            shared = name.isidentifier() or "." in name or " " in name
            if axis not in opened:
                opened[axis] = name if shared and len(numbers[name]) == 1 else f"{item.name}:{axis}"
        result.append(replace(item, open=opened))
    return tuple(result)


def _free_axis(graph: Graph, batch: str | None) -> tuple[str, int, str] | None:
    """Returns input, axis and the axis' name in the file ("" if unnamed) of the free batch axis."""
    if batch is None or not graph.inputs:
        return None
    if batch == "auto":
        first = graph.inputs[0]
        size = first.sizes[0] if first.sizes else 1
        return (first.name, 0, size) if isinstance(size, str) else None
    name, _, axis = batch.rpartition(":")
    value = next((v for v in graph.inputs if v.name == name), None)
    if value is None or not axis.isdigit() or (value.sizes is not None and int(axis) >= len(value.sizes)):
        example = graph.inputs[0].name
        raise ImportingError(f"batch={batch!r} names no axis of an input: write it as {example + ':0'!r}.")
    size = value.sizes[int(axis)] if value.sizes is not None else ""
    return name, int(axis), size if isinstance(size, str) else ""


def _batch_axis(value: GraphInput, free: tuple[str, int, str] | None) -> int | None:
    if free is None:
        return None
    name, axis, symbol = free
    if value.name == name:
        return axis
    if symbol and value.sizes is not None and symbol in value.sizes:
        return value.sizes.index(symbol)
    return None


def _is_complete(value: GraphInput, free: tuple[str, int, str] | None) -> bool:
    axis = _batch_axis(value, free)
    return value.sizes is not None and all(
        i == axis or isinstance(size, int) for i, size in enumerate(value.sizes)
    )


def _declared(value: GraphInput) -> str:
    if value.sizes is None:
        return "(no rank)"
    return "[" + ", ".join(str(size) or "?" for size in value.sizes) + "]"


def _resolve(
    value: GraphInput, user_shape: Sequence[int] | None, free: tuple[str, int, str] | None
) -> InputShape:
    axis = _batch_axis(value, free)
    if user_shape is None:
        sizes = value.sizes or ()
        shape = tuple(size if isinstance(size, int) else 1 for size in sizes)
    else:
        shape = _sizes(value, user_shape)
        _check_given(value, shape, axis)
    if len(shape) > MAX_RANK:
        raise ImportingError(
            f"input {value.name!r} has {len(shape)} axes; MegEngine's tensors have at most 7."
        )
    if any(n < 1 for n in shape) or math.prod(shape) > MAX_ELEMENTS:
        raise ImportingError(
            f"input {value.name!r} cannot have the shape {list(shape)}: sizes are 1 or more."
        )
    sizes = value.sizes or ("",) * len(shape)
    declared = (size if isinstance(size, int) and i != axis else None for i, size in enumerate(sizes))
    names = {
        i: size if isinstance(size, str) else ""
        for i, size in enumerate(sizes)
        if isinstance(size, str) or i == axis
    }
    opened = {} if axis is None else {axis: names.get(axis) or "N"}
    return InputShape(value.name, value.dtype, shape, axis, tuple(declared), opened, names)


def _sizes(value: GraphInput, user_shape: object) -> tuple[int, ...]:
    """Returns a shape that the user gave as numbers."""
    try:
        return tuple(operator.index(n) for n in user_shape)  # type: ignore[attr-defined]
    except TypeError:
        raise ImportingError(
            f"the shape of input {value.name!r} is a sequence of whole numbers, not {user_shape!r}: give "
            "an open axis its size in the trace; it stays open."
        ) from None


def _check_given(value: GraphInput, shape: tuple[int, ...], batch_axis: int | None) -> None:
    if value.sizes is None:
        return
    fits = len(shape) == len(value.sizes) and all(
        i == batch_axis or not isinstance(size, int) or size == n
        for i, (size, n) in enumerate(zip(value.sizes, shape, strict=True))
    )
    if not fits:
        raise ImportingError(
            f"input {value.name!r} cannot have the shape {list(shape)}: the file declares {_declared(value)}."
        )
