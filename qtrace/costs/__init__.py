"""Cost tables: the seconds that an op takes in a runtime, by its shapes and its form, from measured points.

A table holds what ``python -m benchmarks.kernels`` measured on one processor. Its times compare forms of one
op, and predict the time of a whole network before it is exported.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from qtrace.errors import ConfigError

# Families: ops whose time grows with the same coordinates, and times between measured points.

FLOAT, INTEGER, LOOKUP = "float", "integer", "lookup"
FORMS = (FLOAT, INTEGER, LOOKUP)
"""Float kernel, integer kernel, look-up table on integers."""
PLAIN_MAX_POOL = "max_pool2d, plain"
"""The kind of max pooling on integers in the plain layout, which has a slow kernel in onnxruntime."""

Shape = tuple[int, ...]


@dataclass(frozen=True)
class OpShape:
    """What the time of an op depends on.

    Attributes:
        kind: the kind of the op, as in ``qtrace.ops``, or ``quantize``, ``dequantize``, ``reorder`` (a change
            of layout: of floats in the form `FLOAT`, of integers in `INTEGER`) or ``interpolate, bilinear``.
        inputs: the shapes of the data operands.
        outputs: the shapes of the outputs.
        weight: the shape of the stored weight in MegEngine's layout, of a pooling the sizes of its window; ()
            without one.
        stride: the steps of the window; () without one.
        groups: the number of groups of a convolution.
        stored: whether the second operand is a stored constant.
    """

    kind: str
    inputs: tuple[Shape, ...]
    outputs: tuple[Shape, ...]
    weight: Shape = ()
    stride: Shape = ()
    groups: int = 1
    stored: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields without those that have their defaults, for JSON."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {f.name: values[f.name] for f in fields(self) if values[f.name] != f.default}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> OpShape:
        """Reads what `to_dict` wrote.

        Raises:
            ValueError: when a field has another type.
            KeyError: when a field is missing.
        """
        return cls(
            kind=_checked(data["kind"], str),
            inputs=_shapes(data["inputs"]),
            outputs=_shapes(data["outputs"]),
            weight=_shape(data.get("weight", [])),
            stride=_shape(data.get("stride", [])),
            groups=_checked(data.get("groups", 1), int),
            stored=_checked(data.get("stored", False), bool),
        )


def numel(shape: Shape) -> int:
    """Returns the number of elements of a tensor."""
    return math.prod(shape)


def _shapes(value: Any) -> tuple[Shape, ...]:
    return tuple(_shape(shape) for shape in _checked(value, list))


def _shape(value: Any) -> Shape:
    sizes = [_checked(size, int) for size in _checked(value, list)]
    if any(size < 0 for size in sizes):
        raise ValueError("a negative size")
    return tuple(sizes)


def _checked(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise ValueError(f"{value!r} in place of a value of type {kind.__name__}")
    return value


Point = tuple[float, ...]


def lower_envelope(points: Mapping[Point, float]) -> dict[Point, float]:
    """Lowers each time to the shortest one among the points that are at least as large in every coordinate.

    Other work on a machine only adds time, so a smaller op that took longer than a larger one was disturbed.
    Times that grow with every coordinate are returned as they are.
    """
    places = np.array(list(points), dtype=float)
    times = np.array(list(points.values()))
    return {
        point: float(times[(places >= place).all(axis=1)].min())
        for point, place in zip(points, places, strict=True)
    }


class MonotoneGrid:
    """Seconds over positive coordinates, such as channels and pixels.

    The coordinates of the points make a grid. Combinations that were not measured are filled from the nearest
    point and the mean slopes. Between the points of the grid, the logarithm of the time is linear in the
    logarithm of each coordinate. Below the smallest coordinate the time stays constant, since the fixed cost
    of a kernel dominates there. Above the largest one it is proportional to the coordinate.

    Args:
        points: coordinates -> seconds, at least one. Times that shrink are lowered by `lower_envelope`.
    """

    def __init__(self, points: Mapping[Point, float]) -> None:
        logs = {
            tuple(float(np.log(c)) for c in point): float(np.log(time))
            for point, time in lower_envelope(points).items()
        }
        size = len(next(iter(logs)))
        self._axes = [sorted({point[axis] for point in logs}) for axis in range(size)]
        self._values = _fill(logs, self._axes)

    def seconds(self, at: Sequence[float]) -> float:
        """Returns the time at a point."""
        beyond = 0.0
        cells: list[tuple[tuple[float, float], ...]] = []
        for axis, value in zip(self._axes, np.log(np.asarray(at, float)), strict=True):
            beyond += max(0.0, float(value) - axis[-1])
            cells.append(_cell(axis, min(max(float(value), axis[0]), axis[-1])))
        total = 0.0
        for corner in itertools.product(*cells):
            weight = float(np.prod([share for _, share in corner]))
            if weight:
                total += weight * self._values[tuple(place for place, _ in corner)]
        return float(np.exp(total + beyond))


def _cell(axis: Sequence[float], value: float) -> tuple[tuple[float, float], ...]:
    """Returns the neighbours of a value on an axis, with their shares."""
    if len(axis) == 1:
        return ((axis[0], 1.0),)
    upper = min(max(bisect_right(axis, value), 1), len(axis) - 1)
    low, high = axis[upper - 1], axis[upper]
    share = (value - low) / (high - low)
    return ((low, 1.0 - share), (high, share))


def _fill(points: dict[Point, float], axes: Sequence[Sequence[float]]) -> dict[Point, float]:
    """Completes a grid: each value that is added keeps the grid growing along every axis."""
    slopes = np.array([_slope(points, axis) for axis in range(len(axes))])
    places, values = [np.array(p) for p in points], list(points.values())
    measured = len(places)
    filled = dict(points)
    for node in itertools.product(*axes):
        if node in filled:
            continue
        place = np.array(node)
        known, times = np.array(places), np.array(values)
        nearest = int(np.abs(known[:measured] - place).sum(axis=1).argmin())
        estimate = times[nearest] + float(((place - known[nearest]) * slopes).sum())
        below = times[(known <= place).all(axis=1)]
        above = times[(known >= place).all(axis=1)]
        lowest = below.max() if below.size else -np.inf
        highest = above.min() if above.size else np.inf
        filled[node] = float(min(max(estimate, lowest), highest))
        places.append(place)
        values.append(filled[node])
    return filled


def _slope(points: Mapping[Point, float], axis: int) -> float:
    """Returns the mean growth of the logarithm along an axis, from points that differ only in it."""
    lines: dict[Point, list[tuple[float, float]]] = {}
    for point, value in points.items():
        lines.setdefault((*point[:axis], *point[axis + 1 :]), []).append((point[axis], value))
    rises = [(max(line)[1] - min(line)[1], max(line)[0] - min(line)[0]) for line in lines.values()]
    width = sum(w for _, w in rises)
    return float(np.clip(sum(r for r, _ in rises) / width, 0.0, 1.0)) if width else 1.0


_BLOCK = 16  # channels in a vector register of AVX-512, and in a block of integer kernels
_PAGE = 1024  # floats: addresses that are pages apart share a line of the nearest cache
STEM_CHANNELS = 8  # fewer input channels than this have kernels that read the image as it is
_CONVS, _TRANSPOSED = ("conv1d", "conv2d", "conv3d"), ("conv_transpose2d", "conv_transpose3d")
_ROWS = ("softmax", "logsoftmax", "layer_norm", "rms_norm")
_REDUCTIONS = ("mean", "sum", "max", "min", "adaptive_avg_pool2d", "adaptive_max_pool2d")
_BINARY = (
    "add sub mul div maximum minimum pow floor_div mod less less_equal greater greater_equal equal not_equal"
)

# A kind -> the kind whose kernel computes it in every form.
ALIKE = {
    "conv1d": "conv2d",
    "conv3d": "conv2d",
    "relu6": "clip",
    "hard_sigmoid": "hsigmoid",
    "stack": "concat",
    **dict.fromkeys(("flatten", "expand_dims", "squeeze", "identity", "dropout"), "reshape"),
    **dict.fromkeys(("swapaxes", "channel_shuffle", "space_to_depth", "pixel_shuffle"), "transpose"),
    **dict.fromkeys(("getitem", "gather", "tile", "repeat", "broadcast_to", "roll"), "split"),
    "adaptive_max_pool2d": "max",
}

# A kind -> the kind of another function that takes as long in float.
ALIKE_IN_FLOAT = {
    **dict.fromkeys(("sub", "maximum", "minimum", "scale_and_shift"), "add"),
    **dict.fromkeys(("floor_div", "mod"), "div"),
    **dict.fromkeys(("neg", "abs", "square", "sign", "floor", "ceil"), "relu"),
    **dict.fromkeys(("sqrt", "prelu"), "relu"),
    **dict.fromkeys(("log", "log1p", "expm1", "softplus", "logsigmoid"), "exp"),
    **dict.fromkeys(("sum", "adaptive_avg_pool2d"), "mean"),
    **dict.fromkeys(("max", "min"), "mean"),
    "conv_transpose3d": "conv_transpose2d",
    "logsoftmax": "softmax",
    "gelu_tanh": "gelu",
    "rms_norm": "layer_norm",
}


@dataclass(frozen=True)
class Family:
    """A family and a place in it.

    Attributes:
        name: what the kernels have in common; "" where a kind has one family.
        at: the coordinates of the op, each at least 1.
    """

    name: str
    at: tuple[float, ...]


def families(op: OpShape) -> tuple[Family, ...]:
    """Returns the families that give the time of an op, the most exact one first.

    All families of an op have the same number of coordinates. A convolution whose shapes fit none belongs to
    no family: a graph may say anything of them.
    """
    if op.weight and op.kind in (*_CONVS, *_TRANSPOSED) and not _is_layer(op):
        return ()
    if op.kind in _CONVS and op.weight:
        candidates = _conv(op)
    elif op.kind in _TRANSPOSED and op.weight:
        candidates = _transposed(op)
    elif op.kind in ("linear", "matmul") and op.inputs[0] and op.outputs[0]:
        candidates = _product(op)
    elif op.kind in _BINARY.split():
        candidates = _binary(op)
    elif op.kind in _REDUCTIONS:
        candidates = [Family("", (numel(op.inputs[0]),))]  # elements of the input, which are all read once
    elif op.kind in _ROWS:
        length = op.inputs[0][-1] if op.inputs[0] else 1
        candidates = [Family("", (numel(op.inputs[0]) / max(length, 1), length))]
    elif op.kind.startswith(("max_pool2d", "avg_pool2d")):
        candidates = [Family("", (_elements(op.outputs), numel(op.weight)))]
    elif op.kind == "reorder":
        candidates = _reorder(op)
    elif op.kind in ("concat", "stack"):
        candidates = [Family("", (_elements(op.outputs), len(op.inputs)))]
    else:
        candidates = [Family("", (max(_elements(op.inputs), _elements(op.outputs)),))]
    return tuple(Family(f.name, tuple(max(float(c), 1.0) for c in f.at)) for f in candidates)


def _reorder(op: OpShape) -> list[Family]:
    """Coordinates: elements. Channels that are whole pages apart fall into the same lines of the cache."""
    size = numel(op.outputs[0])
    plane = numel(op.outputs[0][2:])
    plain = Family("", (size,))
    return [Family("whole pages", (size,)), plain] if plane % _PAGE == 0 else [plain]


def _is_layer(op: OpShape) -> bool:
    """Whether the shapes of a convolution have samples, channels and places, and there are groups."""
    return op.groups > 0 and all(len(shape) > 2 for shape in (*op.inputs[:1], *op.outputs[:1], op.weight))


def _area(op: OpShape) -> int:
    """Returns the size of a convolution's kernel, whose axes are those after samples and channels."""
    return numel(op.weight[2 - len(op.outputs[0]) :])


