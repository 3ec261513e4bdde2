"""The types of MSC's ops in one table: names, attributes, defaults, and MegEngine's calls that compute them.

The attributes are those of TVM's Relax ops, which MSC's documents hold as text. The table serves both ways: a
graph is written in these words, and an op of a document that says no call of its own is computed as its type
and attributes say. What a document leaves out has TVM's default.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import megengine.functional as F
import numpy as np

from qtrace.errors import GraphError
from qtrace.gradients import plain
from qtrace.graph import functions
from qtrace.graph.msc.document import MSCNode, MSCTensor

__all__ = ["KINDS", "Calls", "Kind", "find_kind", "standard_calls"]

_LAYOUTS = {3: "NCW", 4: "NCHW", 5: "NCDHW"}
_MODES = {"nearest": "nearest_neighbor", "bilinear": "linear", "bicubic": "cubic"}  # MegEngine's, TVM's
_END = 2**31 - 1  # of a slice that goes as far as the axis

Attributes = Mapping[str, Any]


class Calls:
    """The calls that compute an op, and its operands and attributes while they are written.

    Args:
        node: the node.
        defaults: attribute -> its value where the node does not say it.

    Attributes:
        steps: the calls as data, in order; ``{"ref": "step_0"}`` is the result of the first.
        results: references of the results; None for the results of the last call.
    """

    def __init__(self, node: MSCNode, defaults: Attributes) -> None:
        self.node, self.steps = node, list[dict[str, Any]]()
        self.results: list[dict[str, Any]] | None = None
        self._defaults, self._next_input = defaults, 0

    def __getitem__(self, key: str) -> Any:
        text = self.node.attrs.get(key)
        value = self._defaults.get(key, _MISSING) if text is None else _parse(text)
        if value is _MISSING:
            raise GraphError(f"it has no attribute {key!r}")
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

    def axes(self, key: str, rank: int) -> tuple[int, ...] | None:
        """Returns an attribute as axes, all counted from the first; None for no axes.

        Raises:
            GraphError: when a tensor of that rank does not have these axes.
        """
        if self[key] is None:
            return None
        values = self[key] if isinstance(self[key], tuple) else (self[key],)
        if not all(type(n) is int and -rank <= n < rank for n in values):
            raise GraphError(
                f"its {key} is {self.node.attrs.get(key)!r}, which a tensor of rank {rank} lacks"
            )
        return tuple(n % rank for n in values)

    def axis(self, key: str, rank: int) -> int | None:
        """Returns an attribute as one axis; None for none."""
        axes = self.axes(key, rank)
        if axes is not None and len(axes) != 1:
            raise GraphError(f"its {key} is {self.node.attrs.get(key)!r}: give one axis")
        return None if axes is None else axes[0]

    def require(self, key: str, *values: Any) -> None:
        """Refuses a value of an attribute other than these."""
        if self[key] not in values:
            raise GraphError(
                f"its {key} is {self.node.attrs.get(key)!r}, and MegEngine computes only {values[0]!r}"
            )


_MISSING = object()


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


Write = Callable[[MSCNode, Attributes], Attributes]
Read = Callable[[Calls], Any]


@dataclass(frozen=True)
class Kind:
    """A type of MSC's ops.

    Attributes:
        optype: the name in documents.
        ops: the kinds of qtrace's ops that it stands for.
        read: adds the calls that compute it.
        defaults: attribute -> the value that is meant where a document does not have it.
        write: returns the attributes of a node, given its arguments, that differ from the defaults.
        fits: returns whether the type says all of an op of these kinds.
    """

    optype: str
    ops: tuple[str, ...]
    read: Read
    defaults: Attributes = field(default_factory=dict)
    write: Write = lambda node, a: {}
    fits: Callable[[MSCNode, Attributes], bool] = lambda node, a: True

    def attributes(self, node: MSCNode, arguments: Attributes) -> dict[str, Any]:
        """Returns all attributes of an op, the defaults included.

        Args:
            node: the node without attributes.
            arguments: the arguments of the op as its rule reads them.
        """
        return {**self.defaults, **self.write(node, arguments)}


def find_kind(op: str, node: MSCNode, arguments: Attributes) -> Kind | None:
    """Returns the type of MSC's ops that says all of an op; None if there is none."""
    return next((kind for kind in KINDS.values() if op in kind.ops and kind.fits(node, arguments)), None)


def standard_calls(node: MSCNode) -> Calls:
    """Returns the calls that a node's type, attributes, inputs and weights say by themselves.

    Raises:
        GraphError: when they say none; the message is a clause.
    """
    kind = KINDS.get(node.optype)
    if kind is None:
        raise GraphError("the document does not say how it is called")
    calls = Calls(node, kind.defaults)
    try:
        kind.read(calls)
    except (TypeError, ValueError, LookupError, ArithmeticError) as error:
        raise GraphError(f"its attributes and inputs do not fit its type ({error})") from error
    return calls


