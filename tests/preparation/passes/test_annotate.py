"""Annotate: which tensors become sites, with which scheme, and the reasons for the rest."""

from __future__ import annotations

from typing import Any

import megengine as mge
import megengine.functional as F
import megengine.module as M
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import qtrace
from qtrace.config import QConfig
from qtrace.errors import CalibrationError, ConfigError
from qtrace.graph.failures import from_json
from qtrace.preparation.annotation import Annotation, ExprNote, Site
from qtrace.preparation.model import fake_quants
from qtrace.preparation.prepare import plan
from tests.each import each_of
from tests.nets import ResNet, images, net, randomize

X = images(2, 4, 8, 8)


def _conv(outside: int = 4, **options: Any) -> M.Conv2d:
    return M.Conv2d(4, outside, 3, padding=1, **options)


def _plan(module: M.Module, x: np.ndarray = X, **config: Any) -> Annotation:
    return plan(qtrace.trace(module, x, check=False), QConfig(**config))


def _sites(annotation: Annotation, sort: str = "activation") -> dict[str, Site]:
    return {s.name: s for s in annotation.sites if s.sort == sort}


def _note(annotation: Annotation, name: str) -> ExprNote:
    return next(n for n in annotation.notes if n.name == name)


def test_conv_bn_relu_has_no_site_inside() -> None:
    module = net(lambda self, x: F.relu(self.bn(self.c(x))), c=_conv(), bn=M.BatchNorm2d(4))
    annotation = _plan(module)
    assert set(_sites(annotation)) == {"x", "relu_out"}
    assert set(_sites(annotation, "weight")) == {"c_weight"}
    assert set(_sites(annotation, "bias")) == {"c_bias"}
    assert _note(annotation, "relu_out").into == "c_out"


def test_add_relu_is_one_and_both_branches_are_sites() -> None:
    module = net(lambda self, x: F.relu(self.a(x) + self.b(x)), a=_conv(), b=_conv())
    annotation = _plan(module)
    assert set(_sites(annotation)) == {"x", "a_out", "b_out", "relu_out"}
    assert _note(annotation, "relu_out").state == "fused"


def test_activation_whose_producer_is_read_elsewhere_is_not_fused() -> None:
    module = net(lambda self, x: (lambda y: self.b(F.relu(y)) + y)(self.a(x)), a=_conv(), b=_conv())
    annotation = _plan(module)
    assert {"a_out", "relu_out"} <= set(_sites(annotation))
    assert _note(annotation, "relu_out").state == "int"


def test_moves_carry_the_parameters_of_their_input() -> None:
    module = net(
        lambda self, x: self.fc(F.flatten(F.max_pool2d(self.c(x), 2), 1)), c=_conv(), fc=M.Linear(64, 3)
    )
    annotation = _plan(module)
    assert set(_sites(annotation)) == {"x", "c_out", "fc_out"}
    assert annotation.carried == {"max_pool2d_out": "c_out", "flatten_out": "c_out"}
    assert [_note(annotation, n).state for n in ("max_pool2d_out", "flatten_out")] == ["carried", "carried"]
    assert _note(annotation, "fc_out").inputs == ("c_out",)


def test_moves_before_the_first_op_put_the_site_on_the_input() -> None:
    annotation = _plan(net(lambda self, x: self.fc(F.flatten(x, 1)), fc=M.Linear(256, 3)))
    assert set(_sites(annotation)) == {"x", "fc_out"}
    assert annotation.carried == {"flatten_out": "x"}


def _pooled(before: Any) -> M.Module:
    """A pooled map that a convolution reads on integers and exp in float."""

    def forward(self: M.Module, x: mge.Tensor) -> mge.Tensor:
        y = F.max_pool2d(before(self, x), 2)
        return self.b(y.transpose(0, 1, 3, 2)) + F.exp(y)

    return net(forward, a=_conv(), b=_conv())


def test_a_move_does_not_round_what_another_reads_in_float() -> None:
    annotation = _plan(_pooled(lambda self, x: F.sin(x)))
    pooled = "max_pool2d_out__transpose_out"  # behind the pooling, before what only the convolution reads
    assert set(_sites(annotation)) == {pooled, "b_out", "exp_out", "add_out"}
    assert _note(annotation, "max_pool2d_out").state == "float"
    assert _note(annotation, "exp_out").inputs == ("",)


def test_a_move_of_what_is_rounded_anyway_rounds_nothing_a_second_time() -> None:
    """The reader's wish is met where the value becomes integers, although another reads it in float."""
    module = _pooled(lambda self, x: self.a(x))
    annotation = _plan(module, rules=[{"match": {"name": "b"}, "activation": {"bits": 4}}])
    sites = _sites(annotation)
    assert set(sites) == {"x", "a_out", "b_out", "exp_out", "add_out"}
    assert sites["a_out"].plan.scheme.bits == 4


