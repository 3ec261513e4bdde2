"""Commands that are killed, interrupted or refused the disk: their outputs are old or new, never between."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_a_few_faults_of_every_kind() -> None:
    """`python -m benchmarks.faults` does more of them."""
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.faults", "--kills", "4", "--rounds", "1"]
    process = subprocess.run(
        command, cwd=Path(__file__).parents[1], capture_output=True, text=True, timeout=600
    )
    assert process.returncode == 0, process.stderr
    assert "4 kills and 12 other faults" in process.stdout
