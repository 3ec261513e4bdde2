"""Measures how much each layer, and each group of sites, costs by itself."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from qtrace.display import Displayed, format_table
from qtrace.sensitivity.layers import RaisableLayer
from qtrace.sensitivity.metrics import Parts
from qtrace.sensitivity.simulation import Simulation


@dataclass(frozen=True)
class LayerRow:
    """The cost of quantizing one layer.

    Attributes:
        layer: the layer.
        only: the metric with only this layer quantized, all else in float.
        without: the metric with only this layer in float, all else quantized.
        parts: the losses of each level that make up ``only``, for a `DetectionLoss`; else empty.
    """

    layer: RaisableLayer
    only: float
    without: float
    parts: Parts = ()

    def to_dict(self) -> dict[str, Any]:
        """Returns the row as plain data."""
        data = {"layer": self.layer.name, "op": self.layer.kind, "only": self.only, "without": self.without}
        return {**data, "levels": list(self.parts)} if self.parts else data


@dataclass(frozen=True)
class GroupRow:
    """The cost of rounding the sites of one group: ``only`` is the metric with all else in float."""

    group: str
    only: float


@dataclass(frozen=True, repr=False)
class Ranking(Displayed):
    """The sensitivity of a graph.

    Attributes:
        metric: the name of the metric.
        quantized: the metric with everything quantized.
        layers: one row for each layer, in graph order.
        groups: one row for each group of sites, in graph order; empty if they were not measured.
        parts: the losses of each level with everything quantized, for a `DetectionLoss`; else empty.
        note: what "float" stands for, if that is not the traced network; else "".
    """

    metric: str
    quantized: float
    layers: tuple[LayerRow, ...]
    groups: tuple[GroupRow, ...]
    parts: Parts = ()
    note: str = ""

    def by_cost(self) -> tuple[LayerRow, ...]:
        """Returns the layers, the one that costs most by itself first."""
        return tuple(sorted(self.layers, key=lambda row: row.only))

    def table(self, max_width: int | None = 140) -> str:
        """Returns a text table of the layers, the most sensitive first, then of the groups."""
        losses = _losses(self.parts)
        rows = [
            (
                *(r.layer.name, r.layer.kind, f"{r.only:.4g}"),
                *(f"{sum(level.get(loss, 0.0) for level in r.parts):.4g}" for loss in losses),
                *(f"{r.without:.4g}", r.layer.macs),
            )
            for r in self.by_cost()
        ]
        alone = (f"{self.metric}, only it", *(f"its {loss}" for loss in losses))
        headers = ("layer", "op", *alone, f"{self.metric}, all but it", "MACs")
        parts = [format_table(headers, rows, max_width)]
        if self.groups:
            groups = sorted(self.groups, key=lambda row: row.only)
            cells = [(row.group, f"{row.only:.4g}") for row in groups]
            parts.append(format_table(("sites", f"{self.metric}, only them"), cells, max_width))
        if self.parts:
            levels = [
                (n, *(f"{level[loss]:.4g}" if loss in level else "" for loss in losses))
                for n, level in enumerate(self.parts)
            ]
            parts.append(format_table(("level", *losses), levels, max_width))
        parts.append(f"{self.metric} with everything quantized: {self.quantized:.4g}")
        if self.note:
            parts[-1] += f"\nnote: {self.note}"
        return "\n\n".join(parts)

    def to_dict(self) -> dict[str, Any]:
        """Returns the ranking as plain data."""
        layers = [row.to_dict() for row in self.layers]
        groups = [asdict(row) for row in self.groups]
        data = {"metric": self.metric, "quantized": self.quantized, "layers": layers, "groups": groups}
        data["note"] = self.note
        return {**data, "levels": list(self.parts)} if self.parts else data


def _losses(parts: Parts) -> tuple[str, ...]:
    """Lists the losses that occur in any level."""
    return tuple(dict.fromkeys(loss for level in parts for loss in level))


def rank(simulation: Simulation, metric: str, groups: bool = False) -> Ranking:
    """Measures every layer by itself: two passes over the data each, and one for each group.

    Args:
        simulation: the graph and the data.
        metric: the metric's name, for the table.
        groups: whether to measure the groups of sites, too.
    """
    rows = tuple(_row(simulation, layer) for layer in simulation.layers)
    names = _groups(simulation) if groups else ()
    group_rows = tuple(map(GroupRow, names, simulation.only_groups(names)))
    quantized = simulation.answer()
    return Ranking(metric, quantized.value, rows, group_rows, quantized.parts)


def _row(simulation: Simulation, layer: RaisableLayer) -> LayerRow:
    only = simulation.only(layer)
    return LayerRow(layer, only.value, simulation.value([layer.name]), only.parts)


def count_runs(simulation: Simulation, groups: bool = False) -> int:
    """Returns how often `rank` measures."""
    return 2 * len(simulation.layers) + 1 + (len(_groups(simulation)) if groups else 0)


def _groups(simulation: Simulation) -> tuple[str, ...]:
    """Lists the groups of all sites that layers read and give, in graph order."""
    names: dict[str, None] = {}
    for layer in simulation.layers:
        names.update(dict.fromkeys([*sorted(layer.reads), layer.weight, *sorted(layer.gives)]))
    names.pop("", None)
    return tuple(names)
