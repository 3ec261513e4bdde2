"""What can be told about a config without a graph."""

from __future__ import annotations

from typing import Any

from qtrace.config import QConfig
from qtrace.config.checking import mistakes
from tests.each import each_of

CONV: dict[str, Any] = {"match": {"op": "conv2d"}}


def _found(*rules: dict[str, Any], **config: Any) -> tuple[str, ...]:
    return mistakes(QConfig(rules=list(rules), **config))


def test_empty_config_has_no_mistakes() -> None:
    assert mistakes(QConfig()) == ()


def test_a_scheme_that_some_rules_together_make_possible_is_none() -> None:
    affine = {**CONV, "weight": {"symmetric": False}}
    (sentence,) = _found(affine)
    assert sentence.startswith(
        "rules[0]: backend onnxruntime cannot run weight scheme int8 affine per-channel(0)"
    )
    whole = {"match": {"depthwise": True}, "weight": {"axis": None}}
    assert _found(whole, affine) == ()
    assert len(_found(affine, whole)) == 1


def test_an_impossible_rule_does_not_hide_another() -> None:
    wide = {**CONV, "activation": {"bits": 5}}
    found = _found(wide, {**CONV, "output": {"bits": 7}}, {**CONV, "weight": {"bits": 12}})
    assert [sentence.partition(":")[0] for sentence in found] == ["rules[0]", "rules[1]", "rules[2]"]


def test_rules_for_other_targets_are_passed_over() -> None:
    rule = {**CONV, "weight": {"axis": 0}}
    assert len(_found(rule, backend="megengine")) == 1
    assert _found({**rule, "backends": ["ncnn", "tflite"]}, backend="megengine") == ()


def test_options_are_tried_with_the_schemes_that_there_are() -> None:
    learn = {**CONV, "fakequant": "lsq"}
    scheme = {"power_of_two": True}
    (sentence,) = _found(learn, backend="generic", activation=scheme, weight=scheme)
    assert "lsq learns any scale" in sentence
    own = {**CONV, "activation": {"power_of_two": False}, "weight": {"power_of_two": False}}
    assert _found(own, learn, backend="generic", activation=scheme, weight=scheme) == ()


@each_of("key", ["op", "feeds", "follows"])
def test_unknown_ops(key: str) -> None:
    (sentence,) = _found({"match": {key: ["conv2d", "sigmoyd"]}, "quantize": False})
    assert sentence == "rules[0]: unknown op 'sigmoyd'; did you mean 'sigmoid'?"


def test_what_is_wrong_for_every_op_is_reported_first() -> None:
    (sentence,) = _found({**CONV, "activation": {"bits": 5}}, activation={"bits": 6})
    assert sentence.startswith("QConfig: backend onnxruntime cannot run activation scheme uint6")
