"""What an engine is: something that runs a prepared graph in float and shows its activations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from qtrace.errors import CalibrationError
from qtrace.graph.dataflow import evaluate_fixed, static_nodes
from qtrace.graph.types import TensorNode
from qtrace.graph.walk import is_float_tensor
from qtrace.preparation.model import QuantizedModel

__all__ = [
    "Arguments",
    "Engine",
    "EngineError",
    "Observe",
    "Watched",
    "check_sites",
    "watched",
]

Arguments = tuple[tuple[Any, ...], dict[str, Any]]

Observe = Callable[[str, Any], None]
"""Takes the name of a node and its value in one batch: an array, or what has ``numpy()``."""


class EngineError(Exception):
    """An engine cannot run a graph, or a batch, though another may; the text is a clause that says why."""


class Engine(Protocol):
    """Runs a prepared graph in float, batch by batch."""

    @property
    def name(self) -> str:
        """What users call it."""

    def run(self, arguments: Arguments, index: int, observe: Observe) -> None:
        """Runs one batch and shows the value of every node that is watched, in the order of the graph.

        Args:
            arguments: of the model's forward, as `qtrace.data.batches.as_arguments` gives them.
            index: the number of the batch.
            observe: is called once for each watched node.

        Raises:
            CalibrationError: when the batch does not fit the model.
            EngineError: when this engine cannot run it.
        """


@dataclass(frozen=True)
class Watched:
    """What is observed of a prepared graph.

    A group that holds parameters only is observed once. In one that also holds activations, a parameter
    counts in every batch, as the others do.

    Attributes:
        nodes: node -> its groups, for the nodes that depend on the batch, in the order of the graph. A graph
            output that is no site has none: it is only checked for NaN and infinity.
        constants: group and value of each parameter that belongs to a group with activations.
        parameters: group and value of each other parameter.
        folded: group -> the axes that count its channels, where they are several.
    """

    nodes: dict[str, tuple[str, ...]]
    constants: tuple[tuple[str, np.ndarray], ...]
    parameters: tuple[tuple[str, np.ndarray], ...]
    folded: dict[str, tuple[int, ...]]

    @property
    def unobserved(self) -> frozenset[str]:
        """The graph outputs that are no sites."""
        return frozenset(name for name, groups in self.nodes.items() if not groups)


def watched(prepared: QuantizedModel) -> Watched:
    """What is observed of a prepared graph."""
    sites = [site for site in prepared.sites if site.plan is not None]
    moving = {site.group for site in sites if not site.static}
    groups: dict[str, list[str]] = {}
    fixed: dict[bool, list[tuple[str, np.ndarray]]] = {True: [], False: []}
    values = evaluate_fixed(prepared.module, (site.node for site in sites if site.static))
    for site in sites:
        if site.static:
            value = site.fake_quant.channels_first(values[site.node].numpy())
            fixed[site.group in moving].append((site.group, value))
        else:
            groups.setdefault(site.node.name, []).append(site.group)
    shown = groups.keys() | _moving_outputs(prepared)
    nodes = {name: tuple(groups.get(name, ())) for name in prepared.nodes if name in shown}
    fake_quants = prepared.fake_quants
    axes = {group: fake_quants[group].folded_axes for names in nodes.values() for group in names}
    folded = {group: found for group, found in axes.items() if found}
    return Watched(nodes, tuple(fixed[True]), tuple(fixed[False]), folded)


def _moving_outputs(prepared: QuantizedModel) -> set[str]:
    """The names of the float outputs that depend on the batch, before they are rounded."""
    static = static_nodes(prepared.module)
    moving = (n for n in prepared.module.graph.outputs if n not in static and n.expr.inputs)
    return {prepared.unrounded_name(n) for n in moving if isinstance(n, TensorNode) and is_float_tensor(n)}


def check_sites(prepared: QuantizedModel) -> None:
    """Refuses a prepared graph without a site, which a calibration would leave in float.

    Raises:
        CalibrationError: saying so.
    """
    if not prepared.fake_quants:
        raise CalibrationError(
            "the graph has no site: not one of its ops is quantized, so there is nothing to calibrate; "
            "`qtrace explain` says why each op stays float."
        )
