"""ONNX for ops that move values of one tensor, for shapes and filled tensors, and for indexing.

Values are read and written by slices, numbers, tensors of positions and masks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from qtrace import ops
from qtrace.errors import ExportError
from qtrace.export.converted import IndexPart, index_parts
from qtrace.export.onnx.writer import (
    Emitter,
    OnnxWriter,
    array,
    cast,
    emit_as,
    int64,
    operand,
    parameter_source,
    rank,
    scalar_int64,
    shape_vector,
)
from qtrace.graph.open_axes import traced_value
from qtrace.graph.types import Node, TensorNode
from qtrace.ops import OpCall

_END = int(np.iinfo(np.int32).max)


def _reshape(w: OnnxWriter, call: OpCall) -> None:
    w.emit("Reshape", [w.name(call.inputs[0]), shape_vector(w, call.attrs["target_shape"])], call.out)


def _flatten(w: OnnxWriter, call: OpCall) -> None:
    shape = [int(n) for n in call.inputs[0].shape]
    rank = len(shape)
    start, end = call.attrs["start"] % max(rank, 1), call.attrs["end"] % max(rank, 1)
    # 0 copies the input's dimension, so that the batch stays free.
    target = [0] * start + [-1] + shape[end + 1 :]
    w.emit("Reshape", [w.name(call.inputs[0]), w.ints(target)], call.out)


def _transpose(w: OnnxWriter, call: OpCall) -> None:
    pattern = call.attrs["pattern"]
    rank = len(call.inputs[0].shape)
    pattern = tuple(pattern) or tuple(reversed(range(rank)))
    axes = [int(p) % rank for p in pattern if isinstance(p, (int, np.integer))]
    added = [i for i, p in enumerate(pattern) if p == "x"]
    if len(axes) + len(added) != len(pattern) or sorted(axes) != list(range(rank)):
        raise ExportError(f"{call.out.name}: transpose by {pattern!r} cannot become ONNX: use all axes")
    source = [w.name(call.inputs[0])]
    if not added:
        w.emit("Transpose", source, call.out, perm=axes)
        return
    moved = w.node("Transpose", source, w.fresh(call.out.name), perm=axes)
    w.emit("Unsqueeze", [moved, w.ints(added)], call.out)


def _axes(op: str) -> Emitter:
    def emit(w: OnnxWriter, call: OpCall) -> None:
        axes = call.attrs["axis"]
        if axes is None:
            axes = [i for i, n in enumerate(call.inputs[0].shape) if int(n) == 1]
        w.emit(op, [w.name(call.inputs[0]), w.ints(axes)], call.out)

    return emit


def _identity(w: OnnxWriter, call: OpCall) -> None:
    source, name = call.inputs[0], w.name(call.inputs[0])
    if np.dtype(source.dtype) != np.dtype(call.out.dtype):  # Tensor(x, dtype=...)
        name = cast(w, name, call.out.dtype, call.out.name)
    w.names[call.out] = name


def _pad(w: OnnxWriter, call: OpCall) -> None:
    width = call.attrs["width"]
    rank = len(call.inputs[0].shape)
    width = (*width, *[(0, 0)] * (rank - len(width)))
    pads = w.ints([int(b) for b, _ in width] + [int(a) for _, a in width])
    mode = {"constant": "constant", "reflect": "reflect", "replicate": "edge"}[call.attrs["mode"]]
    inputs = [w.name(call.inputs[0]), pads]
    if mode == "constant":
        value = float(call.attrs["value"])
        # onnxruntime 1.23 makes a padding by 0 one of the pooling's own, which is by minus infinity.
        inputs.append(w.scalar(-0.0 if value == 0 and _meets_max_pool(call.out) else value))
    w.emit("Pad", inputs, call.out, mode=mode)


def _meets_max_pool(node: TensorNode) -> bool:
    """Returns whether max pooling reads ``node``, or an identity of it."""
    calls = [call for call in map(ops.read, node.users) if call is not None]
    if any(call.kind == "max_pool2d" for call in calls):
        return True
    return any(_meets_max_pool(call.out) for call in calls if call.kind == "identity")


def _split(w: OnnxWriter, call: OpCall) -> None:
    sections = call.attrs["sections"]
    axis = call.attrs["axis"] % len(call.inputs[0].shape)
    if isinstance(sections, TensorNode):
        raise ExportError(
            f"{call.out.name}: a split into a computed number of parts cannot become ONNX: fix it"
        )
    equal = isinstance(sections, (int, np.integer))
    # The size of the last of unequal parts would hold the batch.
    if not equal and (axis == 0 or any(isinstance(s, TensorNode) for s in sections)):
        _split_at(w, call, axis, sections)
        return
    # Equal parts need no sizes, which would hold the batch.
    sizes = [] if equal else [w.ints([int(n.shape[axis]) for n in call.outputs])]
    names = w.add("Split", [w.name(call.inputs[0]), *sizes], [n.name for n in call.outputs], axis=axis)
    w.names.update(zip(call.outputs, names, strict=True))


def _split_at(w: OnnxWriter, call: OpCall, axis: int, sections: Sequence[Any]) -> None:
    """Writes a slice for each part, between places that may be computed."""
    source = w.name(call.inputs[0])
    places = [w.ints([0]), *(scalar_int64(w, s) for s in sections), w.ints([_END])]
    for node, start, end in zip(call.outputs, places, places[1:], strict=False):
        w.emit("Slice", [source, start, end, w.ints([axis])], node)


def _broadcast_to(w: OnnxWriter, call: OpCall) -> None:
    w.emit("Expand", [w.name(call.inputs[0]), shape_vector(w, call.attrs["shape"])], call.out)


def _tile(w: OnnxWriter, call: OpCall) -> None:
    reps, x = call.attrs["reps"], call.inputs[0]
    name, rank = w.name(x), len(x.shape)
    if isinstance(reps, TensorNode):
        w.emit("Tile", [name, shape_vector(w, reps)], call.out)
        return
    reps = (1,) * (rank - len(reps)) + tuple(reps)
    if len(reps) > rank:
        name = w.node("Unsqueeze", [name, w.ints(range(len(reps) - rank))], w.fresh(call.out.name))
    w.emit("Tile", [name, shape_vector(w, reps)], call.out)


def _repeat(w: OnnxWriter, call: OpCall) -> None:
    """Repeats each value: adds an axis after it, tiles that, and joins it with the axis before it."""
    axis, times, x = call.attrs["axis"], call.attrs["repeats"], call.inputs[0]
    name, base, shape = w.name(x), call.out.name, [int(n) for n in x.shape]
    if axis is None:
        name, shape, axis = w.node("Reshape", [name, w.ints([-1])], w.fresh(base)), [-1], 0
    single = w.node("Unsqueeze", [name, w.ints([axis + 1])], w.fresh(base))
    counts: list[Any] = [1] * (len(shape) + 1)
    counts[axis + 1] = times
    repeated = w.node("Tile", [single, shape_vector(w, counts)], w.fresh(base))
    if axis == len(shape) - 1:
        target = w.ints([0] * axis + [-1])
    else:  # the later axes move by one, and may be open
        factors = shape_vector(w, [times if i == axis else 1 for i in range(len(shape))])
        target = w.node("Mul", [w.node("Shape", [name], w.fresh(base)), factors], w.fresh(base))
    w.emit("Reshape", [repeated, target], call.out)


def _roll(w: OnnxWriter, call: OpCall) -> None:
    """Exchanges the parts before and after a place: the negative shift, modulo the size."""
    x, base, axes = call.inputs[0], call.out.name, call.attrs["axis"]
    source = w.name(x)
    name = source if axes is not None else w.node("Reshape", [source, w.ints([-1])], w.fresh(base))
    for shift, axis in zip(call.attrs["shift"], axes or (0,), strict=True):
        if isinstance(shift, TensorNode):
            raise ExportError(f"{base}: a shift that is computed cannot become ONNX: fix it")
        if int(shift) == 0:
            continue
        place = _place(w, name, int(shift), axis, base)
        axis_vector = w.ints([axis])
        behind = w.node("Slice", [name, place, w.ints([_END]), axis_vector], w.fresh(base))
        before = w.node("Slice", [name, w.ints([0]), place, axis_vector], w.fresh(base))
        name = w.node("Concat", [behind, before], w.fresh(base), axis=axis)
    if axes is None:
        name = w.node("Reshape", [name, w.node("Shape", [source], w.fresh(base))], w.fresh(base))
    w.names[call.out] = name


def _place(w: OnnxWriter, name: str, shift: int, axis: int, base: str) -> str:
    whole = w.node("Shape", [name], w.fresh(base))
    size = w.node("Gather", [whole, w.ints([axis])], w.fresh(base), axis=0)
    return w.node("Mod", [w.ints([-shift]), size], w.fresh(base))


def _pixel_shuffle(w: OnnxWriter, call: OpCall) -> None:
    factor, x, base = call.attrs["factor"], call.inputs[0], call.out.name
    name, shape = w.name(x), [int(n) for n in x.shape]
    if len(shape) == 4:
        w.emit("DepthToSpace", [name], call.out, blocksize=factor, mode="CRD")
        return
    flat = w.node("Reshape", [name, w.ints([-1, *shape[-3:]])], w.fresh(base))
    moved = w.node("DepthToSpace", [flat], w.fresh(base), blocksize=factor, mode="CRD")
    # Of the leading axes, all but the first are fixed; without any, the added axis is removed.
    target = [-1, *(int(n) for n in call.out.shape[1:])] if len(shape) > 4 else list(call.out.shape)
    w.emit("Reshape", [moved, w.ints(target)], call.out)


def _sliding_window(w: OnnxWriter, call: OpCall) -> None:
    """Gathers rows and columns of every window, then moves the axes of the windows to the end."""
    a, base, shape = call.attrs, call.out.name, call.inputs[0].shape
    name, (high, wide) = w.name(call.inputs[0]), a["padding"]
    if high or wide:
        pads = w.ints([0, 0, high, wide, 0, 0, high, wide])
        name = w.node("Pad", [name, pads, w.scalar(0.0)], w.fresh(base), mode="constant")
    for axis, source, pad in ((2, 2, high), (4, 3, wide)):
        k, step, apart = (a[n][source - 2] for n in ("kernel_size", "stride", "dilation"))
        count = (int(shape[source]) + 2 * pad - apart * (k - 1) - 1) // step + 1
        places = step * np.arange(count)[:, None] + apart * np.arange(k)
        positions = w.constant(f"{base}_places_{axis}", places.astype(np.int64))
        name = w.node("Gather", [name, positions], w.fresh(base), axis=axis)
    w.emit("Transpose", [name], call.out, perm=[0, 1, 2, 4, 3, 5])


MOVES: dict[str, Emitter] = {
    "reshape": _reshape,
    "flatten": _flatten,
    "transpose": _transpose,
    "swapaxes": _transpose,
    "expand_dims": _axes("Unsqueeze"),
    "squeeze": _axes("Squeeze"),
    "broadcast_to": _broadcast_to,
    "tile": _tile,
    "repeat": _repeat,
    "roll": _roll,
    "identity": _identity,
    "dropout": _identity,
    "pad": _pad,
    "split": _split,
    "pixel_shuffle": _pixel_shuffle,
    "sliding_window": _sliding_window,
}


def _fixed(emit: Emitter) -> Emitter:
    """Emits a result without inputs as a constant, computed by MegEngine; ``emit`` writes the others."""

    def guarded(w: OnnxWriter, call: OpCall) -> None:
        if call.expr.inputs:
            emit(w, call)
            return
        for node, value in zip(call.outputs, call.expr.interpret(), strict=True):
            w.values[node] = value.numpy()

    return guarded


def _shape(w: OnnxWriter, call: OpCall) -> None:
    if len(call.inputs) != 1:
        raise ExportError(
            f"{call.out.name}: the common shape of several tensors cannot become ONNX: "
            "read the shape of their sum"
        )
    emit_as(w, "Shape", [w.name(call.inputs[0])], call.out)


def _scalar(w: OnnxWriter, value: Any) -> str:
    """Returns a constant or computed number as a float32 tensor without axes."""
    if isinstance(value, TensorNode) and value.shape != ():
        return w.node("Reshape", [operand(w, value, np.float32), w.ints([])], w.fresh(value.name))
    return operand(w, value, np.float32)


def _arange(w: OnnxWriter, call: OpCall) -> None:
    a = call.attrs
    start, stop = (0, a["start"]) if a["stop"] is None else (a["start"], a["stop"])
    names = [_scalar(w, v) for v in (start, stop, a["step"])]
    _emit_float(w, call, w.node("Range", names, w.fresh(call.out.name)))


def _emit_float(w: OnnxWriter, call: OpCall, name: str) -> None:
    """Makes the float32 tensor ``name`` the result, converted to the type of the node."""
    if np.dtype(call.out.dtype) != np.float32:
        name = cast(w, name, call.out.dtype, call.out.name)
    w.names[call.out] = name


def _linspace(w: OnnxWriter, call: OpCall) -> None:
    base, a = call.out.name, call.attrs
    start, stop, count = (_scalar(w, a[n]) for n in ("start", "stop", "num"))
    places = w.node("Range", [w.scalar(0.0), count, w.scalar(1.0)], w.fresh(base))
    span = w.node("Sub", [stop, start], w.fresh(base))
    parts = w.node(
        "Max", [w.node("Sub", [count, w.scalar(1.0)], w.fresh(base)), w.scalar(1.0)], w.fresh(base)
    )
    moved = w.node("Mul", [places, w.node("Div", [span, parts], w.fresh(base))], w.fresh(base))
    _emit_float(w, call, w.node("Add", [moved, start], w.fresh(base)))


def _eye(w: OnnxWriter, call: OpCall) -> None:
    from onnx import helper

    rows, columns = call.attrs["N"], call.attrs["M"]
    sizes = [scalar_int64(w, v) for v in (rows, rows if columns is None else columns)]
    shape = w.node("Concat", sizes, w.fresh(call.out.name), axis=0)
    blank = w.node("ConstantOfShape", [shape], w.fresh(call.out.name))
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(call.out.dtype))
    w.emit("EyeLike", [blank], call.out, dtype=kind)


def _full(w: OnnxWriter, call: OpCall) -> None:
    value = operand(w, call.attrs["value"], call.out.dtype)
    w.emit("Expand", [value, shape_vector(w, call.attrs["shape"])], call.out)


def _full_like(w: OnnxWriter, call: OpCall) -> None:
    shape = w.node("Shape", [w.name(call.inputs[0])], w.fresh(call.out.name))
    w.emit("Expand", [operand(w, call.attrs["value"], call.out.dtype), shape], call.out)


def _meshgrid(w: OnnxWriter, call: OpCall) -> None:
    """Lays each input along an axis of its own, and expands it over the others."""
    rank = len(call.inputs)
    axes = list(range(rank))
    if call.attrs["indexing"] == "xy" and rank > 1:
        axes[0], axes[1] = 1, 0
    lengths: dict[Node, str] = {}
    lines: list[str] = []
    for node, axis in zip(call.inputs, axes, strict=True):
        lengths[axis] = w.node("Shape", [w.name(node)], w.fresh(call.out.name))
        form = w.ints([-1 if i == axis else 1 for i in range(rank)])
        lines.append(w.node("Reshape", [w.name(node), form], w.fresh(call.out.name)))
    shape = w.node("Concat", [lengths[i] for i in range(rank)], w.fresh(call.out.name), axis=0)
    for line, out in zip(lines, call.outputs, strict=True):
        w.emit("Expand", [line, shape], out)


SHAPES: dict[str, Emitter] = {
    "shape": _shape,
    "arange": _fixed(_arange),
    "linspace": _fixed(_linspace),
    "eye": _fixed(_eye),
    "full": _fixed(_full),
    "full_like": _full_like,
    "meshgrid": _meshgrid,
}


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
