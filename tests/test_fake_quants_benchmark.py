"""The pieces of the benchmark of fake quants; its figures come from ``python -m benchmarks.fake_quants``."""

from __future__ import annotations

import statistics

import pytest

from benchmarks import fake_quants
from qtrace import plugins
from scripts.stored import FakeQuantRow, load


def test_every_fake_quant_is_measured_and_ends_below_its_start() -> None:
    rows = {row.network: row for row in load(FakeQuantRow)}
    assert set(rows) == set(fake_quants.WAYS) == set(plugins.known("qtrace.fakequant"))
    for row in rows.values():
        assert row.steps == fake_quants.STEPS
        assert len(row.losses) == len(row.accuracies) == 3
        assert statistics.median(row.losses) < row.start[0], row.network
        assert statistics.median(row.accuracies) >= row.start[1], row.network


@pytest.mark.parametrize("name", ["tqt", pytest.param("dorefa", marks=pytest.mark.slow)])
def test_a_few_steps_are_measured(name: str) -> None:
    row = fake_quants.measure(name, steps=3, seeds=(0,))
    assert row.cells()[0] == f"`{name}`"
    assert len(row.losses) == 1
    assert row.start[0] > row.floats[0] > 0
