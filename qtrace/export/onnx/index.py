"""ONNX for indexing: reading and writing by slices, numbers, tensors of positions and masks."""

from __future__ import annotations

from typing import Any

import numpy as np

from qtrace.errors import ExportError
from qtrace.export.converted.graph import IndexPart, index_parts
from qtrace.export.onnx.types import (
    Emitter,
    array,
    cast,
    int64,
    operand,
    parameter_source,
    rank,
    scalar_int64,
)
from qtrace.export.onnx.writer import OnnxWriter
from qtrace.graph.open_axes import traced_value
from qtrace.graph.types import TensorNode
from qtrace.ops import OpCall

__all__ = ["INDEXING"]

_END = 2**31 - 1


def _getitem(w: OnnxWriter, call: OpCall) -> None:
    source, out = w.name(call.inputs[0]), call.out.name
    items = index_parts(call.attrs["index"], rank(call.inputs[0]))
    if any(i.is_mask for i in items):
        w.names[call.out] = _masked(w, source, items, out)
        return
    gathers = [i for i in items if i.gathers]
    _check_adjacent(items, out)
    steps: list[tuple[str, list[str], dict[str, int]]] = []
    cuts = [i for i in items if isinstance(i.value, slice) and not i.whole] + [
        i for i in items if i.single and not isinstance(i.value, TensorNode)
    ]
    if cuts:
        steps.append(("Slice", _bounds(w, cuts, out), {}))
    for item in items:
        if item.single and isinstance(item.value, TensorNode):
            steps.append(("Gather", [scalar_int64(w, item.value)], {"axis": item.axis or 0}))
    dropped = [i.axis for i in items if i.single and i.axis is not None]
    if dropped:
        steps.append(("Squeeze", [w.ints(dropped)], {}))
    if len(gathers) == 1:
        steps.append(("Gather", [_positions(w, gathers[0].value)], {"axis": _left(gathers[0], dropped)}))
    elif gathers:
        steps.append(("GatherND", [_pairs(w, gathers, out)], {}))
    added = _new_axes(items)
    if added:
        steps.append(("Unsqueeze", [w.ints(added)], {}))
    for number, (op, extra, options) in enumerate(steps):
        last = number == len(steps) - 1
        source = w.node(op, [source, *extra], out if last else w.fresh(out), **options)
    w.names[call.out] = source


def _check_adjacent(items: list[IndexPart], out: str) -> None:
    """Refuses lists of positions with a slice between them: numpy puts their axes first."""
    places = [k for k, i in enumerate(items) if i.gathers or (i.single and any(j.gathers for j in items))]
    if places and places[-1] - places[0] != len(places) - 1:
        raise ExportError(f"{out}: positions in axes that are not neighbours cannot become ONNX: index twice")


def _left(item: IndexPart, dropped: list[int]) -> int:
    """Returns the axis of ``item`` after the axes ``dropped`` are removed."""
    assert item.axis is not None
    return item.axis - sum(d < item.axis for d in dropped)


def _new_axes(items: list[IndexPart]) -> list[int]:
    """Returns the positions in the result of the axes that ``None`` adds."""
    new_axes, position = [], 0
    for item in items:
        if item.axis is None:
            new_axes.append(position)
        if item.gathers:
            position += (
                len(item.value.shape) if isinstance(item.value, TensorNode) else array(item.value).ndim
            )
        elif not item.single:
            position += 1
    return new_axes


def _bounds(w: OnnxWriter, cuts: list[IndexPart], out: str) -> list[str]:
    """Returns the inputs of Slice: starts, ends, axes and steps, computed or constant."""
    starts, ends, steps = [], [], []
    for item in cuts:
        if item.single:
            starts.append(int(item.value))
            ends.append(_END if int(item.value) == -1 else int(item.value) + 1)
            steps.append(1)
            continue
        step = item.value.step
        if isinstance(step, TensorNode):
            raise ExportError(f"{out}: a step that is computed cannot become ONNX: use fixed ones")
        step = 1 if step is None else int(step)
        first, last = (0, _END) if step > 0 else (_END, -_END)
        starts.append(first if item.value.start is None else item.value.start)
        ends.append(last if item.value.stop is None else item.value.stop)
        steps.append(step)
    axes = [i.axis or 0 for i in cuts]
    return [_vector(w, starts), _vector(w, ends), w.ints(axes), w.ints(steps)]


def _vector(w: OnnxWriter, values: list[Any]) -> str:
    if not any(isinstance(v, TensorNode) for v in values):
        return w.ints([int(v) for v in values])
    parts = [scalar_int64(w, v) for v in values]
    return parts[0] if len(parts) == 1 else w.node("Concat", parts, w.fresh("bounds"), axis=0)


