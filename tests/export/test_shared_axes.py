"""Files of one network that are measured share the open axes that are found in the first of them."""

from __future__ import annotations

from pathlib import Path

import megengine.functional as F
import megengine.module as M
import onnx
import pytest

import qtrace
from qtrace.export import open_axes
from qtrace.export.converted import ConvertedGraph
from qtrace.export.onnx.exporter import OnnxOptions
from qtrace.export.onnx.files import files_with
from qtrace.export.open_axes import SharedAxes
from qtrace.graph.open_axes import OpenAxes, OpenAxis, write_open_axes
from tests.nets import images, net

DATA = images(4, 3, 16, 16)
AXES = OpenAxes((OpenAxis("x", 0, "N", "N"), OpenAxis("x", 2, "H", "height"), OpenAxis("x", 3, "W", "width")))


def test_further_files_have_the_axes_of_the_first_without_another_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = {"a": M.Conv2d(3, 8, 3), "b": M.Conv2d(8, 4, 1)}
    traced = qtrace.trace(net(lambda self, x: self.b(F.relu(self.a(x))), **layers), DATA[:2])
    write_open_axes(traced, AXES)
    searches = []
    search = open_axes.find_declared_axes
    monkeypatch.setattr(
        open_axes,
        "find_declared_axes",
        lambda *given, **options: searches.append(1) or search(*given, **options),
    )
    axes, models = SharedAxes(), []
    for config in ({"placement": "everything"}, {"rules": [{"match": {"name": "*"}, "quantize": False}]}):
        prepared = qtrace.prepare(traced, config)
        if config.get("placement"):
            qtrace.calibrate(prepared, [DATA], progress=False)
        graph, options = ConvertedGraph(qtrace.convert(prepared)), OnnxOptions(axes=axes)
        (content,) = files_with(options, graph, tmp_path / "a.onnx").values()
        models.append(onnx.load_from_string(content))
    assert len(searches) == 1
    first, second = (
        [[d.dim_param or d.dim_value for d in value.type.tensor_type.shape.dim] for value in ends]
        for ends in ((*m.graph.input, *m.graph.output) for m in models)
    )
    assert first == second
    assert first[0] == ["N", 3, "height", "width"]
    assert not any(model.metadata_props for model in models)
    assert len(models[0].graph.node) != len(models[1].graph.node)


def test_the_option_is_none_of_users(tmp_path: Path) -> None:
    traced = qtrace.trace(net(lambda self, x: F.relu(x)), DATA[:2], check=False)
    with pytest.raises(qtrace.errors.ExportError, match="axes"):
        qtrace.export(traced, tmp_path / "a.onnx", axes=SharedAxes())
