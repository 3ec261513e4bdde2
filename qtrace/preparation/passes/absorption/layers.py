"""Layers that take a map ``x * gain + shift`` of their result or of their input into weight and bias."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from megengine import Parameter

from qtrace import ops
from qtrace.graph.edit import GraphEditor
from qtrace.graph.flatten import set_parameter
from qtrace.graph.types import Expr, GetAttr, TensorNode, TracedModule
from qtrace.graph.walk import exprs, get_module
from qtrace.ops import OpCall
from qtrace.preparation.passes.absorption.crossings import BlockedError
from qtrace.preparation.passes.absorption.maps import LinearMap
from qtrace.preparation.passes.fuse_bn import bias_shape, free_bias

__all__ = ["LAYERS", "Change", "LayerChanges", "change_of_input", "change_of_result"]

LAYERS = ("conv1d", "conv2d", "conv_transpose2d", "linear")
_LARGEST = 3.4e38  # of float32


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
