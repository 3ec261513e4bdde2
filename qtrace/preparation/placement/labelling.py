"""The placement of a graph as a problem, and its labellings: the cheapest by a minimum cut, and the frontier.

An op costs its time in the form that its label says. A tensor that an integer op writes and float ops read is
dequantized for each of these. One that a float op writes and integer ops read is quantized once. Changes of
layout cost time where kernels order a tensor differently, and each rounded tensor and weight adds noise at
the outputs. All these costs are unary or of the form "this is integer and that is float". So the energy is
submodular, and a minimum cut of a graph finds its exact minimum for any network (Kolmogorov and Zabih, What
Energy Functions Can Be Minimized via Graph Cuts?, TPAMI 2004).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

# The placement of a graph as a problem: the costs of every op and tensor in float and on integers.


@dataclass(frozen=True)
class Unit:
    """An op, with what the runtime computes in the same kernel.

    Attributes:
        name: name of the op.
        float_seconds: its time between floats.
        integer_seconds: its time on integers; None if the runtime lacks such a kernel.
        noise: noise power at the outputs that rounding its weight, or values inside of it, adds, relative to
            the outputs' power.
        label: True or False if the config decides, None to choose.
        float_result: whether the integer kernel can write floats.
        noise_weight: the factor of its noise and of its result's: 0 if only time counts.
    """

    name: str
    float_seconds: float
    integer_seconds: float | None
    noise: float = 0.0
    label: bool | None = None
    float_result: bool = False
    noise_weight: float = 1.0

    @property
    def fixed(self) -> bool | None:
        """The label that is certain; None to choose."""
        return False if self.integer_seconds is None else self.label


@dataclass(frozen=True)
class Layouts:
    """The layouts of a tensor, which float and integer kernels order differently, and the time of changes.

    Float kernels write and read the plain layout or blocks of channels, integer kernels write and read the
    channels last. What rounds or dequantizes works on the plain layout.

    Attributes:
        blocked: whether the producer writes blocks in float.
        block_readers: names of the readers that read blocks in float.
        reorder_seconds: the time of a change between the plain layout and blocks, in float.
        transpose_seconds: the time of a change between the plain layout and channels last, on integers.
    """

    blocked: bool = False
    block_readers: frozenset[str] = frozenset()
    reorder_seconds: float = 0.0
    transpose_seconds: float = 0.0


@dataclass(frozen=True)
class Tensor:
    """A value, with all that only move it.

    Attributes:
        name: name of the value's node.
        producer: name of the unit that writes it; "" for an input of the graph.
        readers: names of the units that read it.
        quantize_seconds: the time to quantize it.
        dequantize_seconds: the time to dequantize it for one reader; onnxruntime does so for each of them.
        noise: noise power at the outputs if it is rounded, relative to the outputs' power.
        leaves: whether it is an output of the graph, which is float.
        layouts: its layouts.
        double_readers: names of the readers that read it twice in float, and dequantize it twice.
    """

    name: str
    producer: str
    readers: tuple[str, ...]
    quantize_seconds: float
    dequantize_seconds: float
    noise: float = 0.0
    leaves: bool = False
    layouts: Layouts = Layouts()
    double_readers: frozenset[str] = frozenset()

    def seconds_on_integers(self, labels: Mapping[str, bool]) -> float:
        """Returns the time of dequantizing it and changing its layout, if its producer is integer."""
        floats = [name for name in self.readers if not labels[name]]
        if not floats and not self.leaves:
            return 0.0
        copies = len(floats) + len(self.double_readers.intersection(floats)) + self.leaves
        reordered = not self.layouts.block_readers.isdisjoint(floats)
        return (
            copies * self.dequantize_seconds
            + self.layouts.transpose_seconds
            + reordered * self.layouts.reorder_seconds
        )

    def seconds_in_float(self, labels: Mapping[str, bool]) -> float:
        """Returns the time of quantizing it and changing its layout, if its producer is float."""
        floats = [name for name in self.readers if not labels[name]]
        quantized = len(floats) < len(self.readers)
        if self.layouts.blocked:
            reordered = quantized or self.leaves or not self.layouts.block_readers.issuperset(floats)
        else:
            reordered = not self.layouts.block_readers.isdisjoint(floats)
        return (
            quantized * (self.quantize_seconds + self.layouts.transpose_seconds)
            + reordered * self.layouts.reorder_seconds
        )


@dataclass(frozen=True)
class Problem:
    """The units and tensors of a graph.

    Attributes:
        units: the units.
        tensors: the tensors.
        sources: name of a value that was only moved -> the name of the tensor that it came from.
    """

    units: tuple[Unit, ...]
    tensors: tuple[Tensor, ...]
    sources: Mapping[str, str] = field(default_factory=dict)

    def within(self, labels: Mapping[str, bool]) -> Problem:
        """Returns the same with everything in float that ``labels`` leave in float."""
        units = (unit if labels[unit.name] else replace(unit, label=False) for unit in self.units)
        return replace(self, units=tuple(units))

    def with_noise(self, values: Mapping[str, float], weights: Mapping[str, float]) -> Problem:
        """Returns the same units and tensors with noise.

        Args:
            values: name of a value -> noise power at the outputs if it is rounded; 0 if it is absent.
            weights: name of a unit -> noise power if its weight is rounded; 0 if it is absent.
        """
        noise: dict[str, float] = {}
        for name, power in values.items():
            source = self.sources.get(name, name)
            noise[source] = noise.get(source, 0.0) + power
        units = (replace(unit, noise=weights.get(unit.name, 0.0)) for unit in self.units)
        tensors = (replace(tensor, noise=noise.get(tensor.name, 0.0)) for tensor in self.tensors)
        return replace(self, units=tuple(units), tensors=tuple(tensors))


@dataclass(frozen=True)
class Energy:
    """The cost of a labelling.

    Attributes:
        seconds: the predicted time.
        noise: noise power at the outputs, relative to their power.
        weighted_noise: the same with the factors of the units.
    """

    seconds: float
    noise: float
    weighted_noise: float

    def total(self, weight: float) -> float:
        """Returns the time plus ``weight`` times the noise."""
        return self.seconds + weight * self.weighted_noise


def evaluate(problem: Problem, labels: Mapping[str, bool]) -> Energy:
    """Adds up the costs of ``labels``.

    A kernel that can write floats does so where that costs less.
    """
    seconds, noises, weighted = 0.0, [], []
    units = {unit.name: unit for unit in problem.units}
    for unit in problem.units:
        seconds += _seconds(unit, labels[unit.name])
        if labels[unit.name]:
            noises.append(unit.noise)
            weighted.append(unit.noise * unit.noise_weight)
    for tensor in problem.tensors:
        producer = units.get(tensor.producer)
        written = producer is not None and labels[producer.name]
        in_float, on_integers = tensor.seconds_in_float(labels), tensor.seconds_on_integers(labels)
        if producer is not None and written and producer.float_result and in_float < on_integers:
            written = False
        seconds += on_integers if written else in_float
        if written or any(labels[name] for name in tensor.readers):
            noises.append(tensor.noise)
            weighted.append(tensor.noise * (1.0 if producer is None else producer.noise_weight))
    return Energy(seconds, math.fsum(noises), math.fsum(weighted))


def find_float_results(problem: Problem, labels: Mapping[str, bool]) -> set[str]:
    """Returns the integer units that write floats, since no reader gains by integers."""
    units = {unit.name: unit for unit in problem.units if unit.float_result and labels[unit.name]}
    return {
        tensor.producer
        for tensor in problem.tensors
        if tensor.producer in units and not any(labels[name] for name in tensor.readers)
    }


class Neighbourhoods:
    """The parts of a problem that the label of one unit concerns.

    Args:
        problem: the whole problem.
    """

    def __init__(self, problem: Problem) -> None:
        units = {unit.name: unit for unit in problem.units}
        tensors: dict[str, list[Tensor]] = {name: [] for name in units}
        for tensor in problem.tensors:
            for name in dict.fromkeys((tensor.producer, *tensor.readers)):
                if name:
                    tensors[name].append(tensor)
        self._parts = {name: _part(units, name, touching) for name, touching in tensors.items()}

    def flip(self, labels: Mapping[str, bool], name: str) -> Energy:
        """Returns what the other label of the unit ``name`` would add, all else as it is."""
        part = self._parts[name]
        near = {unit.name: labels[unit.name] for unit in part.units}
        now, other = evaluate(part, near), evaluate(part, {**near, name: not labels[name]})
        return Energy(
            other.seconds - now.seconds, other.noise - now.noise, other.weighted_noise - now.weighted_noise
        )


def _part(units: Mapping[str, Unit], name: str, tensors: Sequence[Tensor]) -> Problem:
    """Returns the problem of the unit ``name`` and of the units that share a tensor with it."""
    near = {name: None, **{n: None for t in tensors for n in (t.producer, *t.readers) if n}}
    return Problem(tuple(units[n] for n in near), tuple(tensors))


def _seconds(unit: Unit, integer: bool) -> float:
    if not integer:
        return unit.float_seconds
    return math.inf if unit.integer_seconds is None else unit.integer_seconds


# Labels each op of a graph "integer" or "float" so that time plus weighted noise is smallest: a minimum
# cut.

# Capacity of an arc that no minimum cut takes, in scipy's int32: two of them, and all finite costs, fit.
_UNBOUNDED = 1 << (np.iinfo(np.int32).bits - 2)
_RESOLUTION = _UNBOUNDED // 4  # the sum of all finite costs in the integers of scipy's maximum flow


def minimize(problem: Problem, weight: float) -> dict[str, bool]:
    """Returns the labels with the least time plus ``weight`` times noise: unit -> whether it is integer.

    Exact up to a part in 10^8 of the sum of all costs. Of labellings that cost the same, one with the fewest
    integer ops is chosen.
    """
    return Cuts(problem).minimize(weight)


class Cuts:
    """The network whose minimum cut is the labelling of a problem: nodes on the source's side are integer.

    An arc from p to q with capacity c adds c to a labelling in which p is integer and q is not. The network
    is built once for all weights of the noise.
    """

    def __init__(self, problem: Problem) -> None:
        self._indices: dict[str, int] = {}
        self._arcs: dict[tuple[int, int], float] = {}
        self._noises: dict[tuple[int, int], tuple[float, float]] = {}  # arc -> factor and noise
        self._source, self._sink = self._index("\0source"), self._index("\0sink")
        self._names = [unit.name for unit in problem.units]
        units = {unit.name: unit for unit in problem.units}
        for unit in problem.units:
            self._add_unit(unit)
        for tensor in problem.tensors:
            self._add_tensor(tensor, units.get(tensor.producer))

    def minimize(self, weight: float) -> dict[str, bool]:
        """Returns the labels with the least time plus ``weight`` times noise; see `minimize`."""
        source_side = self._solve(weight)
        return {name: source_side[self._index(name)] for name in self._names}

    def _index(self, name: str) -> int:
        """Returns the number of the node ``name``, which is added if it is new."""
        return self._indices.setdefault(name, len(self._indices))

    def _add_unit(self, unit: Unit) -> None:
        """Adds the label of ``unit`` and its costs."""
        node = self._index(unit.name)
        if unit.fixed is not None:
            self._force(node, unit.fixed)
            return
        self._add(self._source, node, unit.float_seconds)
        self._add(node, self._sink, unit.integer_seconds or 0.0)
        self._noises[node, self._sink] = unit.noise_weight, unit.noise

    def _add_tensor(self, tensor: Tensor, producer: Unit | None) -> None:
        """Adds the costs of quantizing, dequantizing, moving and rounding ``tensor``."""
        written, read, rounded = (self._index(f"{tensor.name}\0{role}") for role in range(3))
        if producer is None:
            self._force(written, False)
        else:
            unit = self._index(producer.name)
            self._add(written, unit, math.inf)
            if not producer.float_result:
                self._add(unit, written, math.inf)
        for name in tensor.readers:
            reader = self._index(name)
            self._add(reader, read, math.inf)  # read: some reader is integer
            self._add(written, reader, tensor.dequantize_seconds * (1 + (name in tensor.double_readers)))
        if tensor.leaves:
            self._add(written, self._sink, tensor.dequantize_seconds)
        self._add(read, written, tensor.quantize_seconds)
        self._add_layouts(tensor, written, read)
        self._add(written, rounded, math.inf)
        self._add(read, rounded, math.inf)
        factor = 1.0 if producer is None else producer.noise_weight
        self._noises[rounded, self._sink] = factor, tensor.noise

    def _add_layouts(self, tensor: Tensor, written: int, read: int) -> None:
        """Adds the costs of changes of layout."""
        layouts = tensor.layouts
        reorder, transpose = layouts.reorder_seconds, layouts.transpose_seconds
        self._add(read, written, transpose)
        if tensor.leaves:
            self._add(written, self._sink, transpose)
        elif transpose:
            self._add(written, self._all_integer(tensor, "read on integers", tensor.readers), transpose)
        if not reorder:
            return
        in_blocks = self._all_integer(tensor, "blocks", layouts.block_readers)
        if not layouts.blocked:
            self._add(self._source, in_blocks, reorder)
            return
        self._add(written, in_blocks, reorder)
        if tensor.leaves or not layouts.block_readers.issuperset(tensor.readers):
            self._add(self._source, written, reorder)
        else:
            self._add(read, written, reorder)

    def _all_integer(self, tensor: Tensor, role: str, readers: Iterable[str]) -> int:
        """Returns a node that is integer only if all of ``readers`` are."""
        node = self._index(f"{tensor.name}\0{role}")
        for name in readers:
            self._add(node, self._index(name), math.inf)
        return node

    def _force(self, node: int, integer: bool) -> None:
        self._add(*((self._source, node) if integer else (node, self._sink)), math.inf)

    def _add(self, start: int, end: int, cost: float) -> None:
        if cost > 0:
            self._arcs[start, end] = self._arcs.get((start, end), 0.0) + cost

    def _solve(self, weight: float) -> Sequence[bool]:
        """Returns for each node whether it is on the source's side of a minimum cut."""
        from scipy.sparse import csr_matrix  # here: scipy loads slowly
        from scipy.sparse.csgraph import breadth_first_order, maximum_flow

        arcs = dict(self._arcs)
        for arc, (factor, noise) in self._noises.items():
            if (cost := weight * factor * noise) > 0:
                arcs[arc] = arcs.get(arc, 0.0) + cost
        total = math.fsum(cost for cost in arcs.values() if cost < math.inf)
        scale = _RESOLUTION / total if total > 0 else 0.0
        capacities = [
            min(_UNBOUNDED, math.ceil(cost * scale)) if cost < math.inf else _UNBOUNDED
            for cost in arcs.values()
        ]
        starts, ends = np.array(list(arcs), np.int32).reshape(-1, 2).T
        shape = (len(self._indices),) * 2
        network = csr_matrix((np.array(capacities, np.int32), (starts, ends)), shape)
        flow = maximum_flow(network, self._source, self._sink).flow
        residual = network - flow
        residual.data = (residual.data > 0).astype(np.int32)
        residual.eliminate_zeros()
        reached = breadth_first_order(residual, self._source, return_predecessors=False)
        return np.isin(np.arange(len(self._indices)), reached).tolist()


