"""Files whose sizes are open run at every size in OpenVINO and in ncnn; a layer that fixes them is named."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import megengine.module as M
import pytest

import qtrace
from qtrace.errors import CalibrationError
from tests.nets import images, net, randomize
from tests.unlike_sizes import few_lines, traced


def quantized(graph: Any, backend: str) -> Any:
    prepared = qtrace.prepare(graph, {"backend": backend})
    return qtrace.convert(qtrace.calibrate(prepared, few_lines(), progress=False))


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
    assert "runs at the traced sizes alone" in caplog.text
    with pytest.raises(CalibrationError, match="fixes it to"):
        qtrace.verify(path, converted, few_lines()[:1])
