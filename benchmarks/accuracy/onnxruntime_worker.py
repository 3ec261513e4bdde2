"""Quantizes a float ONNX file with onnxruntime.quantization, in an interpreter of its own.

python onnxruntime_worker.py FLOAT.onnx CALIBRATION.npy METHOD OUT.onnx

takes its usual setting for CPU: QDQ, uint8 activations, int8 weights per channel. It writes the seconds, too.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np
import onnx
from onnxruntime.quantization import (
    CalibrationDataReader,
    CalibrationMethod,
    QuantFormat,
    QuantType,
    quant_pre_process,
    quantize_static,
)


class Reader(CalibrationDataReader):
    """Hands out the inputs one by one."""

    def __init__(self, name: str, inputs: np.ndarray) -> None:
        self.name, self.rest = name, iter(inputs)

    def get_next(self) -> dict[str, np.ndarray] | None:
        image = next(self.rest, None)
        return None if image is None else {self.name: image[None]}


def main(model: str, inputs: str, method: str, file: str) -> None:
    reader = Reader(onnx.load(model).graph.input[0].name, np.load(inputs))
    prepared = str(Path(file).with_suffix(".prepared.onnx"))
    started = time.perf_counter()
    quant_pre_process(model, prepared, skip_symbolic_shape=True)
    quantize_static(
        prepared,
        file,
        reader,
        quant_format=QuantFormat.QDQ,
        per_channel=True,
        activation_type=QuantType.QUInt8,
        weight_type=QuantType.QInt8,
        calibrate_method=getattr(CalibrationMethod, method),
    )
    seconds = time.perf_counter() - started
    Path(file).with_suffix(".seconds").write_text(str(seconds), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
