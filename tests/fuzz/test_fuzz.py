"""A few rounds of every target of the fuzzer, in the slow suite; `make fuzz` runs more."""

from __future__ import annotations

import pytest

from tests.fuzz.running import TARGETS, round_of

EXAMPLES = {"graphs": 2, "commands": 2, "silent": 1}


@pytest.mark.slow(untimed=True)
@pytest.mark.parametrize("target", TARGETS)
def test_fuzz_round_finds_no_failure(target: str) -> None:
    round_of(target, 0, EXAMPLES.get(target, 5))


@pytest.mark.slow
def test_fuzzed_losses_of_column_groups_are_reported() -> None:
    round_of("silent", 1, 40)
