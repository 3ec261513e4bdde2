"""Files whose sizes are open run at every size in OpenVINO and in ncnn; a layer that fixes them is named."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import megengine.module as M
import pytest

import qtrace
from qtrace.errors import CalibrationError
from tests.mixed_sizes import few_lines, traced
from tests.nets import images, net, randomize


def quantized(graph: Any, backend: str) -> Any:
    prepared = qtrace.prepare(graph, {"backend": backend})
    return qtrace.convert(qtrace.calibrate(prepared, few_lines(), progress=False))


@pytest.mark.quick(1)
@pytest.mark.parametrize(("backend", "name"), [("openvino", "net.onnx"), ("ncnn", "net.param")])
def test_a_file_runs_at_every_size(
    backend: str, name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    converted = quantized(traced(), backend)
    path = qtrace.export(converted, tmp_path / name)
    with caplog.at_level(logging.INFO, "qtrace"):
        assert qtrace.verify(path, converted, few_lines()[:3], runtime=backend).passed
    assert "fixes" not in caplog.text
    assert "alone" not in caplog.text


def test_an_ncnn_net_with_a_reshape_names_the_layer(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def forward(self: Any, x: Any) -> Any:
        y = self.conv(x)
        return y.reshape(y.shape[0], 4, -1)

    module = randomize(net(forward, conv=M.Conv2d(3, 4, 3, padding=1)))
    graph = qtrace.trace(module, images(1, 3, 8, 16), dynamic={"x": {0: "N", 3: "W"}})
    converted = quantized(graph, "ncnn")
    path = qtrace.export(converted, tmp_path / "net.param")
    assert "Reshape" in caplog.text
    assert "runs only at the traced sizes" in caplog.text
    with pytest.raises(CalibrationError, match="fixes it to"):
        qtrace.verify(path, converted, few_lines()[:1])


def test_a_float_net_of_ncnn_runs_at_every_size(tmp_path: Path) -> None:
    graph = traced()
    path = qtrace.export(graph, tmp_path / "net.param")
    assert qtrace.verify(path, graph, few_lines()[:3]).passed


def test_a_net_with_layers_in_float_is_verified_at_its_size(tmp_path: Path) -> None:
    """The net says nothing of allow_float, without which it cannot be written again."""
    int8 = {"signed": True, "symmetric": True, "rounding": "half_away", "narrow": True}
    config = {"backend": "generic", "activation": int8, "weight": {"bits": 16, "axis": 0, "narrow": True}}
    graph = traced()
    batch = images(1, *graph.graph.inputs[1].shape[1:])
    converted = qtrace.convert(qtrace.calibrate(qtrace.prepare(graph, config), [batch], progress=False))
    path = qtrace.export(converted, tmp_path / "net.param", allow_float=["conv2d"])
    assert qtrace.verify(path, converted, [batch]).passed
