"""The limit of each row, for the table in the documentation: read from profiles, not measured by the run."""

from __future__ import annotations

import re
from typing import Any

__all__ = ["limit", "markdown"]

# The first pattern that is found in a row's name.
_LIMITS = (
    (r"^(run|samples), chain of", "MegEngine's dispatch of small ops"),
    (r", chain of (plain|layers|pieces), ", "Python: every expr is looked at"),
    (r"^(prepare|explain|lint|convert), ", "Python: every expr is looked at and rebuilt"),
    (r"^calibrate, chain", "MegEngine's dispatch, about 70 us an op: the images are 8x8"),
    (r"^export, chain", "Python, and protobuf's objects"),
    (r"^(save|load), chain", "pickle, and the check of every object that is read against the allow-list"),
    (r"^import", "running the modules of Python packages, pydantic's above all"),
    (r"float forward(, \d|$)|float forwards$", "MegEngine's convolutions on one thread"),
    (r"own HistogramObserver", "a search for the range at every batch"),
    (
        r"(pass|images).*onnxruntime$|auto",
        "onnxruntime's convolutions, then counting into bins, 2 to 3 ns a value",
    ),
    (
        r"pass / float forward, (minmax|moving_average)",
        "MegEngine's convolutions on one thread; Python, which gives it ops and observes, is on another core",
    ),
    (
        r"pass / float forward",
        "MegEngine's convolutions on one thread; counting into bins, 2 to 3 ns a value, is on another core",
    ),
    (r"sample: ", "onnxruntime's convolutions, and the sweep for the extremes of all values"),
    (r"calibrate, \d+ batches", "onnxruntime's convolutions"),
    (r"worker", "memory; one worker of MegEngine's gives it ops and observes on a second core in part"),
    (r"2 processes", "memory"),
    (r"memory", "the batch's activations"),
    (r"quantize_qat", "theirs: the weight gradients of convolutions, plain loops"),
    (r"QAT step / float step under", "the passes over memory of the fake quants"),
    (r"^.*torch.ao FX, QAT", "torch: fake quants and observers that run at every step"),
    (r"torch.ao", "torch: the observers"),
    (
        r"QAT step / float step",
        "dispatch of small ops on scales, then the passes over memory of the fake quants",
    ),
    (r"fast_gradients", "im2col, and the product of matrices"),
    (r"step", "convolutions forward and for the gradient of their input"),
    (r"range search", "numpy over the candidates"),
    (r"trace with its comparison", "five forwards of MegEngine"),
    (r"verify", "an onnxruntime session for the steps of the graph, and both forwards"),
    (r": (save|load)$", "pickle and the disk"),
    (r": (prepare|explain|convert|export)$", "Python: every expr is looked at and rebuilt"),
    (r"NNCF", "NNCF: its passes over the graph, and ops for statistics"),
    (r"onnxruntime.quantization", "onnxruntime: its graph with a reduction at every value"),
    (r"forward", "MegEngine's convolutions on one thread"),
)


def limit(name: str) -> str:
    """Says what limits the row ``name``.

    Raises:
        LookupError: when nobody has said.
    """
    for pattern, text in _LIMITS:
        if re.search(pattern, name):
            return text
    raise LookupError(f"benchmarks/limits.py says nothing about the row {name!r}: add what limits it.")


def markdown(stored: dict[str, Any]) -> str:
    """The table of all stored rows in Markdown."""
    lines = ["| what | median (min..max) | target | | limited by |", "| --- | --- | --- | --- | --- |"]
    lines += [_line(row) for group in stored.values() for row in group["rows"]]
    return "\n".join(lines)


def _line(row: dict[str, Any]) -> str:
    value, unit = row["value"], row["unit"]
    figure = f"{_digits(value['median'])} {unit} ({_digits(value['low'])}..{_digits(value['high'])})"
    target = "" if row["target"] is None else f"<= {row['target']:g} {unit}"
    verdict = {True: "met", False: "MISSED", None: ""}[row["met"]]
    return f"| {row['name']} | {figure} | {target} | {verdict} | {limit(row['name'])} |"


def _digits(value: float) -> str:
    return f"{value:.3f}" if value < 10 else f"{value:.1f}"
