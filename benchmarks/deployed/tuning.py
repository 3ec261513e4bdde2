"""Measures what a search finds: ``python -m benchmarks.deployed.tuning``.

Each trained network is searched by ``qtrace.extras.tune`` from the default recipe, on the calibration inputs
alone. The best recipe's file is then judged in onnxruntime on the test inputs, in turns with float, beside
the rows of ``benchmarks.deployed``: the recipes written by hand. ``--net``
measures a part, whose rows replace the stored ones.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import qtrace

qtrace.quiet()  # before anything else loads MegEngine: it would print notes about a missing CUDA driver

from benchmarks import machine  # noqa: E402
from benchmarks.deployed import judging, networks, rows  # noqa: E402
from benchmarks.deployed.judging import File  # noqa: E402
from qtrace.config import QConfig  # noqa: E402
from qtrace.display import format_table  # noqa: E402
from qtrace.extras.tune import TuneSettings, Tuning, tune  # noqa: E402

__all__ = ["HEADERS", "NETS", "RESULTS", "TunedRow", "cells", "merged", "read", "rival", "table"]

RESULTS = Path(__file__).parent.parent / "results" / "tuned.json"
NETS = rows.TRAINED_NETS
BY_HAND = (*rows.PLACEMENTS, rows.MINMAX)
_BATCH = 4
# Two files whose speeds differ by less are equally fast, as far as the machine can tell.
_EQUAL_SPEED = 0.97


@dataclass(frozen=True)
class TunedRow:
    """The result of one search.

    Attributes:
        net: the network.
        trials: the number of trials.
        seconds: the time of the search.
        origin: where the best recipe comes from.
        before: SQNR of the recipe that it began with, in dB, on the test inputs.
        sqnr: SQNR of the best recipe.
        speed: time of float / time of the best recipe's file: median, smallest and largest.
        worst_lsb: largest difference of an integer between graph and file, op by op.
        metrics: name -> value of the task's metrics.
    """

    net: str
    trials: int
    seconds: float
    origin: str
    before: float
    sqnr: float
    speed: tuple[float, float, float]
    worst_lsb: int
    metrics: dict[str, float]


def measure(name: str, settings: TuneSettings) -> TunedRow:
    """Searches the best recipe of a network and judges its file."""
    network = networks.load(name)
    start = QConfig.model_validate({**qtrace.load_recipe("int8").to_dict(), "placement": "balanced"})
    batches = [network.calibration[i : i + _BATCH] for i in range(0, len(network.calibration), _BATCH)]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        started = time.monotonic()
        found = tune(network.traced, start, batches, folder / "best", settings, note=_note)
        seconds = time.monotonic() - started
        best = found.best
        assert best is not None
        exported = File(qtrace.export(network.traced, folder / "float.onnx"))
        originals = [] if network.original is None else [File(network.original)]
        exact = judging.faster([exported, *originals], network.test[:1]) if originals else exported
        file, converted = _quantize(network, found.trials[0].recipe, folder / "first.onnx")
        before = judging.measure_noise(exact, file, network.test)
        file, converted = _quantize(network, best.recipe, folder / "best.onnx")
        worst, _ = judging.judge_parity(file.path, converted, network.test)
        return TunedRow(
            name,
            len(found.trials),
            seconds,
            _origin(found),
            before,
            judging.measure_noise(exact, file, network.test),
            judging.measure_speed(exact, file, network.test[:1], 1).ratio,
            worst,
            network.metrics(file, exact),
        )


def _quantize(network: networks.Network, recipe: dict[str, Any], path: Path) -> tuple[File, Any]:
    batches = [network.calibration[i : i + 1] for i in range(len(network.calibration))]
    prepared = qtrace.prepare(network.traced, QConfig.model_validate(recipe), samples=batches)
    converted = qtrace.convert(qtrace.calibrate(prepared, batches, progress=False))
    return File(qtrace.export(converted, path)), converted


def _origin(found: Tuning) -> str:
    best = found.best
    assert best is not None
    return f"trial {best.number}, {best.origin}"


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def rival(row: TunedRow, measured: Sequence[rows.Row]) -> rows.Row | None:
    """Returns the best row of ``benchmarks.deployed`` by qtrace that is as fast as a search's result."""
    least = row.speed[0] * _EQUAL_SPEED
    known = [r for r in measured if r.net == row.net and r.variant in BY_HAND and r.sqnr is not None]
    return max((r for r in known if (r.speed or 0.0) >= least), key=lambda r: r.sqnr or 0.0, default=None)


HEADERS = (
    "network",
    "trials",
    "minutes",
    "best recipe",
    "SQNR before, dB",
    "SQNR, dB",
    "speed against float",
    "best by hand that is as fast",
    "worst LSB",
    "task",
)


def cells(row: TunedRow, measured: Sequence[rows.Row]) -> tuple[str, ...]:
    """Returns the cells of a row of the table."""
    other = rival(row, measured)
    beside = "none" if other is None else f"{other.variant}: {other.sqnr:.1f} dB, {other.speed:.2f}x"
    median, low, high = row.speed
    return (
        row.net,
        str(row.trials),
        f"{row.seconds / 60:.1f}",
        row.origin,
        f"{row.before:.1f}",
        f"{row.sqnr:.1f}",
        f"{median:.2f}x ({low:.2f} to {high:.2f})",
        beside,
        str(row.worst_lsb),
        ", ".join(f"{name} {value:.4g}" for name, value in row.metrics.items()),
    )


def table(found: Iterable[TunedRow], measured: Sequence[rows.Row]) -> str:
    """Returns the rows as a table."""
    return format_table(HEADERS, [cells(row, measured) for row in found])


def read(file: Path) -> list[TunedRow]:
    """Reads the stored rows; none if there is no file."""
    if not file.exists():
        return []
    stored = json.loads(file.read_text(encoding="utf-8"))["rows"]
    return [TunedRow(**{**row, "speed": tuple(row["speed"])}) for row in stored]


def merged(stored: Iterable[TunedRow], new: Iterable[TunedRow]) -> list[TunedRow]:
    """Returns the stored rows with the new ones in the place of those of the same network."""
    by_net = {row.net: row for row in (*stored, *new)}
    return [by_net[net] for net in NETS if net in by_net]


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.deployed.tuning", description=__doc__)
    parser.add_argument("--net", action="append", choices=NETS, help="one network; may be repeated")
    parser.add_argument("--minutes", type=float, default=30.0, help="the time of a search")
    parser.add_argument("--trials", type=int, help="the most trials of a search")
    parser.add_argument("--json", type=Path, default=RESULTS, help="where the rows are kept")
    parser.add_argument("--table", action="store_true", help="only print the stored rows")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """The command; the exit code is 1 if a file by hand is better and as fast."""
    options = _parse(arguments)
    found = read(options.json)
    measured = rows.read(rows.RESULTS)
    for name in () if options.table else options.net or NETS:
        row = measure(name, TuneSettings(options.trials, 60 * options.minutes))
        found = merged(found, [row])
        document = {"machine": machine.facts(), "rows": [asdict(row) for row in found]}
        options.json.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    print(table(found, measured))
    rivals = [(row, rival(row, measured)) for row in found]
    return int(any(other is not None and (other.sqnr or 0.0) > row.sqnr for row, other in rivals))


if __name__ == "__main__":
    sys.exit(main())
