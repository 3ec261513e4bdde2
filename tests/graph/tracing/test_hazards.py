"""Every hazard has a planted model whose error must name it, and MegEngine must be usable afterwards."""

from __future__ import annotations

import copy

import megengine as mge
import megengine.functional as F
import megengine.module as M
import numpy as np
import pytest
from megengine.autodiff import Function
from megengine.traced_module.module_tracer import module_tracer

from qtrace.errors import QtraceWarning
from qtrace.graph.tracing.trace import trace
from tests.each import each_of
from tests.graph.planted import (
    GLOBAL,
    IMAGE,
    ROWS,
    Two,
    buffer,
    failure,
    holder,
    net,
    parameter,
    peek,
    write_slice,
)

GLOBAL_PARAMETER = mge.Parameter(np.ones(4, "float32"))


class Static(M.Module):
    @staticmethod
    def forward(x):
        return F.relu(x)


class Straight(Function):
    def forward(self, x):
        return F.round(x)

    def backward(self, grad):
        return grad


class Box:
    def __init__(self, value):
        self.value = value


# 1. Values that were fixed while tracing.


def branch(self, x):
    return F.relu(x) if peek(x.mean()) > 0.5 else F.sigmoid(x)


def item(self, x):
    return x + float(peek(x.max()))


def through_numpy(self, x):
    return x - mge.Tensor(peek(x).mean(axis=0))


@each_of(
    ("forward", "named"),
    [
        (branch, ["F.relu", "F.sigmoid"]),
        (item, ["Tensor.__add__", "it holds"]),
        (through_numpy, ["constant", "computes it from its input"]),
    ],
)
def test_a_fixed_value_names_the_first_expr(forward, named):
    message = failure(holder(net(forward)), np.abs(ROWS) if forward is branch else ROWS)
    assert "other values of the same shape" in message
    assert "in 'body.part'" in message
    assert "`%" in message
    for text in named:
        assert text in message
    trace(holder(net(forward)), ROWS, check=False)  # these are what `check` is for


@pytest.mark.parametrize("sign", [1, -1])
def test_a_branch_is_found_from_either_side(sign):
    def forward(self, x):
        return x * 2 if peek(x.mean()) > 0 else x * 3

    message = failure(net(forward), sign * (ROWS - ROWS.mean() + 0.05))
    assert "it holds" in message
    assert "Tensor.__mul__" in message


def test_a_constant_example_is_varied_too():
    assert "it holds" in failure(net(item), np.zeros((2, 4), "float32"))


def test_integer_examples_are_varied_inside_their_range():
    def forward(self, ids):
        if peek(ids).max() > 6:
            raise ValueError("out of range")
        return F.embedding(ids, self.table) * float(peek(ids)[0, 0])

    message = failure(
        net(forward, table=mge.Parameter(np.eye(7, 3, dtype="float32"))), np.arange(6).reshape(2, 3)
    )
    assert "Tensor.__mul__" in message


# 2. Another batch size.


def test_a_fixed_batch_size_names_the_op():
    def forward(self, x):
        return F.broadcast_to(x[:1] * 2, (int(x.shape[0]), 4))

    message = failure(holder(net(forward)), ROWS)
    assert "another batch size (3 instead of 2)" in message
    assert "If every batch will have 2, trace with check=False" in message
    assert "F.broadcast_to in 'body.part'" in message
    assert "it holds 2 where the module has 3" in message


def test_a_loop_over_the_batch_is_reported():
    def forward(self, x):
        return F.stack([x[i].sum() for i in range(x.shape[0])])

    message = failure(net(forward), ROWS)
    assert "another batch size" in message
    assert "output 0 has shape (2, 1) instead of (3, 1)" in message
    assert "F.stack" in message or "Tensor.__getitem__" in message


def test_a_module_that_refuses_another_batch_is_not_blamed():
    def forward(self, x):
        assert x.shape[0] == 2
        return x.reshape(2, 2, 2)

    trace(net(forward), ROWS)


# 3. Parameters that became constants.


