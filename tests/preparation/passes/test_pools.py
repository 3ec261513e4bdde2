"""The times of max pooling: on integers fast with the channels last, slow in the plain layout."""

from __future__ import annotations

import itertools
import math

import megengine.functional as F
import megengine.module as M
import onnx
import onnxruntime
import pytest

import qtrace
from qtrace.benchmarking.prediction import predict, read_graph
from qtrace.costs import FLOAT, INTEGER, PLAIN_MAX_POOL, CostTable, OpShape
from qtrace.preparation.passes import _problem as problems
from qtrace.preparation.passes import place as placing
from qtrace.preparation.passes._problem import PoolTimes, add_pools, build_problem, time_pools
from qtrace.preparation.placement.labelling import Layouts, Problem, Tensor, Unit, evaluate
from qtrace.preparation.prepare import plan
from tests.benchmarking.onnx_net import Net
from tests.each import each_of
from tests.nets import images, net

TABLE = CostTable.load("onnxruntime")
X = images(1, 8, 32, 32)


def _problem(loss: float, count: int = 1) -> tuple[Problem, Problem]:
    readers = tuple(f"r{i}" for i in range(count))
    units = tuple(Unit(name, 1.0, 1.0) for name in ("p", *readers))
    tensors = (Tensor("t", "p", readers, 0.0, 0.0, layouts=Layouts()),)
    problem = Problem(units, tensors)
    return problem, add_pools(problem, {"t": PoolTimes(2.0, 2.0 + loss)})


@each_of(("before", "behind"), list(itertools.product([False, True], repeat=2)))
def test_a_pooling_is_on_integers_if_the_op_before_it_is(before, behind):
    problem, with_pool = _problem(loss=6.0)
    named = {"p": before, "r0": behind}
    added = evaluate(with_pool, named).seconds - evaluate(problem, named).seconds
    assert math.isclose(added, 8.0 if before else 2.0)


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


def _summed(self, x):
    y = F.relu(self.a(x))
    return F.max_pool2d(y + F.sigmoid(y), 2)


def _pooled_input(self, x):
    return self.a(F.max_pool2d(x, 2))


# A network -> whether its pooling reads integers of a convolution, integers in the plain layout, or floats.
POOLED = {_convolved: "last", _ended: "last", _summed: "plain", _pooled_input: "float"}


def _quantized(forward):
    prepared = qtrace.prepare(_traced(forward), {"backend": "onnxruntime", "placement": "everything"})
    return qtrace.convert(qtrace.calibrate(prepared, [X], progress=False))


@pytest.mark.parametrize("forward", POOLED)
def test_both_predictors_know_which_kernel_runs(forward, tmp_path, monkeypatch):
    path = qtrace.export(_quantized(forward), tmp_path / "net.onnx")
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # the optimized file is for this machine
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    nodes = onnx.load(options.optimized_model_filepath).graph.node
    rounded = {name for n in nodes if n.op_type.startswith("Q") for name in n.output}
    (pool,) = (n for n in nodes if n.op_type.endswith("MaxPool"))
    plain = "plain" if pool.input[0] in rounded else "float"
    assert ("last" if pool.op_type == "NhwcMaxPool" else plain) == POOLED[forward]
    taken = _pool_times(forward, monkeypatch)
    slow = taken.integer_seconds > 5 * taken.float_seconds
    assert slow == (POOLED[forward] == "plain")


def _overlapping(self, x):
    return self.b(F.max_pool2d(F.relu(self.a(x)), 5, 1, 2))


def test_a_pooling_costs_what_its_window_takes(monkeypatch):
    op = OpShape("max_pool2d", ((1, 32, 32, 32),), ((1, 32, 32, 32),), (5, 5), (1, 1))
    assert _pool_times(_overlapping, monkeypatch) == PoolTimes(
        TABLE.seconds(op, FLOAT), TABLE.seconds(op, INTEGER)
    )


@pytest.mark.parametrize(("forward", "kind"), [(_convolved, "max_pool2d"), (_ended, "max_pool2d")])
def test_the_file_predictor_knows_the_channels_last(forward, kind, tmp_path):
    path = qtrace.export(_quantized(forward), tmp_path / "net.onnx")
    name = onnx.load(path).graph.input[0].name
    kinds = {op.kind for op in predict(read_graph(path, {name: X.shape}), TABLE).ops}
    assert kind in kinds
    assert PLAIN_MAX_POOL not in kinds


@pytest.mark.parametrize("held", [False, True])
def test_the_file_predictor_knows_a_rounding_that_is_moved_to_the_front(held, tmp_path):
    net = Net()
    pooled = net.node("MaxPool", [net.node("Relu", [net.input(X.shape)])], kernel_shape=[2, 2])
    path = tmp_path / "net.onnx"
    path.write_bytes(net.serialize(net.quantize(net.node("Max", [pooled]) if held else pooled)))
    kinds = {op.kind for op in predict(read_graph(path), TABLE).ops}
    assert (PLAIN_MAX_POOL in kinds) != held


def test_the_plain_kernel_is_the_slow_one():
    shape = OpShape("max_pool2d", ((1, 64, 28, 28),), ((1, 64, 14, 14),), (2, 2), (2, 2))
    plain = TABLE.seconds(OpShape(PLAIN_MAX_POOL, shape.inputs, shape.outputs, (2, 2), (2, 2)), INTEGER)
    assert plain > 5 * max(TABLE.seconds(shape, FLOAT), TABLE.seconds(shape, INTEGER))


def _pool_times(forward, monkeypatch):
    """The times that `place` takes for the pooling of a network."""
    times = []
    monkeypatch.setattr(problems, "time_pools", lambda *a: times.append(time_pools(*a)) or times[-1])
    _integer_seconds(forward, monkeypatch)
    (taken,) = {t for t in times if t != PoolTimes()}
    return taken


def _integer_seconds(forward, monkeypatch):
    """The integer times of the units that `place` builds, by name."""
    built = []

    def build(*args):
        built.append(build_problem(*args))
        return built[-1]

    monkeypatch.setattr(placing, "build_problem", build)
    plan(_traced(forward), {"backend": "onnxruntime", "placement": "fastest"})
    return {unit.name: unit.integer_seconds for unit in built[0].units}
