"""The fewest layers to raise for a graph to be good enough, or the best ones within a budget.

Their order overrates: layers whose noise is large but harmless come first, and layers that a later one makes
needless stay. So two sets are found, and the smaller one is taken: the layers by their own noise, and those
that gain most on top of those already raised (greedy forward selection), each pruned backwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from qtrace.errors import CalibrationError, ConfigError
from qtrace.sensitivity.layers import RaisableLayer
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
    """The value that the quantized graph must reach, given by one of the two attributes.

    Attributes:
        at_least: the smallest value of the metric.
        max_drop: the largest difference below the float graph's value.
    """

    at_least: float | None = None
    max_drop: float | None = None

    def target(self, in_float: float) -> float:
        """Returns the smallest value of the metric.

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
    """The largest cost of the quantized model.

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

    def cost(self, layer: RaisableLayer, bits: tuple[int, int] | None = None) -> float:
        """Returns the cost of a layer, as it is or with (weight, activation) bits."""
        weight, activation = bits or (layer.weight_bits, layer.activation_bits)
        if self.unit == "bytes":
            return layer.parameters * weight / 8
        return float(layer.macs * weight * activation)


def by_noise(simulation: Simulation) -> tuple[RaisableLayer, ...]:
    """Sorts the layers by the output noise that each makes by itself, the noisiest first."""
    noise = {layer.name: simulation.noise(layer) for layer in simulation.layers}
    return tuple(sorted(simulation.layers, key=lambda layer: -noise[layer.name]))


def fewest(simulation: Simulation, order: Sequence[RaisableLayer], target: float) -> tuple[Step, int]:
    """Searches for the fewest layers whose raising reaches a target.

    Args:
        simulation: the graph and the data.
        order: the layers, `by_noise`.
        target: the smallest value of the metric.

    Returns:
        The layers, and how many layers it takes if they are raised only by ``order``.

    Raises:
        CalibrationError: when the target is not reached with every layer raised.
    """
    if simulation.value() >= target:
        return _step(simulation, ()), 0
    names = [layer.name for layer in order]
    prefix = next((n for n in range(1, len(names) + 1) if simulation.value(names[:n]) >= target), None)
    if prefix is None:
        raise CalibrationError(
            f"no set of layers reaches {target:g}: with all of {_sides(simulation)} in float it is "
            f"{simulation.value(names):g}."
        )
    candidates = [_prune(simulation, names[:prefix], target)]
    if len(candidates[0]) > 1:
        greedy = _grow(simulation, names, target, len(candidates[0]) - 1)
        if greedy is not None:
            candidates.insert(0, _prune(simulation, greedy, target))
    return _step(simulation, min(candidates, key=len)), prefix


def within(simulation: Simulation, budget: Budget, how: Raise) -> tuple[tuple[Step, ...], float, float]:
    """Chooses the layers to raise within a budget: those with the most noise for their cost.

    Args:
        simulation: the graph, in its fewest bits.
        budget: the largest cost of all layers together.
        how: the bits of raised layers.

    Returns:
        A step for each number of raised layers from 0 on, the cost of the graph before, and after.

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
    """Measures the first n of the layers ``raised``, for every n from 0 on."""
    return tuple(_step(simulation, tuple(raised[:n])) for n in range(len(raised) + 1))


def _grow(simulation: Simulation, names: Sequence[str], target: float, limit: int) -> list[str] | None:
    """Adds the layer that gains most until the target is reached; None beyond ``limit`` layers."""
    alone = {name: simulation.value([name]) for name in names}
    raised: list[str] = []
    for _ in range(limit):
        left = [name for name in names if name not in raised]
        tried = sorted(left, key=lambda name: -alone[name])[:_TRIED]
        tried += [name for name in left[:2] if name not in tried]
        values = {name: simulation.value([*raised, name]) for name in tried}
        best = max(values, key=lambda name: values[name])
        raised.append(best)
        if values[best] >= target:
            return raised
    return None


def _prune(simulation: Simulation, raised: Sequence[str], target: float) -> tuple[str, ...]:
    """Drops, from the last layer on, each one without which the target is still reached."""
    remaining = list(raised)
    for name in reversed(raised):
        fewer = [other for other in remaining if other != name]
        if simulation.value(fewer) >= target:
            remaining = fewer
    return tuple(remaining)


def _step(simulation: Simulation, raised: tuple[str, ...]) -> Step:
    total = sum(layer.macs for layer in simulation.layers)
    staying = sum(layer.macs for layer in simulation.layers if layer.name not in raised)
    return Step(raised, simulation.value(raised), staying / total if total else 1.0)


def _sides(simulation: Simulation) -> str:
    """Names what raising layers puts in float."""
    if simulation.weights and simulation.activations:
        return "them"
    return "their weights" if simulation.weights else "their activations"
