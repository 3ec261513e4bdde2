"""Quantizes a float ONNX file with NNCF. Stands alone: it runs in an interpreter of its own.

python nncf_worker.py FLOAT.onnx CALIBRATION.npy BATCH OUT_FOLDER [METHOD...]

writes a file for each of the methods, all of METHODS by default, and its seconds beside it. What fails is
told in a .txt of that name instead. "transformer" is one more method.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import nncf
import numpy as np
import onnx
import onnxruntime
from nncf.onnx import engine
from nncf.quantization.range_estimator import RangeEstimatorParametersSet

# name -> preset, whether ranges are those of all data instead of NNCF's averages, bias correction
METHODS = {
    "fast": ("PERFORMANCE", False, "fast"),
    "full": ("PERFORMANCE", False, "full"),
    "fast_minmax": ("MIXED", True, "fast"),
    "full_minmax": ("MIXED", True, "full"),
    "minmax": ("MIXED", True, None),
}
# The method that is told that the model is a transformer; it is run where it is named.
TRANSFORMER = "transformer"


# Full correction asks for the result of a convolution beside that of the Relu behind its sum. Where the other
# term of the sum is a convolution too, onnxruntime 1.23.2 fuses all of them, loses the former and fails with
# "Failed to find node output". So NNCF's own inference goes without that fusion, which changes no value.
FAULTY = "ConvAddActivationFusion"


def main(model: str, inputs: str, batch: int, out: str, names: Sequence[str] = ()) -> None:
    engine.rt = SimpleNamespace(
        SessionOptions=onnxruntime.SessionOptions,
        InferenceSession=functools.partial(onnxruntime.InferenceSession, disabled_optimizers=[FAULTY]),
    )
    images = np.load(inputs)
    for name in names or METHODS:
        started = time.perf_counter()
        try:
            method = METHODS["fast" if name == TRANSFORMER else name]
            quantized = quantize(model, images, batch, *method, transformer=name == TRANSFORMER)
        except Exception as error:  # the other methods may do
            reason = f"{type(error).__name__}: {error}"
            (Path(out) / f"{name}.txt").write_text(reason, encoding="utf-8")
        else:
            seconds = time.perf_counter() - started
            (Path(out) / f"{name}.seconds").write_text(str(seconds), encoding="utf-8")
            onnx.save(quantized, str(Path(out) / f"{name}.onnx"))


def quantize(
    model: str,
    images: np.ndarray,
    batch: int,
    preset: str,
    minmax: bool,
    correction: str | None,
    transformer: bool = False,
) -> onnx.ModelProto:
    source = onnx.shape_inference.infer_shapes(onnx.load(model))
    name = source.graph.input[0].name
    # Ranges are averages over batches: with single images, most of them would be cut off.
    batches = [{name: images[i : i + batch]} for i in range(0, len(images), batch)]
    options = nncf.AdvancedQuantizationParameters(disable_bias_correction=correction is None)
    if minmax:
        options.activations_range_estimator_params = RangeEstimatorParametersSet.MINMAX
    return nncf.quantize(
        source,
        nncf.Dataset(batches),
        preset=nncf.QuantizationPreset[preset],
        subset_size=len(images),
        model_type=nncf.ModelType.TRANSFORMER if transformer else None,
        fast_bias_correction=correction != "full",
        advanced_parameters=options,
    )


if __name__ == "__main__":
    model, inputs, batch, out, *names = sys.argv[1:]
    main(model, inputs, int(batch), out, names)