def test_readers_that_differ_get_sites_of_their_own() -> None:
    module = net(lambda self, x: self.b(self.a(x)) + self.c(self.a(x)), a=_conv(), b=_conv(), c=_conv())
    module = net(
        lambda self, x: (lambda y: self.b(y) + self.c(y))(self.a(x)), a=_conv(), b=_conv(), c=_conv()
    )
    annotation = _plan(module, rules=[{"match": {"name": "c"}, "activation": {"bits": 4}}])
    sites = _sites(annotation)
    assert sites["a_out__b_out"].consumers == ("b_out",)
    assert sites["a_out__c_out"].consumers == ("c_out",)
    assert sites["a_out__b_out"].plan.scheme.bits == 8
    assert sites["a_out__c_out"].plan.scheme.bits == 4
    assert "a_out" not in sites
    assert _note(annotation, "a_out").reason.startswith("its readers ask for different parameters")


def test_a_weight_used_twice_is_one_site_and_biases_follow_their_inputs() -> None:
    module = net(lambda self, x: self.c(F.relu(self.c(x))), c=_conv())
    annotation = _plan(module)
    (weight,) = _sites(annotation, "weight").values()
    assert len(weight.consumers) == 2
    biases = _sites(annotation, "bias").values()
    assert len(biases) == 2
    assert {b.activation for b in biases} == {"x", "relu_out"}
    assert {b.weight for b in biases} == {weight.name}


def test_an_op_without_a_rule_stays_float_with_its_reason() -> None:
    resize = F.vision.interpolate  # the tracer does not see a function kept in a variable, only its kernel
    module = net(lambda self, x: self.b(resize(self.a(x), (4, 4))), a=_conv(), b=_conv())
    annotation = _plan(module)
    note = next(n for n in annotation.notes if n.op == "Resize")
    assert (note.state, note.reason) == ("float", "no rule for this op")
    assert _note(annotation, "b_out").state == "int"


def test_config_can_keep_ops_in_float_and_explain_says_where() -> None:
    module = net(lambda self, x: self.b(self.a(x)), a=_conv(), b=_conv())
    annotation = _plan(module, rules=[{"match": {"name": "b"}, "quantize": False}])
    note = _note(annotation, "b_out")
    assert note.state == "float"
    assert note.reason == "rules[0] says quantize: false"
    assert set(_sites(annotation)) == {"x", "a_out"}
    assert set(_sites(annotation, "weight")) == {"a_weight"}


def test_float_ops_read_the_quantized_value_and_later_ops_quantize_again() -> None:
    module = net(lambda self, x: self.b(F.exp(self.a(x))), a=_conv(), b=_conv())
    annotation = _plan(module)
    assert _note(annotation, "exp_out").state == "float"
    assert set(_sites(annotation)) == {"x", "a_out", "exp_out", "b_out"}


def test_shapes_and_integers_are_never_sites() -> None:
    module = net(lambda self, x: self.c(x).reshape(x.shape[0], x.shape[1] * 2, -1), c=_conv())
    annotation = _plan(module)
    assert set(_sites(annotation)) == {"x", "c_out"}
    assert all(n.reason == "integer or shape arithmetic" for n in annotation.notes if n.op == "GetVarShape")


def test_megengine_backend_ties_concat_and_is_per_tensor_symmetric() -> None:
    module = net(lambda self, x: F.concat([self.a(x), self.b(x)], 1), a=_conv(), b=_conv())
    annotation = _plan(module, backend="megengine")
    groups = {s.group for n, s in _sites(annotation).items() if n != "x"}
    assert len(groups) == 1
    assert annotation.carried["concat_out"] in groups
    for site in annotation.sites:
        if site.plan is not None:
            scheme = site.plan.scheme
            assert (scheme.symmetric, scheme.per_channel, scheme.rounding) == (True, False, "half_away")
    untied = _plan(module)
    assert {s.group for s in _sites(untied).values()} >= {"a_out", "b_out", "concat_out"}


@each_of(
    ("match", "expected"),
    [
        ({"op": "conv2d"}, {"first", "dw", "last"}),
        ({"op": "conv2d", "depthwise": True}, {"dw"}),
        ({"op": "conv2d", "depthwise": False}, {"first", "last"}),
        ({"position": "first"}, {"first"}),
        ({"position": "last"}, {"last"}),
        ({"before_output": True, "op": "conv2d"}, {"last"}),
        ({"name": "f*"}, {"first"}),
        ({"name": ["dw", "last_out"]}, {"dw", "last"}),
        ({"subgraph": {"from": "relu_out", "to": "last_out"}, "op": "conv2d"}, {"dw", "last"}),
        ({}, {"first", "dw", "last"}),
    ],
)
def test_rules_select_sites_by_every_key(match: dict[str, Any], expected: set[str]) -> None:
    module = net(
        lambda self, x: self.last(self.dw(F.relu(self.first(x)))),
        first=_conv(),
        dw=_conv(groups=4),
        last=_conv(),
    )
    annotation = _plan(module, rules=[{"match": match, "weight": {"bits": 5}}])
    chosen = {n for n, s in _sites(annotation, "weight").items() if s.plan.scheme.bits == 5}
    assert chosen == {f"{e}_weight" for e in expected}


