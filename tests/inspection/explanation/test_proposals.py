"""What explain proposes for ops that stay float: every line is followed, and the ops are quantized then."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import megengine as mge
import megengine.functional as F
import megengine.module as M
import pytest

import qtrace
from qtrace.config import QConfig, backends
from qtrace.inspection.explanation import Explanation
from qtrace.inspection.explanation._summary import Floats
from tests.inspection.explanation.proposing import changed, unkept
from tests.nets import images, net

X = images(2, 4, 8, 8)


def _conv(outside: int = 4, **options: Any) -> M.Conv2d:
    return M.Conv2d(4, outside, 3, padding=1, **options)


def _net(middle: Callable[[mge.Tensor], mge.Tensor]) -> M.Module:
    return net(lambda self, x: self.c(F.relu(self.b(middle(self.a(x))))), a=_conv(), b=_conv(), c=_conv())


SOFT = _net(lambda x: F.softmax(x, axis=1))
WIDE = "add to rules: - {match: {op: softmax}, quantize: true, activation: {bits: 16}}"


def _checked(module: M.Module, **config: Any) -> tuple[Explanation, tuple[Floats, ...]]:
    """The explanation, all of whose proposals hold."""
    traced = qtrace.trace(module, X, check=False)
    explanation = qtrace.explain(traced, QConfig(**config))
    assert unkept(traced, explanation) == []
    prepared = qtrace.explain(qtrace.prepare(traced, QConfig(**config)))
    assert prepared.to_dict()["summary"] == explanation.to_dict()["summary"]
    return explanation, explanation._summary.floats


def _lines(floats: Floats) -> tuple[str, ...]:
    assert floats.proposal is not None
    return floats.proposal.lines


@pytest.mark.parametrize(
    ("config", "names", "lines"),
    [
        ({}, ["softmax_out"], (WIDE,)),
        (
            {"rules": [{"match": {"op": "softmax"}, "quantize": False}]},
            ["softmax_out"],
            (WIDE,),
        ),
        (
            {"rules": [{"match": {"name": ["b", "relu_out"]}, "quantize": False}]},
            ["b_out", "relu_out"],
            ("drop rules[0]: - {match: {name: [b, relu_out]}, quantize: false}",),
        ),
        (
            {
                "rules": [
                    {"match": {"name": "b"}, "quantize": False},
                    {"match": {"op": "conv2d"}, "quantize": True},
                    {"match": {"name": "b"}, "quantize": False},
                    {"match": {"name": "b"}, "weight": {"bits": 4}},
                    {"match": {"name": "b_out"}, "quantize": False},
                ]
            },
            ["b_out"],
            (
                "drop rules[2]: - {match: {name: b}, quantize: false}",
                "drop rules[4]: - {match: {name: b_out}, quantize: false}",
            ),
        ),
        ({"region": {"outputs": "b"}}, ["relu_out", "c_out"], ("set region: {outputs: [b, c_out]}",)),
        (
            {"region": {"inputs": "relu_out"}},
            ["a_out", "b_out"],
            ("set region: {inputs: [relu_out, a_out]}",),
        ),
    ],
)
def test_proposals(config: dict[str, Any], names: list[str], lines: tuple[str, ...]) -> None:
    _, every = _checked(SOFT, **config)
    floats = next(f for f in every if f.notes[0].name == names[0])
    assert [n.name for n in floats.notes] == names
    assert _lines(floats) == lines


def test_both_sides_of_a_region_are_widened_at_once() -> None:
    _, every = _checked(SOFT, region={"inputs": "softmax_out", "outputs": "softmax_out"})
    (outside,) = [f for f in every if f.notes[0].causes == ("region",)]
    assert [n.name for n in outside.notes] == ["a_out", "b_out", "relu_out", "c_out"]
    assert _lines(outside) == ("set region: {inputs: [softmax_out, a_out], outputs: [softmax_out, c_out]}",)


def test_a_part_beside_the_region_is_named_on_both_sides() -> None:
    def forward(self: M.Module, x: mge.Tensor) -> mge.Tensor:
        return F.exp(self.a(x)) + F.exp(self.c(self.b(x)))

    module = net(forward, a=_conv(), b=_conv(), c=_conv())
    _, every = _checked(module, region={"inputs": "a", "outputs": "a"})
    beside = next(f for f in every if f.notes[0].name == "b_out")
    assert [n.name for n in beside.notes] == ["b_out", "c_out", "add_out"]
    assert _lines(beside) == ("set region: {inputs: [a, b_out], outputs: [a, add_out]}",)


def test_region_and_role_take_two_lines() -> None:
    _, every = _checked(SOFT, region={"outputs": "a"})
    soft = next(f for f in every if f.notes[0].name == "softmax_out")
    assert _lines(soft) == ("set region: {outputs: [a, softmax_out]}", WIDE)


def test_ops_without_a_kernel_are_rounded_around_in_8_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = backends.get("onnxruntime")
    less = dataclasses.replace(backend, ops=backend.ops - {"maximum"})
    monkeypatch.setattr("qtrace.targets.onnxruntime.backend.BACKEND", less)
    _, (floats,) = _checked(_net(lambda x: F.maximum(x, x * 2.0)))
    assert floats.notes[0].causes == ("kernel",)
    assert _lines(floats) == ("add to rules: - {match: {op: maximum}, quantize: true}",)
    assert floats.remark == "the op itself still computes in float, between integers"


def test_only_the_ops_in_question_are_named_where_others_of_the_kind_are_quantized() -> None:
    module = _net(lambda x: F.softmax(F.softmax(x, axis=1), axis=2))
    rules = [{"match": {"name": "softmax_out"}, "quantize": True}]
    _, (floats,) = _checked(module, rules=rules)
    line = "- {match: {op: softmax, name: softmax_out_1}, quantize: true, activation: {bits: 16}}"
    assert _lines(floats) == (f"add to rules: {line}",)


def test_what_no_config_changes_says_what_to_do_instead() -> None:
    explanation, every = _checked(SOFT, backend="megengine")
    floats = next(f for f in every if f.notes[0].kind == "softmax")
    assert floats.proposal is None
    assert "no line of a config gives backend megengine a kernel for it" in floats.remark
    assert "so: no line of a config gives backend megengine" in explanation.summary(None)
    resize = F.vision.interpolate
    unread = _checked(_net(lambda x: resize(x, (4, 4))))[1]
    assert unread[0].remark.startswith("it needs an op rule")
    other = _checked(_net(lambda x: x * (x > 0)))[1]
    assert any("only float32 values are quantized" in f.remark for f in other)


def test_a_kernel_that_another_backend_has_is_reported() -> None:
    _, (floats,) = _checked(_net(F.sigmoid), backend="megengine")
    assert "a kernel for it; backends with one: " in floats.remark
    assert "onnxruntime" in floats.remark


def test_a_packaged_rule_is_overruled_and_not_dropped() -> None:
    traced = qtrace.trace(_net(lambda x: F.softmax(x * x, axis=1)), X, check=False)
    rules = [{"match": {"subgraph": {"from": "mul_out", "to": "relu_out"}}, "quantize": False}]
    config = QConfig(rules=rules)
    config = config.with_origin("qtrace/recipes/net.yaml", ["qtrace/recipes/net.yaml:7"])
    explanation = qtrace.explain(traced, config)
    assert unkept(traced, explanation) == []
    lines = [f.proposal.lines for f in explanation._summary.floats if f.proposal]
    match = "{subgraph: {from: mul_out, to: relu_out}, op: [mul, conv2d, relu]}"
    assert lines == [(f"add to rules: - {{match: {match}, quantize: true}}",), (WIDE,)]
    (story,) = explanation.why("relu_out")
    assert "add to rules: - {match: {name: relu_out}, quantize: true}" in story.text()


def test_two_rules_on_one_line_of_a_file_are_reported_apart(tmp_path: Path) -> None:
    file = tmp_path / "my.yaml"
    rules = "[{match: {name: a}, quantize: false}, {match: {name: b}, quantize: false}]"
    file.write_text(f"schema: qtrace/1\nrules: {rules}\n")
    explanation = qtrace.explain(qtrace.trace(SOFT, X, check=False), file)
    dropped = [f.proposal.lines for f in explanation._summary.floats if f.proposal and f.proposal.drop]
    assert [line.rpartition(": - ")[2] for (line,) in dropped] == [
        "{match: {name: a}, quantize: false}",
        "{match: {name: b}, quantize: false}",
    ]
    assert len(changed(explanation, dropped[0]).rules) == 1
