"""The types of MSC's ops in one table: names, attributes, defaults, and MegEngine's calls that compute them.

The attributes are TVM's Relax attributes, as text in MSC's documents. The table serves both ways. A graph is
written in these words. An op of a document without a call of its own is computed as its type and attributes
say. What a document leaves out has TVM's default.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any

import megengine.functional as F
import numpy as np

from qtrace.errors import GraphError
from qtrace.export.converted import index_parts
from qtrace.gradients import plain
from qtrace.graph import functions
from qtrace.targets.msc.document import MSCNode, MSCTensor

__all__ = ["KINDS", "Calls", "Kind", "find_kind", "standard_calls"]

_LAYOUTS = {len(layout): layout for layout in ("NCW", "NCHW", "NCDHW")}
_MODES = {"nearest": "nearest_neighbor", "bilinear": "linear", "bicubic": "cubic"}  # MegEngine's, TVM's
_END = int(np.iinfo(np.int32).max)  # of a slice that goes as far as the axis
_MISSING = object()

Attributes = Mapping[str, Any]


class Calls:
    """The calls that compute an op, and its operands and attributes while they are written.

    Args:
        node: the node.
        kind: its type.

    Attributes:
        steps: the calls as data, in order; ``{"ref": "step_0"}`` is the result of the first.
        results: references of the results; None for the results of the last call.
    """

    def __init__(self, node: MSCNode, kind: Kind) -> None:
        self.node, self.kind, self.steps = node, kind, list[dict[str, Any]]()
        self.results: list[dict[str, Any]] | None = None
        self._next_input = 0

    def __getitem__(self, key: str) -> Any:
        text = self.node.attrs.get(key)
        value = self.kind.defaults.get(key, _MISSING) if text is None else _parse(text)
        if value is _MISSING:
            raise GraphError(f"it lacks attribute {key!r}")
        return value

    def tensor(self, kind: str = "") -> MSCTensor:
        """Returns the weight of a type, or the input that the next operand reads."""
        if kind in self.node.weights:
            return self.node.weights[kind]
        if self._next_input == len(self.node.inputs):
            raise GraphError(f"it reads no {kind or 'more inputs'}")
        return self.node.inputs[self._next_input]

    def operand(self, kind: str = "", shape: Sequence[int] | None = None) -> dict[str, Any]:
        """Returns a reference to a weight or, without a weight of that type, to the next input.

        Args:
            kind: the type of the weight; "" for an input.
            shape: the shape in which it is read; None for its own.
        """
        tensor, reference = self.tensor(kind), {"ref": kind}
        if kind not in self.node.weights:
            reference = {"ref": f"input_{self._next_input}"}
            self._next_input += 1
        if shape is not None and tuple(shape) != tensor.shape:
            reference["shape"] = list(shape)  # type: ignore[assignment]
        return reference

    def optional(self, kind: str, shape: Sequence[int] | None = None) -> dict[str, Any] | None:
        """Returns `operand`, or None where the node has neither the weight nor one more input."""
        absent = kind not in self.node.weights and self._next_input == len(self.node.inputs)
        return None if absent else self.operand(kind, shape)

    def all_inputs(self) -> list[dict[str, Any]]:
        """Returns references to all inputs that are not read yet."""
        return [self.operand() for _ in self.node.inputs[self._next_input :]]

    def call(self, function: Callable[..., Any] | str, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Adds a call of a function, or of a Tensor's method by its name; returns its result."""
        step = {"method": function} if isinstance(function, str) else {"function": _key(function)}
        arguments = {"args": [_data(value) for value in args]}
        options = {"kwargs": {key: _data(value) for key, value in kwargs.items()}} if kwargs else {}
        self.steps.append({**step, **arguments, **options})
        return {"ref": f"step_{len(self.steps) - 1}"}

    def integers(self, key: str, count: int) -> tuple[int, ...]:
        """Returns an attribute as so many integers; one stands for equal ones.

        Raises:
            GraphError: when it is anything else.
        """
        value = self[key]
        values = value if isinstance(value, tuple) else (value,)
        if len(values) == 1:
            values *= count
        if len(values) != count or not all(type(n) is int for n in values):
            raise GraphError(f"its {key} is {self.node.attrs.get(key)!r}: give {count} integers")
        return values

    def axes(self, key: str) -> tuple[int, ...] | None:
        """Returns an attribute as axes of the input or of a larger result; None for no axes.

        Raises:
            GraphError: when the tensor does not have these axes.
        """
        if self[key] is None:
            return None
        rank = max(self.node.inputs[0].ndim, self.node.outputs[0].ndim)
        values = self[key] if isinstance(self[key], tuple) else (self[key],)
        if not all(type(n) is int and -rank <= n < rank for n in values):
            raise GraphError(
                f"its {key} is {self.node.attrs.get(key)!r}, which a tensor of rank {rank} lacks"
            )
        return tuple(n % rank for n in values)

    def axis(self, key: str = "axis") -> int:
        """Returns an attribute as one axis.

        Raises:
            GraphError: when it is no axis, or several.
        """
        axes = self.axes(key)
        if axes is None or len(axes) != 1:
            raise GraphError(f"its {key} is {self.node.attrs.get(key)!r}: give one axis")
        return axes[0]

    def require(self, key: str, *values: Any) -> None:
        """Refuses a value of an attribute other than these."""
        if self[key] not in values:
            raise GraphError(
                f"its {key} is {self.node.attrs.get(key)!r}, and MegEngine computes only {values[0]!r}"
            )

    def arguments(self) -> list[Any]:
        """Returns each `Argument` of the type as MegEngine's functions take it."""
        values = []
        for key in self.kind.arguments:
            axes = self.axes(key) if key in ("axis", "axes") else None
            values.append(self[key] if axes is None else _one_or_all(axes))
        return values


