"""ncnn layers that only move values: other axes, parts, copies.

Any number of axes can be moved: what a layer does not touch is joined to the axes before and after it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import numpy as np

from qtrace.errors import ExportError
from qtrace.export.converted import index_parts
from qtrace.graph.types import TensorNode
from qtrace.ops import OpCall
from qtrace.targets.ncnn.layers import look_up
from qtrace.targets.ncnn.writer import ARRAY, NcnnWriter

Emitter = Callable[[NcnnWriter, OpCall], None]

# The order of the axes of a sample -> ncnn's number for it.
_ORDERS = {order: n for rank in (2, 3, 4) for n, order in enumerate(itertools.permutations(range(rank)))}
_LARGEST = float(np.finfo(np.float32).max)
# More runs of positions than this are no crops any more, but a table.
_MOST_RUNS = 64


def _sizes(node: TensorNode) -> list[int]:
    return [int(n) for n in node.shape or ()]


def _reshape(w: NcnnWriter, call: OpCall) -> None:
    """Reshapes to the shape for one sample."""
    x, dims = call.inputs[0], w.dims(call.out)
    if len(dims) > 4:
        _identity(w, call)
        return
    w.names[call.out] = w.reshape(w.view(x, w.packed.get(x, w.dims(x))), dims, call.out.name)


def _transpose(w: NcnnWriter, call: OpCall) -> None:
    """Permutes axes; those that stay side by side are one axis, axes of size 1 are left out."""
    x, sizes = call.inputs[0], _sizes(call.inputs[0])
    pattern = call.attrs["pattern"] or tuple(reversed(range(len(sizes))))
    if not all(isinstance(p, (int, np.integer)) for p in pattern):
        raise ExportError(f"ncnn cannot transpose by {pattern!r}: use fixed numbers")
    order = [int(p) % len(sizes) for p in pattern]
    dropped = len(sizes) - len(w.dims(x))
    plain = tuple(axis - dropped for axis in order[dropped:])
    if (
        order[:dropped] == list(range(dropped))
        and plain in _ORDERS
        and w.dims(call.out) == tuple(sizes[axis] for axis in order[dropped:])
    ):
        source = w.name(x)
        w.names[call.out] = w.layer("Permute", [source], call.out.name, {0: _ORDERS[plain]})
        return
    runs: list[list[int]] = []
    for axis in (a for a in order if sizes[a] > 1):
        if runs and all(sizes[a] == 1 for a in range(runs[-1][-1] + 1, axis)) and axis > runs[-1][-1]:
            runs[-1].append(axis)
        else:
            runs.append([axis])
    first = sorted(runs)
    dims = [prod(sizes[a] for a in run) for run in first] or [1]
    turned = [first.index(run) for run in runs]
    w.put(call.out, *_permuted(w, call, dims, turned))


def _permuted(w: NcnnWriter, call: OpCall, dims: list[int], order: list[int]) -> tuple[str, list[int]]:
    """Permutes the input, seen in axes of ``dims``; more than 4 axes come to the front one by one."""
    x, base = call.inputs[0], call.out.name
    result = [dims[n] for n in order] or dims
    if len(dims) <= 4:
        blob = w.view(x, dims)
        if tuple(order) in _ORDERS:
            blob = w.layer("Permute", [blob], w.fresh(base), {0: _ORDERS[tuple(order)]})
        return blob, result
    left, front, blob, own = list(range(len(dims))), 1, "", [0]
    for axis in order:
        place = left.index(axis)
        before = prod(dims[n] for n in left[:place])
        behind = prod(dims[n] for n in left[place + 1 :])
        if place:
            view = [front, before, dims[axis], behind]
            blob = w.reshape(blob, view, w.fresh(base)) if blob else w.view(x, view)
            blob = w.layer("Permute", [blob], w.fresh(base), {0: _ORDERS[(0, 2, 1, 3)]})
            own = [front, dims[axis], before, behind]
        left.remove(axis)
        front *= dims[axis]
    return (blob, own) if blob else (w.view(x, [front]), [front])


def _crop(w: NcnnWriter, blob: str, axes: Sequence[tuple[int, int, int]], base: str) -> str:
    """Cuts out a range of each of some axes: (axis, start, end)."""
    params = {
        ARRAY - 9: [start for _, start, _ in axes],
        ARRAY - 10: [end for _, _, end in axes],
        ARRAY - 11: [axis for axis, *_ in axes],
    }
    return w.layer("Crop", [blob], w.fresh(base), params)


class _Part:
    """The part of a blob that an index picks, cut out axis by axis.

    Args:
        w: the net.
        node: the node that is indexed.
        base: the name of the result.
    """

    def __init__(self, w: NcnnWriter, node: TensorNode, base: str) -> None:
        self.w, self.base, self.sizes = w, base, _sizes(node)
        self.dims = list(w.packed.get(node, w.dims(node)))
        self.blob = w.view(node, self.dims)

    def _around(self, axis: int) -> tuple[int, int]:
        """Returns the number of values before and after an axis."""
        return prod(self.sizes[:axis]), prod(self.sizes[axis + 1 :])

    def _as(self, dims: Sequence[int]) -> None:
        if self.dims != list(dims):
            self.blob, self.dims = self.w.reshape(self.blob, dims, self.w.fresh(self.base)), list(dims)

    def pick(self, axis: int, positions: Sequence[int]) -> None:
        """Keeps some positions of an axis."""
        size = self.sizes[axis]
        if list(positions) == list(range(size)):
            return
        if not len(positions):
            raise ExportError("it picks nothing, and ncnn lacks empty blobs: leave it out")
        steps = set(np.diff(positions))
        step = int(min(steps, default=1))
        if len(steps) <= 1 and step > 1:
            self._stride(axis, positions[0], len(positions), step)
        else:
            self._runs(axis, positions)
        self.sizes[axis] = len(positions)

    def _runs(self, axis: int, positions: Sequence[int]) -> None:
        """Cuts out runs of positions that follow each other, and joins them."""
        runs: list[list[int]] = []
        for position in positions:
            if runs and runs[-1][1] == position:
                runs[-1][1] += 1
            else:
                runs.append([position, position + 1])
        if len(runs) > _MOST_RUNS:
            raise ExportError(
                f"it picks {len(positions)} positions in {len(runs)} runs, and ncnn lacks look-up by "
                "positions: pick slices"
            )
        before, behind = self._around(axis)
        place, own = self._axis(axis)
        if place is None:
            self._as((before, self.sizes[axis], behind))
            place, own = 1, [before, len(positions), behind]
        parts = [_crop(self.w, self.blob, [(place, start, end)], self.base) for start, end in runs]
        own[place] = len(positions)
        self.blob = parts[0] if len(parts) == 1 else self.join(parts, place)
        self.dims = own

    def join(self, parts: Sequence[str], place: int) -> str:
        """Joins blobs along an axis."""
        return self.w.layer("Concat", parts, self.w.fresh(self.base), {0: place})

    def _axis(self, axis: int) -> tuple[int | None, list[int]]:
        """Returns the axis of the blob that is ``axis`` of the node, and the blob's axes; None for none."""
        dropped = len(self.sizes) - len(self.dims)
        if self.sizes[dropped:] == self.dims and self.sizes[:dropped] == [1] * dropped and axis >= dropped:
            return axis - dropped, list(self.dims)
        return None, list(self.dims)

    def _stride(self, axis: int, start: int, count: int, step: int) -> None:
        """Keeps each ``step``-th position: the first ones of groups, and the last one."""
        size, (before, behind) = self.sizes[axis], self._around(axis)
        whole = count if start + count * step <= size else count - 1
        self._as((before, size, behind))
        source, parts = self.blob, []
        if whole:
            part = source
            if (start, whole * step) != (0, size):
                part = _crop(self.w, source, [(1, start, start + whole * step)], self.base)
            part = self.w.reshape(part, (before, whole, step, behind), self.w.fresh(self.base))
            part = _crop(self.w, part, [(2, 0, 1)], self.base)
            parts.append(self.w.reshape(part, (before, whole, behind), self.w.fresh(self.base)))
        if whole < count:
            last = start + whole * step
            parts.append(_crop(self.w, source, [(1, last, last + 1)], self.base))
        self.blob = parts[0] if len(parts) == 1 else self.join(parts, 1)
        self.dims = [before, count, behind]


