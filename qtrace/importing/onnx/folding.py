"""Computes nodes whose inputs are stored, and arithmetic on sizes.

The reference implementation of ONNX computes constants, and sizes that are read from shapes, after shape
inference has said how large the results are.
Nodes that move numbers, and arithmetic, are computed size by size; a size may depend on open axes.
"""

from __future__ import annotations

import math
import operator
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper, shape_inference

from qtrace.graph.types import TensorNode
from qtrace.importing.onnx.model import OnnxNode, Sizes, Stored
from qtrace.onnxfile.fragment import SMALL
from qtrace.onnxfile.model import RANDOM_OPS

_MAX_TERM = 2**12  # of a fraction, so that its product with a size fits int32

_MAX_STORED = 9 * 2**24  # elements that a file computes of fewer; VGG-19 with constant weights: 8.6 * 2**24

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
_REDUCTIONS = {"ReduceProd": "Mul", "ReduceSum": "Add", "ReduceMax": "Max", "ReduceMin": "Min"}
_ROUNDINGS: Mapping[str, Callable[[Any], Any]] = {"Floor": np.floor, "Ceil": np.ceil, "Round": np.rint}
_COMPARISONS: Mapping[str, Callable[[Any, Any], bool]] = {
    "Equal": operator.eq,
    "Less": operator.lt,
    "Greater": operator.gt,
    "LessOrEqual": operator.le,
    "GreaterOrEqual": operator.ge,
}
FOLDED = {*_MOVES, *_ARITHMETIC, *_ROUNDINGS, *_REDUCTIONS, *_COMPARISONS, "Cast", "Abs", "Neg"}

_Value = Stored | Sizes | None


class SizeError(Exception):
    """Arithmetic on a size is not exact in int32; the text says why, as a clause."""


@dataclass(frozen=True, eq=False)
class Size:
    """A number that depends on open axes: an integer that the graph computes, times a fixed fraction.

    Attributes:
        op: ``axis``, or an integer operation: add, sub, mul, floordiv, mod, min, max.
        parts: the operands; of ``axis`` the tensor and the axis.
        values: the integer for each probe of the builder.
        factor: the fraction.
    """

    op: str
    parts: tuple[Any, ...]
    values: tuple[int, ...]
    factor: Fraction = Fraction(1)

    @property
    def numbers(self) -> tuple[Fraction, ...]:
        """The whole number for each probe."""
        return tuple(value * self.factor for value in self.values)


Number = int | float | bool | Size


def axis_size(node: TensorNode, axis: int, values: tuple[int, ...]) -> int | Size:
    """Returns the size of an axis of a tensor, which is a number where it is the same for all probes."""
    return values[0] if len(set(values)) == 1 else Size("axis", (node, axis), values)


def value_at(number: Number, probe: int) -> int | float:
    """Returns the number for one probe of the builder."""
    if not isinstance(number, Size):
        return number
    value = number.numbers[min(probe, len(number.values) - 1)]
    return int(value) if value.denominator == 1 else float(value)


def is_fixed(number: Number) -> bool:
    """Returns whether a number depends on no open axis."""
    return not isinstance(number, Size)


def _combine(op: str, left: Number, right: Number, integers: bool) -> Number:
    """See `arithmetic`, of two numbers of which one at least is a `Size`."""
    if op == "Mul":
        return _product(left, right)
    if op == "Div" and not integers:
        return _quotient(left, right)
    if op == "Div":
        return _integer("floordiv", whole(left), _positive(whole(right)))
    if op == "Mod":
        return _integer("mod", whole(left), _positive(whole(right)))
    if op.lower() not in _FUNCTIONS:
        raise SizeError(f"computes {op} of a size")
    (one, other), denominator = _on_one_denominator(left, right)
    return _times(_integer(op.lower(), one, other), Fraction(1, denominator))


def rounded(op: str, number: Size) -> int | Size:
    """Returns a number rounded to an integer by Floor, Ceil, Round, or Cast, which cuts off.

    Raises:
        SizeError: when it is negative, or Round would have to choose between two integers.
    """
    top, below = number.factor.numerator, number.factor.denominator
    if below == 1:
        return whole(number)
    if op == "Round":
        raise SizeError("rounds a fraction of a size to the nearest integer")
    if op == "Cast" and min(number.values) * top < 0:
        raise SizeError("cuts off a negative size")
    scaled = _integer("mul", _bare(number), top) if top != 1 else _bare(number)
    if op == "Ceil":
        scaled = _integer("add", scaled, below - 1)
    return _integer("floordiv", scaled, below)


