"""Maps ``x * gain + shift``, the ops through which they pass, and the layers that take them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from megengine import Parameter, Tensor

from qtrace import ops
from qtrace.graph.edit import GraphEditor
from qtrace.graph.flatten import set_parameter
from qtrace.graph.interpreter import interpret
from qtrace.graph.types import Expr, GetAttr, ModuleNode, TensorNode, TracedModule
from qtrace.graph.walk import exprs, get_module, output_index, owner
from qtrace.numerics import EXACT_INTEGERS
from qtrace.ops import OpCall
from qtrace.preparation.passes.folding import bias_shape, free_bias

# Maps ``x * gain + shift`` of a tensor, as arrays that broadcast to its shape.


@dataclass(frozen=True)
class LinearMap:
    """The map ``x * gain + shift`` of the elements of a tensor.

    Attributes:
        gain: float64 array of the tensor's rank; each axis has size 1 or the size of the tensor's axis. NaN
            stands for elements that nothing reads, whose gain is free.
        shift: array of the same rank; NaN where ``gain`` is NaN.
    """

    gain: np.ndarray
    shift: np.ndarray

    @property
    def is_uniform(self) -> bool:
        """Whether all elements have one gain and one shift."""
        return self.gain.size == 1 and self.shift.size == 1

    @property
    def shifts(self) -> bool:
        """Whether some element has a shift other than 0."""
        return bool(np.any(np.nan_to_num(self.shift) != 0))

    @property
    def is_positive(self) -> bool:
        """Whether all gains are larger than 0."""
        return bool(np.all(np.isnan(self.gain) | (self.gain > 0)))

    def is_constant_along(self, axes: tuple[int, ...]) -> bool:
        """Returns whether gain and shift do not depend on the position along ``axes``."""
        return all(array.shape[axis] == 1 for array in (self.gain, self.shift) for axis in axes)

    def with_rank(self, rank: int) -> LinearMap:
        """Returns a uniform map for a tensor of another rank."""
        form = (1,) * rank
        return LinearMap(self.gain.reshape(form), self.shift.reshape(form))

    def after(self, inner: LinearMap) -> LinearMap:
        """Returns the map that applies ``inner`` first and this map to its result."""
        return LinearMap(inner.gain * self.gain, inner.shift * self.gain + self.shift).compressed()

    def full(self, shape: tuple[int, ...]) -> LinearMap:
        """Returns the map with one gain and one shift for each element of a tensor of ``shape``."""
        return LinearMap(np.broadcast_to(self.gain, shape), np.broadcast_to(self.shift, shape))

    def compressed(self, free: bool = False) -> LinearMap:
        """Returns the map with size 1 along each axis along which it is constant.

        Args:
            free: whether elements that nothing reads may get the numbers of others.
        """
        arrays = np.broadcast_arrays(self.gain, self.shift)
        for axis in range(arrays[0].ndim):
            if arrays[0].shape[axis] > 1 and all(_is_constant(array, axis, free) for array in arrays):
                arrays = [np.fmax.reduce(array, axis=axis, keepdims=True) for array in arrays]
        return LinearMap(*arrays)

    def with_identity(self) -> LinearMap:
        """Returns the map with gain 1 and shift 0 for elements that nothing reads."""
        return LinearMap(*(np.where(np.isnan(a), n, a) for a, n in ((self.gain, 1.0), (self.shift, 0.0))))

    def per_channel(self, axis: int, channels: int) -> tuple[np.ndarray, np.ndarray] | None:
        """Returns gain and shift of each channel, (C,); None if they depend on another axis, too."""
        whole = self.compressed(free=True)
        others = tuple(i for i in range(whole.gain.ndim) if i != axis % whole.gain.ndim)
        if not whole.is_constant_along(others):
            return None
        known = whole.with_identity()
        gain, shift = (np.broadcast_to(a.reshape(-1), (channels,)) for a in (known.gain, known.shift))
        return gain, shift


def identity_map(rank: int) -> LinearMap:
    """Returns the map that changes nothing, for a tensor of ``rank`` axes."""
    return LinearMap(np.ones((1,) * rank), np.zeros((1,) * rank))


def _is_constant(array: np.ndarray, axis: int, free: bool) -> bool:
    """Returns whether ``array`` is constant along ``axis``; ``free`` leaves NaN out of the comparison."""
    largest = np.fmax.reduce(array, axis=axis, keepdims=True)
    unknown = np.isnan(array)
    if not free:
        unknown = unknown.all(axis=axis, keepdims=True)
    return bool(np.all(unknown | (array == largest)))


# The places to which a move takes elements: a reshape, a transpose, a split, a slice, a shuffle.

_SAME_ORDER = ("reshape", "flatten", "expand_dims", "squeeze", "identity", "dropout")
MOVES = (
    *_SAME_ORDER,
    *("transpose", "swapaxes", "split", "getitem", "repeat", "tile", "roll", "pixel_shuffle", "broadcast_to"),
)


def element_places(call: OpCall, out: TensorNode) -> np.ndarray | None:
    """Returns the flat index in the input of each element of ``out``; None if it is not known from shapes.

    Args:
        call: a move of the kinds `MOVES`.
        out: one of its outputs.
    """
    (x,) = call.inputs
    shape = tuple(int(n) for n in x.shape)
    count = int(np.prod(shape))
    places = np.arange(count).reshape(shape)
    if call.kind in _SAME_ORDER:
        return places.reshape(tuple(int(n) for n in out.shape))
    others = [n for n in call.expr.inputs if n is not x and not isinstance(n, ModuleNode)]
    if others or count > EXACT_INTEGERS:
        return None
    module, values = owner(call.expr), Tensor(places.astype(np.float32))
    inputs = [module if isinstance(n, ModuleNode) else values for n in call.expr.inputs]
    results = interpret(call.expr, inputs)
    assert results is not None
    return results[output_index(out)].numpy().astype(np.int64)


def pull_back(map: LinearMap, places: np.ndarray, shape: tuple[int, ...]) -> LinearMap | None:
    """Returns the map of the input for which the move gives ``map``; None if there is no such map.

    Args:
        map: the map of the move's output.
        places: the places that `element_places` gives.
        shape: the shape of the move's input.
    """
    whole = map.full(places.shape)
    arrays = []
    for values in (whole.gain, whole.shift):
        array = np.full(int(np.prod(shape)), np.nan)
        array[places.reshape(-1)] = values.reshape(-1)
        if not np.array_equal(array[places], values, equal_nan=True):
            return None  # one element is read several times, with different gains
        arrays.append(array.reshape(shape))
    return LinearMap(*arrays).compressed()


def push_forward(map: LinearMap, places: np.ndarray, shape: tuple[int, ...]) -> LinearMap:
    """Returns the map of the move's output if its input has ``map``."""
    whole = map.full(shape)
    return LinearMap(*(a.reshape(-1)[places] for a in (whole.gain, whole.shift))).compressed()


