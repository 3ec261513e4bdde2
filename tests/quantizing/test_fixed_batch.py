"""A file that fixes the batch keeps it, whatever batches the data come in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import megengine.functional as F
import megengine.module as M
import numpy as np
import onnx
import onnxruntime as ort
import pytest
from megengine import Tensor
from onnx import TensorProto, helper, numpy_helper

import qtrace
from qtrace.errors import DataError, ExportError
from tests.nets import images

DATA = images(32, 3, 8, 8)
EVERYTHING = {"placement": "everything"}


def _write(folder: Path, batch: int | str, *, reshape: bool) -> Path:
    """Writes a network; with ``reshape`` the batch is a number in it, as some exporters have it."""
    rng = np.random.default_rng(0)
    weights = {"w": rng.normal(size=(8, 3, 3, 3)), "v": rng.normal(size=(4, 8, 1, 1))}
    stored = [numpy_helper.from_array(value.astype("float32"), name) for name, value in weights.items()]
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"]),
        helper.make_node("Relu", ["c"], ["r"]),
        helper.make_node("GlobalAveragePool", ["r"], ["p"]),
        helper.make_node("Conv", ["p", "v"], ["s" if reshape else "y"]),
    ]
    if reshape:
        stored.append(numpy_helper.from_array(np.array([batch, 4], np.int64), "shape"))
        nodes.append(helper.make_node("Reshape", ["s", "shape"], ["y"]))
    shapes = (("x", 1, [batch, 3, 8, 8]), ("y", 1, [batch, 4] if reshape else [batch, 4, 1, 1]))
    ends = [helper.make_tensor_value_info(*end) for end in shapes]
    graph = helper.make_graph(nodes, "net", ends[:1], ends[1:], stored)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, folder / "net.onnx")
    return folder / "net.onnx"


def _declared(path: Path) -> list[Any]:
    graph = onnx.load(path).graph
    dims = (value.type.tensor_type.shape.dim[0] for value in (*graph.input, *graph.output))
    return [dim.dim_value or dim.dim_param for dim in dims]


@pytest.mark.quick(1)
@pytest.mark.parametrize("placement", ["everything", "balanced"])
@pytest.mark.parametrize("reshape", [False, True])
@pytest.mark.parametrize("batch", [1, 4])
def test_the_file_keeps_its_batch(tmp_path: Path, batch: int, reshape: bool, placement: str) -> None:
    """A client makes its arrays by the declared shape; the file declared ``N``."""
    source = _write(tmp_path, batch, reshape=reshape)
    config = {"placement": placement}
    result = qtrace.quantize(source, DATA, tmp_path / "out.onnx", recipe=config, progress=False)
    assert _declared(result.path) == [batch, batch]
    assert result.verify is not None
    assert result.verify.passed
    assert result.verify.max_lsb == 1
    session = ort.InferenceSession(result.path, providers=["CPUExecutionProvider"])
    declared = session.get_inputs()[0].shape
    (got,) = session.run(None, {"x": np.zeros(declared, np.float32)})
    assert got.shape[0] == batch


def test_an_open_batch_stays_open(tmp_path: Path) -> None:
    source = _write(tmp_path, "samples", reshape=False)
    result = qtrace.quantize(source, DATA, tmp_path / "out.onnx", recipe=EVERYTHING, progress=False)
    assert _declared(result.path) == ["samples", "samples"]


def test_batches_of_another_size_are_cut_to_verify(tmp_path: Path) -> None:
    traced = qtrace.from_onnx(_write(tmp_path, 2, reshape=False))
    converted = qtrace.convert(
        qtrace.calibrate(qtrace.prepare(traced, EVERYTHING), [DATA[:8]], progress=False)
    )
    path = qtrace.export(converted, tmp_path / "out.onnx")
    report = qtrace.verify(path, converted, [DATA[:8], {"x": DATA[8:12]}])
    assert report.passed
    with pytest.raises(ExportError, match="give batches of 2"):
        qtrace.verify(path, converted, [DATA[:3]])


def test_batches_of_the_users_own_are_cut_to_the_batch(tmp_path: Path) -> None:
    """They were refused by their shape, although the samples are there."""
    source = _write(tmp_path, 1, reshape=True)
    forms = {"list": [DATA[:8], DATA[8:16]], "array": DATA[:16]}
    files = [
        qtrace.quantize(source, data, tmp_path / f"{name}.onnx", recipe=EVERYTHING, progress=False).path
        for name, data in forms.items()
    ]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_many_single_samples_are_held_back_as_a_batch_would_be(tmp_path: Path) -> None:
    source = _write(tmp_path, 1, reshape=True)
    data = np.concatenate([DATA, images(32, 3, 8, 8, seed=1)])
    result = qtrace.quantize(source, data, tmp_path / "out.onnx", recipe=EVERYTHING, progress=False)
    assert "on 8 held-back samples" in "\n".join(result.summary())


def _write_detector(folder: Path, batch: int, sizes: list[Any]) -> Path:
    """Writes a network that looks at the first sample alone, and keeps the rows above a score."""
    rng = np.random.default_rng(0)
    weights = {"w": rng.normal(size=(8, 3, 3, 3)), "v": rng.normal(size=(4, 8, 1, 1))}
    stored = [numpy_helper.from_array(value.astype("float32"), name) for name, value in weights.items()]
    stored.append(numpy_helper.from_array(np.array(0, np.int64), "first"))
    stored.append(numpy_helper.from_array(np.array([4, -1], np.int64), "shape"))
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"]),
        helper.make_node("Relu", ["c"], ["r"]),
        helper.make_node("Conv", ["r", "v"], ["s"]),
        helper.make_node("Gather", ["s", "first"], ["one"], axis=0),
        helper.make_node("Reshape", ["one", "shape"], ["columns"]),
        helper.make_node("Transpose", ["columns"], ["y"], perm=[1, 0]),
    ]
    ends = [
        helper.make_tensor_value_info("x", 1, [batch, 3, *sizes]),
        helper.make_tensor_value_info("y", 1, None),
    ]
    graph = helper.make_graph(nodes, "net", ends[:1], ends[1:], stored)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, folder / "net.onnx")
    return folder / "net.onnx"


def test_a_network_that_looks_at_one_sample_sees_every_sample(tmp_path: Path) -> None:
    """It runs on eight, of which seven had no part in the ranges and the verdict."""
    source = _write_detector(tmp_path, 1, [8, 8])
    files = [
        qtrace.quantize(
            source, DATA, tmp_path / f"{size}.onnx", recipe=EVERYTHING, batch_size=size, progress=False
        ).path
        for size in (8, 1)
    ]
    assert files[0].read_bytes() == files[1].read_bytes()


@pytest.mark.quick(1)
@pytest.mark.parametrize("batch", [1, 2])
def test_open_sizes_are_verified_beside_a_fixed_batch(tmp_path: Path, batch: int) -> None:
    """The batches at other sizes had all samples of the first one."""
    source = _write_detector(tmp_path, batch, ["h", "w"])
    result = qtrace.quantize(source, DATA, tmp_path / "out.onnx", recipe=EVERYTHING, progress=False)
    assert result.verify is not None
    assert result.verify.passed
    assert onnx.load(result.path).graph.input[0].type.tensor_type.shape.dim[0].dim_value == batch


@pytest.mark.parametrize("suffix", [".onnx", ".tflite"])
def test_only_an_onnx_file_keeps_an_open_resize(
    tmp_path: Path, suffix: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Other formats have a form of it at the size of the data alone."""
    rng = np.random.default_rng(0)
    stored = [
        numpy_helper.from_array(rng.normal(size=(4, 3, 3, 3)).astype("float32"), "w"),
        numpy_helper.from_array(np.float32([1, 1, 2, 2]), "factors"),
    ]
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"]),
        helper.make_node("Resize", ["c", "", "factors"], ["y"], mode="cubic"),
    ]
    ends = [helper.make_tensor_value_info("x", 1, ["n", 3, "h", "w"])]
    ends.append(helper.make_tensor_value_info("y", 1, None))
    graph = helper.make_graph(nodes, "net", ends[:1], ends[1:], stored)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, tmp_path / "net.onnx")
    with caplog.at_level("WARNING", "qtrace"):
        out = tmp_path / f"out{suffix}"
        qtrace.quantize(tmp_path / "net.onnx", DATA, out, verify=False, measure=False, progress=False)
    assert ("such as y have forms for open sizes only in ONNX files" in caplog.text) == (suffix != ".onnx")


