"""A graph in a few lines, for notebooks: what it is, what it reads and gives, and what shows more."""

from __future__ import annotations

from qtrace.graph.interface import list_inputs
from qtrace.graph.types import TracedModule
from qtrace.graph.walk import exprs
from qtrace.preparation.model import is_quantized
from qtrace.preparation.passes.insert import headline

__all__ = ["describe_graph"]

_WHOLE = "print(model) shows it whole"


def describe_graph(model: TracedModule) -> str:
    """Returns the stage of ``model``, its number of exprs and sites, its inputs and outputs, a line each."""
    inputs = ", ".join(f"{name} {tuple(shape)}" for name, shape in list_inputs(model))
    outputs = ", ".join(str(node._name) for node in model.graph._outputs)
    lines = [
        f"TracedModule {model.graph._qualname} of {len(exprs(model))} exprs",
        f"  inputs: {inputs}",
        f"  outputs: {outputs}",
    ]
    if not is_quantized(model):
        return "\n".join(
            [*lines, "  in float: qtrace.prepare(model) quantizes it; print(model) shows it whole"]
        )
    lines.append(f"  {headline(model)}")
    return "\n".join(
        [*lines, "  qtrace.explain(model) says what became of each op; print(model) shows it whole"]
    )
