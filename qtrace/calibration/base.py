"""The interface of engines, which run a prepared graph in float and pass its activations to observers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from megengine import Tensor

from qtrace.errors import CalibrationError
from qtrace.graph.interpreter import evaluate_fixed, static_nodes
from qtrace.graph.kernels import read_array
from qtrace.graph.types import TensorNode
from qtrace.graph.walk import is_float_tensor
from qtrace.preparation.float16 import float_values, uses_float16
from qtrace.preparation.model import QuantizedModel, QuantizedSite

Arguments = tuple[tuple[Any, ...], dict[str, Any]]

Observe = Callable[[str, Any], None]
"""Receives the name of a node and its value in one batch: an array, or an object with ``numpy()``."""


class EngineError(Exception):
    """An engine cannot run a graph or a batch that another may run; the text is a clause with the reason."""


class Engine(Protocol):
    """Runs a prepared graph in float, batch by batch."""

    @property
    def name(self) -> str:
        """The name of the engine in options."""

    def run(self, arguments: Arguments, index: int, observe: Observe) -> None:
        """Runs one batch and passes the value of every watched node to ``observe``, in graph order.

        Args:
            arguments: the arguments of the model's forward, from `qtrace.data.batches.as_arguments`.
            index: the number of the batch.
            observe: a function that is called once for each watched node.

        Raises:
            CalibrationError: when the batch does not fit the model.
            EngineError: when this engine cannot run the batch.
        """

    @property
    def prefetched(self) -> int:
        """The number of batches that are worth beginning while another one runs; 0 for none."""

    def begin(self, arguments: Arguments) -> None:
        """Begins to compute a batch on another thread, unless it is begun or memory for its values is short.

        Args:
            arguments: the batch, which `run` or `drop` gets later; this very object.
        """

    def drop(self, arguments: Arguments) -> None:
        """Gives up a batch that was begun, unless it ran."""

    def close(self) -> None:
        """Gives up all batches that were begun."""


@dataclass(frozen=True)
class Watched:
    """The nodes and parameters of a prepared graph that are observed.

    A group of parameters only is observed once. A parameter in a group with activations counts in every
    batch, as they do.

    Attributes:
        nodes: node -> its groups, for the nodes that depend on the batch, in graph order: of its sites,
            and its `range_group` if float16 asks for its range. A graph output that is no site may lack them.
        constants: group and value of each parameter that belongs to a group with activations.
        parameters: group of each other parameter, and what reads its value, when it is needed: all values at
            once would be the network once more.
        folded: group -> the axes that count its channels, if there are several.
        ends: the graph outputs that are no sites: they are checked for NaN and infinity.
    """

    nodes: dict[str, tuple[str, ...]]
    constants: tuple[tuple[str, np.ndarray], ...]
    parameters: tuple[tuple[str, Callable[[], np.ndarray]], ...]
    folded: dict[str, tuple[int, ...]]
    ends: frozenset[str] = frozenset()

    @property
    def unobserved(self) -> frozenset[str]:
        """The nodes that are no sites."""
        return frozenset(
            node for node, groups in self.nodes.items() if all(group == range_group(node) for group in groups)
        )


def watched(prepared: QuantizedModel) -> Watched:
    """Collects the nodes and parameters of a prepared graph that are observed."""
    sites = [site for site in prepared.sites if site.plan is not None]
    dynamic = {site.group for site in sites if not site.static}
    groups: dict[str, list[str]] = {}
    constants, parameters = list[tuple[str, np.ndarray]](), list[tuple[str, Callable[[], np.ndarray]]]()
    values = evaluate_fixed(prepared.module, (site.node for site in sites if site.static))
    for site in sites:
        if site.static:
            read = functools.partial(_read_parameter, site, values[site.node])
            if site.group in dynamic:
                constants.append((site.group, read()))
            else:
                parameters.append((site.group, read))
        else:
            groups.setdefault(site.node.name, []).append(site.group)
    ends = _dynamic_outputs(prepared)
    no_sites = frozenset(ends - groups.keys())
    for name in float_values(prepared):
        groups.setdefault(name, []).append(range_group(name))
    names = groups.keys() | ends
    nodes = {name: tuple(groups.get(name, ())) for name in prepared.nodes if name in names}
    fake_quants = prepared.fake_quants
    members = [group for own in nodes.values() for group in own if group in fake_quants]
    axes = {group: fake_quants[group].folded_axes for group in members}
    folded = {group: channel_axes for group, channel_axes in axes.items() if channel_axes}
    return Watched(nodes, tuple(constants), tuple(parameters), folded, no_sites)


def range_group(node: str) -> str:
    """Returns the name under which the range of a node in float is observed, which no group of sites has."""
    return f"range of {node}"


def _read_parameter(site: QuantizedSite, value: Tensor) -> np.ndarray:
    return site.fake_quant.channels_first(read_array(value))


def _dynamic_outputs(prepared: QuantizedModel) -> set[str]:
    """Returns the names of the float outputs that depend on the batch, before they are rounded."""
    static = static_nodes(prepared.module)
    dynamic = (n for n in prepared.module.graph.outputs if n not in static and n.expr.inputs)
    return {prepared.unrounded_name(n) for n in dynamic if isinstance(n, TensorNode) and is_float_tensor(n)}


def check_sites(prepared: QuantizedModel) -> None:
    """Checks that a prepared graph has a site, since a calibration would leave it in float otherwise.

    A graph that its placement leaves in float may lack sites: it becomes a float file. So may a graph whose
    floats become float16, which needs their ranges.

    Raises:
        CalibrationError: when the graph is without sites, and not by a placement.
    """
    placement = prepared.annotation.placement
    if uses_float16(prepared) and float_values(prepared):
        return  # the ranges of what is in float are calibrated
    if not prepared.fake_quants and (placement is None or placement.mode != "float"):
        by_method = [note for note in prepared.annotation.notes if "method" in note.causes]
        if by_method:
            most = max(by_method, key=lambda note: note.macs)
            raise CalibrationError(
                f"the graph lacks sites, as the method of the config finds no layer to quantize: {most.name} "
                f"stays in float, since {most.reason}. Use method: static, or {{match: ..., method: static}} "
                "for such ops."
            )
        raise CalibrationError(
            "the graph lacks sites: not one of its ops is quantized, so there is nothing to calibrate; "
            "`qtrace explain` says why each op stays float."
        )
