"""The example of a plain training loop: it is the float one with three lines more, and it works."""

from __future__ import annotations

import ast
import difflib
import re
import subprocess
import sys
from pathlib import Path

import pytest

FILE = Path(__file__).parents[2] / "examples/qat_loop.py"


def _body(name: str) -> list[str]:
    source = FILE.read_text(encoding="utf-8")
    function = next(n for n in ast.parse(source).body if isinstance(n, ast.FunctionDef) and n.name == name)
    return source.splitlines()[function.body[1].lineno - 1 : function.end_lineno]


def test_three_lines_are_added_and_the_optimizer_s_groups() -> None:
    changes = list(difflib.ndiff(_body("train"), _body("quantize_and_train")))
    added = [line[2:].strip() for line in changes if line.startswith("+ ")]
    gone = [line[2:].strip() for line in changes if line.startswith("- ")]
    assert [re.search(r"# (\d):", line)[1] for line in added[:3]] == ["1", "2", "3"]
    assert added[3:] == [
        "optimizer = optim.SGD(qtrace.param_groups(model, lr, weight_decay=5e-4), lr=lr, momentum=0.9)",
        "return qtrace.convert(model)",
    ]
    assert len(gone) == 1
    assert gone[0].startswith("optimizer = ")


def _accuracies(*arguments: str) -> dict[str, float]:
    run = subprocess.run([sys.executable, str(FILE), *arguments], capture_output=True, text=True, check=True)
    rows = [line.rsplit(maxsplit=2) for line in run.stdout.splitlines()]
    return {name.strip(): float(value) for name, value, _ in rows}


@pytest.mark.slow
def test_training_loop_example_runs() -> None:
    found = _accuracies("--quick")
    assert list(found) == ["float", "4 bits, calibrated", "4 bits, trained"]
    assert all(0 < value < 100 for value in found.values())


@pytest.mark.slow
def test_training_at_4_bits_wins_back_what_calibration_loses() -> None:
    found = _accuracies()
    assert found["float"] > 95
    assert found["4 bits, trained"] >= found["4 bits, calibrated"]
    assert found["4 bits, trained"] >= found["float"] - 1.5
