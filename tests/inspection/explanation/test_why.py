"""explain --why: the story of an op, an input, a site or a module."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import megengine as mge
import megengine.functional as F
import megengine.module as M
import numpy as np
import pytest

import qtrace
from qtrace.config import QConfig
from qtrace.errors import GraphError
from qtrace.inspection.explanation import Explanation
from tests.nets import images, net

X = images(2, 4, 8, 8)


def _conv(outside: int = 4, **options: Any) -> M.Conv2d:
    return M.Conv2d(4, outside, 3, padding=1, **options)


def _explain(module: M.Module, rules: list[dict[str, Any]] | None = None, **config: Any) -> Explanation:
    return qtrace.explain(qtrace.trace(module, X, check=False), QConfig(rules=rules or [], **config))


def _story(explanation: Explanation, name: str) -> dict[str, list[str]]:
    (story,) = explanation.why(name)
    assert story.title == name
    return {heading: list(told) for heading, told in story.parts.items()}


def _text(explanation: Explanation, name: str) -> str:
    (story,) = explanation.why(name)
    return story.text(None)


def _chain() -> M.Module:
    def forward(self: M.Module, x: mge.Tensor) -> mge.Tensor:
        y = F.max_pool2d(F.relu(self.a(x)), 2)
        return self.b(F.flatten(F.softmax(y, axis=1), 1))

    return net(forward, a=_conv(), b=M.Linear(64, 3))


def test_a_layer() -> None:
    story = _story(_explain(_chain()), "a_out")
    assert story["What"][0] == "conv2d: a call of F.conv2d in the code of module a."
    assert "Op rule qtrace/ops/layers.py:" in story["What"][1]
    assert "its role is compute" in story["What"][1]
    assert "18,432 multiplications" in story["What"][2]
    assert story["State"] == [
        "It is computed on integers, as one kernel with relu_out (relu): nothing is rounded in between."
    ]
    plan = "uint8 affine, observer mse, fake quant fixed."
    assert story["Reads"] == [f"x, rounded at site x: {plan}"]
    weight, bias = story["Weight"]
    assert weight.startswith(
        "a_weight, rounded at site a_weight: int8 sym per-channel(0) narrow, observer minmax"
    )
    assert bias == "Bias a_bias: int32 at the scale of x times that of a_weight."
    assert story["Result"] == ["No site: it lies inside of the kernel."]
    assert story["Readers"] == ["relu_out (relu) is part of the kernel and asks for nothing."]


def test_a_fused_and_a_carried_op() -> None:
    explanation = _explain(_chain(), [{"match": {"op": "softmax"}, "quantize": True}])
    fused, carried = _story(explanation, "relu_out"), _story(explanation, "max_pool2d_out")
    assert fused["State"] == ["It is fused into a_out (conv2d): the backend computes both as one kernel."]
    assert fused["Reads"] == ["a_out, inside of the kernel, unrounded."]
    assert fused["Result"][0].startswith("Site relu_out, for all its readers: uint8 affine")
    moves = "max_pool2d_out (max_pool2d) moves values, and asks for what its readers want"
    assert f"{moves}: uint8 affine, mse, fixed." in fused["Readers"]
    assert carried["State"] == [
        "It holds the integers of site relu_out without rounding: max_pool2d_out from relu_out."
    ]
    assert carried["Result"] == ["No site of its own: the integers of relu_out pass through."]


def test_a_float_op_tells_its_island_and_the_line_that_changes_it() -> None:
    story = _story(_explain(_chain()), "softmax_out")
    assert story["State"][:2] == [
        "It stays float: it keeps its accuracy only in float between 8-bit neighbours.",
        "It makes float island 1: integers become float before it and are rounded again behind it.",
    ]
    line = "add to rules: - {match: {op: softmax}, quantize: true, activation: {bits: 16}}"
    assert story["State"][2:] == [
        "To quantize it:",
        line,
        "The op itself still computes in float, between integers.",
    ]
    assert story["Readers"] == [
        "flatten_out (flatten) moves values, and asks for what its readers want: uint8 affine, mse, fixed."
    ]


def test_lines_of_a_config_are_not_broken() -> None:
    (story,) = _explain(_chain()).why("softmax_out")
    text = story.text(60)
    assert "  add to rules: - {match: {op: softmax}, quantize: true, activation: {bits: 16}}\n" in text
    assert max(len(line) for line in text.splitlines() if "- {" not in line) <= 60


RECIPE = """\
schema: qtrace/1
activation: {bits: 4}
rules:
  - {match: {op: conv2d}, weight: {bits: 4}, observers: {activation: {percentile: {percentile: 99.0}}}}
  # It is small.
  # And it matters.
  - {match: {name: b}, quantize: false}
  - {match: {}, activation: {bits: 8}, weight: {bits: 4}, output: {bits: 16}}
  - {match: {position: first}, output: {bits: 16}, fakequant: lsq, quantize: true}
