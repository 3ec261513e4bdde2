"""The search for the layers to raise, and its result as a recipe.

The fewest layers to raise for a graph to be good enough, or the best ones within a budget.

Order overrates: layers whose noise is large but harmless come first, and layers that a later one makes
needless stay. So two sets are found, and the smaller one is taken: the layers by their own noise, and those
that gain most on top of those already raised (greedy forward selection), each pruned backwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from qtrace.calibration.calibrate import calibrate
from qtrace.config import QConfig
from qtrace.config.recipe import as_qconfig
from qtrace.display import Displayed, format_table, progress_bar
from qtrace.errors import CalibrationError, ConfigError
from qtrace.graph.flatten import flatten
from qtrace.graph.types import TracedModule
from qtrace.inspection.twin import late_algorithms
from qtrace.preparation.model import fake_quants
from qtrace.preparation.prepare import prepare
from qtrace.sensitivity.layers import RaisableLayer, Raise, patch_text
from qtrace.sensitivity.metrics import DetectionLoss, Metric, Own, choose
from qtrace.sensitivity.simulation import Simulation

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


@dataclass(frozen=True, repr=False)
class MixedPrecision(Displayed):
    """The result of `mixed_precision`.

    Attributes:
        metric: the name of the metric.
        in_float, quantized: the metric with all layers in float, and with all quantized.
        layers: the layers to raise, the one that gains most first.
        how: the bits of raised layers.
        steps: the metric with the first n layers in float, for each n from 0 on.
        reached: the metric of the graph that was prepared and calibrated with the patch.
        qconfig: the config with the layers raised.
        patch: a recipe that imports the original one and raises the layers.
        target: the smallest value of the metric to reach; None with a budget.
        by_noise: the number of layers it takes if they are raised by their own noise; None with a budget.
        cost: with a budget, its unit and the cost before and after; else None.
    """

    metric: str
    in_float: float
    quantized: float
    layers: tuple[RaisableLayer, ...]
    how: Raise
    steps: tuple[Step, ...]
    reached: float
    qconfig: QConfig
    patch: str = ""
    target: float | None = None
    by_noise: int | None = None
    cost: tuple[str, float, float] | None = None

    @property
    def passed(self) -> bool:
        """Whether the target is reached, if there is one."""
        return self.target is None or self.reached >= self.target

    def importing(self, base: str) -> MixedPrecision:
        """Returns a copy whose `patch` imports the recipe ``base``."""
        text = patch_text(base, self.how, self.layers, self.summary().splitlines())
        return replace(self, patch=text)

    def table(self, max_width: int | None = 140) -> str:
        """Returns a table of what each further layer gains and costs."""
        names = ["", *(layer.name for layer in self.layers)]
        rows = [
            (n, name, f"{step.value:.4g}", f"{step.macs:.1%}")
            for n, (name, step) in enumerate(zip(names, self.steps, strict=True))
        ]
        headers = ("raised", "layer", f"{self.metric}, {self.how.simulated()} in float", "MACs not raised")
        return f"{format_table(headers, rows, max_width)}\n\n{self.summary()}"

    def summary(self) -> str:
        """Returns the result in a few lines."""
        lines = [f"{self.metric}: float {self.in_float:.4g}, quantized {self.quantized:.4g}"]
        lines[0] += f", with the patch {self.reached:.4g}"
        if self.target is not None:
            verdict = "reached" if self.passed else "NOT reached"
            lines.append(
                f"target {self.target:.4g} {verdict} by raising {len(self.layers)} layers "
                f"(in the order of their noise alone: {self.by_noise})"
            )
        if self.cost is not None:
            unit, before, after = self.cost
            lines.append(f"{len(self.layers)} layers raised: {before:.4g} -> {after:.4g} {unit}")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Returns the result as plain data."""
        data = {key: getattr(self, key) for key in ("metric", "target", "in_float", "quantized", "reached")}
        data.update({key: getattr(self, key) for key in ("by_noise", "patch", "cost")})
        layers = [layer.name for layer in self.layers]
        return {**data, "raised": layers, "steps": [asdict(step) for step in self.steps]}