def _fixed(w: NcnnWriter, value: Any) -> Any:
    """Returns the number or the positions of a part of an index."""
    if isinstance(value, TensorNode):
        value = w.value(value)
        if value is None:
            raise ExportError(
                "its index is computed from values, and ncnn fixes it in the file: use a constant"
            )
    elif hasattr(value, "numpy"):
        value = value.numpy()
    array = np.asarray(value)
    return int(array.reshape(-1)[0]) if array.size == 1 and array.ndim == 0 else array


def _getitem(w: NcnnWriter, call: OpCall) -> None:
    x, index = call.inputs[0], call.attrs["index"]
    table = w.value(x)
    if isinstance(index, TensorNode) and w.value(index) is None and table is not None:
        look_up(w, call, index, table)
        return
    part = _Part(w, x, call.out.name)
    lists = 0
    for item in index_parts(index, len(part.sizes)):
        entry, axis = item.value, item.axis
        if axis is None:
            continue
        positions = _positions(w, entry, part.sizes[axis])
        lists += not isinstance(positions, range)
        if w.samples.holds(x, axis) and not _takes_all(entry, positions, part.sizes[axis]):
            raise ExportError("it picks samples of the batch, which ncnn does not see: use another axis")
        part.pick(axis, positions)
    if lists > 1:
        raise ExportError(
            "its index has several lists of positions, which ncnn cannot express: use one at a time"
        )
    w.put(call.out, part.blob, part.dims)


