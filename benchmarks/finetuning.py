"""How much of what 4 bits cost networks for digits comes back without a label.

``python -m benchmarks.finetuning`` takes the float networks of benchmarks.accuracy (``--net``), quantizes
them by the recipe ``w4a4_lsq`` (or ``--recipe``), and fine-tunes them on the training images without their
labels. ``--net demo`` trains networks of examples/digits.py first, one for each seed; ``--network FILE``
takes a traced one. All figures are on the 500 test images. The table of docs/finetuning.md is its output.
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
from benchmarks.accuracy.networks import CLASSIFIERS  # noqa: E402
from benchmarks.accuracy.subjects import subject  # noqa: E402
from examples import digits  # noqa: E402
from qtrace.finetuning import Settings  # noqa: E402
from qtrace.graph.table import format_table  # noqa: E402
from qtrace.graph.types import TracedModule  # noqa: E402

FLOAT_EPOCHS, FLOAT_LR = 16, 0.1


def main() -> None:
    """Measures as many seeds as asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--seeds",
        type=int,
        default=3,
        help="of the order of images; of --net demo, also float networks to train",
    )
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--recipe", default="w4a4_lsq")
    parser.add_argument("--network", type=Path, help="a traced float network, such as demo-out/float.mge")
    parser.add_argument(
        "--net",
        action="append",
        choices=[*CLASSIFIERS, "demo"],
        help="may be repeated; all of benchmarks.accuracy",
    )
    given = parser.parse_args()
    data = digits.load()
    mge.config.async_level = 2  # the digits' own loop asked for 0; finetune sees to that itself
    rows = []
    for name, seed in _cases(given):
        if given.network is not None:
            traced = qtrace.load(given.network)
        elif name == "demo":
            traced = _float(seed, data)
        else:
            traced = qtrace.trace(subject(name).net, data.calibration.images[:1])
        rows.append((name, *_row(seed, traced, data, given.recipe, given.steps)))
    headers = (
        "network",
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


def _cases(given: argparse.Namespace) -> list[tuple[str, int]]:
    """Networks and seeds."""
    if given.network is not None:
        return [(given.network.stem, 0)]
    return [(name, seed) for name in given.net or CLASSIFIERS for seed in range(given.seeds)]


def _float(seed: int, data: digits.Digits) -> TracedModule:
    """A float network, trained as examples/demo.py does."""
    level, mge.config.async_level = mge.config.async_level, 0
    mge.random.seed(seed)
    net = digits.Net()
    net.train()
    groups = [{"params": list(net.parameters())}]
    digits.fit(net, groups, data.train, epochs=FLOAT_EPOCHS, lr=FLOAT_LR, seed=seed, title=f"float {seed}")
    mge.config.async_level = level
    net.eval()
    return qtrace.trace(net, data.calibration.images[:1])


def _row(seed: int, traced: TracedModule, data: digits.Digits, recipe: str, steps: int) -> tuple[str, ...]:
    prepared = qtrace.prepare(traced, recipe)
    qtrace.calibrate(prepared, [data.calibration.images], progress=False)
    in_float, before = _errors(traced, data), _errors(prepared, data)
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
