"""Post-training algorithms on the handwritten digits: their gain at 4 bits, and on a network with a fault.

    python examples/demo.py --out demo-out        # trains the float network
    python examples/ptq.py --weights demo-out/float_weights.pkl

Calibrates on 100 images without labels and counts on 500 others.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import digits
import megengine as mge
import megengine.module as M
import numpy as np

import qtrace

ENDS = [
    {"match": {"position": end}, "activation": {"bits": 8}, "weight": {"bits": 8}}
    for end in ("first", "last")
]
LAYERS = {"iterations": 400}
BLOCKS = {"iterations": 300}


def plant(net: M.Module, spread: float = 64.0, seed: int = 0) -> None:
    """Stretches the channels inside of each block without changing what the network computes.

    A channel behind a ReLU is multiplied by f, between 1 / spread and spread, in its BatchNorm, and divided
    by f in the convolution that reads it: the fault of depthwise networks.
    """
    rng = np.random.default_rng(seed)
    for block in (net.block1, net.block2, net.block3):
        channels = block.bn1.weight.shape[1]
        f = np.exp(rng.uniform(-np.log(spread), np.log(spread), channels)).astype(np.float32)
        wide = mge.Tensor(f.reshape(1, -1, 1, 1))
        block.bn1.weight._reset(mge.Parameter(block.bn1.weight * wide))
        block.bn1.bias._reset(mge.Parameter(block.bn1.bias * wide))
        block.conv2.weight._reset(mge.Parameter(block.conv2.weight / wide))


class Bench:
    """The trained float network and its data."""

    def __init__(self, weights: str) -> None:
        self.data = digits.load()
        self.weights = weights

    def net(self) -> M.Module:
        """The trained float network."""
        net = digits.Net()
        net.load_state_dict(mge.load(self.weights))
        net.eval()
        return net

    def measure(self, title: str, net: M.Module, config: dict[str, Any] | None) -> None:
        """Quantizes ``net`` and prints its accuracy and the SQNR of its logits on the test images."""
        test, images = self.data.test, self.data.calibration.images
        references = net(mge.Tensor(test.images)).numpy()
        model, started = net, time.monotonic()
        if config is not None:
            prepared = qtrace.prepare(qtrace.trace(net, images[:1]), qtrace.QConfig(**config))
            qtrace.calibrate(prepared, [images[:50], images[50:]], progress=False)
            model = qtrace.convert(prepared)
        outputs = model(mge.Tensor(test.images)).numpy()
        noise = float(np.sum((outputs - references) ** 2))
        sqnr = f"{10 * np.log10(np.sum(references**2) / noise):8.2f} dB" if noise else "      exact"
        right = 100 * np.mean(outputs.argmax(axis=1) == test.labels)
        print(f"{title:44} {right:6.1f} % {sqnr} {time.monotonic() - started:7.1f} s", flush=True)


def low_bits(bench: Bench, bits: int) -> None:
    """W4A4 or W4A8: rounding to nearest against learned roundings, and learned blocks."""
    net = bench.net()
    base = {"backend": "generic", "weight": {"bits": 4}, "activation": {"bits": bits}, "rules": ENDS}
    for title, ptq in (
        ("round to nearest", []),
        ("bias_correction", ["bias_correction"]),
        ("adaround", [{"adaround": LAYERS}]),
        ("reconstruct", [{"reconstruct": BLOCKS}]),
        ("reconstruct, bias_correction", [{"reconstruct": BLOCKS}, "bias_correction"]),
    ):
        bench.measure(f"W4A{bits} {title}", net, {**base, "ptq": ["fuse_bn", *ptq]})


def imbalance(bench: Bench) -> None:
    """W8A8 with one scale for all weights of a layer, on a network whose channels were stretched."""
    base = {"weight": {"axis": None}, "activation": {"bits": 8}}
    bench.measure("W8A8 per tensor, as trained", bench.net(), base)
    net = bench.net()
    plant(net)
    bench.measure("stretched, float", net, None)
    for title, ptq in (
        ("round to nearest", []),
        ("bias_correction", ["bias_correction"]),
        ("equalize", ["equalize"]),
        ("equalize, bias_correction", ["equalize", "bias_correction"]),
        ("tensorwise, bias_correction", ["tensorwise", "bias_correction"]),
    ):
        bench.measure(f"stretched, W8A8 {title}", net, {**base, "ptq": ["fuse_bn", *ptq]})


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--weights", default="demo-out/float_weights.pkl")
    parser.add_argument("--only", choices=("w4a4", "w4a8", "imbalance"))
    options = parser.parse_args()
    bench = Bench(options.weights)
    bench.measure("float", bench.net(), None)
    parts = {
        "w4a4": lambda: low_bits(bench, 4),
        "w4a8": lambda: low_bits(bench, 8),
        "imbalance": lambda: imbalance(bench),
    }
    for name, part in parts.items():
        if options.only in (None, name):
            part()


if __name__ == "__main__":
    main()