def _takes_all(entry: Any, positions: Sequence[int], size: int) -> bool:
    """Returns whether a part of an index takes all samples, however many there are."""
    fixed = not isinstance(entry, slice) or not (entry.stop is None or isinstance(entry.stop, TensorNode))
    return not fixed and list(positions) == list(range(size))


def _positions(w: NcnnWriter, entry: Any, size: int) -> Sequence[int]:
    """Returns the positions that a part of an index picks of an axis."""
    if isinstance(entry, slice):
        ends = (None if v is None else _fixed(w, v) for v in (entry.start, entry.stop, entry.step))
        return range(size)[slice(*(None if v is None else int(v) for v in ends))]
    value = _fixed(w, entry)
    if isinstance(value, int):
        return range(size)[value : value + 1 or None]
    if value.dtype == np.bool_ or value.ndim != 1:
        raise ExportError(
            "its index is a mask or a table of positions, which ncnn cannot express: use slices"
        )
    return [int(v) % size for v in value]


def _setitem(w: NcnnWriter, call: OpCall) -> None:
    """Writes ``x[..., 2:5, :7] = value`` axis by axis: the part before, the value, the part after."""
    x, index = call.inputs[0], call.attrs["index"]
    sizes, cuts = _sizes(x), []
    for item in index_parts(index, len(sizes)):
        entry, axis = item.value, item.axis or 0
        size = sizes[axis]
        positions = _positions(w, entry, size) if isinstance(entry, slice) else []
        if w.samples.holds(x, axis) and not _takes_all(entry, positions, size):
            raise ExportError("it writes samples of the batch, which ncnn does not see: use another axis")
        if not isinstance(positions, range) or positions.step != 1:
            raise ExportError(f"ncnn cannot express writing at {index!r}: write at slices without a step")
        if len(positions) < size:
            cuts.append((axis, positions))
    if any(not len(positions) for _, positions in cuts):
        _identity(w, call)
        return
    flat = (prod(sizes),)
    part = [len(dict(cuts).get(axis, range(size))) for axis, size in enumerate(sizes)]
    value = _written(w, call, part)
    blob = _fill(w, call, w.view(x, flat), value, sizes, cuts)
    w.put(call.out, w.reshape(blob, flat, w.fresh(call.out.name)), flat)


