"""Norms whose weight or bias is computed from an input: TFLite has no form, and none is left out."""

from __future__ import annotations

from pathlib import Path

import megengine.functional as F
import megengine.module as M
import pytest

import qtrace
from qtrace.errors import ExportError
from tests.nets import images, net

NORMS = {
    "group_norm": lambda y, w: F.nn.group_norm(y, 2, True, w, w + 1, 1e-3),
    "instance_norm": lambda y, w: F.nn.instance_norm(y, True, w, w + 1, 1e-3),
    "layer_norm": lambda y, w: F.nn.layer_norm(y, (4,), True, w, w + 1, 1e-3),
    "batch_norm": lambda y, w: F.batch_norm(
        y, w.reshape(1, 4, 1, 1), w.reshape(1, 4, 1, 1) ** 2 + 1, training=False
    ),
}


@pytest.mark.parametrize("name", NORMS)
def test_a_computed_parameter_is_refused_by_name(tmp_path: Path, name: str) -> None:
    def forward(self, x):
        y = self.c(x)
        return NORMS[name](y, y.mean((0, 2, 3)))

    x = images(2, 3, 4, 4)
    traced = qtrace.trace(net(forward, c=M.Conv2d(3, 4, 1)), x, check=False)
    path = tmp_path / "net.tflite"
    with pytest.raises(ExportError, match=r"parameters computed from an input cannot become TFLite"):
        qtrace.export(traced, path)
    assert not path.exists()
