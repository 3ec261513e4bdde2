"""The rows of the benchmark: what was measured of one file of one network."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from qtrace.display import format_table

__all__ = [
    "NNCF",
    "ONNXRUNTIME",
    "OWN_TIMES",
    "PEERS",
    "PLACEMENTS",
    "RESULTS",
    "TIMED",
    "TRAINED",
    "TRAINED_NETS",
    "VARIANTS",
    "VARIANTS_TIMED",
    "Row",
    "merged",
    "read",
    "store",
    "table",
]

RESULTS = Path(__file__).parent.parent / "results" / "deployed.json"

TRAINED = ("recogniser", "detector", "classifier")
"""The networks of PP-OCRv4."""
TRAINED_NETS = (*TRAINED, "resnet digits", "mobilenet digits", "swish digits", "shapes detector")
"""All trained networks: those judged by their outputs and a task."""
TIMED = (
    "ResNet-18 96",
    "ResNet-50 96",
    "MobileNetV2 96",
    "MobileNetV3 96",
    "EfficientNet-Lite0 96",
    "RepVGG-A0 96",
    "CSPDarknet 96",
    "CSPDarknet 256",
    "YOLOX-nano 96",
    "YOLOX-nano 256",
    "YOLOX-tiny 416",
    "YOLOX-s 416",
)
"""The networks with random weights: only their times mean something."""

FLOAT = "float"
PLACEMENTS = ("balanced", "fastest", "everything")
MINMAX = "minmax"
ONNXRUNTIME = {f"onnxruntime.quantization {m}": m for m in ("MinMax", "Percentile", "Entropy")}
NNCF = {"NNCF, fast bias correction": "fast", "NNCF, full bias correction": "full"}
PEERS = (*ONNXRUNTIME, *NNCF)
OWN_TIMES = {f"{placement}, own times": placement for placement in ("balanced", "fastest")}
"""Placements by the times of the machine that runs the benchmark, not by the packaged ones."""
VARIANTS = (FLOAT, *PLACEMENTS, MINMAX, *OWN_TIMES, *PEERS)
VARIANTS_TIMED = (FLOAT, "balanced", "fastest", *OWN_TIMES, "onnxruntime.quantization MinMax")


@dataclass(frozen=True)
class Row:
    """One file of a network.

    Attributes:
        net: the network.
        variant: how it was quantized.
        sqnr: ratio of the float outputs to their error on unseen inputs, in dB; None without a file.
        speed: time of float / time of the file on one thread: median of the rounds; None without a file.
        low: the smallest of these ratios.
        high: the largest one.
        seconds: time to quantize: `prepare` and `calibrate`, or the whole of the peer.
        two_threads: median, smallest and largest ratio on two threads.
        milliseconds: median time of a run on one thread.
        predicted: the time that the cost table by which it was placed predicts, in milliseconds.
        worst_lsb: largest difference of an integer between graph and file, op by op, without optimizations;
            None for files that are not of qtrace.
        equal: share of equal integers, op by op.
        metrics: name -> value of the task's metrics.
        mode: the placement that was chosen: "everything" where no op gains time by integers.
        reason: why there is no file; "" if there is one.
        load: the load average of the machine before this row; the benchmark itself makes about 1.
        machine: the processor that measured it, and the day.
    """

    net: str
    variant: str
    sqnr: float | None = None
    speed: float | None = None
    low: float | None = None
    high: float | None = None
    seconds: float | None = None
    two_threads: tuple[float, float, float] | None = None
    milliseconds: float | None = None
    predicted: float | None = None
    worst_lsb: int | None = None
    equal: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    mode: str = ""
    reason: str = ""
    load: float | None = None
    machine: str = ""

    @property
    def prediction_error(self) -> float | None:
        """Predicted / measured time, minus 1; None if one of them is unknown."""
        if self.predicted is None or self.milliseconds is None:
            return None
        return self.predicted / self.milliseconds - 1


def merged(stored: Iterable[Row], new: Iterable[Row]) -> list[Row]:
    """Returns the stored rows with the new ones in the place of those of the same network and variant."""
    rows = {(row.net, row.variant): row for row in (*stored, *new)}
    order = [(net, variant) for net in (*TRAINED_NETS, *TIMED) for variant in VARIANTS]
    return [rows[key] for key in order if key in rows]


def read(file: Path) -> list[Row]:
    """Reads the stored rows; none if there is no file."""
    if not file.exists():
        return []
    return [Row(**row) for row in json.loads(file.read_text(encoding="utf-8"))["rows"]]


def store(file: Path, machine: dict[str, Any], rows: Sequence[Row]) -> None:
    """Writes the rows with the facts of the machine."""
    document = {"machine": machine, "rows": [asdict(row) for row in rows]}
    file.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


HEADERS = (
    "network",
    "variant",
    "SQNR, dB",
    "speed against float",
    "two threads",
    "ms",
    "predicted, ms",
    "worst LSB",
    "equal",
    "task",
    "seconds to quantize",
)


def cells(row: Row) -> tuple[str, ...]:
    """Returns the cells of a row of the table."""
    if row.reason:
        return (row.net, row.variant, f"no file: {row.reason}", *[""] * (len(HEADERS) - 3))
    return (
        row.net,
        row.variant,
        _number(row.sqnr, ".1f"),
        _speed((row.speed, row.low, row.high)) if row.speed is not None else "",
        _speed(row.two_threads) if row.two_threads is not None else "",
        _number(row.milliseconds, ".2f"),
        _number(row.predicted, ".2f"),
        "" if row.worst_lsb is None else str(row.worst_lsb),
        _number(row.equal, ".4%"),
        ", ".join(f"{name} {value:.4g}" for name, value in row.metrics.items()),
        _number(row.seconds, ".1f"),
    )


def table(rows: Iterable[Row]) -> str:
    """Returns the rows as text."""
    return format_table(HEADERS, [cells(row) for row in rows], max_width=None)


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _speed(values: Sequence[float | None]) -> str:
    median, low, high = values
    return f"{median:.2f}x ({low:.2f}..{high:.2f})"
