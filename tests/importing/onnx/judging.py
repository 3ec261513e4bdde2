"""Runs a case through an importer, and judges the result: equal, refused, wrong or crashed."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import megengine as mge
import numpy as np
import onnx
from onnx.reference import ReferenceEvaluator

import qtrace
from qtrace.errors import QtraceError
from tests.importing.onnx.binding import bind
from tests.importing.onnx.cases import Case

__all__ = [
    "VERDICTS",
    "Verdict",
    "difference",
    "first_problem",
    "import_and_run",
    "judge",
    "judge_all",
    "run_imported",
]

VERDICTS = ("equal", "refused", "wrong", "crashed")
# The largest error, as a part of the expected output's largest value.
_TOLERANCES = {"float32": 1e-5, "float64": 1e-5, "float16": 2.0**-9, "bfloat16": 2.0**-6}
_STORED_DIGITS = 1e-3  # relative: the tolerance of the package's own runner
_MAX_MESSAGE = 200  # characters of an unexpected error

Run = Callable[[Path, Mapping[str, np.ndarray]], list[np.ndarray]]


@dataclass(frozen=True)
class Verdict:
    """The result of one case.

    Attributes:
        case: the name of the case.
        kind: the kind of the case.
        op: the op that the case is about.
        verdict: one of `VERDICTS`.
        reason: why the result is not equal; "" if it is.
    """

    case: str
    kind: str
    op: str
    verdict: str
    reason: str = ""


def import_and_run(path: Path, inputs: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    """Imports the file by `qtrace.from_onnx` and runs it on the inputs.

    Raises:
        QtraceError: when qtrace refuses the file.
    """
    open_sizes = {name: values.shape for name, values in inputs.items() if name in _open_inputs(path)}
    return run_imported(qtrace.from_onnx(path, shapes=open_sizes or None), inputs)


def run_imported(traced: Any, inputs: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    """Runs an imported network on the inputs of its file; the results have the dtypes of the file."""
    interface = json.loads(traced.onnx_interface)
    arguments = [mge.Tensor(_carried(inputs[item["name"]])) for item in interface["inputs"]]
    results = _flat(traced(*arguments))
    mge._full_sync()
    outputs = []
    for item, result in zip(interface["outputs"], results, strict=True):
        array, dtype = result.numpy(), np.dtype(onnx.helper.tensor_dtype_to_np_dtype(_element(item["dtype"])))
        outputs.append(array.astype(dtype))
    return outputs


def _element(name: str) -> int:
    return int(
        onnx.TensorProto.DataType.Value({"float32": "FLOAT", "float64": "DOUBLE"}.get(name, name.upper()))
    )


def _carried(values: np.ndarray) -> np.ndarray:
    """Returns inputs in the dtypes that an imported network takes."""
    if values.dtype.kind == "f" or values.dtype.name == "bfloat16":
        return values.astype(np.float32)
    return values.astype(np.int32) if values.dtype in (np.int64, np.uint16, np.uint32, np.uint64) else values


def _flat(result: Any) -> list[Any]:
    if isinstance(result, Mapping):
        return [leaf for value in result.values() for leaf in _flat(value)]
    return (
        [leaf for value in result for leaf in _flat(value)] if isinstance(result, (tuple, list)) else [result]
    )


def _open_inputs(path: Path) -> set[str]:
    """Returns the names of the inputs that have an axis of open size."""
    names = set()
    for value in onnx.load(path, load_external_data=False).graph.input:
        tensor = value.type.tensor_type
        sizes = tensor.shape.dim
        if not tensor.HasField("shape") or any(not axis.HasField("dim_value") for axis in sizes):
            names.add(value.name)
    return names


def judge_all(cases: Sequence[Case], folder: Path, run: Run = import_and_run) -> list[Verdict]:
    """Judges the cases one after the other; files are written to ``folder``."""
    by_name = {case.name: case for case in cases}
    return [judge(case, folder, run, by_name.get(case.name.partition("_expanded")[0])) for case in cases]


def judge(case: Case, folder: Path, run: Run = import_and_run, base: Case | None = None) -> Verdict:
    """Imports the model of a case, runs it on the inputs of the case, and compares the outputs.

    Args:
        case: the case.
        folder: a folder for the model's file.
        run: imports a file and computes its outputs; raises a `QtraceError` for what it refuses.
        base: see `bind`.
    """

    def verdict(kind: str, reason: str = "") -> Verdict:
        return Verdict(case.name, case.kind, case.op, kind, reason)

    model, values = bind(case, base)
    path = folder / "model.onnx"
    path.write_bytes(model.SerializeToString())
    inputs = {name: value for name, value in values.items() if value is not None}
    try:
        results = run(path, inputs)
    except QtraceError as error:
        text = str(error)
        tensors = [*case.input_names, *(value.name for value in model.graph.output)]
        if {*_names(model.graph), *tensors} & set(re.findall(r"\w+", text)):
            return verdict("refused", text)
        return verdict("crashed", f"the refusal names neither an op nor an input: {text}")
    except Exception as error:
        return verdict("crashed", f"{type(error).__name__}: {str(error)[:_MAX_MESSAGE]}")
    if len(results) != len(case.outputs):
        return verdict("wrong", f"{len(results)} outputs, expected {len(case.outputs)}")
    problem = first_problem(results, case.outputs, model, inputs)
    return verdict("wrong", problem) if problem else verdict("equal")


def first_problem(
    results: Sequence[np.ndarray],
    expected: Sequence[Any],
    model: onnx.ModelProto,
    inputs: Mapping[str, np.ndarray],
) -> str:
    """Returns how the results of a test differ from its outputs, as a clause; "" if they do not.

    Args:
        results: the results.
        expected: the outputs that the test stores.
        model: the model of the test, which ONNX's reference runs if they are stored with few digits.
        inputs: its inputs.
    """
    problem = _first_difference(results, expected)
    if problem and all(isinstance(e, np.ndarray) and e.dtype.kind == "f" for e in expected):
        problem = _first_difference(results, _recomputed(model, inputs, expected))
    return problem


def _first_difference(results: Sequence[np.ndarray], expected: Sequence[np.ndarray | None]) -> str:
    for index, (left, right) in enumerate(zip(results, expected, strict=True)):
        problem = difference(left, right)
        if problem:
            return f"output {index}: {problem}"
    return ""


def _names(graph: onnx.GraphProto) -> set[str]:
    """Returns the names of ops and attributes in a graph and in its bodies, and ``opset``."""
    names = {"opset"}
    for node in graph.node:
        names |= {node.op_type, *(attribute.name for attribute in node.attribute)}
        for attribute in node.attribute:
            names |= _names(attribute.g)
    return names


def _recomputed(
    model: onnx.ModelProto, inputs: Mapping[str, np.ndarray], expected: Sequence[Any]
) -> list[Any]:
    """Returns the outputs of ONNX's reference, for tests that store theirs with four digits.

    The reference must agree with the stored outputs, or these stand.
    """
    try:
        results = [np.asarray(value) for value in ReferenceEvaluator(model).run(None, dict(inputs))]
    except Exception:  # the reference raises errors of many classes for what it lacks
        return list(expected)
    close = [
        r.shape == e.shape and np.allclose(r, e, rtol=_STORED_DIGITS, atol=1e-7)
        for r, e in zip(results, expected, strict=True)
    ]
    return results if all(close) else list(expected)


def difference(result: np.ndarray, expected: np.ndarray | None) -> str:
    """Returns how ``result`` differs from ``expected``, as a clause; "" if it does not."""
    if expected is None:
        return "a tensor, expected a sequence or text"
    if result.shape != expected.shape:
        return f"shape {result.shape}, expected {expected.shape}"
    if result.dtype != expected.dtype:
        return f"dtype {result.dtype}, expected {expected.dtype}"
    tolerance = _TOLERANCES.get(expected.dtype.name)
    if tolerance is None:
        return _exact_difference(result, expected)
    if expected.dtype == np.float64:  # comes in as float32, beyond whose range there is infinity
        with np.errstate(over="ignore"):
            expected = expected.astype(np.float32)
    left, right = (np.asarray(array, np.float64) for array in (result, expected))
    for name, check in (("NaN", np.isnan), ("infinity", np.isposinf), ("-infinity", np.isneginf)):
        if not np.array_equal(check(left), check(right)):
            return f"{name} at other places"
    finite = np.isfinite(right)
    if not finite.any():
        return ""
    error = float(np.abs(left[finite] - right[finite]).max())
    largest = float(np.abs(right[finite]).max())
    return "" if error <= tolerance * largest else f"an error of {error:.3g}, at values up to {largest:.3g}"


def _exact_difference(result: np.ndarray, expected: np.ndarray) -> str:
    """Compares integers and truth values; integers beyond int32 cannot be carried."""
    if expected.dtype.kind in "iu" and expected.size:
        limits = np.iinfo(np.int32)
        if int(expected.max()) > limits.max or int(expected.min()) < limits.min:
            return "expected integers beyond int32"
    count = int(np.count_nonzero(result != expected))
    return f"{count} of {expected.size} values differ" if count else ""
