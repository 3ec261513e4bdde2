"""Parameter files have the layouts that their readers publish, and the graph's numbers exactly."""

from __future__ import annotations

import json
import re
import struct
from pathlib import Path
from typing import Any

import megengine.functional as F
import megengine.module as M
import numpy as np
import pytest

import qtrace
from qtrace import QConfig
from qtrace.errors import ExportError
from qtrace.graph.types import TracedModule
from qtrace.preparation.model import QuantizedModel
from tests.nets import ResNet, images, net, randomize

NUMBER = (int, float)
# A key with a question mark may be missing; no other key may be there. "*" stands for any name.
AIMET_061 = {
    "bitwidth": int,
    "dtype": {"int"},
    "is_symmetric": {"True", "False"},
    "max": NUMBER,
    "min": NUMBER,
    "offset": int,
    "scale": float,
}
AIMET_100 = {
    "name": str,
    "dtype": {"INT"},
    "bw": int,
    "is_sym": bool,
    "enc_type": {"PER_TENSOR", "PER_CHANNEL"},
    "scale": [float],
    "offset": [int],
}
RANGES = {"*": [{"bitwidth": int, "min": NUMBER, "max": NUMBER}]}
ENCODINGS = {"activation_encodings": RANGES, "param_encodings": RANGES}
SCHEMAS: dict[str, Any] = {
    "aimet-0.6.1": {
        "version": {"0.6.1"},
        "activation_encodings": {"*": [AIMET_061]},
        "param_encodings": {"*": [AIMET_061]},
        "quantizer_args?": dict,
    },
    "aimet-1.0.0": {
        "version": {"1.0.0"},
        "producer": str,
        "activation_encodings": [AIMET_100],
        "param_encodings": [AIMET_100],
        "quantizer_args?": dict,
        "excluded_layers?": list,
    },
    "aimet-2.0.0": {
        "version": {"2.0.0"},
        "producer": str,
        "encodings": [
            {
                "name": str,
                "output_dtype": {"int4", "uint4", "int8", "uint8", "int16", "uint16", "int32"},
                "y_scale": (float, list),
                "y_zero_point?": (int, list),
                "axis?": int,
                "block_size?": int,
            }
        ],
    },
    "mgeconvert": {
        "*": {
            "dtype": str,
            "qmin": int,
            "qmax": int,
            "scale": (float, list),
            "zero_point": (int, list, type(None)),
            "is_weight": bool,
            "axis?": int,
        }
    },
}


def _problems(value: Any, schema: Any, location: str = "$") -> list[str]:
    """Returns the places of ``value`` that break the schema."""
    if isinstance(schema, set):
        return [] if value in schema else [f"{location} is {value!r}"]
    if isinstance(schema, list):
        if not isinstance(value, list) or not value:
            return [f"{location} is no filled list"]
        return [p for i, v in enumerate(value) for p in _problems(v, schema[0], f"{location}[{i}]")]
    if not isinstance(schema, dict):
        right = isinstance(value, schema) and (schema is not int or not isinstance(value, bool))
        return [] if right else [f"{location} is a {type(value).__name__}"]
    if not isinstance(value, dict):
        return [f"{location} is no object"]
    if "*" in schema:
        return [p for k, v in value.items() for p in _problems(v, schema["*"], f"{location}.{k}")]
    known = {k.rstrip("?"): s for k, s in schema.items()}
    missing = [f"{location} lacks {k}" for k in schema if not k.endswith("?") and k not in value]
    strange = [f"{location} has {k}" for k in value if k not in known]
    inside = [p for k, v in value.items() if k in known for p in _problems(v, known[k], f"{location}.{k}")]
    return [*missing, *strange, *inside]


def _converted(module: M.Module, x: np.ndarray, recipe: str | QConfig) -> TracedModule:
    prepared = qtrace.prepare(qtrace.trace(module, x, check=False), recipe)
    return qtrace.convert(qtrace.calibrate(prepared, [x], progress=False))


def _text(converted: TracedModule, params: str, folder: Path) -> str:
    path = qtrace.export(converted, folder / "m.onnx", format="onnx_float", params=params)
    (beside,) = (p for p in folder.iterdir() if p != path)
    return beside.read_text()


