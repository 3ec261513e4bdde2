"""Reading and writing at a mask, which may stand on any axes beside whole ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import megengine as mge
import numpy as np
import onnxruntime as ort
import pytest

import qtrace
from qtrace.errors import ExportError
from tests.nets import net

# MegEngine writes at masks wrongly where ops are queued.
pytestmark = pytest.mark.usefixtures("synchronous")

X = np.random.default_rng(4).normal(size=(3, 4, 5, 6)).astype(np.float32)

MASKS: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "all axes": ((), lambda x: x > 0),
    "the first axis": ((), lambda x: x[:, 0, 0, 0] > 0),
    "the first two": ((), lambda x: x[:, :, 0, 0] > 0),
    "the last axis": ((...,), lambda x: x[0, 0, 0] > 0),
    "the last two": ((...,), lambda x: x[0, 0] > 0),
    "the second": ((slice(None),), lambda x: x[0, :, 0, 0] > 0),
    "two in the middle": ((slice(None),), lambda x: x[0, :, :, 0] > 0),
}


def _write(self: Any, x: mge.Tensor) -> mge.Tensor:
    before, mask = self.index
    y = x * 2
    y[(*before, mask(x))] = -3.0
    return y


def _read(self: Any, x: mge.Tensor) -> mge.Tensor:
    before, mask = self.index
    return (x * 2)[(*before, mask(x))]


@pytest.mark.quick(3)
@pytest.mark.parametrize("forward", [_write, _read])
@pytest.mark.parametrize("case", MASKS)
def test_a_mask_stands_on_any_axes(case: str, forward: Callable[..., Any], tmp_path: Path) -> None:
    module = net(forward, index=MASKS[case])
    path = qtrace.export(qtrace.trace(module, X, check=False), tmp_path / "m.onnx")
    session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    for values in (X, -X):
        (got,) = session.run(None, {session.get_inputs()[0].name: values})
        np.testing.assert_array_equal(got, module(mge.Tensor(values)).numpy())


def test_a_mask_beside_another_index_is_refused(tmp_path: Path) -> None:
    module = net(lambda self, x: (x * 2)[:, x[0, :, 0, 0] > 0, 1:3])
    with pytest.raises(ExportError, match="a mask can become ONNX only next to whole axes: index twice"):
        qtrace.export(qtrace.trace(module, X, check=False), tmp_path / "m.onnx")