def absolute(number: Number) -> Number:
    """Returns the magnitude of a number.

    Raises:
        SizeError: when it may be negative.
    """
    if isinstance(number, Size) and min(number.numbers) < 0:
        raise SizeError("takes the magnitude of a negative size")
    return number if isinstance(number, Size) else abs(number)


def whole(number: Number) -> int | Size:
    """Returns a number as an integer that the graph computes.

    Raises:
        SizeError: when it is no integer.
    """
    if not isinstance(number, Size):
        if number != int(number):
            raise SizeError(f"computes with the number {number:g} and a size")
        return int(number)
    if number.factor == 1:
        return number
    if number.factor.denominator != 1:
        raise SizeError(f"needs {number.factor} of a size as an integer")
    return _integer("mul", _bare(number), number.factor.numerator)


_FUNCTIONS: Mapping[str, Callable[[Any, Any], Any]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "floordiv": operator.floordiv,
    "mod": operator.mod,
    "min": min,
    "max": max,
}


def _bare(size: Size) -> Size:
    return Size(size.op, size.parts, size.values)


def _integer(op: str, left: int | Size, right: int | Size) -> int | Size:
    """Returns an integer operation, or its result if both numbers are fixed or it changes nothing."""
    if not isinstance(left, Size) and not isinstance(right, Size):
        return _FUNCTIONS[op](left, right)
    if right == 0 and op in ("add", "sub"):
        return left
    if right == 1 and op in ("mul", "floordiv"):
        return left
    if left == (0 if op == "add" else 1) and op in ("add", "mul"):
        return right
    if op in ("floordiv", "mod") and min(_values(left, 1)) < 0:
        raise SizeError("divides a negative size")
    probes = max(len(n.values) for n in (left, right) if isinstance(n, Size))
    pairs = zip(_values(left, probes), _values(right, probes), strict=True)
    values = tuple(_FUNCTIONS[op](a, b) for a, b in pairs)
    if any(abs(value) > np.iinfo(np.int32).max for value in values):
        raise SizeError("computes a size beyond int32")
    return Size(op, (left, right), values)


def _values(number: int | Size, probes: int) -> tuple[int, ...]:
    return number.values if isinstance(number, Size) else (number,) * probes


def _positive(number: int | Size) -> int | Size:
    if min(_values(number, 1)) < 1:
        raise SizeError("divides by a number that is not positive")
    return number


def _fraction(number: float) -> Fraction:
    if not math.isfinite(number):
        raise SizeError(f"computes with the number {number} and a size")
    exact = Fraction(number)
    if max(abs(exact.numerator), exact.denominator) > _MAX_TERM:
        raise SizeError(f"multiplies a size by {number:g}, which no small fraction expresses")
    return exact


def _times(number: int | Size, factor: Fraction) -> Number:
    if not isinstance(number, Size):
        result = number * factor
        return int(result) if result.denominator == 1 else float(result)
    product = number.factor * factor
    if max(abs(product.numerator), product.denominator) > _MAX_TERM:
        raise SizeError(f"multiplies a size by {float(product):g}, which no small fraction expresses")
    return Size(number.op, number.parts, number.values, product)


def _product(left: Number, right: Number) -> Number:
    if isinstance(left, Size) and isinstance(right, Size):
        return _times(_integer("mul", _bare(left), _bare(right)), left.factor * right.factor)
    size, number = (left, right) if isinstance(left, Size) else (right, left)
    if number == 0:
        return 0
    assert isinstance(size, Size)
    assert not isinstance(number, Size)
    return _times(size, _fraction(number))


def _quotient(left: Number, right: Number) -> Number:
    if isinstance(right, Size):
        raise SizeError("divides by a size without rounding to an integer")
    if right == 0 or not isinstance(left, Size):
        raise SizeError("divides by zero")
    return _times(left, 1 / _fraction(right))


def _on_one_denominator(left: Number, right: Number) -> tuple[list[int | Size], int]:
    """Returns two numbers as integers over one denominator."""
    factors = [n.factor if isinstance(n, Size) else _fraction(n) for n in (left, right)]
    common = math.lcm(*(factor.denominator for factor in factors))
    parts: list[int | Size] = []
    for number, factor in zip((left, right), factors, strict=True):
        times = factor * common
        bare = _bare(number) if isinstance(number, Size) else 1
        parts.append(_integer("mul", bare, int(times)) if isinstance(bare, Size) else int(times))
    return parts, common