# Ops through which a map ``x * gain + shift`` passes, towards the inputs or towards the outputs.

_HOMOGENEOUS = ("relu", "leaky_relu", "prelu")
_MAX_POOLS = ("max_pool2d", "adaptive_max_pool2d")
_MEAN_POOLS = ("avg_pool2d", "adaptive_avg_pool2d", "interpolate")
_REDUCTIONS = ("mean", "sum", "max", "min")

Passed = list[tuple[TensorNode, LinearMap]]


class BlockedError(Exception):
    """A map cannot pass; the message gives the reason as a clause.

    Args:
        reason: the reason.
        always: whether no map passes here, whichever its numbers are.
    """

    def __init__(self, reason: str, always: bool = False) -> None:
        super().__init__(reason)
        self.always = always


def pass_backward(call: OpCall, out: TensorNode, map: LinearMap) -> Passed:
    """Returns the maps of the inputs of ``call`` for which it gives ``map`` at its output ``out``.

    Raises:
        BlockedError: when there are no such maps.
    """
    _check(call, map)
    if call.kind == "concat":
        return _split_map(call, map)
    (x,) = call.inputs
    shape = _shape(x)
    if call.kind in _REDUCTIONS:
        return [(x, _expanded(call, map, len(shape)))]
    if call.kind == "pad":
        inside = tuple(slice(before, before + n) for (before, _), n in zip(_widths(call), shape, strict=True))
        whole = map.full(_shape(out))
        return [(x, LinearMap(whole.gain[inside], whole.shift[inside]).compressed())]
    if call.kind not in MOVES:
        return [(x, map)]
    partial = call.kind in ("getitem", "split")
    if map.is_uniform and not partial:
        return [(x, map.with_rank(len(shape)))]
    places = element_places(call, out)
    if places is None and map.is_uniform and len(call.expr.outputs) == 1:
        return [(x, map.with_rank(len(shape)))]
    pulled = None if places is None else pull_back(map, places, shape)
    if pulled is None:
        raise BlockedError(f"{call.out.name} ({call.kind}) mixes elements with different numbers")
    return [(x, pulled)]


