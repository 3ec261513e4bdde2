"""TFLite for ops that only move values: integers move as floats do."""

from __future__ import annotations

import numpy as np

from qtrace.errors import ExportError
from qtrace.graph.types import TensorNode
from qtrace.targets.tflite.build import Builder, Emitter
from qtrace.targets.tflite.layout import Moved, file_shape, natural
from qtrace.targets.tflite.plan import FusedOp
from qtrace.targets.tflite.store import OrderedTensor

__all__ = ["MOVES", "reshape"]


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
        b.emit(call.out, order, "MIRROR_PAD", [x, pads], "MirrorPadOptions", x, mode=0)
    elif a["value"] == 0.0:  # integers are padded with their zero point
        b.emit(call.out, order, "PAD", [x, pads], "PadOptions", x)
    else:
        carried = b.plan.graph.carried.get(call.out.name)
        if x.grid is None or carried is None:
            x = b.as_floats(x)
            fill = b.writer.constant("fill", np.array([a["value"]], np.float32))
        else:
            fill = b.writer.constant("fill", x.grid.integers([a["value"]], x.dtype), x.grid)
        b.emit(call.out, order, "PADV2", [x, pads, fill], "PadV2Options", x)


def _split(b: Builder, op: FusedOp) -> None:
    call, source = op.call, b.get(op.call.inputs[0])
    axis = call.attrs["axis"] % len(source.order)
    place, sizes = source.order.index(axis), [b.shape(n)[axis] for n in call.outputs]
    if len(set(sizes)) == 1:
        outs = [b.result(n, source.order, source.tensor) for n in call.outputs]
        axis_tensor = b.writer.constant("axis", np.array(place, np.int32))
        b.writer.op("SPLIT", [axis_tensor, source.tensor], outs, "SplitOptions", numSplits=len(outs))
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
    b.emit(call.out, order, "TILE", [x, repeats], "TileOptions", x)
    if shape[order.index(0)] != x.shape[order.index(0)]:
        b.fixed = b.fixed or call.out.name


def _tile(b: Builder, op: FusedOp) -> None:
    call = op.call
    reps = [b.number(r, f"{call.out.name}: how often it repeats") for r in call.attrs["reps"]]
    rank = b.rank(call.out)
    x, order = b.widened(b.get(call.inputs[0]), rank).parts
    reps = [1] * (rank - len(reps)) + reps
    repeats = b.writer.ints([reps[axis] for axis in order])
    b.emit(call.out, order, "TILE", [x, repeats], "TileOptions", x)


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
    repeated = b.add("TILE", [single, counts], f"{call.out.name}_many", shape, kind="TileOptions")
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
        options = {"kind": "ConcatenationOptions", "axis": place}
        tensor = b.add("CONCATENATION", parts, _name(call.out, source), tensor.shape, **options)
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
