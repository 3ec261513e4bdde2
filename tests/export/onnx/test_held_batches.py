"""Files hold for other batches, or fix the batch where a node is written with its size."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import megengine as mge
import megengine.functional as F
import megengine.module as M
import numpy as np
import onnx
import pytest

import qtrace
from qtrace.graph.open_axes import OpenAxes, OpenAxis, write_open_axes
from qtrace.graph.types import TracedModule
from qtrace.onnxfile.sessions import open_session
from tests.each import each_of
from tests.nets import images, net

Forward = Callable[[Any, mge.Tensor], Any]


def _rows(count: int) -> np.ndarray:
    return np.random.default_rng(count).normal(size=(count, 8)).astype(np.float32)


ROWS = _rows(4)
MAPS = images(4, 8, 6, 6)


def _last_first(self: Any, x: mge.Tensor) -> mge.Tensor:
    first, rest = F.split(self.fc(x), [1], axis=0)
    return F.concat([rest, first], axis=0)


def _three_parts(self: Any, x: mge.Tensor) -> mge.Tensor:
    a, b, c = F.split(self.fc(x), [1, 2], axis=-2)
    return F.concat([c, b, a], axis=0)


def _written(index: Any) -> Forward:
    def forward(self: Any, x: mge.Tensor) -> mge.Tensor:
        y = self.fc(x)
        y[index] = 0.0
        return y

    return forward


def _moved_split(self: Any, x: mge.Tensor) -> mge.Tensor:
    first, rest = F.split(F.transpose(self.fc(x), (1, 0)), [1], axis=1)
    return F.concat([rest, first], axis=1)


def _joined(self: Any, x: mge.Tensor) -> mge.Tensor:
    return F.flatten(F.transpose(self.conv(x), (2, 3, 0, 1)), 0, 1)


def _converted(traced: TracedModule, data: np.ndarray) -> TracedModule:
    return qtrace.convert(qtrace.calibrate(qtrace.prepare(traced), [data], progress=False))


def _export(forward: Forward, data: np.ndarray, quantized: bool, path: Path) -> TracedModule:
    layers = {"fc": M.Linear(8, 8)} if data is ROWS else {"conv": M.Conv2d(8, 8, 1)}
    module = qtrace.trace(net(forward, **layers), data, check=False)
    if quantized:
        module = _converted(module, data)
    qtrace.export(module, path)
    return module


@each_of("quantized", [False, True])
@each_of("forward", [_last_first, _three_parts])
def test_unequal_parts_of_a_batch_leave_it_open(forward: Forward, quantized: bool, tmp_path: Path) -> None:
    path = tmp_path / "net.onnx"
    module = _export(forward, ROWS, quantized, path)
    session = open_session(path)
    for batch in (4, 2, 7):
        rows = _rows(batch)
        (got,) = session.run(None, {"x": rows})
        np.testing.assert_allclose(got, module(mge.Tensor(rows)).numpy(), atol=0.05 if quantized else 1e-5)


@pytest.mark.quick(2)
@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize(
    ("forward", "data", "node"),
    [
        (_written(slice(0, 1)), ROWS, "Where 'setitem_out'"),
        (_written(-1), ROWS, "Where 'setitem_out'"),
        (_written(slice(None, None, 2)), ROWS, "Where 'setitem_out'"),
        (_moved_split, ROWS, "Split 'split_out'"),
        (_joined, MAPS, "Reshape 'flatten_out'"),
    ],
)
def test_a_node_with_the_size_of_the_batch_fixes_it(
    forward: Forward,
    data: np.ndarray,
    node: str,
    quantized: bool,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    path = tmp_path / "net.onnx"
    with caplog.at_level(logging.WARNING, logger="qtrace"):
        module = _export(forward, data, quantized, path)
    assert f"the file fixes axis 0 of input x: {node} is written for this size alone" in caplog.text
    (value,) = onnx.load(path).graph.input
    assert [size.dim_value for size in value.type.tensor_type.shape.dim] == list(data.shape)
    (got,) = open_session(path).run(None, {"x": data})
    np.testing.assert_allclose(got, module(mge.Tensor(data)).numpy(), atol=0.05 if quantized else 1e-5)


def test_a_recorded_batch_is_fixed_likewise(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As that of an imported file is."""
    traced = qtrace.trace(net(_written(0), fc=M.Linear(8, 8)), ROWS, check=False)
    write_open_axes(traced, OpenAxes((OpenAxis("x", 0, "N", "N"),)))
    with caplog.at_level(logging.WARNING, logger="qtrace"):
        path = qtrace.export(traced, tmp_path / "net.onnx")
    assert "the file fixes axis 0 (N) of input x: Where 'setitem_out'" in caplog.text
    (value,) = onnx.load(path).graph.input
    assert [size.dim_value for size in value.type.tensor_type.shape.dim] == [4, 8]
