"""A detector on its way to int8 and to 4 bits: calibrate, train on, export, run, and look at the boxes.

``make detector-demo`` runs it. Calibration, export and verification are commands, printed as they run, so
that each can be repeated in the folder of artefacts; training is a loop in Python. The exit code is 1 if a
target is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

import qtrace
from qtrace.storage.outputs import output_folder

qtrace.quiet()  # before anything else loads MegEngine: it would print notes about a missing CUDA driver

from examples.detector import boxes, data, pictures  # noqa: E402
from examples.detector.metric import Detections, iou  # noqa: E402
from examples.detector.runners import in_megengine, in_onnxruntime  # noqa: E402
from examples.detector.train import train  # noqa: E402
from examples.detector.training import fit  # noqa: E402
from qtrace.display import format_table  # noqa: E402

HERE = Path(__file__).parent
RECIPES = {"W8A8": "recipe.yaml", "W4A4": "recipe_w4a4.yaml"}
QAT_STEPS = {"W8A8": 100, "W4A4": 300}

# What the demo must show, in points of mAP below float.
MAX_DROP = {"PTQ W8A8": 1.0, "QAT W8A8": 0.3}

SHOWN, MIN_SHOWN_SCORE = 8, 0.35


@dataclass
class Row:
    """The results of one variant on the test images.

    Attributes:
        name: the variant.
        graph: mAP of its graph in MegEngine, in percent.
        graph_ap50: AP of the graph at IoU .50 alone.
        runtime: mAP of its file in onnxruntime; None where there is no file.
        worst_lsb: largest difference of an integer between graph and runtime, op by op.
    """

    name: str
    graph: float
    graph_ap50: float
    runtime: float | None = None
    worst_lsb: int | None = None


class Demo:
    """The steps of the demo, and what they leave in ``out``.

    Args:
        out: an empty folder for the artefacts.
        retrain: whether to train the float network rather than to take the weights in the repository.
        quick: a few images and a few steps of everything, to see that all work; the targets do not count.
    """

    def __init__(self, out: Path, retrain: bool = False, quick: bool = False) -> None:
        self.out, self.retrain, self.quick = out, retrain, quick
        self.test = data.load("test", 20 if quick else None)
        self.training = data.load("train", 50 if quick else None)
        self.rows: list[Row] = []
        self.detections: dict[str, Sequence[Detections]] = {"truth": pictures.true_detections(self.test)}
        self.started = time.monotonic()

    # -- the steps ----------------------------------------------------------------------------------

    def run(self) -> list[str]:
        """Takes all steps; returns the targets that were missed, a line each."""
        self.save_data()
        self.trace()
        for scheme in RECIPES:
            self.calibrate(scheme)
            self.train_on(scheme)
        self.draw()
        missed = [] if self.quick else missed_targets(self.rows)
        self.write_results(missed)
        self.say(f"Results on {len(self.test)} test images")
        print(self.table())
        return missed

    def save_data(self) -> None:
        """Writes what the commands read: images and recipes."""
        self.say("Shapes on noise, generated: images to calibrate and to verify")
        for recipe in RECIPES.values():
            shutil.copy(HERE / recipe, self.out)
        data.save_images(data.load("calibration", 16 if self.quick else None), self.out / "calibration")
        data.save_images(self.test.first(64), self.out / "verification")

    def trace(self) -> None:
        """Traces the float network by command, and measures it."""
        environment = {"PYTHONPATH": os.path.relpath(HERE.parent.parent, self.out)}
        if self.retrain:
            self.say("Train the float network")
            print(json.dumps(train(self.out / "weights.npz", *([3] if self.quick else []))))
            environment["DETECTOR_WEIGHTS"] = "weights.npz"
        self.say("The float network")
        factory = "examples.detector.net:pretrained"
        self.command("trace", factory, "--shape", "1x3x64x64", "--out", "float.mge", **environment)
        self.add("float", qtrace.load(self.out / "float.mge"))

    def calibrate(self, scheme: str) -> None:
        """Post-training quantization by command."""
        self.say(f"PTQ {scheme}, by the command line")
        folder, recipe = scheme.lower(), RECIPES[scheme]
        quantized = f"{folder}/quantized.mge"
        self.command("calibrate", "float.mge", "--data", "calibration", "--recipe", recipe, "--out", folder)
        paragraphs = self.command("explain", quantized).split("\n\n")
        print(next(text for text in paragraphs if text.startswith("backend:")))
        self.add(f"PTQ {scheme}", qtrace.load(self.out / quantized))
        if scheme == "W8A8":
            self.export(f"PTQ {scheme}", quantized, "w8a8.onnx")

    def train_on(self, scheme: str) -> None:
        """Quantization-aware training of what calibration left, in a plain loop."""
        self.say(f"QAT {scheme}: the calibrated graph, trained on")
        qat = qtrace.load_recipe(HERE / RECIPES[scheme]).qat
        assert qat is not None
        assert qat.lr is not None
        prepared = qtrace.load(self.out / scheme.lower() / "prepared.mge")
        qtrace.set_phase(prepared, "train")
        prepared.train()
        steps = 3 if self.quick else QAT_STEPS[scheme]
        fit(prepared, parameter_groups(prepared, qat.lr), self.training, steps=steps, seed=1, title="QAT")
        prepared.eval()
        quantized = qtrace.convert(prepared)
        file = f"{scheme.lower()}_qat.mge"
        qtrace.save(quantized, self.out / file)
        self.add(f"QAT {scheme}", quantized)
        if scheme == "W8A8":
            self.export(f"QAT {scheme}", file, "w8a8_qat.onnx")

    def export(self, name: str, quantized: str, file: str) -> None:
        """Writes a file for onnxruntime by command, compares its integers with the graph's, measures it."""
        self.command("export", quantized, "--out", file)
        images = ("--data", "verification", "--recipe", RECIPES["W8A8"])
        verified = json.loads(self.command("verify", file, "--model", quantized, *images, "--json"))
        report = (self.out / file).with_suffix(".verify.json")
        report.write_text(json.dumps(verified, indent=2) + "\n", encoding="utf-8")
        row = self.rows[-1]
        detections = boxes.detect(in_onnxruntime(self.out / file), self.test)
        row.runtime = boxes.evaluate(detections, self.test).map
        row.worst_lsb = verified["worst_lsb"]["op_by_op"]
        self.detections[name] = detections
        print(f"onnxruntime: mAP {row.runtime:.2f}, worst {row.worst_lsb} LSB op by op")

    def draw(self) -> None:
        """Writes pictures of the first test images, and of those on which 8 bits change most."""
        columns = {
            name: self.detections[name] for name in ("truth", "float", "PTQ W8A8", "PTQ W4A4", "QAT W4A4")
        }
        first = range(min(SHOWN, len(self.test)))
        pictures.save_grid(self.out / "boxes.png", self.test, columns, first, MIN_SHOWN_SCORE)
        apart = [
            detection_change(a, b)
            for a, b in zip(self.detections["float"], self.detections["PTQ W8A8"], strict=True)
        ]
        worst = np.argsort(-np.array(apart), kind="stable")[:SHOWN].tolist()
        pictures.save_grid(self.out / "boxes_changed_most.png", self.test, columns, worst, MIN_SHOWN_SCORE)

    # -- what they share ----------------------------------------------------------------------------

    def add(self, name: str, model: Any) -> None:
        """Adds the row of a graph."""
        detections = boxes.detect(in_megengine(model), self.test)
        precision = boxes.evaluate(detections, self.test)
        self.detections[name] = detections
        self.rows.append(Row(name, precision.map, precision.ap50))
        print(f"{name}: mAP {precision.map:.2f}, AP50 {precision.ap50:.2f}")

    def command(self, *words: str, **environment: str) -> str:
        """Runs ``qtrace`` in the folder of artefacts, shows the command line, and returns its stdout.

        Raises:
            subprocess.CalledProcessError: when it fails; its messages stand on stderr.
        """
        settings = [f"{name}={value}" for name, value in environment.items()]
        print("$", shlex.join([*settings, "qtrace", *words]), flush=True)
        process = subprocess.run(
            [sys.executable, "-m", "qtrace.cli", *words],
            cwd=self.out,
            env={**os.environ, **environment},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        return process.stdout

    def say(self, text: str) -> None:
        """Prints the title of a step and the time since the start."""
        print(f"\n[{time.monotonic() - self.started:4.0f} s] {text}", flush=True)

    # -- results ------------------------------------------------------------------------------------

    def table(self) -> str:
        """The rows as text."""
        base = self.rows[0].graph
        headers = ("variant", "mAP", "of float", "AP50", "mAP in onnxruntime", "worst LSB")
        rows = [
            (
                r.name,
                f"{r.graph:.2f}",
                f"{r.graph - base:+.2f}" if r is not self.rows[0] else "",
                f"{r.graph_ap50:.2f}",
                "-" if r.runtime is None else f"{r.runtime:.2f}",
                "-" if r.worst_lsb is None else str(r.worst_lsb),
            )
            for r in self.rows
        ]
        return format_table(headers, rows)

    def write_results(self, missed: list[str]) -> None:
        """Writes results.json and README.md."""
        results = {
            "quick": self.quick,
            "retrained": self.retrain,
            "seconds": round(time.monotonic() - self.started, 1),
            "missed": missed,
            "variants": [asdict(row) for row in self.rows],
        }
        (self.out / "results.json").write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
        lines = [f"- `{', '.join(names)}`: {text}" for names, text in ARTEFACTS.items()]
        text = "# What `make detector-demo` left here\n\n{}\n\n```\n{}\n```\n"
        (self.out / "README.md").write_text(text.format("\n".join(lines), self.table()), encoding="utf-8")


# Those with more than one file in a line stand together in the README.
ARTEFACTS = {
    ("recipe.yaml", "recipe_w4a4.yaml"): "how it is quantized, copied from examples/detector.",
    ("calibration", "verification"): "the images that the commands read.",
    ("float.mge",): "the traced float network.",
    ("w8a8", "w4a4"): "what `qtrace calibrate` wrote: prepared.mge, quantized.mge, report.json, explain.txt.",
    ("w8a8_qat.mge", "w4a4_qat.mge"): "the networks after training, converted.",
    ("w8a8.onnx", "w8a8_qat.onnx"): "int8 for onnxruntime, calibrated only and trained on.",
    ("w8a8.verify.json", "w8a8_qat.verify.json"): "every integer tensor of the files against the graph's.",
    ("boxes.png",): "the first test images with the boxes of each network, and their scores.",
    ("boxes_changed_most.png",): "the test images on which int8 moves the boxes most.",
    ("results.json",): "the numbers of the table below.",
    ("weights.npz", "weights.json"): "with --train: the new float weights, and what they reach.",
}


def parameter_groups(prepared: Any, lr: float) -> list[tuple[list[Any], float, float]]:
    """Weights as they are; learned scales at a tenth of their rate, and without decay.

    Scales are ten times smaller than weights, and shrinking a scale does not regularize anything.
    """
    scales = {name: p for name, p in prepared.named_parameters() if name.startswith("qsites.")}
    weights = [p for name, p in prepared.named_parameters() if name not in scales]
    return [(weights, lr, 0.01), (list(scales.values()), lr / 10, 0.0)]


def detection_change(before: Detections, after: Detections) -> float:
    """Sums up, over the shown boxes of two networks, 1 - IoU with the best box of the other network."""
    total = 0.0
    for first, second in ((before, after), (after, before)):
        shown, rest = (d.scores >= MIN_SHOWN_SCORE for d in (first, second))
        overlaps = iou(first.boxes[shown], second.boxes[rest])
        same = first.labels[shown][:, None] == second.labels[rest]
        best = (overlaps * same).max(axis=1, initial=0.0)
        total += float((1 - best).sum())
    return total


def missed_targets(rows: Sequence[Row]) -> list[str]:
    """The targets that ``rows`` miss, a line each."""
    by_name = {row.name: row for row in rows}
    floor = by_name["float"].graph
    sentences = []
    for name, drop in MAX_DROP.items():
        row = by_name[name]
        for place, value in (("the graph", row.graph), ("onnxruntime", row.runtime)):
            if value is not None and value < floor - drop:
                sentences.append(
                    f"mAP of {name} in {place} is {value:.2f}, at least {floor - drop:.2f} needed"
                )
    if by_name["QAT W4A4"].graph <= by_name["PTQ W4A4"].graph:
        sentences.append("QAT W4A4 is no better than PTQ W4A4")
    return sentences


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the demo; 1 if a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("detector-demo-out"), help="where the artefacts go")
    parser.add_argument("--train", action="store_true", help="train the float network anew, too")
    parser.add_argument("--quick", action="store_true", help="a few steps; the targets do not count")
    options = parser.parse_args(arguments)
    names = ("README.md", *(name for line in ARTEFACTS for name in line))
    with output_folder(options.out, names=names, force=True) as folder:
        missed = Demo(folder, options.train, options.quick).run()
    verdict = "MISSED: " + "; ".join(missed) if missed else "" if options.quick else "All targets are met."
    print(f"\nEverything is in {os.path.relpath(options.out)}/, see its README.md. {verdict}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
