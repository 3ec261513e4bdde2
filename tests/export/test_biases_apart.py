"""Files for OpenVINO that compute with the size of a batch: biases of convolutions are sums of their own."""

from __future__ import annotations

import re
from pathlib import Path

import megengine.functional as F
import megengine.module as M
import numpy as np
import onnx
import pytest
from megengine import Tensor

import qtrace
from qtrace.config import backends
from qtrace.export.onnx.cures import CURES, RuntimeCure, write_biases_apart
from qtrace.graph.types import TracedModule
from qtrace.onnxfile.sessions import open_session
from qtrace.targets.openvino.runtime import OpenvinoSession
from tests.importing.onnx.networks import model, node
from tests.nets import images, net, randomize

X = images(2, 3, 16, 16)


def _with_queries(self: M.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """Two calls of one layer, and a table that is repeated for each sample."""
    y = F.relu(self.second(F.relu(self.first(x))))
    y = F.relu(self.second(y))
    return y, F.broadcast_to(self.queries, (x.shape[0], 4))


def _converted(backend: str) -> TracedModule:
    parts = {"first": M.Conv2d(3, 16, 3, padding=1), "second": M.Conv2d(16, 16, 3, padding=1)}
    module = randomize(net(_with_queries, **parts, queries=M.Linear(4, 1, bias=False)))
    module.queries = module.queries.weight
    for layer in parts.values():
        layer.bias._reset(layer.bias + np.linspace(-1, 1, 16, dtype=np.float32).reshape(1, -1, 1, 1))
    traced = qtrace.trace(module, X, check=False)
    prepared = qtrace.prepare(traced, {"backend": backend, "placement": "everything"})
    return qtrace.convert(qtrace.calibrate(prepared, [X], progress=False))


def _biases(path: Path) -> list[list[int]]:
    """The shapes of what each convolution of a file has as its bias; [] for none."""
    graph = onnx.load(path).graph
    shapes = {tensor.name: list(tensor.dims) for tensor in graph.initializer}
    shapes.update({n.output[0]: shapes[n.input[0]] for n in graph.node if n.input[0] in shapes})
    return [shapes[n.input[2]] if len(n.input) > 2 else [] for n in graph.node if n.op_type == "Conv"]


def test_openvino_adds_to_each_channel_its_own_bias(tmp_path: Path) -> None:
    converted = _converted("openvino")
    path = qtrace.export(converted, tmp_path / "m.onnx")
    assert _biases(path) == [[], [], []]
    graph = converted(Tensor(X))[0].numpy()
    deployed = OpenvinoSession(path, True).run([X]).outputs[0]
    assert np.mean(np.abs(deployed - graph) > 1e-4) < 0.01  # an LSB here and there
    assert qtrace.verify(path, converted, [X], runtime="openvino").passed


def test_files_for_other_targets_keep_their_biases(tmp_path: Path) -> None:
    path = qtrace.export(_converted("onnxruntime"), tmp_path / "m.onnx")
    assert _biases(path) == [[16], [16], [16]]


def test_the_form_computes_the_same_and_comes_in_again(tmp_path: Path) -> None:
    converted = _converted("openvino")
    path = qtrace.export(converted, tmp_path / "m.onnx")
    report = qtrace.verify(path, converted, [X], runtime="onnxruntime", optimized=False)
    assert report.worst_lsb() == 0
    again = qtrace.from_onnx(path)
    np.testing.assert_allclose(again(Tensor(X))[0].numpy(), converted(Tensor(X))[0].numpy(), atol=1e-5)


@pytest.mark.parametrize("reads_shape", [True, False])
def test_float_biases_are_taken_out_where_a_shape_is_read(reads_shape: bool) -> None:
    nodes = [
        node("Conv", "x w b", "y", pads=[1, 1, 1, 1]),
        node("Conv", "x v b", "z"),
        node("Add", "c c", "twice"),
        node("Conv", "x w c", "u", pads=[1, 1, 1, 1]),
        *([node("Shape", "x", "size")] if reads_shape else []),
    ]
    rng = np.random.default_rng(0)
    stored = {"w": (4, 3, 3, 3), "v": (4, 3, 1, 1), "b": (4,), "c": (4,)}
    file = model(
        nodes,
        {"x": (1, 3, 8, 8)},
        ("y", "z", "u", "twice"),
        {name: rng.normal(size=shape).astype(np.float32) for name, shape in stored.items()},
    )
    feeds = {"x": images(1, 3, 8, 8)}
    before = open_session(file.SerializeToString()).run(None, feeds)
    # The bias that another node reads, too, stays.
    assert write_biases_apart(file) == (2 if reads_shape else 0)
    for own, exact in zip(open_session(file.SerializeToString()).run(None, feeds), before, strict=True):
        np.testing.assert_allclose(own, exact, atol=1e-5)


@pytest.mark.parametrize("cure", CURES, ids=lambda cure: cure.pattern)
def test_a_cure_goes_with_the_last_version_that_needs_it(cure: RuntimeCure) -> None:
    """The table names what shows the fault, and versions that qtrace still supports."""
    root = Path(__file__).parents[2]
    oldest = re.search(rf'"{cure.runtime}>=([\d.]+)', (root / "pyproject.toml").read_text())
    assert oldest is not None
    assert _version(cure.versions.split()[-1]) >= _version(oldest[1]), f"leave it out: {cure.expires}"
    assert cure.evidence.startswith("https://") or (root / cure.evidence).is_file()
    assert not cure.name or any(cure.name in backends.get(name).cures for name in backends.known())


def _version(text: str) -> list[int]:
    return [int(number) for number in text.split(".")]


def _one_in_float(self: M.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    y = self.first(x)  # two read it, in float
    return self.last(F.sigmoid(self.alone(F.relu(y)))), y, F.broadcast_to(self.queries, (x.shape[0], 4))


@pytest.mark.quick(1)
@pytest.mark.parametrize("bias", ["some", "none", "zeros"])
def test_layers_in_float16_and_those_that_two_read_keep_their_forms(bias: str, tmp_path: Path) -> None:
    parts = {"first": M.Conv2d(3, 6, 3, bias=bias != "none"), "alone": M.Conv2d(6, 6, 3)}
    module = randomize(
        net(_one_in_float, **parts, last=M.Conv2d(6, 4, 1), queries=M.Linear(4, 1, bias=False))
    )
    module.queries = module.queries.weight
    if bias == "zeros":
        module.first.bias._reset(module.first.bias * 0)
    x = images(4, 3, 12, 12)
    rules = [
        {"match": {"name": "alone"}, "quantize": False},
        {"match": {"name": "first"}, "quantize_output": False},
    ]
    config = {"backend": "openvino", "placement": "everything", "float": "fp16", "rules": rules}
    prepared = qtrace.prepare(qtrace.trace(module, x[:1], check=False), config)
    converted = qtrace.convert(qtrace.calibrate(prepared, [x], progress=False))
    path = qtrace.export(converted, tmp_path / "m.onnx")
    graph = onnx.load(path).graph
    kinds = {tensor.name: tensor.data_type for tensor in graph.initializer}
    weights = [kinds[n.input[1]] for n in graph.node if n.op_type == "Conv" and n.input[1] in kinds]
    assert weights == [onnx.TensorProto.FLOAT16]
    assert qtrace.verify(path, converted, [x], runtime="openvino").passed
    deployed = OpenvinoSession(path, True).run([x]).outputs
    for own, exact in zip(deployed, converted(Tensor(x)), strict=True):
        np.testing.assert_allclose(own, exact.numpy(), atol=0.02 * np.abs(exact.numpy()).max())
