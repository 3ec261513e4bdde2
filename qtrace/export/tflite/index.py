"""TFLite for joining and picking: concatenation, indexing by slices, numbers and fixed positions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from qtrace.errors import ExportError
from qtrace.export.tflite.build import Build, Emitter, Held
from qtrace.export.tflite.layout import Order, natural
from qtrace.export.tflite.moved import Moved
from qtrace.export.tflite.moves import reshape
from qtrace.export.tflite.operands import common_order, operands
from qtrace.export.tflite.plan import Job
from qtrace.export.tflite.writer import Stored
from qtrace.graph.types import TensorNode
from qtrace.ops import OpCall

__all__ = ["FLOAT_INDEXING", "INDEXING"]


def _parts(b: Build, job: Job) -> list[Held]:
    """What a concatenation joins: integers of one grid, or floats."""
    call = job.call
    if len(call.inputs) != len(call.attrs["parts"]):
        raise ExportError(f"{call.out.name}: one of the tensors that it joins is a number: make it a tensor")
    held = [b.get(n) for n in call.inputs]
    grids = {h.stored.grid for h in held}
    if len(grids) == 1 and (job.site is None or None in grids or b.site_grid(job)[2] in grids):
        return held
    if job.site is not None and None not in grids:  # each is rounded to the result's grid, as the graph does
        name, _, grid = b.site_grid(job)
        return [
            h if h.stored.grid == grid else Held(b.requantized(h.stored, grid, f"{name}_part"), h.order)
            for h in held
        ]
    if call.out.name in b.plan.graph.annotation.carried:
        raise ExportError(
            f"{call.out.name}: it joins integers of different scales without rounding its result, which "
            "TFLite cannot do: give its inputs one scheme, so that they share their parameters"
        )
    return [b.floats(h) for h in held]


def _concat(b: Build, job: Job) -> None:
    held = _parts(b, job)
    order = common_order(held)
    stored = [b.arrange(h, order) for h in held]
    axis = job.call.attrs["axis"] % len(order)
    _join(b, job, order, "CONCATENATION", stored, "ConcatenationOptions", axis=order.index(axis))


def _join(
    b: Build, job: Job, order: Order, code: str, parts: list[Stored], kind: str, **options: Any
) -> None:
    if job.site is not None and parts[0].grid is not None:
        b.compute(job, order, code, parts, kind, fuses=False, **options)
    else:
        b.emit(job.out, order, code, parts, kind, parts[0], **options)


def _stack(b: Build, job: Job) -> None:
    held = _parts(b, job)
    order = common_order(held)
    stored = [b.arrange(h, order) for h in held]
    axis = job.call.attrs["axis"] % (len(order) + 1)
    after = (axis, *(a + (a >= axis) for a in order))  # in front, unless that is the batch's place
    place = 0
    if order and order[0] == 0 and axis != 0:
        after, place = (after[1], axis, *after[2:]), 1
    _join(b, job, after, "PACK", stored, "PackOptions", axis=place, valuesCount=len(stored))


@dataclass(frozen=True)
class _Item:
    """What an index says of one axis of the source; ``axis`` is None for a new axis."""

    axis: int | None
    value: Any


def _items(index: Any, rank: int) -> list[_Item]:
    given = list(index) if isinstance(index, tuple) else [index]
    used = sum(v is not None and v is not Ellipsis for v in given)
    where = next((k for k, v in enumerate(given) if v is Ellipsis), len(given))
    given[where : where + 1] = [slice(None)] * (rank - used)
    found, axis = [], 0
    for value in given:
        found.append(_Item(None if value is None else axis, value))
        axis += value is not None
    return found


def _getitem(b: Build, job: Job) -> None:
    call, held = job.call, b.get(job.call.inputs[0])
    items = [_fixed(b, i, call) for i in _items(call.attrs["index"], len(held.order))]
    many = [i for i in items if isinstance(i.value, np.ndarray)]
    if len(many) > 1 or any(i.value.dtype == np.bool_ or i.value.ndim != 1 for i in many):
        raise ExportError(
            f"{call.out.name}: an index by masks or by several lists of positions has no TFLite form: "
            "index by slices, or one axis at a time"
        )
    shape = list(held.shape)
    stored = _sliced(b, call, held, items, shape)
    for item in many:
        axis = item.axis or 0
        shape[axis] = len(item.value)
        result = b.like(stored, f"{call.out.name}_taken", [shape[a] for a in held.order])
        positions = b.writer.constant("positions", item.value.astype(np.int32) % held.shape[axis])
        b.writer.op("GATHER", [stored, positions], [result], "GatherOptions", axis=held.order.index(axis))
        stored = result
    part = Held(stored, held.order)
    if any(i.axis == 0 and isinstance(i.value, (int, np.integer)) for i in items):
        part = _without_first(b, part)
    reshape(b, call.out, part, Moved.of(part.shape, part.order))


def _without_first(b: Build, held: Held) -> Held:
    """Without the first axis, of which one place is left: the next one may count samples."""
    order = tuple(axis - 1 for axis in held.order if axis)
    shape = [n for n, axis in zip(held.stored.shape, held.order, strict=True) if axis]
    return Held(b.reshaped(held.stored, shape, order.index(0) if order else None), order)


def _fixed(b: Build, item: _Item, call: OpCall) -> _Item:
    """The item with numbers in the place of nodes."""
    what, value = f"{call.out.name}: its index", item.value
    if isinstance(value, slice):
        ends = (None if v is None else b.number(v, what) for v in (value.start, value.stop, value.step))
        return _Item(item.axis, slice(*ends))
    if isinstance(value, TensorNode):
        value = b.value(value)
        if value is None:
            raise ExportError(f"{what} is computed from values, but a TFLite file fixes it: use a constant")
    elif hasattr(value, "numpy"):
        value = value.numpy()
    elif not isinstance(value, (list, np.ndarray)):
        return item
    places = np.asarray(value)
    return _Item(item.axis, int(places) if places.ndim == 0 else places)


def _sliced(b: Build, call: OpCall, held: Held, items: list[_Item], shape: list[int]) -> Stored:
    """The part that slices and numbers cut out; ``shape`` (in the graph's order) is changed to the part's."""
    cuts: dict[int, tuple[int, int, int]] = {}
    for item in items:
        if item.axis is None or isinstance(item.value, np.ndarray):
            continue
        size = shape[item.axis]
        if isinstance(item.value, slice):
            cut = range(size)[item.value]
        else:
            cut = range(int(item.value) % size, int(item.value) % size + 1)
        if cut.step < 0:
            raise ExportError(f"{call.out.name}: a negative step has no TFLite form: use positions")
        shape[item.axis] = len(cut)
        if cut != range(size):
            end = cut.start + len(cut) * cut.step if cut.step > 1 else cut.stop
            cuts[held.order.index(item.axis)] = (cut.start, min(end, size), cut.step)
    if not cuts:
        return held.stored
    part = b.like(held.stored, f"{call.out.name}_cut", [shape[a] for a in held.order])
    b.cut(held.stored, part, cuts)
    return part


def _setitem(b: Build, job: Job) -> None:
    """``x[..., 2:5, :7] = value``, axis by axis: what stands before, the value, and what stands behind."""
    call = job.call
    target, index, _ = call.expr.args
    held = b.floats(b.get(target))
    items = [_fixed(b, i, call) for i in _items(index, len(held.order))]
    if any(i.axis is None or not isinstance(i.value, slice) for i in items):
        raise ExportError(
            f"{call.out.name}: writing at {index!r} has no TFLite form: write at slices that are fixed or "
            "computed from shapes, or use F.where or F.concat"
        )
    cuts = [(i.axis or 0, range(held.shape[i.axis or 0])[i.value]) for i in items]
    if any(cut.step != 1 for _, cut in cuts):
        raise ExportError(f"{call.out.name}: writing with a step has no TFLite form: use a slice without one")
    partial = [(held.order.index(axis), cut) for axis, cut in cuts if len(cut) != held.shape[axis]]
    b.put(call.out, _filled(b, job, held, partial), held.order)


def _filled(b: Build, job: Job, held: Held, cuts: list[tuple[int, range]]) -> Stored:
    """The values of ``held`` with the written value within ``cuts``, ranges of places of the file's axes."""
    if not cuts:
        return _spread(b, job, job.call.expr.args[2], held, list(held.stored.shape))
    place, cut = cuts[0]
    size = held.stored.shape[place]
    if not len(cut):
        return held.stored
    if len(cuts) > 1:
        inside = _span(b, held, place, cut.start, cut.stop)
        assert inside is not None
        middle = _filled(b, job, Held(inside, held.order), cuts[1:])
    else:
        shape = [len(cut) if i == place else n for i, n in enumerate(held.stored.shape)]
        middle = _spread(b, job, job.call.expr.args[2], held, shape)
    spans = [_span(b, held, place, 0, cut.start), middle, _span(b, held, place, cut.stop, size)]
    parts, options = [p for p in spans if p is not None], {"kind": "ConcatenationOptions", "axis": place}
    return b.add("CONCATENATION", parts, f"{job.call.out.name}_filled", held.stored.shape, **options)


def _span(b: Build, held: Held, place: int, start: int, end: int) -> Stored | None:
    """A part along one axis of the file; None for an empty one."""
    if start >= end:
        return None
    shape = [end - start if i == place else n for i, n in enumerate(held.stored.shape)]
    made = b.like(held.stored, f"{held.stored.name}_part", shape)
    b.cut(held.stored, made, {place: (start, end, 1)})
    return made


def _spread(b: Build, job: Job, value: Any, held: Held, shape: list[int]) -> Stored:
    """A value in the shape of the part that it fills."""
    ((stored,), order) = operands(b, job.call, [value], np.dtype(np.float32))
    if stored.shape:
        stored = b.arrange(Held(stored, order), held.order)
    if list(stored.shape) == shape:
        return stored
    name = f"{job.call.out.name}_value"
    b.fixed = b.fixed or job.call.out.name
    if stored.value is not None:
        return b.writer.constant(name, np.broadcast_to(stored.value, shape))
    result = b.like(stored, name, shape)
    zeros = b.writer.constant("zeros", np.zeros(shape, np.float32))
    b.writer.op("ADD", [stored, zeros], [result], "AddOptions")
    return result


def _embedding(b: Build, job: Job) -> None:
    call, table = job.call, job.call.attrs["weight"]
    if isinstance(table, TensorNode):
        weight = b.as_floats(b.ordered(table, (0, 1)))
    else:
        weight = b.writer.constant(f"{call.out.name}_weight", np.asarray(table.numpy()))
    index = call.attrs["index"]
    out = b.result(call.out, natural(b.rank(call.out)))
    b.writer.op("GATHER", [weight, b.ordered(index, natural(b.rank(index)))], [out], "GatherOptions", axis=0)
    b.put(call.out, out, natural(b.rank(call.out)))


INDEXING: dict[str, Emitter] = {"concat": _concat, "stack": _stack, "getitem": _getitem}
FLOAT_INDEXING: dict[str, Emitter] = {"embedding": _embedding, "setitem": _setitem}
