"""Trains the float detector and writes its weights: ``python -m examples.detector.train``.

It takes about a quarter of an hour on one core; the weights that it gave are in the repository.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import qtrace
from qtrace.storage.outputs import output_file

qtrace.quiet()  # before anything else loads MegEngine: it would print notes about a missing CUDA driver

import megengine as mge  # noqa: E402

from examples.detector import boxes, data, net  # noqa: E402
from examples.detector.runners import in_megengine  # noqa: E402
from examples.detector.training import fit  # noqa: E402

STEPS, LR = 1300, 3e-3


def train(file: Path, steps: int = STEPS, seed: int = 0) -> dict[str, float]:
    """Trains, and writes ``file`` and beside it a .json with what it reached.

    Returns:
        Steps, seed, seconds, and mAP and AP50 on the validation images, which nothing was chosen on here.
    """
    started = time.monotonic()
    part = data.load("train")
    mge.random.seed(seed)
    detector = net.Detector(len(data.CLASSES))
    detector.train()
    fit(
        detector,
        [(list(detector.parameters()), LR, 0.01)],
        part,
        steps=steps,
        seed=seed,
        title="float",
        warmup=100,
    )
    detector.eval()
    validation = data.load("validation")
    precision = boxes.evaluate(boxes.detect(in_megengine(detector), validation), validation)
    figures = {
        "steps": steps,
        "seed": seed,
        "seconds": round(time.monotonic() - started),
        "validation_map": round(precision.map, 2),
        "validation_ap50": round(precision.ap50, 2),
    }
    with output_file(file) as partial:
        net.save_weights(detector, partial)
        partial.with_suffix(".json").write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    return figures


def main(arguments: Sequence[str] | None = None) -> int:
    """Trains, and prints what was reached."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=net.WEIGHTS, help="the .npz to write, or replace")
    parser.add_argument("--steps", type=int, default=STEPS, help="batches of 16 images")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and of the order of the images")
    options = parser.parse_args(arguments)
    print(json.dumps(train(options.out, options.steps, options.seed)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
