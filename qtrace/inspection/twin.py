"""The float twin of a quantized graph: the network that its errors are measured against.

A prepared graph in the phase ``float`` computes what the network computed, unless an algorithm of `ptq` has
written other weights or biases into it. Then the twin has to be made of the network itself.
"""

from __future__ import annotations

from collections.abc import Iterable

from qtrace.config import QConfig
from qtrace.config.algorithm import algorithms, check_imported
from qtrace.config.rule import specs
from qtrace.errors import ConfigError, GraphError
from qtrace.graph.flatten import flatten
from qtrace.graph.types import TracedModule
from qtrace.graph.walk import exprs
from qtrace.preparation.model import QuantizedModel
from qtrace.preparation.phases import switch_phase
from qtrace.preparation.prepare import prepare
from qtrace.preparation.record import is_quantized

__all__ = ["changed_weights", "check_nodes", "float_twin", "late_algorithms", "told_changed"]


def late_algorithms(config: QConfig) -> tuple[str, ...]:
    """The algorithms of a config that change a calibrated graph, in order."""
    return tuple(name for name, algorithm in algorithms(config) if algorithm.stage == "calibrated")


def changed_weights(model: QuantizedModel) -> tuple[str, ...]:
    """The algorithms that changed parameters of a graph when it was calibrated, in order.

    Raises:
        ConfigError: when the model names one of its own in a module that nobody has imported.
    """
    check_imported(spec for _, spec in model.config.ptq_entries)
    late = late_algorithms(model.config)
    return tuple(r["algorithm"] for r in model.ptq if r["changed"] and r["algorithm"] in late)


def told_changed(model: QuantizedModel, how: str) -> str:
    """A sentence where the graph in float is not the network any more, "" where it is.

    Args:
        model: the quantized graph.
        how: how to give the network, as the end of the sentence.
    """
    try:
        changed = ", ".join(changed_weights(model))
    except ConfigError:  # one that cannot be asked for its stage
        changed = ", ".join(report["algorithm"] for report in model.ptq if report["changed"])
    if not changed:
        return ""
    return f"{changed} changed the weights: 'float' is the graph with these, not the network; {how}"


def float_twin(model: QuantizedModel, given: TracedModule | None = None) -> TracedModule:
    """A graph that computes what a float network computes, with the nodes of the graph prepared from it.

    Args:
        model: the quantized graph.
        given: the network as traced, or a graph that was prepared from it; it is not changed. None for
            ``model``, which is prepared then.

    Returns:
        A prepared graph of its own, in the phase ``float`` and in eval mode.

    Raises:
        ConfigError: when the config does not fit the network, or names code of its own in a module that
            nobody has imported.
        GraphError: when ``given`` is no traced module, or is converted.
    """
    if given is None:
        twin = model.view(flatten(model.module))
    elif is_quantized(given):
        twin = QuantizedModel(flatten(given), "prepared")
    else:
        check_imported(spec for _, spec in specs(model.config))
        twin = QuantizedModel(prepare(given, model.config), "prepared")
    switch_phase("float", twin)
    twin.module.eval()
    return twin.module


def check_nodes(twin: TracedModule, names: Iterable[str]) -> None:
    """Checks that a twin has the nodes that it is asked for.

    Raises:
        GraphError: naming one that it does not have.
    """
    nodes = [*twin.graph.inputs, *(node for expr in exprs(twin) for node in expr.outputs)]
    known = {node.name for node in nodes}
    for name in names:
        if name not in known:
            raise GraphError(f"the float network has no node {name}: give the one that was prepared.")
