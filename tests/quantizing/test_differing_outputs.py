"""A detector whose outputs are large whatever it sees: boxes beside their grid, scores with a large bias."""

from __future__ import annotations

from pathlib import Path

import megengine as mge
import megengine.functional as F
import megengine.module as M
import numpy as np

import qtrace
from tests.nets import net
from tests.zoo.parts import pictures, settle

SIZE, CELLS = 160, 20


def _detector() -> M.Module:
    """Boxes of 8 pixels a cell and logits near -5, of random weights."""
    grid = np.stack(np.meshgrid(np.arange(CELLS), np.arange(CELLS)))[None].astype(np.float32)

    def forward(self: M.Module, x: mge.Tensor) -> tuple[mge.Tensor, mge.Tensor]:
        y = F.silu(self.bn2(self.c2(F.silu(self.bn1(self.c1(x))))))
        y = F.silu(self.bn4(self.c4(F.silu(self.bn3(self.c3(y))))))
        return (self.box(y) + self.grid) * 8, self.score(y)

    widths = (3, 32, 64, 128, 128)
    layers = {f"c{i}": M.Conv2d(widths[i - 1], widths[i], 3, 1 + (i < 4), 1) for i in range(1, 5)}
    norms = {f"bn{i}": M.BatchNorm2d(widths[i]) for i in range(1, 5)}
    heads = {"box": M.Conv2d(128, 2, 1), "score": M.Conv2d(128, 8, 1)}
    module = settle(net(forward, **layers, **norms, **heads, grid=mge.Tensor(grid)), 3, SIZE, SIZE)
    for head, gain, bias in ((module.box, 0.01, 0.0), (module.score, 0.01, -5.0)):
        head.weight[...] = gain * head.weight
        head.bias[...] = bias
    return module


def test_what_differs_between_samples_is_kept(tmp_path: Path) -> None:
    """By the power of the outputs alone, a labelling is chosen that leaves next to nothing of it."""
    options = {"measure": False, "verify": False, "progress": False, "keep": True}
    data, recipe = pictures(32, 3, SIZE, SIZE), {"placement": "balanced"}
    result = qtrace.quantize(_detector(), data, tmp_path / "a.onnx", recipe=recipe, **options)
    verdict = result.verdict
    assert verdict.word == "good"
    assert not verdict.has("differences")
