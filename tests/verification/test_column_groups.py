"""Faults and losses in columns of small values do not hide behind those of large ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import megengine as mge
import megengine.functional as F
import megengine.module as M
import numpy as np
import onnx
import pytest
from onnx import numpy_helper

import qtrace
from qtrace.comparing.sums import ErrorSums
from qtrace.errors import GraphError
from qtrace.graph.types import TracedModule
from tests.nets import images, net

_BATCHES = [images(4, 3, 8, 8, seed=s) for s in range(2)]
# What would stay in float, as its columns have unlike ranges, is rounded all the same.
_ROUNDED = [{"match": {"name": "b"}, "quantize": True}]
_FACTORS = np.repeat([64.0, 0.02], [4, 6]).astype("float32")


def _joined(self: M.Module, x: mge.Tensor) -> mge.Tensor:
    y = F.relu(self.a(x))
    return F.concat([self.boxes(y) * 1000, F.sigmoid(self.scores(y))], axis=1)


def _export(module: M.Module, config: Any, path: Path) -> tuple[TracedModule, Path]:
    prepared = qtrace.prepare(qtrace.trace(module, _BATCHES[0], check=False), config)
    converted = qtrace.convert(qtrace.calibrate(prepared, _BATCHES, progress=False))
    return converted, qtrace.export(converted, path)


@pytest.fixture
def joined(tmp_path: Path) -> tuple[TracedModule, Path]:
    """Boxes and scores, joined behind the last integers."""
    parts = {name: M.Conv2d(4, 4, 3, padding=1) for name in ("boxes", "scores")}
    rules = [
        {"match": {"name": ["boxes", "scores"]}, "quantize_output": False},
        {"match": {"op": ["mul", "sigmoid", "concat"]}, "quantize": False},
    ]
    module = net(_joined, a=M.Conv2d(3, 4, 3, padding=1), **parts)
    return _export(module, qtrace.QConfig(rules=rules), tmp_path / "m.onnx")


def test_a_fault_in_small_columns_fails_beside_large_ones(joined: tuple[TracedModule, Path]) -> None:
    converted, path = joined
    good = qtrace.verify(path, converted, _BATCHES, optimized=False)
    assert good.passed, good.summary()
    model = onnx.load(path)
    scale = next(t for t in model.graph.initializer if t.name == "scores_weight_scale")
    scale.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(scale) * 2, scale.name))
    onnx.save(model, path)
    report = qtrace.verify(path, converted, _BATCHES, optimized=False)
    assert sum(report.outputs["op_by_op"].values(), ErrorSums()).sqnr_db > 60
    assert not report.passed
    name, ratio = report.weakest_output()
    assert (name, ratio < 35) == ("concat_out, columns 4..7", True)
    assert f"output {name}, from the runtime's own integers, has" in report.summary()
    assert f"reference {ratio:.1f} dB at {name}" in report.summary()
    assert qtrace.bisect(path, converted, _BATCHES) is not None


@pytest.fixture
def packed(tmp_path: Path) -> tuple[TracedModule, Path]:
    """One convolution whose boxes and scores share a grid, which loses the scores."""
    module = net(
        lambda self, x: self.b(F.relu(self.a(x))), a=M.Conv2d(3, 8, 3, padding=1), b=M.Conv2d(8, 10, 1)
    )
    module.b.weight *= _FACTORS.reshape(-1, 1, 1, 1)
    module.b.bias *= _FACTORS.reshape(1, -1, 1, 1)
    return _export(module, {"backend": "qnn", "rules": _ROUNDED}, tmp_path / "m.onnx")


def test_columns_that_the_graph_itself_has_lost_are_named(packed: tuple[TracedModule, Path]) -> None:
    converted, path = packed
    report = qtrace.verify(path, converted, _BATCHES, runtime="onnxruntime", optimized=False)
    assert set(report.closeness["reference"]) == {"b_out, columns 0..3", "b_out, columns 4..9"}
    assert list(report.lost_groups()) == ["b_out, columns 4..9"]
    text = report.summary()
    assert "broken: the file computes what the graph computes, but b_out, columns 4..9 carries no" in text
    assert "passed" not in text
    assert "0.0 dB at b_out, columns 4..9\n" in text
    data = json.loads(json.dumps(report.to_dict()))
    assert list(data["lost_groups"]) == ["b_out, columns 4..9"]
    assert report.passed


def test_other_shapes_of_a_float_network_are_refused(packed: tuple[TracedModule, Path]) -> None:
    converted, path = packed
    other = qtrace.trace(net(lambda self, x: F.flatten(x, 1)), _BATCHES[0], check=False)
    with pytest.raises(GraphError, match=r"b_out has shape \(4, 192\) in the float network"):
        qtrace.verify(path, converted, _BATCHES, float_model=other, runtime="onnxruntime", optimized=False)