@pytest.mark.quick(3)
@pytest.mark.parametrize("params", SCHEMAS)
def test_layout(params: str, tmp_path: Path) -> None:
    converted = _converted(randomize(ResNet(4, (1, 1))), images(2, 3, 16, 16), "onnxruntime")
    document = json.loads(_text(converted, params, tmp_path))
    assert _problems(document, SCHEMAS[params]) == []


def test_the_schema_finds_what_is_wrong() -> None:
    entry = {"bitwidth": 8, "min": 0.0, "max": 1.0}
    fine = {"activation_encodings": {"x": [entry]}, "param_encodings": {}}
    assert _problems(fine, ENCODINGS) == []
    wrong = {"activation_encodings": {"x": [{**entry, "min": "0"}, {**entry, "step": 1}]}}
    assert _problems(wrong, ENCODINGS) == [
        "$ lacks param_encodings",
        "$.activation_encodings.x[0].min is a str",
        "$.activation_encodings.x[1] has step",
    ]


def test_aimet_1_has_the_numbers_of_every_site(tmp_path: Path) -> None:
    converted = _converted(randomize(ResNet(4, (1, 1))), images(2, 3, 16, 16), "onnxruntime")
    document = json.loads(_text(converted, "aimet-1.0.0", tmp_path))
    entries = {e["name"]: e for g in ("activation_encodings", "param_encodings") for e in document[g]}
    annotation = qtrace.explain(converted).annotation
    expected = {
        s.node: getattr(converted.qsites, s.group).qparams() for s in annotation.sites if s.sort != "bias"
    }
    same = {n.name for n in annotation.notes if n.kind == "identity"}  # no tensors of their own
    expected.update((n, q) for n, q in QuantizedModel(converted).carried_qparams().items() if n not in same)
    assert len(expected) > 15
    for name, qparams in expected.items():
        entry = entries.pop(name)
        scheme = qparams.scheme
        assert (entry["bw"], entry["is_sym"]) == (scheme.bits, scheme.symmetric), name
        np.testing.assert_array_equal(np.float32(entry["scale"]), np.reshape(qparams.scale, -1))
        # Their offset is the zero point of unsigned integers, negative.
        shift = 1 << (scheme.bits - 1) if scheme.signed else 0
        np.testing.assert_array_equal(-np.array(entry["offset"]) - shift, np.reshape(qparams.zero_point, -1))
    # What is left are the biases.
    assert {e["bw"] for e in entries.values()} == {32}
    assert len(entries) == sum(s.sort == "bias" for s in annotation.sites)


CHANNELS = ("aimet-0.6.1", "aimet-1.0.0", "aimet-2.0.0", "mgeconvert")


def _per_channel(params: str, text: str) -> dict[str, tuple[list[float], int | None]]:
    """Returns the scales of each entry that has several, and their axis where the format says it."""
    data = json.loads(text)
    if params == "mgeconvert":
        entries = {n: (e["scale"], e["axis"]) for n, e in data.items() if "axis" in e}
    elif params == "aimet-2.0.0":
        entries = {e["name"]: (e["y_scale"], e["axis"]) for e in data["encodings"] if "axis" in e}
    elif params == "aimet-1.0.0":
        stored = data["param_encodings"]
        entries = {e["name"]: (e["scale"], None) for e in stored if e["enc_type"] == "PER_CHANNEL"}
    else:  # a range, or an encoding, for each channel
        steps = {n: [(e["max"] - e["min"]) / 255 for e in v] for n, v in data["param_encodings"].items()}
        entries = {n: (scales, None) for n, scales in steps.items() if len(scales) > 1}
    return entries


@pytest.mark.parametrize("params", CHANNELS)
def test_weights_have_a_scale_for_each_channel_with_the_default_recipe(params: str, tmp_path: Path) -> None:
    converted = _converted(_plain(), images(2, 3, 16, 16), "onnxruntime")
    entries = _per_channel(params, _text(converted, params, tmp_path))
    weights = [s for s in qtrace.explain(converted).annotation.sites if s.sort == "weight"]
    assert len(weights) == 3
    for site in weights:
        qparams = getattr(converted.qsites, site.group).qparams()
        scales, axis = entries[site.node]
        np.testing.assert_allclose(scales, qparams.scale, rtol=1e-6)
        assert axis in (None, 0), "the output channels of a layer with a weight"
        assert len(scales) == qparams.scale.size > 1


