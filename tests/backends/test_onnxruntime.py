"""Which schemes onnxruntime is said to run: those that an export can write and a kernel computes."""

from __future__ import annotations

from typing import Any

import pytest

from qtrace import backends

REFUSED = [
    ("activation", {"narrow": True}, "narrow ranges"),
    ("activation", {"narrow": True, "signed": True, "symmetric": True}, "narrow ranges"),
    ("activation", {"axis": 1}, "per-channel scales"),
    ("activation", {"bits": 5}, "5 bits"),
    ("activation", {"rounding": "half_away"}, "half_away rounding"),
    ("weight", {"symmetric": False}, "per-channel scales with a zero point each"),
    (
        "weight",
        {"symmetric": False, "signed": False, "narrow": False},
        "per-channel scales with a zero point",
    ),
    ("weight", {"bits": 9}, "9 bits"),
]
ALLOWED = [
    ("activation", {}),
    ("activation", {"signed": True, "symmetric": True}),
    ("weight", {}),
    ("weight", {"narrow": False}),
    ("weight", {"axis": None, "symmetric": False}),
    ("weight", {"bits": 4}),
]


@pytest.mark.parametrize(("sort", "changes", "reason"), REFUSED)
def test_refuses(sort: str, changes: dict[str, Any], reason: str) -> None:
    backend = backends.get("onnxruntime")
    problem = backend.problem(sort, getattr(backend, sort).replace(**changes))
    assert problem is not None
    assert problem.startswith(reason)


@pytest.mark.parametrize(("sort", "changes"), ALLOWED)
def test_runs(sort: str, changes: dict[str, Any]) -> None:
    backend = backends.get("onnxruntime")
    assert backend.problem(sort, getattr(backend, sort).replace(**changes)) is None
