"""Ops that move or pick values."""

from __future__ import annotations

from typing import Any

import numpy as np

from qtrace.errors import ExportError
from qtrace.export.converted import IndexPart, index_parts
from qtrace.graph.types import TensorNode
from qtrace.ops import OpCall
from qtrace.targets.tflite.build import Builder, Emitter, OrderedTensor, common_order, operands
from qtrace.targets.tflite.layout import FusedOp, Moved, Order, file_shape, natural
from qtrace.targets.tflite.writer import FileTensor

__all__ = ["FLOAT_INDEXING", "INDEXING", "MOVES", "reshape"]


def reshape(b: Builder, node: TensorNode, source: OrderedTensor, moved: Moved) -> None:
    """Makes ``node`` the moved values of ``source`` in the node's shape."""
    shape = list(b.shape(node))
    reshaped, batch = moved.reshaped(shape), b.sample_axes.get(node, 0)
    apart = reshaped is not None and node in b.sample_axes and moved.batch not in reshaped.axes[batch]
    # The axes share no parts with the source's axes, or of an axis with samples and more only the
    # samples go on as an axis: the values move first.
    if reshaped is None or apart:
        natural_order = natural(len(moved.axes))
        tensor = b.materialized(node.name, source, moved, natural_order)
        b.put(node, b.reshaped(tensor, shape, batch, _name(node, source)), natural(len(shape)))
        return
    b.move(node, source, reshaped)


def _name(node: TensorNode, source: OrderedTensor) -> str:
    return f"{node.name}_int" if source.tensor.grid is not None else node.name


def _reshape(b: Builder, op: FusedOp) -> None:
    reshape(b, op.out, *b.moved_from(op.call.inputs[0]))


def _transpose(b: Builder, op: FusedOp) -> None:
    call, (source, moved) = op.call, b.moved_from(op.call.inputs[0])
    rank = len(moved.axes)
    pattern = tuple(call.attrs["pattern"]) or tuple(reversed(range(rank)))
    axes = [int(p) % rank for p in pattern if isinstance(p, (int, np.integer))]
    if sorted(axes) != list(range(rank)):
        raise ExportError(f"{call.out.name}: transpose by {pattern!r} cannot become TFLite: use all axes")
    reshape(b, call.out, source, moved.transposed(axes))


def _identity(b: Builder, op: FusedOp) -> None:
    b.move(op.out, *b.moved_from(op.call.inputs[0]))


def _pad(b: Builder, op: FusedOp) -> None:
    call, a = op.call, op.call.attrs
    x, order = b.get(call.inputs[0]).parts
    width = (*a["width"], *[(0, 0)] * (len(order) - len(a["width"])))
    pads = b.writer.constant("pads", np.array([width[axis] for axis in order], np.int32))
    if a["mode"] == "replicate":
        raise ExportError(
            f"{call.out.name}: padding by the border's values cannot become TFLite: use zeros or reflect"
        )
    if a["mode"] == "reflect":
        b.emit(call.out, order, "MIRROR_PAD", [x, pads], x, mode=0)
    elif a["value"] == 0.0:  # integers are padded with their zero point
        b.emit(call.out, order, "PAD", [x, pads], x)
    else:
        carried = b.plan.graph.carried.get(call.out.name)
        if x.grid is None or carried is None:
            x = b.as_floats(x)
            fill = b.writer.constant("fill", np.array([a["value"]], np.float32))
        else:
            fill = b.writer.constant("fill", x.grid.integers([a["value"]], x.dtype), x.grid)
        b.emit(call.out, order, "PADV2", [x, pads, fill], x)


def _split(b: Builder, op: FusedOp) -> None:
    call, source = op.call, b.get(op.call.inputs[0])
    axis = call.attrs["axis"] % len(source.order)
    place, sizes = source.order.index(axis), [b.shape(n)[axis] for n in call.outputs]
    if len(set(sizes)) == 1:
        outs = [b.result(n, source.order, source.tensor) for n in call.outputs]
        axis_tensor = b.writer.constant("axis", np.array(place, np.int32))
        b.writer.op("SPLIT", [axis_tensor, source.tensor], outs, numSplits=len(outs))
        for node, out in zip(call.outputs, outs, strict=True):
            b.put(node, out, source.order)
        return
    start = 0
    for node, size in zip(call.outputs, sizes, strict=True):
        out = b.result(node, source.order, source.tensor)
        b.cut(source.tensor, out, {place: (start, start + size, 1)})
        b.put(node, out, source.order)
        start += size


