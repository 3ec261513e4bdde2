"""The peers: onnxruntime's own quantizer, in its usual setting for CPU, and NNCF where it is installed."""

from __future__ import annotations

import importlib.util
import sys
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import redirect_stdout
from pathlib import Path

import numpy as np


def quantize(model: Path, batches: Iterable[np.ndarray], file: Path) -> None:
    """Writes ``file``: static, MinMax ranges, uint8 activations, int8 weights with a scale per channel.

    Args:
        model: the float ONNX file, of opset 13 or later.
        batches: inputs to calibrate on; their sizes may differ where the file leaves an axis open.
        file: the file to write.
    """
    import onnx
    from onnxruntime.quantization import CalibrationDataReader, QuantType, quant_pre_process, quantize_static

    name = onnx.load(str(model)).graph.input[0].name

    class Reader(CalibrationDataReader):
        """Gives the batches one by one."""

        def __init__(self) -> None:
            self.rest = iter(batches)

        def get_next(self) -> dict[str, np.ndarray] | None:
            batch = next(self.rest, None)
            return None if batch is None else {name: batch}

    with tempfile.TemporaryDirectory() as folder, redirect_stdout(sys.stderr):
        prepared = Path(folder) / "prepared.onnx"
        quant_pre_process(str(model), str(prepared), skip_symbolic_shape=True)
        quantize_static(
            str(prepared),
            str(file),
            Reader(),
            per_channel=True,
            activation_type=QuantType.QUInt8,
            weight_type=QuantType.QInt8,
        )


def has_nncf() -> bool:
    """Returns whether NNCF is installed, which no extra of qtrace brings."""
    return importlib.util.find_spec("nncf") is not None


def quantize_by_nncf(model: Path, batches: Sequence[np.ndarray], file: Path) -> None:
    """Writes ``file`` by NNCF with its fast bias correction, its default; arguments as for `quantize`."""
    import nncf
    import onnx

    network = onnx.load(str(model))
    name = network.graph.input[0].name
    with redirect_stdout(sys.stderr):
        dataset = nncf.Dataset(batches, lambda batch: {name: batch})
        onnx.save(nncf.quantize(network, dataset, subset_size=len(batches)), str(file))
