"""Makes the float twin of a quantized graph: the network that errors are measured against.

A prepared graph in the phase ``float`` computes what the network computed, unless an algorithm of `ptq` has
written other weights or biases into it. In that case the twin is made from the network itself.
"""

from __future__ import annotations

from collections.abc import Iterable

from qtrace.config import QConfig
from qtrace.config.checking import algorithms, check_imported
from qtrace.config.rule import specs
from qtrace.errors import ConfigError, GraphError
from qtrace.graph.flatten import flatten
from qtrace.graph.types import TracedModule
from qtrace.graph.walk import exprs
from qtrace.preparation.model import QuantizedModel, is_quantized
from qtrace.preparation.passes.place import write_same_activations
from qtrace.preparation.phases import switch_phase
from qtrace.preparation.prepare import prepare


def late_algorithms(config: QConfig) -> tuple[str, ...]:
    """Returns the algorithms of a config that change a calibrated graph, in order."""
    return tuple(name for name, algorithm in algorithms(config) if algorithm.stage == "calibrated")


def changed_weights(model: QuantizedModel) -> tuple[str, ...]:
    """Returns the algorithms that changed parameters of a graph during calibration, in order.

    Raises:
        ConfigError: when the model names one of its own in a module that nobody has imported.
    """
    check_imported(spec for _, spec in model.config.ptq_entries)
    late = late_algorithms(model.config)
    return tuple(r["algorithm"] for r in model.ptq if r["changed"] and r["algorithm"] in late)


def describe_changed_weights(model: QuantizedModel, remedy: str) -> str:
    """Says which algorithms changed the weights, so that the graph in float is not the network; else "".

    Args:
        model: the quantized graph.
        remedy: how to pass the network, as the end of the sentence.
    """
    try:
        changed = ", ".join(changed_weights(model))
    except ConfigError:  # an algorithm whose stage is unknown
        changed = ", ".join(report["algorithm"] for report in model.ptq if report["changed"])
    if not changed:
        return ""
    return f"{changed} changed the weights: 'float' is the graph with these, not the network; {remedy}"


def float_twin(model: QuantizedModel, network: TracedModule | None = None) -> TracedModule:
    """Returns a graph with the nodes of ``model`` that computes what the float network computes.

    Args:
        model: the quantized graph.
        network: the network as traced, or a graph that was prepared from it; it is not changed. None for
            ``model``, which is prepared then.

    Returns:
        A prepared graph of its own, in the phase ``float`` and in eval mode.

    Raises:
        ConfigError: when the config does not fit the network, or names code of its own in a module that
            nobody has imported.
        GraphError: when ``network`` is no traced module, or is converted.
    """
    if network is None:
        twin = model.view(flatten(model.module))
    elif is_quantized(network):
        twin = QuantizedModel(flatten(network), "prepared")
    else:
        check_imported(spec for _, spec in specs(model.config))
        prepared = prepare(network, model.config.without_placement(), progress=False)
        write_same_activations(prepared, model.module)
        twin = QuantizedModel(prepared, "prepared")
    switch_phase("float", twin)
    twin.module.eval()
    return twin.module


def check_nodes(twin: TracedModule, names: Iterable[str]) -> None:
    """Checks that a twin has the nodes called ``names``.

    Raises:
        GraphError: when a node is missing; the message names it.
    """
    nodes = [*twin.graph.inputs, *(node for expr in exprs(twin) for node in expr.outputs)]
    known = {node.name for node in nodes}
    for name in names:
        if name not in known:
            raise GraphError(f"the float network lacks node {name}: give the one that was prepared.")
