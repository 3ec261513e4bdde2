"""The limits of a recipe's ``expect``, at the end of commands that know what they ask for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from qtrace.cli.console import Console

if TYPE_CHECKING:
    from qtrace.inspection.expectations import Expectations
    from qtrace.sensitivity.diagnosis.verdict import Verdict

__all__ = ["check_file", "check_graph", "note_checks"]

_PREDICTED = "predicted in one thread"
_NOT_PREDICTED = "the target has no cost table: see `qtrace bench`"


def check_graph(
    config: Any, verdict: Verdict | None, metric: str | None, figures: dict[str, Any]
) -> Expectations:
    """Checks a calibrated graph.

    Args:
        config: the config of the graph.
        verdict: its verdict; None if it could not be judged.
        metric: the name of the metric that the verdict has, ``pkg.mod:function``; None for none.
        figures: what `qtrace.quantizing.figures.note_graph` returned.
    """
    from qtrace.inspection.expectations import check_expectations

    expect = config.expect
    seconds = figures.get("predicted_seconds")
    where = "no verdict" if verdict is None else f"{verdict.samples} {verdict.measured_on}"
    drop = None
    named = metric is not None and expect is not None and expect.metric == _last(metric)
    if named and verdict is not None and verdict.metric is not None and verdict.float_metric is not None:
        drop = verdict.float_metric - verdict.metric
    name = "" if expect is None else expect.metric
    sources = {
        "max_drop": where if named else f"--metric names no function {name}",
        "min_sqnr": where,
        "max_megabytes": "the parameters",
        "max_milliseconds": _NOT_PREDICTED if seconds is None else _PREDICTED,
    }
    return check_expectations(
        expect,
        sqnr=float("nan") if verdict is None else verdict.counted_db,
        drop=drop,
        size=figures.get("parameter_bytes"),
        seconds=seconds,
        sources=sources,
    )


def check_file(
    config: Any, subject: str, size: int | None, seconds: float | None, *, measured: bool
) -> Expectations:
    """Checks an exported file.

    Args:
        config: the config of the graph that it is from; None for none.
        subject: the file.
        size: its bytes; None if they are not known.
        seconds: the time of one run; None if it is not known.
        measured: whether the time was measured, rather than predicted.
    """
    from qtrace.inspection.expectations import check_expectations

    known = "measured, the median" if measured else _PREDICTED
    elsewhere = "`qtrace calibrate` checks it"
    sources = {
        "max_drop": elsewhere,
        "min_sqnr": elsewhere,
        "max_megabytes": "the file",
        "max_milliseconds": _NOT_PREDICTED if seconds is None else known,
    }
    expect = None if config is None else config.expect
    return check_expectations(expect, size=size, seconds=seconds, sources=sources, subject=subject)


def note_checks(console: Console, *results: Expectations) -> dict[str, Any]:
    """Notes the tables of limits, and returns them for JSON; nothing where no config has a limit."""
    given = [result for result in results if result.checks]
    for result in given:
        console.note(result.table())
    return {"expect": [result.to_dict() for result in given]} if given else {}


def _last(name: str) -> str:
    """Returns the function's own name."""
    return name.rpartition(":")[2].rpartition(".")[2]
