#!/usr/bin/env python
"""Writes model files and a checkpoint as this version saves them, to a new folder of ``tests/golden/files``.

    .venv/bin/python scripts/write_golden_files.py NAME

Run it before a release that changes what files hold. A folder that is there is never written again: every
later version must load it and give the same outputs (``tests/graph/files/test_golden_files.py``).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import megengine as mge
import megengine.functional as F
import megengine.module as M
import numpy as np

import qtrace

FOLDER = Path(__file__).parent.parent / "tests" / "golden" / "files"
FAKE_QUANTS = ("fixed", "lsq", "lsq_plus", "learned_range", "pact", "dorefa")
POWERS_OF_TWO = {
    "activation": {"signed": True, "symmetric": True, "power_of_two": True},
    "weight": {"power_of_two": True},
}


class Net(M.Module):
    """A residual block with a BatchNorm, and a linear head."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = M.Conv2d(3, 4, 3, padding=1, bias=False)
        self.bn = M.BatchNorm2d(4)
        self.side = M.Conv2d(4, 4, 1)
        self.head = M.Linear(4, 5)

    def forward(self, x: mge.Tensor) -> mge.Tensor:
        y = F.relu(self.bn(self.conv(x)))
        y = F.relu(y + self.side(y))
        return self.head(y.mean(axis=(2, 3)))


def network(rng: np.random.Generator) -> Net:
    """The network with random parameters and the statistics of a trained BatchNorm."""
    net = Net()
    for name, tensor in sorted(net.named_tensors()):
        positive = name in ("bn.weight", "bn.running_var")
        value = rng.uniform(0.5, 1.5, tensor.shape) if positive else rng.normal(size=tensor.shape) * 0.3
        tensor._reset(type(tensor)(value.astype(np.float32)))
    net.eval()
    return net


def configs() -> Iterator[tuple[str, dict[str, Any]]]:
    """Name of a file -> config of the prepared model in it."""
    minmax = {"observers": {"activation": "minmax", "weight": "minmax"}}
    yield "mse", {}
    for name in FAKE_QUANTS:
        yield name, {**minmax, "qat": {"fakequant": name}}
    yield "tqt", {"backend": "generic", **minmax, **POWERS_OF_TWO, "qat": {"fakequant": "tqt"}}
    yield "bn_kept", {**minmax, "qat": {"bn": {"fold": False}}}


def write(folder: Path) -> None:
    """Writes one model for each kind of file, their outputs, and a checkpoint of a calibration."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, 3, 8, 8)).astype(np.float32)
    traced = qtrace.trace(network(rng), mge.Tensor(x))
    outputs = {"input": x, "traced": traced(mge.Tensor(x)).numpy()}
    qtrace.save(traced, folder / "traced.mge")
    for name, config in configs():
        prepared = qtrace.calibrate(qtrace.prepare(traced, config), [x], progress=False)
        qtrace.save(prepared, folder / f"prepared_{name}.mge")
        outputs[f"prepared_{name}"] = prepared(mge.Tensor(x)).numpy()
        converted = qtrace.convert(prepared)
        qtrace.save(converted, folder / f"converted_{name}.mge")
        outputs[f"converted_{name}"] = converted(mge.Tensor(x)).numpy()
    write_checkpoint(folder, x)
    np.savez_compressed(folder / "outputs.npz", **outputs)


def write_checkpoint(folder: Path, x: np.ndarray) -> None:
    """Writes the statistics of one batch, as an interrupted calibration leaves them."""
    try:
        from qtrace.calibration.algorithms import Part, fingerprint, write_part
        from qtrace.calibration.collecting import CollectOptions, collect
    except ImportError:  # until the rooms were named after the stages
        from qtrace.collection.checkpoint import Part, fingerprint, write_part  # type: ignore
        from qtrace.collection.collecting import Options as CollectOptions  # type: ignore
        from qtrace.collection.collecting import collect  # type: ignore

    prepared = qtrace.load(folder / "prepared_fixed.mge")
    collected = collect(prepared, [(0, x)], CollectOptions("megengine", 1, progress=False))
    part = Part(collected.statistics, collected.chosen)
    write_part(folder / "checkpoint.part.npz", part, fingerprint(prepared))


def main() -> None:
    """Makes the folder that the command line names."""
    folder = FOLDER / sys.argv[1]
    folder.mkdir(parents=True)
    write(folder)
    print(folder, *sorted(path.name for path in folder.iterdir()))


if __name__ == "__main__":
    main()