@pytest.mark.quick(1)
@pytest.mark.parametrize("count", [6, 10, 18])
def test_the_rest_of_the_data_is_left_out(
    tmp_path: Path, count: int, caplog: pytest.LogCaptureFixture
) -> None:
    """The last batch of two ended a run behind its calibration."""
    source = _write(tmp_path, 4, reshape=True)
    with caplog.at_level("INFO", "qtrace"):
        result = qtrace.quantize(
            source,
            DATA[:count],
            tmp_path / "out.onnx",
            recipe=EVERYTHING,
            evaluation=DATA[8:14],
            progress=False,
        )
    assert result.verify is not None
    assert result.verify.passed
    assert "on 4 samples of the evaluation data" in "\n".join(result.summary())
    assert caplog.text.count("the last 2 samples are left out") == 2


@pytest.mark.quick(1)
@pytest.mark.parametrize("suffix", [".onnx", ".mge"])
def test_a_shorter_batch_of_the_users_own_is_left_out(tmp_path: Path, suffix: str) -> None:
    source: Any = _write(tmp_path, 4, reshape=True)
    if suffix == ".mge":
        traced, source = qtrace.from_onnx(source), tmp_path / "net.mge"
        qtrace.save(traced, source)
    batches = [DATA[:4], DATA[4:8], DATA[8:12], DATA[12:16], DATA[16:18]]
    result = qtrace.quantize(source, batches, tmp_path / "out.onnx", recipe=EVERYTHING, progress=False)
    assert result.verify is not None
    assert result.verify.passed
    assert "on 4 held-back samples" in "\n".join(result.summary())


