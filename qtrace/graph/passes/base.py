"""The contract of a pass over a graph: what it requires, what it ensures, what it reports."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from megengine.traced_module import TracedModule

from qtrace.errors import GraphError
from qtrace.graph.lint import lint
from qtrace.graph.walk import called_graph, exprs

__all__ = ["FLAT", "SOUND", "Condition", "GraphPass", "PassReport", "run_passes"]


@dataclass(frozen=True)
class Condition:
    """A property of a graph that a pass requires or ensures.

    Attributes:
        name: the property as a clause about the graph, such as "is flat".
        find: returns what contradicts the property, one line each; empty where it holds.
        cure: what makes the property hold.
    """

    name: str
    find: Callable[[TracedModule], list[str]]
    cure: str = ""


@dataclass(frozen=True)
class PassReport:
    """The changes of a pass to the module that it edited in place.

    Attributes:
        name: the name of the pass.
        changed: one line for each change.
        left: one line with the reason for each candidate that was left.
    """

    name: str
    changed: tuple[str, ...] = ()
    left: tuple[str, ...] = ()


class GraphPass(abc.ABC):
    """Abstract base of passes: `run` checks the contract around `change`, in time linear in the graph.

    Attributes:
        requires: the properties without which `run` refuses a graph, and changes nothing.
        ensures: the properties that the graph has afterwards, besides those required.
    """

    requires: ClassVar[tuple[Condition, ...]] = ()
    ensures: ClassVar[tuple[Condition, ...]] = ()

    @property
    def name(self) -> str:
        """Name of the pass in reports."""
        return type(self).__name__

    @abc.abstractmethod
    def change(self, traced: TracedModule) -> PassReport:
        """Changes ``traced``, which has the required properties, in place."""

    def run(self, traced: TracedModule) -> PassReport:
        """Runs the pass on ``traced`` in place.

        Raises:
            GraphError: when ``traced`` lacks a required property, or the pass breaks its contract.
        """
        for condition in self.requires:
            contradictions = condition.find(traced)
            if contradictions:
                cure = f": {condition.cure}" if condition.cure else "."
                raise GraphError(
                    f"{self.name} takes a graph that {condition.name}, but {contradictions[0]}{cure}"
                )
        report = self.change(traced)
        for condition in dict.fromkeys((*self.requires, *self.ensures)):
            contradictions = condition.find(traced)
            if contradictions:
                raise GraphError(
                    f"{self.name} broke its contract: afterwards a graph {condition.name}, but "
                    f"{contradictions[0]}; please report it."
                )
        return report


def run_passes(traced: TracedModule, passes: Sequence[GraphPass]) -> list[PassReport]:
    """Runs passes in order on ``traced`` in place; returns their reports.

    Raises:
        GraphError: when the graph lacks a property that a pass requires.
    """
    return [each.run(traced) for each in passes]


def _nested(traced: TracedModule) -> list[str]:
    if not isinstance(traced, TracedModule):
        return [f"a {type(traced).__name__} was given"]
    calls = (e for e in exprs(traced) if called_graph(e) is not None)
    return [f"{e.outputs[0].name if e.outputs else e} calls a graph of its own" for e in calls]


FLAT = Condition("is flat", _nested, "use qtrace.graph.flatten(traced).")
SOUND = Condition("lint finds sound", lambda traced: [str(problem) for problem in lint(traced)])
