"""The files of a network for a runtime: float, qtrace's default, and the peers'."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import qtrace
from benchmarks.accuracy.peers import quantize_by_nncf, quantize_by_onnxruntime
from benchmarks.deployed.networks import Network
from benchmarks.shipped.rows import OWN, RUNTIMES
from qtrace.runtimes.host import RuntimeHost

__all__ = ["Made", "make_float", "make_others"]

_SUFFIXES = {"onnxruntime": ".onnx", "openvino": ".onnx", "litert": ".tflite", "ncnn": ".param"}
_TARGETS = {"onnxruntime": "onnxruntime", "openvino": "openvino", "litert": "tflite", "ncnn": "ncnn"}
_AI_EDGE = Path(__file__).parent.parent / "workers" / "ai_edge.py"
_CALIBRATED, _NNCF_BATCH = 64, 4
_LONGEST_REASON = 160  # characters


@dataclass(frozen=True)
class Made:
    """A file on its way to its row.

    Attributes:
        variant: whose file it is.
        file: the file; None where there is none.
        reason: why there is none.
        version: the version of the tool that made it.
        on_integers: whether qtrace's default delivers integers.
    """

    variant: str
    file: Path | None
    reason: str = ""
    version: str = ""
    on_integers: bool = True


def make_float(network: Network, runtime: str, folder: Path) -> Path:
    """Writes the float file of a network."""
    return qtrace.export(network.traced, folder / f"float{_SUFFIXES[runtime]}")


def make_others(
    network: Network,
    runtime: str,
    exact: Path,
    folder: Path,
    peer: str | None,
    host: RuntimeHost | None,
) -> Iterator[Made]:
    """Yields qtrace's file, by the default of the target, and those of the peers.

    Args:
        network: the network, with what to calibrate on.
        runtime: the runtime.
        exact: the float file.
        folder: the folder for the files.
        peer: an interpreter that has the peer of the runtime; None to leave it out.
        host: the interpreter that has the runtime, and measures placements; None for this one.
    """
    samples = network.calibration[:_CALIBRATED]
    yield _own(network, runtime, samples, folder, host)
    if runtime == "ncnn":
        yield Made(RUNTIMES[runtime][0], exact)
    elif runtime == "onnxruntime":
        for variant in RUNTIMES[runtime]:
            made = quantize_by_onnxruntime(exact, samples, variant.rpartition(" ")[2], folder)
            yield Made(variant, made.file, made.reason)
    elif peer is not None and runtime == "openvino":
        for made in quantize_by_nncf(exact, samples, folder, peer, kinds=("fast",), batch=_NNCF_BATCH):
            yield Made(RUNTIMES[runtime][0], made.file, made.reason)
    elif peer is not None:
        yield from _ai_edge(exact, samples, folder, peer)


def _own(network: Network, runtime: str, samples: np.ndarray, folder: Path, host: RuntimeHost | None) -> Made:
    file = folder / f"qtrace{_SUFFIXES[runtime]}"
    try:
        result = qtrace.quantize(
            network.traced,
            samples,
            file,
            target=_TARGETS[runtime],
            batch_size=1,
            allow_broken=True,
            progress=False,
            runtime_host=host,
        )
    except qtrace.QtraceError as error:
        return Made(OWN, None, " ".join(str(error).split())[:_LONGEST_REASON])
    return Made(OWN, file, on_integers=result.delivery.to_dict()["delivered"] == "quantized")


def _ai_edge(exact: Path, samples: np.ndarray, folder: Path, peer: str) -> Iterator[Made]:
    np.save(folder / "calibration.npy", samples)
    recipes = [variant.rpartition(" ")[2] for variant in RUNTIMES["litert"]]
    command = [peer, str(_AI_EDGE), str(exact), str(folder / "calibration.npy"), str(folder), *recipes]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = process.stdout.strip().splitlines()
    version = str(json.loads(lines[-1])["version"]) if lines and not process.returncode else ""
    failed = process.stderr.strip().splitlines()
    for variant, recipe in zip(RUNTIMES["litert"], recipes, strict=True):
        file, told = folder / f"{recipe}.tflite", folder / f"{recipe}.txt"
        if file.exists():
            yield Made(variant, file, version=version)
        else:
            reason = told.read_text(encoding="utf-8") if told.exists() else (failed or ["it ended"])[-1]
            yield Made(variant, None, " ".join(reason.split())[:_LONGEST_REASON], version)
