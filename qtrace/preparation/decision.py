"""The second step of ``prepare``: what is quantized, and why."""

from __future__ import annotations

from dataclasses import dataclass

from qtrace.preparation.annotation import Annotation
from qtrace.preparation.float_graph import FloatGraph
from qtrace.preparation.passes.annotate import annotate
from qtrace.preparation.passes.place import place, write_activations
from qtrace.preparation.passes.selecting import leave_selecting
from qtrace.preparation.passes.unlike import find_unlike
from qtrace.preparation.placement.reference import MeasuredRun

__all__ = ["Decision", "decide"]


@dataclass(frozen=True)
class Decision:
    """The annotation of a float graph.

    Attributes:
        annotation: for every expr the rule that quantizes it, or the reason why it stays in float.
        changed: a line for each op that was written in pieces again, as the placement found it faster.
    """

    annotation: Annotation
    changed: tuple[str, ...]


def decide(graph: FloatGraph) -> Decision:
    """Decides for every expr: unlike ranges first, then selections, the placement, and the rules.

    Args:
        graph: the float graph; ops that the placement wants in pieces are written so in it.

    Raises:
        ConfigError: for a config that does not fit the graph.
    """
    model, config = graph.model, graph.config
    run = MeasuredRun(model, graph.samples)
    unlike = find_unlike(model, config, run)
    unlike = leave_selecting(model, config, unlike)
    placing = place(model, config, run, unlike)
    changed: tuple[str, ...] = ()
    if placing is not None:
        placing, pieces = write_activations(model, placing)
        changed = tuple(pieces.changed)
    return Decision(annotate(model, config, placing, unlike), changed)
