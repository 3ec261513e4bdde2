"""The placement of a graph as a problem: the costs of every op and tensor in float and on integers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

__all__ = [
    "Energy",
    "Layouts",
    "Neighbourhoods",
    "Problem",
    "Tensor",
    "Unit",
    "evaluate",
    "find_float_results",
]


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
