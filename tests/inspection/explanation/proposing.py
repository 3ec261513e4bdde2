"""Does what the lines of a proposal say, as a reader of ``explain`` would."""

from __future__ import annotations

from typing import Any

import yaml

from qtrace.config import QConfig
from qtrace.graph.types import TracedModule
from qtrace.inspection.explanation import Explanation
from qtrace.inspection.explanation._summary import Floats
from qtrace.preparation.prepare import plan

__all__ = ["changed", "holds", "unkept"]

_QUANTIZED = ("int", "fused", "carried")


def changed(explanation: Explanation, lines: tuple[str, ...]) -> QConfig:
    """The config after the printed ``lines`` were followed."""
    config: dict[str, Any] = explanation.qconfig.to_dict()
    rules = list(zip(explanation.annotation.origins, config.get("rules", []), strict=True))
    for line in lines:
        what, _, rest = line.partition(": ")
        if what == "set region":
            config["region"] = yaml.safe_load(rest)
        elif what == "add to rules":
            rules += [("", rule) for rule in yaml.safe_load(rest)]
        else:
            assert what.startswith("drop ")
            (rule,) = yaml.safe_load(rest)
            rules.remove((what.removeprefix("drop "), rule))
    config["rules"] = [rule for _, rule in rules]
    return QConfig(**config)


def unkept(traced: TracedModule, explanation: Explanation) -> list[str]:
    """What the proposals of ``explanation`` promise and do not keep."""
    problems = []
    for floats in explanation._summary.floats:
        if floats.proposal is not None and not holds(traced, explanation, floats):
            problems.append(f"{floats.kinds}: {' and '.join(floats.proposal.lines)}")
    return problems


def holds(traced: TracedModule, explanation: Explanation, floats: Floats) -> bool:
    """Whether the ops of one entry are quantized once its proposal is followed."""
    assert floats.proposal is not None
    notes = {n.name: n for n in plan(traced, changed(explanation, floats.proposal.lines)).notes}
    # A move between floats follows its neighbours: nothing more can be said of it.
    return all(notes[n.name].state in _QUANTIZED or notes[n.name].causes == ("idle",) for n in floats.notes)