# The labellings between the fastest and the most accurate one, and the choice among them.

# Weights of the noise, in units of the float time: from "time alone" to "noise alone".
_WEIGHTS = tuple(10.0 ** (exponent / 3) for exponent in range(-18, 19))
# One dB less noise at the outputs is worth this share of the time.
_PRICE_OF_A_DB = 0.04
# Noise of this power, relative to the outputs' (-25 dB), seldom changes a prediction: less is worth little.
_NEGLIGIBLE_NOISE = 3e-3
WORTHLESS_DB = 10.0
"""Below this SQNR the values of an output tell next to nothing: noise is more than 10 % of the signal."""
LEAST_GAIN = 1.05
"""A file that gains less by its integers is float: runs of one file differ by as much."""


@dataclass(frozen=True)
class Point:
    """One labelling of a graph.

    Attributes:
        labels: unit -> whether it runs on integers.
        energy: its time and noise.
    """

    labels: Mapping[str, bool]
    energy: Energy


def find_frontier(problem: Problem) -> list[Point]:
    """Returns the best labellings for many weights of the noise: each faster than the next, and noisier."""
    seconds = in_float(problem).energy.seconds
    points: dict[tuple[bool, ...], Point] = {}
    for labels in _minimize_for_all(problem, [factor * seconds for factor in _WEIGHTS]):
        points.setdefault(tuple(labels.values()), Point(labels, evaluate(problem, labels)))
    ordered = sorted(points.values(), key=lambda p: (p.energy.seconds, p.energy.noise))
    frontier: list[Point] = []
    for point in ordered:
        if not frontier or point.energy.noise < frontier[-1].energy.noise:
            frontier.append(point)
    return frontier


