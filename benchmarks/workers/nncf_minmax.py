"""NNCF's quantization with min-max ranges of a float ONNX file. Stands alone, needs nncf and onnx only.

python nncf_minmax.py FLOAT.onnx BATCHES.npy BATCH_SIZE ROUNDS

prints one JSON object: {"minmax": seconds of each round}; biases are left as they are, which is the fastest.
"""

from __future__ import annotations

import json
import sys
import time

import nncf
import numpy as np
import onnx
from nncf.quantization.range_estimator import RangeEstimatorParametersSet


def main(model: str, data: str, size: int, rounds: int) -> dict[str, list[float]]:
    images, source = np.load(data), onnx.load(model)
    name = source.graph.input[0].name
    batches = [{name: images[i : i + size]} for i in range(0, len(images), size)]
    options = nncf.AdvancedQuantizationParameters(
        disable_bias_correction=True, activations_range_estimator_params=RangeEstimatorParametersSet.MINMAX
    )
    seconds = []
    for number in range(rounds + 1):
        start = time.perf_counter()
        nncf.quantize(
            onnx.load(model), nncf.Dataset(batches), subset_size=len(batches), advanced_parameters=options
        )
        if number:  # the first round warms up
            seconds.append(time.perf_counter() - start)
    return {"minmax": seconds}


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))))
