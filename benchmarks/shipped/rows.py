"""The rows: what was measured of one file of a network in one runtime."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from benchmarks.deployed.rows import TIMED, TRAINED_NETS
from qtrace.display import format_table

__all__ = [
    "FLOAT",
    "NETS",
    "OWN",
    "RESULTS",
    "RUNTIMES",
    "ShippedRow",
    "cells",
    "headers",
    "merged",
    "read",
    "store",
    "summary",
    "table",
]

RESULTS = Path(__file__).parent.parent / "results" / "shipped.json"
NETS = (*TRAINED_NETS, *TIMED, "ResNet-50 224")
"""Trained networks, and those of published sizes with random weights: of these only the times count."""

FLOAT, OWN = "float", "qtrace"
RUNTIMES: dict[str, tuple[str, ...]] = {
    "onnxruntime": tuple(f"onnxruntime.quantization {m}" for m in ("MinMax", "Percentile", "Entropy")),
    "openvino": ("NNCF, fast bias correction",),
    "litert": ("ai-edge-quantizer static_wi8_ai8", "ai-edge-quantizer dynamic_wi8_afp32"),
    "ncnn": ("float, fp16 and packing",),
}
"""Runtime -> the files of others that qtrace's stand beside."""

_STATIC = ("onnxruntime", "openvino", "litert")  # their peers' noise is judged, too


@dataclass(frozen=True)
class ShippedRow:
    """One file in one runtime.

    Attributes:
        net: the network.
        runtime: the runtime.
        variant: `FLOAT`, `OWN`, or the peer.
        version: the version of the runtime, and of the peer where it has one.
        processor: the processor that it ran on.
        db: group of columns of an output -> ratio of the float values to their error on unseen inputs, in
            dB; infinite for the float file.
        metrics: the metrics of the task, by name.
        milliseconds: the median time of a run on one thread.
        speed: time of float / time of the file: median, and the ends of the range that holds it with 99 %.
        against: peer -> its time / time of the file, in the same way; of qtrace's file alone.
        kilobytes: the size of the files.
        on_integers: whether qtrace's file has integers; False where its default delivered float.
        reason: why there is no file; "" if there is one.
        load: the load average of the machine before this row; the benchmark itself makes about 1.
        measured: the day.
    """

    net: str
    runtime: str
    variant: str
    version: str = ""
    processor: str = ""
    db: dict[str, float] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    milliseconds: float | None = None
    speed: Sequence[float] = ()
    against: dict[str, Sequence[float]] = field(default_factory=dict)
    kilobytes: float | None = None
    on_integers: bool = True
    reason: str = ""
    load: float | None = None
    measured: str = ""

    @property
    def worst_db(self) -> float | None:
        """The SQNR of the worst group; None without a file."""
        return min(self.db.values()) if self.db else None


def merged(stored: Iterable[ShippedRow], new: Iterable[ShippedRow]) -> list[ShippedRow]:
    """Returns the stored rows with the new ones in the place of those of the same file."""
    rows = {(row.net, row.runtime, row.variant): row for row in (*stored, *new)}
    order = [
        (net, runtime, variant)
        for runtime, peers in RUNTIMES.items()
        for net in NETS
        for variant in (FLOAT, OWN, *peers)
    ]
    return [rows[key] for key in order if key in rows]


def read(file: Path = RESULTS) -> list[ShippedRow]:
    """Reads the stored rows; none if there is no file."""
    if not file.exists():
        return []
    return [ShippedRow(**row) for row in json.loads(file.read_text(encoding="utf-8"))]


def store(file: Path, rows: Sequence[ShippedRow]) -> None:
    """Writes the rows."""
    file.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n", encoding="utf-8")


def headers() -> tuple[str, ...]:
    """The heads of the columns of a table."""
    figures = ("dB by output group", "task", "ms", "against float", "qtrace against it", "kB")
    return ("network", "file", *figures, "version, processor")


def cells(row: ShippedRow, own: ShippedRow | None = None) -> tuple[str, ...]:
    """Returns the cells of a row.

    Args:
        row: the row.
        own: the row of qtrace's file of the same network and runtime.
    """
    if row.reason:
        return (row.net, row.variant, f"no file: {row.reason[:100]}", *[""] * (len(headers()) - 3))
    beside = () if own is None else own.against.get(row.variant, ())
    name = row.variant if row.on_integers or row.variant != OWN else f"{row.variant}: delivers float"
    return (
        row.net,
        name,
        _decibels(row),
        ", ".join(f"{name} {value:.1f}" for name, value in row.metrics.items()),
        "" if row.milliseconds is None else f"{row.milliseconds:.3g}",
        _ratio(row.speed),
        _ratio(beside),
        "" if row.kilobytes is None else f"{row.kilobytes:.0f}",
        f"{row.version.partition('-')[0]}, {row.processor}",
    )


def _decibels(row: ShippedRow) -> str:
    values = list(row.db.values())
    if row.variant == FLOAT or not values:
        return ""
    shown = [f"{value:.1f}" if value < 150 else "exact" for value in values]
    return ", ".join(dict.fromkeys(shown) if set(shown) == {"exact"} else shown)


def _ratio(values: Sequence[float]) -> str:
    return "{:.2f}x ({:.2f} to {:.2f})".format(*values) if values else ""


def table(rows: Sequence[ShippedRow]) -> str:
    """Returns the rows as text."""
    own = {(row.net, row.runtime): row for row in rows if row.variant == OWN}
    lines = [(row.runtime, *cells(row, own.get((row.net, row.runtime)))) for row in rows]
    return format_table(("runtime", *headers()), lines, max_width=None)


def summary(rows: Sequence[ShippedRow], runtime: str) -> str:
    """Says how often qtrace's file is as fast as the peers' with no more noise, of the networks measured."""
    rows = [row for row in rows if row.runtime == runtime and not row.reason]
    own = {row.net: row for row in rows if row.variant == OWN}
    parts = []
    for peer in RUNTIMES[runtime]:
        theirs = {row.net: row for row in rows if row.variant == peer}
        nets = [net for net in own if peer in own[net].against and net in theirs]
        fast = sum(own[net].against[peer][2] >= 1.0 for net in nets)
        text = f"as fast as {peer} or faster, within the range: {fast} of {len(nets)}"
        if runtime in _STATIC:
            trained = [net for net in nets if net in TRAINED_NETS]
            better = sum((own[n].worst_db or 0) >= (theirs[n].worst_db or 0) for n in trained)
            text += f", with no more noise in the worst group of {better} of {len(trained)} trained networks"
        parts.append(text)
    return "; ".join(parts)
