"""What post-training algorithms did: qtrace's are summed up, a user's own have every line of their report."""

from __future__ import annotations

from typing import Any

from qtrace.inspection.explanation._table import describe_algorithms
from qtrace.ptq import Left, Report


def _report(name: str, report: Report) -> dict[str, Any]:
    return {**report.to_dict(), "algorithm": name, "options": {"deviations": 1.0}}


REPORT = Report(
    changed=("a_weight: clipped to 0.3", "b_weight: clipped to 0.5"),
    left=(Left("c_weight", "no weight is that large"), Left("", "there is no other layer"), "as of old"),
)


def test_an_own_algorithm_has_its_lines() -> None:
    assert describe_algorithms([_report("clip_weights:ClipWeights", REPORT)]) == [
        "clip_weights:ClipWeights (deviations 1.0): 2 changed, 3 left",
        "  a_weight: clipped to 0.3",
        "  b_weight: clipped to 0.5",
        "  left c_weight: no weight is that large",
        "  left there is no other layer",
        "  left as of old",
    ]


def test_an_algorithm_of_qtrace_is_summed_up() -> None:
    lines = describe_algorithms([_report("equalize", REPORT)])
    assert lines[0] == "equalize (deviations 1.0): 2 changed, 3 left"
    assert not [line for line in lines if "clipped" in line]
    assert "  left c_weight: no weight is that large" in lines