def _elements(shapes: tuple[tuple[int, ...], ...]) -> int:
    return sum(numel(shape) for shape in shapes)


def _blocks(channels: int) -> int:
    """Returns the number of channels with those that fill up the last block."""
    return math.ceil(channels / _BLOCK) * _BLOCK


def _conv(op: OpShape) -> list[Family]:
    """Coordinates: multiplications of one output, output channels, output pixels of all samples."""
    area = _area(op)
    outputs = op.outputs[0][1]
    pixels = numel(op.outputs[0]) // max(outputs, 1)
    inputs = op.inputs[0][1] // op.groups
    strided = "" if max(op.stride, default=1) == 1 else ", strided"
    if op.groups > 1 and inputs == 1:
        return _depthwise(f"depthwise{strided}", area, outputs, pixels)
    if op.groups > 1:
        return [Family("grouped", (inputs * area, outputs, pixels))]
    name = "pointwise" if area == 1 else "3x3" if area <= 9 else "larger"
    if inputs < STEM_CHANNELS:
        stem = Family(f"stem {name}", (inputs * area, _blocks(outputs), pixels))
        return [stem, Family("stem 3x3", stem.at), Family(name, stem.at)]
    if name == "pointwise" and pixels == op.outputs[0][0]:
        name = "vector"  # of one pixel a sample, as in squeeze-and-excitation
        return [
            Family(name, (inputs, outputs, pixels)),
            Family("pointwise", (_blocks(inputs), _blocks(outputs), pixels)),
        ]
    narrow = Family(f"{name}, few outputs", (inputs * area, outputs, pixels))
    fits = inputs % _BLOCK == 0 and outputs % _BLOCK == 0
    padded = Family(name, (_blocks(inputs) * area, _blocks(outputs), pixels))
    odd = Family(f"{name}, odd channels", (inputs * area, outputs, pixels))
    candidates = [padded, Family("3x3", padded.at)] if fits else [odd, padded, Family("3x3", padded.at)]
    return [narrow, *candidates] if outputs < _BLOCK else candidates


