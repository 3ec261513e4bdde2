"""Trains the float classifiers: ``python -m benchmarks.accuracy --retrain``.

The weights that it gave are in the repository. Nothing was selected on any data: steps and rate were
set once, and the validation part only says what was reached.
"""

from __future__ import annotations

import json
import time

import megengine as mge
import numpy as np

from benchmarks.accuracy.fitting import fit
from benchmarks.accuracy.networks import CLASSIFIERS
from benchmarks.accuracy.subjects import WEIGHTS, split
from examples import digits
from qtrace.storage.outputs import output_file

__all__ = ["shifted", "train"]

STEPS, LR, DECAY, SEED = 800, 5e-3, 0.02, 0


def shifted(part: digits.Part) -> digits.Part:
    """The images, and each of them moved by a pixel to the four sides."""
    padded = np.pad(part.images, ((0, 0), (0, 0), (1, 1), (1, 1)))
    moves = ((1, 1), (0, 1), (2, 1), (1, 0), (1, 2))
    size = part.images.shape[-1]
    images = [padded[:, :, y : y + size, x : x + size] for y, x in moves]
    return digits.Part(np.concatenate(images), np.tile(part.labels, len(moves)))


def train(name: str, steps: int = STEPS, seed: int = SEED) -> dict[str, float]:
    """Trains one network and writes its weights, and beside them what it reached; returns that."""
    started = time.process_time()
    data, validation, _, _ = split()
    mge.random.seed(seed)
    net = CLASSIFIERS[name]()
    net.train()
    groups = [(list(net.parameters()), LR, DECAY)]
    fit(net, groups, shifted(data), steps=steps, seed=seed, title=name)
    net.eval()
    right = digits.predict(net, validation.images) == validation.labels
    figures = {
        "steps": steps,
        "seed": seed,
        "processor_seconds": round(time.process_time() - started),
        "parameters": int(sum(np.prod(p.shape) for p in net.parameters())),
        "validation_accuracy": round(100 * float(right.mean()), 2),
    }
    with output_file(WEIGHTS / f"{name}.npz") as partial:
        np.savez_compressed(partial, **net.state_dict())
        partial.with_suffix(".json").write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    return figures
