"""Layouts: the placement counts the changes that onnxruntime makes between its kernels."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import megengine as mge
import megengine.functional as F
import megengine.module as M
import pytest

import qtrace
from qtrace.benchmarking.prediction import predict, predict_float, read_graph
from qtrace.costs import CostTable
from qtrace.preparation.model import QuantizedModel
from qtrace.preparation.normalize import normalize
from qtrace.preparation.passes._problem import FloatLayouts, build_problem
from qtrace.preparation.passes._sites import find_chains
from qtrace.preparation.passes._view import read_view
from qtrace.preparation.placement.labelling import Problem, Tensor
from tests.nets import MobileNetV2, ResNet, images, net, randomize

X = images(1, 16, 24, 24)


def _conv(inputs: int = 16) -> M.Module:
    return M.Conv2d(inputs, 16, 3, padding=1)


def _problem(forward: Callable[..., Any], x: Any = X, **children: M.Module) -> Problem:
    traced = normalize(qtrace.trace(randomize(net(forward, **children)), x, check=False))
    view = read_view(traced, qtrace.QConfig())
    return build_problem(view, find_chains(view), CostTable.load("onnxruntime"))


def _tensors(problem: Problem) -> dict[str, Tensor]:
    return {tensor.producer or tensor.name: tensor for tensor in problem.tensors}


def test_convolutions_write_blocks_and_activation_functions_do_not() -> None:
    problem = _problem(lambda self, x: self.b(F.silu(self.a(x))), a=_conv(), b=_conv())
    inputs, first, second, last = problem.tensors
    assert [tensor.layouts.blocked for tensor in problem.tensors] == [False, True, False, True]
    assert inputs.layouts.block_readers == {first.producer}
    assert not first.layouts.block_readers  # silu reads the plain layout
    assert second.layouts.block_readers == {last.producer}
    assert all(t.layouts.reorder_seconds > t.layouts.transpose_seconds > 0 for t in problem.tensors)


def test_a_stem_reads_the_plain_layout() -> None:
    problem = _problem(lambda self, x: self.a(x), images(1, 3, 24, 24), a=_conv(3))
    assert not problem.tensors[0].layouts.block_readers


@pytest.mark.parametrize(
    ("function", "blocked"),
    [
        (lambda x, y: x + y, True),
        (lambda x, y: F.concat([x, y], 1), True),
        (lambda x, y: F.max_pool2d(x, 2, 2), True),
        (lambda x, y: x * F.mean(y, [2, 3], keepdims=True), False),
        (lambda x, y: F.gelu(x), False),
    ],
)
def test_ops_behind_convolutions_keep_the_blocks_if_they_have_a_kernel(
    function: Callable[..., Any], blocked: bool
) -> None:
    problem = _problem(lambda self, x: function(self.a(x), self.b(x)), a=_conv(), b=_conv())
    assert problem.tensors[-1].layouts.blocked is blocked


def test_what_is_written_as_two_nodes_is_dequantized_twice() -> None:
    problem = _problem(lambda self, x: F.silu(self.a(x)), a=_conv())
    convolved = problem.tensors[1]
    assert convolved.double_readers == set(convolved.readers)
    on_integers = {convolved.producer: True, convolved.readers[0]: False}
    expected = 2 * convolved.dequantize_seconds + convolved.layouts.transpose_seconds
    assert convolved.seconds_on_integers(on_integers) == pytest.approx(expected)


def _silu_net(self: M.Module, x: mge.Tensor) -> mge.Tensor:
    y = F.silu(self.a(x))
    return F.concat([F.silu(self.c(F.silu(self.b(y)))) + y, y], 1)


@pytest.mark.parametrize(
    ("module", "x"),
    [
        (lambda: net(_silu_net, a=_conv(), b=_conv(), c=_conv()), X),
        (lambda: ResNet(), images(1, 3, 32, 32)),
        (lambda: MobileNetV2(), images(1, 3, 32, 32)),
    ],
)
def test_the_placement_and_the_file_have_the_same_predicted_time(
    module: Callable[[], M.Module], x: Any, tmp_path: Path
) -> None:
    traced = qtrace.trace(randomize(module()), x, check=False)
    prepared = qtrace.prepare(traced, {"placement": "fastest"})
    note = QuantizedModel(prepared, "prepared").annotation.placement
    assert note is not None
    qtrace.calibrate(prepared, [x], progress=False)
    file = tmp_path / "net.onnx"
    qtrace.export(qtrace.convert(prepared), file)
    graph = read_graph(file, {})
    table = CostTable.load("onnxruntime")
    in_float, as_chosen = (1e3 * f(graph, table).seconds for f in (predict_float, predict))
    assert note.float_milliseconds == pytest.approx(in_float, rel=0.1)
    assert note.milliseconds == pytest.approx(as_chosen, rel=0.1)


def test_inputs_without_a_shape_end_in_no_traceback() -> None:
    traced = qtrace.trace(randomize(net(lambda self, x: self.a(x), a=_conv())), X, check=False)
    flat = normalize(traced)
    (call,) = read_view(flat, qtrace.QConfig()).calls.values()
    call.inputs[0].shape = ()
    layouts = FloatLayouts()
    layouts.add(call, call.inputs, [call.out])
    assert call.out in layouts
    assert call.expr not in layouts.block_readers
