"""Predicted and measured time and noise of labellings: ``python -m benchmarks.measured``.

Each network is prepared by measurement, as `qtrace.quantize` prepares it. The table has every labelling that
was measured; its rows are stored in ``benchmarks/results/measured.json``, and ``--write`` puts them on the
page ``docs/measured/placement.md``.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import qtrace
from qtrace.benchmarking.machine import describe_machine
from qtrace.quantizing.labellings import choose_labelling
from qtrace.quantizing.measuring import prepare_measured
from qtrace.quantizing.placing import TimingPlan
from qtrace.quantizing.reporting import LogReporter
from qtrace.quantizing.times import Times

__all__ = ["MeasuredRow", "main", "measure", "table"]

RESULTS = Path(__file__).parent / "results" / "measured.json"
PAGE = Path(__file__).parents[1] / "docs" / "measured" / "placement.md"
MARK = "<!-- table of benchmarks.measured -->"
NETS = (
    "ResNet-18 96",
    "MobileNetV2 96",
    "MobileNetV3 96",
    "EfficientNet-Lite0 96",
    "RepVGG-A0 96",
    "CSPDarknet 96",
    "YOLOX-nano 96",
    "YOLOX-nano 256",
    "YOLOX-tiny 96",
    "ResNet-50 96",
)


@dataclass(frozen=True)
class MeasuredRow:
    """One labelling of a network.

    Attributes:
        net: the network and the side of its images.
        labelling: its name.
        predicted: the predicted speed beside float.
        measured: the measured speed beside float.
        low: the lower end of the measured range.
        high: the upper end.
        predicted_db: the predicted SQNR; None for float.
        measured_db: the measured SQNR by plain ranges; None for float.
        chosen: whether it was chosen.
        processor: the processor.
    """

    net: str
    labelling: str
    predicted: float
    measured: float
    low: float
    high: float
    predicted_db: float | None
    measured_db: float | None
    chosen: bool
    processor: str


def measure(net: str) -> list[MeasuredRow]:
    """Measures the labellings of a network."""
    from benchmarks.deployed.networks import load
    from qtrace.config.recipe import as_qconfig

    network = load(net)
    calibration = [network.calibration[i : i + 1] for i in range(len(network.calibration))]
    held_back = [network.test[i : i + 1] for i in range(len(network.test))]
    times = Times()
    config = as_qconfig({**qtrace.load_recipe("int8").to_dict()})
    prepare_measured(network.traced, config, calibration, lambda: held_back, TimingPlan(times), LogReporter())
    if not times.labellings:
        return []
    chosen = choose_labelling(times.labellings)
    whole = next(m for m in times.labellings if m.name == "float")
    machine = describe_machine("onnxruntime", "onnxruntime", 1)
    rows = []
    for number, own in enumerate(times.labellings):
        faster = whole.speed.ratio
        noise = sum(own.noise) / len(own.noise)
        in_float = own is whole
        rows.append(
            MeasuredRow(
                net,
                own.name,
                whole.predicted_seconds / own.predicted_seconds,
                own.speed.ratio / faster,
                own.speed.low / faster,
                own.speed.high / faster,
                None if in_float else own.predicted_db,
                None if in_float or noise <= 0 else -10 * math.log10(noise),
                number == chosen,
                machine.processor,
            )
        )
    return rows


def table(rows: Sequence[MeasuredRow]) -> str:
    """Returns the rows as a table of Markdown."""
    lines = [
        "| network | labelling | predicted | measured (range) | predicted dB | measured dB |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        name = f"**{row.labelling}**" if row.chosen else row.labelling
        spread = f"{row.measured:.2f}x ({row.low:.2f} to {row.high:.2f})"
        noises = ["-" if db is None else f"{db:.1f}" for db in (row.predicted_db, row.measured_db)]
        lines.append(f"| {row.net} | {name} | {row.predicted:.2f}x | {spread} | {' | '.join(noises)} |")
    return "\n".join(lines)


def read(path: Path = RESULTS) -> list[MeasuredRow]:
    """Reads the stored rows; none if there is no file."""
    if not path.exists():
        return []
    return [MeasuredRow(**entry) for entry in json.loads(path.read_text(encoding="utf-8"))]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures networks, stores their rows, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--net", action="append", choices=NETS, help="a network; default: all")
    parser.add_argument("--write", action="store_true", help="only write the stored rows to the page")
    options = parser.parse_args(arguments)
    rows = read()
    for net in () if options.write else options.net or NETS:
        rows = [row for row in rows if row.net != net] + measure(net)
        rows.sort(key=lambda row: NETS.index(row.net))
        RESULTS.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n", encoding="utf-8")
        own = [row for row in rows if row.net == net]
        print(table(own), flush=True)
    if options.write:
        head, _, _ = PAGE.read_text(encoding="utf-8").partition(MARK)
        PAGE.write_text(f"{head}{MARK}\n\n{table(rows)}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
