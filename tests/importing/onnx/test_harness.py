"""The conformance harness itself, with ONNX's reference implementation in the importer's place."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from qtrace.errors import ExportError, QtraceError
from tests.each import each_of
from tests.importing.onnx.binding import bind
from tests.importing.onnx.cases import LIGHT, Case, load_cases, load_light_networks
from tests.importing.onnx.judging import difference, judge, judge_all


def reference(path: Path, inputs: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    return [np.asarray(value) for value in ReferenceEvaluator(onnx.load(path)).run(None, dict(inputs))]


def make_case(op: str = "ReduceSum", keepdims: int = 1) -> Case:
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    axes = np.array([1], np.int64)
    y = x.sum(axis=1, keepdims=bool(keepdims))
    node = helper.make_node(op, ["x", "axes"], ["y"], keepdims=keepdims)
    inputs = [
        helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, x.shape),
        helper.make_tensor_value_info("axes", onnx.TensorProto.INT64, axes.shape),
    ]
    output = helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, y.shape)
    model = helper.make_model(
        helper.make_graph([node], "g", inputs, [output]), opset_imports=[helper.make_opsetid("", 13)]
    )
    return Case("reduce_sum", "node", op, model, (x, axes), (y,))


def test_axes_become_initializers_and_data_stay_inputs() -> None:
    case = make_case()
    model, inputs = bind(case)
    assert list(inputs) == ["x"] == [value.name for value in model.graph.input]
    assert [numpy_helper.to_array(t).tolist() for t in model.graph.initializer] == [[1]]
    assert [value.name for value in case.model.graph.input] == ["x", "axes"]
    assert not case.model.graph.initializer


def test_an_expanded_function_binds_what_its_op_binds() -> None:
    base = make_case()
    body = Case("reduce_sum_expanded", "node", "ReduceSum", onnx.ModelProto(), base.inputs, base.outputs)
    body.model.CopyFrom(base.model)
    body.model.graph.node[0].op_type = "Custom"
    assert list(bind(body)[1]) == ["x", "axes"]
    assert list(bind(body, base)[1]) == ["x"]


def test_the_reference_is_equal(tmp_path: Path) -> None:
    assert judge(make_case(), tmp_path, reference).verdict == "equal"


def test_a_wrong_value_shape_type_or_count_is_wrong(tmp_path: Path) -> None:
    changes = {
        "output 0: an error of 1, at values up to 12": lambda y: [y + 1],
        "output 0: shape (2,), expected (2, 1)": lambda y: [y[:, 0]],
        "output 0: dtype float64, expected float32": lambda y: [y.astype(np.float64)],
        "2 outputs, expected 1": lambda y: [y, y],
        "output 0: NaN at other places": lambda y: [y * np.nan],
        "output 0: infinity at other places": lambda y: [y * np.inf + np.inf],
    }
    for reason, change in changes.items():
        verdict = judge(make_case(), tmp_path, lambda p, i, change=change: change(reference(p, i)[0]))
        assert (verdict.verdict, verdict.reason) == ("wrong", reason)


def test_a_refusal_must_name_an_op_an_attribute_or_an_input(tmp_path: Path) -> None:
    def refusing(text: str, kind: type[Exception] = ExportError) -> str:
        def run(path: Path, inputs: Mapping[str, np.ndarray]) -> list[np.ndarray]:
            raise kind(text)

        return judge(make_case(), tmp_path, run).verdict

    assert refusing("ReduceSum 'y' has no equal.") == "refused"
    assert refusing("its keepdims is 2.") == "refused"
    assert refusing("input 'axes' is not read.") == "refused"
    assert refusing("sorry.") == "crashed"
    assert refusing("ReduceSum fails", RuntimeError) == "crashed"
    assert issubclass(ExportError, QtraceError)


@each_of(
    ("result", "expected", "same"),
    [
        (np.float32([1, 1e-6]), np.float32([1, 0]), True),
        (np.float32([1, 1e-4]), np.float32([1, 0]), False),
        (np.float32([np.nan, np.inf, -np.inf]), np.float32([np.nan, np.inf, -np.inf]), True),
        (np.float32([np.nan, -np.inf]), np.float32([np.nan, np.inf]), False),
        (np.float32([0, 0]), np.float32([0, 0]), True),
        (np.float32([1e-9, 0]), np.float32([0, 0]), False),
        (np.int64([1, 2]), np.int64([1, 2]), True),
        (np.int64([1, 2]), np.int64([1, 3]), False),
        (np.int32([1]), np.int64([1]), False),
        (np.int64([0]), np.int64([2**40]), False),
        (np.array([True, False]), np.array([True, False]), True),
        (np.array([True, True]), np.array([True, False]), False),
        (np.zeros((0, 2), np.float32), np.zeros((0, 2), np.float32), True),
        (np.zeros((0, 2), np.float32), np.zeros((2, 0), np.float32), False),
        (np.float32([1]), None, False),
    ],
)
def test_differences(result: np.ndarray, expected: np.ndarray | None, same: bool) -> None:
    assert (difference(result, expected) == "") is same


@pytest.mark.slow  # ONNX makes the data of all node tests when they are loaded
def test_the_cases_are_all_of_the_package(tmp_path: Path) -> None:
    node = load_cases("node")
    assert len(node) >= 1884
    assert len({case.name for case in node}) == len(node)
    chosen = [case for case in node if case.op in ("Slice", "Clip", "Gemm")]
    verdicts = judge_all(chosen, tmp_path, reference)
    assert {case.op for case in chosen} == {"Slice", "Clip", "Gemm"}
    assert {v.verdict for v in verdicts} == {"equal"}
    expanded = next(case for case in node if case.name == "clip_expanded")
    assert expanded.op == "Clip"


def test_files_of_other_kinds_are_loaded(tmp_path: Path) -> None:
    assert [len(load_cases(kind)) for kind in ("pytorch-operator", "pytorch-converted", "simple")] == [
        35,
        82,
        23,
    ]
    (case,) = (case for case in load_cases("pytorch-converted") if case.name == "BatchNorm2d_eval")
    assert judge(case, tmp_path, reference).verdict == "equal"


def test_light_networks_are_read_from_the_package() -> None:
    networks = load_light_networks()
    assert len(networks) == len(list(LIGHT.glob("*.onnx"))) == 9
    for network in networks:
        assert [values.shape for values in network.inputs if values is not None] == [(1, 3, 224, 224)]
        assert all(values is not None and values.size == 1000 for values in network.outputs)