class CannotEvaluate(Exception):
    """A node cannot be computed here; the text says why, as a clause."""


class TooLarge(CannotEvaluate):
    """The results of a node would be huge."""


def evaluate(
    node: OnnxNode, inputs: Sequence[np.ndarray | None], opsets: Mapping[str, int], grown: int = 0
) -> tuple[list[np.ndarray], int]:
    """Computes a node.

    Args:
        node: the node.
        inputs: one an input; None where it is left out.
        opsets: the versions that the model imports.
        grown: by how many elements earlier results exceed their inputs.

    Returns:
        The results, and by how many elements all results exceed their inputs.

    Raises:
        CannotEvaluate: when the node is random, lacks a reference or fails; `TooLarge` for huge results.
    """
    if node.op in RANDOM_OPS:
        raise CannotEvaluate("is random")
    known = {name: value for name, value in zip(node.inputs, inputs, strict=True) if value is not None}
    shapes = infer_shapes(node, {n: (v.dtype, v.shape) for n, v in known.items()}, known, opsets)
    grown -= sum(value.size for value in known.values())
    _sum_sizes([shape for _, shape in shapes.values() if shape is not None], grown)
    try:
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            results = _run(node, inputs, opsets)
    except Exception as error:  # the reference raises errors of many classes for damaged nodes
        raise CannotEvaluate(f"cannot be computed ({type(error).__name__}: {error})") from error
    arrays = []
    for result in results:
        if not isinstance(result, (np.ndarray, np.generic)):
            raise CannotEvaluate("gives a sequence or text, not a tensor")
        arrays.append(np.asarray(result))
    return arrays, _sum_sizes([array.shape for array in arrays], grown)


def _sum_sizes(shapes: Sequence[tuple[int, ...]], grown: int) -> int:
    """Returns the number of elements of ``shapes`` and of ``grown``.

    Raises:
        TooLarge: when no file may compute as many.
    """
    grown += sum(map(math.prod, shapes))
    if grown > _MAX_STORED:
        raise TooLarge(f"would compute a constant of the shape {list(max(shapes, key=math.prod))}")
    return grown


def _run(node: OnnxNode, inputs: Sequence[Any], opsets: Mapping[str, int]) -> Sequence[Any]:
    from onnx.reference import ReferenceEvaluator  # here: it loads slowly, and most files need none
    from onnx.reference.ops import load_op

    if not node.domain:
        implementation = load_op(node.domain, node.op, node.version)
        if not getattr(implementation, "op_domain", "") and not hasattr(implementation, "evaluator_cls"):
            settings = {
                "log": _silent,
                "opsets": dict(opsets),
                "verbose": 0,
                "new_ops": None,
                "existing_functions": {},
            }
            return implementation(node.proto, settings).run(*inputs)
    evaluator = ReferenceEvaluator(node.proto)
    return list(evaluator.run(None, dict(zip(node.inputs, inputs, strict=True))))


def _silent(*_: Any) -> None:
    """Takes the reference's log."""


