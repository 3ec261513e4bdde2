"""The times of max pooling: on integers fast with the channels last, slow in the plain layout."""

from __future__ import annotations

import itertools
import math

import megengine.functional as F
import megengine.module as M
import onnx
import pytest

import qtrace
from qtrace.benchmarking.onnx_ops import read_graph
from qtrace.benchmarking.prediction import predict
from qtrace.costs import FLOAT, INTEGER, PLAIN_MAX_POOL, CostTable, OpShape
from qtrace.preparation.passes import place as placing
from qtrace.preparation.passes._pools import PoolTimes
from qtrace.preparation.passes._problem import add_pools, build_problem
from qtrace.preparation.placement.problem import Layouts, Problem, Tensor, Unit, evaluate
from qtrace.preparation.prepare import plan
from tests.nets import images, net

TABLE = CostTable.load("onnxruntime")
X = images(1, 8, 32, 32)


def _problem(loss: float, count: int = 1) -> tuple[Problem, Problem]:
    readers = tuple(f"r{i}" for i in range(count))
    units = tuple(Unit(name, 1.0, 1.0) for name in ("p", *readers))
    tensors = (Tensor("t", "p", readers, 0.0, 0.0, layouts=Layouts()),)
    problem = Problem(units, tensors)
    return problem, add_pools(problem, {"t": PoolTimes(2.0, 2.0 + loss)})


@pytest.mark.parametrize(("before", "behind"), list(itertools.product([False, True], repeat=2)))
def test_a_pooling_is_on_integers_if_the_op_before_it_is(before, behind):
    problem, with_pool = _problem(loss=6.0)
    named = {"p": before, "r0": behind}
    added = evaluate(with_pool, named).seconds - evaluate(problem, named).seconds
    assert math.isclose(added, 8.0 if before else 2.0)


def test_a_float_op_behind_an_integer_pooling_leaves_it_in_the_plain_layout():
    problem, _ = _problem(loss=0.0)
    with_pool = add_pools(problem, {"t": PoolTimes(2.0, 1.0, plain_seconds=5.0)})
    for behind, seconds in ((True, 1.0), (False, 6.0)):
        named = {"p": True, "r0": behind}
        assert evaluate(with_pool, named).seconds - evaluate(problem, named).seconds == seconds


def test_a_pooling_that_gains_belongs_to_the_op_before_it():
    problem, with_pool = _problem(loss=-1.0)
    on_integers = dict.fromkeys(("p", "r0"), True)
    assert evaluate(with_pool, on_integers).seconds - evaluate(problem, on_integers).seconds == 1.0


PARTS = {"a": M.Conv2d(8, 32, 3, padding=1), "b": M.Conv2d(32, 8, 3, padding=1)}


def _traced(forward):
    return qtrace.trace(net(forward, **PARTS), X, check=False)


def _convolved(self, x):
    return self.b(F.max_pool2d(F.relu(self.a(x)), 2))


def _ended(self, x):
    return F.avg_pool2d(F.max_pool2d(F.relu(self.a(x)), 2), 16)


def _quantized(forward):
    prepared = qtrace.prepare(_traced(forward), {"backend": "onnxruntime", "placement": "everything"})
    return qtrace.convert(qtrace.calibrate(prepared, [X], progress=False))


def test_the_file_predictor_knows_which_kernel_runs(tmp_path):
    kinds = []
    for number, forward in enumerate((_convolved, _ended)):
        path = qtrace.export(_quantized(forward), tmp_path / f"{number}.onnx")
        name = onnx.load(path).graph.input[0].name
        kinds.append({op.kind for op in predict(read_graph(path, {name: X.shape}), TABLE).ops})
    assert "max_pool2d" in kinds[0]
    assert PLAIN_MAX_POOL not in kinds[0]
    assert PLAIN_MAX_POOL in kinds[1]


def test_the_plain_kernel_is_the_slow_one():
    shape = OpShape("max_pool2d", ((1, 64, 28, 28),), ((1, 64, 14, 14),), (2, 2), (2, 2))
    plain = TABLE.seconds(OpShape(PLAIN_MAX_POOL, shape.inputs, shape.outputs, (2, 2), (2, 2)), INTEGER)
    assert plain > 5 * max(TABLE.seconds(shape, FLOAT), TABLE.seconds(shape, INTEGER))


def _integer_seconds(forward, monkeypatch):
    """The integer times of the units that `place` builds, by name."""
    problems = []

    def build(*args):
        problems.append(build_problem(*args))
        return problems[-1]

    monkeypatch.setattr(placing, "build_problem", build)
    plan(_traced(forward), {"backend": "onnxruntime", "placement": "fastest"})
    return {unit.name: unit.integer_seconds for unit in problems[0].units}


def test_integers_before_a_pooling_at_the_end_are_slow(monkeypatch):
    plain = TABLE.seconds(
        OpShape(PLAIN_MAX_POOL, ((1, 32, 32, 32),), ((1, 32, 16, 16),), (2, 2), (2, 2)), INTEGER
    )
    slower = (
        _integer_seconds(_ended, monkeypatch)["a_out"] - _integer_seconds(_convolved, monkeypatch)["a_out"]
    )
    assert 0.4 * plain < slower < plain
