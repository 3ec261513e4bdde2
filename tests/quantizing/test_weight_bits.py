"""Weights of 7 bits where products of 8 saturate: the configs that get them, and what is preferred."""

from __future__ import annotations

import pytest

from qtrace.config.recipe import as_qconfig
from qtrace.quantizing import targets
from qtrace.quantizing.targets import prefer_placement, with_fewer_bits, with_safe_bits


@pytest.mark.parametrize(
    "says",
    [
        {"weight": {"bits": 8}},
        {"weight": {"bits": 4}},
        {"rules": [{"match": {"op": "linear"}, "weight": {"bits": 4}, "optional": True}]},
        {"method": "dynamic"},
        {"method": "weight_only"},
        {"activation": {"bits": 16}},
        {"rules": [{"match": {"op": "add"}, "output": {"bits": 16}, "optional": True}]},
        {"backend": "openvino"},
        {"backend": "tensorrt"},
    ],
)
def test_a_config_that_says_what_weights_are_keeps_them(says: dict) -> None:
    assert with_fewer_bits(as_qconfig({"placement": "balanced", **says})) is None


def test_rules_of_the_config_stay_behind_that_of_depthwise_layers() -> None:
    config = as_qconfig({"rules": [{"match": {"op": "add"}, "quantize": False, "optional": True}]})
    fewer = with_fewer_bits(config)
    assert fewer is not None
    assert fewer.weight_bits == 7
    assert fewer.rules[1:] == config.rules
    assert config.weight_bits == 8


@pytest.mark.parametrize(
    ("placement", "saturates", "bits"),
    [("balanced", True, 7), ("fastest", True, 7), ("everything", True, 8), ("balanced", False, 8)],
)
def test_the_processor_and_the_placement_say_the_bits(
    placement: str, saturates: bool, bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(targets, "products_saturate", lambda host: saturates)
    assert with_safe_bits(as_qconfig({"placement": placement})).weight_bits == bits


@pytest.mark.parametrize(
    ("prefer", "placement"),
    [("speed", "fastest"), ("balanced", "balanced"), ("accuracy", "balanced"), (None, "everything")],
)
def test_a_preference_leaves_the_choice_to_the_calibrated_graph(prefer: object, placement: str) -> None:
    config = prefer_placement(as_qconfig({"placement": "everything"}), prefer)
    assert config.effective_placement == placement
