"""Trains the digits network at 4 bits by each fake quant, beside its start.

    python -m benchmarks.fake_quants            # all: about ten minutes on one core
    python -m benchmarks.fake_quants tqt pact   # some

The float weights are the committed ones, and all but what the fake quant itself asks for is equal: images,
their order, steps, rates. Three orders of the images; nothing is selected on any data. The loss is the mean
cross-entropy of the 1,000 training images in eval mode, the accuracy is that of 500 others.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import megengine as mge
import megengine.functional as F

import qtrace
from benchmarks.accuracy.fitting import fit
from benchmarks.accuracy.four_bits import low_bits
from benchmarks.accuracy.subjects import split, subject
from benchmarks.accuracy.training import shifted
from examples import digits
from qtrace import process
from scripts.stored import RESULTS, FakeQuantRow, store, today

__all__ = ["WAYS", "Way", "main", "measure"]

STEPS, LR, RANGE_LR, DECAY = 300, 1e-3, 1e-4, 1e-3
SEEDS = (0, 1, 2)


@dataclass(frozen=True)
class Way:
    """What a fake quant asks for beside the common settings.

    Attributes:
        config: keys of the config.
        range_lr: learning rate of what its ranges learn.
        range_decay: weight decay of what its ranges learn.
    """

    config: dict[str, Any] = field(default_factory=dict)
    range_lr: float = RANGE_LR
    range_decay: float = 0.0


# By docs/guides/training.md. tqt: Jain et al. 2019 train thresholds at a rate of 0.01. pact: Choi et al.
# 2018, section 3.2, decay the bound by the factor of the weights' decay.
WAYS = {
    "fixed": Way(),
    "lsq": Way(),
    "lsq_plus": Way(),
    "tqt": Way({"power_of_two": True}, range_lr=0.01),
    "pact": Way(range_decay=DECAY),
    "dorefa": Way({"observers": {"weight": "minmax"}}),
    "learned_range": Way(),
}


def _config(name: str, way: Way) -> dict[str, Any]:
    config = {**low_bits(4), "fakequant": name}
    config.update({key: value for key, value in way.config.items() if key != "power_of_two"})
    if way.config.get("power_of_two"):
        for part in (config, *config["rules"]):
            part["weight"] = {**part["weight"], "power_of_two": True}
            part["activation"] = {**part["activation"], "power_of_two": True}
    return config


def _loss(model: Any, part: digits.Part) -> float:
    logits = model(mge.Tensor(part.images))
    return float(F.nn.cross_entropy(logits, mge.Tensor(part.labels)).numpy())


def _accuracy(model: Any, part: digits.Part) -> float:
    return 100 * float((digits.predict(model, part.images) == part.labels).mean())


def measure(name: str, steps: int = STEPS, seeds: tuple[int, ...] = SEEDS) -> FakeQuantRow:
    """Trains by one fake quant and returns losses and accuracies before and after.

    Args:
        name: the fake quant.
        steps: number of batches of 64 images.
        seeds: the orders of the images.
    """
    way, net = WAYS[name], subject("resnet").net
    train, _, calibration, test = split()
    before: tuple[float, float] = (0.0, 0.0)
    losses, accuracies = [], []
    for seed in seeds:
        traced = qtrace.trace(net, calibration.images[:2], check=False)
        model = qtrace.prepare(traced, _config(name, way))
        qtrace.calibrate(model, [calibration.images], progress=False)
        before = _loss(model, train), _accuracy(model, test)
        qtrace.set_phase(model, "train")
        model.train()
        rates = {"lr": LR, "range_lr": way.range_lr, "range_decay": way.range_decay, "weight_decay": DECAY}
        groups = [
            (group["params"], group.get("lr", LR), group.get("weight_decay", 0.0))
            for group in qtrace.param_groups(model, **rates)
        ]
        fit(model, groups, shifted(train), steps=steps, seed=seed, title=f"{name}, {seed}")
        model.eval()
        losses.append(_loss(model, train))
        accuracies.append(_accuracy(model, test))
    floats = _loss(net, train), _accuracy(net, test)
    return FakeQuantRow(name, steps, floats, before, losses, accuracies, measured=today())


def main(arguments: list[str] | None = None) -> int:
    """The command; the exit code is 1 if a fake quant ends above the loss that it began with."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fake_quants", description=__doc__)
    parser.add_argument("name", nargs="*", help="the fake quants; all without")
    parser.add_argument("--folder", type=Path, default=RESULTS, help="the folder of the stored rows")
    options = parser.parse_args(arguments)
    process.quiet()
    worse = False
    for name in options.name or WAYS:
        row = measure(name)
        store([row], FakeQuantRow, options.folder)
        print(f"| {' | '.join(row.cells())} |", flush=True)
        worse |= statistics.median(row.losses) >= row.start[0]
    return int(worse)


if __name__ == "__main__":
    raise SystemExit(main())
