"""The interface of the file that a traced module was imported from."""

from __future__ import annotations

from pathlib import Path

import megengine as mge
import megengine.functional as F
import megengine.module as M
import numpy as np
import pytest

import qtrace
from qtrace.errors import GraphError
from qtrace.graph.flatten import flatten
from qtrace.graph.interface import Interface, TensorInfo, read_interface, write_interface
from qtrace.graph.types import TracedModule
from tests.each import each_of


class _Rows(M.Module):
    """Selects rows of a table and gives their projection and their numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = M.Embedding(5, 4)
        self.head = M.Linear(4, 3)

    def forward(self, ids: mge.Tensor, x: mge.Tensor) -> tuple[mge.Tensor, mge.Tensor]:
        y = self.head(self.embedding(ids) + x)
        return y, F.argmax(y, axis=1)


INTERFACE = Interface(
    (TensorInfo("ids:0", "int64"), TensorInfo("x/in", "float16")),
    (TensorInfo("logits", "float32"), TensorInfo("label", "int64")),
)


@pytest.fixture
def traced() -> TracedModule:
    ids = mge.tensor(np.array([0, 1], np.int32))
    return qtrace.trace(_Rows(), ids, mge.tensor(np.zeros((2, 4), np.float32)), check=False)


def test_json_comes_back_and_is_the_documented_form() -> None:
    assert Interface.from_json(INTERFACE.to_json()) == INTERFACE
    document = '{"inputs": [{"name": "x", "dtype": "int64"}], "outputs": [{"name": "y", "dtype": "bool"}]}'
    read = Interface.from_json(document)
    assert read == Interface((TensorInfo("x", "int64"),), (TensorInfo("y", "bool"),))


@each_of(
    ("dtype", "carried", "exported"),
    [
        ("int64", "int32", "int64"),
        ("uint8", "uint8", "uint8"),
        ("float16", "float32", "float16"),
        ("float64", "float32", "float64"),
        ("bfloat16", "float32", "float32"),
    ],
)
def test_types_in_the_graph_and_in_exports(dtype: str, carried: str, exported: str) -> None:
    tensor = TensorInfo("x", dtype)
    assert (tensor.carried_dtype, tensor.exported_dtype) == (carried, exported)


def test_a_module_without_the_attribute_has_no_interface(traced: TracedModule) -> None:
    assert read_interface(traced) is None


def test_the_interface_survives_every_stage(traced: TracedModule, tmp_path: Path) -> None:
    write_interface(traced, INTERFACE)
    assert read_interface(traced) == INTERFACE
    assert read_interface(flatten(traced)) == INTERFACE
    prepared = qtrace.prepare(traced)
    assert read_interface(prepared) == INTERFACE
    x = np.ones((2, 4), np.float32)
    converted = qtrace.convert(qtrace.calibrate(prepared, [(np.array([0, 1], np.int32), x)]))
    assert read_interface(converted) == INTERFACE
    qtrace.save(converted, tmp_path / "net.mge")
    assert read_interface(qtrace.load(tmp_path / "net.mge")) == INTERFACE


@pytest.mark.parametrize("text", ["", "[]", "{}", "7", '{"inputs": [], "outputs": 1}', "[" * 100_000])
def test_damaged_text_is_refused(traced: TracedModule, text: str) -> None:
    traced.onnx_interface = text
    with pytest.raises(GraphError, match=r"the interface that the model carries is damaged \(\w+\): import"):
        read_interface(traced)


ITEMS = ['{"name": "x"}', '"x"', '{"name": "x", "dtype": "int64", "more": 1}']
ITEMS += ['{"name": "x\\ud800", "dtype": "int64"}', '{"name": "x", "dtype": 7}']


@each_of("item", ITEMS)
def test_damaged_tensors_are_refused(item: str) -> None:
    with pytest.raises(GraphError, match="is damaged"):
        Interface.from_json(f'{{"inputs": [{item}], "outputs": []}}')


def test_impossible_tensors_are_refused() -> None:
    with pytest.raises(
        GraphError, match="tensor 'x' of an interface has type 'complex64'; known: bfloat16, bool, "
    ):
        TensorInfo("x", "complex64")
    with pytest.raises(GraphError, match="not ''"):
        TensorInfo("", "int64")
    with pytest.raises(GraphError, match=r"tensor 'x\\ud800' of an interface has a name that UTF-8 cannot"):
        TensorInfo("x\ud800", "int64")
    with pytest.raises(GraphError, match="not 3"):
        TensorInfo(3, "int64")  # type: ignore[arg-type]
    with pytest.raises(GraphError, match="has type 7"):
        TensorInfo("x", 7)  # type: ignore[arg-type]
    with pytest.raises(GraphError, match="two inputs of an interface are called 'x'"):
        Interface((TensorInfo("x", "int64"), TensorInfo("x", "bool")), ())


def test_an_interface_of_another_graph_is_refused(traced: TracedModule) -> None:
    ids, x = INTERFACE.inputs
    with pytest.raises(GraphError, match="has 1 inputs and the graph 2: import the file again"):
        write_interface(traced, Interface((ids,), INTERFACE.outputs))
    with pytest.raises(GraphError, match="input 'x/in' is float16 in the interface .*node ids .*is int32"):
        write_interface(traced, Interface((x, ids), INTERFACE.outputs))
    assert read_interface(traced) is None
    traced.onnx_interface = Interface(INTERFACE.inputs, (ids, ids)[:1]).to_json()
    with pytest.raises(GraphError, match="has 1 outputs and the graph 2"):
        read_interface(traced)


def test_the_metadata_of_a_file_come_back_beside_ours(tmp_path: Path) -> None:
    """A client reads the names of classes or characters there."""
    import onnx
    from onnx import helper

    x = np.random.default_rng(0).normal(size=(2, 3, 8, 8)).astype(np.float32)
    source = qtrace.export(
        qtrace.trace(M.Sequential(M.Conv2d(3, 4, 3), M.ReLU()), x, check=False), tmp_path / "a.onnx"
    )
    model = onnx.load(source)
    helper.set_model_props(model, {"character": "a\nb\nü", "stride": "32", "qtrace.version": "another"})
    onnx.save(model, source)
    prepared = qtrace.prepare(qtrace.from_onnx(source))
    qtrace.save(qtrace.calibrate(prepared, [x], progress=False), tmp_path / "m.mge")
    converted = qtrace.convert(qtrace.load(tmp_path / "m.mge"))
    written = onnx.load(qtrace.export(converted, tmp_path / "b.onnx"))
    facts = {entry.key: entry.value for entry in written.metadata_props}
    assert (facts["character"], facts["stride"]) == ("a\nb\nü", "32")
    assert facts["qtrace.version"] != "another"
    assert "qtrace.recipe" in facts


def test_metadata_that_are_no_text_are_refused() -> None:
    with pytest.raises(GraphError, match="pairs of texts"):
        Interface((), (), metadata=(("a", 1),))
    for pairs in ('[["a", 1]]', '["abc"]', "3"):
        with pytest.raises(GraphError, match="damaged|pairs of texts"):
            Interface.from_json(f'{{"inputs": [], "outputs": [], "metadata": {pairs}}}')
    assert Interface.from_json(Interface((), (), (("a", "b"),)).to_json()).metadata == (("a", "b"),)
