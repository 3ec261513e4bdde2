"""The second step of ``prepare``: what is quantized, and why."""

from __future__ import annotations

from dataclasses import dataclass

from qtrace.display import progress_bar
from qtrace.preparation.annotation import Annotation
from qtrace.preparation.float_graph import FloatGraph
from qtrace.preparation.passes.annotate import annotate
from qtrace.preparation.passes.mixed_ranges import find_mixed_ranges
from qtrace.preparation.passes.place import place, write_activations
from qtrace.preparation.passes.selecting import leave_selecting
from qtrace.preparation.placement.reference import MeasuredRun

__all__ = ["Decision", "decide"]

_SHOWN_AFTER = 1.0  # second: most graphs are decided on before


@dataclass(frozen=True)
class Decision:
    """The annotation of a float graph.

    Attributes:
        annotation: for every expr the rule that quantizes it, or the reason why it stays in float.
        changed: a line for each op that was written in pieces again, as the placement found it faster.
    """

    annotation: Annotation
    changed: tuple[str, ...]


def decide(graph: FloatGraph, progress: bool = False) -> Decision:
    """Decides for every expr: unlike ranges first, then selections, the placement, and the rules.

    Args:
        graph: the float graph; ops that the placement wants in pieces are written so in it.
        progress: whether to show a progress bar of the runs of the graph on stderr.

    Raises:
        ConfigError: for a config that does not fit the graph.
    """
    model, config = graph.model, graph.config
    with progress_bar(
        desc="prepare", unit="forward passes", disable=not progress, delay=_SHOWN_AFTER, leave=False
    ) as bar:
        run = MeasuredRun(model, graph.samples, advance=bar.update)
        mixed = leave_selecting(model, config, find_mixed_ranges(model, config, run))
    placing = place(model, config, mixed)
    changed: tuple[str, ...] = ()
    if placing is not None:
        placing, pieces = write_activations(model, placing)
        changed = tuple(pieces.changed)
    return Decision(annotate(model, config, placing, mixed), changed)