def infer_shapes(
    node: OnnxNode,
    types: Mapping[str, tuple[Any, Sequence[int]]],
    stored: Mapping[str, np.ndarray],
    opsets: Mapping[str, int],
) -> dict[str, tuple[np.dtype[Any], tuple[int, ...] | None]]:
    """Infers dtypes and shapes of a node's outputs without computing them.

    Args:
        node: the node.
        types: dtype and shape of each input that is there.
        stored: the values of inputs that are known; sizes may be among them.
        opsets: the versions that the model imports.

    Returns:
        Dtype and shape of the outputs that ONNX can infer, by name; None for a shape that depends on values.

    Raises:
        CannotEvaluate: when the inputs do not fit the node.
    """
    if node.domain:
        return {}
    schema = onnx.defs.get_schema(node.op, node.version)
    kinds = {
        name: onnx.helper.make_tensor_type_proto(
            onnx.helper.np_dtype_to_tensor_dtype(np.dtype(d)), list(shape)
        )
        for name, (d, shape) in types.items()
    }
    data = {n: numpy_helper.from_array(v) for n, v in stored.items() if v.size <= SMALL}
    imports = [onnx.helper.make_opsetid(domain, version) for domain, version in opsets.items()]
    try:
        outputs = shape_inference.infer_node_outputs(schema, node.proto, kinds, data, opset_imports=imports)
    except (shape_inference.InferenceError, onnx.checker.ValidationError, RuntimeError, ValueError) as error:
        text = (str(error).strip().splitlines() or ["ONNX gives no reason"])[0][:200]
        raise CannotEvaluate(f"does not fit its inputs ({text})") from error
    inferred: dict[str, tuple[np.dtype[Any], tuple[int, ...] | None]] = {}
    for name, kind in outputs.items():
        tensor = kind.tensor_type
        if not kind.HasField("tensor_type") or not tensor.elem_type:
            continue
        axes = tensor.shape.dim if tensor.HasField("shape") else None
        known = axes is not None and all(axis.HasField("dim_value") for axis in axes)
        shape = tuple(int(axis.dim_value) for axis in axes) if axes is not None and known else None
        inferred[name] = (np.dtype(onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type)), shape)
    return inferred


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
        total = arithmetic("Mul", total, number, True)
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
    for name, places in zip(node.outputs, evaluate(node, inputs, opsets)[0], strict=False):
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
            result = _elementwise(lambda a, b: arithmetic(node.op, a, b, integers), result, other)
        return result
    if node.op in _COMPARISONS:
        return _elementwise(lambda a, b: _compared(node.op, a, b), *arrays)
    if node.op in _REDUCTIONS:
        return _reduced(node, arrays, integers)
    if node.op == "Abs":
        return _elementwise(absolute, arrays[0])
    if node.op == "Neg":
        return _elementwise(lambda n: arithmetic("Sub", 0, n, integers), arrays[0])
    if node.op == "Cast":
        to_integer = _kind(node, values).kind in "iu"
        return _elementwise(lambda n: _cast(n, to_integer), arrays[0])
    return _elementwise(
        lambda n: rounded(node.op, n) if isinstance(n, Size) else float(_ROUNDINGS[node.op](n)), arrays[0]
    )


def _elementwise(function: Callable[..., Number], *arrays: np.ndarray) -> np.ndarray:
    together = np.broadcast_arrays(*arrays)
    result = np.empty(together[0].shape, object)
    columns = zip(*(array.reshape(-1).tolist() for array in together), strict=True)
    result.reshape(-1)[:] = [function(*column) for column in columns]
    return result


def arithmetic(op: str, left: Number, right: Number, integers: bool) -> Number:
    """Computes with two numbers.

    Args:
        op: the op in ONNX: Add, Sub, Mul, Div, Mod, Min or Max.
        left: the first operand.
        right: the second operand.
        integers: whether both are integers in the file, whose quotients are rounded.

    Raises:
        SizeError: when one is a `Size`, and the result is no exact multiple of an integer.
    """
    if isinstance(left, Size) or isinstance(right, Size):
        return _combine(op, left, right, integers)
    if op == "Div":
        return int(left / right) if integers else left / right
    result: Number = _FUNCTIONS[op.lower()](left, right)
    return result


def _cast(number: Number, to_integer: bool) -> Number:
    if isinstance(number, Size):
        return rounded("Cast", number) if to_integer else number
    return int(number) if to_integer else float(number)


def _compared(op: str, left: Number, right: Number) -> bool:
    """Compares a size with a number below 1, such as the -1 that stands for a size to be inferred."""
    sizes = [n for n in (left, right) if isinstance(n, Size)]
    fixed = [n for n in (left, right) if not isinstance(n, Size)]
    # An axis has at least one place; of anything else the result may depend on the size.
    if sizes and not (len(sizes) == 1 and sizes[0].op == "axis" and sizes[0].factor > 0 and fixed[0] <= 0):
        raise SizeError("compares a size that depends on an open axis")
    return bool(_COMPARISONS[op](value_at(left, 0), value_at(right, 0)))


def _reduced(node: OnnxNode, arrays: Sequence[np.ndarray], integers: bool) -> np.ndarray:
    axes = node.attributes.get("axes")
    if len(arrays) > 1:
        axes = [int(n) for n in arrays[1].reshape(-1).tolist()]
    numbers = arrays[0]
    if numbers.ndim != 1 or (axes is not None and [int(a) % 1 for a in axes] != [0]):
        raise SizeError("reduces sizes along several axes")
    total: Number = numbers[0]
    for number in numbers[1:].tolist():
        total = arithmetic(_REDUCTIONS[node.op], total, number, integers)
    result = np.empty((1,) if node.attributes.get("keepdims", 1) else (), object)
    result.reshape(-1)[:] = [total]
    return result
