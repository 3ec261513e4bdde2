"""Every op of the survey has a rule: its kind, its role and the inputs that carry activations."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import megengine as mge
import megengine.functional as F
import megengine.module as M
import numpy as np
import pytest

import qtrace
from qtrace import ops
from qtrace.graph.flatten import flatten
from qtrace.graph.lint import lint
from qtrace.graph.types import Apply, CallFunction, CallMethod, Expr, TracedModule, is_call_module
from qtrace.graph.walk import exprs
from qtrace.ops import OpCall, Role
from qtrace.ops.arguments import Arguments, UnreadableError
from qtrace.ops.base import Reading
from qtrace.preparation.passes.expand import expand
from tests.each import each_of
from tests.nets import images, net
from tests.ops.cases import CASES, IMAGE, KERNELS, SIBLINGS, Case


def _flat(module: M.Module, *inputs: np.ndarray) -> TracedModule:
    return flatten(qtrace.trace(module, *inputs, check=False))


def _described(call: OpCall | None) -> str:
    if call is None:
        return "no rule"
    return " ".join([call.kind, call.role.value, *(n.name for n in call.inputs)])


def _label(expr: Expr) -> str:
    """What an expr calls, as the survey writes it."""
    if isinstance(expr, CallFunction):
        return f"fn:F.{expr.func.__module__.rpartition('.')[2]}.{expr.func.__name__}"
    if isinstance(expr, CallMethod):
        return f"mod:{expr.inputs[0].module_type.__name__}" if is_call_module(expr) else f"tm:{expr.method}"
    return f"apply:{expr.opdef}" if isinstance(expr, Apply) else ""


def _check(case: Case, label: str = "") -> None:
    """The case calls its op, is read as expected, and is the same to the bit after expansion."""
    traced = _flat(case.module, case.x)
    assert not label or label in {_label(e) for e in exprs(traced)}, "the case does not call its op"
    names = [n for n, _ in traced.named_parameters()]
    before = _values(traced(mge.Tensor(case.x)))
    expand(traced)
    found = [_described(ops.read(e)) for e in exprs(traced)]
    assert set(case.expected) <= set(found), found
    assert [n for n, _ in traced.named_parameters()] == names
    for old, new in zip(before, _values(traced(mge.Tensor(case.x))), strict=True):
        np.testing.assert_array_equal(old, new)


@each_of("op", CASES)
def test_an_op_of_the_survey_has_its_rule(op: str) -> None:
    _check(CASES[op], op)


@each_of("op", SIBLINGS)
def test_a_sibling_has_the_same_rule(op: str) -> None:
    _check(SIBLINGS[op])


@each_of("kernel", KERNELS)
def test_a_kernel_has_the_rule_of_its_function(kernel: str) -> None:
    _check(KERNELS[kernel], f"apply:{kernel}")


@pytest.mark.parametrize("op", ["mod:Elemwise:FUSE_ADD_RELU", "mod:ConvRelu2d"])
def test_expansion_leaves_nothing_behind_that_no_expr_reads(op: str) -> None:
    case = {**CASES, **SIBLINGS}[op]
    traced = _flat(case.module, case.x)
    expand(traced)
    assert lint(traced) == []


def test_the_kernel_where_becomes_its_function_which_files_can_hold(tmp_path: Path) -> None:
    case = KERNELS["Where"]
    prepared = qtrace.prepare(qtrace.trace(case.module, case.x))
    qtrace.calibrate(prepared, [case.x], progress=False)
    qtrace.save(prepared, tmp_path / "m.mge")
    want = prepared(mge.Tensor(case.x)).numpy()
    np.testing.assert_array_equal(qtrace.load(tmp_path / "m.mge")(mge.Tensor(case.x)).numpy(), want)
    qtrace.set_phase(prepared, "float")
    np.testing.assert_array_equal(prepared(mge.Tensor(case.x)).numpy(), case.x)


def _values(result: object) -> list[np.ndarray]:
    if isinstance(result, (tuple, list)):
        return [v for part in result for v in _values(part)]
    return [result.numpy()]  # type: ignore[attr-defined]


def test_no_rule_is_without_a_reason() -> None:
    for rule in ops.rules():
        if rule.role in (Role.FLOAT, Role.SHAPE):
            assert len(rule.reason) > 10, rule.kind


def test_rules_say_where_they_stand() -> None:
    for rule in ops.rules():
        assert re.fullmatch(r"qtrace/ops/\w+\.py:\d+", rule.source), rule.kind


def test_scalars_and_their_side() -> None:
    module = net(lambda self, x: (2.0 * x, x - 1, F.maximum(0.5, x), 3 - x, x / np.float32(4.0)))
    calls = [ops.read(e) for e in exprs(_flat(module, IMAGE))]
    found = [(c.kind, c.attrs["scalar"], c.attrs["side"]) for c in calls if c is not None]
    assert found == [
        ("mul", 2.0, "left"),
        ("sub", 1.0, "right"),
        ("maximum", 0.5, "left"),
        ("sub", 3.0, "left"),
        ("div", 4.0, "right"),
    ]
    assert all(len(c.inputs) == 1 for c in calls if c is not None)


def test_an_array_is_an_operand_and_no_scalar() -> None:
    row = np.arange(8, dtype=np.float32)
    (call,) = [ops.read(e) for e in exprs(_flat(net(lambda self, x: x - row), IMAGE))]
    assert call is not None
    assert "scalar" not in call.attrs
    np.testing.assert_array_equal(call.attrs["operands"][1], row)


def test_integers_are_shape_arithmetic_by_their_type() -> None:
    module = net(lambda self, x: x.reshape(x.shape[0], -1, (x.shape[2] + 2) * x.shape[3] // 2 - x.shape[3]))
    calls = [ops.read(e) for e in exprs(_flat(module, IMAGE))]
    assert all(c is not None for c in calls)
    *arithmetic, reshape = [c for c in calls if c is not None]
    assert {c.role for c in arithmetic} == {Role.SHAPE}
    assert {c.reason for c in arithmetic} == {"integer or shape arithmetic"}
    assert reshape.role is Role.CARRY


ODD = {
    "a norm by batch statistics": lambda x: F.nn.batch_norm(x, training=True),
    "a size computed from values": lambda x: F.adaptive_avg_pool2d(
        x, F.broadcast_to((x.mean() * 0 + 2).astype("int32"), (2,))
    ),
}


@pytest.mark.parametrize("form", ODD)
def test_an_odd_form_has_a_reason_and_no_error(form: str) -> None:
    function = ODD[form]
    *_, expr = exprs(_flat(net(lambda self, x: function(x)), IMAGE))
    assert ops.read(expr) is None
    assert len(ops.unsupported(expr)) > 10


def test_a_module_changed_after_tracing_has_a_reason_and_no_error() -> None:
    traced = _flat(net(lambda self, x: self.m(x), m=M.AvgPool2d(2)), IMAGE)
    *_, expr = exprs(traced)
    expr.inputs[0].owner.padding = None
    assert ops.read(expr) is None
    assert "does not read" in ops.unsupported(expr)


UNREADABLE = {
    "an axis computed from a shape": (
        lambda x: F.concat([x, x], axis=x.shape[0] - 1),
        "its axis is computed",
    ),
    "a first axis computed from a shape": (lambda x: F.flatten(x, x.shape[0] * 0 + 1), "its start_axis is"),
    "a slope computed from values": (lambda x: F.leaky_relu(x, x.mean()), "its negative_slope is computed"),
    "three strides of two axes": (
        lambda x: F.conv2d(x, F.ones((4, 4, 3, 3)), stride=(2, 2, 2)),
        r"its stride is \(2, 2, 2\), which its rule does not read as 2 integers",
    ),
    "a tensor in place of a list": (lambda x: F.concat(x), "it joins the parts of one tensor"),
}


@each_of("form", UNREADABLE)
def test_a_form_that_cannot_be_read_stays_float_with_its_reason(form: str) -> None:
    function, reason = UNREADABLE[form]
    prepared = qtrace.prepare(qtrace.trace(net(lambda self, x: function(x)), IMAGE, check=False))
    (note,) = [n for n in qtrace.explain(prepared).annotation.notes if re.search(reason, n.reason)]
    assert note.state == "float"


def test_a_kernel_whose_arguments_have_no_names_has_a_reason() -> None:
    hidden = F.argmax  # a function that the tracer does not see leaves its kernel
    traced = _flat(net(lambda self, x: hidden(x, 1)), IMAGE)
    (expr,) = [e for e in exprs(traced) if _label(e) == "apply:Argmax"]
    assert ops.unsupported(expr) == "its arguments belong to a kernel, which are not read"


BUGS = [TypeError, ValueError, KeyError, AttributeError, AssertionError]


@each_of("bug", BUGS)
def test_a_bug_in_a_rule_surfaces_with_its_traceback_and_the_node(
    bug: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(expr: Expr) -> Reading:
        raise bug("planted")

    (rule,) = [rule for rule in ops.rules() if rule.kind == "relu"]
    planted = dict.fromkeys(rule.targets, dataclasses.replace(rule, read=read))
    monkeypatch.setattr(ops, "_rules_by_target", lambda: planted)
    with pytest.raises(RuntimeError, match=r"the rule of relu .* fails at relu_out") as caught:
        qtrace.prepare(qtrace.trace(net(lambda self, x: F.relu(x)), IMAGE))
    assert isinstance(caught.value.__cause__, bug)


def test_a_name_that_a_call_does_not_have_is_a_bug_of_the_rule() -> None:
    with pytest.raises(KeyError):
        Arguments(axis=1).integer("axes")


@each_of("value", [None, "a", float("inf"), [1, [2]], (1, 2, 3), {}, 1j])
def test_what_is_no_pair_of_integers_is_refused_in_one_line(value: object) -> None:
    with pytest.raises(UnreadableError, match=r"^its n is .{1,80}, which its rule does not read as 2 integ"):
        Arguments(n=value).integers("n", 2)


@each_of(("value", "pair"), [(3, (3, 3)), ((1, 2), (1, 2)), ([np.int64(4), True], (4, 1))])
def test_one_number_stands_for_a_pair_of_integers(value: object, pair: tuple[int, int]) -> None:
    assert Arguments(n=value).integers("n", 2) == pair


def test_convolutions_say_where_their_channels_are() -> None:
    for layer, axes in (
        (M.Conv2d(4, 8, 3), (0,)),
        (M.Conv2d(4, 8, 3, groups=2), (0, 1)),
        (M.ConvTranspose2d(4, 8, 3), (1,)),
        (M.ConvTranspose2d(4, 8, 3, groups=2), (0, 2)),
    ):
        traced = _flat(net(lambda self, x: self.m(x), m=layer), IMAGE)
        expand(traced)
        call = ops.read(exprs(traced)[-1])
        assert call is not None
        assert call.channel_axes == axes
        assert np.prod([call.weight.shape[a] for a in axes]) == 8  # type: ignore[union-attr]


def test_setitem_survives_preparation_conversion_and_saving(tmp_path: object) -> None:
    case = CASES["tm:__setitem__"]
    conv = M.Conv2d(4, 4, 3, padding=1)
    module = net(
        lambda self, x: self.after(self.inner(self.before(x))), inner=case.module, before=conv, after=conv
    )
    x = images(2, 4, 8, 8)
    traced = qtrace.trace(module, x)
    prepared = qtrace.prepare(traced)
    np.testing.assert_array_equal(prepared(mge.Tensor(x)).numpy(), traced(mge.Tensor(x)).numpy())
    converted = qtrace.convert(qtrace.calibrate(prepared, [x], progress=False))
    first = converted(mge.Tensor(x)).numpy()
    path = f"{tmp_path}/m.tm"
    qtrace.save(converted, path)
    np.testing.assert_array_equal(qtrace.load(path)(mge.Tensor(x)).numpy(), first)
