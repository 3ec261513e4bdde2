"""The search for the layers to raise, and its result as a recipe."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from qtrace.calibration.calibrate import calibrate
from qtrace.config import QConfig
from qtrace.config.recipe import as_qconfig
from qtrace.display import Displayed, format_table, progress_bar
from qtrace.graph.flatten import flatten
from qtrace.graph.types import TracedModule
from qtrace.inspection.twin import late_algorithms
from qtrace.preparation.prepare import prepare
from qtrace.preparation.record import fake_quants
from qtrace.sensitivity import searching
from qtrace.sensitivity.layers import RaisableLayer, Raise, patch_text
from qtrace.sensitivity.metrics import DetectionLoss, Metric, Own, choose
from qtrace.sensitivity.searching import Budget, Goal, Step
from qtrace.sensitivity.simulation import Simulation

__all__ = ["MixedPrecision", "mixed_precision"]


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
        steps, before, after = searching.within(self.first, budget, self.how)
        raised = steps[-1].raised
        return replace(self._result(raised, steps, self._reached(raised)), cost=(budget.unit, before, after))

    def reach(self, goal: Goal) -> MixedPrecision:
        """The fewest layers for a goal."""
        target = goal.target(self.in_float)
        order = tuple(filter(self.how.changes, searching.by_noise(self.first)))
        found, ladder = searching.fewest(self.first, order, target)
        raised = found.raised
        left = [layer.name for layer in order if layer.name not in raised]
        while (reached := self._reached(raised)) < target and left:
            raised = (*raised, left.pop(0))
        steps = searching.knee(self.first, raised)
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