def _minimize_for_all(problem: Problem, weights: Sequence[float]) -> list[dict[str, bool]]:
    """Returns the different best labels for the weights, which ascend, of the noise.

    Time plus weighted noise of a labelling is linear in the weight. What is best at two weights is best
    between them, too, so that a minimum cut serves all weights between two with the same one.
    """
    cuts = Cuts(problem)
    labels = {index: cuts.minimize(weights[index]) for index in (0, len(weights) - 1)}
    waiting = [(0, len(weights) - 1)]
    while waiting:
        start, stop = waiting.pop()
        if stop - start < 2 or labels[start] == labels[stop]:
            continue
        middle = (start + stop) // 2
        labels[middle] = cuts.minimize(weights[middle])
        waiting += [(start, middle), (middle, stop)]
    return [labels[index] for index in sorted(labels)]


def in_float(problem: Problem) -> Point:
    """Returns the labelling with every op in float that the config does not place on integers itself."""
    labels = {unit.name: bool(unit.fixed) for unit in problem.units}
    return Point(labels, evaluate(problem, labels))


def gains(problem: Problem, point: Point) -> bool:
    """Returns whether a labelling is predicted to gain enough time for its noise to be looked at."""
    return point.energy.seconds * LEAST_GAIN <= in_float(problem).energy.seconds