def mixed_precision(
    traced: TracedModule,
    qconfig: QConfig | str | Path | None,
    batches: Iterable[Any],
    *,
    goal: Goal | Budget,
    evaluation: Iterable[Any] | None = None,
    metric: str | Metric = "sqnr",
    own: Own | None = None,
    raise_to: str = "float",
    progress: bool = True,
) -> MixedPrecision:
    """Finds the fewest layers to raise for a goal, or the best ones within a budget.

    During the search, the raised part of a layer (its weight, its activations, or both) is in float. The
    result is then prepared and calibrated with its real bits. If it falls short of the goal, the next layers
    by noise are raised, too.

    Args:
        traced: a traced module.
        qconfig: the config, as for ``qtrace.prepare``.
        batches: the batches to calibrate on; the first images show ``prepare`` the ranges.
        goal: the value of the metric to reach, or the largest cost.
        evaluation: the batches to measure on; ``batches`` when None.
        metric, own: as for `analyze`.
        raise_to: ``float``, or bits such as ``a16`` or ``w8a8``.
        progress: whether to show the number of measurements on stderr.

    Raises:
        ConfigError: for a goal or a budget that cannot be, or a `DetectionLoss` with outputs that the graph
            does not have.
        CalibrationError: when no set of layers reaches the goal, or there are no batches.
    """
    base = as_qconfig("onnxruntime" if qconfig is None else qconfig).without_placement()
    calibration = list(batches)
    measured = calibration if evaluation is None else list(evaluation)
    how, chosen = Raise.parse(raise_to), choose(metric, own)
    with progress_bar(desc="sensitivity", unit="measurement", disable=not progress) as bar:
        trial = _Trial(traced, base, how, calibration, measured, chosen, bar.update)
        result = trial.spend(goal) if isinstance(goal, Budget) else trial.reach(goal)
    origin = str(qconfig) if isinstance(qconfig, (str, Path)) else base.name or base.backend
    return result.importing(origin)


class _Trial:
    """One search, from what `mixed_precision` was given."""

    def __init__(
        self,
        traced: TracedModule,
        base: QConfig,
        how: Raise,
        calibration: list[Any],
        measured: list[Any],
        metric: tuple[str, Metric, Own | None],
        ran: Callable[[], object],
    ) -> None:
        self.traced, self.base, self.how = traced, base, how
        self.calibration, self.measured, self.ran = calibration, measured, ran
        self.name, self.compares, self.own = metric
        self.first = self._simulation(base)
        self.in_float = self.first.in_float()

    def spend(self, budget: Budget) -> MixedPrecision:
        """The best layers within a budget."""
        steps, before, after = within(self.first, budget, self.how)
        raised = steps[-1].raised
        return replace(self._result(raised, steps, self._reached(raised)), cost=(budget.unit, before, after))

    def reach(self, goal: Goal) -> MixedPrecision:
        """The fewest layers for a goal."""
        target = goal.target(self.in_float)
        order = tuple(filter(self.how.changes, by_noise(self.first)))
        found, ladder = fewest(self.first, order, target)
        raised = found.raised
        left = [layer.name for layer in order if layer.name not in raised]
        while (reached := self._reached(raised)) < target and left:
            raised = (*raised, left.pop(0))
        steps = knee(self.first, raised)
        return replace(self._result(raised, steps, reached), target=target, by_noise=ladder)

    def _simulation(self, config: QConfig) -> Simulation:
        prepared = prepare(self.traced, config, samples=self.calibration or None, progress=False)
        if isinstance(self.compares, DetectionLoss):
            self.compares.of(prepared)  # what it cannot do is told before the calibration, which may be long
        twin = flatten(prepared) if late_algorithms(config) else None  # before they change weights
        if any(fake_quants(prepared)):  # none where all layers are raised to float
            calibrate(prepared, self.calibration, progress=False)
        sides = self.how.sides()
        return Simulation(
            *(prepared, self.measured, self.compares, self.own, twin, self.traced),
            weights=sides["weights"],
            activations=sides["activations"],
            ran=self.ran,
        )

    def _layers(self, names: Iterable[str]) -> tuple[RaisableLayer, ...]:
        known = {layer.name: layer for layer in self.first.layers}
        return tuple(known[name] for name in names)

    def _reached(self, raised: Iterable[str]) -> float:
        """The metric of a graph that is prepared and calibrated with these layers raised."""
        return self._simulation(self.how.patched(self.base, self._layers(raised))).value()

    def _result(self, raised: Iterable[str], steps: tuple[Step, ...], reached: float) -> MixedPrecision:
        layers = self._layers(raised)
        config = self.how.patched(self.base, layers)
        start = steps[0].value
        return MixedPrecision(self.name, self.in_float, start, layers, self.how, steps, reached, config)
