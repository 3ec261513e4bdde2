"""Quantizes a file by one call, and prints the times of its stages: ``whole.py FILE SAMPLES KIND OUT``.

It prints one JSON object: stage -> wall and processor seconds. It uses public names alone, so that older
versions of qtrace run it; the stages of those that log no processor time are left out.
"""

from __future__ import annotations

import json
import logging
import sys

import numpy as np

import qtrace

MINMAX = {"placement": "balanced", "observers": {"activation": "minmax", "weight": "minmax"}}


class Stages(logging.Handler):
    """Keeps the times of stages that the logger ``qtrace`` writes."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.seconds: dict[str, tuple[float, float]] = {}

    def emit(self, record: logging.LogRecord) -> None:
        """Adds the times of a stage."""
        if record.msg.startswith("%s took ") and len(record.args) == 3:
            stage, wall, processor = record.args
            before = self.seconds.get(stage, (0.0, 0.0))
            self.seconds[stage] = (before[0] + wall, before[1] + processor)


def main(file: str, samples: str, kind: str, out: str) -> None:
    """Runs the call.

    Args:
        file: an ONNX file of one input.
        samples: an .npy file of inputs.
        kind: "default"; or "minmax" for plain ranges, nothing measured, and no run of the file.
        out: the file to write.
    """
    stages, log = Stages(), logging.getLogger("qtrace")
    log.addHandler(stages)
    log.setLevel(logging.INFO)
    quiet = {"recipe": MINMAX, "measure": False, "verify": False} if kind == "minmax" else {}
    qtrace.quantize(file, np.load(samples), out, progress=False, force=True, allow_broken=True, **quiet)
    print(json.dumps(stages.seconds))


if __name__ == "__main__":
    main(*sys.argv[1:])