@each_of(
    ("attributes", "forward", "path"),
    [
        ({"gains": [parameter(), parameter()]}, lambda self, x: x * self.gains[1], "part.gains[1]"),
        ({"gains": {"a": parameter()}}, lambda self, x: x * self.gains["a"], "part.gains['a']"),
        ({"box": Box(parameter())}, lambda self, x: x * self.box.value, "part.box.value"),
        ({"stages": [(M.Linear(4, 4), 1)]}, lambda self, x: self.stages[0][0](x), "part.stages[0][0].weight"),
        ({"stages": (M.Linear(4, 4),)}, lambda self, x: self.stages[0](x), "part.stages[0].weight"),
        ({}, lambda self, x: x * GLOBAL_PARAMETER, "a Parameter that is no attribute"),
    ],
)
def test_parameters_in_containers_are_named(attributes, forward, path):
    assert path in failure(holder(net(forward, **attributes)), ROWS, check=False)


def test_running_statistics_in_a_tuple_are_named():
    model = net(lambda self, x: self.parts[0](x), parts=(M.BatchNorm2d(3, affine=False),))
    assert "parts[0].running_mean" in failure(model, IMAGE)


def test_a_parameter_read_as_a_number_is_named():
    def forward(self, x):
        return (
            self.unused(x) * 0 + x * self.scale.numpy().max() if x is None else x * self.scale.numpy().max()
        )

    message = failure(net(forward, scale=parameter(), unused=M.Linear(4, 4)), ROWS)
    assert "'scale'" in message
    assert "unused" not in message


# 4. to 7.


def test_a_custom_function_is_named_with_its_module():
    message = failure(holder(net(lambda self, x: Straight()(x))), ROWS, check=False)
    assert "Straight in submodule 'body.part'" in message


def test_trace_ignores_custom_functions_inside_builtin_modules():
    class Opaque(M.Module):
        def forward(self, x):
            return Straight()(x)

    module_tracer.register_as_builtin(Opaque)
    try:
        assert any(isinstance(m, Opaque) for m in trace(holder(Opaque()), ROWS).modules())
    finally:
        module_tracer._opaque_types.discard(Opaque)


def assign(self, x):
    self.buf = self.buf * 0.9 + x.mean()
    return x + self.buf


def append(self, x):
    self.seen.append(x + 1)
    return x


def add_up(self, x):
    self.seen.append(x.mean())
    return x + sum(self.seen)


@each_of("check", [True, False])
@each_of(
    ("forward", "attributes", "path"),
    [
        (write_slice, {"buf": buffer()}, "'body.part.buf'"),
        (assign, {"buf": buffer()}, "'body.part.buf'"),
        (add_up, {"seen": []}, "'body.part.seen[0]'"),
        (append, {"seen": []}, "'body.part.seen[0]'"),  # from some length on, something may read it
    ],
)
def test_state_updated_in_forward_is_named(forward, attributes, path, check):
    model = holder(net(forward, **attributes))
    message = failure(model, ROWS, check=check)
    assert path in message
    assert "updates its own state" in message


def assign_peak(self, x):
    self.peak = F.maximum(self.peak, x.max())
    return x / self.peak


def assign_floor(self, x):
    self.peak = F.minimum(self.peak, x.min())
    return x - self.peak


def reset_floor(self, x):
    self.peak._reset(F.minimum(self.peak, x.min()))
    return x - self.peak


def reset_peak(self, x):
    self.peak._reset(F.maximum(self.peak, x.max()))
    return x / self.peak


def write_peak(self, x):
    self.peak[...] = F.maximum(self.peak, x.max())
    return x / self.peak


@each_of("initial", [0.0, 1.0])
@each_of("forward", [assign_peak, assign_floor, reset_peak, reset_floor, write_peak])
def test_a_running_maximum_is_named_though_the_example_has_the_largest_value(forward, initial):
    values = ROWS * np.float32(255)
    if forward in (assign_floor, reset_floor):
        values, initial = -values, 1e4 + initial
    model = holder(net(forward, peak=mge.Tensor(np.full(1, initial, np.float32))))
    message = failure(model, values)
    assert "'body.part.peak'" in message
    assert "updates its own state" in message


