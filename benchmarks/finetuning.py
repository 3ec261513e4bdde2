"""How much of what 4 bits cost the digits network comes back without a label.

``python -m benchmarks.finetuning`` trains the float network of examples/digits.py, quantizes it by the recipe
``w4a4_lsq`` (or ``--recipe``), and fine-tunes it on the training images without their labels. All figures
are on the 500 test images. The table of docs/finetuning.md is its output.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import numpy as np

from qtrace.cli import engine

engine.start()

import megengine as mge  # noqa: E402

import qtrace  # noqa: E402
from qtrace.finetuning import Settings  # noqa: E402
from qtrace.graph.table import format_table  # noqa: E402

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))

import digits  # noqa: E402

FLOAT_EPOCHS, FLOAT_LR = 16, 0.1


def main() -> None:
    """Measures as many seeds as asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3, help="float networks to train")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--recipe", default="w4a4_lsq")
    given = parser.parse_args()
    level = mge.config.async_level
    rows = [_row(seed, given.recipe, given.steps, level) for seed in range(given.seeds)]
    headers = (
        "seed",
        "float",
        "PTQ",
        "tuned",
        "recovered",
        "SQNR",
        "tuned",
        "noise gone",
        "same digit",
        "tuned",
    )
    print(format_table(headers, rows))


def _row(seed: int, recipe: str, steps: int, level: int) -> tuple[str, ...]:
    data = digits.load()
    mge.config.async_level = 0  # the loop of the float network needs it
    mge.random.seed(seed)
    net = digits.Net()
    net.train()
    groups = [{"params": list(net.parameters())}]
    digits.fit(net, groups, data.train, epochs=FLOAT_EPOCHS, lr=FLOAT_LR, seed=seed, title=f"float {seed}")
    mge.config.async_level = level
    net.eval()
    prepared = qtrace.prepare(qtrace.trace(net, data.calibration.images[:1]), recipe)
    qtrace.calibrate(prepared, [data.calibration.images], progress=False)
    in_float, before = _errors(net, data), _errors(prepared, data)
    start = time.perf_counter()
    settings = Settings(steps=steps, seed=seed)
    report = qtrace.finetune(prepared, [data.train.images], settings, evaluation=[data.test.images])
    print(f"{report.table()}\n{time.perf_counter() - start:.0f} s", file=sys.stderr)
    after = _errors(qtrace.convert(prepared), data)
    lost = before - in_float
    share = f"{100 * (before - after) / lost:.0f} %" if lost else "nothing was lost"
    (output,) = report.outputs
    gone = 1.0 - 10 ** ((output.before - output.after) / 10)
    images = len(data.test.labels)
    accuracies = [f"{100 * (1 - wrong / images):.1f} %" for wrong in (in_float, before, after)]
    same = [f"{100 * (a or 0.0):.1f} %" for a in (output.agreement_before, output.agreement_after)]
    noise = (f"{output.before:.1f} dB", f"{output.after:.1f} dB", f"{100 * gone:.0f} %")
    return str(seed), *accuracies, share, *noise, *same


def _errors(model: object, data: digits.Digits) -> int:
    """How many test images are seen wrong."""
    return int(np.sum(digits.predict(model, data.test.images) != data.test.labels))


if __name__ == "__main__":
    main()
