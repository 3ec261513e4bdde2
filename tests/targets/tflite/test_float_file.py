"""The float TFLite model and its parameter files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import megengine as mge
import megengine.functional as F
import megengine.module as M
import numpy as np
import pytest
from ai_edge_litert.interpreter import Interpreter

import qtrace
from qtrace.errors import ExportError
from qtrace.graph.types import TracedModule
from tests.nets import Inverted, images, net, randomize

X = images(1, 4, 16, 16)


def _module() -> M.Module:
    def forward(self: Any, x: Any) -> Any:
        y = self.up(F.relu(self.block(x)))
        return self.fc(F.flatten(F.max_pool2d(y, 4), 1))

    parts = {"block": Inverted(4, 4, 1, 2), "up": M.ConvTranspose2d(4, 5, 2, 2), "fc": M.Linear(320, 3)}
    return randomize(net(forward, **parts))


def _converted(module: M.Module, config: Any = "backend/tflite") -> TracedModule:
    prepared = qtrace.prepare(qtrace.trace(module, X, check=False), config)
    return qtrace.convert(qtrace.calibrate(prepared, [X], progress=False))


def _tensors(path: Path) -> tuple[Interpreter, dict[str, Any]]:
    interpreter = Interpreter(str(path))
    interpreter.allocate_tensors()
    return interpreter, {d["name"]: d for d in interpreter.get_tensor_details()}


def test_the_model_alone_computes_what_the_module_does_in_float(tmp_path: Path) -> None:
    module = _module()
    path = qtrace.export(_converted(module), tmp_path / "m.tflite", format="tflite_float")
    assert [p.name for p in tmp_path.iterdir()] == ["m.tflite"]
    interpreter, tensors = _tensors(path)
    assert {np.dtype(d["dtype"]) for d in tensors.values()} <= {np.dtype("float32"), np.dtype("int32")}
    interpreter.set_tensor(
        interpreter.get_input_details()[0]["index"], np.ascontiguousarray(X.transpose(0, 2, 3, 1))
    )
    interpreter.invoke()
    y = interpreter.get_tensor(interpreter.get_output_details()[0]["index"])
    np.testing.assert_allclose(y, module(mge.Tensor(X)).numpy(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("params", "suffix"),
    [("aimet-2.0.0", ".encodings"), ("aimet-0.6.1", ".encodings")],
)
def test_every_name_is_a_tensor_of_the_model(params: str, suffix: str, tmp_path: Path) -> None:
    converted = _converted(_module())
    path = qtrace.export(converted, tmp_path / "m.tflite", format="tflite_float", params=params)
    data = json.loads((tmp_path / f"m{suffix}").read_text())
    if params == "aimet-2.0.0":
        names = {entry["name"] for entry in data["encodings"]}
    else:
        names = {*data["activation_encodings"], *data["param_encodings"]}
    _, tensors = _tensors(path)
    assert names <= set(tensors)
    sites = qtrace.explain(converted).annotation.sites
    assert sum(site.sort == "weight" for site in sites) == 5
    assert {site.node for site in sites if site.sort == "weight"} <= names
    assert len(names) >= 5 + 5 + 4


def test_parameters_are_those_of_the_file_with_integers(tmp_path: Path) -> None:
    """Scales, axes and rounded weights, in the layout of the float file, equal what the int8 file stores."""
    converted = _converted(_module())
    options = {"format": "tflite_float", "params": "aimet-2.0.0"}
    floats, names = _tensors(qtrace.export(converted, tmp_path / "m.tflite", **options))
    ints, stored = _tensors(qtrace.export(converted, tmp_path / "int8.tflite"))
    entries = {e["name"]: e for e in json.loads((tmp_path / "m.encodings").read_text())["encodings"]}
    compared = 0
    for name, entry in entries.items():
        own = stored.get(f"{name}_int")
        if own is None:  # an activation that the int8 file fuses away
            continue
        assert entry["output_dtype"] == np.dtype(own["dtype"]).name
        grid = own["quantization_parameters"]
        scales, zeros = (np.reshape(entry.get(key, 0), -1) for key in ("y_scale", "y_zero_point"))
        assert np.allclose(grid["scales"], scales, rtol=1e-7, atol=0)  # one number stands for all channels
        assert (grid["zero_points"] == zeros).all()
        if "axis" in entry:
            assert entry["axis"] == grid["quantized_dimension"]
            shape = [1] * len(own["shape"])
            shape[entry["axis"]] = -1
            values = floats.get_tensor(names[name]["index"])
            integers = np.rint(values / np.reshape(np.float32(entry["y_scale"]), shape))
            np.testing.assert_array_equal(integers, ints.get_tensor(own["index"]))
            compared += 1
    assert compared >= 5


def test_one_scale_for_each_tensor_as_mgeconvert_has_it(tmp_path: Path) -> None:
    module = net(lambda self, x: F.relu(self.c(x)), c=M.Conv2d(4, 6, 3))
    converted = _converted(module, "backend/megengine")
    options = {"format": "tflite_float", "params": "mgeconvert"}
    path = qtrace.export(converted, tmp_path / "m.tflite", **options)
    data = json.loads((tmp_path / "m_quant_params.json").read_text())
    assert set(data) <= set(_tensors(path)[1])
    assert {"x", "relu_out", "c_weight"} <= set(data)


def test_nothing_is_written_where_the_file_cannot_express_a_site(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="knows signed symmetric integers only: prepare with backend"):
        qtrace.export(
            _converted(_module()), tmp_path / "m.tflite", format="tflite_float", params="tensorrt-10"
        )
    assert list(tmp_path.iterdir()) == []
