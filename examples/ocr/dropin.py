"""The public client with quantized files: what it reads, and how long its networks take."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

import qtrace
from examples.ocr import metric, pages, peer
from examples.ocr.client import NETWORKS, Client, read_in_turns, record_inputs
from qtrace.display import format_table

MIN_AGREEMENT, MIN_SPEED = 99.5, 1.3  # percent of float's characters, and times float's speed
_PASSES = 3

# Height and width of the pages that are read, and of those that are calibrated on.
SIZES = (
    *((200, 232), (216, 280), (240, 240), (256, 344), (272, 208), (288, 320)),
    *((304, 376), (320, 264), (336, 400), (352, 304), (376, 296), (400, 360)),
)
CALIBRATION_SIZES = ((224, 240), (248, 224), (264, 312), (280, 296), (312, 280), (344, 328))

TITLES = {"float": "float", "int8": "qtrace.quantize", "peer": "onnxruntime.quantization", "nncf": "NNCF"}


@dataclass(frozen=True)
class Row:
    """What the client does with the files of one variant.

    Attributes:
        name: the variant.
        agreement: characters that are read as with the float files, in percent.
        seconds: for each pass, network -> its processor time for all pages.
    """

    name: str
    agreement: float
    seconds: list[dict[str, float]]

    def time_of(self, network: str) -> float:
        """The median time of a network over the passes, in seconds."""
        return median(own[network] for own in self.seconds)

    @property
    def totals(self) -> list[float]:
        """The time of all networks in each pass, in seconds."""
        return [sum(own.values()) for own in self.seconds]

    def speeds(self, reference: Row) -> list[float]:
        """How many times as fast as ``reference`` the networks are, pass by pass."""
        return [theirs / own for theirs, own in zip(reference.totals, self.totals, strict=True)]


def exchange(models: Path, out: Path, quick: bool, say: Callable[[str], None]) -> list[Row]:
    """Quantizes the client's networks with one call each, and reads pages with the client.

    Args:
        models: the folder of the float networks.
        out: the folder for the files.
        quick: a few pages of everything.
        say: prints the title of a step.

    Returns:
        A row for float, for qtrace and for each peer.
    """
    say("The public client: record what its networks get for some pages, of sizes that differ")
    seen = [pages.draw("calibration", i, size, tilted=False) for i, size in enumerate(CALIBRATION_SIZES)]
    inputs = record_inputs(models, seen[: 2 if quick else None])
    variants = {"float": {name: models / file for name, file in NETWORKS.items()}}
    for name, file in NETWORKS.items():
        for variant, path in _quantize(name, models / file, inputs[name], out, say).items():
            variants.setdefault(variant, {})[name] = path
    say("The public client reads pages with the files of each variant in turns")
    read = [pages.draw("test", i, size, tilted=False) for i, size in enumerate(SIZES[: 2 if quick else None])]
    clients = {variant: Client(files) for variant, files in variants.items()}
    texts, seconds = read_in_turns(clients, read, 1 if quick else _PASSES)
    rates = {v: metric.character_error_rate(own, texts["float"]) for v, own in texts.items()}
    return [Row(variant, 100 - rates[variant], seconds[variant]) for variant in variants]


def _quantize(
    name: str, file: Path, inputs: Sequence[np.ndarray], out: Path, say: Callable[[str], None]
) -> dict[str, Path]:
    """Quantizes one network by qtrace and by the peers."""
    say(f"client_{name}: {len(inputs)} batches, qtrace.quantize")
    paths = {"int8": out / f"client_{name}_int8.onnx", "peer": out / f"client_{name}_peer.onnx"}
    print(qtrace.quantize(file, list(inputs), paths["int8"]))
    say(f"client_{name}: the peer")
    again = qtrace.export(qtrace.from_onnx(file, _shape(inputs)), out / f"client_{name}_float.onnx")
    peer.quantize(again, inputs, paths["peer"])
    if peer.has_nncf():
        say(f"client_{name}: NNCF")
        paths["nncf"] = out / f"client_{name}_nncf.onnx"
        peer.quantize_by_nncf(again, inputs, paths["nncf"])
    return paths


def _shape(inputs: Sequence[np.ndarray]) -> dict[str, tuple[int, ...]]:
    """Returns the shape at which a network is imported; its axes stay open."""
    return {"x": (1, *inputs[0].shape[1:])}


def missed_targets(rows: Sequence[Row]) -> list[str]:
    """The targets that ``rows`` miss, a line each; none without rows."""
    if not rows:
        return []
    by_name = {row.name: row for row in rows}
    row, reference = by_name["int8"], by_name["float"]
    speed = median(row.speeds(reference))
    missed = []
    if row.agreement < MIN_AGREEMENT:
        missed.append(f"the client reads {row.agreement:.2f} % as with float, {MIN_AGREEMENT} % needed")
    if speed < MIN_SPEED:
        missed.append(f"the client's networks are {speed:.2f} times as fast, {MIN_SPEED} times needed")
    return missed


HEADERS = (
    "files of the client",
    "characters as with float",
    *NETWORKS,
    "three networks",
    "speed (all passes)",
)


def cells(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """The cells of the rows under ``HEADERS``."""
    reference = next(row for row in rows if row.name == "float")
    return [
        (
            TITLES[row.name],
            f"{row.agreement:.2f} %",
            *(f"{row.time_of(name):.2f} s" for name in NETWORKS),
            f"{median(row.totals):.2f} s",
            _format_speeds(row.speeds(reference)),
        )
        for row in rows
    ]


def format_rows(rows: Sequence[Row]) -> str:
    """The rows as text."""
    return format_table(HEADERS, cells(rows))


def _format_speeds(speeds: Sequence[float]) -> str:
    return f"{median(speeds):.2f}x ({min(speeds):.2f} to {max(speeds):.2f})"


def to_dict(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Returns the rows as plain data, with the speed against float of each pass."""
    reference = next((row for row in rows if row.name == "float"), None)
    return [{**vars(row), "speeds": row.speeds(reference or row)} for row in rows]


def from_dict(stored: dict[str, Any]) -> Row:
    """Returns a row of `to_dict`."""
    return Row(stored["name"], stored["agreement"], stored["seconds"])