def keep_scores(self, x):
    self.scores = F.softmax(x, axis=-1)  # as attention layers keep their weights to be looked at
    return F.matmul(self.scores, F.transpose(x, (1, 0)))


def keep_named(self, x):
    if self.seen is not None:
        self.seen["a"] = F.exp(x)
    return x * 2


def keep_and_clear(self, x):
    if self.scores is not None:
        self.scores = None
    self.scores = F.softmax(x, axis=-1)
    return F.matmul(self.scores, F.transpose(x, (1, 0)))


def test_an_attribute_that_is_kept_may_be_read_before_it_is_assigned():
    model = holder(net(keep_and_clear, scores=None))
    with pytest.warns(QtraceWarning, match="keeps values on which"):
        traced = trace(model, ROWS)
    np.testing.assert_allclose(traced(mge.Tensor(ROWS)).numpy(), model(mge.Tensor(ROWS)).numpy(), rtol=1e-6)


def test_a_value_that_another_module_reads_in_the_same_call_is_named():
    inner = net(keep_scores, scores=None)
    message = failure(net(lambda self, x: self.inner(x) + self.inner.scores.sum(), inner=inner), ROWS)
    assert "reads a tensor that a submodule keeps on itself, softmax_out (F.softmax" in message
    assert "return it as an output" in message


@each_of("check", [True, False])
@each_of(("forward", "start"), [(keep_scores, {"scores": None}), (keep_named, {"seen": {}})])
def test_trace_drops_unread_attributes_with_a_warning(forward, start, check):
    model = holder(net(forward, **copy.deepcopy(start)))
    with pytest.warns(
        QtraceWarning, match="keeps values on which the results of other calls do not"
    ) as caught:
        traced = trace(model, ROWS, check=check)
    np.testing.assert_allclose(traced(mge.Tensor(ROWS)).numpy(), model(mge.Tensor(ROWS)).numpy(), rtol=1e-6)
    (message,) = (str(w.message) for w in caught)
    line = forward.__code__.co_firstlineno + 1
    path = "'body.part.scores'" if forward is keep_scores else "\"body.part.seen['a']\""
    place = f"{path} (test_hazards.py:{line})" if forward is keep_scores else path
    assert place in message
    assert "Return what code outside of forward needs as an output" in message
    assert not any(True for _ in traced.named_tensors())


@pytest.mark.parametrize(
    ("forward", "attributes", "has_line"),
    [(write_slice, {"buf": buffer()}, True), (add_up, {"seen": []}, False)],
)
def test_only_an_assignment_has_a_line(forward, attributes, has_line):
    message = failure(holder(net(forward, **attributes)), ROWS)
    assert ("(planted.py:" in message) is has_line
    assert ("(test_hazards.py:" in message) is False


def test_a_cache_that_depends_on_the_shape_only_is_no_state():
    def forward(self, x):
        if self.cache[0] is None or self.cache[0].shape[0] != x.shape[0]:
            self.cache[0] = F.ones((x.shape[0], 1))
        return x + self.cache[0]

    for check in (True, False):
        traced = trace(net(forward, cache=[None]), ROWS, check=check)
        np.testing.assert_array_equal(traced(mge.Tensor(ROWS)).numpy(), ROWS + 1)


def test_two_argument_structures_name_the_submodule():
    inner = net(lambda self, x: self.two(x) + self.two(x, x), two=Two())
    message = failure(holder(inner), ROWS)
    assert "submodule 'body.part.two' is called with two argument structures" in message
    assert "(Module, Tensor, None) and (Module, Tensor, Tensor)" in message


