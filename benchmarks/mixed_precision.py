"""How many layers of the example detector in 4 bits must be raised: by noise alone, and by the search.

``python -m benchmarks.mixed_precision`` prints the knee of each goal, and the table of docs/sensitivity.md.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from qtrace.cli import engine

engine.start()

import qtrace  # noqa: E402
from examples.detector import data  # noqa: E402
from examples.detector.net import pretrained  # noqa: E402
from qtrace.graph.table import format_table  # noqa: E402
from qtrace.sensitivity import DetectionLoss, Goal, Level, mixed_precision  # noqa: E402
from qtrace.sensitivity.simulation import Simulation  # noqa: E402

RECIPE = Path(__file__).parent.parent / "examples/detector/recipe_w4a4.yaml"
IMAGES, BATCH = 64, 16
LEVELS = tuple(Level(3 * n, 3 * n + 1, 3 * n + 2) for n in range(3))
ALLOWED = (0.6, 0.4)


def main() -> None:
    """Measures every goal."""
    calibration, unseen = (_batches(part) for part in ("calibration", "train"))
    traced = qtrace.trace(pretrained(), np.zeros((1, 3, 64, 64), np.float32))
    loss = DetectionLoss(LEVELS)
    prepared = qtrace.prepare(traced, RECIPE)
    qtrace.calibrate(prepared, calibration, progress=False)
    simulation = Simulation(prepared, unseen, loss)
    whole, rows = -simulation.value(), []
    for share in ALLOWED:
        goal = Goal(max_drop=share * whole)
        found = mixed_precision(
            traced, RECIPE, calibration, goal=goal, evaluation=unseen, metric=loss, raise_to="w8a8"
        )
        print(found.table(), "\n")
        count = f"{found.by_noise} of {len(simulation.layers)}"
        rows.append((f"{share:.0%} of W4A4's", count, len(found.layers)))
    print(format_table(("loss allowed", "in the order of noise", "by the search"), rows))


def _batches(part: str) -> list[np.ndarray]:
    images = data.load(part, IMAGES).images
    return [data.normalize(images[n : n + BATCH]) for n in range(0, IMAGES, BATCH)]


if __name__ == "__main__":
    main()