def _positions(w: OnnxWriter, value: Any) -> str:
    return int64(w, value if isinstance(value, TensorNode) else array(value))


def _pairs(w: OnnxWriter, gathers: list[IndexPart], out: str) -> str:
    """Joins the positions in the first axes, as GatherND reads them."""
    ranks = {rank(i.value) for i in gathers}
    if [i.axis for i in gathers] != list(range(len(gathers))) or len(ranks) != 1:
        raise ExportError(
            f"{out}: several lists of positions have an ONNX form only in the first axes: transpose "
            "before, or index one axis at a time"
        )
    columns = [w.node("Unsqueeze", [_positions(w, i.value), w.ints([-1])], w.fresh(out)) for i in gathers]
    return w.node("Concat", columns, w.fresh(out), axis=-1)


def _masked(w: OnnxWriter, source: str, items: list[IndexPart], out: str) -> str:
    """Writes ``x[..., mask, ...]``: the axes of the mask become one, of which it says what stays."""
    item = _only_mask(items, out)
    assert item.axis is not None
    flat = w.node("Reshape", [operand(w, item.value, np.bool_), w.ints([-1])], w.fresh(out))
    first, count = item.axis, rank(item.value)
    if count > 1:
        sizes = w.node("Shape", [source], w.fresh(out))
        before = [w.node("Slice", [sizes, w.ints([0]), w.ints([first])], w.fresh(out))] if first else []
        behind = items[-1] is not item
        ends = [w.ints([first + count]), w.ints([_END])]
        tail = [w.node("Slice", [sizes, *ends], w.fresh(out))] if behind else []
        parts = [*before, w.ints([-1]), *tail]
        shape = parts[0] if len(parts) == 1 else w.node("Concat", parts, w.fresh(out), axis=0)
        source = w.node("Reshape", [source, shape], w.fresh(out))
    return w.node("Compress", [source, flat], out, axis=first)


def _setitem(w: OnnxWriter, call: OpCall) -> None:
    """Writes ``x[index] = value`` as a choice between the old values and the new ones."""
    x, out = call.expr.args[0], call.out
    items = [_at_traced_size(i, out) for i in index_parts(call.attrs["index"], len(x.shape))]
    if any(i.is_mask for i in items):
        chosen, value = _mask_everywhere(w, items, rank(x), out.name), _plain(w, call)
    elif any(i.axis is None or i.gathers or isinstance(i.value, TensorNode) or _computed(i) for i in items):
        raise ExportError(
            f"{out.name}: writing at {call.attrs['index']!r} cannot become ONNX: write at slices or numbers "
            "that are fixed or computed from shapes, or use F.where or F.concat"
        )
    else:
        chosen, value = _region(w, call, items)
    w.emit("Where", [chosen, value, operand(w, x, out.dtype)], out)


def _at_traced_size(item: IndexPart, out: TensorNode) -> IndexPart:
    """Replaces bounds that are computed from shapes by numbers, and bounds that span the axis by ``:``."""
    value = item.value
    if item.axis is None or item.is_mask:
        return item
    if isinstance(value, slice):
        value = slice(*(_traced_number(b) for b in (value.start, value.stop, value.step)))
        if not _computed(IndexPart(item.axis, value)):
            size = int(out.shape[item.axis])
            value = slice(None) if range(size)[value] == range(size) else value
    elif isinstance(value, TensorNode) and item.single:
        value = _traced_number(value)
    return IndexPart(item.axis, value)


def _traced_number(value: Any) -> Any:
    """Returns the number that ``value`` is at the traced size, or ``value`` if it depends on other values."""
    traced = traced_value(value) if isinstance(value, TensorNode) else None
    return value if traced is None or traced.size != 1 else int(traced.reshape(-1)[0])


def _computed(item: IndexPart) -> bool:
    cut = item.value
    return isinstance(cut, slice) and any(isinstance(b, TensorNode) for b in (cut.start, cut.stop, cut.step))


def _plain(w: OnnxWriter, call: OpCall) -> str:
    """Writes the assigned value, which has to be a single number."""
    value = call.attrs["value"]
    size = int(np.prod(value.shape)) if isinstance(value, TensorNode) else array(value).size
    if size != 1:
        raise ExportError(
            f"{call.out.name}: only one number has an ONNX form where a mask says the places: use F.where"
        )
    return operand(w, value, call.out.dtype)


def _mask_everywhere(w: OnnxWriter, items: list[IndexPart], axes: int, out: str) -> str:
    """Returns the mask with an axis of size 1 for each axis of the source after its own."""
    item = _only_mask(items, out)
    assert item.axis is not None
    name = operand(w, item.value, np.bool_)
    count = rank(item.value)
    behind = axes - item.axis - count
    return w.node("Unsqueeze", [name, w.ints(range(count, count + behind))], w.fresh(out)) if behind else name


