"""Models without a hazard trace in silence, and the source stays as it is."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections import OrderedDict

import megengine as mge
import megengine.functional as F
import megengine.module as M
import numpy as np
import pytest
from megengine.traced_module import TracedModule, register_as_builtin

import qtrace
from qtrace.errors import QtraceWarning, TraceError
from qtrace.graph.tracing.trace import trace
from tests.each import each_of
from tests.graph.planted import (
    IMAGE,
    ROWS,
    Two,
    buffer,
    failure,
    holder,
    net,
    parameter,
    use_global,
    write_slice,
)


class Residual(M.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = M.Conv2d(3, 4, 3, padding=1, bias=False)
        self.bn1 = M.BatchNorm2d(4)
        self.stages = [M.Sequential(M.Conv2d(4, 4, 3, padding=1), M.BatchNorm2d(4)) for _ in range(2)]
        self.drop = M.Dropout(0.5)
        self.fc = M.Linear(4, 5)

    def forward(self, x):
        x = F.relu(self.bn1(self.conv1(x)))
        for stage in self.stages:
            x += stage(x)
        return self.fc(self.drop(F.flatten(F.adaptive_avg_pool2d(x, 1), 1)))


def containers(self, pair):
    return OrderedDict(total=pair["a"] + pair["b"][0], parts=[pair["a"], (pair["b"][1],)])


def shapes(self, x):
    n, c, h, w = x.shape
    y = F.vision.interpolate(x, size=(h * 2, w * 2), mode="bilinear", align_corners=False)
    y = y.reshape(n, c, h * w * 4)[:, :, ::2]
    return F.broadcast_to(y.mean(axis=2, keepdims=True), (n, c, h)), F.zeros((n, c)), x[:, 1:, 2, 3:]


def grid(self, x):
    lines = [F.linspace(0, 1 + k, 7) + F.arange(0, 7, 1) for k in range(6)]
    return x.sum() + F.stack(lines)


def not_a_number(self, x):
    return F.log(x - 10), F.maximum(x, 0) / F.maximum(x, 0)


CLEAN = [
    pytest.param(Residual(), (IMAGE,), id="residual"),
    pytest.param(net(containers), ({"a": ROWS, "b": [ROWS * 2, mge.Tensor(ROWS)]},), id="containers"),
    pytest.param(net(shapes), (IMAGE,), id="shapes"),
    pytest.param(net(shapes), (IMAGE[:1],), id="batch-of-one"),
    pytest.param(net(grid), (IMAGE,), id="racing-kernels"),
    pytest.param(net(lambda self, x: self.fc(self.fc(x)), fc=M.Linear(4, 4)), (ROWS,), id="called-twice"),
    pytest.param(net(lambda self, x: self.two(x, x), two=Two()), (ROWS,), id="two-arguments"),
    pytest.param(net(use_global), (ROWS,), id="global-constant"),
    pytest.param(net(lambda self, x: x * 1, spare=M.Linear(4, 4)), (ROWS,), id="unused-parameters"),
    pytest.param(net(lambda self, x: x * self.t[0], t=[buffer() + 3]), (ROWS,), id="tensor-in-a-list"),
    pytest.param(
        net(lambda self, x: F.embedding(x, self.w), w=parameter().reshape(4, 1)),
        (np.array([[3, 0]]),),
        id="ids",
    ),
    pytest.param(net(lambda self, x, flag: x * 2 if flag else x), (ROWS, True), id="plain-argument"),
    pytest.param(net(lambda self: self.w * 2, w=parameter()), (), id="no-input"),
]


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize(("model", "example"), CLEAN)
def test_clean_models_trace_in_silence(model, example, check):
    traced = trace(model, *example, check=check)
    assert isinstance(traced, TracedModule)
    assert not any(m.training for m in traced.modules())


@pytest.mark.parametrize("check", [True, False])
def test_values_that_are_no_numbers_compare_as_equal(check):
    with pytest.warns(QtraceWarning, match="NaN") if check else contextlib.nullcontext():
        assert isinstance(trace(net(not_a_number), ROWS, check=check), TracedModule)


LAYERS = [
    (M.Conv2d(3, 8, 3), IMAGE),
    (M.ConvTranspose2d(3, 4, 2), IMAGE),
    (M.Linear(4, 3), ROWS),
    (M.BatchNorm2d(3), IMAGE),
    (M.ReLU(), ROWS),
    (M.MaxPool2d(2), IMAGE),
    (M.Dropout(0.5), ROWS),
]


@each_of(("layer", "example"), LAYERS, ids=lambda v: type(v).__name__)
def test_one_layer_of_megengine_is_a_model(layer, example):
    kind = type(layer)
    traced = trace(layer, example)
    assert type(layer) is kind
    layer.eval()
    np.testing.assert_array_equal(traced(mge.Tensor(example)), layer(mge.Tensor(example)))
    names = {name for name, _ in layer.named_parameters()}
    assert {name for name, _ in traced.named_parameters()} == names


def test_functions_alone_are_a_model():
    traced = trace(net(lambda self, x: F.relu(x) * 2), ROWS)
    np.testing.assert_array_equal(traced(mge.Tensor(ROWS)), np.maximum(ROWS, 0) * 2)


def test_what_is_no_module_is_reported_where_to_go():
    for root, kind in ((3, "int"), (functools.partial(F.relu), "partial"), (M.ReLU, "the class ReLU")):
        with pytest.raises(TraceError, match=f"can be traced, not {kind}: call it in a function or in"):
            trace(root, ROWS)
    own = type("Own", (M.ReLU,), {"__module__": __name__})
    register_as_builtin(own)
    with pytest.raises(TraceError, match="Own is registered as a builtin.*hold it in a Module of your own"):
        trace(own(), ROWS)


# The source stays as it is.


def test_trace_leaves_the_source_unchanged_and_shares_nothing():
    model = Residual()
    model.train()
    model.stages[1].eval()
    model.drop.training = False
    flags = [m.training for m in model.modules()]
    before = copy.deepcopy(model.state_dict())
    attributes = {k: id(v) for k, v in model.__dict__.items()}
    image = mge.Tensor(IMAGE)
    traced = trace(model, image)
    assert [m.training for m in model.modules()] == flags
    assert {k: id(v) for k, v in model.__dict__.items()} == attributes
    for parameter_ in [*traced.parameters(), *traced.buffers()]:
        parameter_[...] = 7
    after = model.state_dict()
    assert list(after) == list(before)
    for name, value in after.items():
        np.testing.assert_array_equal(value, before[name], err_msg=name)
    np.testing.assert_array_equal(image.numpy(), IMAGE)


def test_the_source_is_untouched_after_an_error():
    model = holder(net(write_slice, buf=buffer()))
    model.body.part.training = False
    failure(model, ROWS)
    assert [m.training for m in model.modules()] == [True, True, False]
    assert not model.body.part.buf.numpy().any()


def test_a_forward_that_writes_into_its_input_leaves_the_example():
    def forward(self, x):
        x[:, 0] = x[:, 0] * 2 + 1
        return x

    example = mge.Tensor(ROWS)
    trace(net(forward), example)
    np.testing.assert_array_equal(example.numpy(), ROWS)


def test_a_traced_module_is_copied():
    traced = trace(Residual(), IMAGE)
    traced.train()
    again = trace(traced)
    assert traced.training
    assert not any(m.training for m in again.modules())
    again.fc.weight[...] = 0
    assert traced.fc.weight.numpy().any()


class _Detector(M.Module):
    """Its forward returns boxes of a class of its own, as public detectors do."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = M.Conv2d(3, 4, 3), M.Conv2d(4, 4, 1)

    def forward(self, image: mge.Tensor) -> mge.Tensor:
        return self.head(self.body(image))

    def maps(self, image: mge.Tensor, scale: float = 2.0) -> dict[str, mge.Tensor]:
        """What a runtime computes."""
        return {"box": self.forward(image) * scale}


