"""Computes nodes that read sizes: ops that move numbers, and arithmetic, size by size."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx

from qtrace.importing.onnx.evaluation import CannotEvaluate, evaluate
from qtrace.importing.onnx.model import OnnxNode
from qtrace.importing.onnx.sizes.size import (
    Number,
    Size,
    SizeError,
    absolute,
    combine,
    is_fixed,
    rounded,
    value_at,
)
from qtrace.importing.onnx.values import Sizes, Stored

__all__ = ["FOLDED", "fold_sizes", "product", "sizes_of"]

# Op -> the inputs whose numbers it moves; all others say where to.
_MOVES: Mapping[str, tuple[int, ...] | None] = {
    **dict.fromkeys(("Identity", "Squeeze", "Unsqueeze", "Reshape", "Flatten", "Transpose", "Gather"), (0,)),
    **dict.fromkeys(("Slice", "Split", "Tile", "Expand", "GatherElements", "GatherND"), (0,)),
    "Where": (1, 2),
    "Concat": None,
    "ScatterElements": (0, 2),
    "ScatterND": (0, 2),
}
_ARITHMETIC = {"Add", "Sub", "Mul", "Div", "Mod", "Min", "Max"}
_ROUNDINGS = {"Floor", "Ceil", "Round"}
_REDUCTIONS = {"ReduceProd": "Mul", "ReduceSum": "Add", "ReduceMax": "Max", "ReduceMin": "Min"}
_COMPARISONS = {"Equal", "Less", "Greater", "LessOrEqual", "GreaterOrEqual"}
FOLDED = {*_MOVES, *_ARITHMETIC, *_ROUNDINGS, *_REDUCTIONS, *_COMPARISONS, "Cast", "Abs", "Neg"}

_Value = Stored | Sizes | None


def fold_sizes(node: OnnxNode, values: Sequence[_Value], opsets: Mapping[str, int]) -> list[Stored | Sizes]:
    """Computes a node of `FOLDED` whose inputs are stored or sizes.

    Args:
        node: the node.
        values: one an input; None where it is left out.
        opsets: the versions that the model imports.

    Raises:
        CannotEvaluate: when the node fails, or needs the number of a size.
    """
    try:
        if node.op in _MOVES:
            return _moved(node, values, opsets)
        results = [_computed(node, values)]
    except SizeError as error:
        raise CannotEvaluate(str(error)) from error
    kind = _kind(node, values)
    return [sizes_of(result, kind, node.outputs[0]) for result in results]


def sizes_of(numbers: np.ndarray, kind: np.dtype[Any], name: str) -> Stored | Sizes:
    """Returns an array of numbers, some of which may be sizes, as a value of the file."""
    flat = numbers.reshape(-1).tolist()
    if all(map(is_fixed, flat)):
        return Stored(np.array(flat, kind).reshape(numbers.shape), name)
    probes = max(len(n.values) for n in flat if isinstance(n, Size))
    arrays = tuple(
        np.array([value_at(n, probe) for n in flat], kind).reshape(numbers.shape) for probe in range(probes)
    )
    return Sizes(arrays, numbers)


def product(numbers: Sequence[Number]) -> Number:
    """Returns the product of integers, some of which may be sizes."""
    total: Number = 1
    for number in numbers:
        total = _arithmetic("Mul", total, number, True)
    return total


def _numbers(value: _Value) -> np.ndarray:
    if isinstance(value, Sizes):
        return value.numbers
    assert isinstance(value, Stored)
    numbers = np.empty(value.array.shape, object)
    numbers.reshape(-1)[:] = value.array.reshape(-1).tolist()
    return numbers


def _dtype(value: _Value) -> np.dtype[Any]:
    assert value is not None
    return value.arrays[0].dtype if isinstance(value, Sizes) else value.array.dtype


def _kind(node: OnnxNode, values: Sequence[_Value]) -> np.dtype[Any]:
    if node.op == "Cast":
        return np.dtype(onnx.helper.tensor_dtype_to_np_dtype(node.attributes["to"]))
    return np.dtype(bool) if node.op in _COMPARISONS else _dtype(values[0])


def _moved(node: OnnxNode, values: Sequence[_Value], opsets: Mapping[str, int]) -> list[Stored | Sizes]:
    """Moves the places of the numbers, as the node moves the numbers."""
    moved = _MOVES[node.op]
    moved = tuple(range(len(values))) if moved is None else moved
    pool: list[Number] = []
    inputs: list[np.ndarray | None] = []
    for index, value in enumerate(values):
        if value is None:
            inputs.append(None)
        elif index in moved:
            numbers = _numbers(value)
            inputs.append(np.arange(len(pool), len(pool) + numbers.size).reshape(numbers.shape))
            pool.extend(numbers.reshape(-1).tolist())
        elif isinstance(value, Sizes):
            raise CannotEvaluate("moves sizes to places that depend on an open axis")
        else:
            inputs.append(value.array)
    kind = _dtype(values[moved[0]])
    results = []
    for name, places in zip(node.outputs, evaluate(node, inputs, opsets), strict=False):
        numbers = np.empty(places.shape, object)
        numbers.reshape(-1)[:] = [pool[int(place)] for place in places.reshape(-1)]
        results.append(sizes_of(numbers, kind, name))
    return results


def _computed(node: OnnxNode, values: Sequence[_Value]) -> np.ndarray:
    arrays = [_numbers(value) for value in values if value is not None]
    integers = all(_dtype(value).kind in "iub" for value in values if value is not None)
    if node.op in _ARITHMETIC:
        result = arrays[0]
        for other in arrays[1:]:
            result = _elementwise(lambda a, b: _arithmetic(node.op, a, b, integers), result, other)
        return result
    if node.op in _COMPARISONS:
        return _elementwise(lambda a, b: _compared(node.op, a, b), *arrays)
    if node.op in _REDUCTIONS:
        return _reduced(node, arrays, integers)
    if node.op == "Abs":
        return _elementwise(absolute, arrays[0])
    if node.op == "Neg":
        return _elementwise(lambda n: _arithmetic("Sub", 0, n, integers), arrays[0])
    if node.op == "Cast":
        to_integer = _kind(node, values).kind in "iu"
        return _elementwise(lambda n: _cast(n, to_integer), arrays[0])
    return _elementwise(
        lambda n: rounded(node.op, n) if isinstance(n, Size) else _round(node.op, n), arrays[0]
    )


def _elementwise(function: Callable[..., Number], *arrays: np.ndarray) -> np.ndarray:
    together = np.broadcast_arrays(*arrays)
    result = np.empty(together[0].shape, object)
    columns = zip(*(array.reshape(-1).tolist() for array in together), strict=True)
    result.reshape(-1)[:] = [function(*column) for column in columns]
    return result


def _arithmetic(op: str, left: Number, right: Number, integers: bool) -> Number:
    if isinstance(left, Size) or isinstance(right, Size):
        return combine(op, left, right, integers)
    if op == "Div":
        return int(left / right) if integers else left / right
    functions: Mapping[str, Callable[[Any, Any], Any]] = {
        "Add": lambda a, b: a + b,
        "Sub": lambda a, b: a - b,
        "Mul": lambda a, b: a * b,
        "Mod": lambda a, b: a % b,
        "Min": min,
        "Max": max,
    }
    result: Number = functions[op](left, right)
    return result


def _round(op: str, number: Any) -> float:
    roundings: Mapping[str, Callable[[Any], Any]] = {"Floor": np.floor, "Ceil": np.ceil, "Round": np.rint}
    return float(roundings[op](number))


def _cast(number: Number, to_integer: bool) -> Number:
    if isinstance(number, Size):
        return rounded("Cast", number) if to_integer else number
    return int(number) if to_integer else float(number)


def _compared(op: str, left: Number, right: Number) -> bool:
    """Compares a size with a number below 1, such as the -1 that stands for a size to be inferred."""
    compare: Callable[[Any, Any], bool] = {
        "Equal": lambda a, b: a == b,
        "Less": lambda a, b: a < b,
        "Greater": lambda a, b: a > b,
        "LessOrEqual": lambda a, b: a <= b,
        "GreaterOrEqual": lambda a, b: a >= b,
    }[op]
    sizes = [n for n in (left, right) if isinstance(n, Size)]
    fixed = [n for n in (left, right) if not isinstance(n, Size)]
    # An axis has at least one place; of anything else the result may depend on the size.
    if sizes and not (len(sizes) == 1 and sizes[0].op == "axis" and sizes[0].factor > 0 and fixed[0] <= 0):
        raise SizeError("compares a size that depends on an open axis")
    return bool(compare(value_at(left, 0), value_at(right, 0)))


def _reduced(node: OnnxNode, arrays: Sequence[np.ndarray], integers: bool) -> np.ndarray:
    axes = node.attributes.get("axes")
    if len(arrays) > 1:
        axes = [int(n) for n in arrays[1].reshape(-1).tolist()]
    numbers = arrays[0]
    if numbers.ndim != 1 or (axes is not None and [int(a) % 1 for a in axes] != [0]):
        raise SizeError("reduces sizes along several axes")
    total: Number = numbers[0]
    for number in numbers[1:].tolist():
        total = _arithmetic(_REDUCTIONS[node.op], total, number, integers)
    result = np.empty((1,) if node.attributes.get("keepdims", 1) else (), object)
    result.reshape(-1)[:] = [total]
    return result
