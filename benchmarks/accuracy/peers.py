"""Other tools: each takes the float ONNX file and the calibration inputs, and gives a quantized file."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import numpy as np

__all__ = ["Peer", "adapt_for_nncf", "quantize_by_tools"]

BATCH = 50
_WORKER = Path(__file__).parent / "nncf_worker.py"
_NNCF = {
    "fast": "NNCF, fast bias correction",
    "full": "NNCF, full bias correction",
    "fast_minmax": "NNCF, mixed preset, min-max, fast bias correction",
    "full_minmax": "NNCF, mixed preset, min-max, full bias correction",
    "minmax": "NNCF, mixed preset, min-max, no bias correction",
}


@dataclass(frozen=True)
class Peer:
    """The file of another tool.

    Attributes:
        name: the tool and its method.
        file: the quantized file; None where there is none.
        reason: why there is none.
    """

    name: str
    file: Path | None
    reason: str = ""


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
    """onnxruntime.quantization in its usual setting for CPU: QDQ, uint8, int8 weights per channel."""
    import onnx
    from onnxruntime.quantization import (
        CalibrationDataReader,
        CalibrationMethod,
        QuantFormat,
        QuantType,
        quant_pre_process,
        quantize_static,
    )

    name = onnx.load(str(model)).graph.input[0].name

    class Reader(CalibrationDataReader):
        """Hands out the inputs one by one."""

        def __init__(self) -> None:
            self.rest = iter(calibration)

        def get_next(self) -> dict[str, np.ndarray] | None:
            image = next(self.rest, None)
            return None if image is None else {name: image[None]}

    prepared = folder / "prepared.onnx"
    quant_pre_process(str(model), str(prepared), skip_symbolic_shape=True)

    def quantize(method: str, file: Path) -> None:
        with redirect_stdout(sys.stderr):
            quantize_static(
                str(prepared),
                str(file),
                Reader(),
                quant_format=QuantFormat.QDQ,
                per_channel=True,
                activation_type=QuantType.QUInt8,
                weight_type=QuantType.QInt8,
                calibrate_method=getattr(CalibrationMethod, method),
            )

    for method in ("MinMax", "Entropy", "Percentile"):
        file = folder / f"onnxruntime_{method}.onnx"
        title = f"onnxruntime.quantization, {method}"
        try:
            quantize(method, file)
        except Exception as error:  # a fault of another tool is a row of the table, not the end of the run
            yield Peer(title, None, f"{type(error).__name__}: {error}".splitlines()[0][:120])
        else:
            yield Peer(title, file)


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
    inputs = folder / "calibration.npy"
    np.save(inputs, calibration)
    suited = adapt_for_nncf(model, folder / "for_nncf.onnx")
    command = [python, str(_WORKER), str(suited), str(inputs), str(BATCH), str(folder)]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    messages = process.stderr.strip().splitlines()
    failed = messages[-1] if messages else f"exit code {process.returncode}"
    for kind, title in _NNCF.items():
        file, reason = folder / f"{kind}.onnx", folder / f"{kind}.txt"
        if file.exists():
            yield Peer(title, file)
        else:
            yield Peer(title, None, (reason.read_text(encoding="utf-8") if reason.exists() else failed)[:120])
