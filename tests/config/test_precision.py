"""``w8a16`` and its like: the bits alone, for any target that has them."""

from __future__ import annotations

from pathlib import Path

import megengine.functional as F
import megengine.module as M
import numpy as np
import pytest

import qtrace
from qtrace.config import backends, recipe
from qtrace.config.recipe import config_or_default
from qtrace.errors import ConfigError
from qtrace.graph.types import TracedModule
from qtrace.preparation.figures import count_precisions, describe_precision
from qtrace.preparation.model import QuantizedModel
from qtrace.quantizing.targets import choose_config
from tests.nets import net

NAMES = ("w8a8", "w8a16", "w4a8", "w4a16")
X = np.random.default_rng(0).normal(size=(2, 3, 8, 8)).astype(np.float32)


@pytest.fixture(scope="module")
def traced() -> TracedModule:
    forward = lambda self, x: self.c(F.mean(F.relu(self.b(F.relu(self.a(x)))), axis=(2, 3)))  # noqa: E731
    module = net(forward, a=M.Conv2d(3, 16, 3), b=M.Conv2d(16, 16, 3), c=M.Linear(16, 16))
    return qtrace.trace(module, X, check=False)


def _bits(name: str) -> tuple[int, int]:
    weight, activation = name[1:].split("a")
    return int(weight), int(activation)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("target", backends.packaged())
def test_a_target_has_the_precision_or_says_what_it_has(name: str, target: str, traced: TracedModule) -> None:
    limits, (weight, activation) = backends.get(target).limits, _bits(name)
    if weight in limits["weight"].bits and activation in limits["activation"].bits:
        config = qtrace.load_recipe(f"{name}+{target}")
        assert config.backend == target
        annotation = QuantizedModel(qtrace.prepare(traced, config)).annotation
        bits = {site.sort: site.plan.scheme.bits for site in annotation.sites if site.plan is not None}
        assert bits == {"weight": weight, "activation": activation}
        assert name in count_precisions(annotation)
    else:
        with pytest.raises(
            ConfigError, match=f"^{target} lacks {name}: it runs weights of .* bits and activations"
        ):
            qtrace.load_recipe(f"{name}+{target}")


@pytest.mark.parametrize("name", NAMES)
def test_precision_only_changes_the_bits_of_the_default(name: str) -> None:
    config, default = qtrace.load_recipe(name), config_or_default(None)
    assert (config.backend, config.ptq, config.placement) == (default.backend, default.ptq, default.placement)
    joined = [qtrace.load_recipe(text).to_dict() for text in (f"int8+{name}", f"{name}+int8")]
    assert joined[0] == joined[1]


def test_precision_joins_a_family_in_any_order() -> None:
    config = qtrace.load_recipe("w8a16+resnet50+tflite")
    assert config == qtrace.load_recipe("tflite+resnet50+w8a16")
    assert config.preprocess is not None
    assert config.activation is not None
    assert config.activation.changes == {"bits": 16, "symmetric": True}


def test_the_sentence_names_all_widths() -> None:
    with pytest.raises(ConfigError) as caught:
        qtrace.load_recipe("w8a16+tensorrt")
    assert str(caught.value) == (
        "tensorrt lacks w8a16: it runs weights of 2, 3, 4, 5, 6, 7 or 8 bits and activations of 8 bits."
    )


@pytest.mark.parametrize(
    ("target", "out", "backend"), [("qnn", "a.onnx", "qnn"), (None, "a.tflite", "tflite")]
)
def test_the_target_of_a_call_is_that_of_the_precision(
    target: str | None, out: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recipe, "DEFAULT_RECIPE", "int8")
    config = choose_config(target, "w8a16", Path(out))
    assert config == qtrace.load_recipe(f"int8+w8a16+{backend}")


def test_the_precision_in_words_is_the_one_that_is_used(traced: TracedModule) -> None:
    def words(config: object) -> str:
        return describe_precision(QuantizedModel(qtrace.prepare(traced, config)).annotation)

    everything = {"backend": "generic"}
    assert words(everything) == "precision: w8a8 in all 3 layers"
    last = {"match": {"position": "last"}, "quantize": False}
    assert words({**everything, "rules": [last]}) == "precision: w8a8 in 2 of 3 layers, float in 1"
    mixed = {"match": {"position": "last"}, "weight": {"bits": 4}}
    assert words({**everything, "rules": [mixed]}) == "precision: w8a8 in 2 of 3 layers, w4a8 in 1"
    none = {"match": {"name": "*"}, "quantize": False}
    assert words({**everything, "rules": [none]}) == "precision: float in all 3 layers"
