"""Files side by side: turns, figures, profile and reasons."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from qtrace.benchmarking import files
from qtrace.benchmarking.files import FileReport, bench_files, show
from qtrace.benchmarking.profile import read_profile
from qtrace.benchmarking.runners import (
    Latency,
    RunnerSettings,
    file_size,
    known,
    open_file,
    peak_memory,
    run_interleaved,
)
from qtrace.costs import CostTable
from qtrace.errors import ExportError
from tests.benchmarking.nets import write
from tests.benchmarking.test_profile import RUN
from tests.each import each_of


@pytest.fixture
def pair(tmp_path):
    return [write(tmp_path / f"{name}.onnx", "gated", name == "int8") for name in ("float", "int8")]


@pytest.fixture
def _no_process(monkeypatch):
    monkeypatch.setattr(files, "peak_memory", lambda *_: 3 * 2**20)


class Logged:
    """A runner that notes its runs and says how long each took."""

    samples = 4

    def __init__(self, name, log, seconds=0.001):
        self.name, self.log, self.seconds = name, log, seconds

    def run(self):
        self.log.append(self.name)
        return self.seconds


def test_two_files_run_one_after_the_other():
    log, ticks = [], []
    latencies = run_interleaved([Logged("a", log), Logged("b", log)], 0.0, lambda: ticks.append(1))
    assert "".join(log) == "ab" * 10
    assert [latency.runs for latency in latencies] == [9, 9]
    assert len(ticks) == 9


@pytest.mark.parametrize("names", ["abc", "abcd"])
def test_no_file_runs_twice_in_a_row(names):
    log = []
    run_interleaved([Logged(name, log) for name in names], 0.0)
    runs = log[len(names) :]
    assert all(one != other for one, other in itertools.pairwise(runs))


def test_ratio_is_relative_to_the_first_file():
    first, second = run_interleaved([Logged("a", [], 0.004), Logged("b", [], 0.001)], 0.0)
    assert first.ratio == 1
    assert second.ratio == pytest.approx(4)
    assert second.minimum <= second.low <= second.median <= second.high
    assert second.throughput == pytest.approx(4 / second.median)


@pytest.mark.usefixtures("_no_process")
def test_two_files(pair):
    reports = bench_files(pair, seconds=0, by_op=True, table=CostTable.load("onnxruntime"))
    facts = json.loads(json.dumps([report.to_dict() for report in reports]))
    assert [entry["size"] for entry in facts] == [path.stat().st_size for path in pair]
    assert all(entry["predicted_seconds"] > 0 for entry in facts)
    assert "Q/DQ" in facts[1]["profile"]["by_sort"]
    assert "Q/DQ" not in facts[0]["profile"]["by_sort"]
    text = show(reports, True)
    assert "predicted" in text.splitlines()[0]
    assert text.count("by onnxruntime's profile") == 2


def _report(ratio, profile=None):
    latency = Latency(1e-3, 1e-3, 1e-3, 1e-3, 9, 1000.0, ratio)
    return FileReport(Path("int8.onnx"), 2**20, None, latency, profile)


def test_a_slower_file_says_where_its_time_goes():
    slow = _report(0.5, read_profile([RUN]))
    assert slow.to_dict()["reason"] == (
        "int8.onnx is slower than the first file: of its time, 20% in Q/DQ, 20% in float kernels, "
        "10% in layout changes, 50% in integer kernels."
    )
    assert slow.reason() in show([slow], False)
    assert _report(0.5).reason() == "int8.onnx is slower than the first file."


def test_a_file_that_is_as_fast_says_nothing():
    same = _report(0.99, read_profile([RUN]))
    assert (same.slower, same.to_dict()["reason"]) == (False, "")
    assert "slower" not in show([same], False)


@pytest.mark.usefixtures("_no_process")
def test_the_profile_of_another_runtime_is_refused(pair):
    with pytest.raises(ExportError, match="without a profile: leave out --by-op"):
        bench_files(pair, runtime="openvino", seconds=0, by_op=True)


@pytest.mark.slow
def test_memory_grows_with_the_file(pair):
    assert peak_memory(pair[0], None, RunnerSettings()) > 0


def test_memory_of_a_file_that_does_not_load_is_unknown(monkeypatch, tmp_path):
    monkeypatch.setattr("sys.executable", "/bin/false")
    assert peak_memory(tmp_path / "none.onnx", None, RunnerSettings()) is None


def test_size_counts_the_weights_beside_a_file(tmp_path):
    (tmp_path / "net.onnx").write_bytes(b"12")
    (tmp_path / "net.onnx.data").write_bytes(b"345")
    (tmp_path / "net.bin").write_bytes(b"6")
    (tmp_path / "net.param").write_bytes(b"78")
    assert file_size(tmp_path / "net.onnx") == 5
    assert file_size(tmp_path / "net.param") == 3


# -- runners --------------------------------------------------------------------------------------------


def _open_batch(path):
    """A network whose input leaves batch and width open."""
    import onnx

    model = onnx.load(str(write(path, "plain", False)))
    dims = model.graph.input[0].type.tensor_type.shape.dim
    dims[0].dim_param, dims[3].dim_param = "N", "W"
    onnx.save(model, str(path))
    return path


@pytest.mark.parametrize("runtime", ["onnxruntime", "openvino"])
def test_open_sizes_are_given_by_the_user(tmp_path, runtime):
    path = _open_batch(tmp_path / "net.onnx")
    shapes = {"input0": (3, 16, 8, 5)}
    runner = open_file(path, runtime, RunnerSettings(shapes=shapes))
    assert runner.samples == 3
    runner.run()
    with pytest.raises(
        ExportError, match=r"input 'input0' is \?x16x8x\?: give its shape, as in --shape input0="
    ):
        open_file(path, runtime, RunnerSettings(batch=2))


def test_tflite_files(tmp_path):
    import megengine.module as M
    import numpy as np

    import qtrace

    traced = qtrace.trace(M.Conv2d(3, 4, 3), np.zeros((1, 3, 6, 6), np.float32), check=False)
    path = tmp_path / "net.tflite"
    qtrace.export(qtrace.convert(_calibrated(traced)), path)
    runner = open_file(path)
    assert 0 < runner.run() < 60
    assert runner.samples == 1
    assert 2**15 < peak_memory(path, None, RunnerSettings()) < 2**28  # of the child, which loads the file


def test_a_tflite_file_that_aborts_litert_is_one_sentence(tmp_path):
    """LiteRT aborts for a scale that is 1e30 times the others; the caller lives on."""
    import flatbuffers
    import megengine.functional as F
    import megengine.module as M
    import numpy as np

    import qtrace
    from tests.nets import net
    from tests.targets.tflite.files import load

    x = np.ones((1, 4, 6, 6), np.float32)
    traced = qtrace.trace(net(lambda self, x: F.relu(self.c(x)) + x, c=M.Conv2d(4, 4, 1)), x, check=False)
    prepared = qtrace.calibrate(qtrace.prepare(traced, "backend/tflite"), [x], progress=False)
    path = qtrace.export(qtrace.convert(prepared), tmp_path / "net.tflite")
    model = load(path)
    tensor = next(t for t in model.subgraphs[0].tensors if t.name == b"relu_out_int")
    tensor.quantization.scale = (tensor.quantization.scale * 1e30).astype(np.float32)
    builder = flatbuffers.Builder(65536)
    builder.Finish(model.Pack(builder), file_identifier=b"TFL3")
    path.write_bytes(bytes(builder.Output()))
    with pytest.raises(ExportError, match="LiteRT with .*net.tflite ended its process by signal SIGABRT"):
        open_file(path)


def _calibrated(traced):
    import numpy as np

    import qtrace

    prepared = qtrace.prepare(traced, qtrace.load_recipe("backend/tflite"))
    qtrace.calibrate(prepared, [np.zeros((1, 3, 6, 6), np.float32) + 1], progress=False)
    return prepared


def test_inputs_that_are_no_numbers(tmp_path):
    from onnx import TensorProto, helper

    infos = [helper.make_tensor_value_info(name, TensorProto.STRING, [1]) for name in "xy"]
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "net", infos[:1], infos[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 16)], ir_version=8)
    path = tmp_path / "net.onnx"
    path.write_bytes(model.SerializeToString())
    with pytest.raises(ExportError, match=r"has type tensor\(string\): only tensors of numbers"):
        open_file(path)


def test_shapes_that_the_file_does_not_take(pair):
    with pytest.raises(ExportError, match="is 1x16x8x8 in the file, not 1x16x8x9"):
        open_file(pair[0], None, RunnerSettings(shapes={"input0": (1, 16, 8, 9)}))
    with pytest.raises(ExportError, match="has a fixed batch of 1: it cannot be 2"):
        open_file(pair[0], None, RunnerSettings(batch=2))


@each_of(
    ("name", "runtime", "message"),
    [
        ("net.onnx", "tpu", "cannot be timed in 'tpu'; known: litert, ncnn, onnxruntime, openvino"),
        ("net.onnx", "litert", "litert does not run files like net.onnx; known: litert"),
        ("net.mge", None, "no runtime here runs files like net.mge"),
        ("net.onnx", None, "does not exist: export the module first"),
        ("NET.ONNX", None, "does not exist: export the module first"),
    ],
)
def test_files_that_cannot_be_run(tmp_path, name, runtime, message):
    with pytest.raises(ExportError, match=message):
        open_file(tmp_path / name, runtime)


@pytest.mark.parametrize(
    ("name", "runtime"), [("x.onnx", "onnxruntime"), ("x.onnx", "openvino"), ("x.tflite", None)]
)
def test_damaged_files_are_one_sentence(tmp_path, name, runtime):
    (tmp_path / name).write_bytes(b"no model")
    with pytest.raises(ExportError, match="cannot run"):
        open_file(tmp_path / name, runtime)


def test_a_missing_package_names_the_extra(pair, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ExportError, match=r"pip install -e '\.\[onnx\]' in the checkout"):
        open_file(pair[0])


def test_known_runtimes():
    assert known() == ("litert", "ncnn", "onnxruntime", "openvino")
