"""Compares what a config expects of the result (`expect`) with what was measured."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from qtrace.config import Expect
from qtrace.display import Displayed, format_table

__all__ = ["Expectation", "Expectations", "check_expectations"]

_MEBIBYTE = 2**20


@dataclass(frozen=True)
class Expectation:
    """One limit of ``expect``.

    Attributes:
        name: the key, such as ``min_sqnr``.
        limit: the limit in the unit of the key.
        value: what was measured or predicted, in the same unit; None if it was not.
        passed: whether the limit is kept; None if that cannot be said here.
        source: where the value is from, in words.
    """

    name: str
    limit: float
    value: float | None
    passed: bool | None
    source: str


@dataclass(frozen=True, repr=False)
class Expectations(Displayed):
    """All limits of ``expect``.

    Attributes:
        checks: one for each limit of the config.
        subject: what was checked, such as the name of a file; "" where that is clear.
    """

    checks: tuple[Expectation, ...] = ()
    subject: str = ""

    @property
    def passed(self) -> bool:
        """Whether no limit is broken."""
        return all(check.passed is not False for check in self.checks)

    def table(self) -> str:
        """Returns a text table of the limits; "" without any."""
        if not self.checks:
            return ""
        rows = [(c.name, f"{c.limit:g}", _show(c.value), _WORDS[c.passed], c.source) for c in self.checks]
        title = f"expected of {self.subject}\n" if self.subject else ""
        return title + format_table(("expect", "limit", "is", "", "from"), rows)

    def to_dict(self) -> dict[str, Any]:
        """Returns the result as plain data."""
        checks = [asdict(check) for check in self.checks]
        return {"subject": self.subject, "passed": self.passed, "checks": checks}


_WORDS = {True: "ok", False: "FAILED", None: "not checked"}


def _show(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def check_expectations(
    expect: Expect | None,
    *,
    sqnr: float | None = None,
    drop: float | None = None,
    size: int | None = None,
    seconds: float | None = None,
    sources: dict[str, str] | None = None,
    subject: str = "",
) -> Expectations:
    """Compares measured or predicted figures with the limits of a config.

    Args:
        expect: the limits; None for none.
        sqnr: the SQNR of the worst column group of the outputs in dB, None if it is not known here.
        drop: how far the metric that ``expect`` names is below float's.
        size: the bytes of the parameters or of the file.
        seconds: the time of one run.
        sources: key of ``expect`` -> where its value is from, or why there is none.
        subject: what is checked.
    """
    if expect is None:
        return Expectations((), subject)
    values = {
        "max_drop": drop,
        "min_sqnr": sqnr,
        "max_megabytes": None if size is None else size / _MEBIBYTE,
        "max_milliseconds": None if seconds is None else seconds * 1e3,
    }
    return Expectations(tuple(_checks(expect, values, sources or {})), subject)


def _checks(
    expect: Expect, values: dict[str, float | None], sources: dict[str, str]
) -> Iterator[Expectation]:
    for name, value in values.items():
        limit = getattr(expect, name)
        if limit is None:
            continue
        passed = None
        if value is not None:
            kept = value >= limit if name.startswith("min_") else value <= limit
            passed = kept and not math.isnan(value)
        shown = value if value is None or math.isfinite(value) else None
        yield Expectation(name, limit, shown, passed, sources.get(name, ""))
