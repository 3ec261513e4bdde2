"""Quantizes a float TFLite file with ai-edge-quantizer. Stands alone: it runs in an interpreter of its own.

python ai_edge.py FLOAT.tflite CALIBRATION.npy OUT_FOLDER RECIPE...

writes RECIPE.tflite for each of the recipes of ``ai_edge_quantizer.recipe``, and its seconds beside it. What
fails is told in a .txt of that name instead.
"""

from __future__ import annotations

import json
import sys
import time
from importlib.metadata import version
from pathlib import Path

import numpy as np
from ai_edge_quantizer import quantizer, recipe


def main(model: str, inputs: str, out: str, names: list[str]) -> None:
    images, folder = np.load(inputs), Path(out)
    for name in names:
        started = time.perf_counter()
        try:
            quantize(model, images, name, folder / f"{name}.tflite")
        except Exception as error:  # the other recipes may do
            (folder / f"{name}.txt").write_text(f"{type(error).__name__}: {error}", encoding="utf-8")
        else:
            seconds = time.perf_counter() - started
            (folder / f"{name}.seconds").write_text(str(seconds), encoding="utf-8")
    print(json.dumps({"version": version("ai-edge-quantizer")}))


def quantize(model: str, images: np.ndarray, name: str, file: Path) -> None:
    chosen = quantizer.Quantizer(model, getattr(recipe, name)())
    ranges = chosen.calibrate(calibration(model, images)) if chosen.need_calibration else None
    file.unlink(missing_ok=True)
    chosen.quantize(ranges, enable_progress_report=False).export_model(str(file))


def calibration(model: str, images: np.ndarray) -> dict[str, list[dict[str, np.ndarray]]]:
    """Returns the samples by the model's signature, with the channels where its input has them."""
    from ai_edge_litert.interpreter import Interpreter

    loaded = Interpreter(model)
    ((key, ends),) = loaded.get_signature_list().items()
    (name,) = ends["inputs"]
    shape = tuple(loaded.get_input_details()[0]["shape"])
    if images[:1].shape != shape:
        images = np.ascontiguousarray(images.transpose(0, 2, 3, 1))
    return {key: [{name: images[i : i + 1]} for i in range(len(images))]}


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4:])