def _written(w: NcnnWriter, call: OpCall, sizes: Sequence[int]) -> str:
    """Returns a blob with the value that is written, in as many numbers as it fills."""
    value, name = call.attrs["value"], w.fresh(call.out.name)
    if isinstance(value, TensorNode) and w.value(value) is None:
        own = _sizes(value)
        own = [1] * (len(sizes) - len(own)) + own
        times = [n // o for n, o in zip(sizes, own, strict=True)]
        lead = next((k for k in range(len(own)) if (own[k], times[k]) != (1, 1)), len(own) - 1)
        if all(n == 1 for n in times):
            return w.view(value, (prod(own),))
        blob = w.layer("Tile", [w.view(value, own[lead:])], name, {ARRAY - 2: times[lead:]})
        return w.reshape(blob, (prod(sizes),), w.fresh(call.out.name))
    stored = w.value(value) if isinstance(value, TensorNode) else value
    return w.memory(np.broadcast_to(np.asarray(stored), sizes).astype(np.float32).reshape(-1), name)


def _fill(
    w: NcnnWriter,
    call: OpCall,
    source: str,
    value: str,
    sizes: Sequence[int],
    cuts: Sequence[tuple[int, range]],
) -> str:
    """Writes ``value`` into ``source``, of ``sizes``, within ``cuts``."""
    if not cuts:
        return value
    base, ((axis, cut), *others) = call.out.name, cuts
    before, size, behind = prod(sizes[:axis]), sizes[axis], prod(sizes[axis + 1 :])
    source = w.reshape(source, (before, size, behind), w.fresh(base))
    inside = [len(cut) if n == axis else size for n, size in enumerate(sizes)]
    if others:
        part = _crop(w, source, [(1, cut.start, cut.stop)], base)
        value = _fill(w, call, part, value, inside, others)
    parts = [w.reshape(value, (before, len(cut), behind), w.fresh(base))]
    if cut.start:
        parts.insert(0, _crop(w, source, [(1, 0, cut.start)], base))
    if cut.stop < size:
        parts.append(_crop(w, source, [(1, cut.stop, size)], base))
    return w.layer("Concat", parts, w.fresh(base), {0: 1})


def _split(w: NcnnWriter, call: OpCall) -> None:
    x, rank = call.inputs[0], len(_sizes(call.inputs[0]))
    axis = call.attrs["axis"] % rank
    sizes = [_sizes(n)[axis] for n in call.outputs]
    place = w.place(x, axis)
    if x not in w.packed and all(len(w.dims(n)) == len(w.dims(x)) for n in call.outputs):
        w.slice(w.name(x), [n.name for n in call.outputs], sizes, place)
        w.names.update((n, n.name) for n in call.outputs)
        return
    start = 0
    for node, size in zip(call.outputs, sizes, strict=True):
        part = _Part(w, x, node.name)
        part.pick(axis, range(start, start + size))
        w.put(node, part.blob, part.dims)
        start += size


def _join(w: NcnnWriter, call: OpCall) -> None:
    """Joins parts along an axis; what lies before and after it is one axis each where there are too many."""
    out = _sizes(call.out)
    axis, new = call.attrs["axis"] % len(out), [1] if call.kind == "stack" else []
    shapes = ((n, _sizes(n)) for n in call.attrs["parts"])
    parts = [(n, [*sizes[:axis], *new, *sizes[axis:]]) for n, sizes in shapes]
    if w.samples.holds(call.out, axis):
        raise ExportError("it works along the batch, which ncnn does not see: use another axis")
    dropped = len(out) - len(w.dims(call.out))
    if axis < dropped:
        dropped = 0
    if len(out) - dropped <= 4:
        views = [w.view(n, sizes[dropped:]) for n, sizes in parts]
        blob = w.layer("Concat", views, call.out.name, {0: axis - dropped})
        w.put(call.out, blob, out[dropped:])
        return
    before, behind = prod(out[:axis]), prod(out[axis + 1 :])
    views = [w.view(n, (before, sizes[axis], behind)) for n, sizes in parts]
    blob = w.layer("Concat", views, w.fresh(call.out.name), {0: 1})
    w.put(call.out, blob, (before, out[axis], behind))


def _tiled(w: NcnnWriter, call: OpCall, sizes: Sequence[int], times: Sequence[int]) -> None:
    """Repeats the input, in axes of ``sizes``, some times along each of them."""
    x = call.inputs[0]
    dropped = 0
    while dropped < len(sizes) - 1 and sizes[dropped] == 1 and times[dropped] == 1:
        dropped += 1
    dims, repeats = list(sizes[dropped:]), list(times[dropped:])
    blob = w.view(x, dims)
    if any(n > 1 for n in repeats):
        blob = w.layer("Tile", [blob], w.fresh(call.out.name), {ARRAY - 2: repeats})
    w.put(call.out, blob, [n * t for n, t in zip(dims, repeats, strict=True)])


def _tile(w: NcnnWriter, call: OpCall) -> None:
    """Repeats the input to the shape of the result, whose axes are multiples of the input's."""
    for count in call.attrs.get("reps", ()):
        _fixed(w, count)  # refuses what is computed from values
    out, sizes = _sizes(call.out), _sizes(call.inputs[0])
    sizes = [1] * (len(out) - len(sizes)) + sizes
    times = [o // n for o, n in zip(out, sizes, strict=True)]
    if any(w.samples.holds(call.out, a) for a, n in enumerate(times) if n > 1):
        raise ExportError("it repeats samples of the batch, which ncnn does not see: use another axis")
    _tiled(w, call, sizes, times)


def _repeat(w: NcnnWriter, call: OpCall) -> None:
    """Repeats each value: the axis gets another one of size 1 after it, which is tiled."""
    times, axis, sizes = _fixed(w, call.attrs["repeats"]), call.attrs["axis"], _sizes(call.inputs[0])
    if not isinstance(times, int) or axis is None:
        raise ExportError("ncnn repeats values along one axis, all as often: name the axis and one number")
    axis %= len(sizes)
    if w.samples.holds(call.inputs[0], axis):
        raise ExportError("it repeats samples of the batch, which ncnn does not see: use another axis")
    before, behind = prod(sizes[: axis + 1]), prod(sizes[axis + 1 :])
    _tiled(w, call, [before, 1, behind], [1, times, 1])


def _roll(w: NcnnWriter, call: OpCall) -> None:
    axes = call.attrs["axis"]
    if axes is None:
        raise ExportError("ncnn cannot express rolling the flattened values: name the axes")
    x, part = call.inputs[0], _Part(w, call.inputs[0], call.out.name)
    for shift, axis in zip(call.attrs["shift"], axes, strict=True):
        axis %= len(part.sizes)
        size = part.sizes[axis]
        if w.samples.holds(x, axis):
            raise ExportError("it moves samples of the batch, which ncnn does not see: use another axis")
        cut = -int(_fixed(w, shift)) % size
        part.pick(axis, [*range(cut, size), *range(cut)])
    w.put(call.out, part.blob, part.dims)


def _pad(w: NcnnWriter, call: OpCall) -> None:
    out = _sizes(call.out)
    width = [*call.attrs["width"], *[(0, 0)] * (len(out) - len(call.attrs["width"]))]
    modes = {"constant": 0, "replicate": 1, "reflect": 2}
    mode, dims = modes[call.attrs["mode"]], w.dims(call.out)
    own = width[len(width) - len(dims) :]
    channels = own[-3] if len(own) == 3 else (0, 0)
    elsewhere = [pair for pair in width[: max(len(width) - len(dims), 0)] + own[:-3] if any(pair)]
    if len(dims) > 3 or elsewhere or (any(channels) and mode):
        raise ExportError("ncnn pads the last two axes, and a third one by a number: leave the other axes")
    samples = [a for a, pair in enumerate(width) if any(pair) and w.samples.holds(call.out, a)]
    if samples or w.dims(call.inputs[0]) != tuple(n - sum(pair) for n, pair in zip(dims, own, strict=True)):
        raise ExportError("it pads the batch, which ncnn does not see: use another axis")
    (top, bottom), (left, right) = ((0, 0), *own)[-2:] if len(own) == 1 else own[-2:]
    value = min(max(float(call.attrs["value"]), -_LARGEST), _LARGEST)  # ncnn reads no infinity
    params = {0: top, 1: bottom, 2: left, 3: right, 4: mode, 5: value}
    if any(channels):
        params.update({7: channels[0], 8: channels[1]})
    w.emit("Padding", call, params, everywhere=True)


def _identity(w: NcnnWriter, call: OpCall) -> None:
    x = call.inputs[0]
    own = w.packed.get(x, w.dims(x))
    w.put(call.out, w.view(x, own), own)


MOVES: dict[str, Emitter] = {
    **dict.fromkeys(("reshape", "flatten", "expand_dims", "squeeze"), _reshape),
    **dict.fromkeys(("transpose", "swapaxes"), _transpose),
    **dict.fromkeys(("identity", "dropout"), _identity),
    "getitem": _getitem,
    "setitem": _setitem,
    **dict.fromkeys(("concat", "stack"), _join),
    "split": _split,
    **dict.fromkeys(("broadcast_to", "tile"), _tile),
    "repeat": _repeat,
    "roll": _roll,
    "pad": _pad,
}