def test_a_method_can_be_traced_in_the_place_of_forward() -> None:
    model, x = _Detector(), mge.Tensor(np.random.default_rng(0).normal(size=(2, 3, 8, 8)).astype("f4"))
    traced = qtrace.trace(model, x, method="maps")
    np.testing.assert_array_equal(traced(x)["box"].numpy(), model.maps(x)["box"].numpy())
    assert set(traced.state_dict()) == set(model.state_dict())
    assert type(model) is _Detector
    prepared = qtrace.prepare(traced)
    np.testing.assert_array_equal(prepared(x)["box"].numpy(), model.maps(x)["box"].numpy())
    with pytest.raises(TraceError, match=r"_Detector lacks method 'map'; did you mean 'maps'\?"):
        qtrace.trace(model, x, method="map")
    with pytest.raises(TraceError, match=r"_Detector.maps\(image: .* cannot be called with 0 example"):
        qtrace.trace(model, method="maps")


def test_trace_raises_its_own_errors_unchanged(monkeypatch):
    """Only errors of the module's own forward say that it does not take an input."""
    calls = []

    def key_order(result):
        calls.append(result)
        if len(calls) == 2:
            raise ZeroDivisionError
        return None

    monkeypatch.setattr("qtrace.graph.tracing.session.key_order", key_order)
    with pytest.raises(ZeroDivisionError):
        qtrace.trace(net(lambda self, x: x + 1), np.ones((2, 2), np.float32))
    monkeypatch.setattr("qtrace.graph.tracing.session.key_order", lambda result: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        qtrace.trace(net(lambda self, x: x + 1), np.ones((2, 2), np.float32))


def _cell(self, x, state):
    h, c = state
    c = F.tanh(self.fc(x) + h) + F.sigmoid(c)
    return c * h + c, (c * 0.5, c)


def _recurrent(self, x):
    h = c = F.zeros_like(x)
    for _ in range(3):
        y, (h, c) = self.inner(x, state=(h, c))
        x = x + y
    return x


def _attention(self, query, key=None, value=None):
    return F.matmul(F.softmax(F.matmul(self.fc(query), key, transpose_b=True), -1), value)


TWICE = {
    "positions": (lambda self, a, b: F.relu(self.fc(a)) + b, lambda self, x: self.inner(self.inner(x, x), x)),
    "names": (
        lambda self, a, b: F.relu(self.fc(a)) - b,
        lambda self, x: self.inner(b=x * 2, a=self.inner(a=x, b=x)),
    ),
    "containers": (
        lambda self, d, pair: self.fc(d["a"]) - 2 * d["b"] + pair[0] * pair[1][0],
        lambda self, x: self.inner({"a": self.inner({"a": x, "b": x}, [x, (x,)]), "b": x}, [x + 1, (x * 2,)]),
    ),
    "parameter": (
        lambda self, a, b: self.fc(a) * b,
        lambda self, x: (
            self.inner(x, self.gain) + self.inner(self.gain, self.gain) + self.inner(self.gain, x)
        ),
    ),
    "states": (_cell, _recurrent),
    "attention": (
        _attention,
        lambda self, x: self.inner(self.inner(x, key=x, value=x), key=x + 1, value=x * 2),
    ),
}


@each_of("depth", [1, 2])
@each_of("case", TWICE)
def test_a_module_may_read_one_tensor_several_times_and_others_later(case, depth):
    inner, outer = TWICE[case]
    module = net(outer, inner=net(inner, fc=M.Linear(4, 4)), gain=mge.Parameter(ROWS[0]))
    if depth == 2:
        module = net(lambda self, x: self.outer(x) + self.outer(x * 2), outer=module)
    traced, x = trace(module, ROWS), mge.Tensor(ROWS[::-1] + 1)
    np.testing.assert_allclose(traced(x), module(x), atol=1e-5)
    np.testing.assert_allclose(qtrace.graph.flatten(traced)(x), module(x), atol=1e-5)
