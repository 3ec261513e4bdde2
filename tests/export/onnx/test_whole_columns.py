"""Files are right on processors with AMX, where onnxruntime 1.21 to 1.24 computes some columns wrong."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import megengine as mge
import megengine.functional as F
import megengine.module as M
import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator

import qtrace
from qtrace.errors import ExportError
from qtrace.export.onnx import whole_columns
from qtrace.onnxfile.kernels import products_are_wrong
from tests.each import each_of
from tests.nets import images, net, randomize

X = images(4, 3, 16, 16)


def _conv(channels: int, behind: Any = F.relu, **options: Any) -> tuple[Any, dict[str, M.Module]]:
    layers = {"a": M.Conv2d(3, channels, 3), "b": M.Conv2d(channels, channels, 3, **options)}
    return lambda self, x: F.avg_pool2d(behind(self.b(F.relu(self.a(x)))), 2), layers


def _rows(self: M.Module, x: mge.Tensor) -> mge.Tensor:
    return self.b(F.relu(self.a(F.transpose(F.reshape(x, (-1, 12, 64)), (0, 2, 1)))))


def _attention(self: M.Module, x: mge.Tensor) -> mge.Tensor:
    rows = F.transpose(F.reshape(x, (-1, 16, 48)), (0, 2, 1))[:, :40]
    scores = F.matmul(self.a(rows), F.transpose(self.b(rows), (0, 2, 1)))
    return F.matmul(F.softmax(scores * 0.1, axis=2), rows)


def _heads(self: M.Module, x: mge.Tensor) -> mge.Tensor:
    """Attention as it is usual: heads are cut and moved between roundings and products."""
    rows = F.reshape(x[:, :, :, :15], (-1, 3 * 240 // 48, 48))
    rows = F.concat([rows, rows, rows, rows], 1)[:, :50]
    keys = F.transpose(F.reshape(self.a(rows), (-1, 50, 2, 2, 24)), (2, 0, 3, 1, 4))
    queries = F.transpose(F.reshape(self.b(rows), (-1, 50, 2, 24)), (0, 2, 1, 3))
    scores = F.softmax(F.matmul(queries, F.transpose(keys[0], (0, 1, 3, 2))) * 0.2, -1)
    return F.reshape(F.transpose(F.matmul(scores, keys[1]), (0, 2, 1, 3)), (-1, 50, 48))


NETWORKS: dict[str, tuple[Any, dict[str, M.Module]]] = {
    "conv": _conv(24),
    "odd": _conv(17, behind=lambda y: y),
    "clamped": _conv(31, behind=F.relu6),
    "without a bias": _conv(20, bias=False),
    "grouped": _conv(48, groups=2),
    "wide": _conv(40),  # no threads share the columns of a convolution
    "behind SiLU": _conv(50, behind=F.silu),
    "head of a detector": (
        lambda self, x: self.b(F.silu(self.a(x))),
        {"a": M.Conv2d(3, 18, 3), "b": M.Conv2d(18, 85, 1)},
    ),
    "moved behind": (
        lambda self, x: F.transpose(F.reshape(self.b(F.silu(self.a(x))), (-1, 17, 196)), (0, 2, 1)),
        {"a": M.Conv2d(3, 18, 3), "b": M.Conv2d(18, 17, 1)},
    ),
    "heads": (_heads, {"a": M.Linear(48, 96), "b": M.Linear(48, 48)}),
    "linear": (
        lambda self, x: F.relu(self.b(F.relu(self.a(F.flatten(x, 1))))),
        {"a": M.Linear(768, 40), "b": M.Linear(40, 24, bias=False)},
    ),
    "rows": (_rows, {"a": M.Linear(12, 50), "b": M.Linear(50, 23)}),
    "attention": (_attention, {"a": M.Linear(16, 16), "b": M.Linear(16, 16)}),
}


def _converted(name: str, recipe: dict[str, Any] | None = None) -> tuple[Any, np.ndarray]:
    forward, layers = NETWORKS[name]
    model = randomize(net(forward, **layers))
    x = np.concatenate([X] * 8) if name == "linear" else X  # blocks have 32 rows
    traced = qtrace.trace(model, x[:1], check=False)
    prepared = qtrace.prepare(traced, recipe or {"backend": "onnxruntime"}, samples=[x[:1]])
    return qtrace.convert(qtrace.calibrate(prepared, [x], progress=False)), x


def _run(path: Path, x: np.ndarray, optimized: bool) -> np.ndarray:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    if not optimized:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    (result,) = session.run(None, {session.get_inputs()[0].name: x})
    return np.asarray(result)


@pytest.mark.quick(5)
@pytest.mark.parametrize("weights", ["int8", "uint8"])
@pytest.mark.parametrize("name", NETWORKS)
def test_the_file_computes_the_same_with_more_columns(tmp_path: Path, name: str, weights: str) -> None:
    converted, x = _converted(name)
    plain = qtrace.export(converted, tmp_path / "plain.onnx", amx=False, weights=weights)
    whole = qtrace.export(converted, tmp_path / "whole.onnx", amx=True, weights=weights)
    np.testing.assert_array_equal(_run(plain, x, optimized=False), _run(whole, x, optimized=False))
    assert qtrace.verify(whole, converted, [x]).passed
    if weights == "uint8" or name in ("attention", "heads"):
        assert (plain.read_bytes() == whole.read_bytes()) == (name == "wide")


@pytest.mark.quick(1)
@pytest.mark.skipif(not products_are_wrong(), reason="all columns are computed right here")
@pytest.mark.quick(1)
@pytest.mark.parametrize(
    "name", ["odd", "grouped", "linear", "rows", "behind SiLU", "head of a detector", "heads"]
)
def test_whole_columns_are_exact_where_plain_export_differs(tmp_path: Path, name: str) -> None:
    """A recogniser of text and GhostNet differed by up to 255 LSB, and `quantize` wrote no file."""
    converted, x = _converted(name)
    plain = qtrace.export(converted, tmp_path / "plain.onnx", amx=False)
    assert not qtrace.verify(plain, converted, [x]).passed
    assert qtrace.verify(qtrace.export(converted, tmp_path / "auto.onnx"), converted, [x]).passed


def test_dynamic_layers_get_whole_columns(tmp_path: Path) -> None:
    """Their kernel of integers runs without optimizations, too."""
    converted, x = _converted("rows", {"backend": "onnxruntime", "method": "dynamic"})
    whole = qtrace.export(converted, tmp_path / "whole.onnx", amx=True)
    stored = onnx.load(whole).graph.initializer
    columns = [tensor.dims[1] for tensor in stored if tensor.data_type in (2, 3) and tensor.dims]
    assert columns == [64, 32]
    np.testing.assert_allclose(converted(mge.Tensor(x)).numpy(), _run(whole, x, optimized=True), atol=1e-4)
    assert qtrace.verify(whole, converted, [x]).passed


def test_layers_with_whole_columns_stay_on_integers(tmp_path: Path) -> None:
    """The columns are taken away between integers, without one more rounding."""
    converted, _ = _converted("odd")
    path = qtrace.export(converted, tmp_path / "net.onnx", amx=True)
    options = ort.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    kinds = [node.op_type for node in onnx.load(tmp_path / "optimized.onnx").graph.node]
    assert kinds.count("QLinearConv") == 2
    assert kinds.count("Slice") == 2
    assert (kinds.count("QuantizeLinear"), kinds.count("DequantizeLinear")) == (1, 1)


def test_no_weight_is_stored_twice(tmp_path: Path) -> None:
    converted, _ = _converted("odd")
    model = onnx.load(qtrace.export(converted, tmp_path / "net.onnx", amx=True))
    read = {name for node in model.graph.node for name in node.input}
    assert {tensor.name for tensor in model.graph.initializer} <= read
    assert {name for node in model.graph.node for name in node.output} <= read | {
        "out",
        model.graph.output[0].name,
    }


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    ("backend", "here", "changed"),
    [
        ("onnxruntime", True, True),
        ("generic", True, True),
        ("onnxruntime", False, False),
        ("qnn", True, False),
    ],
)
def test_the_processor_decides(
    tmp_path: Path, monkeypatch: Any, caplog: Any, backend: str, here: bool, changed: bool
) -> None:
    monkeypatch.setattr(whole_columns, "products_are_wrong", lambda: here)
    converted, _ = _converted("odd", {"backend": backend})
    with caplog.at_level(logging.INFO, logger="qtrace"):
        path = qtrace.export(converted, tmp_path / "net.onnx")
    kinds = [node.op_type for node in onnx.load(path).graph.node]
    assert ("Slice" in kinds) is changed
    assert ("columns of zeros" in caplog.text) is changed
    assert ("wrong on processors with AMX" in caplog.text) is (backend != "qnn" and not here)
    other = "The file is for another runtime; to run it in onnxruntime here, export with amx=true."
    assert (other in caplog.text) is (backend == "qnn")


@pytest.mark.quick(2)
@pytest.mark.parametrize("name", [*NETWORKS, "even"])
def test_log_counts_layers_that_need_whole_columns_on_amx(
    tmp_path: Path, monkeypatch: Any, caplog: Any, name: str
) -> None:
    monkeypatch.setitem(NETWORKS, "even", _conv(32))
    converted, _ = _converted(name)
    path = qtrace.export(converted, tmp_path / "net.onnx", amx=False)
    count = whole_columns.write_whole_columns(onnx.load(path))
    monkeypatch.setattr(whole_columns, "products_are_wrong", lambda: False)
    with caplog.at_level(logging.INFO, logger="qtrace"):
        qtrace.export(converted, path)
    told = f"with AMX (Intel's servers since 2023): {count}. For those, export with amx=true."
    assert (told in caplog.text, "AMX" in caplog.text) == (count > 0, count > 0)
    assert (count == 0) is (name in ("even", "wide"))


def test_the_option_is_a_choice(tmp_path: Path) -> None:
    converted, _ = _converted("odd")
    with pytest.raises(
        ExportError, match=r"amx='no' is no choice of the ONNX export: choose true or false\."
    ):
        qtrace.export(converted, tmp_path / "net.onnx", amx="no")


class _Qdq:
    """Writes a model of integers, node by node."""

    def __init__(self) -> None:
        self.random = np.random.default_rng(0)
        self.nodes: list[Any] = []
        self.stored: list[Any] = []

    def keep(self, name: str, value: Any) -> str:
        self.stored.append(numpy_helper.from_array(np.asarray(value), name))
        return name

    def add(self, kind: str, inputs: list[str], out: str, **attributes: Any) -> str:
        self.nodes.append(helper.make_node(kind, inputs, [out], name=out, **attributes))
        return out

    def rounded(self, name: str) -> str:
        grid = [self.keep(f"{name}_s", np.float32(0.05)), self.keep(f"{name}_z", np.uint8(120))]
        return self.add(
            "DequantizeLinear",
            [self.add("QuantizeLinear", [name, *grid], f"{name}_int"), *grid],
            f"{name}_dq",
        )

    def weight(self, name: str, *shape: int, axis: int | None = None) -> str:
        self.keep(f"{name}_int", self.random.integers(-90, 90, shape).astype(np.int8))
        scale = 0.01 if axis is None else self.random.uniform(0.005, 0.02, shape[axis])
        grid = [
            self.keep(f"{name}_s", np.float32(scale)),
            self.keep(f"{name}_z", np.int8(np.zeros(np.shape(scale)))),
        ]
        return self.add(
            "DequantizeLinear", [f"{name}_int", *grid], name, **({} if axis is None else {"axis": axis})
        )

    def model(self, outputs: list[str]) -> Any:
        ends = [helper.make_tensor_value_info("x", 1, [40, 12])]
        results = [helper.make_tensor_value_info(name, 1, None) for name in outputs]
        graph = helper.make_graph(self.nodes, "net", ends, results, self.stored)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def _shared(q: _Qdq) -> list[str]:
    x, w = q.rounded("x"), q.weight("w", 12, 20, axis=1)
    y = q.rounded(q.add("MatMul", [x, w], "y"))
    return [q.add("Identity", [y], "a"), q.add("MatMul", [q.rounded(q.add("Relu", ["x"], "r")), w], "b")]


def _scalar_bias(q: _Qdq) -> list[str]:
    bias = q.keep("c", np.float32([0.5]))
    return [q.add("Gemm", [q.rounded("x"), q.weight("w", 20, 12, axis=0), bias], "y", transB=1, alpha=0.5)]


def _bias_of_rows(q: _Qdq) -> list[str]:
    bias = q.keep("c", q.random.normal(size=(40, 1)).astype(np.float32))
    return [q.add("Gemm", [q.rounded("x"), q.weight("w", 12, 20), bias], "y")]


def _bias_with_an_axis(q: _Qdq) -> list[str]:
    bias = q.keep("c", q.random.normal(size=(1, 20)).astype(np.float32))
    y = q.add("Add", [bias, q.add("MatMul", [q.rounded("x"), q.weight("w", 12, 20)], "p")], "y")
    return [q.rounded(q.add("Relu", [y], "r"))]


def _many_weights(q: _Qdq) -> list[str]:
    rows = q.add("Reshape", [q.rounded("x"), q.keep("shape", np.array([1, 40, 12]))], "rows")
    return [q.add("MatMul", [q.rounded(rows), q.weight("w", 3, 12, 20)], "y")]


def _moved_weight(q: _Qdq) -> list[str]:
    w = q.add("Transpose", [q.weight("w", 20, 12)], "moved", perm=[1, 0])
    return [q.rounded(q.add("MatMul", [q.rounded("x"), w], "y"))]


def _stored_left(q: _Qdq) -> list[str]:
    x = q.add("Concat", ["x", "x"], "wide", axis=1)  # 24 columns
    return [q.rounded(q.add("MatMul", [q.weight("w", 40, 40), q.rounded(x)], "y"))]


def _joined_batch(q: _Qdq) -> list[str]:
    rows = q.add("Reshape", [q.rounded("x"), q.keep("shape", np.array([4, 20, 6]))], "rows")
    right = q.add(
        "Reshape", [q.rounded(q.add("Relu", ["x"], "r")), q.keep("other", np.array([6, 80]))], "all"
    )
    cut = q.add(
        "Slice", [right, *(q.keep(n, np.array([v])) for n, v in (("b", 0), ("e", 24), ("a", 1)))], "cut"
    )
    return [q.rounded(q.add("MatMul", [rows, cut], "y"))]


def _read_twice(q: _Qdq) -> list[str]:
    y = q.add("MatMul", [q.rounded("x"), q.weight("w", 12, 20)], "y")
    return [y, q.rounded(y), q.add("Sigmoid", [y], "s")]


@each_of(
    "write",
    [
        _shared,
        _scalar_bias,
        _bias_of_rows,
        _bias_with_an_axis,
        _many_weights,
        _read_twice,
        _moved_weight,
        _stored_left,
        _joined_batch,
    ],
)
def test_unusual_layers_compute_the_same(tmp_path: Path, write: Any) -> None:
    q = _Qdq()
    model = q.model(write(q))
    x = q.random.normal(size=(40, 12)).astype(np.float32)
    want = ReferenceEvaluator(model).run(None, {"x": x})
    assert whole_columns.write_whole_columns(model) > 0
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    for wanted, got in zip(want, session.run(None, {"x": x}), strict=True):
        np.testing.assert_allclose(got, wanted, atol=0.0501)  # a step, where a sum lies between two


def test_a_weight_keeps_its_name(tmp_path: Path) -> None:
    converted, _ = _converted("odd")
    names = [
        {tensor.name for tensor in onnx.load(qtrace.export(converted, path, amx=amx)).graph.initializer}
        for path, amx in ((tmp_path / "plain.onnx", False), (tmp_path / "whole.onnx", True))
    ]
    assert names[0] <= names[1]
