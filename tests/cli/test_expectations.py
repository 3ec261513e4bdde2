"""Limits of ``expect`` against figures."""

from __future__ import annotations

import json

from qtrace.cli.verdicts import check_expectations
from qtrace.config import Expect
from tests.each import each_of

LIMITS = Expect(metric="top1", max_drop=0.5, min_sqnr=20, max_megabytes=2, max_milliseconds=1.5)
GOOD = {"sqnr": 20.0, "drop": 0.5, "size": 2 * 2**20, "seconds": 1.5e-3}


def test_limits_themselves_are_kept() -> None:
    result = check_expectations(LIMITS, **GOOD)
    assert result.passed
    assert [check.passed for check in result.checks] == [True] * 4


@each_of(
    ("figure", "bad", "key"),
    [
        ("sqnr", 19.9, "min_sqnr"),
        ("sqnr", float("nan"), "min_sqnr"),
        ("drop", 0.51, "max_drop"),
        ("size", 2 * 2**20 + 1000, "max_megabytes"),
        ("seconds", 1.6e-3, "max_milliseconds"),
    ],
)
def test_each_broken_limit_fails_alone(figure: str, bad: float, key: str) -> None:
    result = check_expectations(LIMITS, **{**GOOD, figure: bad}, subject="net.onnx")
    assert not result.passed
    assert [check.name for check in result.checks if check.passed is False] == [key]
    table = result.table()
    assert table.startswith("expected of net.onnx\n")
    assert sum("FAILED" in line for line in table.splitlines()) == 1
    data = json.loads(json.dumps(result.to_dict(), allow_nan=False))
    assert data["passed"] is False


def test_what_is_not_known_is_said_and_does_not_fail() -> None:
    result = check_expectations(LIMITS, size=1, sources={"max_milliseconds": "no table"})
    assert result.passed
    assert [check.passed for check in result.checks] == [None, None, True, None]
    assert "not checked" in result.table()
    assert "no table" in result.table()


def test_exact_outputs_pass_every_limit() -> None:
    assert check_expectations(LIMITS, sqnr=float("inf")).passed


def test_check_passes_without_expectations() -> None:
    result = check_expectations(None, sqnr=-100.0)
    assert result.passed
    assert result.table() == ""