@each_of(
    ("forward", "attributes", "named"),
    [
        (lambda self, x: Box(x), {}, ["'body.part'", "only return Tensors"]),
        (lambda self, x: self.two(Box(x)), {"two": Two()}, ["'body.part.two'", "register_supported_type"]),
        (
            lambda self, x: self.parts[0](x),
            {"parts": [M.ReLU(), 3]},
            ["'body.part'", "container of their own"],
        ),
        (
            lambda self, x: self.call(x, self.fc),
            {"call": net(lambda self, x, part: part(x)), "fc": M.Linear(4, 4)},
            ["as an argument"],
        ),
        (lambda self, x: self.act(x), {"act": Static()}, ["'body.part.act'", "Static.forward is static"]),
        (
            lambda self, x: x * float(np.prod(x.shape)),
            {},
            ["'body.part'", "numpy function", "test_hazards.py:"],
        ),
        (
            lambda self, x: F.reshape(x, (x.shape[0], (x.shape[1] // 2) ** 2)),
            {},
            ["'body.part'", "a power of a size: multiply instead", "test_hazards.py:"],
        ),
        (
            lambda self, x: x * (x.shape[0].tolist()[0] if isinstance(x.shape[0], mge.Tensor) else 2),
            {},
            ["'body.part'", "shapes are Tensors while tracing", "not subscriptable", "test_hazards.py:"],
        ),
    ],
)
def test_tracer_failures_name_the_submodule(forward, attributes, named):
    model = net(forward, **attributes)
    # A box cannot pass through `* 2`: the module above hands it on.
    model = net(lambda self, x: self.body(x), body=net(lambda self, x: self.part(x), part=model))
    message = failure(model, ROWS)
    assert "MegEngine says: " in message
    for text in named:
        assert text in message


def test_an_attribute_read_past_the_look_up_is_named_with_the_way_out():
    model = net(lambda self, x: self.__getattribute__("fc")(x), fc=M.Linear(4, 4))
    message = failure(holder(model), ROWS)
    assert "submodule 'body.part' (test_hazards.py:" in message
    assert "use getattr(self, name)" in message
    trace(holder(net(lambda self, x: getattr(self, "fc")(x), fc=M.Linear(4, 4))), ROWS)  # noqa: B009


def test_where_a_trace_went_wrong_has_its_line():
    line = branch.__code__.co_firstlineno + 1
    message = failure(holder(net(branch)), ROWS)
    assert "in 'body.part', " in message
    assert f"test_hazards.py:{line}): the module runs" in message


def test_a_constant_is_free_again_after_a_failure_deep_inside():
    def forward(self, x):
        y = x * GLOBAL
        return y * float(np.prod(y.shape))

    failure(holder(net(forward)), ROWS)  # traces a model with GLOBAL afterwards


def test_keyword_only_inputs():
    message = failure(net(lambda self, *, x: x), ROWS)
    assert "Net.forward(*, x) cannot be called with 1 example(s) by position" in message


def test_a_module_that_fails_itself():
    message = failure(net(lambda self, x: F.matmul(x, x)), ROWS)
    assert "Net itself fails on the example (test_hazards.py:" in message


def test_what_cannot_be_copied():
    assert "cannot be copied" in failure(net(lambda self, x: x, rows=(i for i in range(3))), ROWS)


def test_examples_of_unknown_types():
    assert "example 1 (Box)" in failure(net(lambda self, x, y: x), ROWS, Box(ROWS))


def test_random_operations_are_named():
    model = net(lambda self, x: F.dropout(x, 0.5, training=True), spare=M.Linear(4, 4))
    message = failure(holder(model), ROWS)
    assert "not deterministic in eval mode" in message
    assert "F.dropout in 'body.part'" in message


def test_a_count_in_a_python_attribute_is_reported():
    def forward(self, x):
        self.steps += 1
        return x * self.steps

    assert "Python attribute" in failure(net(forward, steps=0), ROWS)


def test_hooks_that_change_the_output_are_named():
    model = holder(net(lambda self, x: x + 1))
    model.body.register_forward_hook(lambda module, inputs, outputs: outputs * 2)
    message = failure(model, ROWS)
    assert "forward hooks" in message
    assert "'body'" in message