def _plain() -> M.Module:
    """Every rounded tensor is read by a layer with a weight, which is all that a table can say."""
    layers = {"a": M.Conv2d(3, 6, 3), "b": M.Conv2d(6, 6, 3, groups=6), "fc": M.Linear(864, 4)}
    return net(lambda self, x: self.fc(F.flatten(F.relu(self.b(F.relu(self.a(x)))), 1)), **layers)


def test_an_ncnn_table_has_the_numbers_of_every_layer(tmp_path: Path) -> None:
    grouped = {"match": {"name": "b"}, "quantize": True}
    config = QConfig(backend="ncnn", rules=[{"match": {}, "quantize_output": False}, grouped])
    converted = _converted(_plain(), images(2, 3, 16, 16), config)
    text = _text(converted, "ncnn", tmp_path)
    assert re.fullmatch(r"(\S+( [0-9.e+-]+)+\n)+", text)
    lines = {name: np.array(rest, float) for name, *rest in (line.split() for line in text.splitlines())}
    groups, sites = converted.qsites, qtrace.explain(converted).annotation.sites
    weights = [s for s in sites if s.sort == "weight"]
    assert len(lines) == 2 * len(weights) == 6
    for weight, bias in zip(weights, (s for s in sites if s.sort == "bias"), strict=True):
        (layer,) = (n for n in lines if n.startswith(weight.consumers[0]) and not n.endswith("_param_0"))
        for name, group in ((layer, bias.activation), (f"{layer}_param_0", weight.group)):
            scale = getattr(groups, group).qparams().scale
            np.testing.assert_array_equal(np.float32(1 / lines[name]), np.reshape(scale, -1))


def test_an_ncnn_table_has_a_number_for_each_channel_or_group(tmp_path: Path) -> None:
    """ncnn2int8 reads as many numbers as a convolution has channels or groups, whatever the line has."""
    layers = {"a": M.Conv2d(3, 6, 3), "b": M.Conv2d(6, 8, 3, groups=2)}
    module = net(lambda self, x: self.b(F.relu(self.a(x))), **layers)
    x = images(2, 3, 16, 16)
    in_float, grouped = {"match": {}, "quantize_output": False}, {"match": {"name": "b"}, "quantize": True}
    with pytest.raises(ExportError, match=r"one scale for each of the 2 groups .*axis: null\} for b"):
        _text(_converted(module, x, QConfig(backend="ncnn", rules=[in_float, grouped])), "ncnn", tmp_path)
    assert not list(tmp_path.iterdir())
    rules = [
        grouped,
        {"match": {"op": "conv2d"}, "weight": {"axis": None}},
        {"match": {"name": "b"}, "quantize_output": False},
    ]
    converted = _converted(module, x, QConfig(backend="ncnn", rules=rules))
    lines = [line.split() for line in _text(converted, "ncnn", tmp_path).splitlines()]
    assert [len(numbers) for _, *numbers in lines] == [6, 2, 1, 1]
    assert all(len(set(numbers)) == 1 for _, *numbers in lines)


def test_a_tensorrt_cache_is_the_header_and_a_big_endian_float_for_each_tensor(tmp_path: Path) -> None:
    converted = _converted(randomize(ResNet(4, (1, 1))), images(2, 3, 16, 16), "backend/tensorrt_10")
    header, *lines = _text(converted, "tensorrt-10", tmp_path).splitlines()
    assert re.fullmatch(r"TRT-\d{4}-EntropyCalibration2", header)
    assert all(re.fullmatch(r"\S+: [0-9a-f]{8}", line) for line in lines)
    scales = {n: struct.unpack(">f", bytes.fromhex(v))[0] for n, v in (line.split(": ") for line in lines)}
    sites = [s for s in qtrace.explain(converted).annotation.sites if s.sort == "activation"]
    assert len(sites) > 8
    for site in sites:
        assert scales[site.node] == float(getattr(converted.qsites, site.group).qparams().scale)
