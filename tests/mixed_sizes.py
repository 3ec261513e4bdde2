"""Lines of 32 widths, and networks that take every width."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import megengine.functional as F
import megengine.module as M
import numpy as np
from megengine.traced_module import TracedModule

import qtrace
from tests.nets import images, net, randomize

WIDTHS = tuple(8 + (7 * i) % 32 for i in range(32))  # 32 widths from 8 to 39


def lines() -> list[np.ndarray]:
    """Batches of one or two lines; the wide ones have large values."""
    return [
        np.float32(1 + width / 8) * images(1 + i % 2, 3, 8, width, seed=i) for i, width in enumerate(WIDTHS)
    ]


def few_lines() -> list[np.ndarray]:
    return lines()[:6]


def network() -> M.Module:
    def forward(self: Any, x: Any) -> Any:
        return self.second(F.relu(self.first(x)))

    return randomize(net(forward, first=M.Conv2d(3, 4, 3, 2, 1), second=M.Conv2d(4, 2, 3, padding=1)))


def traced() -> TracedModule:
    return qtrace.trace(network(), images(1, 3, 8, 16), dynamic={"x": {0: "N", 3: "W"}})


def write_file(folder: Path) -> Path:
    """Writes the network as an ONNX file whose width is open."""
    return qtrace.export(traced(), folder / "lines.onnx")