def _parse(text: str) -> Any:
    """Reads a number, a text, or several with commas between or after them; None for no text."""
    parts = [part.strip() for part in text.strip("[]() ").split(",")]
    if len(parts) > 1:
        return tuple(_parse(part) for part in parts if part)
    for convert in (int, float):
        try:
            return convert(parts[0])
        except ValueError:
            continue
    return parts[0] or None


def _key(function: Callable[..., Any]) -> str:
    function = plain(function)
    return f"{function.__module__}:{function.__qualname__}"


def _data(value: Any) -> Any:
    """Returns an argument as calls in documents have it."""
    if isinstance(value, tuple):
        return {"tuple": [_data(item) for item in value]}
    if isinstance(value, slice):
        return {"slice": [value.start, value.stop, value.step]}
    return [_data(item) for item in value] if isinstance(value, list) else value


def _one_or_all(values: tuple[int, ...]) -> Any:
    return values[0] if len(values) == 1 else values


@dataclass(frozen=True)
class Argument:
    """An attribute that an argument of the op says, and that its function takes.

    Attributes:
        name: the argument, as the op's rule names it.
        default: the value that is meant where a document does not have it.
        one: whether TVM has one number where the argument may be a tuple of one.
    """

    name: str
    default: Any = _MISSING
    one: bool = False

    def value(self, arguments: Attributes) -> Any:
        """Returns the value that a document has."""
        value = arguments.get(self.name, self.default)
        if isinstance(value, (tuple, list)):
            return value[0] if self.one and len(value) == 1 else tuple(value)
        return value


@dataclass(frozen=True)
class Only:
    """An attribute with the one value that MegEngine computes."""

    default: Any


@dataclass(frozen=True)
class Kind:
    """A type of MSC's ops.

    Attributes:
        ops: the kinds of qtrace's ops that it stands for.
        read: adds the calls that compute it.
        attributes: attribute -> an `Argument`, an `Only`, or the value that is meant where a document does
            not have it.
        write: returns other attributes of a node, given its arguments.
        fits: returns whether the type says all of an op of these kinds whose arguments are numbers.
    """

    ops: str
    read: Callable[[Calls], Any]
    attributes: Attributes = field(default_factory=dict)
    write: Callable[[MSCNode, Attributes], Attributes] = lambda node, a: {}
    fits: Callable[[MSCNode, Attributes], bool] = lambda node, a: True

    @cached_property
    def defaults(self) -> dict[str, Any]:
        """The values of attributes that a document leaves out."""
        return {key: getattr(own, "default", own) for key, own in self.attributes.items()}

    @cached_property
    def arguments(self) -> dict[str, Argument]:
        """The attributes that arguments of the op say."""
        return {key: own for key, own in self.attributes.items() if isinstance(own, Argument)}

    def says(self, node: MSCNode, arguments: Attributes) -> bool:
        """Returns whether the type and its attributes say all of an op with these arguments."""
        values = (own.value(arguments) for own in self.arguments.values())
        return all(map(_is_number, values)) and self.fits(node, arguments)

    def written(self, node: MSCNode, arguments: Attributes) -> dict[str, Any]:
        """Returns all attributes of an op, the defaults included.

        Args:
            node: the node without attributes.
            arguments: the arguments of the op as its rule reads them.
        """
        own = {key: argument.value(arguments) for key, argument in self.arguments.items()}
        return {**self.defaults, **own, **self.write(node, arguments)}


