"""4-bit weights without training: rounding to nearest, AdaRound, block reconstruction with QDrop."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from benchmarks.accuracy.judging import Judge, quantize
from benchmarks.accuracy.rows import Row
from benchmarks.accuracy.subjects import Subject, in_megengine

__all__ = ["low_bits", "run"]

TARGET = "less noise than the row above"


def low_bits(bits: int, *ptq: Any) -> dict[str, Any]:
    """A config: weights of 4 bits, activations of ``bits``, both ends of the network at 8 bits."""
    ends = [
        {"match": {"position": end}, "activation": {"bits": 8}, "weight": {"bits": 8}, "optional": True}
        for end in ("first", "last")
    ]
    return {
        "weight": {"bits": 4, "narrow": False},
        "activation": {"bits": bits},
        "observers": {"weight": "mse"},
        "rules": ends,
        "ptq": ["fuse_bn", *ptq],
    }


def run(subject: Subject, iterations: int | None) -> Iterator[Row]:
    """Measures W4A8 and W4A4 in three ways each; ``iterations`` for each block, None for the default."""
    options = {} if iterations is None else {"iterations": iterations}
    suffix = "" if iterations is None else f", {iterations} iterations"
    ways = {
        "round to nearest": (),
        f"adaround{suffix}": ({"adaround": options},),
        f"reconstruct with qdrop{suffix}": ({"reconstruct": options},),
    }
    judge = Judge(subject, in_megengine(subject.net))
    for bits in (8, 4):
        check = f"W4A{bits} PTQ"
        yield judge.float_row(check)
        before: float | None = None
        for way, ptq in ways.items():
            model = quantize(subject, low_bits(bits, *ptq))
            row = judge.row(check, way, in_megengine(model))
            if before is not None and row.sqnr is not None:
                gain = row.sqnr - before
                row = dataclasses.replace(row, target=TARGET, met=gain > 0, note=f"{gain:+.1f} dB")
            before = row.sqnr
            yield row
