"""Quantization-aware training in a plain MegEngine loop: the three lines that it takes.

``train`` is what anybody writes for a float network. ``quantize_and_train`` is the same loop with three
lines more, marked 1 to 3; the learned ranges are in a group of the optimizer's with a rate of their own.
Run it with ``python examples/qat_loop.py``.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from pathlib import Path
from typing import Any

import qtrace

# MegEngine makes the processor flush subnormal numbers to zero, of which numpy warns.
warnings.filterwarnings("ignore", message="The value of the smallest subnormal")
qtrace.quiet()  # before anything else loads MegEngine: it would print notes about a missing CUDA driver

import megengine as mge  # noqa: E402
import megengine.functional as F  # noqa: E402
import megengine.optimizer as optim  # noqa: E402
import numpy as np  # noqa: E402
from megengine.autodiff import GradManager  # noqa: E402

sys.path.insert(0, str(Path(__file__).parent))  # also when the file is loaded by another script

import digits  # noqa: E402

# 4 bits everywhere but at both ends, learned step sizes.
CONFIG = {
    "activation": {"bits": 4},
    "weight": {"bits": 4},
    "observers": {"weight": "mse"},
    "fakequant": "lsq",
    "rules": [
        {"match": {"position": "first"}, "activation": {"bits": 8}, "weight": {"bits": 8}},
        {"match": {"position": "last"}, "activation": {"bits": 8}, "weight": {"bits": 8}},
    ],
}
BATCH = 64


def batches(part: digits.Part, epochs: int, seed: int) -> list[tuple[mge.Tensor, mge.Tensor]]:
    """Shuffled batches of several epochs."""
    order = np.random.default_rng(seed)
    loader = []
    for _ in range(epochs):
        shuffled = order.permutation(len(part.images))
        for start in range(0, len(shuffled) - BATCH + 1, BATCH):
            chosen = shuffled[start : start + BATCH]
            loader.append((mge.Tensor(part.images[chosen]), mge.Tensor(part.labels[chosen])))
    return loader


def train(model: Any, loader: list[tuple[mge.Tensor, mge.Tensor]], lr: float) -> None:
    """Trains the float network."""
    optimizer = optim.SGD(model.parameters(), lr=lr, momentum=0.9, weight_decay=5e-4)
    manager = GradManager().attach(list(model.parameters()))
    model.train()
    for images, labels in loader:
        with manager:
            manager.backward(F.nn.cross_entropy(model(images), labels))
        optimizer.step().clear_grad()
    model.eval()


def quantize_and_train(
    model: Any, calibration: np.ndarray, loader: list[tuple[mge.Tensor, mge.Tensor]], lr: float
) -> Any:
    """Trains at 4 bits by the same loop; returns the quantized network."""
    model = qtrace.prepare(qtrace.trace(model, calibration[:1]), CONFIG)  # 1: round at every site
    qtrace.calibrate(model, [calibration], progress=False)  # 2: ranges from a little data
    qtrace.set_phase(model, "train")  # 3: and let them learn
    optimizer = optim.SGD(qtrace.param_groups(model, lr, weight_decay=5e-4), lr=lr, momentum=0.9)
    manager = GradManager().attach(list(model.parameters()))
    model.train()
    for images, labels in loader:
        with manager:
            manager.backward(F.nn.cross_entropy(model(images), labels))
        optimizer.step().clear_grad()
    model.eval()
    return qtrace.convert(model)


def calibrated_only(model: Any, calibration: np.ndarray) -> Any:
    """The 4-bit network without training, to compare with."""
    prepared = qtrace.prepare(qtrace.trace(model, calibration[:1]), CONFIG)
    return qtrace.convert(qtrace.calibrate(prepared, [calibration], progress=False))


def accuracy(model: Any, part: digits.Part) -> float:
    """Percentage of the images that ``model`` classifies right."""
    return 100.0 * float(np.mean(digits.predict(model, part.images) == part.labels))


def run(float_epochs: int = 20, epochs: int = 10, steps: int | None = None) -> dict[str, float]:
    """Trains, quantizes and trains on (at most `steps` steps each); accuracies on test images in percent."""
    data = digits.load()
    mge.random.seed(0)
    net = digits.Net()
    train(net, batches(data.train, float_epochs, seed=0)[:steps], lr=0.05)
    images = data.calibration.images
    plain = calibrated_only(net, images)
    trained = quantize_and_train(net, images, batches(data.train, epochs, seed=1)[:steps], lr=0.01)
    models = {"float": net, "4 bits, calibrated": plain, "4 bits, trained": trained}
    return {name: accuracy(model, data.test) for name, model in models.items()}


def main() -> int:
    """Prints a line for each network."""
    parser = argparse.ArgumentParser(prog="python examples/qat_loop.py", description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="six steps of everything, to see that it runs")
    quick = parser.parse_args().quick
    for name, value in (run(1, 1, 6) if quick else run()).items():
        print(f"{name:20s} {value:5.1f} %")
    return 0


if __name__ == "__main__":
    sys.exit(main())