def pass_forward(call: OpCall, x: TensorNode, map: LinearMap) -> Passed:
    """Returns the maps of the outputs of ``call`` if its input ``x`` has ``map``.

    Raises:
        BlockedError: when the outputs lack such maps.
    """
    if call.kind != "concat" and call.inputs != (x,):
        raise BlockedError(f"{call.out.name} ({call.kind}) reads it with other values", always=True)
    _check(call, map)
    if call.kind == "concat":
        return [(call.out, _joined_map(call, x, map))]
    if call.kind in _REDUCTIONS:
        return [(call.out, _reduced(call, map, len(_shape(x))))]
    if call.kind == "pad":
        whole, widths = map.full(_shape(x)), _widths(call)
        gain, shift = (
            np.pad(a, widths, constant_values=n) for a, n in ((whole.gain, np.nan), (whole.shift, 0))
        )
        return [(call.out, LinearMap(gain, shift).compressed())]
    if call.kind not in MOVES:
        return [(call.out, map)]
    passed = []
    for out in call.outputs:
        if map.is_uniform:
            passed.append((out, map.with_rank(len(_shape(out)))))
            continue
        places = element_places(call, out)
        if places is None:
            raise BlockedError(f"the indices of {out.name} ({call.kind}) are computed in the graph", True)
        passed.append((out, push_forward(map, places, _shape(x))))
    return passed


def _check(call: OpCall, map: LinearMap) -> None:
    """Raises the reason why ``map`` does not pass an op of the kind of ``call``."""
    name = f"{call.out.name} ({call.kind})"
    kind = call.kind
    known = (*_HOMOGENEOUS, *_MAX_POOLS, *_MEAN_POOLS, *_REDUCTIONS, *MOVES, "concat", "pad")
    nodes = (*call.inputs, *call.outputs)
    if kind not in known or not call.inputs or any(n.shape is None for n in nodes):
        raise BlockedError(f"{name} does not pass a factor on", always=True)
    if kind == "concat" and len(call.attrs["parts"]) != len(call.inputs):
        raise BlockedError(f"{name} joins constants, too", always=True)
    no_shift = kind in (*_HOMOGENEOUS, "sum", "dropout", "pad") or _counts_padding(call)
    if no_shift and map.shifts:
        raise BlockedError(f"{name} passes no sum on")
    if kind in (*_HOMOGENEOUS, *_MAX_POOLS, "max", "min") and not map.is_positive:
        raise BlockedError(f"{name} passes no factor on that is negative or 0")
    if kind in (*_MAX_POOLS, *_MEAN_POOLS):
        along = tuple(range(2, len(_shape(call.out))))
    else:
        along = _padded_axes(call) if kind == "pad" else ()
    if not map.is_constant_along(along):
        raise BlockedError(f"{name} mixes elements with different numbers")


def _counts_padding(call: OpCall) -> bool:
    return call.kind == "avg_pool2d" and bool(call.attrs["count_include_pad"]) and any(call.attrs["padding"])


def _padded_axes(call: OpCall) -> tuple[int, ...]:
    """Returns the axes along which the values of a padding are copies of others."""
    if call.attrs["mode"] != "constant":
        return tuple(i for i, pair in enumerate(_widths(call)) if any(pair))
    if call.attrs["value"] != 0.0:
        raise BlockedError(f"{call.out.name} pads with {call.attrs['value']:g}", always=True)
    return ()


def _widths(call: OpCall) -> list[tuple[int, int]]:
    """Returns the padding before and after each axis of the input."""
    widths = [(int(a), int(b)) for a, b in call.attrs["width"]]
    return widths + [(0, 0)] * (len(_shape(call.inputs[0])) - len(widths))


def _split_map(call: OpCall, map: LinearMap) -> Passed:
    axis, passed, start = _axis(call), [], 0
    for node in call.inputs:
        size = _shape(node)[axis]
        passed.append((node, _part(map, axis, start, size)))
        start += size
    return passed


def _part(map: LinearMap, axis: int, start: int, size: int) -> LinearMap:
    arrays: list[Any] = [map.gain, map.shift]
    for index, array in enumerate(arrays):
        if array.shape[axis] > 1:
            arrays[index] = np.take(array, range(start, start + size), axis=axis)
    return LinearMap(*arrays).compressed()


