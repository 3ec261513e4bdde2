"""W8A8 without training: the default recipe beside other tools, on the same float file and inputs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import qtrace
from benchmarks.accuracy import peers
from benchmarks.accuracy.judging import Judge, float_file, in_onnxruntime, quantize
from benchmarks.accuracy.rows import Row
from benchmarks.accuracy.subjects import Subject

__all__ = ["add_target", "run"]

CHECK = "W8A8 PTQ"
MARGIN, MAX_LOSS = 1.0, 0.3

# The default without its placement; a detector has the rules of its family, and the default's algorithms.
RECIPE = "int8"
RECIPES = {"detector": Path(__file__).parent.parent.parent / "examples/detector/recipe.yaml"}

# Layers and the activations behind them are one kernel there, so that nothing is rounded between them.
OPENVINO = {
    "backend": "openvino",
    "rules": [{"match": {"position": "last"}, "quantize_output": False}],
    "ptq": ["fuse_bn", {"gptq": {"refit": True}}],
}


def recipe(name: str) -> dict[str, Any]:
    """Returns the recipe of a network as plain data."""
    default = {**qtrace.load_recipe(RECIPE).to_dict(), "placement": "everything"}
    if name not in RECIPES:
        return default
    return {**qtrace.load_recipe(RECIPES[name]).to_dict(), "ptq": default["ptq"]}


def run(subject: Subject, python: str | None) -> Iterator[Row]:
    """Measures the float network, qtrace and every tool, all in onnxruntime."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        model = float_file(subject, folder)
        judge = Judge(subject, in_onnxruntime(model))
        file = qtrace.export(quantize(subject, recipe(subject.name)), folder / "qtrace.onnx")
        title = f"recipe of its family, ptq of {RECIPE}" if subject.name in RECIPES else f"recipe {RECIPE}"
        ours = judge.row(CHECK, f"qtrace, {title}", in_onnxruntime(file))
        twin = qtrace.export(quantize(subject, OPENVINO), folder / "openvino.onnx")
        kernels = "fewer roundings, as NNCF assumes them"
        yield judge.float_row(CHECK)
        others = []
        for peer in peers.quantize_by_tools(model, subject.calibration, folder, python):
            if peer.file is None:
                others.append(Row(CHECK, subject.name, peer.name, note=f"did not run: {peer.reason}"))
            else:
                others.append(judge.row(CHECK, peer.name, in_onnxruntime(peer.file)))
        yield add_target(ours, others)
        yield judge.row(CHECK, "qtrace, for OpenVINO's kernels", in_onnxruntime(twin), kernels)
        yield from others


def add_target(ours: Row, others: list[Row]) -> Row:
    """Adds to our row the target and whether it is met."""
    rivals = [row.sqnr for row in others if row.sqnr is not None]
    target = f"{MARGIN:g} dB above the best peer, loss <= {MAX_LOSS:g}"
    if not rivals or ours.sqnr is None or ours.loss is None:
        return dataclasses.replace(ours, target=target, note="no peer ran")
    ahead = ours.sqnr - max(rivals)
    met = ahead >= MARGIN and ours.loss <= MAX_LOSS
    return dataclasses.replace(ours, target=target, met=met, note=f"{ahead:+.1f} dB to the best peer")
