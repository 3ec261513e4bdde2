"""All steps on real data: train, quantize to 8 and to 4 bits, train at 4 bits, export, run, compare.

``make demo`` runs it in under three minutes on two cores. Every step is the public API or the command
line; the commands are printed as they run, so that each can be repeated by hand. The exit code is 1 if a
target is missed.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import subprocess
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

import qtrace

# MegEngine makes the processor flush subnormal numbers to zero, of which numpy warns.
warnings.filterwarnings("ignore", message="The value of the smallest subnormal")
qtrace.quiet()  # before anything else loads MegEngine: it would print notes about a missing CUDA driver

import megengine as mge  # noqa: E402
import onnxruntime as ort  # noqa: E402

from qtrace.graph import format_table  # noqa: E402

sys.path.insert(0, str(Path(__file__).parent))  # also when the file is loaded by another script

import digits  # noqa: E402

RECIPES = Path(__file__).parent / "recipes"
FLOAT_EPOCHS, FLOAT_LR = 16, 0.1

# What the demo must show, in points of accuracy and as a share of predictions.
MAX_DROP_W8A8, MAX_DROP_QAT, MIN_AGREEMENT = 0.5, 1.5, 0.995


@dataclass
class Row:
    """The results of one variant of the network.

    Attributes:
        name: the variant.
        graph: accuracy of its graph in MegEngine, in percent of the test images.
        runtime: accuracy of its file in onnxruntime, in percent; None where there is no file.
        weight_bytes: size of its weights and biases at the width of their type.
        file_bytes: size of the file on disk; None where there is no file.
        same: percentage of test images for which graph and runtime give the same digit.
        worst_lsb: largest difference of an integer between graph and runtime, op by op.
    """

    name: str
    graph: float
    runtime: float | None = None
    weight_bytes: int = 0
    file_bytes: int | None = None
    same: float | None = None
    worst_lsb: int | None = None


class Demo:
    """The steps of the demo, and what they leave in ``out``.

    Args:
        out: folder for the artefacts; files of an earlier run are replaced.
        seed: seed of the initial weights and of the order of the training images.
        quick: one epoch of everything, to see that all steps work; the targets do not count.
    """

    def __init__(self, out: Path, seed: int = 0, quick: bool = False) -> None:
        self.out, self.seed, self.quick = out, seed, quick
        self.data = digits.load()
        self.rows: list[Row] = []
        self.started = time.monotonic()
        out.mkdir(parents=True, exist_ok=True)

    # -- the steps ----------------------------------------------------------------------------------

    def run(self) -> list[str]:
        """Takes all steps; returns the targets that were missed, a line each."""
        self.save_data()
        traced = self.train_float()
        self.w8a8_by_command()
        self.w8a8_by_api(traced)
        self.w4a4(traced)
        missed = [] if self.quick else missed_targets(self.rows)
        self.write_results(missed)
        self.say("Results on the 500 test images")
        print(self.table())
        return missed

    def save_data(self) -> None:
        """Writes the images that the commands read."""
        d = self.data
        sizes = [len(part.images) for part in (d.train, d.calibration, d.test)]
        self.say(
            "Handwritten digits of scikit-learn, {} to train, {} to calibrate, {} to test".format(*sizes)
        )
        for name, part in (("calibration", d.calibration), ("test", d.test)):
            np.savez(self.out / f"{name}.npz", images=part.images, labels=part.labels)

    def train_float(self) -> Any:
        """Trains the float network and traces it."""
        self.say("Train the float network")
        mge.random.seed(self.seed)
        net = digits.Net()
        net.train()
        groups = [{"params": list(net.parameters())}]
        epochs = 1 if self.quick else FLOAT_EPOCHS
        digits.fit(net, groups, self.data.train, epochs=epochs, lr=FLOAT_LR, seed=self.seed, title="float")
        net.eval()
        weights = self.out / "float_weights.pkl"
        mge.save(net.state_dict(), str(weights))
        traced = qtrace.trace(net, self.data.calibration.images[:1])
        qtrace.save(traced, self.out / "float.mge")
        size = sum(p.numpy().nbytes for p in net.parameters())
        self.rows.append(Row("float", self.accuracy(net), None, size, weights.stat().st_size))
        return traced

    def w8a8_by_command(self) -> None:
        """Quantizes to 8 bits by the command line alone: calibrate, explain, export, verify."""
        self.say("PTQ W8A8, mse observers, by the command line")
        folder, file = self.out / "w8a8", self.out / "w8a8.onnx"
        data, test = self.out / "calibration.npz", self.out / "test.npz"
        quantized = folder / "quantized.mge"
        recipe = RECIPES / "digits_w8a8.yaml"
        command(
            "calibrate",
            self.out / "float.mge",
            "--data",
            data,
            "--recipe",
            recipe,
            "--out",
            folder,
            "--force",
        )
        explained = command("explain", quantized).splitlines()
        print(next(line for line in explained if line.startswith("sites:")))
        command("export", quantized, "--out", file)
        verified = json.loads(command("verify", file, "--model", quantized, "--data", test, "--json"))
        (self.out / "w8a8.verify.json").write_text(json.dumps(verified, indent=2) + "\n", encoding="utf-8")
        print(f"verified: worst {verified['worst_lsb']['op_by_op']} LSB op by op")
        self.add_exported("PTQ W8A8 (mse)", qtrace.load(quantized), file, verified["worst_lsb"]["op_by_op"])

    def w8a8_by_api(self, traced: Any) -> None:
        """Quantizes to 8 bits with minmax observers, by the API."""
        self.say("PTQ W8A8, minmax observers, by the API")
        config = qtrace.QConfig(observers={"activation": "minmax"})
        quantized = qtrace.convert(self.calibrated(traced, config))
        file = self.out / "w8a8_minmax.onnx"
        qtrace.export(quantized, file)
        report = qtrace.verify(file, quantized, batches(self.data.test.images))
        print(report.summary())
        self.add_exported("PTQ W8A8 (minmax)", quantized, file, report.worst_lsb())

    def w4a4(self, traced: Any) -> None:
        """Measures 4 bits: calibrated only, then trained from the same weights and ranges."""
        config = qtrace.load_recipe(RECIPES / "digits_w4a4.yaml")
        self.say("PTQ W4A4, by the API")
        prepared = self.calibrated(traced, config)
        self.add_graph("PTQ W4A4", qtrace.convert(prepared))
        self.say("QAT W4A4 (LSQ): the calibrated graph, trained on")
        qtrace.set_phase(prepared, "train")
        epochs = 1 if self.quick else config.qat.epochs
        groups = parameter_groups(prepared, config.qat.lr)
        digits.fit(
            prepared,
            groups,
            self.data.train,
            epochs=epochs,
            lr=config.qat.lr,
            seed=self.seed + 1,
            title="QAT",
        )
        quantized = qtrace.convert(prepared)
        qtrace.save(quantized, self.out / "w4a4_qat.mge")
        self.add_graph("QAT W4A4 (LSQ)", quantized)

    # -- what they share ----------------------------------------------------------------------------

    def calibrated(self, traced: Any, config: qtrace.QConfig) -> Any:
        """A prepared copy of ``traced`` with ranges from the calibration images."""
        prepared = qtrace.prepare(traced, config)
        return qtrace.calibrate(prepared, batches(self.data.calibration.images))

    def accuracy(self, model: Any) -> float:
        """Percentage of the test images that ``model`` classifies right."""
        return percent_equal(digits.predict(model, self.data.test.images), self.data.test.labels)

    def add_graph(self, name: str, quantized: Any) -> None:
        """Adds the row of a variant that no file can hold: ONNX opset 13 has no 4-bit activations."""
        self.rows.append(Row(name, self.accuracy(quantized), weight_bytes=packed_bytes(quantized)))

    def add_exported(self, name: str, quantized: Any, file: Path, worst_lsb: int) -> None:
        """Adds the row of a variant that onnxruntime runs, with all its optimizations."""
        session = ort.InferenceSession(str(file), providers=["CPUExecutionProvider"])
        logits = session.run(None, {session.get_inputs()[0].name: self.data.test.images})[0]
        runtime_digits, graph_digits = logits.argmax(axis=1), digits.predict(quantized, self.data.test.images)
        labels = self.data.test.labels
        self.rows.append(
            Row(
                name,
                percent_equal(graph_digits, labels),
                percent_equal(runtime_digits, labels),
                packed_bytes(quantized),
                file.stat().st_size,
                percent_equal(graph_digits, runtime_digits),
                worst_lsb,
            )
        )

    def say(self, text: str) -> None:
        """Prints the title of a step and the time since the start."""
        print(f"\n[{time.monotonic() - self.started:4.0f} s] {text}", flush=True)

    # -- results ------------------------------------------------------------------------------------

    def table(self) -> str:
        """The rows as text."""
        headers = (
            "variant",
            "graph",
            "onnxruntime",
            "same digit",
            "worst LSB",
            "weights, packed",
            "file",
        )
        rows = [
            (
                r.name,
                f"{r.graph:.1f} %",
                format_percent(r.runtime),
                format_percent(r.same),
                "-" if r.worst_lsb is None else str(r.worst_lsb),
                f"{r.weight_bytes:,} B",
                "-" if r.file_bytes is None else f"{r.file_bytes:,} B",
            )
            for r in self.rows
        ]
        return format_table(headers, rows)

    def write_results(self, missed: list[str]) -> None:
        """Writes results.json and README.md."""
        results = {
            "seed": self.seed,
            "quick": self.quick,
            "seconds": round(time.monotonic() - self.started, 1),
            "missed": missed,
            "variants": [asdict(row) for row in self.rows],
        }
        (self.out / "results.json").write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
        lines = [f"- `{name}`: {text}" for name, text in ARTEFACTS.items()]
        text = "# What `make demo` left here\n\n{}\n\n```\n{}\n```\n".format("\n".join(lines), self.table())
        (self.out / "README.md").write_text(text, encoding="utf-8")


ARTEFACTS = {
    "calibration.npz, test.npz": "the images and labels that calibrated and tested the variants.",
    "float_weights.pkl": "the trained float weights, as `megengine.save` writes them.",
    "float.mge": "the traced float network; `qtrace explain float.mge` shows what would be quantized.",
    "w8a8/": "what `qtrace calibrate` wrote: prepared.mge, quantized.mge, report.json, explain.txt.",
    "w8a8.onnx": "PTQ W8A8 with mse observers, for onnxruntime.",
    "w8a8.verify.json": "what `qtrace verify` found: every integer tensor of it against the graph's.",
    "w8a8_minmax.onnx": "PTQ W8A8 with minmax observers, for onnxruntime.",
    "w4a4_qat.mge": "the 4-bit network after training, converted; `qtrace.load` gives a module to run.",
    "results.json": "the numbers of the table below.",
}


def percent_equal(predicted: np.ndarray, expected: np.ndarray) -> float:
    """Percentage of equal entries."""
    return 100.0 * float(np.mean(predicted == expected))


def format_percent(value: float | None) -> str:
    """``97.2 %``, or ``-`` for None."""
    return "-" if value is None else f"{value:.1f} %"


def batches(images: np.ndarray, size: int = 50) -> list[np.ndarray]:
    """The images in batches."""
    return [images[start : start + size] for start in range(0, len(images), size)]


def parameter_groups(prepared: Any, lr: float) -> list[dict[str, Any]]:
    """Weights as before; learned scales at a tenth of their rate, and without decay.

    Scales are ten times smaller than weights, and shrinking a scale does not regularize anything.
    """
    scales = qtrace.fakequant.scales(prepared)
    apart = {id(scale) for scale in scales}
    weights = [p for p in prepared.parameters() if id(p) not in apart]
    return [{"params": weights}, {"params": scales, "lr": lr / 10, "weight_decay": 0.0}]


def packed_bytes(quantized: Any) -> int:
    """Bytes of all weights and biases, each at the width of the dtype that ``convert`` noted on its node."""
    total = 0.0
    for node in quantized.graph.nodes().as_list():
        noted = getattr(node, "qparams", None)
        if noted is None or type(node.expr).__name__ != "GetAttr":
            continue
        meta = noted.dtype_meta
        total += math.prod(node.shape) * math.ceil(math.log2(meta.qmax - meta.qmin + 1)) / 8
    return math.ceil(total)


def command(*arguments: str | Path) -> str:
    """Runs ``qtrace`` with ``arguments``, shows the command line, and returns what it wrote to stdout.

    Raises:
        subprocess.CalledProcessError: when it fails; its messages stand on stderr.
    """
    words = [os.path.relpath(a) if isinstance(a, Path) else a for a in arguments]
    print("$", shlex.join(["qtrace", *words]), flush=True)
    process = subprocess.run(
        [sys.executable, "-m", "qtrace.cli", *words], stdout=subprocess.PIPE, text=True, check=True
    )
    return process.stdout


def missed_targets(rows: Sequence[Row]) -> list[str]:
    """The targets that ``rows`` miss, a line each."""
    by_name = {row.name: row for row in rows}
    floor = by_name["float"].graph
    sentences = []

    def need(value: float, minimum: float, subject: str, strictly: bool = False) -> None:
        # Accuracies are multiples of 1/5 point; the slack only absorbs the rounding of floats.
        if value < minimum - 1e-9 or (strictly and value < minimum + 1e-9):
            sentences.append(
                f"{subject} is {value:.1f}, {'more than' if strictly else 'at least'} {minimum:.1f} needed"
            )

    for row in rows:
        if row.runtime is not None and row.same is not None:
            need(min(row.graph, row.runtime), floor - MAX_DROP_W8A8, f"accuracy of {row.name}")
            need(row.same, 100 * MIN_AGREEMENT, f"agreement of graph and onnxruntime for {row.name}")
    trained, calibrated = by_name["QAT W4A4 (LSQ)"].graph, by_name["PTQ W4A4"].graph
    need(trained, floor - MAX_DROP_QAT, "accuracy of QAT W4A4")
    need(trained, calibrated, "accuracy of QAT W4A4 against PTQ W4A4", strictly=True)
    return sentences


def verdict(missed: Sequence[str]) -> str:
    """Whether the targets are met, in a sentence."""
    return "All targets are met." if not missed else "MISSED: " + "; ".join(missed)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the demo; 1 if a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("demo-out"), help="where the artefacts go")
    parser.add_argument("--seed", type=int, default=0, help="seed of the training; the split stays the same")
    parser.add_argument(
        "--quick", action="store_true", help="one epoch of everything; the targets do not count"
    )
    options = parser.parse_args(arguments)
    demo = Demo(options.out, options.seed, options.quick)
    missed = demo.run()
    print(f"\nEverything is in {os.path.relpath(options.out)}/, see its README.md. {verdict(missed)}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