def _depthwise(name: str, area: int, channels: int, pixels: int) -> list[Family]:
    """Coordinates: multiplications of one output, channels, output pixels of all samples."""
    padded, exact = (area, _blocks(channels), pixels), (area, channels, pixels)
    candidates = [Family(name, padded), Family("depthwise", padded)]
    if channels % _BLOCK == 0:
        return candidates
    return [Family(f"{name}, odd channels", exact), Family("depthwise, odd channels", exact), *candidates]


def _transposed(op: OpShape) -> list[Family]:
    """Coordinates: input channels, outputs of one input pixel, input pixels of all samples."""
    channels = op.inputs[0][1]
    pixels = numel(op.inputs[0]) // max(channels, 1)
    each = op.outputs[0][1] // op.groups * _area(op)
    return [Family("", (channels // op.groups, each, pixels))]


def _product(op: OpShape) -> list[Family]:
    """Coordinates: length of the products, columns, rows of all samples."""
    length, columns = op.inputs[0][-1], op.outputs[0][-1]
    rows = numel(op.outputs[0]) // max(columns, 1)
    batches = numel(op.outputs[0][:-2]) if op.kind == "matmul" and not op.stored and not op.weight else 1
    name = "batched" if batches > 1 else "computed" if op.kind == "matmul" and not op.stored else ""
    if rows == 1:
        return [Family("vector", (length, columns, 1)), Family("", (length, columns, 1))]
    at = (length, columns, rows)
    return [Family(name, at), Family("computed", at), Family("", at)]


def _binary(op: OpShape) -> list[Family]:
    """Coordinates: elements of the output. A stored operand has kernels of its own in integers."""
    size = numel(op.outputs[0])
    sizes = [numel(shape) for shape in op.inputs]
    smallest = min(sizes) if len(sizes) > 1 else 1
    name = "same" if smallest == size and size > 1 else "scalar" if smallest == 1 else "broadcast"
    if op.stored:
        return [Family(f"stored {n}", (size,)) for n in (name, "scalar", "broadcast")]
    return [Family(n, (size,)) for n in (name, "broadcast", "same")]


# The instruction sets of this processor, by which a packaged table of costs is chosen.

_CPUINFO = Path("/proc/cpuinfo")
_FLAGS = ("avx2", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8", "asimd", "asimddp", "i8mm")


def processor_facts() -> Mapping[str, str]:
    """Returns what the system says of the first processor; nothing where it does not say it in a file."""
    lines = _CPUINFO.read_text(encoding="utf-8").splitlines() if _CPUINFO.exists() else []
    pairs = [line.partition(":") for line in lines]
    return {name.strip(): value.strip() for name, _, value in reversed(pairs)}


def processor_flags() -> tuple[str, ...]:
    """Returns the instruction sets that integer and float kernels use."""
    facts = processor_facts()
    flags = (facts.get("flags") or facts.get("Features") or "").split()
    return tuple(flag for flag in _FLAGS if flag in flags)


# Times of ops in one runtime on one processor: measured points, and what is predicted from them.

SCHEMA = "qtrace-costs/1"
_FOLDER = Path(__file__).parent / "tables"


@dataclass(frozen=True)
class Machine:
    """What times depend on besides the op.

    Attributes:
        runtime: the name of the runtime.
        version: the version of the runtime.
        processor: the name of the processor.
        flags: the instruction sets that integer and float kernels use, such as ``avx512_vnni``.
        threads: the number of threads.
        date: the day of the measurement.
    """

    runtime: str
    version: str
    processor: str
    flags: tuple[str, ...]
    threads: int
    date: str

    def runs_like(self, other: Machine) -> bool:
        """Returns whether kernels of the same runtime run on processors of the same name."""
        mine, others = ((m.runtime, m.version, m.processor, m.flags, m.threads) for m in (self, other))
        return mine == others


@dataclass(frozen=True)
class Measurement:
    """The time of one op in one form."""

    op: OpShape
    form: str
    seconds: float


class CostTable:
    """The times of ops in a runtime, by kind, shape and form.

    Args:
        machine: where the times were measured.
        measurements: the measured points.
        per_run: the seconds that a run takes besides its ops.
    """

    def __init__(self, machine: Machine, measurements: Iterable[Measurement], per_run: float = 0.0) -> None:
        self.machine = machine
        self.measurements = tuple(measurements)
        self.per_run = per_run

    @classmethod
    def known(cls) -> tuple[str, ...]:
        """Returns the runtimes that have a packaged table."""
        return tuple(sorted({path.stem.partition(".")[0] for path in _FOLDER.glob("*.json")}))

    @classmethod
    def load(cls, runtime: str) -> CostTable:
        """Returns the packaged table of a runtime, on every processor the same one.

        Raises:
            ConfigError: when the runtime lacks a packaged table.
        """
        if runtime not in cls.known():
            raise ConfigError(
                f"there is no cost table for {runtime!r}; known: {', '.join(cls.known())}. Measure one with "
                f"`python -m benchmarks.kernels --runtime {runtime}` in a checkout."
            )
        return _read_packaged(runtime)

    @classmethod
    def packaged(cls, runtime: str) -> Mapping[str, CostTable]:
        """Returns all packaged tables of a runtime by name: the one of `load`, and other processors'.

        Raises:
            ConfigError: when the runtime lacks a packaged table.
        """
        first = cls.load(runtime)
        others = sorted(path.stem for path in _FOLDER.glob(f"{runtime}.*.json"))
        return {runtime: first, **{name: _read_packaged(name) for name in others}}

    @classmethod
    def nearest(cls, runtime: str, flags: Sequence[str]) -> str:
        """Returns the name of the packaged table of the processor whose instruction sets differ least.

        Args:
            runtime: the runtime.
            flags: the instruction sets of the processor.

        Raises:
            ConfigError: when the runtime lacks a packaged table.
        """
        tables = cls.packaged(runtime)
        return min(tables, key=lambda name: len({*tables[name].machine.flags} ^ {*flags}))

    @classmethod
    def for_machine(cls, here: Machine) -> CostTable:
        """Returns the packaged table of a processor like ``here``, else the table of `load`.

        Raises:
            ConfigError: when the runtime lacks a packaged table.
        """
        tables = tuple(cls.packaged(here.runtime).values())
        alike = [t for t in tables if (t.machine.processor, t.machine.flags) == (here.processor, here.flags)]
        same = [t for t in alike if t.machine.runs_like(here)]
        return (*same, *alike, *tables)[0]

    @classmethod
    def read(cls, path: Path) -> CostTable:
        """Reads a table that `to_json` wrote.

        Raises:
            ConfigError: when the file is missing, damaged or of another kind.
        """
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"the cost table {path} cannot be read: {error.strerror}.") from error
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"the cost table {path} is damaged: {error}; measure it again.") from error
        if not isinstance(data, dict) or data.get("schema") != SCHEMA:
            raise ConfigError(f"{path} is no cost table: its schema is not {SCHEMA!r}.")
        try:
            machine = Machine(**{**data["machine"], "flags": tuple(data["machine"]["flags"])})
            measurements = [_read_measurement(entry) for entry in data["measurements"]]
            return cls(machine, measurements, _positive(data["per_run"], 0.0))
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            reason = f"{type(error).__name__}: {error}"
            raise ConfigError(f"the cost table {path} is damaged ({reason}); measure it again.") from error

    def to_json(self) -> str:
        """Returns the table as a JSON document, one measurement a line."""
        head = {"schema": SCHEMA, "machine": asdict(self.machine), "per_run": self.per_run}
        lines = [
            json.dumps({**m.op.to_dict(), "form": m.form, "seconds": float(f"{m.seconds:.4g}")})
            for m in self.measurements
        ]
        body = ",\n".join(lines)
        return f'{json.dumps(head, indent=1)[:-2]},\n "measurements": [\n{body}\n]}}\n'

    def forms(self, kind: str) -> tuple[str, ...]:
        """Returns the forms that the table knows for a kind, in the order of `FORMS`."""
        return tuple(form for form in FORMS if self._measured_kind(kind, form) is not None)

    def seconds(self, op: OpShape, form: str) -> float | None:
        """Returns the time of an op in a form; None if the table knows nothing of that kind in that form.

        The time is the measured one at measured points. Elsewhere it is interpolated inside the family of
        kernels that computes the op, and grows with every size.
        """
        kind = self._measured_kind(op.kind, form)
        if kind is None:
            return None
        grids = self._grids[kind, form]
        for family in families(replace(op, kind=kind)):
            grid = grids.get((family.name, len(family.at)))
            if grid is not None:
                return grid.seconds(family.at)
        return None

    def _measured_kind(self, kind: str, form: str) -> str | None:
        """Returns the kind whose measured times hold for ``kind``; None without one."""
        names = [kind, ALIKE.get(kind)]
        if form == FLOAT:
            names += [ALIKE_IN_FLOAT.get(name) for name in names if name is not None]
        return next((name for name in names if name is not None and (name, form) in self._grids), None)

    @functools.cached_property
    def _grids(self) -> Mapping[tuple[str, str], Mapping[tuple[str, int], MonotoneGrid]]:
        """(kind, form) -> (family, number of coordinates) -> times over the coordinates."""
        points: dict[tuple[str, str], dict[tuple[str, int], dict[tuple[float, ...], float]]] = {}
        for measurement in self.measurements:
            family = families(measurement.op)[0]
            by_family = points.setdefault((measurement.op.kind, measurement.form), {})
            times = by_family.setdefault((family.name, len(family.at)), {})
            times[family.at] = min(measurement.seconds, times.get(family.at, measurement.seconds))
        return {
            key: {family: MonotoneGrid(times) for family, times in by_family.items()}
            for key, by_family in points.items()
        }


@functools.cache
def _read_packaged(name: str) -> CostTable:
    return CostTable.read(_FOLDER / f"{name}.json")


def _read_measurement(entry: dict[str, Any]) -> Measurement:
    if entry["form"] not in FORMS:
        raise ValueError(f"unknown form {entry['form']!r}")
    op = OpShape.from_dict(entry)
    if not op.inputs or not op.outputs:
        raise ValueError(f"{op.kind} without inputs or outputs")
    if not families(op):
        raise ValueError(f"{op.kind} of shapes that it cannot have")
    return Measurement(op, entry["form"], _positive(entry["seconds"]))


def _positive(value: Any, minimum: float = 1e-12) -> float:
    if type(value) not in (int, float) or not minimum <= value < 1e6:
        raise ValueError(f"{value!r} is no time in seconds")
    return float(value)
