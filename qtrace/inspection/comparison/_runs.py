"""Runs a batch three times: in float, each site by itself, and quantized."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from megengine import Tensor

from qtrace.graph.types import Node, TensorNode, TracedModule
from qtrace.inspection.comparison.tally import SiteTally
from qtrace.outputs.replay import TapedRun
from qtrace.preparation.model import QuantizedSite
from qtrace.verification.graph_runs import leaves

__all__ = ["AloneRun", "FloatRun", "QuantizedRun"]


class _SiteRun(TapedRun):
    """Runs a graph with the selections of another run, and keeps its outputs."""

    def __init__(
        self, model: TracedModule, sites: Mapping[str, QuantizedSite], places: Sequence[np.ndarray] | None
    ) -> None:
        super().__init__(model, places)
        self.before: dict[str, list[str]] = {}  # node -> the sites that round it
        for site in sites.values():
            self.before.setdefault(site.node.name, []).append(site.name)
        self.after = {s.value.name: name for name, s in sites.items() if s.value is not None}
        self.outputs: list[np.ndarray] = []

    def compute(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Runs the graph on the arguments of one call."""
        self.outputs = [t.numpy() for t in leaves(self.run(*args, **kwargs))]

    def on_node(self, node: Node, value: Any) -> Any:
        if not isinstance(node, TensorNode):
            return value
        for name in self.before.get(node.name, ()):
            self.on_value(name, value)
        name = self.after.get(node.name, "")
        return self.on_rounded(name, value) if name else value

    def on_value(self, name: str, value: Tensor) -> None:
        """Receives the value that a site rounds next."""

    def on_rounded(self, name: str, value: Tensor) -> Tensor:
        """Receives the rounded value of a site; returns the value that the graph goes on with."""
        return value


class FloatRun(_SiteRun):
    """Keeps the value of every site; the graph is in the phase ``float``."""

    def __init__(
        self, model: TracedModule, sites: Mapping[str, QuantizedSite], places: Sequence[np.ndarray] | None
    ) -> None:
        super().__init__(model, sites, places)
        self.values: dict[str, np.ndarray] = {}

    def on_value(self, name: str, value: Tensor) -> None:
        self.values[name] = value.numpy()


class AloneRun(_SiteRun):
    """Keeps the rounded value of every site with everything before it in float: only its own error."""

    def __init__(
        self,
        model: TracedModule,
        sites: Mapping[str, QuantizedSite],
        values: Mapping[str, np.ndarray],
        places: Sequence[np.ndarray] | None,
    ) -> None:
        super().__init__(model, sites, places)
        self.values, self.own = values, dict[str, np.ndarray]()

    def on_rounded(self, name: str, value: Tensor) -> Tensor:
        self.own[name] = value.numpy()
        return Tensor(self.values[name])


class QuantizedRun(_SiteRun):
    """Adds the values of each site to the site's tally."""

    def __init__(
        self,
        model: TracedModule,
        sites: Mapping[str, QuantizedSite],
        values: dict[str, np.ndarray],
        own: dict[str, np.ndarray],
        tallies: Mapping[str, SiteTally],
        places: Sequence[np.ndarray] | None,
    ) -> None:
        super().__init__(model, sites, places)
        self.values, self.own, self.tallies = values, own, tallies
        self.unrounded: dict[str, np.ndarray] = {}
        self.parameters: dict[str, np.ndarray] = {}  # rounded parameters, which lack a tally

    def on_value(self, name: str, value: Tensor) -> None:
        if name in self.tallies:
            self.unrounded[name] = value.numpy()

    def on_rounded(self, name: str, value: Tensor) -> Tensor:
        if name not in self.tallies:
            self.parameters[name] = value.numpy()
            return value
        # The values of a site are dropped as soon as they are counted.
        reference, own = self.values.pop(name), self.own.pop(name)
        self.tallies[name].add(reference, own, self.unrounded.pop(name), value.numpy())
        return value