def choose_fastest(problem: Problem) -> Point:
    """Returns the labelling with the least time, whatever its noise; float if that gains too little."""
    labels = minimize(problem, 0.0)
    point = Point(labels, evaluate(problem, labels))
    return point if gains(problem, point) else in_float(problem)


def choose_balanced(problem: Problem, most_noise: float) -> Point | None:
    """Returns the labelling at which one more dB would cost more time than it is worth.

    It minimizes the logarithm of the time plus a price for each dB of noise. The best point of the frontier
    is improved by single changes: cuts find only the points of the frontier's convex hull, which leaves gaps.

    Args:
        problem: the units and tensors, with noise.
        most_noise: the noise power that it may have.

    Returns:
        The labelling; None if none that is quiet enough gains time.
    """

    def fits(point: Point) -> bool:
        return point.energy.noise <= most_noise and gains(problem, point)

    points = [point for point in find_frontier(problem) if fits(point)]
    if not points:
        return None
    best = min(points, key=lambda point: _cost(point.energy))
    refined = _refine(problem, best)
    return refined if fits(refined) else best


def _refine(problem: Problem, point: Point) -> Point:
    """Changes one label after the other, the best first, as long as that improves."""
    neighbourhoods = Neighbourhoods(problem)
    free = [unit.name for unit in problem.units if unit.fixed is None]
    labels, energy = dict(point.labels), point.energy
    while True:  # each step improves
        costs = {name: _cost(_add(energy, neighbourhoods.flip(labels, name))) for name in free}
        best = min(costs, key=costs.__getitem__, default="")
        if not best or costs[best] >= _cost(energy) - 1e-9:
            break
        energy = _add(energy, neighbourhoods.flip(labels, best))
        labels[best] = not labels[best]
    return Point(labels, evaluate(problem, labels))


def _add(energy: Energy, change: Energy) -> Energy:
    return Energy(
        energy.seconds + change.seconds,
        energy.noise + change.noise,
        energy.weighted_noise + change.weighted_noise,
    )


def _cost(energy: Energy) -> float:
    return price(energy.seconds, energy.weighted_noise)


def price(seconds: float, noise: float) -> float:
    """Returns the price of a labelling: the logarithm of its time, and 4 % of it for each dB of noise.

    Args:
        seconds: its time.
        noise: the noise power at the outputs, relative to theirs; what is 25 dB below counts for little.
    """
    decibels = 10 * math.log10(max(noise, 0.0) + _NEGLIGIBLE_NOISE)
    return math.log(max(seconds, 1e-12)) + _PRICE_OF_A_DB * decibels
