"""The count of open axes that the docs' page shows: how it is made, and that it still holds."""

from __future__ import annotations

import json

import pytest

from scripts.onnx_open_axes import FILE, Count, count_all, main, rows, summarize
from tests.importing.onnx.cases import load_cases

STORED = json.loads(FILE.read_text(encoding="utf-8"))["ops"]


def test_stored_open_axes_are_mostly_kept_and_never_wrong() -> None:
    axes, kept = (sum(op[key] for op in STORED.values()) for key in ("axes", "kept"))
    assert sum(op["tests"] for op in STORED.values()) > 1000
    assert kept >= 0.75 * axes
    reasons = [reason for op in STORED.values() for reason in op.get("reasons", ())]
    assert not [reason for reason in reasons if reason.startswith("wrong")]


@pytest.mark.slow  # onnx makes all its tests, which takes seconds
@pytest.mark.parametrize("op", ["Conv", "Resize", "Softmax"])
def test_an_op_keeps_the_axes_that_are_stored(op: str) -> None:
    counts = count_all([op])
    assert (sum(c.axes for c in counts), sum(c.kept for c in counts)) == (
        STORED[op]["axes"],
        STORED[op]["kept"],
    )


def test_ops_that_keep_all_are_one_row() -> None:
    counts = [
        Count("add", "Add", 4, 4),
        Count("relu", "Relu", 2, 2),
        Count("tile_b", "Tile", 3, 1, ("Tile 't' needs it",)),
        Count("tile_a", "Tile", 3, 0, ("Tile 'u' needs it",)),
        Count("tile_c", "Tile", 1, 0, ("no",), "refused"),
    ]
    ops = summarize(counts)["ops"]
    assert ops["Tile"]["reasons"] == {"Tile needs it": ["tile_a", "tile_b"], "refused: no": ["tile_c"]}
    assert rows(ops) == [
        ("2 other ops", "2", "6 of 6", ""),
        ("`Tile`", "3", "1 of 7", "Tile needs it; refused: no"),
    ]


def test_the_script_refuses_what_it_does_not_know(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("scripts.onnx_open_axes.load_cases", lambda kind: load_cases("simple"))
    assert main(["NoSuchOp"]) == 2
    assert "no test that comes in is about NoSuchOp" in capsys.readouterr().err
    assert main(["--write", "Conv"]) == 2
    assert "--write stores all tests" in capsys.readouterr().err
