"""The peer: onnxruntime's own quantizer, in its usual setting for CPU."""

from __future__ import annotations

import sys
import tempfile
from contextlib import redirect_stdout
from pathlib import Path

import numpy as np


def quantize(model: Path, samples: np.ndarray, file: Path) -> None:
    """Writes ``file``: static, MinMax ranges, uint8 activations, int8 weights with a scale per channel.

    Args:
        model: the float ONNX file, of opset 13 or later.
        samples: inputs to calibrate on, N x ....
        file: the file to write.
    """
    import onnx
    from onnxruntime.quantization import CalibrationDataReader, QuantType, quant_pre_process, quantize_static

    name = onnx.load(str(model)).graph.input[0].name

    class Reader(CalibrationDataReader):
        """Gives the samples one by one."""

        def __init__(self) -> None:
            self.rest = iter(samples)

        def get_next(self) -> dict[str, np.ndarray] | None:
            sample = next(self.rest, None)
            return None if sample is None else {name: sample[None]}

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
