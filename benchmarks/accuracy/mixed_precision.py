"""The fewest layers of a detector in 4 bits to raise to 8: found by the search, and by noise alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import qtrace
from benchmarks.accuracy.judging import Judge, quantize
from benchmarks.accuracy.rows import Row
from benchmarks.accuracy.subjects import Subject, batches, in_megengine, training_inputs
from qtrace.sensitivity import DetectionLoss, Goal, Level, MixedPrecision, mixed_precision
from qtrace.sensitivity.simulation import Simulation

__all__ = ["add_target", "run"]

CHECK = "mixed precision, W4A4"
RECIPE = Path(__file__).parent.parent.parent / "examples/detector/recipe_w4a4.yaml"
RAISED_TO = "w8a8"
LOSS = DetectionLoss(tuple(Level(3 * n, 3 * n + 1, 3 * n + 2) for n in range(3)))

# What may be lost, as shares of what W4A4 loses.
ALLOWED = (0.6, 0.4)

# How many images the search measures on; they are from the training part, the test part only judges.
MEASURED = 64


def run(subject: Subject, quick: bool = False) -> Iterator[Row]:
    """Measures W4A4, and the layers that the search raises for each allowed loss, on the test part."""
    judge = Judge(subject, in_megengine(subject.net))
    yield judge.float_row(CHECK)
    traced = qtrace.trace(subject.net, subject.calibration[:1], check=False)
    calibration = batches(subject.calibration)
    unseen = batches(training_inputs(subject, 8 if quick else MEASURED), 32)
    prepared = quantize(subject, RECIPE, traced, convert=False)
    low = Simulation(prepared, unseen, LOSS)
    lost, layers = -low.value(), len(low.layers)
    yield judge.row(CHECK, "nothing raised", in_megengine(qtrace.convert(prepared)), f"{layers} layers")
    for share in ALLOWED[:1] if quick else ALLOWED:
        search = mixed_precision(
            traced,
            RECIPE,
            calibration,
            goal=Goal(max_drop=share * lost),
            evaluation=unseen,
            metric=LOSS,
            raise_to=RAISED_TO,
        )
        method = f"raised to {RAISED_TO} for {share:.0%} of its detection loss"
        yield add_target(
            judge.row(CHECK, method, in_megengine(quantize(subject, search.qconfig, traced))), search
        )


def add_target(row: Row, search: MixedPrecision) -> Row:
    """Adds the target to a row: the goal is reached, by fewer layers than in the order of their noise."""
    assert search.by_noise is not None
    note = f"{len(search.layers)} layers; in the order of noise {search.by_noise}"
    if not search.passed:
        note += f"; loss {-search.reached:.3g}, allowed {-(search.target or 0.0):.3g}"
    met = search.passed and len(search.layers) < search.by_noise
    return dataclasses.replace(row, target="fewer layers than by noise", met=met, note=note)
