"""LiteRT beside the graph: integers of every site, planted faults, bisect, and what does not fit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import flatbuffers
import megengine as mge
import megengine.functional as F
import megengine.module as M
import numpy as np
import pytest
from ai_edge_litert import schema_py_generated as schema

import qtrace
from qtrace.errors import ExportError
from qtrace.graph.types import TracedModule
from qtrace.verification import runtimes
from qtrace.verification.runtimes.base import run_outputs
from tests.nets import images, net
from tests.targets.tflite.files import load

BATCHES = [images(4, 4, 8, 8, seed=s) for s in range(2)]


def _forward(self: Any, x: mge.Tensor) -> mge.Tensor:
    y = F.relu(self.a(x))
    return self.fc(F.flatten(F.max_pool2d(F.relu(self.b(y) + y), 2), 1))


@pytest.fixture(scope="module")
def model() -> TracedModule:
    conv = {"a": M.Conv2d(4, 4, 3, padding=1), "b": M.Conv2d(4, 4, 3, padding=1)}
    traced = qtrace.trace(net(_forward, **conv, fc=M.Linear(64, 5)), BATCHES[0])
    prepared = qtrace.prepare(traced, "backend/tflite")
    return qtrace.convert(qtrace.calibrate(prepared, BATCHES, progress=False))


@pytest.fixture
def path(model: TracedModule, tmp_path: Path) -> Path:
    return qtrace.export(model, tmp_path / "m.tflite")


def _edit(path: Path, change: Callable[[schema.ModelT], None]) -> None:
    model = load(path)
    change(model)
    builder = flatbuffers.Builder(65536)
    builder.Finish(model.Pack(builder), file_identifier=b"TFL3")
    path.write_bytes(bytes(builder.Output()))


def _tensor(model: schema.ModelT, name: str) -> schema.TensorT:
    return next(t for t in model.subgraphs[0].tensors if t.name == name.encode())


def _scaled(name: str, factor: float) -> Callable[[schema.ModelT], None]:
    def change(model: schema.ModelT) -> None:
        quantization = _tensor(model, name).quantization
        quantization.scale = (quantization.scale * factor).astype(np.float32)

    return change


def _bias_of_another_scale(model: schema.ModelT) -> None:
    """Integers as for half the scale: the file says the right one, which kernels take from the others."""
    buffer = model.buffers[_tensor(model, "a_bias_int").buffer]
    buffer.data = (np.frombuffer(bytes(buffer.data), np.int32) * 2).tobytes()


def _swapped_axes(model: schema.ModelT) -> None:
    tensor = _tensor(model, "b_weight_int")
    buffer = model.buffers[tensor.buffer]
    value = np.frombuffer(bytes(buffer.data), np.int8).reshape(tensor.shape)
    buffer.data = value.transpose(0, 2, 1, 3).tobytes()


def _no_permutation(model: schema.ModelT) -> None:
    """The weights behind the flatten as the graph has them."""
    buffer = model.buffers[_tensor(model, "fc_weight_int").buffer]
    value = np.frombuffer(bytes(buffer.data), np.int8).reshape(5, 4, 4, 4)
    buffer.data = value.transpose(0, 3, 1, 2).tobytes()


def _no_zero_point(model: schema.ModelT) -> None:
    quantization = _tensor(model, "x_int").quantization
    quantization.zeroPoint = quantization.zeroPoint * 0


# name -> what is done to the file, and the site and op that are at fault.
FAULTS: dict[str, tuple[Callable[[schema.ModelT], None], str, str]] = {
    "bias scale off by 2": (_bias_of_another_scale, "relu_out_q", "F.conv2d"),
    "weight scales off by 2": (_scaled("fc_weight_int", 2.0), "fc_out_q", "F.linear"),
    "swapped axes": (_swapped_axes, "b_out_q", "F.conv2d"),
    "features in another order": (_no_permutation, "fc_out_q", "F.linear"),
    "zero point dropped": (_no_zero_point, "x_q", "input"),
}


def test_a_file_without_a_fault_passes(path: Path, model: TracedModule) -> None:
    _edit(path, lambda m: None)
    assert qtrace.verify(path, model, BATCHES, runtime="litert").passed
    assert qtrace.bisect(path, model, BATCHES, runtime="litert") is None


@pytest.mark.quick(2)
@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_found_where_they_are(fault: str, path: Path, model: TracedModule) -> None:
    change, site, op = FAULTS[fault]
    _edit(path, change)
    report = qtrace.verify(path, model, BATCHES, runtime="litert")
    assert not report.passed
    # Op by op, each site is computed from the runtime's own inputs: later sites are not to blame.
    assert site in [name for name, tally in report.sites["op_by_op"].items() if tally.worst > 1]
    found = qtrace.bisect(path, model, BATCHES, runtime="litert")
    assert found is not None
    assert (found.site, found.op, found.stage) == (site, op, "plain")
    assert found.causes


def test_integers_and_outputs_of_a_batch(path: Path, model: TracedModule) -> None:
    session = runtimes.get(path).open(path, False)
    annotated = [f"{s.name}" for s in qtrace.explain(model).annotation.sites if s.sort == "activation"]
    assert set(annotated) <= set(session.integer_names)
    run = session.run([images(3, 4, 8, 8)])
    assert run.integers["x"].shape == (3, 4, 8, 8)
    assert {v.dtype for v in run.integers.values()} == {np.dtype(np.int8)}
    assert [o.shape for o in run.outputs] == [(3, 5)]


def test_a_file_of_another_calibration_is_refused(path: Path, model: TracedModule) -> None:
    traced = qtrace.trace(net(lambda self, x: self.c(x), c=M.Conv2d(4, 4, 3)), BATCHES[0], check=False)
    prepared = qtrace.calibrate(qtrace.prepare(traced, "backend/tflite"), BATCHES, progress=False)
    with pytest.raises(ExportError, match="not an export of this module"):
        qtrace.verify(path, qtrace.convert(prepared), BATCHES)


@pytest.mark.parametrize("optimize", [False, True])
def test_outputs_alone_are_those_of_a_whole_run(path: Path, optimize: bool) -> None:
    session = runtimes.get(path).open(path, optimize)
    inputs = [images(3, 4, 8, 8)]
    for own, whole in zip(run_outputs(session, inputs), session.run(inputs).outputs, strict=True):
        np.testing.assert_array_equal(own, whole)
    with pytest.raises(ExportError, match="takes 1 inputs, not 2"):
        run_outputs(session, inputs * 2)


def test_the_suffix_chooses(path: Path) -> None:
    assert runtimes.get(path).name == "litert"
    with pytest.raises(ExportError, match=r"litert does not run files like m\.onnx"):
        runtimes.get(path.with_suffix(".onnx"), "litert")


def test_files_that_are_missing_or_something_else(path: Path, tmp_path: Path) -> None:
    runtime = runtimes.get(path)
    with pytest.raises(ExportError, match=r"none\.tflite does not exist: export the module first"):
        runtime.open(tmp_path / "none.tflite", False)
    other = tmp_path / "other.tflite"
    other.write_text("hello, this is no model")
    with pytest.raises(ExportError, match=r"other\.tflite is not a TFLite file"):
        runtime.open(other, False)
    other.write_bytes(path.read_bytes()[:200])
    with pytest.raises(ExportError, match=r"other\.tflite"):
        runtime.open(other, False)
    other.write_bytes(path.read_bytes())
    _edit(other, lambda m: setattr(m, "metadata", []))
    with pytest.raises(ExportError, match=r"other\.tflite was not written by qtrace"):
        runtime.open(other, False)


def test_inputs_that_do_not_fit(path: Path) -> None:
    session = runtimes.get(path).open(path, False)
    x = images(1, 4, 8, 8)
    with pytest.raises(ExportError, match="takes 1 inputs, not 2"):
        session.run([x, x])
    with pytest.raises(ExportError, match="input 0 has 2 axes, but the model takes 4"):
        session.run([x[0, 0]])
    with pytest.raises(ExportError, match=r"written for \(4, 4, 8, 8\) and takes a batch of any size"):
        session.run([images(1, 4, 8, 10)])


def test_a_file_that_aborts_litert_is_one_sentence(tmp_path: Path) -> None:
    """XNNPACK asserts the ratio of an addition's scales: the caller lives on and may run other files."""
    traced = qtrace.trace(
        net(lambda self, x: F.relu(self.c(x)) + x, c=M.Conv2d(4, 4, 1)), BATCHES[0], check=False
    )
    prepared = qtrace.calibrate(qtrace.prepare(traced, "backend/tflite"), BATCHES, progress=False)
    converted = qtrace.convert(prepared)
    path = qtrace.export(converted, tmp_path / "m.tflite")
    data = path.read_bytes()
    _edit(path, _scaled("relu_out_int", 1e30))
    with pytest.raises(ExportError, match=r"^LiteRT with .*m\.tflite ended its process by signal") as caught:
        qtrace.verify(path, converted, BATCHES)
    assert "\n" not in str(caught.value)
    path.write_bytes(data)
    assert qtrace.verify(path, converted, BATCHES).passed


@pytest.mark.parametrize("recipe", [None, "backend/tflite"])
def test_a_constant_that_stands_for_minus_infinity(recipe: str | None, tmp_path: Path) -> None:
    mask = np.zeros((1, 1, 8, 8), np.float32)
    mask[..., 4:] = -1e37
    module = net(
        lambda self, x: self.c(x) + self.mask, c=M.Conv2d(4, 4, 3, padding=1), mask=mge.Parameter(mask)
    )
    traced = qtrace.trace(module, BATCHES[0], check=False)
    if recipe is not None:
        prepared = qtrace.calibrate(qtrace.prepare(traced, recipe), BATCHES, progress=False)
        traced = qtrace.convert(prepared)
    assert qtrace.verify(qtrace.export(traced, tmp_path / "m.tflite"), traced, BATCHES).passed
