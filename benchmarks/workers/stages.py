"""Prints the processor seconds of each stage of a run, as JSON: ``python stages.py FILE SAMPLES RECIPE``.

It uses public names alone, so that older versions of qtrace run it.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import qtrace
from qtrace.importing.onnx import open_inputs


def main(file: str, samples: str, recipe: str) -> None:
    """Runs the stages, and prints their times."""
    batches = [np.load(samples)]
    names, shape = open_inputs(file), (1, *batches[0].shape[1:])
    seconds: dict[str, float] = {}

    def measure(stage: str, run: Callable[[], Any]) -> Any:
        start = time.process_time()
        result = run()
        seconds[stage] = time.process_time() - start
        return result

    traced = measure("import", lambda: qtrace.from_onnx(file, dict.fromkeys(names, shape)))
    config = json.loads(recipe) if recipe.startswith("{") else recipe
    prepared = measure("prepare", lambda: qtrace.prepare(traced, config, samples=batches))
    measure("calibrate", lambda: qtrace.calibrate(prepared, batches, progress=False))
    converted = measure("convert", lambda: qtrace.convert(prepared))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "int8.onnx"
        measure("export", lambda: qtrace.export(converted, path))
        measure("verify", lambda: qtrace.verify(path, converted, [batches[0][:2]]))
    print(json.dumps(seconds))


if __name__ == "__main__":
    main(*sys.argv[1:])