def _elementwise(function: Callable[..., Any], count: int) -> Read:
    def read(c: Calls) -> None:
        inputs = c.all_inputs()
        if len(inputs) != count:
            raise GraphError(f"it has {len(inputs)} inputs, not {count}")
        c.call(function, *inputs)

    return read


def _conv(rank: int, function: Callable[..., Any], letters: str = "OI") -> dict[str, Any]:
    """Returns attributes and both ways of a convolution."""
    layout = _LAYOUTS[rank + 2]
    transposed = letters == "IO"
    defaults: dict[str, Any] = {
        **{"strides": (1,) * rank, "padding": (0,) * 2 * rank, "dilation": (1,) * rank, "groups": 1},
        **({"output_padding": (0,) * rank} if transposed else {}),
        **{"data_layout": layout, "kernel_layout": letters + layout[2:], "out_layout": layout},
        "out_dtype": None,
    }

    def write(node: MSCNode, a: Attributes) -> Attributes:
        own = {"strides": a["stride"], "padding": (*a["padding"], *a["padding"])}
        own |= {key: a[key] for key in ("dilation", "groups", "output_padding") if key in a}
        return {**own, "out_dtype": node.outputs[0].dtype}

    def read(c: Calls) -> None:
        _check_layouts(c, "data_layout", "kernel_layout", "out_layout", own=defaults)
        x = c.operand()
        groups, padding = c["groups"], _pads(c, rank)
        shape = c.tensor("weight").shape
        if groups > 1 and len(shape) == rank + 2:
            shape = (groups, shape[0] // groups, *shape[1:])
        weight = c.operand("weight", shape)
        channels = c.node.outputs[0].shape[1]
        bias = c.optional("bias", (1, channels, *[1] * rank))
        if padding[:rank] != padding[rank:] and not transposed:
            sides = zip(padding[:rank], padding[rank:], strict=True)
            x, padding = c.call(F.nn.pad, x, ((0, 0), (0, 0), *sides)), (0,) * 2 * rank
        elif padding[:rank] != padding[rank:]:
            raise GraphError("MegEngine's transposed convolutions cut both ends alike")
        sizes = [c.integers("strides", rank), padding[:rank]]
        sizes += [c.integers("output_padding", rank)] if transposed else []
        sizes += [c.integers("dilation", rank)]
        modes = ("cross_correlation", "default")[: 1 if rank == 3 else 2]
        c.call(function, x, weight, bias, *map(_one_or_all, sizes), groups, *modes)

    return {"defaults": defaults, "write": write, "read": read}


def _pads(c: Calls, rank: int) -> tuple[int, ...]:
    """Returns the padding before all axes, then that after them; TVM takes one number of each, too."""
    value = c["padding"]
    if isinstance(value, tuple) and len(value) == 2 * rank:
        return c.integers("padding", 2 * rank)
    return c.integers("padding", rank) * 2


def _check_layouts(c: Calls, *keys: str, own: Attributes) -> None:
    for key in keys:
        c.require(key, own[key], None)


def _pool(function: Callable[..., Any], counts: bool) -> dict[str, Any]:
    defaults = {
        **{"pool_size": (1, 1), "strides": (1, 1), "padding": (0, 0, 0, 0), "dilation": (1, 1)},
        **{"ceil_mode": 0, "count_include_pad": 0, "layout": "NCHW", "out_layout": "NCHW"},
    }

    def write(node: MSCNode, a: Attributes) -> Attributes:
        own = {"pool_size": a["kernel"], "strides": a["stride"], "padding": (*a["padding"], *a["padding"])}
        return {**own, "count_include_pad": int(a.get("count_include_pad", False))}

    def read(c: Calls) -> None:
        _check_layouts(c, "layout", "out_layout", own=defaults)
        if c.integers("dilation", 2) != (1, 1):
            raise GraphError("MegEngine's pools have no dilation")
        padding = _pads(c, 2)
        if padding[:2] != padding[2:]:
            raise GraphError("MegEngine's pools pad both ends alike")
        mode = "average" if c["count_include_pad"] else "average_count_exclude_padding"
        sizes = (c.integers("pool_size", 2), c.integers("strides", 2), padding[:2])
        c.call(function, c.operand(), *sizes, *((mode,) if counts else ()))

    return {"defaults": defaults, "write": write, "read": read}


def _read_adaptive(c: Calls) -> None:
    _check_layouts(c, "layout", "out_layout", own={"layout": "NCHW", "out_layout": "NCHW"})
    c.call(F.nn.adaptive_avg_pool2d, c.operand(), c.integers("output_size", 2))


def _affine_shape(c: Calls, axes: Sequence[int]) -> list[int]:
    """Returns the shape in which gain and shift along some axes meet the input."""
    shape = c.node.inputs[0].shape
    return [size if axis in axes else 1 for axis, size in enumerate(shape)]


def _read_norm(
    norm: Callable[[Calls, dict[str, Any], tuple[Any, ...]], dict[str, Any]], axes_key: str
) -> Read:
    """Builds a reader of a norm with gain and shift, either of which a document may switch off."""

    def read(c: Calls) -> None:
        rank = c.node.inputs[0].ndim
        axes = c.axes(axes_key, rank) or ()
        x = c.operand()
        shape = tuple(c.node.inputs[0].shape[axis] for axis in axes)
        if c["scale"] and c["center"]:
            norm(c, x, (True, c.operand("gamma", shape), c.operand("beta", shape), c["epsilon"]))
            return
        y = norm(c, x, (False, None, None, c["epsilon"]))
        outer = _affine_shape(c, axes)
        gain, shift = c.optional("gamma", outer), c.optional("beta", outer)
        if c["scale"]:
            y = c.call(F.mul, y, gain)
        if c["center"]:
            c.call(F.add, y, shift)

    return read


def _write_norm(extra: Callable[[MSCNode, Attributes], Attributes]) -> Write:
    def write(node: MSCNode, a: Attributes) -> Attributes:
        switches = {"center": int("beta" in node.weights), "scale": int("gamma" in node.weights)}
        return {"epsilon": a["eps"], **switches, **extra(node, a)}

    return write


_NORM = {"epsilon": 1e-5, "center": 1, "scale": 1}


def _layer_norm(c: Calls, x: Any, affine: tuple[Any, ...]) -> dict[str, Any]:
    rank = c.node.inputs[0].ndim
    axes = c.axes("axes", rank) or ()
    if axes != tuple(range(rank - len(axes), rank)):
        raise GraphError("MegEngine's layer_norm normalizes only the last axes")
    return c.call(F.nn.layer_norm, x, tuple(c.node.inputs[0].shape[axis] for axis in axes), *affine)


def _group_norm(c: Calls, x: Any, affine: tuple[Any, ...]) -> dict[str, Any]:
    _check_channels(c)
    return c.call(F.nn.group_norm, x, c["num_groups"], *affine)


def _instance_norm(c: Calls, x: Any, affine: tuple[Any, ...]) -> dict[str, Any]:
    _check_channels(c)
    return c.call(F.nn.instance_norm, x, *affine)


def _check_channels(c: Calls) -> None:
    rank = c.node.inputs[0].ndim
    if c.axis("channel_axis", rank) != 1 or c.axes("axes", rank) != tuple(range(2, rank)):
        raise GraphError("MegEngine normalizes images by channels on axis 1")


def _spatial_axes(node: MSCNode) -> tuple[int, ...]:
    return tuple(range(2, node.inputs[0].ndim))


def _read_batch_norm(c: Calls) -> None:
    shape = c.node.inputs[0].shape
    if c.axis("axis", len(shape)) != 1:
        raise GraphError("MegEngine's batch_norm has the channels on axis 1")
    image = (*shape, *[1] * (4 - len(shape)))
    image = tuple(-1 if size == -1 else size for size in image)
    channels = (1, shape[1], 1, 1)
    x = c.operand(shape=image if len(shape) < 4 else None)
    gain, shift, mean, variance = (c.optional(kind, channels) for kind in ("gamma", "beta", "mean", "var"))
    gain, shift = gain if c["scale"] else None, shift if c["center"] else None
    y = c.call(F.nn.batch_norm, x, mean, variance, gain, shift, training=False, eps=c["epsilon"])
    if len(shape) < 4:
        c.call(F.reshape, y, shape)


def _read_prelu(c: Calls) -> None:
    x = c.operand()
    axis = c.axis("axis", c.node.inputs[0].ndim)
    count = math.prod(c.tensor("weight").shape)
    sizes = _affine_shape(c, (axis,)) if count > 1 else [1] * c.node.inputs[0].ndim
    c.call(F.nn.prelu, x, c.operand("weight", sizes))


def _read_linear(c: Calls) -> None:
    c.call(F.nn.linear, c.operand(), c.operand("weight"), c.optional("bias"), "default")


def _read_bias_add(c: Calls) -> None:
    x = c.operand()
    axis = c.axis("axis", c.node.inputs[0].ndim)
    c.call(F.add, x, c.operand("bias", _affine_shape(c, (axis,))))


def _on_axis(function: Callable[..., Any], **defaults: Any) -> dict[str, Any]:
    """Returns attributes and both ways of a function along one axis."""

    def write(node: MSCNode, a: Attributes) -> Attributes:
        axis = a.get("axis")
        return {"axis": axis[0] if isinstance(axis, (tuple, list)) and len(axis) == 1 else axis}

    def read(c: Calls) -> None:
        rank = c.node.inputs[0].ndim
        c.call(function, c.operand(), c.axis("axis", rank))

    return {"defaults": defaults, "write": write, "read": read}


def _joined(function: Callable[..., Any], extra_rank: int) -> Read:
    def read(c: Calls) -> None:
        rank = c.node.inputs[0].ndim + extra_rank
        c.call(function, c.all_inputs(), c.axis("axis", rank))

    return read


def _reduction(function: Callable[..., Any]) -> dict[str, Any]:
    def write(node: MSCNode, a: Attributes) -> Attributes:
        axis = a.get("axis")
        return {"axis": axis if axis is None else tuple(axis), "keepdims": int(a["keepdims"])}

    def read(c: Calls) -> None:
        axes = c.axes("axis", c.node.inputs[0].ndim)
        c.call(function, c.operand(), None if axes is None else _one_or_all(axes), bool(c["keepdims"]))

    return {"defaults": {"axis": None, "keepdims": 0}, "write": write, "read": read}


def _argument(function: Callable[..., Any]) -> dict[str, Any]:
    both = _reduction(function)

    def write(node: MSCNode, a: Attributes) -> Attributes:
        own = both["write"](node, a)
        return {**own, "axis": None if own["axis"] is None else own["axis"][0]}

    return {**both, "write": write}


def _integers(value: Any) -> bool:
    return isinstance(value, (tuple, list)) and all(type(n) is int for n in value)


def _write_transpose(node: MSCNode, a: Attributes) -> Attributes:
    return {"axes": tuple(axis % node.inputs[0].ndim for axis in a["pattern"])}


def _says_order(node: MSCNode, a: Attributes) -> bool:
    return _integers(a.get("pattern")) and len(a["pattern"]) == node.inputs[0].ndim


def _read_permute(c: Calls) -> None:
    rank = c.node.inputs[0].ndim
    c.call(F.transpose, c.operand(), c.axes("axes", rank) or tuple(reversed(range(rank))))


def _read_reshape(c: Calls) -> None:
    shape = c.node.outputs[0].shape
    if shape.count(-1) > 1:
        raise GraphError("several sizes of its result are open")
    c.call(F.reshape, c.operand(), shape)


def _write_shape(node: MSCNode, a: Attributes) -> Attributes:
    return {"shape": node.outputs[0].shape}


def _write_axes(node: MSCNode, a: Attributes) -> Attributes:
    axes = a.get("axis")
    return {"axis": axes if axes is None else tuple(axes)}


def _read_squeeze(c: Calls) -> None:
    shape = c.node.inputs[0].shape
    axes = c.axes("axis", len(shape))
    axes = tuple(i for i, n in enumerate(shape) if n == 1) if axes is None else axes
    c.call(F.squeeze, c.operand(), _one_or_all(axes))


def _read_expand_dims(c: Calls) -> None:
    axes = c.axes("axis", c.node.outputs[0].ndim) or ()
    c.call(F.expand_dims, c.operand(), _one_or_all(axes))


def _read_split(c: Calls) -> None:
    axis = c.axis("axis", c.node.inputs[0].ndim)
    parts = c["indices_or_sections"]
    if not isinstance(parts, tuple):
        sizes = [tensor.shape[axis] for tensor in c.node.outputs]
        parts = tuple(int(n) for n in np.cumsum(sizes[:-1])) if len(set(sizes)) > 1 else parts
    c.call(F.split, c.operand(), list(parts) if isinstance(parts, tuple) else parts, axis)


def _write_split(node: MSCNode, a: Attributes) -> Attributes:
    sections = a.get("sections")
    return {
        "indices_or_sections": sections if isinstance(sections, int) else tuple(sections),
        "axis": a["axis"],
    }


def _says_sections(node: MSCNode, a: Attributes) -> bool:
    return isinstance(a.get("sections"), int) or _integers(a.get("sections"))


def _read_get_item(c: Calls) -> None:
    inputs = c.all_inputs()
    index = c["index"]
    if type(index) is not int or not 0 <= index < len(inputs):
        raise GraphError(f"its index is {c.node.attrs.get('index')!r}, and it has {len(inputs)} inputs")
    c.results = [inputs[index]]


def _read_tuple(c: Calls) -> None:
    c.results = c.all_inputs()


def _slices(node: MSCNode, index: Any) -> dict[int, slice] | None:
    """Returns axis -> its slice of an index; None for an index of anything but slices of numbers."""
    items = index if isinstance(index, tuple) else (index,)
    if sum(item is Ellipsis for item in items) > 1:
        return None
    rest = node.inputs[0].ndim - sum(item is not Ellipsis for item in items)
    if rest < 0:
        return None
    slices: dict[int, slice] = {}
    axis = 0
    for item in items:
        if item is Ellipsis:
            axis += rest
            continue
        parts = (item.start, item.stop, item.step) if isinstance(item, slice) else (item,)
        if not isinstance(item, slice) or any(n is not None and type(n) is not int for n in parts):
            return None
        if parts != (None, None, None):
            slices[axis] = item
        axis += 1
    return slices


def _write_slices(node: MSCNode, a: Attributes) -> Attributes:
    begin, end, strides = [], [], []
    slices = _slices(node, a["index"]) or {}
    for axis, own in slices.items():
        size, step = node.inputs[0].shape[axis], own.step or 1
        size = size if size >= 0 else _END
        first, last = (0, size) if step > 0 else (-1, -size - 1)
        begin.append(first if own.start is None else own.start)
        end.append(last if own.stop is None else own.stop)
        strides.append(step)
    return {"axes": tuple(slices), "begin": tuple(begin), "end": tuple(end), "strides": tuple(strides)}


def _read_slices(c: Calls) -> None:
    rank = c.node.inputs[0].ndim
    axes = c.axes("axes", rank) or tuple(range(rank))
    begin, end = (c.integers(key, len(axes)) for key in ("begin", "end"))
    strides = (1,) * len(axes) if c["strides"] is None else c.integers("strides", len(axes))
    own = {axis: slice(*parts) for axis, *parts in zip(axes, begin, end, strides, strict=True)}
    sizes = enumerate(c.node.inputs[0].shape)
    index = tuple(_clipped(own[axis], size) if axis in own else slice(None) for axis, size in sizes)
    c.call("__getitem__", c.operand(), index)


def _clipped(own: slice, size: int) -> slice:
    """Returns a slice within an axis, as MegEngine needs it; one to the end of an open axis has no end."""
    if size < 0:
        return slice(own.start, own.stop if abs(own.stop) < _END else None, own.step)
    start, stop, step = own.indices(size)
    return slice(start, stop if stop >= 0 else None, step)


def _read_take(c: Calls) -> None:
    x, index = c.all_inputs()
    axis = c.axis("axis", c.node.inputs[0].ndim)
    if axis is None:
        x, axis = c.call(F.reshape, x, (-1,)), 0
    c.call("__getitem__", x, (*[slice(None)] * axis, index))


def _read_embedding(c: Calls) -> None:
    c.call(F.nn.embedding, c.operand(), c.operand("weight"))


def _read_topk(c: Calls) -> None:
    shape = c.node.inputs[0].shape
    axis = c.axis("axis", len(shape))
    x, last = c.operand(), len(shape) - 1
    order = (*(i for i in range(len(shape)) if i != axis), axis)
    if axis != last:
        x = c.call(F.transpose, x, order)
    if len(shape) != 2:
        x = c.call(F.reshape, x, (-1, shape[axis]))
    c.call(F.topk, x, c["k"], bool(c["largest"]), False, False)
    results = [{"ref": f"step_{len(c.steps) - 1}_{i}"} for i in range(2)]
    if len(shape) != 2:
        results = [c.call(F.reshape, y, (*(shape[i] for i in order[:-1]), c["k"])) for y in results]
    if axis != last:
        back = tuple(order.index(i) for i in range(len(shape)))
        results = [c.call(F.transpose, y, back) for y in results]
    c.require("ret_type", "both", "values", "indices")
    if len(c.steps) > 1 or c["ret_type"] != "both":
        c.results = {"both": results, "values": results[:1], "indices": results[1:]}[c["ret_type"]]


def _write_topk(node: MSCNode, a: Attributes) -> Attributes:
    k = a.get("k")
    return {"k": k if isinstance(k, int) else None, "largest": int(bool(a["descending"]))}


def _read_clip(c: Calls) -> None:
    c.call(F.clip, c.operand(), c["min"], c["max"])


def _write_clip(node: MSCNode, a: Attributes) -> Attributes:
    return {"min": a.get("lower", 0), "max": a.get("upper", 6)}  # relu6 has no bounds of its own


def _says_bounds(node: MSCNode, a: Attributes) -> bool:
    return not a or all(isinstance(a.get(key), (int, float)) for key in ("lower", "upper"))


def _read_pad(c: Calls) -> None:
    widths = c.integers("pad_width", 2 * c.node.inputs[0].ndim)
    pairs = tuple(zip(widths[::2], widths[1::2], strict=True))
    c.require("pad_mode", "constant", "reflect", "replicate", "edge")
    mode = {"edge": "replicate"}.get(c["pad_mode"], c["pad_mode"])
    c.call(F.nn.pad, c.operand(), pairs, mode, float(c["pad_value"]))


def _write_pad(node: MSCNode, a: Attributes) -> Attributes:
    widths = tuple(n for pair in a["width"] for n in pair)
    rest = (0, 0) * (node.inputs[0].ndim - len(a["width"]))
    return {"pad_width": (*widths, *rest), "pad_mode": a["mode"], "pad_value": a["value"]}


def _write_resize(node: MSCNode, a: Attributes) -> Attributes:
    nearest = a["mode"] == "nearest"
    place = "asymmetric" if nearest else "align_corners" if a["align_corners"] else "half_pixel"
    return {
        "size": node.outputs[0].shape[2:],
        "method": _MODES.get(a["mode"], a["mode"]),
        "coordinate_transformation_mode": place,
        "rounding_method": "floor" if nearest else "round",
    }


def _read_resize(c: Calls) -> None:
    c.require("layout", "NCHW")
    size = c.integers("size", 2)
    modes = {theirs: ours for ours, theirs in _MODES.items()}
    c.require("method", *modes)
    mode, place = modes[c["method"]], "coordinate_transformation_mode"
    if mode == "nearest":
        pairs = zip(c.node.inputs[0].shape[2:], size, strict=True)
        grown = all(old > 0 and new % old == 0 for old, new in pairs)
        floors = (c[place], c["rounding_method"]) == ("asymmetric", "floor")
        rounds = grown and c[place] == "half_pixel" and str(c["rounding_method"]).startswith("round")
        if not (floors or rounds):
            raise GraphError(f"its {place} and rounding_method pick other pixels than MegEngine's nearest")
        c.call(F.vision.interpolate, c.operand(), size, mode=mode)
        return
    c.require(place, "half_pixel", "align_corners")
    aligned = c[place] == "align_corners"
    c.call(F.vision.interpolate, c.operand(), size, mode=mode, align_corners=aligned)


def _read_matmul(c: Calls) -> None:
    flips = (bool(c[key]) for key in ("transpose_a", "transpose_b"))
    c.call(F.matmul, *c.all_inputs(), *flips)


def _flips(node: MSCNode, a: Attributes) -> bool:
    return bool(a["transpose_a"] or a["transpose_b"])


def _write_dtype(node: MSCNode, a: Attributes) -> Attributes:
    return {"dtype": node.outputs[0].dtype}


def _write_out_dtype(node: MSCNode, a: Attributes) -> Attributes:
    return {"out_dtype": node.outputs[0].dtype}


def _read_astype(c: Calls) -> None:
    c.call("astype", c.operand(), {"dtype": c["dtype"]})


def _read_repeat(c: Calls) -> None:
    c.call(F.repeat, c.operand(), c["repeats"], c.axis("axis", c.node.inputs[0].ndim))


def _read_tile(c: Calls) -> None:
    repeats = c["repeats"]
    c.call(F.tile, c.operand(), repeats if isinstance(repeats, tuple) else (repeats,))


def _read_cumsum(c: Calls) -> None:
    c.require("exclusive", 0)
    x, axis = c.operand(), c.axis("axis", c.node.inputs[0].ndim)
    if axis is None:
        x, axis = c.call(F.reshape, x, (-1,)), 0
    c.call(F.cumsum, x, axis)


def _read_gather(c: Calls) -> None:
    x, index = c.all_inputs()
    c.call(F.gather, x, c.axis("axis", c.node.inputs[0].ndim), index)


def _read_scatter(c: Calls) -> None:
    c.require("reduction", "update")
    x, index, source = c.all_inputs()
    c.call(F.scatter, x, c.axis("axis", c.node.inputs[0].ndim), index, source)


def _read_softplus(c: Calls) -> None:
    c.require("beta", 1.0)
    c.call(F.softplus, c.operand())


def _read_with(function: Callable[..., Any], key: str) -> Read:
    return lambda c: c.call(function, c.operand(), c[key])


def _copied(**names: str) -> Write:
    """Builds a writer of arguments that have other names."""
    return lambda node, a: {new: a[old] for new, old in names.items()}


def _has_bias(node: MSCNode, a: Attributes) -> bool:
    return "bias" in node.weights


_UNARY = {
    **{"nn.relu": F.relu, "nn.silu": F.silu, "nn.gelu": F.gelu, "nn.gelu_tanh": functions.gelu_tanh},
    **{"sigmoid": F.sigmoid, "tanh": F.tanh, "exp": F.exp, "log": F.log, "sqrt": F.sqrt, "abs": F.abs},
    **{"negative": F.neg, "square": F.square, "floor": F.floor, "ceil": F.ceil, "round": F.round},
    **{"sign": F.sign, "sin": F.sin, "cos": F.cos, "erf": functions.erf, "logical_not": F.logical_not},
}
_BINARY = {
    **{"add": F.add, "subtract": F.sub, "multiply": F.mul, "divide": F.div, "power": F.pow},
    **{"maximum": F.maximum, "minimum": F.minimum, "floor_divide": F.floor_div},
    **{"less": F.less, "less_equal": F.less_equal, "greater": F.greater, "equal": F.equal},
    **{"greater_equal": F.greater_equal, "not_equal": F.not_equal, "logical_and": F.logical_and},
    **{"logical_or": F.logical_or, "logical_xor": F.logical_xor},
}
# Optype -> the kind of the op, where that is not the last part of the optype.
_OTHER_NAMES = {
    **{"negative": "neg", "subtract": "sub", "multiply": "mul", "divide": "div", "power": "pow"},
    "floor_divide": "floor_div",
}
_RESIZE = {
    **{"size": _MISSING, "roi": (0.0,) * 4, "layout": "NCHW", "method": "linear"},
    **{"coordinate_transformation_mode": "half_pixel", "rounding_method": "round", "cubic_alpha": -0.75},
    **{"cubic_exclude": 0, "extrapolation_value": 0.0, "out_dtype": None},
}
_CHANNELS = {"channel_axis": _MISSING, "axes": _MISSING, **_NORM}
_IMAGES = {"layout": "NCHW", "out_layout": "NCHW"}
_ALL: Sequence[Kind] = (
    *(
        Kind(name, (_OTHER_NAMES.get(name, name.rpartition(".")[2]),), _elementwise(f, 1))
        for name, f in _UNARY.items()
    ),
    *(Kind(name, (_OTHER_NAMES.get(name, name),), _elementwise(f, 2)) for name, f in _BINARY.items()),
    Kind("msc.gelu", (), _elementwise(F.gelu, 1)),
    Kind("where", ("where",), _elementwise(F.where, 3)),
    Kind("msc.conv1d_bias", ("conv1d",), **_conv(1, F.nn.conv1d), fits=_has_bias),
    Kind("msc.conv2d_bias", ("conv2d",), **_conv(2, F.conv2d), fits=_has_bias),
    Kind("nn.conv1d", ("conv1d",), **_conv(1, F.nn.conv1d)),
    Kind("nn.conv2d", ("conv2d",), **_conv(2, F.conv2d)),
    Kind("nn.conv3d", ("conv3d",), **_conv(3, F.nn.conv3d)),
    Kind("nn.conv2d_transpose", ("conv_transpose2d",), **_conv(2, F.conv_transpose2d, "IO")),
    Kind("msc.linear_bias", ("linear",), _read_linear, {"out_dtype": None}, _write_out_dtype, _has_bias),
    Kind("msc.linear", ("linear",), _read_linear, {"out_dtype": None}, _write_out_dtype),
    Kind("nn.dense", (), _read_linear),
    Kind("nn.bias_add", (), _read_bias_add, {"axis": 1}),
    Kind(
        "nn.batch_matmul",
        ("matmul",),
        _read_matmul,
        {"transpose_a": 0, "transpose_b": 0, "out_dtype": None},
        lambda node, a: {key: int(a[key]) for key in ("transpose_a", "transpose_b")},
        _flips,
    ),
    Kind("matmul", ("matmul",), _elementwise(F.matmul, 2), {"out_dtype": None}, _write_out_dtype),
    Kind("msc.embedding", ("embedding",), _read_embedding, {"axis": 0}),
    Kind("nn.max_pool2d", ("max_pool2d",), **_pool(F.nn.max_pool2d, False)),
    Kind("nn.avg_pool2d", ("avg_pool2d",), **_pool(F.nn.avg_pool2d, True)),
    Kind(
        "nn.adaptive_avg_pool2d",
        ("adaptive_avg_pool2d",),
        _read_adaptive,
        {"output_size": _MISSING, **_IMAGES},
        _copied(output_size="output_size"),
    ),
    Kind(
        "nn.batch_norm",
        ("batch_norm",),
        _read_batch_norm,
        {"axis": 1, **_NORM, "momentum": 0.1, "training": 0},
        _write_norm(lambda node, a: {}),
    ),
    Kind(
        "nn.layer_norm",
        ("layer_norm",),
        _read_norm(_layer_norm, "axes"),
        {"axes": _MISSING, **_NORM},
        _write_norm(
            lambda node, a: {"axes": tuple(range(-len(tuple(np.atleast_1d(a["normalized_shape"]))), 0))}
        ),
    ),
    Kind(
        "nn.group_norm",
        ("group_norm",),
        _read_norm(_group_norm, "channel_axis"),
        {"num_groups": _MISSING, **_CHANNELS},
        _write_norm(
            lambda node, a: {"num_groups": a["num_groups"], "channel_axis": 1, "axes": _spatial_axes(node)}
        ),
    ),
    Kind(
        "nn.instance_norm",
        ("instance_norm",),
        _read_norm(_instance_norm, "channel_axis"),
        _CHANNELS,
        _write_norm(lambda node, a: {"channel_axis": 1, "axes": _spatial_axes(node)}),
    ),
    Kind("nn.softmax", ("softmax",), **_on_axis(F.softmax, axis=-1)),
    Kind("nn.log_softmax", ("logsoftmax",), **_on_axis(F.logsoftmax, axis=-1)),
    Kind(
        "nn.leakyrelu",
        ("leaky_relu",),
        _read_with(F.leaky_relu, "alpha"),
        {"alpha": 0.01},
        _copied(alpha="negative_slope"),
    ),
    Kind("nn.prelu", ("prelu",), _read_prelu, {"axis": 1}),
    Kind("nn.softplus", ("softplus",), _read_softplus, {"beta": 1.0, "threshold": 20.0}),
    Kind("clip", ("relu6", "clip"), _read_clip, {"min": None, "max": None}, _write_clip, _says_bounds),
    Kind(
        "nn.pad",
        ("pad",),
        _read_pad,
        {"pad_width": _MISSING, "pad_mode": "constant", "pad_value": 0.0},
        _write_pad,
    ),
    Kind(
        "nn.pixel_shuffle",
        ("pixel_shuffle",),
        _read_with(F.nn.pixel_shuffle, "upscale_factor"),
        {"upscale_factor": _MISSING},
        _copied(upscale_factor="factor"),
    ),
    Kind(
        "image.resize2d",
        ("interpolate",),
        _read_resize,
        _RESIZE,
        _write_resize,
        lambda node, a: node.inputs[0].ndim == 4,
    ),
    Kind(
        "permute_dims",
        ("transpose", "swapaxes"),
        _read_permute,
        {"axes": None},
        _write_transpose,
        _says_order,
    ),
    Kind("transpose", (), _read_permute, {"axes": None}),
    Kind("reshape", ("reshape", "flatten"), _read_reshape, {"shape": None}, _write_shape),
    Kind(
        "broadcast_to",
        ("broadcast_to",),
        lambda c: c.call(F.broadcast_to, c.operand(), c.node.outputs[0].shape),
        {"shape": None},
        _write_shape,
    ),
    Kind("squeeze", ("squeeze",), _read_squeeze, {"axis": None}, _write_axes),
    Kind("expand_dims", ("expand_dims",), _read_expand_dims, {"axis": _MISSING}, _write_axes),
    Kind("concat", ("concat",), _joined(F.concat, 0), {"axis": 0}, _copied(axis="axis")),
    Kind("concatenate", (), _joined(F.concat, 0), {"axis": 0}),
    Kind("stack", ("stack",), _joined(F.stack, 1), {"axis": 0}, _copied(axis="axis")),
    Kind(
        "split",
        ("split",),
        _read_split,
        {"indices_or_sections": _MISSING, "axis": 0},
        _write_split,
        _says_sections,
    ),
    Kind("get_item", (), _read_get_item),
    Kind("tuple", (), _read_tuple),
    Kind(
        "tile",
        ("tile",),
        _read_tile,
        {"repeats": _MISSING},
        _copied(repeats="reps"),
        lambda node, a: "reps" in a,
    ),
    Kind(
        "repeat",
        ("repeat",),
        _read_repeat,
        {"repeats": _MISSING, "axis": None},
        _copied(repeats="repeats", axis="axis"),
        lambda node, a: isinstance(a.get("repeats"), int),
    ),
    Kind(
        "strided_slice",
        ("getitem",),
        _read_slices,
        {"axes": None, "begin": _MISSING, "end": _MISSING, "strides": None, "assume_inbound": 0},
        _write_slices,
        lambda node, a: bool(_slices(node, a.get("index"))),
    ),
    Kind("take", (), _read_take, {"axis": None, "mode": "fast"}),
    Kind("gather_elements", ("gather",), _read_gather, {"axis": 0}, _copied(axis="axis")),
    Kind(
        "scatter_elements",
        ("scatter",),
        _read_scatter,
        {"axis": 0, "reduction": "update"},
        _copied(axis="axis"),
    ),
    Kind(
        "topk",
        ("topk",),
        _read_topk,
        {"k": 1, "axis": -1, "ret_type": "both", "largest": 1, "dtype": "int32"},
        _write_topk,
        lambda node, a: not a.get("kth_only"),
    ),
    *(
        Kind(name, (name,), **_argument(function))
        for name, function in (("argmax", F.argmax), ("argmin", F.argmin))
    ),
    *(
        Kind(name, (op,), **_reduction(function))
        for name, op, function in (
            *(("mean", "mean", F.mean), ("sum", "sum", F.sum), ("max", "max", F.max), ("min", "min", F.min)),
            *(("prod", "prod", F.prod), ("std", "std", F.std), ("variance", "var", F.var)),
        )
    ),
    Kind(
        "cumsum",
        ("cumsum",),
        _read_cumsum,
        {"axis": None, "dtype": None, "exclusive": 0},
        _on_axis(F.cumsum)["write"],
    ),
    Kind("astype", ("astype",), _read_astype, {"dtype": _MISSING}, _write_dtype),
    Kind("cast", (), _read_astype, {"dtype": _MISSING}),
)
KINDS: Mapping[str, Kind] = {kind.optype: kind for kind in _ALL}
