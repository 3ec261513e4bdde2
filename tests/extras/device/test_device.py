"""Test vectors for a device, and the tensors that a device has dumped."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import megengine.functional as F
import megengine.module as M
import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

import qtrace
from qtrace.errors import CalibrationError, ConfigError, ExportError
from qtrace.extras.device import dumped_tensors, write_vectors
from qtrace.graph.types import TracedModule
from qtrace.verification import runtimes
from tests.each import each_of
from tests.nets import images, net
from tests.verification.test_planted_faults import ONNX_FAULTS, _stored

BATCHES = [images(2, 4, 8, 8, seed=s) for s in range(2)]


@pytest.fixture(scope="module")
def model() -> TracedModule:
    def forward(self: M.Module, x: object) -> object:
        y = F.relu(self.a(x))
        z = F.max_pool2d(F.relu(self.b(y) + y), 2)
        return self.fc(F.flatten(F.concat([z, F.sigmoid(z)], 1), 1))

    parts = {"a": M.Conv2d(4, 4, 3, padding=1), "b": M.Conv2d(4, 4, 3, padding=1), "fc": M.Linear(128, 5)}
    prepared = qtrace.prepare(qtrace.trace(net(forward, **parts), BATCHES[0], check=False), "onnxruntime")
    return qtrace.convert(qtrace.calibrate(prepared, BATCHES, progress=False))


@pytest.fixture(scope="module")
def file(model: TracedModule, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return qtrace.export(model, tmp_path_factory.mktemp("device") / "m.onnx")


@pytest.fixture
def vectors(model: TracedModule, tmp_path: Path) -> Path:
    return write_vectors(model, tmp_path / "m.vectors", BATCHES, 2)


def _index(vectors: Path) -> dict[str, dict]:
    index = json.loads((vectors / "index.json").read_text())
    return {f"{t['kind']}/{t['name']}": t for t in index["tensors"]}


def _run_elsewhere(path: Path, folder: Path) -> Path:
    """The device: onnxruntime with every integer as an output; one archive for each batch."""
    session = runtimes.get(path).open(path, False)
    folder.mkdir()
    for number, batch in enumerate(BATCHES):
        run = session.run([batch])
        np.savez(folder / f"{number}.npz", **run.integers)
    return folder


def test_vectors_hold_what_the_runtime_computes(model, file, vectors):
    session = runtimes.get(file).open(file, False)
    entries = _index(vectors)
    for number, batch in enumerate(BATCHES):
        run = session.run([batch])
        with np.load(vectors / f"{number:04d}.npz") as archive:
            np.testing.assert_array_equal(archive["inputs/x"], batch)
            for name, integers in run.integers.items():
                assert np.abs(archive[f"sites/{name}"].astype(int) - integers).max() <= 1
        for name, entry in entries.items():
            raw = (vectors / f"{number:04d}" / entry["file"]).read_bytes()
            value = np.frombuffer(raw, entry["dtype"]).reshape(entry["shape"])
            np.testing.assert_array_equal(value, np.load(vectors / f"{number:04d}.npz")[name])
    site = entries["sites/x"]
    assert (site["dtype"], site["bits"], site["shape"]) == ("uint8", 8, [2, 4, 8, 8])
    step = BATCHES[0] / site["scale"] + site["zero_point"]
    expected = np.clip(np.rint(step), 0, 255)
    assert np.abs(np.load(vectors / "0000.npz")["sites/x"] - expected).max() <= 1
    assert np.load(vectors / "inputs.npz")["x"].shape == (4, 4, 8, 8)


def test_verify_passes_unchanged_vectors(model, file, vectors):
    report = qtrace.verify(file, model, BATCHES, runtime=dumped_tensors(vectors, model))
    assert report.passed
    assert report.worst_lsb() == 0
    assert qtrace.bisect(file, model, BATCHES, runtime=dumped_tensors(vectors, model)) is None
    for number in range(2):  # and as the raw files alone
        (vectors / f"{number:04d}.npz").unlink()
    assert qtrace.verify(file, model, BATCHES, runtime=dumped_tensors(vectors, model)).worst_lsb() == 0


def test_verify_passes_dumps_of_a_correct_device(model, file, tmp_path):
    dumps = _run_elsewhere(file, tmp_path / "dumps")
    assert qtrace.verify(file, model, BATCHES, runtime=dumped_tensors(dumps, model)).passed


def _insert(
    graph: onnx.GraphProto, tensor: str, op: str, inputs: list[str] | None = None, **attributes: object
) -> None:
    """Puts a node behind ``tensor``, in front of all that read it."""
    index = next(i for i, n in enumerate(graph.node) if tensor in n.output)
    for node in graph.node:
        for i, name in enumerate(node.input):
            if name == tensor:
                node.input[i] = f"{tensor}_planted"
    new = helper.make_node(op, [tensor, *(inputs or [])], [f"{tensor}_planted"], **attributes)
    graph.node.insert(index + 1, new)


def _saturated(m: onnx.ModelProto) -> None:
    node = next(n for n in m.graph.node if n.output[0] == "b_out_int")
    m.graph.initializer.append(numpy_helper.from_array(np.float32(-0.05), "planted_low"))
    _insert(m.graph, node.input[0], "Max", ["planted_low"])


def _average(m: onnx.ModelProto) -> None:
    node = next(n for n in m.graph.node if n.op_type == "MaxPool")
    node.op_type = "AveragePool"


def _swapped_concat(m: onnx.ModelProto) -> None:
    node = next(n for n in m.graph.node if n.op_type == "Concat")
    swapped = list(node.input)[::-1]
    node.input[:] = swapped


def _turned(m: onnx.ModelProto) -> None:
    node = next(n for n in m.graph.node if n.output[0] == "b_out_int")
    _insert(m.graph, node.input[0], "Transpose", perm=[0, 1, 3, 2])


FAULTS: dict[str, tuple[Callable[[onnx.ModelProto], None], str]] = {
    **{name: (plant, site) for name, (plant, site, _, _) in ONNX_FAULTS.items()},
    "sums that saturate early": (_saturated, "b_out_q"),
    "average for maximum": (_average, "max_pool2d_out"),
    "concat in another order": (_swapped_concat, "concat_out_q"),
    "transposed result": (_turned, "b_out_q"),
    "channels permuted": (lambda m: _stored(m, "b_weight_int", lambda v: v[::-1]), "b_out_q"),
    "lost bias": (lambda m: _stored(m, "a_bias_int", lambda v: v * 0), "relu_out_q"),
}


@pytest.mark.quick(4)
@pytest.mark.parametrize("fault", FAULTS)
def test_bisect_names_the_op_with_a_fault(fault, model, file, tmp_path):
    plant, site = FAULTS[fault]
    broken = onnx.load(file)
    plant(broken)
    onnx.save(broken, tmp_path / "broken.onnx")
    dumps = _run_elsewhere(tmp_path / "broken.onnx", tmp_path / "dumps")
    assert not qtrace.verify(file, model, BATCHES, runtime=dumped_tensors(dumps, model)).passed
    found = qtrace.bisect(file, model, BATCHES, runtime=dumped_tensors(dumps, model))
    assert found is not None
    assert found.site == site, found.table()


def test_a_part_of_the_tensors_suffices(model, file, tmp_path):
    broken = onnx.load(file)
    FAULTS["lost bias"][0](broken)
    onnx.save(broken, tmp_path / "broken.onnx")
    dumps = _run_elsewhere(tmp_path / "broken.onnx", tmp_path / "dumps")
    for number in range(2):
        with np.load(dumps / f"{number}.npz") as archive:
            kept = {name: archive[name] for name in ("x", "relu_out_1")}
        np.savez(dumps / f"{number}.npz", **kept)
    found = qtrace.bisect(file, model, BATCHES, runtime=dumped_tensors(dumps, model))
    assert found is not None
    assert found.site == "relu_out_1_q"


def _stored_as(dumps: Path, change: Callable[[np.ndarray], np.ndarray]) -> None:
    for number in range(2):
        with np.load(dumps / f"{number}.npz") as archive:
            changed = {name: change(archive[name]) for name in archive.files}
        np.savez(dumps / f"{number}.npz", **changed)


def _blocks(value: np.ndarray) -> np.ndarray:
    if value.ndim != 4:
        return value
    n, c, h, w = value.shape
    padded = np.pad(value, ((0, 0), (0, -c % 3), (0, 0), (0, 0)), constant_values=7)
    return padded.reshape(n, -1, 3, h, w).transpose(0, 1, 3, 4, 2)


LAYOUTS = {
    "nhwc": lambda v: v.transpose(0, 2, 3, 1) if v.ndim == 4 else v,
    "nc3hw3": _blocks,
    "nchw": lambda v: v.reshape(-1),
}


@each_of("layout", LAYOUTS)
def test_layouts(layout, model, file, tmp_path):
    dumps = _run_elsewhere(file, tmp_path / "dumps")
    _stored_as(dumps, LAYOUTS[layout])
    runtime = dumped_tensors(dumps, model, layout=layout)
    assert qtrace.verify(file, model, BATCHES, runtime=runtime).passed


def test_types_of_values(model, file, tmp_path, vectors):
    entries = _index(vectors)
    dumps = tmp_path / "dumps"
    for number in range(2):
        (dumps / str(number)).mkdir(parents=True)
        with np.load(vectors / f"{number:04d}.npz") as archive:
            for name, entry in entries.items():
                if entry["kind"] != "sites":
                    continue
                value, file_name = archive[name], name.removeprefix("sites/")
                if entry["dtype"] == "uint8" and number:
                    value = (value.astype(np.int16) - 128).astype(np.int8)
                elif not number:
                    value = ((value.astype(np.float32) - entry["zero_point"]) * entry["scale"]).astype(
                        np.float32
                    )
                np.save(dumps / str(number) / f"{file_name}.npy", value)
    assert qtrace.verify(file, model, BATCHES, runtime=dumped_tensors(dumps, model)).worst_lsb() == 0


def test_names_of_the_device(model, file, vectors, tmp_path):
    names = {f"tensor_{i}": name for i, name in enumerate(_index(vectors)) if name.startswith("sites/")}
    dumps = tmp_path / "dumps"
    dumps.mkdir()
    for number in range(2):
        with np.load(vectors / f"{number:04d}.npz") as archive:
            np.savez(dumps / f"{number}.npz", **{other: archive[name] for other, name in names.items()})
    short = {other: name.removeprefix("sites/") for other, name in names.items()}
    assert qtrace.verify(file, model, BATCHES, runtime=dumped_tensors(dumps, model, short)).worst_lsb() == 0
    with pytest.raises(ExportError, match="no tensor has the name of a site. It holds tensor_"):
        qtrace.verify(file, model, BATCHES, runtime=dumped_tensors(dumps, model))
    with pytest.raises(
        ExportError, match="'relu_out_9' is no site, output or input of the model; did you mean"
    ):
        qtrace.verify(file, model, BATCHES, runtime=dumped_tensors(dumps, model, {"tensor_3": "relu_out_9"}))


def test_mistakes_are_one_sentence(model, file, vectors, tmp_path):
    def run(folder: Path, layout: str = "nchw", data: list[np.ndarray] = BATCHES) -> None:
        qtrace.verify(file, model, data, runtime=dumped_tensors(folder, model, layout=layout))

    with pytest.raises(ExportError, match="is no folder of dumped tensors"):
        run(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ExportError, match="empty holds no tensors"):
        run(tmp_path / "empty")
    with pytest.raises(ConfigError, match="unknown layout 'chwn'"):
        run(vectors, "chwn")
    with pytest.raises(ExportError, match="dumped tensors of 2 batches, but more data: give --max-batches 2"):
        run(vectors, data=[*BATCHES, BATCHES[0]])
    with pytest.raises(ExportError, match="its input 'x' differs from batch 0"):
        run(vectors, data=BATCHES[::-1])
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "0.npz").write_bytes(b"PK nothing")
    with pytest.raises(ExportError, match="0.npz is no .npz archive"):
        run(tmp_path / "bad")
    short = tmp_path / "short"
    short.mkdir()
    (short / "x.raw").write_bytes(b"123")
    with pytest.raises(ExportError, match="'x' cannot be read .3 bytes for 512 values"):
        run(short, data=BATCHES[:1])
    (short / "x.npy").write_bytes(b"")
    with pytest.raises(ExportError, match="both hold the tensor 'x'"):
        run(short)
    off = tmp_path / "off"
    off.mkdir()
    np.save(off / "x.npy", BATCHES[0])
    with pytest.raises(ExportError, match="floats that are no integers times .*, the scale of its site"):
        run(off, data=BATCHES[:1])
    np.save(off / "x.npy", np.full(BATCHES[0].shape, 1000, np.int32))
    with pytest.raises(ExportError, match="integers from 1000 to 1000, and its site holds 0 to 255"):
        run(off, data=BATCHES[:1])


def test_vectors_are_whole_or_absent(model, tmp_path):
    with pytest.raises(CalibrationError, match="there are 2 batches for 3 test vectors"):
        write_vectors(model, tmp_path / "v", BATCHES, 3)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "mine").mkdir()
    with pytest.raises(ExportError, match="mine exists and holds no test vectors"):
        write_vectors(model, tmp_path / "mine", BATCHES, 1)
    write_vectors(model, tmp_path / "v", BATCHES, 2)
    write_vectors(model, tmp_path / "v", BATCHES, 1)
    assert not (tmp_path / "v" / "0001.npz").exists()
