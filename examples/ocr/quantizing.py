"""The steps from a float ONNX file to int8 files: import, calibrate, fine-tune, export, verify."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

import qtrace
from qtrace import FinetuneSettings

RECIPE = "int8"


def quantize(
    file: Path, samples: np.ndarray, out: Path, name: str, minutes: float, say: Callable[[str], None]
) -> dict[str, int]:
    """Writes ``name_float.onnx``, ``name_int8.onnx`` and ``name_tuned.onnx`` to ``out``.

    Args:
        file: the float network.
        samples: inputs to calibrate on and to learn from; their shape is that of the import.
        out: the folder for the files.
        name: the prefix of the files.
        minutes: the most minutes of fine-tuning.
        say: prints the title of a step.

    Returns:
        Variant -> the largest difference of an integer between graph and onnxruntime, op by op.
    """
    say(f"{name}: import {file.name}")
    network = qtrace.from_onnx(file, {"x": (1, *samples.shape[1:])}, batch="x:0")
    qtrace.export(network, out / f"{name}_float.onnx")
    say(f"{name}: calibrate, recipe {RECIPE}")
    batches = [samples[i : i + 4] for i in range(0, len(samples), 4)]
    prepared = qtrace.prepare(network, RECIPE, samples=batches)
    qtrace.calibrate(prepared, batches)
    worst = {"int8": _export(prepared, batches[0], out / f"{name}_int8.onnx")}
    say(f"{name}: fine-tune without labels, at most {minutes:g} minutes")
    settings = FinetuneSettings(steps=20, batch_size=4, lr=0.002, max_minutes=minutes, evaluate_every=5)
    report = qtrace.finetune(prepared, batches, settings, teacher=network)
    print(report.table().splitlines()[0])
    worst["tuned"] = _export(prepared, batches[0], out / f"{name}_tuned.onnx")
    return worst


def _export(prepared: object, batch: np.ndarray, file: Path) -> int:
    """Exports and verifies; returns the largest difference op by op."""
    quantized = qtrace.convert(prepared)
    qtrace.export(quantized, file)
    report = qtrace.verify(file, quantized, [batch[:2]])
    worst = max(tally.worst for tally in report.sites["op_by_op"].values())
    print(f"{file.name}: worst {worst} LSB op by op in onnxruntime")
    return int(worst)
