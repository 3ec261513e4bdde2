"""Forms of ops that MegEngine's own kernels compute otherwise, against ONNX's reference implementation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import megengine as mge
import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator

import qtrace
from qtrace.errors import GraphError, ImportingError
from qtrace.graph.opaque import opaque_calls
from qtrace.graph.walk import exprs, op_label
from tests.each import each_of
from tests.importing.onnx.judging import difference, import_and_run
from tests.importing.onnx.networks import model, node, save

F32 = np.float32
RNG = np.random.default_rng(7)


def write(
    path: Path,
    op: str,
    inputs: Mapping[str, np.ndarray],
    stored: Mapping[str, np.ndarray] | None = None,
    outputs: Sequence[str] = ("y",),
    opset: int = 18,
    expected: Sequence[np.ndarray] | None = None,
    **attributes: Any,
) -> Path:
    """Writes a model of one node."""
    names = [*inputs, *(stored or {})]
    node = helper.make_node(op, names, list(outputs), **attributes)
    values = [
        helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(v.dtype), v.shape)
        for n, v in inputs.items()
    ]
    results = [onnx.ValueInfoProto(name=name) for name in outputs if name]
    graph = helper.make_graph(
        [node], "g", values, results, [numpy_helper.from_array(v, n) for n, v in (stored or {}).items()]
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
    computed = ReferenceEvaluator(model).run(None, dict(inputs)) if expected is None else expected
    for value, array in zip(model.graph.output, map(np.asarray, computed), strict=True):
        element = helper.np_dtype_to_tensor_dtype(array.dtype)
        value.CopyFrom(helper.make_tensor_value_info(value.name, element, array.shape))
    path.write_bytes(model.SerializeToString())
    return path


def check(
    folder: Path, op: str, inputs: Mapping[str, np.ndarray], *args: Any, **attributes: Any
) -> list[np.ndarray]:
    path = write(folder / "m.onnx", op, inputs, *args, **attributes)
    expected = ReferenceEvaluator(onnx.load(path)).run(None, dict(inputs))
    results = import_and_run(path, inputs)
    for result, value in zip(results, expected, strict=True):
        assert difference(result, np.asarray(value)) == ""
    return results


def test_halves_are_rounded_to_even(tmp_path: Path) -> None:
    x = F32([-2.5, -1.5, -0.5, 0.5, 1.5, 2.5, 0.49999997, 2**22 + 0.5, 1e30, -3.2, np.inf])
    (y,) = check(tmp_path, "Round", {"x": x})
    assert y[:6].tolist() == [-2.0, -2.0, 0.0, 0.0, 2.0, 2.0]


def test_the_remainder_has_the_sign_that_onnx_says(tmp_path: Path) -> None:
    x, y = F32([5.5, -5.5, 5.5, -5.5, 1e-3]), F32([2, 2, -2, -2, 0.3])
    check(tmp_path, "Mod", {"a": x, "b": y}, fmod=1)
    numbers = np.int64([7, -7, 7, -7])
    check(tmp_path, "Mod", {"a": numbers}, {"b": np.int64([3, 3, -3, -3])})
    check(tmp_path, "Mod", {"a": numbers}, {"b": np.int64([3, 3, -3, -3])}, fmod=1)
    check(tmp_path, "Div", {"a": numbers}, {"b": np.int64([3, 3, -3, -3])})


@pytest.mark.parametrize("op", ["Div", "Mod"])
def test_integers_are_not_divided_by_a_stored_zero(tmp_path: Path, op: str) -> None:
    path = write(tmp_path / "m.onnx", op, {"a": np.int32([1, 2])}, {"b": np.int32([1, 0])})
    with pytest.raises(ImportingError, match=f"{op} 'y' divides by integers that may be 0"):
        qtrace.from_onnx(path)


@each_of("stored", [True, False])
@each_of("axis", [0, 1, 2])
def test_elements_are_gathered_from_both_ends(tmp_path: Path, stored: bool, axis: int) -> None:
    x = RNG.normal(size=(3, 4, 5)).astype(F32)
    shape = list(x.shape)
    shape[axis] = 2
    index = RNG.integers(-3, 3, shape)
    if stored:
        check(tmp_path, "GatherElements", {"x": x}, {"i": index}, axis=axis)
    else:
        check(tmp_path, "GatherElements", {"x": x, "i": index}, axis=axis)


@each_of("largest", [1, 0])
@each_of("axis", [0, 1, -1])
@each_of("shape", [(5,), (4, 5), (3, 4, 5), (2, 3, 4, 5)])
def test_the_largest_along_any_axis(tmp_path: Path, shape: tuple[int, ...], axis: int, largest: int) -> None:
    if axis < len(shape):
        x, count = RNG.permutation(np.prod(shape)).reshape(shape).astype(F32), np.int64([2])
        check(tmp_path, "TopK", {"x": x}, {"k": count}, ("v", "i"), axis=axis, largest=largest)


def test_the_largest_of_a_free_batch(tmp_path: Path) -> None:
    for axis in (0, 1):
        node_ = helper.make_node("TopK", ["x", "k"], ["v", "i"], axis=axis)
        stored, dtypes = {"k": np.int64([axis + 1])}, {"i": np.int64}
        proto = model([node_], {"x": ("N", 3, 4)}, ["v", "i"], stored, dtypes=dtypes)
        path = save(proto, tmp_path)
        x = RNG.permutation(60).reshape(5, 3, 4).astype(F32)
        results = qtrace.from_onnx(path)(mge.Tensor(x))
        for result, value in zip(results, ReferenceEvaluator(str(path)).run(None, {"x": x}), strict=True):
            np.testing.assert_array_equal(result.numpy(), value)


def test_the_largest_of_integers_is_kept(tmp_path: Path) -> None:
    check(tmp_path, "TopK", {"x": np.int64([[1, 2]])}, {"k": np.int64([1])}, ("v", "i"))


def test_large_values_keep_their_digits(tmp_path: Path) -> None:
    check(tmp_path, "LogSoftmax", {"x": F32([[1e4, 1e4 + 1, 1e4 + 3]])})
    check(tmp_path, "LpNormalization", {"x": F32([[0, 0], [3, 4]])})


@each_of("upper", [0, 1])
@each_of("k", [-1, 0, 2])
def test_triangles(tmp_path: Path, upper: int, k: int) -> None:
    x = RNG.normal(size=(2, 3, 4)).astype(F32)
    x[0, 2, 0] = x[0, 0, 3] = np.inf
    check(tmp_path, "Trilu", {"x": x}, {"k": np.array(k, np.int64)}, upper=upper)
    check(tmp_path, "Trilu", {"x": x > 0}, {"k": np.array(k, np.int64)}, upper=upper)


@each_of("axis", [0, 1, -1])
def test_the_first_or_last_of_equal_places(tmp_path: Path, axis: int) -> None:
    x = F32([[1, 3, 3], [2, 3, 1]])
    check(tmp_path, "Hardmax", {"x": x}, axis=axis)
    for op in ("ArgMax", "ArgMin"):
        check(tmp_path, op, {"x": x}, axis=axis, select_last_index=1)


@each_of("attributes", [{}, {"exclusive": 1}, {"reverse": 1}, {"exclusive": 1, "reverse": 1}])
def test_cumulative_sums(tmp_path: Path, attributes: dict[str, int]) -> None:
    axis = {"axis": np.array(1, np.int64)}
    check(tmp_path, "CumSum", {"x": RNG.normal(size=(2, 4)).astype(F32)}, axis, **attributes)
    check(tmp_path, "CumSum", {"x": np.int32([[1, 2, 3], [4, 5, 6]])}, axis, **attributes)


def test_booleans_are_chosen_and_infinities_told_apart(tmp_path: Path) -> None:
    mask, x, y = (RNG.random((3, 4)) > 0.5 for _ in range(3))
    check(tmp_path, "Where", {"c": mask, "x": x, "z": y})
    values = F32([1, np.inf, -np.inf, np.nan])
    for attributes in ({}, {"detect_negative": 0}, {"detect_positive": 0}):
        check(tmp_path, "IsInf", {"x": values}, opset=20, **attributes)


def check_as_onnxruntime(folder: Path, op: str, x: np.ndarray, opset: int, **attributes: Any) -> str:
    """Compares with onnxruntime on the file itself; returns "kept" if the node stays as in the file."""
    path = write(folder / "m.onnx", op, {"x": x}, opset=opset, expected=[x], **attributes)
    file = onnx.load(path)
    file.graph.output[0].type.tensor_type.ClearField("shape")
    onnx.save(file, path)
    (expected,) = onnxruntime.InferenceSession(path).run(None, {"x": x})
    (result,) = import_and_run(path, {"x": x})
    assert difference(result, expected) == ""
    return "kept" if any(opaque_calls(qtrace.from_onnx(path))) else "lowered"


@each_of("counts", [0, 1])
@each_of("ceil", [0, 1])
@each_of("pads", [[0, 0, 1, 1], [1, 0, 0, 1], [1, 1, 1, 1], [1, 0, 1, 0], [0, 0, 0, 0]])
@each_of("opset", [11, 19, 22])
def test_averages_count_the_places_that_onnxruntime_counts(
    tmp_path: Path, counts: int, ceil: int, pads: list[int], opset: int
) -> None:
    x = RNG.normal(size=(2, 3, 7, 8)).astype(F32) + 2
    options = {"kernel_shape": [3, 3], "strides": [2, 2], "pads": pads, "ceil_mode": ceil}
    form = check_as_onnxruntime(tmp_path, "AveragePool", x, opset, count_include_pad=counts, **options)
    assert counts or form == "lowered"


AMBIGUOUS = {  # what ONNX and onnxruntime, or two versions of onnxruntime, count otherwise
    "1-D": ([5], 11, {"kernel_shape": [3], "strides": [2], "pads": [1, 0], "ceil_mode": 1}),
    "valid": ([5, 9], 11, {"kernel_shape": [3, 2], "strides": [1, 2], "auto_pad": "VALID", "ceil_mode": 1}),
    "one side": ([4, 4], 19, {"kernel_shape": [4, 4], "strides": [3, 3], "pads": [3, 0, 3, 3]}),
    "other axis": (
        [6, 6],
        19,
        {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [0, 1, 0, 1], "ceil_mode": 1},
    ),
    "one axis": ([6, 8], 22, {"kernel_shape": [4, 1], "strides": [1, 2], "pads": [1, 0, 1, 0]}),
}


@each_of("name", AMBIGUOUS)
def test_counts_on_which_runtimes_disagree_stay_as_in_the_file(tmp_path: Path, name: str) -> None:
    size, opset, options = AMBIGUOUS[name]
    x = RNG.normal(size=(2, 3, *size)).astype(F32) + 2
    assert check_as_onnxruntime(tmp_path, "AveragePool", x, opset, count_include_pad=1, **options) == "kept"


@each_of("op", ["MaxPool", "AveragePool", "LpPool", "Conv"])
@each_of("automatic", ["SAME_UPPER", "SAME_LOWER"])
def test_strides_beyond_the_kernel_skip_the_places_that_onnxruntime_skips(
    tmp_path: Path, op: str, automatic: str
) -> None:
    x = RNG.normal(size=(2, 3, 8, 9)).astype(F32)
    stored = {"w": RNG.normal(size=(4, 3, 1, 2)).astype(F32)} if op == "Conv" else {}
    options = {"kernel_shape": [1, 2], "strides": [4, 2], "auto_pad": automatic}
    check_as_onnxruntime(tmp_path, op, x, 11, stored=stored, **options)


def test_weights_may_be_computed(tmp_path: Path) -> None:
    x, weight = RNG.normal(size=(1, 4, 5, 5)).astype(F32), RNG.normal(size=(4, 3, 3, 3)).astype(F32)
    inputs = {"x": x, "w": weight, "b": RNG.normal(size=3).astype(F32)}
    options = {"strides": [2, 2], "pads": [1, 0, 1, 1], "output_padding": [1, 0]}
    check(tmp_path, "ConvTranspose", inputs, **options)
    factors = {name: RNG.random(4).astype(F32) + 0.5 for name in ("scale", "shift", "mean", "variance")}
    check(tmp_path, "BatchNormalization", {"x": x, **factors}, epsilon=0.01)
    check(tmp_path, "BatchNormalization", {"x": x[0, :, :, 0].T.copy(), **factors})


def test_groups_of_a_transposed_convolution_with_computed_weights(tmp_path: Path) -> None:
    x, weight = RNG.normal(size=(1, 4, 5, 5)).astype(F32), RNG.normal(size=(4, 3, 3, 3)).astype(F32)
    halves = []
    for part in (slice(0, 2), slice(2, 4)):  # ONNX's reference has no groups
        halves += check(tmp_path, "ConvTranspose", {"x": x[:, part], "w": weight[part]}, strides=[2, 2])
    expected = np.concatenate(halves, axis=1)
    inputs = {"x": x, "w": weight}
    path = write(tmp_path / "m.onnx", "ConvTranspose", inputs, expected=[expected], strides=[2, 2], group=2)
    (result,) = import_and_run(path, inputs)
    assert difference(result, expected) == ""


def test_the_error_function(tmp_path: Path) -> None:
    check(tmp_path, "Erf", {"x": F32([-3, -0.5, 0, 1e-4, 0.7, 5])})


def test_a_form_without_a_lowering_is_written_by_its_body(tmp_path: Path) -> None:
    x = RNG.normal(size=(2, 3, 4)).astype(F32)
    scale, bias = (RNG.normal(size=4).astype(F32) for _ in range(2))
    inputs = {"x": x, "scale": scale, "bias": bias}
    check(tmp_path, "LayerNormalization", inputs, None, ("y", "mean", "deviation"), 17)
    traced = qtrace.from_onnx(tmp_path / "m.onnx")
    assert all(node.name.startswith(("y", "mean", "deviation", "x", "scale", "bias", "self"))
               for node in traced.graph.nodes(False))  # fmt: skip
    check(tmp_path, "Clip", {"x": x, "low": np.array(-0.5, F32)})
    check(tmp_path, "MeanVarianceNormalization", {"x": RNG.normal(size=(2, 3, 4, 4)).astype(F32)})
    labels = np.int64([[0, 2, 1], [2, 2, 0]])
    check(tmp_path, "SoftmaxCrossEntropyLoss", {"x": RNG.normal(size=(2, 3, 3)).astype(F32), "t": labels})


def test_a_body_with_an_op_that_has_no_equal_is_kept(tmp_path: Path) -> None:
    check(tmp_path, "CenterCropPad", {"x": RNG.normal(size=(4, 4)).astype(F32), "s": np.int64([2, 4])})


def test_ops_before_opset_7_broadcast_at_their_axis(tmp_path: Path) -> None:
    x, y = RNG.normal(size=(2, 3, 4)).astype(F32), RNG.normal(size=3).astype(F32)
    path = write(tmp_path / "m.onnx", "Add", {"x": x, "z": y}, None, ("y",), 6, [x], broadcast=1, axis=1)
    (result,) = import_and_run(path, {"x": x, "z": y})
    np.testing.assert_array_equal(result, x + y[:, None])


def test_later_definitions_are_read_if_their_types_alone_differ(tmp_path: Path) -> None:
    check(tmp_path, "Transpose", {"x": np.ones((2, 3), F32)}, None, ("y",), 25, perm=[1, 0])
    check(tmp_path, "Swish", {"x": np.ones((2, 3), F32)}, None, ("y",), 24)  # ONNX has a body of it
    path = write(tmp_path / "m.onnx", "BitShift", {"x": np.uint8([1, 2])}, {"s": np.uint8([1, 1])}, opset=28,
                 direction="LEFT")  # fmt: skip
    with pytest.raises(ImportingError, match="BitShift 'y' has no equal .* refused by onnxruntime"):
        qtrace.from_onnx(path)


@each_of("shape", [(2, 4, 5), (2, 4, 3, 2, 5)])
@each_of("stored", [True, False])
def test_instance_norm_of_signals_and_volumes(tmp_path: Path, shape: tuple[int, ...], stored: bool) -> None:
    x, weights = RNG.normal(size=shape).astype(F32), {"s": F32([1, 2, 3, 4]), "b": F32([0, 1, 0, -1])}
    inputs = {"x": x} if stored else {"x": x, **weights}
    check(tmp_path, "InstanceNormalization", inputs, weights if stored else None, epsilon=0.01)


@each_of("shape", [(2, 4, 5), (2, 4, 3, 5), (2, 4, 3, 2, 5)])
def test_group_norm_of_signals_images_and_volumes(tmp_path: Path, shape: tuple[int, ...]) -> None:
    x, stored = RNG.normal(size=shape).astype(F32), {"s": F32([1, 2, 3, 4]), "b": F32([0, 1, 0, -1])}
    check(tmp_path, "GroupNormalization", {"x": x}, stored, ("y",), 21, num_groups=2)


def test_norms_without_places_or_with_other_weights_are_refused(tmp_path: Path) -> None:
    flat, stored = RNG.normal(size=(2, 4)).astype(F32), {"s": F32([1, 2, 3, 4]), "b": F32([0, 1, 0, -1])}
    path = write(tmp_path / "m.onnx", "InstanceNormalization", {"x": flat}, stored, expected=[flat])
    with pytest.raises((ImportingError, GraphError), match="InstanceNormalization"):
        qtrace.from_onnx(path)(mge.Tensor(flat))
    x = RNG.normal(size=(2, 4, 3, 3)).astype(F32)
    stored["s"] = F32([1, 2])
    args = ("GroupNormalization", {"x": x}, stored, ("y",), 21, [x])
    path = write(tmp_path / "m.onnx", *args, num_groups=2)
    with pytest.raises(ImportingError, match="GroupNormalization 'y'"):
        qtrace.from_onnx(path)


def test_a_group_norm_of_pytorch_is_one_op(tmp_path: Path) -> None:
    """PyTorch writes it as an instance norm with three axes between two reshapes, a product and a sum."""
    x = RNG.normal(size=(2, 4, 3, 5)).astype(F32)
    stored = {
        **{"gn.weight": F32([1, 2, 3, 4]).reshape(4, 1, 1), "gn.bias": F32([0, 1, 0, -1]).reshape(4, 1, 1)},
        **{"ones": F32([1, 1]), "zeros": F32([0, 0]), "split": np.int64([0, 2, -1])},
    }
    nodes = [
        node("Reshape", "x split", "groups"),
        node("InstanceNormalization", "groups ones zeros", "normal"),
        node("Shape", "x", "shape"),
        node("Reshape", "normal shape", "whole"),
        node("Mul", "whole gn.weight", "scaled"),
        node("Add", "scaled gn.bias", "y"),
    ]
    path = save(model(nodes, {"x": ["n", 4, 3, 5]}, stored=stored), tmp_path)
    net = qtrace.from_onnx(path)
    assert "F.group_norm" in {op_label(e) for e in exprs(net)}
    assert not {"F.mul", "F.add", "InstanceNorm"} & {op_label(e) for e in exprs(net)}
    (expected,) = ReferenceEvaluator(onnx.load(path)).run(None, {"x": x})
    assert np.abs(net(mge.Tensor(x)).numpy() - expected).max() <= 1e-6 * np.abs(expected).max()
