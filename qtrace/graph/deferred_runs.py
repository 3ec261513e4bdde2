"""Runs of whole graphs by a segment engine, which may start now and compute later."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from qtrace.graph.stepping import (
    GraphSegment,
    RefusedRunError,
    SegmentEngine,
    Stepper,
    Use,
    WholeEngine,
    as_array,
    keep,
)
from qtrace.graph.types import Node, TracedModule

Ends = list[list[np.ndarray]]
"""The outputs of a graph for each batch."""


def begin_run(
    model: TracedModule,
    batches: Iterable[tuple[tuple[Any, ...], dict[str, Any]]],
    engine: SegmentEngine,
) -> Callable[[], Ends | None] | None:
    """Begins to compute the outputs of a graph with its present parameters and phases; these may then change.

    Args:
        model: a flat graph in eval mode.
        batches: the arguments of each batch.
        engine: computes the whole graph.

    Returns:
        A function that gives the outputs, to be called once, on any thread; or None. Either is None where the
        engine cannot compute all of the graph, or not all that is left at once.
    """
    last = _DeferringEngine(engine, model.graph.outputs)
    try:
        stepper = Stepper(model, batches, engine=last)
        ends = [stepper.finish(index) for index in range(stepper.count)]
    except RefusedRunError:
        return None
    finish = last.finish
    if finish is None:
        return None
    # Outputs that are inputs of the graph, or depend only on parameters, are known.
    known = [[v if isinstance(v, _Awaited) else as_array(v) for v in values] for values in ends]

    def compute() -> Ends | None:
        try:
            computed = finish(keep)
        except RefusedRunError:
            return None
        return [
            [own[value.index] if isinstance(value, _Awaited) else value for value in values]
            for values, own in zip(known, computed, strict=True)
        ]

    return compute


@dataclass(frozen=True)
class _Awaited:
    """The value of an output that is computed later.

    Attributes:
        index: its number among the requests of its batch.
    """

    index: int


class _DeferringEngine(WholeEngine):
    """An engine that begins the last part of a graph, and computes those before it.

    Attributes:
        finish: computes the values that are awaited; None if no part was begun.
    """

    def __init__(self, engine: SegmentEngine, ends: Sequence[Node]) -> None:
        super().__init__(engine)
        self._ends = frozenset(ends)
        self.finish: Callable[[Use], list[Any]] | None = None

    def begin(self, segment: GraphSegment) -> Callable[[Use], list[Any]]:
        """Gives awaited values where they are outputs of the graph that no other part reads.

        Raises:
            RefusedRunError: when the engine cannot compute the segment.
        """
        run = super().begin(segment)
        is_last = all(node in self._ends and not node.users for node in segment.outputs)
        if self.finish is not None or not is_last:
            return run
        self.finish = run
        awaited: list[Any] = [_Awaited(index) for index in range(len(segment.outputs))]
        count = len(segment.batches)
        return lambda use: [use(batch, awaited) for batch in range(count)]