def test_too_few_samples_for_a_batch_are_refused_at_once(tmp_path: Path) -> None:
    source = _write(tmp_path, 4, reshape=True)
    out = tmp_path / "out.onnx"
    with pytest.raises(DataError, match="batches of 3 samples at most, and the network takes 4"):
        qtrace.quantize(source, DATA, out, recipe=EVERYTHING, evaluation=DATA[:3], progress=False)


@pytest.mark.quick(1)
@pytest.mark.parametrize(("batch", "count"), [(8, 16), (4, 18), (4, 22)])
@pytest.mark.parametrize("reads_first", [False, True])
def test_a_file_that_fixes_what_its_graph_leaves_open_is_verified_on_filled_batches(
    tmp_path: Path, batch: int, count: int, reads_first: bool
) -> None:
    """The graph runs on the few samples that are held back; the file was refused for its batch."""
    if reads_first:
        source = _write_detector(tmp_path, batch, [8, 8])
    else:
        source = _write(tmp_path, batch, reshape=False)
    result = qtrace.quantize(
        source, DATA[:count], tmp_path / "out.onnx", recipe=EVERYTHING, measure=False, progress=False
    )
    assert result.verify is not None
    assert result.verify.passed


class _FixedBatch(M.Module):
    """Has the batch of its data in a reshape, as a traced ``int(x.shape[0])`` would."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = M.Conv2d(3, 8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.conv(x)).reshape(8, -1)


def test_a_folder_leaves_the_rest_out(tmp_path: Path) -> None:
    net = _FixedBatch()
    net.eval()
    traced = qtrace.trace(net, DATA[:8], check=False)
    folder = qtrace.calibrate_to_folder(
        traced, DATA[:20], tmp_path / "out", recipe=EVERYTHING, progress=False
    )
    assert len(list(folder.source)) == 2


@pytest.mark.quick(1)
@pytest.mark.parametrize("other", [None, 4])
def test_a_tflite_file_of_one_batch_is_verified_on_filled_batches(tmp_path: Path, other: int | None) -> None:
    """Its transposed convolution fixes the batch; a quarter of 16 samples is less than one of 8."""
    net = M.Sequential(M.Conv2d(3, 4, 3, padding=1), M.ReLU(), M.ConvTranspose2d(4, 4, 2, stride=2))
    net.eval()
    evaluation = None if other is None else images(other, 3, 8, 8, seed=2)
    result = qtrace.quantize(
        net, DATA[:16], tmp_path / "out.tflite", evaluation=evaluation, measure=False, progress=False
    )
    assert result.verify is not None
    assert result.verify.passed


def test_a_kept_node_that_takes_whole_batches_alone(tmp_path: Path) -> None:
    """A grid of four samples is stored beside a GridSample, which onnxruntime refuses for fewer."""
    random = np.random.default_rng(0)
    stored = {
        "w": random.normal(size=(4, 3, 1, 1)).astype(np.float32),
        "grid": random.uniform(-1, 1, (4, 6, 6, 2)).astype(np.float32),
    }
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"]),
        helper.make_node("GridSample", ["c", "grid"], ["y"], mode="nearest", padding_mode="reflection"),
    ]
    ends = [helper.make_tensor_value_info("x", TensorProto.FLOAT, [4, 3, 6, 6])]
    ends.append(helper.make_tensor_value_info("y", TensorProto.FLOAT, None))
    tensors = [numpy_helper.from_array(value, name) for name, value in stored.items()]
    graph = helper.make_graph(nodes, "grid", ends[:1], ends[1:], tensors)
    path = tmp_path / "f.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 16)], ir_version=8), path)
    x = random.normal(size=(18, 3, 6, 6)).astype(np.float32)
    result = qtrace.quantize(path, x, tmp_path / "q.onnx", batch_size=4, measure=False, progress=False)
    assert result.verify is not None
    assert result.verify.passed