def _joined_map(call: OpCall, x: TensorNode, map: LinearMap) -> LinearMap:
    """Returns the map of a concat of which only the parts that are ``x`` have a map."""
    axis, none = _axis(call), identity_map(len(_shape(x)))
    maps = [(map if node is x else none, _shape(node)[axis]) for node in call.inputs]
    arrays = []
    for field in ("gain", "shift"):
        parts = [getattr(part, field) for part, _ in maps]
        form = [max(array.shape[i] for array in parts) for i in range(none.gain.ndim)]
        sizes = [[*form[:axis], size, *form[axis + 1 :]] for _, size in maps]
        whole = [np.broadcast_to(array, size) for array, size in zip(parts, sizes, strict=True)]
        arrays.append(np.concatenate(whole, axis=axis))
    return LinearMap(*arrays).compressed()


def _axis(call: OpCall) -> int:
    return int(call.attrs["axis"]) % len(_shape(call.out))


def _reduced_axes(call: OpCall, rank: int) -> tuple[int, ...]:
    axes = call.attrs["axis"]
    return tuple(range(rank)) if axes is None else tuple(axis % rank for axis in axes)


def _expanded(call: OpCall, map: LinearMap, rank: int) -> LinearMap:
    """Returns the map of the input of a reduction."""
    if map.is_uniform:
        return map.with_rank(rank)
    if call.attrs["keepdims"]:
        return map
    axes = _reduced_axes(call, rank)
    return LinearMap(*(np.expand_dims(a, axes) for a in (map.gain, map.shift)))


def _reduced(call: OpCall, map: LinearMap, rank: int) -> LinearMap:
    """Returns the map of the result of a reduction."""
    axes = _reduced_axes(call, rank)
    if not map.is_constant_along(axes):
        raise BlockedError(f"{call.out.name} ({call.kind}) mixes elements with different numbers")
    if map.is_uniform:
        return map.with_rank(len(_shape(call.out)))
    if call.attrs["keepdims"]:
        return map
    return LinearMap(*(np.squeeze(a, axes) for a in (map.gain, map.shift)))


def _shape(node: TensorNode) -> tuple[int, ...]:
    return tuple(int(n) for n in node.shape)


# Layers that take a map ``x * gain + shift`` of their result or of their input into weight and bias.

LAYERS = ("conv1d", "conv2d", "conv_transpose2d", "linear")
_LARGEST = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class Change:
    """A change of the weight and bias of one call of a layer.

    Attributes:
        expr: the call.
        gain: (C,) factors of the output or input channels.
        shift: (C,) summands of the output or input channels.
        result: whether the channels belong to the result.
    """

    expr: Expr
    gain: np.ndarray
    shift: np.ndarray
    result: bool

    def equals(self, other: Change) -> bool:
        """Returns whether both change a weight and bias to the same numbers."""
        same = np.array_equal(self.gain, other.gain) and np.array_equal(self.shift, other.shift)
        return self.result == other.result and same


def change_of_result(call: OpCall, map: LinearMap) -> Change:
    """Returns the change after which ``call`` gives what ``map`` makes of its result now.

    Raises:
        BlockedError: when no weight and bias do.
    """
    return _change(call, call.out, map, result=True)


def change_of_input(call: OpCall, map: LinearMap) -> Change:
    """Returns the change after which ``call`` gives for x what it gives now for ``map`` of x.

    Raises:
        BlockedError: when no weight and bias do, as for a sum before a convolution that pads with 0.
    """
    change = _change(call, call.inputs[0], map, result=False)
    if map.shifts and call.kind == "conv_transpose2d":
        raise BlockedError(f"not every value of {call.out.name} is computed from as many of its inputs")
    if map.shifts and any(call.attrs.get("padding", ())):
        raise BlockedError(f"{call.out.name} pads with 0, to which nothing is added")
    return change


def _change(call: OpCall, node: TensorNode, map: LinearMap, result: bool) -> Change:
    for parameter in (call.weight, call.bias):
        if parameter is not None and not isinstance(parameter.expr, GetAttr):
            raise BlockedError(f"{parameter.name} is computed, not a parameter", always=True)
    shape = tuple(int(n) for n in node.shape)
    axis = len(shape) - 1 if call.kind == "linear" else 1
    pair = map.per_channel(axis, shape[axis])
    if pair is None:
        raise BlockedError(
            f"{call.out.name} has one weight for a channel, and the numbers differ inside of it"
        )
    return Change(call.expr, *pair, result)