def test_later_rules_win() -> None:
    rules = [{"match": {}, "weight": {"bits": 4}}, {"match": {"name": "b"}, "weight": {"bits": 6}}]
    module = net(lambda self, x: self.b(self.a(x)), a=_conv(), b=_conv())
    annotation = _plan(module, rules=rules)
    bits = {n: s.plan.scheme.bits for n, s in _sites(annotation, "weight").items()}
    assert bits == {"a_weight": 4, "b_weight": 6}
    assert _note(annotation, "b_out").matched == ("rules[0]", "rules[1]")


@each_of(
    ("config", "message"),
    [
        (
            {"rules": [{"match": {"op": "conv_transpose2d"}, "quantize": False}]},
            r"rules\[0\]: .*matches no op",
        ),
        (
            {"rules": [{"match": {"op": "convolution"}, "quantize": False}]},
            r"rules\[0\]: unknown op 'convolution'",
        ),
        (
            {"rules": [{"match": {}, "activation": {"bits": 3}}]},
            r"rules\[0\]: backend onnxruntime cannot run .*3 bits",
        ),
        ({"backend": "megengine", "weight": {"axis": 0}}, "backend megengine cannot run weight scheme"),
        ({"activation": {"rounding": "half_away"}}, "rounds half_even"),
        ({"observers": {"activation": {"mse": {"binz": 64}}}}, "QConfig: .*binz"),
        ({"rules": [{"match": {}, "observers": {"weight": {"minmax": {"a": 1}}}}]}, r"rules\[0\]: .*'a'"),
        ({"fakequant": {"lsq": {"a": 1}}}, "QConfig: unknown key 'a' in lsq"),
        ({"fakequant": "lsq", "weight": {"power_of_two": True}}, "QConfig: .*powers of two"),
        ({"rules": [{"match": {"subgraph": {"from": "x", "to": "y"}}, "quantize": False}]}, "node 'y'"),
    ],
)
def test_wrong_configs_are_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _plan(net(lambda self, x: self.c(x), c=_conv()), **config)


def test_annotate_is_deterministic_and_survives_json() -> None:
    x = images(1, 3, 32, 32)
    traced = qtrace.trace(randomize(ResNet(4, (1, 1))), x, check=False)
    first, second = plan(traced), plan(traced)
    assert first == second
    assert from_json(Annotation, first.to_json()) == first


@settings(max_examples=15, deadline=None)
@given(
    st.lists(
        st.sampled_from(["conv", "relu", "pool", "add", "mul", "flatten_back", "exp", "cat"]), max_size=7
    )
)
def test_any_graph_of_ops_prepares_and_computes_the_same_in_float(ops: list[str]) -> None:
    def forward(self: M.Module, x: mge.Tensor) -> mge.Tensor:
        for index, op in enumerate(ops):
            if op == "conv":
                x = getattr(self, f"c{index}")(x)
            elif op == "relu":
                x = F.relu(x)
            elif op == "pool":
                x = F.max_pool2d(x, 3, 1, 1)
            elif op == "add":
                x = x + F.relu(x)
            elif op == "mul":
                x = x * F.sigmoid(x)
            elif op == "flatten_back":
                x = F.flatten(x, 1).reshape(-1, 4, 8, 8)
            elif op == "exp":
                x = F.exp(-x * x)
            else:
                x = F.concat([x[:, :2], x[:, 2:]], 1)
        return x * 1.0

    module = net(forward, **{f"c{i}": _conv() for i in range(len(ops))})
    traced = qtrace.trace(module, X, check=False)
    prepared = qtrace.prepare(traced)
    # A composite in one op rounds float32 in another order; without one the bits are equal.
    tolerance = 1e-5 if "mul" in ops else 0.0
    expected = traced(mge.Tensor(X)).numpy()
    np.testing.assert_allclose(prepared(mge.Tensor(X)).numpy(), expected, rtol=tolerance, atol=tolerance)
    if not list(fake_quants(prepared)):
        with pytest.raises(CalibrationError, match="lacks sites"):
            qtrace.calibrate(prepared, [X], progress=False)
        return
    qtrace.calibrate(prepared, [X], progress=False)
    converted = qtrace.convert(prepared)
    np.testing.assert_array_equal(converted(mge.Tensor(X)).numpy(), prepared(mge.Tensor(X)).numpy())
