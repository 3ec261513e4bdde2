"""Other tools: each takes the float ONNX file and the calibration inputs, and gives a quantized file."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

__all__ = ["Peer", "adapt_for_nncf", "quantize_by_nncf", "quantize_by_onnxruntime", "quantize_by_tools"]

BATCH = 50
METHODS = ("MinMax", "Entropy", "Percentile")
_WORKER = Path(__file__).parent / "nncf_worker.py"
_ONNXRUNTIME_WORKER = Path(__file__).parent / "onnxruntime_worker.py"
_LONGEST_REASON = 120  # characters
_NNCF = {
    "fast": "NNCF, fast bias correction",
    "full": "NNCF, full bias correction",
    "fast_minmax": "NNCF, mixed preset, min-max, fast bias correction",
    "full_minmax": "NNCF, mixed preset, min-max, full bias correction",
    "minmax": "NNCF, mixed preset, min-max, no bias correction",
}
_NNCF_MORE = {"transformer": "NNCF, transformer, fast bias correction"}


@dataclass(frozen=True)
class Peer:
    """The file of another tool.

    Attributes:
        name: the tool and its method.
        file: the quantized file; None where there is none.
        reason: why there is none.
        seconds: the time that quantizing took, without the start of the interpreter; None if unknown.
    """

    name: str
    file: Path | None
    reason: str = ""
    seconds: float | None = None


def quantize_by_tools(
    model: Path, calibration: np.ndarray, folder: Path, python: str | None
) -> Iterator[Peer]:
    """Quantizes the model by all tools.

    Args:
        model: the float ONNX file.
        calibration: inputs, N x ...; onnxruntime gets them one by one, which makes no difference to it, NNCF
            in batches, which suits it better.
        folder: the folder for the files.
        python: an interpreter that can import NNCF; None for this one.
    """
    yield from _onnxruntime(model, calibration, folder)
    yield from _nncf(model, calibration, folder, python or sys.executable)


def _onnxruntime(model: Path, calibration: np.ndarray, folder: Path) -> Iterator[Peer]:
    for method in METHODS:
        yield quantize_by_onnxruntime(model, calibration, method, folder)


def quantize_by_onnxruntime(model: Path, calibration: np.ndarray, method: str, folder: Path) -> Peer:
    """Quantizes a file by onnxruntime.quantization in an interpreter of its own.

    Args:
        model: the float ONNX file, of opset 13 or later.
        calibration: inputs, N x ....
        method: one of METHODS.
        folder: the folder for the files.
    """
    file, inputs = folder / f"onnxruntime_{method}.onnx", folder / "calibration.npy"
    file.unlink(missing_ok=True)
    np.save(inputs, calibration)
    command = [sys.executable, str(_ONNXRUNTIME_WORKER), str(model), str(inputs), method, str(file)]
    failure = _run(command)
    title = f"onnxruntime.quantization, {method}"
    return Peer(title, None, failure) if not file.exists() else Peer(title, file, seconds=_seconds(file))


def _run(command: list[str]) -> str:
    """Runs a worker; returns the last line that it wrote, which says why if it failed."""
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    messages = process.stderr.strip().splitlines()
    if process.returncode < 0:
        return f"killed by signal {-process.returncode}, as when memory runs out"
    return (messages[-1] if messages else f"exit code {process.returncode}")[:_LONGEST_REASON]


def _seconds(file: Path) -> float | None:
    """Reads the seconds that a worker wrote beside its file."""
    written = file.with_suffix(".seconds")
    return float(written.read_text(encoding="utf-8")) if written.exists() else None


def adapt_for_nncf(model: Path, file: Path) -> Path:
    """Writes the model in the form that suits NNCF best; what it computes stays.

    To correct a layer whose result leaves the graph, full correction runs the layer up to *all* outputs,
    which fails where there are several: so an Identity stands before each. And it writes a new bias for each
    of its readers: those of a head that serves several levels would overwrite each other, so each reader gets
    its own.

    Args:
        model: a float ONNX file.
        file: the file to write.

    Returns:
        ``file``.
    """
    import onnx

    source = onnx.load(str(model))
    graph = source.graph
    for output in graph.output:
        inside = f"{output.name}_inside"
        for node in graph.node:
            node.input[:] = [inside if name == output.name else name for name in node.input]
            node.output[:] = [inside if name == output.name else name for name in node.output]
        graph.node.append(
            onnx.helper.make_node("Identity", [inside], [output.name], f"{output.name}_Identity")
        )
    stored, read = {tensor.name: tensor for tensor in graph.initializer}, set()
    for node in graph.node:
        for index, name in enumerate(node.input):
            if name in stored and name in read:
                own = graph.initializer.add()
                own.CopyFrom(stored[name])
                own.name = node.input[index] = f"{name}_of_{node.name}"
            read.add(name)
    onnx.save(source, str(file))
    return file


def _nncf(model: Path, calibration: np.ndarray, folder: Path, python: str) -> Iterator[Peer]:
    yield from quantize_by_nncf(model, calibration, folder, python)


def quantize_by_nncf(
    model: Path,
    calibration: np.ndarray,
    folder: Path,
    python: str,
    *,
    kinds: Sequence[str] = tuple(_NNCF),
    batch: int = BATCH,
) -> Iterator[Peer]:
    """Quantizes a file by NNCF in its interpreter.

    Args:
        model: the float ONNX file.
        calibration: inputs, N x ....
        folder: the folder for the files.
        python: an interpreter that can import NNCF.
        kinds: the methods of the worker; "transformer" is one more.
        batch: inputs in a batch.
    """
    inputs = folder / "calibration.npy"
    np.save(inputs, calibration)
    for kind in kinds:
        (folder / f"{kind}.onnx").unlink(missing_ok=True)
    suited = adapt_for_nncf(model, folder / "for_nncf.onnx")
    failed = _run([python, str(_WORKER), str(suited), str(inputs), str(batch), str(folder), *kinds])
    for kind in kinds:
        title = {**_NNCF, **_NNCF_MORE}[kind]
        file, reason = folder / f"{kind}.onnx", folder / f"{kind}.txt"
        if file.exists():
            yield Peer(title, file, seconds=_seconds(file))
        else:
            text = reason.read_text(encoding="utf-8") if reason.exists() else failed
            yield Peer(title, None, text[:_LONGEST_REASON])