"""


def test_rules_are_reported_in_order_with_what_each_changed(tmp_path: Path) -> None:
    file = tmp_path / "my.yaml"
    file.write_text(RECIPE)
    traced = qtrace.trace(_chain(), X, check=False)
    explanation = qtrace.explain(traced, file)
    told = _story(explanation, "a_out")["Config"]
    wide, narrow = ("int8 sym per-channel(0) narrow", "int4 sym per-channel(0) narrow")
    percentile = "{percentile: {percentile: 99.0}}"
    assert told == [
        f"Backend onnxruntime asks for uint8 affine activations and {wide} weights.",
        f"For every op, {file}:2 changes activations from uint8 affine to uint4 affine.",
        f"Rule {file}:4, match {{op: conv2d}}, changes weights from {wide} to {narrow} and changes the "
        f"observer of activations from mse to {percentile}.",
        f"Rule {file}:8, match {{}}, changes activations from uint4 affine to uint8 affine and gives its "
        "result uint16 affine, whatever its readers ask for.",
        f"Rule {file}:9, match {{position: first}}, changes the fake quant from fixed to lsq and says "
        "quantize: true.",
    ]
    assert f"{file}:7 says quantize: false" in _text(explanation, "b_out")
    assert "says quantize: false. (It is small. And it matters.)" in _text(explanation, "b_out")
    assert f"why: {file}:7 says quantize: false\n         (It is small. And it matters.)\n" in (
        explanation.summary(None)
    )
    prepared = qtrace.prepare(traced, file)  # a model remembers where its rules were written
    assert _story(qtrace.explain(prepared), "a_out")["Config"][2:] == told[2:]


def test_a_rule_without_effect_and_none_at_all() -> None:
    rules = [{"match": {"op": "conv2d"}, "weight": {"bits": 8}}]
    explanation = _explain(_chain(), rules)
    assert "Rule rules[0], match {op: conv2d}, changes nothing: it was so already." in _text(
        explanation, "a_out"
    )
    assert "No rule of the config matches it." in _text(explanation, "b_out")


def test_readers_that_differ_round_for_themselves() -> None:
    module = net(
        lambda self, x: (lambda y: self.b(y) + self.c(y))(self.a(x)), a=_conv(), b=_conv(), c=_conv()
    )
    explanation = _explain(module, [{"match": {"name": "c"}, "activation": {"bits": 4}}])
    story = _story(explanation, "a_out")
    assert story["State"][-1].startswith("Its readers ask for different parameters")
    assert [told.split(":")[0] for told in story["Result"]] == [
        "Site a_out__b_out, for b_out only",
        "Site a_out__c_out, for c_out only",
    ]
    assert story["Readers"] == [
        "b_out (conv2d) asks for uint8 affine, mse, fixed.",
        "c_out (conv2d) asks for uint4 affine, mse, fixed.",
    ]
    read = _story(explanation, "c_out")["Reads"][0]
    assert read.startswith(
        "a_out, rounded at site a_out__c_out for this op, since a_out is float otherwise: uint4"
    )


def test_a_value_that_is_rounded_again() -> None:
    module = net(lambda self, x: self.b(self.a(x)), a=_conv(), b=_conv())
    explanation = _explain(module, [{"match": {"name": "a"}, "output": {"bits": 16}}])
    read = _story(explanation, "b_out")["Reads"][0]
    assert read.startswith(
        "a_out, rounded at site a_out__b_out for this op, since a_out holds uint16 affine otherwise: uint8"
    )


def test_shared_parameters_and_an_op_that_is_tied() -> None:
    module = net(lambda self, x: F.concat([self.a(x), self.b(x)], 1), a=_conv(), b=_conv())
    explanation = _explain(module, backend="megengine")
    assert "It shares the parameters of group a_out with b_out." in _text(explanation, "a_out")
    assert _story(explanation, "concat_out")["Result"] == [
        "No site of its own: the backend ties it to the inputs, which share group a_out."
    ]
    assert _story(explanation, "concat_out")["Readers"] == ["It leaves the graph."]


def test_an_op_without_a_rule_and_an_unasked_move() -> None:
    resize = F.vision.interpolate
    module = net(lambda self, x: F.flatten(F.exp(resize(self.a(x), (4, 4))), 1), a=_conv())
    explanation = _explain(module)
    unread = next(n.name for n in explanation.annotation.notes if n.op == "Resize")
    text = _text(explanation, unread)
    assert "No op rule reads it" in text
    assert "It needs an op rule: a file in qtrace/ops" in text
    assert "a_out, rounded at site a_out" in text
    moved = _story(explanation, "flatten_out")
    assert "It moves values: it holds integers as soon as the op before it" in moved["State"][-1]
    assert moved["Result"] == ["No site: no reader asks for integers."]


def test_inputs_sites_and_parameters() -> None:
    explanation = _explain(_chain())
    assert _story(explanation, "x") == {
        "What": ["An input of the graph."],
        "Result": ["Site x, for all its readers: uint8 affine, observer mse, fake quant fixed."],
        "Readers": ["a_out (conv2d) asks for uint8 affine, mse, fixed."],
    }
    weight, bias = _text(explanation, "a_weight"), _text(explanation, "a_bias")
    assert "A site for the weight a_weight." in weight
    assert "It is a parameter: observed once" in weight
    assert "For a_out." in weight
    assert "int32 at the scale of x times that of a_weight; it has no parameters of its own" in bias
    assert explanation.why("a_weight_q") == explanation.why("a_weight")  # its name in a prepared graph


def test_numbers_once_there_are_some() -> None:
    traced = qtrace.trace(_chain(), X, check=False)
    prepared = qtrace.prepare(traced)
    assert "not calibrated" not in _text(qtrace.explain(traced), "a_out")
    assert "fake quant fixed; not calibrated." in _text(qtrace.explain(prepared), "a_out")
    qtrace.calibrate(prepared, [X], progress=False)
    for model in (prepared, qtrace.convert(prepared)):
        text = _text(qtrace.explain(model), "a_out")
        own = model.qsites.x.qparams()
        assert f"scale {float(own.scale):.4g}, zero point {int(own.zero_point)}, range -" in text
        assert "; 4 scales from " in text
        assert "times that of a_weight: 4 scales from" in text


def test_a_multiplication_that_changes_a_scale_alone() -> None:
    module = net(lambda self, x: self.b(self.a(x) * 0.5), a=_conv(), b=_conv())
    traced = qtrace.trace(module, X, check=False)
    story = _story(qtrace.explain(traced), "mul_out")
    assert story["State"][1] == "The integers stay: it multiplies their scale by 0.5."
    read, bias = (_story(qtrace.explain(traced), "b_out")[key][-1] for key in ("Reads", "Weight"))
    assert "carries the integers of site a_out, which stand for 0.5 times the values there: uint8" in read
    assert bias == "Bias b_bias: int32 at the scale of a_out times 0.5 times that of b_weight."
    prepared = qtrace.calibrate(qtrace.prepare(traced), [X], progress=False)
    sites = {site["name"]: site for site in qtrace.explain(prepared).to_dict()["sites"]}
    converted = qtrace.convert(prepared)
    bias_node = next(n for e in converted.graph._exprs for n in e.outputs if n.name == "b_bias_q")
    own = bias_node.qparams.scale.numpy().reshape(-1)  # what convert wrote
    np.testing.assert_array_equal(np.float32(sites["b_bias"]["qparams"]["scale"]), own)


def test_a_batch_norm_that_trains_on() -> None:
    module = net(lambda self, x: F.relu(self.bn(self.a(x))), a=_conv(), bn=M.BatchNorm2d(4))
    explanation = _explain(module, qat={"bn": {"fold": False}})
    assert "BatchNorm bn_out stays in training; in evaluation it is folded" in _text(explanation, "a_out")
    assert "as one kernel with bn_out (batch_norm) and relu_out (relu)" in _text(explanation, "a_out")


def test_modules_by_path_and_glob() -> None:
    block = net(lambda self, x: F.relu(self.conv(x)), conv=_conv())
    explanation = _explain(net(lambda self, x: self.one(self.two(x)), one=block, two=_conv()))
    assert [s.title for s in explanation.why("one")] == ["one_conv_out", "one_out"]
    assert [s.title for s in explanation.why("one.conv")] == ["one_conv_out"]
    assert [s.title for s in explanation.why("t*")] == ["two_out"]
    assert len(explanation.why("*")) == len(explanation.annotation.notes)
    assert [s.title for s in explanation.why("relu")] == ["one_out"]  # a kind of op, where no name is so


def test_an_unknown_name_is_reported_with_the_nearest() -> None:
    explanation = _explain(_chain())
    with pytest.raises(
        GraphError, match="nothing here is called 'softmax_ou': .*the nearest are softmax_out"
    ):
        explanation.why("softmax_ou")
    with pytest.raises(GraphError, match="nothing here is called 'zzzzzzz': .*; the table has the names"):
        explanation.why("zzzzzzz")