class LayerChanges:
    """Writes changes of layers; a weight that other calls read too is copied first.

    Args:
        traced: the module of the parameters.
        editor: its editor.
        copies: whether a shared weight or bias may be copied.
    """

    def __init__(self, traced: TracedModule, editor: GraphEditor, copies: bool) -> None:
        self.traced, self.editor, self.copies = traced, editor, copies
        self._readers: dict[str, set[Expr]] = {}
        for expr in exprs(traced):
            for node in expr.inputs:
                if isinstance(node.expr, GetAttr):
                    self._readers.setdefault(node.expr.name, set()).add(expr)

    def groups(self, changes: Sequence[Change]) -> list[list[Change]]:
        """Groups changes of calls that share their parameters and stay equal, so that one write does all."""
        groups: list[list[Change]] = []
        latest: dict[tuple[str, str], list[Change]] = {}
        for change in changes:
            key = self._paths(change.expr)
            group = latest.get(key)
            if group is None or not group[0].equals(change) or any(c.expr is change.expr for c in group):
                latest[key] = group = []
                groups.append(group)
            group.append(change)
        return groups

    def check(self, changes: Sequence[Change]) -> None:
        """Raises the reason why ``changes`` cannot be written.

        Raises:
            BlockedError: for a shared weight that may not be copied, or numbers that float32 cannot hold.
        """
        for group in self.groups(changes):
            for path in filter(None, self._paths(group[0].expr)):
                if not self.copies and self._readers[path] - {c.expr for c in group}:
                    raise BlockedError(f"{path} is shared with another layer")
            largest = np.abs(get_module(self.traced, self._paths(group[0].expr)[0]).numpy()).max(initial=0.0)
            if float(largest) * float(np.abs(group[0].gain).max(initial=0.0)) > _LARGEST:
                raise BlockedError(f"the new weight of {group[0].expr.outputs[0].name} exceeds float32")

    def write(self, changes: Sequence[Change]) -> None:
        """Writes ``changes`` in order."""
        for group in self.groups(changes):
            self._write(group)

    def _paths(self, expr: Expr) -> tuple[str, str]:
        call = _read(expr)
        assert call.weight is not None
        return str(call.weight.expr.name), "" if call.bias is None else str(call.bias.expr.name)

    def _write(self, group: list[Change]) -> None:
        change, call = group[0], _read(group[0].expr)
        assert call.weight is not None
        path = call.weight.expr.name
        weight = get_module(self.traced, path).numpy().astype(np.float64)
        channels = tuple(weight.shape[a] for a in call.channel_axes)
        old = None if call.bias is None else get_module(self.traced, call.bias.expr.name).numpy()
        bias = np.zeros(int(np.prod(channels)))
        if old is not None:
            bias = bias + old.astype(np.float64).reshape(-1)
        axes = call.channel_axes if change.result else _input_axes(call, weight.ndim)
        form = tuple(n if i in axes else 1 for i, n in enumerate(weight.shape))
        if change.result:
            bias = bias * change.gain + change.shift
        elif change.shift.any():
            summed = tuple(i for i in range(weight.ndim) if i not in call.channel_axes)
            bias = bias + (weight * change.shift.reshape(form)).sum(axis=summed).reshape(-1)
        self._store(group, "weight", path, weight * change.gain.reshape(form))
        if old is not None or bias.any():
            name = None if call.bias is None else call.bias.expr.name
            self._store(group, "bias", name, bias.reshape(bias_shape(call.kind)))

    def _store(self, group: list[Change], name: str, path: str | None, value: np.ndarray) -> None:
        """Stores a parameter of the calls of ``group``; ``path`` is its present path, None without one."""
        calls = {c.expr for c in group}
        new = path
        if path is None:
            new = free_bias(self.traced, _read(group[0].expr).weight.expr.name)  # type: ignore[union-attr]
        elif self._readers[path] - calls:
            new = self._free_path(f"{path}_{group[0].expr.outputs[0].name}")
            self._readers[path] -= calls
        assert new is not None
        set_parameter(self.traced, new, Parameter(value.astype(np.float32)))
        if new != path:
            self._readers[new] = calls
            for expr in calls:
                self.editor.set_argument(expr, name, self.editor.get_attr(new))

    def _free_path(self, path: str) -> str:
        parent, _, name = path.rpartition(".")
        module, free = get_module(self.traced, parent), name
        while getattr(module, free, None) is not None:
            free += "_"
        return f"{parent}.{free}" if parent else free


def _read(expr: Expr) -> OpCall:
    call = ops.read(expr)
    assert call is not None
    return call


def _input_axes(call: OpCall, rank: int) -> tuple[int, ...]:
    """Returns the axes of the weight that count input channels, in MegEngine's layout."""
    grouped = rank > {"linear": 2, "conv1d": 3}.get(call.kind, 4)
    if call.kind == "conv_transpose2d":
        return (0, 1) if grouped else (0,)
    return (0, 2) if grouped else (1,)
