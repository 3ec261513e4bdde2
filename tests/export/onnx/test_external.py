"""Tensors in a file of their own, and what the metadata of a file says."""

from __future__ import annotations

import errno
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest

import qtrace
from qtrace.errors import ExportError
from qtrace.graph.types import TracedModule
from qtrace.onnxfile import external_data
from qtrace.preparation.model import graph_hash
from tests.nets import ResNet, images, randomize

X = images(2, 3, 32, 32)


@pytest.fixture(scope="module")
def prepared() -> TracedModule:
    return qtrace.prepare(qtrace.trace(randomize(ResNet(8, (1, 1, 1, 1))), X, check=False))


@pytest.fixture(scope="module")
def converted(prepared: TracedModule) -> TracedModule:
    return qtrace.convert(qtrace.calibrate(prepared, [X], progress=False))


def test_tensors_beside_the_model(converted: TracedModule, tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    whole = qtrace.export(converted, tmp_path / "one" / "m.onnx")
    assert [p.name for p in whole.parent.iterdir()] == ["m.onnx"]
    (tmp_path / "two").mkdir()
    path = qtrace.export(converted, tmp_path / "two" / "m.onnx", external=True)
    beside = path.with_name("m.onnx.data")
    assert sorted(p.name for p in path.parent.iterdir()) == ["m.onnx", "m.onnx.data"]
    assert beside.stat().st_size > 0.8 * whole.stat().st_size - path.stat().st_size
    onnx.checker.check_model(str(path), full_check=True)
    a, b = (onnx.load(p) for p in (whole, path))
    stored = [{t.name: onnx.numpy_helper.to_array(t) for t in m.graph.initializer} for m in (a, b)]
    assert stored[0].keys() == stored[1].keys()
    for name, value in stored[0].items():
        np.testing.assert_array_equal(value, stored[1][name])
    # From another working folder, and in both runtimes that read it.
    for runtime in ("onnxruntime", "openvino"):
        report = qtrace.verify(path, converted, [X], runtime=runtime)
        assert report.worst_lsb() <= 1
        assert report.equal_share() >= 0.999


def test_large_models_do_so_by_themselves(
    converted: TracedModule, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(external_data, "LIMIT", 10_000)
    path = qtrace.export(converted, tmp_path / "m.onnx")
    assert path.with_name("m.onnx.data").exists()
    qtrace.export(converted, tmp_path / "whole.onnx", external=False)
    assert not (tmp_path / "whole.onnx.data").exists()
    # A runtime gets such a model in parts, too.
    monkeypatch.setattr(external_data, "LIMIT", 10_000)
    assert qtrace.verify(path, converted, [X]).passed
    with pytest.raises(ExportError, match="more than 2 GB of tensors: verify it in onnxruntime"):
        qtrace.verify(path, converted, [X], runtime="openvino")


def test_what_no_file_holds_is_split_in_one_line_or_refused(
    converted: TracedModule,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    whole = onnx.load(qtrace.export(converted, tmp_path / "whole.onnx"))
    monkeypatch.setattr(external_data, "LIMIT", 10_000)
    monkeypatch.setattr("onnx.checker.MAXIMUM_PROTOBUF", 40_000)
    path = qtrace.export(converted, tmp_path / "m.onnx")
    lines = [r.message for r in caplog.records if "m.onnx.data" in r.message]
    assert len(lines) == 1
    assert "which stays next to it" in lines[0]
    assert "copy both into a folder of their own" in lines[0]
    assert [t.name for t in onnx.load(path).graph.initializer] == [t.name for t in whole.graph.initializer]
    with pytest.raises(ExportError, match=r"more than one ONNX file holds: leave out external=false"):
        qtrace.export(converted, tmp_path / "n.onnx", external=False)
    assert not (tmp_path / "n.onnx").exists()
    qtrace.export(converted, tmp_path / "float.onnx", format="onnx_float")
    assert (tmp_path / "float.onnx.data").exists()
    onnx.checker.check_model(str(tmp_path / "float.onnx"), full_check=True)


def test_a_full_disk_leaves_no_file(
    converted: TracedModule, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(model: object, names: object) -> Iterator[bytes]:
        yield b"0"
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(external_data, "_pieces", full)
    with pytest.raises(ExportError, match=r"m\.onnx cannot be written: No space left on device\."):
        qtrace.export(converted, tmp_path / "m.onnx", external=True)
    assert not list(tmp_path.iterdir())


def test_a_lost_or_cut_file_of_tensors_is_named(converted: TracedModule, tmp_path: Path) -> None:
    path = qtrace.export(converted, tmp_path / "m.onnx", external=True)
    beside = path.with_name("m.onnx.data")
    data = beside.read_bytes()
    beside.write_bytes(data[:-100])
    with pytest.raises(ExportError, match=r"m\.onnx\.data is not whole: m\.onnx needs \d+ bytes of it"):
        qtrace.verify(path, converted, [X])
    beside.unlink()
    with pytest.raises(ExportError, match=r"m\.onnx\.data does not exist: it holds the tensors of m\.onnx"):
        qtrace.verify(path, converted, [X])


def test_the_metadata_says_where_the_file_comes_from(converted: TracedModule, tmp_path: Path) -> None:
    path = qtrace.export(converted, tmp_path / "m.onnx")
    model = onnx.load(path)
    facts = {p.key: p.value for p in model.metadata_props}
    keys = ("version", "backend", "recipe", "graph", "parameters")
    assert set(facts) == {f"qtrace.{key}" for key in keys}
    assert facts["qtrace.version"] == qtrace.__version__ == model.producer_version
    assert facts["qtrace.backend"] == "onnxruntime"
    assert qtrace.QConfig(**json.loads(facts["qtrace.recipe"])).backend == "onnxruntime"
    assert facts["qtrace.graph"] == graph_hash(converted)


def test_the_hash_follows_the_graph_and_its_numbers(
    prepared: TracedModule, converted: TracedModule, tmp_path: Path
) -> None:
    qtrace.save(converted, tmp_path / "m.mge")
    assert graph_hash(qtrace.load(tmp_path / "m.mge")) == graph_hash(converted)
    path = qtrace.export(converted, tmp_path / "m.onnx")
    again = qtrace.convert(qtrace.calibrate(prepared, [X, 3 * X], progress=False))
    assert graph_hash(again) != graph_hash(converted)
    with pytest.raises(ExportError, match=r"m\.onnx is not an export of this module: .*another calibration"):
        qtrace.verify(path, again, [X])


def test_every_stored_tensor_is_written_once(converted: TracedModule, tmp_path: Path) -> None:
    """A weight that two layers share, and constants that many nodes read."""
    import megengine.functional as F
    import megengine.module as M

    from tests.nets import net

    conv = M.Conv2d(3, 3, 3, padding=1)
    module = net(lambda self, x: self.c(F.relu(self.c(x))) + self.c(x), c=conv)
    shared = qtrace.prepare(qtrace.trace(module, X, check=False))
    shared = qtrace.convert(qtrace.calibrate(shared, [X], progress=False))
    for number, graph in enumerate((shared, converted)):
        stored = onnx.load(qtrace.export(graph, tmp_path / f"{number}.onnx")).graph.initializer
        names = [t.name for t in stored]
        assert len(set(names)) == len(names)
        # Zero points are zeros, and each is named after its site.
        large = [t.raw_data for t in stored if len(t.raw_data) > 64 and any(t.raw_data)]
        assert len(set(large)) == len(large)