def _is_number(value: Any) -> bool:
    """Returns whether a value is a number, a text, None, or several of these."""
    if isinstance(value, tuple):
        return all(map(_is_number, value))
    return value is None or isinstance(value, (int, float, str))


def find_kind(op: str, node: MSCNode, arguments: Attributes) -> tuple[str, Kind] | None:
    """Returns the type of MSC's ops that says all of an op, with its name; None if there is none."""
    fitting = ((name, kind) for name, kind in KINDS.items() if op in kind.ops.split())
    return next((pair for pair in fitting if pair[1].says(node, arguments)), None)


def standard_calls(node: MSCNode) -> Calls:
    """Returns the calls that a node's type, attributes, inputs and weights say by themselves.

    Raises:
        GraphError: when they say none; the message is a clause.
    """
    kind = KINDS.get(node.optype)
    if kind is None:
        raise GraphError("the document does not say how it is called")
    calls = Calls(node, kind)
    try:
        for key, own in kind.attributes.items():
            if isinstance(own, Only):
                calls.require(key, own.default, None)
        kind.read(calls)
    except (TypeError, ValueError, LookupError, ArithmeticError) as error:
        raise GraphError(f"its attributes and inputs do not fit its type ({error})") from error
    return calls


def _calls(function: Callable[..., Any], *more: Any) -> Callable[[Calls], Any]:
    """Builds a reader of a type that one function of the inputs and of each `Argument` computes."""
    return lambda c: c.call(function, *c.all_inputs(), *c.arguments(), *more)


def _joins(function: Callable[..., Any]) -> Callable[[Calls], Any]:
    return lambda c: c.call(function, c.all_inputs(), *c.arguments())


