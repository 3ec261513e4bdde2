"""The second step of ``prepare``: what is quantized, and why."""

from __future__ import annotations

from dataclasses import dataclass

from qtrace.costs import CostTable
from qtrace.display import progress_bar
from qtrace.preparation.annotation import Annotation
from qtrace.preparation.float_graph import FloatGraph, GraphFacts
from qtrace.preparation.passes.annotate import annotate
from qtrace.preparation.passes.place import place, write_activations
from qtrace.preparation.passes.search import SearchOutcome
from qtrace.preparation.passes.selecting import leave_selecting
from qtrace.preparation.passes.unlike import UnlikeNames, find_unlike
from qtrace.preparation.placement.reference import MeasuredRun
from qtrace.process.memory import return_free_memory

__all__ = ["Decision", "decide"]

_SHOWN_AFTER = 1.0  # second: most graphs are decided on before


@dataclass(frozen=True)
class Decision:
    """The annotation of a float graph.

    Attributes:
        annotation: for every expr the rule that quantizes it, or the reason why it stays in float.
        changed: a line for each op that was written in pieces again, as the placement found it faster.
        outcome: the labelling of the placement, with the others in question; None without a choice.
        facts: what was found in the graph, for copies of it.
    """

    annotation: Annotation
    changed: tuple[str, ...]
    outcome: SearchOutcome | None = None
    facts: GraphFacts | None = None


def decide(
    graph: FloatGraph,
    outcome: SearchOutcome | None = None,
    fitted: CostTable | None = None,
    progress: bool = False,
    facts: GraphFacts | None = None,
) -> Decision:
    """Decides for every expr: unlike ranges first, then selections, the placement, and the rules.

    Args:
        graph: the float graph; ops that the placement wants in pieces are written so in it.
        outcome: the labelling that an earlier search in the same network found; None to search.
        fitted: the packaged cost table, fitted to this processor; None for the table as it is packaged.
        progress: whether to show a progress bar of the runs of the graph on stderr.
        facts: what was found in a copy of the graph; None to find it.

    Raises:
        ConfigError: for a config that does not fit the graph.
    """
    model, config = graph.model, graph.config
    with progress_bar(
        desc="prepare", unit="forward passes", disable=not progress, delay=_SHOWN_AFTER, leave=False
    ) as bar:
        known = None if facts is None else facts.measured
        run = MeasuredRun(model, graph.samples, advance=bar.update, measured=known)
        if facts is None:
            unlike = leave_selecting(model, config, find_unlike(model, config, run))
        else:
            unlike = facts.unlike.find(model)
        noise = None if facts is None else facts.noise
        placing = place(model, config, run, unlike, outcome, fitted, noise)
        found = None if placing is None or placing.outcome is None else placing.outcome.noise
        # By the names of nodes as they are now.
        facts = GraphFacts(run.measured(), UnlikeNames.of(unlike), noise or found)
    if outcome is None:
        return_free_memory()  # of rounded weights, which runs of the graph have read
    changed: tuple[str, ...] = ()
    if placing is not None:
        placing, pieces = write_activations(model, placing)
        changed = tuple(pieces.changed)
    annotation = annotate(model, config, placing, unlike)
    return Decision(annotation, changed, None if placing is None else placing.outcome, facts)