def _only_mask(items: list[IndexPart], out: str) -> IndexPart:
    """Returns the mask of an index that keeps all other axes whole."""
    masks = [i for i in items if i.is_mask]
    if len(masks) != 1 or not all(i.whole for i in items if i is not masks[0]):
        raise ExportError(f"{out}: a mask can become ONNX only next to whole axes: index twice")
    return masks[0]


def _region(w: OnnxWriter, call: OpCall, items: list[IndexPart]) -> tuple[str, str]:
    """Returns the mask of a fixed region, of size 1 in whole axes, and the value spread over the region."""
    shape = [int(n) for n in call.out.shape]
    base, value = call.out.name, call.attrs["value"]
    mask = np.ones([1] * len(shape), np.bool_)
    places: dict[int, np.ndarray] = {}
    for item in items:
        if item.whole:
            continue
        axis = item.axis or 0
        at = np.arange(shape[axis])[item.value].reshape(-1)
        inside = np.isin(np.arange(shape[axis]), at)
        mask = mask & inside.reshape([-1 if i == axis else 1 for i in range(len(shape))])
        places[axis] = at
    chosen = w.constant(f"{base}_places", mask)
    name = operand(w, value, call.out.dtype)
    sizes = [int(n) for n in value.shape] if isinstance(value, TensorNode) else list(array(value).shape)
    kept_axes = [i for i, item in enumerate(items) if not item.single]
    # As in numpy: the value's last axis is aligned to the last axis that the index keeps.
    value_sizes = dict(zip(kept_axes[len(kept_axes) - len(sizes) :], sizes, strict=True)) if sizes else {}
    missing = [i for i in range(len(shape)) if i not in value_sizes]
    if sizes and missing:
        name = w.node("Unsqueeze", [name, w.ints(missing)], w.fresh(base))
    for axis, at in places.items():
        if value_sizes.get(axis, 1) != 1:
            source_places = np.zeros(shape[axis], np.int64)
            source_places[at] = np.arange(len(at))
            name = w.node(
                "Gather", [name, w.constant(w.fresh(base), source_places)], w.fresh(base), axis=axis
            )
    return chosen, name


def _gather(w: OnnxWriter, call: OpCall) -> None:
    inputs = [w.name(call.inputs[0]), int64(w, call.attrs["index"])]
    w.emit("GatherElements", inputs, call.out, axis=call.attrs["axis"])


def _scatter(w: OnnxWriter, call: OpCall) -> None:
    source, updates = (operand(w, n, call.out.dtype) for n in call.inputs)
    inputs = [source, int64(w, call.attrs["index"]), updates]
    w.emit("ScatterElements", inputs, call.out, axis=call.attrs["axis"])


def _indexing_one_hot(w: OnnxWriter, call: OpCall) -> None:
    axis, base = call.attrs["axis"], call.out.name
    positions = w.node("Unsqueeze", [int64(w, call.attrs["index"]), w.ints([axis])], w.fresh(base))
    inputs = [w.name(call.inputs[0]), positions]
    if call.attrs["keepdims"]:
        w.emit("GatherElements", inputs, call.out, axis=axis)
        return
    gathered = w.node("GatherElements", inputs, w.fresh(base), axis=axis)
    w.emit("Squeeze", [gathered, w.ints([axis])], call.out)


def _cond_take(w: OnnxWriter, call: OpCall) -> None:
    values, positions = call.outputs
    base = values.name
    flat = w.node("Reshape", [operand(w, call.attrs["mask"], np.bool_), w.ints([-1])], w.fresh(base))
    source = w.node("Reshape", [w.name(call.inputs[0]), w.ints([-1])], w.fresh(base))
    w.emit("Compress", [source, flat], values, axis=0)
    chosen = w.node("Reshape", [w.node("NonZero", [flat], w.fresh(base)), w.ints([-1])], w.fresh(base))
    w.names[positions] = cast(w, chosen, positions.dtype, positions.name)


def _embedding(w: OnnxWriter, call: OpCall) -> None:
    table = call.attrs["weight"]
    if isinstance(table, TensorNode):
        name = w.name(table)
    else:
        name = w.parameter(parameter_source(call, "weight"), f"{call.out.name}_weight", array(table))
    w.emit("Gather", [name, int64(w, call.attrs["index"])], call.out, axis=0)


INDEXING: dict[str, Emitter] = {
    "getitem": _getitem,
    "setitem": _setitem,
    "gather": _gather,
    "scatter": _scatter,
    "indexing_one_hot": _indexing_one_hot,
    "cond_take": _cond_take,
    "embedding": _embedding,
}
