"""W4A4 without labels: the share of the loss that learning from the float network's outputs recovers."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import qtrace
from benchmarks.accuracy.four_bits import low_bits
from benchmarks.accuracy.judging import Judge, quantize
from benchmarks.accuracy.rows import Row, add_recovered_share
from benchmarks.accuracy.subjects import Subject, batches, in_megengine, training_inputs
from qtrace.extras.finetune import FinetuneSettings

__all__ = ["run"]

CHECK = "W4A4, fine-tuned without labels"
STEPS, SEED, SHARE = 1000, 0, 0.8

# How many training inputs are learned from at most.
INPUTS = 1000


def run(subject: Subject, steps: int | None) -> Iterator[Row]:
    """Measures rounding to nearest, and the same graph after ``steps`` steps on inputs without labels."""
    steps = steps or STEPS
    judge = Judge(subject, in_megengine(subject.net))
    yield judge.float_row(CHECK)
    prepared = quantize(subject, {**low_bits(4), "fakequant": "lsq"}, convert=False)
    nearest = judge.row(CHECK, "round to nearest", in_megengine(qtrace.convert(prepared)))
    yield nearest
    inputs = batches(training_inputs(subject, INPUTS))
    report = qtrace.finetune(prepared, inputs, FinetuneSettings(steps=steps, seed=SEED))
    print(report.table(), file=sys.stderr)
    tuned = judge.row(CHECK, f"finetune, {steps} steps", in_megengine(qtrace.convert(prepared)))
    row = add_recovered_share(tuned, nearest.loss, SHARE)
    gained = tuned.sqnr - nearest.sqnr if tuned.sqnr is not None and nearest.sqnr is not None else 0.0
    yield row.noted(f"{gained:+.1f} dB")
