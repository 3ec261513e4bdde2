"""What changes a graph, or writes it as code, around a node that is kept as in the file."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import qtrace
from qtrace.graph.opaque import opaque_calls
from qtrace.graph.types import TracedModule
from tests.importing.onnx.test_opaque import assert_equal, batch, crnn, run_graph, save

BATCHES = [batch(i) for i in range(4)]


@pytest.fixture(scope="module")
def net(tmp_path_factory: pytest.TempPathFactory) -> TracedModule:
    return qtrace.from_onnx(save(crnn(), tmp_path_factory.mktemp("net") / "crnn.onnx"))


def _imported(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_source_of_a_graph_computes_the_same(net: TracedModule, tmp_path: Path) -> None:
    source = qtrace.graph.to_source(net)
    assert len(str(source).splitlines()) < 60
    again = _imported(source.save(tmp_path)).load()
    assert_equal(run_graph(again, batch(0)), run_graph(net, batch(0)))
    traced = qtrace.trace(again, batch(0))
    assert len(opaque_calls(traced)) == 1
    assert_equal(run_graph(traced, batch(1)), run_graph(net, batch(1)))


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    "algorithm", ["gptq", {"gptq": {"refit": True}}, {"adaround": {"iterations": 20}}, "bias_correction"]
)
def test_algorithms_change_the_layers_around_it(net: TracedModule, algorithm: Any, tmp_path: Path) -> None:
    config = {"ptq": ["fuse_bn", algorithm], "placement": "everything"}
    prepared = qtrace.prepare(net, config, progress=False)
    qtrace.calibrate(prepared, BATCHES, progress=False)
    converted = qtrace.convert(prepared)
    assert len(opaque_calls(converted)) == 1
    path = qtrace.export(converted, tmp_path / "m.onnx")
    assert qtrace.verify(path, converted, BATCHES[:1]).passed


def test_blocks_around_it_are_learned(net: TracedModule) -> None:
    config = {"ptq": ["fuse_bn", {"reconstruct": {"iterations": 20}}], "placement": "everything"}
    prepared = qtrace.prepare(net, config, progress=False)
    qtrace.calibrate(prepared, BATCHES, progress=False)
    assert len(opaque_calls(qtrace.convert(prepared))) == 1
