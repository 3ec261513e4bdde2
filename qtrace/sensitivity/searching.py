"""The fewest layers to raise for a graph to be good enough, or the best ones within a budget.

Order alone overrates: layers whose noise is large but harmless come first, and layers that a later one makes
needless stay. So two sets are found, and the smaller one is taken: the layers by their own noise, and those
that gain most on top of those already raised (greedy forward selection), each pruned backwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from qtrace.errors import CalibrationError, ConfigError
from qtrace.sensitivity.layers import Layer
from qtrace.sensitivity.raising import Raise
from qtrace.sensitivity.simulation import Simulation

__all__ = ["Budget", "Goal", "Step", "by_noise", "fewest", "knee", "within"]

# How many candidates are tried on top of what is raised already, by what they gain alone.
_TRIED = 8


@dataclass(frozen=True)
class Step:
    """A set of raised layers, and what it comes to.

    Attributes:
        raised: their names.
        value: the metric.
        macs: the share of MACs that stays quantized.
    """

    raised: tuple[str, ...]
    value: float
    macs: float


@dataclass(frozen=True)
class Goal:
    """What the quantized graph must reach; one of the two.

    Attributes:
        at_least: the least value of the metric.
        max_drop: how much less than the float graph's value it may be.
    """

    at_least: float | None = None
    max_drop: float | None = None

    def target(self, in_float: float) -> float:
        """The least value of the metric.

        Raises:
            ConfigError: when none or both are given, or the float graph's value is infinite.
        """
        if (self.at_least is None) == (self.max_drop is None):
            raise ConfigError("a goal is either at_least or max_drop: give one of them.")
        if self.at_least is not None:
            return self.at_least
        if in_float == float("inf"):
            raise ConfigError("the float graph's own value is infinite: give at_least instead of max_drop.")
        return in_float - (self.max_drop or 0.0)


@dataclass(frozen=True)
class Budget:
    """What the quantized model may cost.

    Attributes:
        unit: ``bytes`` of weights, or ``bops``: MACs times the bits of both factors.
        most: the largest sum over all layers.
    """

    unit: str
    most: float

    def __post_init__(self) -> None:
        if self.unit not in ("bytes", "bops"):
            raise ConfigError(f"unknown unit {self.unit!r} of a budget; known: bytes, bops.")
        if not self.most > 0:
            raise ConfigError(f"a budget of {self.most} {self.unit} leaves nothing: give a number above 0.")

    def cost(self, layer: Layer, bits: tuple[int, int] | None = None) -> float:
        """Of a layer, as it is or with (weight, activation) bits."""
        weight, activation = bits or (layer.weight_bits, layer.activation_bits)
        if self.unit == "bytes":
            return layer.parameters * weight / 8
        return float(layer.macs * weight * activation)


def by_noise(simulation: Simulation) -> tuple[Layer, ...]:
    """The layers by the output noise that each makes alone, the noisiest first."""
    noise = {layer.name: simulation.noise(layer) for layer in simulation.layers}
    return tuple(sorted(simulation.layers, key=lambda layer: -noise[layer.name]))


def fewest(simulation: Simulation, order: Sequence[Layer], target: float) -> tuple[Step, int]:
    """The fewest layers found whose raising reaches a target.

    Args:
        simulation: the graph and the data.
        order: the layers, `by_noise`.
        target: the least value of the metric.

    Returns:
        The set, and how many layers raising by ``order`` alone takes.

    Raises:
        CalibrationError: when the target is not reached with every layer raised.
    """
    if simulation.value() >= target:
        return _step(simulation, ()), 0
    names = [layer.name for layer in order]
    ladder = next((n for n in range(1, len(names) + 1) if simulation.value(names[:n]) >= target), None)
    if ladder is None:
        raise CalibrationError(
            f"no set of layers reaches {target:g}: with all of {_sides(simulation)} in float it is "
            f"{simulation.value(names):g}."
        )
    found = [_pruned(simulation, names[:ladder], target)]
    if len(found[0]) > 1:
        grown = _grown(simulation, names, target, len(found[0]) - 1)
        if grown is not None:
            found.insert(0, _pruned(simulation, grown, target))
    return _step(simulation, min(found, key=len)), ladder


def within(simulation: Simulation, budget: Budget, how: Raise) -> tuple[tuple[Step, ...], float, float]:
    """The layers to raise within a budget: those with the most noise for what raising them costs.

    Args:
        simulation: the graph, in its fewest bits.
        budget: what all layers may cost.
        how: what raised layers become.

    Returns:
        A step for each layer raised, from none on, what the graph costs before, and after.

    Raises:
        ConfigError: when the graph costs more than the budget as it is.
    """
    spent = before = sum(budget.cost(layer) for layer in simulation.layers)
    if spent > budget.most:
        raise ConfigError(
            f"the graph takes {spent:.4g} {budget.unit} without raising a layer, the budget is "
            f"{budget.most:.4g}: start from fewer bits."
        )
    ratio = {}
    for layer in filter(how.changes, simulation.layers):
        price = budget.cost(layer, how.bits(layer)) - budget.cost(layer)
        noise = simulation.noise(layer)
        ratio[layer.name] = (noise / price if price > 0 else float("inf"), price)
    steps, raised = [_step(simulation, ())], []
    for name in sorted(ratio, key=lambda n: -ratio[n][0]):
        if spent + ratio[name][1] <= budget.most:
            spent += ratio[name][1]
            raised.append(name)
            steps.append(_step(simulation, tuple(raised)))
    return tuple(steps), before, spent


def knee(simulation: Simulation, raised: Sequence[str]) -> tuple[Step, ...]:
    """What the first n of some layers come to, for every n from 0 on."""
    return tuple(_step(simulation, tuple(raised[:n])) for n in range(len(raised) + 1))


def _grown(simulation: Simulation, names: Sequence[str], target: float, most: int) -> list[str] | None:
    """Layers that gain most on top of each other; None if it takes more than ``most``."""
    alone = {name: simulation.value([name]) for name in names}
    raised: list[str] = []
    for _ in range(most):
        left = [name for name in names if name not in raised]
        tried = sorted(left, key=lambda name: -alone[name])[:_TRIED]
        tried += [name for name in left[:2] if name not in tried]
        values = {name: simulation.value([*raised, name]) for name in tried}
        best = max(values, key=lambda name: values[name])
        raised.append(best)
        if values[best] >= target:
            return raised
    return None


def _pruned(simulation: Simulation, raised: Sequence[str], target: float) -> tuple[str, ...]:
    """The layers without those that can go again, tried from the last one on."""
    kept = list(raised)
    for name in reversed(raised):
        fewer = [other for other in kept if other != name]
        if simulation.value(fewer) >= target:
            kept = fewer
    return tuple(kept)


def _step(simulation: Simulation, raised: tuple[str, ...]) -> Step:
    total = sum(layer.macs for layer in simulation.layers)
    staying = sum(layer.macs for layer in simulation.layers if layer.name not in raised)
    return Step(raised, simulation.value(raised), staying / total if total else 1.0)


def _sides(simulation: Simulation) -> str:
    """What raising layers puts in float."""
    if simulation.weights and simulation.activations:
        return "them"
    return "their weights" if simulation.weights else "their activations"