def _conv(rank: int, function: Callable[..., Any], ops: str, letters: str = "OI", bias: bool = False) -> Kind:
    layout, transposed = _LAYOUTS[rank + 2], letters == "IO"
    attributes = {
        **{"strides": (1,) * rank, "padding": (0,) * 2 * rank},
        **({"output_padding": (0,) * rank} if transposed else {}),
        **{"dilation": (1,) * rank, "groups": 1, "data_layout": Only(layout)},
        **{"kernel_layout": Only(letters + layout[2:]), "out_layout": Only(layout), "out_dtype": None},
    }

    def write(node: MSCNode, a: Attributes) -> Attributes:
        own = {key: a[key] for key in ("dilation", "groups", "output_padding") if key in a}
        return {**_windows(node, a), **own, "out_dtype": node.outputs[0].dtype}

    def read(c: Calls) -> None:
        x, groups, (before, after) = c.operand(), c["groups"], _pads(c, rank)
        shape = c.tensor("weight").shape
        if groups > 1:
            shape = (groups, shape[0] // groups, *shape[1:])
        weight = c.operand("weight", shape)
        offset = c.optional("bias", (1, c.node.outputs[0].shape[1], *[1] * rank))
        if before != after:
            if transposed:
                raise GraphError("MegEngine's transposed convolutions cut both ends alike")
            x = c.call(F.nn.pad, x, ((0, 0), (0, 0), *zip(before, after, strict=True)))
            before = (0,) * rank
        keys = ("output_padding", "dilation") if transposed else ("dilation",)
        sizes = (c.integers("strides", rank), before, *(c.integers(key, rank) for key in keys))
        modes = ("cross_correlation", "default")[: 1 if rank == 3 else 2]
        c.call(function, x, weight, offset, *map(_one_or_all, sizes), groups, *modes)

    return Kind(ops, read, attributes, write, **({"fits": _has_bias} if bias else {}))


def _windows(node: MSCNode, a: Attributes) -> dict[str, Any]:
    """Returns the attributes of windows, which TVM pads before all axes, then after them."""
    return {"strides": a["stride"], "padding": (*a["padding"], *a["padding"])}


def _pads(c: Calls, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    several = isinstance(c["padding"], tuple) and len(c["padding"]) == 2 * rank
    padding = c.integers("padding", 2 * rank) if several else c.integers("padding", rank) * 2
    return padding[:rank], padding[rank:]


def _has_bias(node: MSCNode, a: Attributes) -> bool:
    return "bias" in node.weights


def _pool(function: Callable[..., Any], ops: str, counts: bool) -> Kind:
    attributes = {
        **{"pool_size": (1, 1), "strides": (1, 1), "padding": (0, 0, 0, 0), "dilation": Only((1, 1))},
        **{"ceil_mode": 0, "count_include_pad": 0, **_IMAGES},
    }

    def write(node: MSCNode, a: Attributes) -> Attributes:
        own = {"pool_size": a["kernel"], "count_include_pad": int(a.get("count_include_pad", False))}
        return {**_windows(node, a), **own}

    def read(c: Calls) -> None:
        before, after = _pads(c, 2)
        if before != after:
            raise GraphError("MegEngine's pools pad both ends alike")
        mode = "average" if c["count_include_pad"] else "average_count_exclude_padding"
        sizes = (c.integers("pool_size", 2), c.integers("strides", 2), before)
        c.call(function, c.operand(), *sizes, *((mode,) if counts else ()))

    return Kind(ops, read, attributes, write)


def _along(c: Calls, axes: Sequence[int]) -> list[int]:
    """Returns the shape in which numbers along some axes meet the input."""
    return [size if axis in axes else 1 for axis, size in enumerate(c.node.inputs[0].shape)]


def _norm(
    ops: str,
    call: Callable[..., Any],
    key: str,
    write: Callable[[MSCNode, Attributes], Attributes],
    **more: Any,
) -> Kind:
    """Builds the type of a norm whose gain and shift lie along the axes of an attribute."""

    def read(c: Calls) -> None:
        axes, x = c.axes(key) or (), c.operand()
        shape = tuple(c.node.inputs[0].shape[axis] for axis in axes)
        if c["scale"] and c["center"]:
            call(c, x, True, c.operand("gamma", shape), c.operand("beta", shape), c["epsilon"])
            return
        y = call(c, x, False, None, None, c["epsilon"])
        gain, shift = c.optional("gamma", _along(c, axes)), c.optional("beta", _along(c, axes))
        y = c.call(F.mul, y, gain) if c["scale"] else y
        if c["center"]:
            c.call(F.add, y, shift)

    def write_all(node: MSCNode, a: Attributes) -> Attributes:
        return {**_affine(node, a), **write(node, a)}

    attributes = {**more, key: _MISSING, "axes": _MISSING, **_AFFINE}
    return Kind(ops, read, attributes, write_all)


def _affine(node: MSCNode, a: Attributes) -> dict[str, Any]:
    return {"center": int("beta" in node.weights), "scale": int("gamma" in node.weights)}


def _layer_norm(c: Calls, x: Any, *affine: Any) -> dict[str, Any]:
    shape, axes = c.node.inputs[0].shape, c.axes("axes") or ()
    if axes != tuple(range(len(shape) - len(axes), len(shape))):
        raise GraphError("MegEngine's layer_norm normalizes only the last axes")
    return c.call(F.nn.layer_norm, x, shape[axes[0] :], *affine)


def _channel_norm(function: Callable[..., Any], *keys: str) -> Callable[..., dict[str, Any]]:
    def call(c: Calls, x: Any, *affine: Any) -> dict[str, Any]:
        if c.axis("channel_axis") != 1 or c.axes("axes") != _spatial(c.node):
            raise GraphError("MegEngine normalizes images by channels on axis 1")
        return c.call(function, x, *(c[key] for key in keys), *affine)

    return call


def _spatial(node: MSCNode) -> tuple[int, ...]:
    return tuple(range(2, node.inputs[0].ndim))


def _write_channels(node: MSCNode, a: Attributes) -> Attributes:
    own = {"num_groups": a["num_groups"]} if "num_groups" in a else {}
    return {**own, "channel_axis": 1, "axes": _spatial(node)}


def _write_last_axes(node: MSCNode, a: Attributes) -> Attributes:
    shape = a["normalized_shape"]
    return {"axes": tuple(range(-len(shape) if isinstance(shape, (tuple, list)) else -1, 0))}


def _read_batch_norm(c: Calls) -> None:
    shape = c.node.inputs[0].shape
    image, channels = (*shape, *[1] * (4 - len(shape))), (1, shape[1], 1, 1)
    x = c.operand(shape=image)
    gain, shift, mean, variance = (c.optional(kind, channels) for kind in ("gamma", "beta", "mean", "var"))
    gain, shift = gain if c["scale"] else None, shift if c["center"] else None
    y = c.call(F.nn.batch_norm, x, mean, variance, gain, shift, training=False, eps=c["epsilon"])
    if image != shape:
        c.call(F.reshape, y, shape)


def _read_prelu(c: Calls) -> None:
    x, count = c.operand(), prod(c.tensor("weight").shape)
    c.call(F.nn.prelu, x, c.operand("weight", _along(c, (c.axis(),) if count > 1 else ())))


def _read_linear(c: Calls) -> None:
    c.call(F.linear, c.operand(), c.operand("weight"), c.optional("bias"), "default")


def _read_permute(c: Calls) -> None:
    c.call(F.transpose, c.operand(), c.axes("axes") or tuple(reversed(range(c.node.inputs[0].ndim))))


def _says_order(node: MSCNode, a: Attributes) -> bool:
    order = a.get("pattern")
    return isinstance(order, (tuple, list)) and sorted(map(str, order)) == sorted(map(str, range(len(order))))


def _read_astype(c: Calls) -> None:
    c.call("astype", c.operand(), {"dtype": c["dtype"]})


def _read_reshape(c: Calls) -> None:
    shape = c.node.outputs[0].shape
    if shape.count(-1) > 1:
        raise GraphError("several sizes of its result are open")
    c.call(F.reshape, c.operand(), shape)


def _write_shape(node: MSCNode, a: Attributes) -> Attributes:
    return {"shape": node.outputs[0].shape}


def _read_split(c: Calls) -> None:
    axis, parts = c.axis(), c["indices_or_sections"]
    sizes = [tensor.shape[axis] for tensor in c.node.outputs]
    if not isinstance(parts, tuple) and len(set(sizes)) > 1:
        parts = tuple(sum(sizes[:i]) for i in range(1, len(sizes)))
    c.call(F.split, c.operand(), list(parts) if isinstance(parts, tuple) else parts, axis)


def _read_get_item(c: Calls) -> None:
    inputs, index = c.all_inputs(), c["index"]
    if type(index) is not int or not 0 <= index < len(inputs):
        raise GraphError(f"its index is {c.node.attrs.get('index')!r}, and it has {len(inputs)} inputs")
    c.results = [inputs[index]]


def _read_tuple(c: Calls) -> None:
    c.results = c.all_inputs()


def _slices(node: MSCNode, index: Any) -> dict[int, slice]:
    """Returns axis -> its slice of an index; nothing for an index of anything but slices of numbers."""
    parts = index_parts(index, node.inputs[0].ndim)
    slices = [part.value for part in parts if isinstance(part.value, slice)]
    numbers = [n for own in slices for n in (own.start, own.stop, own.step)]
    if len(slices) < len(parts) or not all(n is None or type(n) is int for n in numbers):
        return {}
    return {part.axis or 0: part.value for part in parts if not part.whole}


def _write_slices(node: MSCNode, a: Attributes) -> Attributes:
    columns: dict[str, list[int]] = {"axes": [], "begin": [], "end": [], "strides": []}
    for axis, own in _slices(node, a["index"]).items():
        size, step = node.inputs[0].shape[axis], own.step or 1
        size = size if size >= 0 else _END
        first, last = (0, size) if step > 0 else (-1, -size - 1)
        row = (axis, first if own.start is None else own.start, last if own.stop is None else own.stop, step)
        for column, number in zip(columns.values(), row, strict=True):
            column.append(number)
    return {key: tuple(column) for key, column in columns.items()}


def _read_slices(c: Calls) -> None:
    shape = c.node.inputs[0].shape
    axes = c.axes("axes") or tuple(range(len(shape)))
    own = [slice(None)] * len(shape)
    numbers = (c.integers(key, len(axes)) for key in ("begin", "end", "strides"))
    for axis, *parts in zip(axes, *numbers, strict=True):
        own[axis] = _clipped(slice(*parts), shape[axis])
    c.call("__getitem__", c.operand(), tuple(own))


def _clipped(own: slice, size: int) -> slice:
    """Returns a slice within an axis, as MegEngine needs it; a slice to an open axis's end stays open."""
    if size < 0:
        return slice(own.start, own.stop if abs(own.stop) < _END else None, own.step)
    start, stop, step = own.indices(size)
    return slice(start, stop if stop >= 0 else None, step)


def _flat_or_axis(c: Calls, x: dict[str, Any]) -> tuple[dict[str, Any], int]:
    """Returns the input and an axis: without one, all numbers in a row."""
    return (c.call(F.reshape, x, (-1,)), 0) if c["axis"] is None else (x, c.axis())


def _read_take(c: Calls) -> None:
    x, index = c.all_inputs()
    x, axis = _flat_or_axis(c, x)
    c.call("__getitem__", x, (*[slice(None)] * axis, index))


def _read_gather(c: Calls) -> None:
    x, *others = c.all_inputs()
    c.call(F.scatter if len(others) > 1 else F.gather, x, c.axis(), *others)


def _read_topk(c: Calls) -> None:
    shape, axis, x = c.node.inputs[0].shape, c.axis(), c.operand()
    order = (*(i for i in range(len(shape)) if i != axis), axis)
    plain = len(shape) == 2 and axis == 1 and c["ret_type"] == "both"
    if not plain:  # MegEngine sorts rows
        x = c.call(F.reshape, c.call(F.transpose, x, order), (-1, shape[axis]))
    c.call(F.topk, x, c["k"], bool(c["largest"]), False, False)
    if plain:
        return
    results = [{"ref": f"step_{len(c.steps) - 1}_{i}"} for i in range(2)]
    outer = (*(shape[i] for i in order[:-1]), c["k"])
    back = tuple(order.index(i) for i in range(len(shape)))
    results = [c.call(F.transpose, c.call(F.reshape, y, outer), back) for y in results]
    c.results = {"both": results, "values": results[:1], "indices": results[1:]}[c["ret_type"]]


def _write_clip(node: MSCNode, a: Attributes) -> Attributes:
    return {} if "lower" in a else {"min": 0, "max": 6}  # relu6


def _read_pad(c: Calls) -> None:
    widths = c.integers("pad_width", 2 * c.node.inputs[0].ndim)
    pairs = tuple(zip(widths[::2], widths[1::2], strict=True))
    mode = {"edge": "replicate"}.get(c["pad_mode"], c["pad_mode"])
    c.call(F.nn.pad, c.operand(), pairs, mode, float(c["pad_value"]))


def _write_pad(node: MSCNode, a: Attributes) -> Attributes:
    widths = [n for pair in a["width"] for n in pair]
    return {"pad_width": (*widths, *[0] * (2 * node.inputs[0].ndim - len(widths)))}


def _write_resize(node: MSCNode, a: Attributes) -> Attributes:
    nearest = a["mode"] == "nearest"
    place = "asymmetric" if nearest else "align_corners" if a["align_corners"] else "half_pixel"
    return {
        **{"size": node.outputs[0].shape[2:], "method": _MODES.get(a["mode"], a["mode"]), _PLACE: place},
        "rounding_method": "floor" if nearest else "round",
    }


def _read_resize(c: Calls) -> None:
    size, modes = c.integers("size", 2), {theirs: ours for ours, theirs in _MODES.items()}
    c.require("method", *modes)
    mode, aligned = modes[c["method"]], {}
    if mode == "nearest":
        pairs = zip(c.node.inputs[0].shape[2:], size, strict=True)
        grown = all(old > 0 and new % old == 0 for old, new in pairs)
        rounds = grown and c[_PLACE] == "half_pixel" and str(c["rounding_method"]).startswith("round")
        if not rounds and (c[_PLACE], c["rounding_method"]) != ("asymmetric", "floor"):
            raise GraphError(f"its {_PLACE} and rounding_method pick other pixels than MegEngine's nearest")
    else:
        c.require(_PLACE, "half_pixel", "align_corners")
        aligned = {"align_corners": c[_PLACE] == "align_corners"}
    c.call(F.vision.interpolate, c.operand(), size, mode=mode, **aligned)


def _write_dtype(key: str) -> Callable[[MSCNode, Attributes], Attributes]:
    return lambda node, a: {key: node.outputs[0].dtype}


_PLACE = "coordinate_transformation_mode"
_AFFINE = {"epsilon": Argument("eps", 1e-5), "center": 1, "scale": 1}
_IMAGES = {"layout": Only("NCHW"), "out_layout": Only("NCHW")}
_AXIS, _LAST = Argument("axis", None, one=True), Argument("axis", -1, one=True)
_JOINED = {"axis": Argument("axis", 0)}
_AXES = {"axis": Argument("axis", None)}
_OUT = {"out_dtype": None}
_REDUCED = {"axis": Argument("axis", None), "keepdims": Argument("keepdims", 0)}
_FLIPS = {key: Argument(key, 0) for key in ("transpose_a", "transpose_b")}
_ORDER = {"axes": Argument("pattern", None)}
_PADS = {"pad_mode": Argument("mode", "constant"), "pad_value": Argument("value", 0.0)}
# Type -> the kind of the op, and its function. Types of one name with their function in MegEngine:
_SAME = "abs exp log sqrt square floor ceil round sign sin cos tan sinh cosh tanh asin acos atan asinh acosh \
atanh sigmoid logical_not logical_and logical_or logical_xor maximum minimum less less_equal greater \
greater_equal equal not_equal isinf isnan where"
_RENAMED = {
    **{"nn.relu": "relu", "nn.silu": "silu", "nn.gelu": "gelu", "negative": "neg", "add": "add"},
    **{"subtract": "sub", "multiply": "mul", "divide": "div", "power": "pow", "floor_divide": "floor_div"},
}
_ELEMENTWISE = {**{name: name for name in _SAME.split()}, **_RENAMED}
# The first type that says all of an op is written.
_KINDS = {
    **{name: Kind(op, _calls(getattr(F, op))) for name, op in _ELEMENTWISE.items()},
    "nn.gelu_tanh": Kind("gelu_tanh", _calls(functions.gelu_tanh)),
    "erf": Kind("erf", _calls(functions.erf)),
    "rsqrt": Kind("", lambda c: c.call(F.pow, c.operand(), -0.5)),
    "msc.conv1d_bias": _conv(1, F.nn.conv1d, "conv1d", bias=True),
    "msc.conv2d_bias": _conv(2, F.conv2d, "conv2d", bias=True),
    "nn.conv1d": _conv(1, F.nn.conv1d, "conv1d"),
    "nn.conv2d": _conv(2, F.conv2d, "conv2d"),
    "nn.conv3d": _conv(3, F.nn.conv3d, "conv3d"),
    "nn.conv2d_transpose": _conv(2, F.conv_transpose2d, "conv_transpose2d", "IO"),
    "msc.linear_bias": Kind("linear", _read_linear, _OUT, _write_dtype("out_dtype"), _has_bias),
    "msc.linear": Kind("linear", _read_linear, _OUT, _write_dtype("out_dtype")),
    "nn.bias_add": Kind(
        "", lambda c: c.call(F.add, c.operand(), c.operand("bias", _along(c, (c.axis(),)))), {"axis": 1}
    ),
    "nn.batch_matmul": Kind(
        "matmul",
        _calls(F.matmul),
        {**_FLIPS, **_OUT},
        fits=lambda node, a: bool(a["transpose_a"] or a["transpose_b"]),
    ),
    "matmul": Kind("matmul", _calls(F.matmul), _OUT, _write_dtype("out_dtype")),
    "msc.embedding": Kind(
        "embedding", lambda c: c.call(F.nn.embedding, c.operand(), c.operand("weight")), {"axis": Only(0)}
    ),
    "nn.max_pool2d": _pool(F.nn.max_pool2d, "max_pool2d", False),
    "nn.avg_pool2d": _pool(F.nn.avg_pool2d, "avg_pool2d", True),
    "nn.adaptive_avg_pool2d": Kind(
        "adaptive_avg_pool2d",
        _calls(F.nn.adaptive_avg_pool2d),
        {"output_size": Argument("output_size"), **_IMAGES},
    ),
    "nn.batch_norm": Kind(
        "batch_norm", _read_batch_norm, {"axis": Only(1), **_AFFINE, "momentum": 0.1, "training": 0}, _affine
    ),
    "nn.layer_norm": _norm("layer_norm", _layer_norm, "axes", _write_last_axes),
    "nn.group_norm": _norm(
        "group_norm",
        _channel_norm(F.nn.group_norm, "num_groups"),
        "channel_axis",
        _write_channels,
        num_groups=_MISSING,
    ),
    "nn.instance_norm": _norm(
        "instance_norm", _channel_norm(F.nn.instance_norm), "channel_axis", _write_channels
    ),
    "nn.softmax": Kind("softmax", _calls(F.softmax), {"axis": _LAST}),
    "nn.log_softmax": Kind("logsoftmax", _calls(F.logsoftmax), {"axis": _LAST}),
    "nn.leakyrelu": Kind("leaky_relu", _calls(F.leaky_relu), {"alpha": Argument("negative_slope", 0.01)}),
    "nn.prelu": Kind("prelu", _read_prelu, {"axis": 1}),
    "nn.softplus": Kind("softplus", _calls(F.softplus), {"beta": Only(1.0), "threshold": 20.0}),
    "clip": Kind(
        "relu6 clip",
        _calls(F.clip),
        {"min": Argument("lower", None), "max": Argument("upper", None)},
        _write_clip,
    ),
    "nn.pad": Kind("pad", _read_pad, {"pad_width": _MISSING, **_PADS}, _write_pad),
    "nn.pixel_shuffle": Kind(
        "pixel_shuffle", _calls(F.nn.pixel_shuffle), {"upscale_factor": Argument("factor")}
    ),
    "image.resize2d": Kind(
        "interpolate",
        _read_resize,
        {
            **{"size": _MISSING, "roi": (0.0,) * 4, "layout": Only("NCHW"), "method": "linear"},
            **{_PLACE: "half_pixel", "rounding_method": "round", "cubic_alpha": Only(-0.75)},
            **{"cubic_exclude": Only(0), "extrapolation_value": 0.0, "out_dtype": None},
        },
        _write_resize,
        lambda node, a: node.inputs[0].ndim == 4,
    ),
    "permute_dims": Kind("transpose swapaxes", _read_permute, _ORDER, fits=_says_order),
    "reshape": Kind("reshape flatten", _read_reshape, {"shape": None}, _write_shape),
    "broadcast_to": Kind(
        "broadcast_to",
        lambda c: c.call(F.broadcast_to, c.operand(), c.node.outputs[0].shape),
        {"shape": None},
        _write_shape,
    ),
    "squeeze": Kind("squeeze", _calls(F.squeeze), _AXES),
    "expand_dims": Kind("expand_dims", _calls(F.expand_dims), _AXES),
    "concat": Kind("concat", _joins(F.concat), _JOINED),
    "stack": Kind("stack", _joins(F.stack), _JOINED),
    "split": Kind(
        "split", _read_split, {"indices_or_sections": Argument("sections"), "axis": Argument("axis", 0)}
    ),
    "get_item": Kind("", _read_get_item),
    "tuple": Kind("", _read_tuple),
    "tile": Kind("tile", _calls(F.tile), {"repeats": Argument("reps")}),
    "repeat": Kind("repeat", _calls(F.repeat), {"repeats": Argument("repeats"), "axis": _AXIS}),
    "strided_slice": Kind(
        "getitem",
        _read_slices,
        {"axes": None, "begin": _MISSING, "end": _MISSING, "strides": 1, "assume_inbound": 0},
        _write_slices,
        lambda node, a: bool(_slices(node, a.get("index"))),
    ),
    "take": Kind("", _read_take, {"axis": None, "mode": "fast"}),
    "gather_elements": Kind("gather", _read_gather, _JOINED),
    "scatter_elements": Kind("scatter", _read_gather, {**_JOINED, "reduction": Only("update")}),
    "topk": Kind(
        "topk",
        _read_topk,
        {
            **{"k": Argument("k", 1), "axis": -1, "ret_type": "both"},
            **{"largest": Argument("descending", 1), "dtype": "int32"},
        },
        fits=lambda node, a: not a.get("kth_only"),
    ),
    **{
        name: Kind(name, _calls(getattr(F, name)), {**_REDUCED, "axis": _AXIS})
        for name in ("argmax", "argmin")
    },
    **{
        name: Kind(name, _calls(getattr(F, name)), _REDUCED)
        for name in ("mean", "sum", "max", "min", "prod", "std")
    },
    "variance": Kind("var", _calls(F.var), _REDUCED),
    "cumsum": Kind(
        "cumsum",
        lambda c: c.call(F.cumsum, *_flat_or_axis(c, c.operand())),
        {"axis": _AXIS, "dtype": None, "exclusive": Only(0)},
    ),
    "astype": Kind("astype", _read_astype, {"dtype": _MISSING}, _write_dtype("dtype")),
}
# Other names of types, which are read only.
_ALIASES = {
    **{"cast": "astype", "concatenate": "concat", "transpose": "permute_dims"},
    **{"msc.gelu": "nn.gelu", "msc.matmul": "matmul", "nn.dense": "msc.linear"},
}
KINDS: Mapping[str, Kind] = {**_KINDS, **{alias: _KINDS[name] for alias, name in _ALIASES.items()}}
