"""Trained networks that read text, on their way to int8: ``make ocr-demo`` runs it.

The exit code is 1 if a target is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

import qtrace
from qtrace.storage.outputs import output_folder

qtrace.quiet()  # before anything else loads MegEngine: it would print notes about a missing CUDA driver

from tqdm import tqdm  # noqa: E402

from examples.ocr import decoding, dropin, lines, metric, package, pages, peer, pictures, quantizing  # noqa: E402
from examples.ocr.client import NETWORKS  # noqa: E402
from examples.ocr.runners import Runner, measure_latencies  # noqa: E402
from qtrace.display import format_table  # noqa: E402

# What the demo must show: points of line accuracy below float, IoU with float's map, LSB op by op.
MAX_DROP, MIN_IOU, MAX_LSB = 2.0, 0.94, 1

VARIANTS = ("float", "int8", "tuned", "peer")
TITLES = {
    "float": "float",
    "int8": "int8",
    "tuned": "int8, fine-tuned",
    "peer": "onnxruntime.quantization",
}


@dataclass
class Row:
    """The results of one variant of both networks, in onnxruntime.

    Attributes:
        name: the variant.
        accuracy: percentage of lines read without any error.
        error_rate: wrong characters, in percent.
        iou: IoU of the detector's thresholded map with that of float.
        milliseconds: smallest time of the recogniser for a line.
        megabytes: size of both files.
        worst_lsb: largest difference of an integer between graph and runtime, op by op; None without a graph.
    """

    name: str
    accuracy: float
    error_rate: float
    iou: float
    milliseconds: float
    megabytes: float
    worst_lsb: int | None = None


def missed_targets(rows: Sequence[Row]) -> list[str]:
    """The targets that ``rows`` miss, a line each; none without rows."""
    if not rows:
        return []
    by_name = {row.name: row for row in rows}
    floor = by_name["float"].accuracy - MAX_DROP
    missed = []
    for name in ("int8", "tuned"):
        row, title = by_name[name], TITLES[name]
        if row.accuracy < floor:
            missed.append(f"line accuracy of {title} is {row.accuracy:.1f} %, at least {floor:.1f} % needed")
        if row.iou < MIN_IOU:
            missed.append(f"IoU of {title} is {row.iou:.3f}, at least {MIN_IOU} needed")
        if row.worst_lsb is None or row.worst_lsb > MAX_LSB:
            missed.append(f"{title} differs by {row.worst_lsb} LSB in onnxruntime, at most {MAX_LSB} allowed")
    return missed


def format_rows(rows: Sequence[Row]) -> str:
    """The rows as text."""
    headers = ("variant", "lines right", "wrong characters", "IoU of map", "ms a line", "MB", "worst LSB")
    cells = [
        (
            TITLES[r.name],
            f"{r.accuracy:.1f} %",
            f"{r.error_rate:.2f} %",
            f"{r.iou:.3f}",
            f"{r.milliseconds:.1f}",
            f"{r.megabytes:.1f}",
            "-" if r.worst_lsb is None else str(r.worst_lsb),
        )
        for r in rows
    ]
    return format_table(headers, cells)


class Demo:
    """The steps of the demo, and what they leave in ``out``.

    Args:
        out: an empty folder for the artefacts.
        quick: a few images and steps of everything, to see that all work; the targets do not count.
        client: whether the public client of the package runs, too, on files of `qtrace.quantize`.
        alone: whether the client is all that runs.
    """

    def __init__(self, out: Path, quick: bool = False, client: bool = False, alone: bool = False) -> None:
        self.out, self.quick, self.models = out, quick, package.models_folder()
        self.client, self.alone = client or alone, alone
        self.started = time.monotonic()

    def run(self) -> list[str]:
        """Takes all steps; returns the targets that were missed, a line each."""
        rows = [] if self.alone else self.compare_variants()
        read_by_client, refused = self.exchange_files() if self.client else ([], [])
        missed = [*missed_targets(rows), *refused, *dropin.missed_targets(read_by_client)]
        missed = [] if self.quick else missed
        self.write_results(rows, read_by_client, missed)
        return missed

    def compare_variants(self) -> list[Row]:
        """Quantizes recogniser and detector, fine-tunes them, and measures each variant."""
        counts = (4, 4, 8, 4) if self.quick else (48, 32, 300, 48)
        minutes = 0.2 if self.quick else 1.0
        self.say("Render lines and pages")
        read = lines.normalize(lines.load("calibration", counts[0]))
        seen = pages.normalize(pages.load("calibration", counts[1]))
        recogniser, detector = (self.models / f for f in (package.RECOGNISER, package.DETECTOR))
        worst = [
            quantizing.quantize(recogniser, read, self.out, "recogniser", minutes, self.say),
            quantizing.quantize(detector, seen, self.out, "detector", minutes, self.say),
        ]
        self.say("onnxruntime.quantization, the peer")
        for name, samples in (("recogniser", read), ("detector", seen)):
            batches = [samples[i : i + 1] for i in range(len(samples))]
            peer.quantize(self.out / f"{name}_float.onnx", batches, self.out / f"{name}_peer.onnx")
        self.say(f"Read {counts[2]} lines and look at {counts[3]} pages, in a font that nothing has seen")
        rows = self.judge(lines.load("test", counts[2]), pages.normalize(pages.load("test", counts[3])))
        for row in rows:
            found = [w[row.name] for w in worst if row.name in w]
            row.worst_lsb = max(found) if found else None
        print(format_rows(rows))
        return rows

    def exchange_files(self) -> tuple[list[dropin.Row], list[str]]:
        """Runs the public client with files of one call each; returns its rows, or why a file was refused."""
        try:
            rows = dropin.exchange(self.models, self.out, self.quick, self.say)
        except qtrace.QtraceError as error:
            refused = f"the client has no files: {error}"
            print(refused)
            return [], [refused]
        print(dropin.format_rows(rows))
        return rows, []

    def judge(self, test: list[lines.Line], test_pages: np.ndarray) -> list[Row]:
        """Measures every variant in onnxruntime and writes the picture of the lines that differ."""
        characters = decoding.read_characters(self.models / package.RECOGNISER)
        inputs, truth = lines.normalize(test), [line.text for line in test]
        readers = {name: Runner(self.out / f"recogniser_{name}.onnx") for name in VARIANTS}
        times = measure_latencies(readers, [inputs[i : i + 1] for i in range(4)], 3 if self.quick else 30)
        readings, rows, reference = {}, [], None
        for name in tqdm(VARIANTS, desc="judge", unit="variant"):
            texts = decoding.decode(readers[name].run_in_batches(inputs), characters)
            maps = Runner(self.out / f"detector_{name}.onnx").run_in_batches(test_pages, 4)
            reference = maps if reference is None else reference
            sizes = [(self.out / f"{kind}_{name}.onnx").stat().st_size for kind in ("recogniser", "detector")]
            readings[TITLES[name]] = texts
            accuracy = metric.line_accuracy(texts, truth)
            errors, iou = metric.character_error_rate(texts, truth), metric.text_iou(maps, reference)
            rows.append(Row(name, accuracy, errors, iou, times[name], sum(sizes) / 1e6))
        shown = {TITLES[name]: readings[TITLES[name]] for name in ("float", "int8", "tuned")}
        count = pictures.save_lines(self.out / "lines_that_differ.png", test, shown)
        print(f"{count} of {len(test)} lines are not read alike by float and int8")
        return rows

    def say(self, text: str) -> None:
        """Prints the title of a step and the time since the start."""
        print(f"\n[{time.monotonic() - self.started:4.0f} s] {text}", flush=True)

    def write_results(
        self, rows: Sequence[Row], read_by_client: Sequence[dropin.Row], missed: list[str]
    ) -> None:
        """Writes results.json and README.md."""
        seconds = round(time.monotonic() - self.started, 1)
        results = {"quick": self.quick, "seconds": seconds, "missed": missed}
        results["variants"] = [asdict(row) for row in rows]
        results["client"] = dropin.to_dict(read_by_client)
        (self.out / "results.json").write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
        text = "# What `make ocr-demo` left here\n\n{}\n\n```\n{}\n\n{}\n```\n"
        files = ((name, what) for name, what in ARTEFACTS.items() if (self.out / name).exists())
        listed = "\n".join(f"- `{name}`: {what}" for name, what in files)
        tables = (
            format_rows(rows) if rows else "",
            dropin.format_rows(read_by_client) if read_by_client else "",
        )
        (self.out / "README.md").write_text(text.format(listed, *tables), encoding="utf-8")


_MEANING = {
    "float": "the imported network, exported in float.",
    "int8": "calibrated.",
    "tuned": "calibrated and fine-tuned without labels.",
    "peer": "by onnxruntime.quantization.",
}
_OF_CLIENT = {
    "float": "imported and exported in float.",
    "int8": "by qtrace.quantize.",
    "peer": "by onnxruntime.quantization.",
    "nncf": "by NNCF.",
}
ARTEFACTS = {
    **{f"{kind}_{v}.onnx": _MEANING[v] for kind in ("recogniser", "detector") for v in VARIANTS},
    **{
        f"client_{network}_{v}.onnx": f"a network of the public client, {what}"
        for network in NETWORKS
        for v, what in _OF_CLIENT.items()
    },
    "lines_that_differ.png": "lines that float and int8 do not read alike; green is right, red is wrong.",
    "results.json": "the numbers of the tables below.",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the demo; 1 if a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("ocr-demo-out"), help="where the artefacts go")
    parser.add_argument("--quick", action="store_true", help="a few steps; the targets do not count")
    parser.add_argument(
        "--client", action="store_true", help="also run the public client on files of qtrace.quantize"
    )
    parser.add_argument("--only-client", action="store_true", help="run the public client alone")
    options = parser.parse_args(arguments)
    try:
        package.models_folder()
        if options.client or options.only_client:
            package.check_client()
    except package.MissingModelsError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    with output_folder(options.out, names=("README.md", *ARTEFACTS), force=True) as folder:
        missed = Demo(folder, options.quick, options.client, options.only_client).run()
    verdict = "MISSED: " + "; ".join(missed) if missed else "" if options.quick else "All targets are met."
    print(f"\nEverything is in {os.path.relpath(options.out)}/, see its README.md. {verdict}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