def _broadcast_to(b: Builder, op: FusedOp) -> None:
    call = op.call
    x, order = b.widened(b.get(call.inputs[0]), b.rank(call.out)).parts
    shape = file_shape(b.shape(call.out), order)
    if shape == x.shape:
        b.put(call.out, x, order)
        return
    repeats = b.writer.ints([o // i for o, i in zip(shape, x.shape, strict=True)])
    b.emit(call.out, order, "TILE", [x, repeats], x)
    if shape[order.index(0)] != x.shape[order.index(0)]:
        b.fixed = b.fixed or call.out.name


def _tile(b: Builder, op: FusedOp) -> None:
    call = op.call
    reps = [b.number(r, f"{call.out.name}: how often it repeats") for r in call.attrs["reps"]]
    rank = b.rank(call.out)
    x, order = b.widened(b.get(call.inputs[0]), rank).parts
    reps = [1] * (rank - len(reps)) + reps
    repeats = b.writer.ints([reps[axis] for axis in order])
    b.emit(call.out, order, "TILE", [x, repeats], x)


def _repeat(b: Builder, op: FusedOp) -> None:
    """Repeats each value: adds an axis after it, tiles that, and joins it with the axis before it."""
    call, source = op.call, b.get(op.call.inputs[0])
    times = b.number(call.attrs["repeats"], f"{call.out.name}: how often it repeats")
    axis = call.attrs["axis"]
    name, (x, order) = _name(call.out, source), source.parts
    if axis is None:
        order, axis = natural(len(order)), len(order) - 1
        x = b.arrange(source, order)
    place, batch = order.index(axis), order.index(0)
    single = b.reshaped(x, (*x.shape[: place + 1], 1, *x.shape[place + 1 :]), batch)
    counts = [times if i == place + 1 else 1 for i in range(len(x.shape) + 1)]
    shape = [n * c for n, c in zip(single.shape, counts, strict=True)]
    repeated = b.add("TILE", [single, counts], f"{call.out.name}_many", shape)
    if b.rank(call.out) != len(order):  # of the flattened values
        order, batch = natural(1), 0
    b.put(call.out, b.reshaped(repeated, file_shape(b.shape(call.out), order), batch, name), order)


def _pixel_shuffle(b: Builder, op: FusedOp) -> None:
    """Moves channels to rows and columns: a transpose between two reshapes."""
    call, f = op.call, op.call.attrs["factor"]
    n, channels, height, width = b.shape(call.inputs[0])
    source, moved = b.moved_from(call.inputs[0])
    shape = [n, channels // (f * f), f, f, height, width]
    apart = moved.reshaped(shape)
    if apart is None:
        source = b.get(call.inputs[0])
        apart = Moved.of(source.shape, source.order).reshaped(shape)
    assert apart is not None
    reshape(b, call.out, source, apart.transposed((0, 1, 4, 2, 5, 3)))


def _roll(b: Builder, op: FusedOp) -> None:
    call, source = op.call, b.get(op.call.inputs[0])
    if call.attrs["axis"] is None:
        raise ExportError(f"{call.out.name}: rolling flattened values cannot become TFLite: name the axes")
    tensor = source.tensor
    for shift, axis in zip(call.attrs["shift"], call.attrs["axis"], strict=True):
        place, size = source.order.index(axis % len(source.order)), source.shape[axis]
        cut = -b.number(shift, f"{call.out.name}: its shift") % size
        if cut == 0:
            continue
        parts = []
        for start, end in ((cut, size), (0, cut)):
            shape = [end - start if i == place else n for i, n in enumerate(tensor.shape)]
            parts.append(b.like(tensor, f"{call.out.name}_part", shape))
            b.cut(tensor, parts[-1], {place: (start, end, 1)})
        tensor = b.add("CONCATENATION", parts, _name(call.out, source), tensor.shape, axis=place)
    b.put(call.out, tensor, source.order)


MOVES: dict[str, Emitter] = {
    **dict.fromkeys(("reshape", "flatten", "expand_dims", "squeeze"), _reshape),
    **dict.fromkeys(("transpose", "swapaxes"), _transpose),
    **dict.fromkeys(("identity", "dropout"), _identity),
    "pad": _pad,
    "split": _split,
    "broadcast_to": _broadcast_to,
    "tile": _tile,
    "repeat": _repeat,
    "roll": _roll,
    "pixel_shuffle": _pixel_shuffle,
}


def _parts(b: Builder, op: FusedOp) -> list[OrderedTensor]:
    """Returns the parts of a concatenation: all integers of one grid, or all floats."""
    call = op.call
    if len(call.inputs) != len(call.attrs["parts"]):
        raise ExportError(f"{call.out.name}: one of the tensors that it joins is a number: make it a tensor")
    parts = [b.get(n) for n in call.inputs]
    grids = {h.tensor.grid for h in parts}
    if len(grids) == 1 and (op.site is None or None in grids or b.site_grid(op)[2] in grids):
        return parts
    if op.site is not None and None not in grids:  # each is rounded to the result's grid, as the graph does
        name, _, grid = b.site_grid(op)
        return [
            h
            if h.tensor.grid == grid
            else OrderedTensor(b.requantized(h.tensor, grid, f"{name}_part"), h.order)
            for h in parts
        ]
    if call.out.name in b.plan.graph.annotation.carried:
        raise ExportError(
            f"{call.out.name}: it joins integers of different scales without rounding its result, which "
            "TFLite cannot do: give its inputs one scheme, to share parameters"
        )
    return [b.floats(h) for h in parts]


def _concat(b: Builder, op: FusedOp) -> None:
    parts = _parts(b, op)
    order = common_order(parts)
    tensor = [b.arrange(h, order) for h in parts]
    axis = op.call.attrs["axis"] % len(order)
    _join(b, op, order, "CONCATENATION", tensor, axis=order.index(axis))


def _join(b: Builder, op: FusedOp, order: Order, code: str, parts: list[FileTensor], **options: Any) -> None:
    if op.site is not None and parts[0].grid is not None:
        b.compute(op, order, code, parts, fuses=False, **options)
    else:
        b.emit(op.out, order, code, parts, parts[0], **options)


def _stack(b: Builder, op: FusedOp) -> None:
    parts = _parts(b, op)
    order = common_order(parts)
    tensor = [b.arrange(h, order) for h in parts]
    axis = op.call.attrs["axis"] % (len(order) + 1)
    after = (axis, *(a + (a >= axis) for a in order))  # in front, unless that is the batch's place
    place = 0
    if order and order[0] == 0 and axis != 0:
        after, place = (after[1], axis, *after[2:]), 1
    _join(b, op, after, "PACK", tensor, axis=place, valuesCount=len(tensor))


def _looked_up(b: Builder, op: FusedOp) -> bool:
    """Writes ``table[ids]`` with computed ids; returns whether an index is one."""
    call, index = op.call, op.call.attrs["index"]
    if isinstance(index, tuple) and len(index) == 1:
        (index,) = index
    if not isinstance(index, TensorNode) or b.value(index) is not None or b.rank(index) == 0:
        return False
    if np.dtype(index.dtype).kind not in "iu":
        return False
    order = natural(b.rank(call.inputs[0]))
    x, ids = b.arrange(b.get(call.inputs[0]), order), b.ordered(index, natural(b.rank(index)))
    b.emit(op.out, natural(b.rank(call.out)), "GATHER", [x, ids], x, axis=0)
    return True


def _getitem(b: Builder, op: FusedOp) -> None:
    if _looked_up(b, op):
        return
    call, source = op.call, b.get(op.call.inputs[0])
    items = [_fixed(b, i, call) for i in index_parts(call.attrs["index"], len(source.order))]
    gathers = [i for i in items if isinstance(i.value, np.ndarray)]
    if len(gathers) > 1 or any(i.value.dtype == np.bool_ or i.value.ndim != 1 for i in gathers):
        raise ExportError(
            f"{call.out.name}: an index by masks or by several lists of positions cannot become TFLite: "
            "index by slices, or one axis at a time"
        )
    shape = list(source.shape)
    tensor = _sliced(b, call, source, items, shape)
    for item in gathers:
        axis = item.axis or 0
        shape[axis] = len(item.value)
        result = b.like(tensor, f"{call.out.name}_taken", [shape[a] for a in source.order])
        positions = b.writer.constant("positions", item.value.astype(np.int32) % source.shape[axis])
        b.writer.op("GATHER", [tensor, positions], [result], axis=source.order.index(axis))
        tensor = result
    part = OrderedTensor(tensor, source.order)
    if any(i.axis == 0 and isinstance(i.value, (int, np.integer)) for i in items):
        part = _without_first(b, part)
    reshape(b, call.out, part, Moved.of(part.shape, part.order))


def _without_first(b: Builder, source: OrderedTensor) -> OrderedTensor:
    """Removes the first axis, of size 1, so that the next one may be the batch."""
    order = tuple(axis - 1 for axis in source.order if axis)
    shape = [n for n, axis in zip(source.tensor.shape, source.order, strict=True) if axis]
    return OrderedTensor(b.reshaped(source.tensor, shape, order.index(0) if order else None), order)


def _fixed(b: Builder, item: IndexPart, call: OpCall) -> IndexPart:
    """Replaces the nodes of an index by their values."""
    subject, value = f"{call.out.name}: its index", item.value
    if isinstance(value, slice):
        ends = (None if v is None else b.number(v, subject) for v in (value.start, value.stop, value.step))
        return IndexPart(item.axis, slice(*ends))
    if isinstance(value, TensorNode):
        value = b.value(value)
        if value is None:
            raise ExportError(
                f"{subject} is computed from values, but a TFLite file fixes it: use a constant"
            )
    elif hasattr(value, "numpy"):
        value = value.numpy()
    elif not isinstance(value, (list, np.ndarray)):
        return item
    positions = np.asarray(value)
    return IndexPart(item.axis, int(positions) if positions.ndim == 0 else positions)


def _sliced(
    b: Builder, call: OpCall, source: OrderedTensor, items: list[IndexPart], shape: list[int]
) -> FileTensor:
    """Cuts out slices and numbers; changes ``shape``, in the graph's order, to the result's."""
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
            raise ExportError(f"{call.out.name}: a negative step cannot become TFLite: use positions")
        shape[item.axis] = len(cut)
        if cut != range(size):
            end = cut.start + len(cut) * cut.step if cut.step > 1 else cut.stop
            cuts[source.order.index(item.axis)] = (cut.start, min(end, size), cut.step)
    if not cuts:
        return source.tensor
    part = b.like(source.tensor, f"{call.out.name}_cut", [shape[a] for a in source.order])
    b.cut(source.tensor, part, cuts)
    return part


def _setitem(b: Builder, op: FusedOp) -> None:
    """Writes ``x[..., 2:5, :7] = value`` axis by axis: the part before, the value, the part after."""
    call = op.call
    target, index, _ = call.expr.args
    source = b.floats(b.get(target))
    items = [_fixed(b, i, call) for i in index_parts(index, len(source.order))]
    if any(i.axis is None or not isinstance(i.value, slice) for i in items):
        raise ExportError(
            f"{call.out.name}: writing at {index!r} cannot become TFLite: write at slices that are fixed or "
            "computed from shapes, or use F.where or F.concat"
        )
    cuts = [(i.axis or 0, range(source.shape[i.axis or 0])[i.value]) for i in items]
    if any(cut.step != 1 for _, cut in cuts):
        raise ExportError(f"{call.out.name}: writing with a step cannot become TFLite: use a plain slice")
    partial = [(source.order.index(axis), cut) for axis, cut in cuts if len(cut) != source.shape[axis]]
    b.put(call.out, _filled(b, op, source, partial), source.order)


def _filled(b: Builder, op: FusedOp, source: OrderedTensor, cuts: list[tuple[int, range]]) -> FileTensor:
    """Writes the value into ``source`` within ``cuts``, ranges of places of the file's axes."""
    if not cuts:
        return _spread(b, op, op.call.expr.args[2], source, list(source.tensor.shape))
    place, cut = cuts[0]
    size = source.tensor.shape[place]
    if not len(cut):
        return source.tensor
    if len(cuts) > 1:
        inside = _span(b, source, place, cut.start, cut.stop)
        assert inside is not None
        middle = _filled(b, op, OrderedTensor(inside, source.order), cuts[1:])
    else:
        shape = [len(cut) if i == place else n for i, n in enumerate(source.tensor.shape)]
        middle = _spread(b, op, op.call.expr.args[2], source, shape)
    spans = [_span(b, source, place, 0, cut.start), middle, _span(b, source, place, cut.stop, size)]
    parts = [p for p in spans if p is not None]
    return b.add("CONCATENATION", parts, f"{op.call.out.name}_filled", source.tensor.shape, axis=place)


def _span(b: Builder, source: OrderedTensor, place: int, start: int, end: int) -> FileTensor | None:
    """Cuts out a range of places of one file axis; None for an empty range."""
    if start >= end:
        return None
    shape = [end - start if i == place else n for i, n in enumerate(source.tensor.shape)]
    part = b.like(source.tensor, f"{source.tensor.name}_part", shape)
    b.cut(source.tensor, part, {place: (start, end, 1)})
    return part


def _spread(b: Builder, op: FusedOp, value: Any, source: OrderedTensor, shape: list[int]) -> FileTensor:
    """Broadcasts the written value to the shape of the part that it fills."""
    ((tensor,), order) = operands(b, op.call, [value], np.dtype(np.float32))
    if tensor.shape:
        tensor = b.arrange(OrderedTensor(tensor, order), source.order)
    if list(tensor.shape) == shape:
        return tensor
    name = f"{op.call.out.name}_value"
    b.fixed = b.fixed or op.call.out.name
    if tensor.value is not None:
        return b.writer.constant(name, np.broadcast_to(tensor.value, shape))
    result = b.like(tensor, name, shape)
    zeros = b.writer.constant("zeros", np.zeros(shape, np.float32))
    b.writer.op("ADD", [tensor, zeros], [result])
    return result


def _gather(b: Builder, op: FusedOp) -> None:
    """Takes a value for each position of an index of as many axes, by the coordinates of each."""
    call = op.call
    rank, shape = b.rank(call.out), b.shape(call.out)
    order, axis = natural(rank), call.attrs["axis"] % rank
    x, index = b.arrange(b.get(call.inputs[0]), order), call.attrs["index"]
    if isinstance(index, TensorNode):
        positions = b.ordered(index, order)
    else:
        positions = b.writer.constant("positions", np.asarray(index.numpy(), np.int32))
    grids = np.indices(shape, np.int32)
    parts = [positions if a == axis else b.writer.constant("grid", grids[a]) for a in range(rank)]
    places = b.writer.tensor(f"{call.out.name}_places", (*shape, rank), np.int32)
    b.writer.op("PACK", parts, [places], axis=rank, valuesCount=rank)
    b.emit(op.out, order, "GATHER_ND", [x, places], x)
    b.fixed = b.fixed or call.out.name  # the coordinates have the traced sizes


def _embedding(b: Builder, op: FusedOp) -> None:
    call, table = op.call, op.call.attrs["weight"]
    if isinstance(table, TensorNode):
        weight = b.as_floats(b.ordered(table, (0, 1)))
    else:
        weight = b.writer.constant(f"{call.out.name}_weight", np.asarray(table.numpy()))
    index = call.attrs["index"]
    out = b.result(call.out, natural(b.rank(call.out)))
    b.writer.op("GATHER", [weight, b.ordered(index, natural(b.rank(index)))], [out], axis=0)
    b.put(call.out, out, natural(b.rank(call.out)))


INDEXING: dict[str, Emitter] = {
    "concat": _concat,
    "stack": _stack,
    "getitem": _getitem,
    "gather": _gather,
}
FLOAT_INDEXING: dict[str, Emitter] = {"embedding": _embedding, "setitem": _setitem}
