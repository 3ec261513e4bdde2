"""The config that a target and a recipe make: the default's algorithms and the target's own schemes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import megengine.functional as F
import megengine.module as M
import numpy as np
import pytest
from megengine import Tensor

import qtrace
from qtrace.config import backends, recipe
from qtrace.errors import ConfigError
from qtrace.quantizing.targets import choose_config
from tests.nets import net

BACKEND = backends.get("generic")
TARGET = f"{__name__}:BACKEND"
GPTQ = {"gptq": {"refit": True}}


@pytest.fixture(autouse=True)
def real_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recipe, "DEFAULT_RECIPE", "int8")


@pytest.mark.parametrize("target", backends.packaged())
def test_every_target_has_the_algorithms_of_the_default(target: str) -> None:
    """A target alone rounds to nearest; the one call takes the schemes of it, and not that."""
    config = choose_config(target, None, Path("net" + _suffix(target)))
    assert config.backend == target
    assert config.to_dict()["ptq"] == ["fuse_bn", "reparameterize", GPTQ]
    alone = qtrace.load_recipe(f"backend/{target}")
    assert (config.weight, config.activation) == (alone.weight, alone.activation)
    assert [rule.match for rule in alone.rules] == [
        rule.match for rule in config.rules[len(config.rules) - len(alone.rules) :]
    ]


def _suffix(target: str) -> str:
    return {"tflite": ".tflite", "ncnn": ".param", "megengine": ".mge"}.get(target, ".onnx")


def test_a_target_of_ones_own_has_them_too() -> None:
    config = choose_config(TARGET, None, Path("net.onnx"))
    assert config.backend == TARGET
    assert config.to_dict()["ptq"][-1] == GPTQ


@pytest.mark.parametrize(
    "given", [None, "int8", "resnet50", "w8a16", "int8+w8a16", "w8a16+int8", {"placement": "everything"}]
)
@pytest.mark.parametrize("target", ["tflite", None])
def test_the_file_says_the_target_where_nothing_else_does(target: str | None, given: Any) -> None:
    assert choose_config(target, given, Path("net.tflite")).backend == "tflite"


def test_a_family_by_its_name_takes_the_recipe_of_the_target() -> None:
    """Its linear layers have one scale in LiteRT, and it rounds everything for speed."""
    assert choose_config("tflite", "resnet50", Path("a.tflite")) == qtrace.load_recipe("resnet50+tflite")


@pytest.mark.parametrize("given", ["backend/openvino", {"backend": "openvino"}])
def test_two_targets_are_refused(given: Any) -> None:
    with pytest.raises(ConfigError, match="the recipe is for openvino, and target says qnn: leave out one"):
        choose_config("qnn", given, Path("net.onnx"))


def test_weights_are_rounded_together_for_another_target(tmp_path: Path) -> None:
    """Inputs of a layer that are correlated: gptq has less noise behind it than rounding to nearest."""
    rng = np.random.default_rng(0)
    mixed = (rng.normal(size=(64, 4)) @ rng.normal(size=(4, 32)) + 0.05 * rng.normal(size=(64, 32))).astype(
        "f4"
    )
    traced = qtrace.trace(
        net(lambda self, x: self.b(F.relu(self.a(x))), a=M.Linear(32, 32), b=M.Linear(32, 8)), mixed[:1]
    )
    noise = {}
    for given in (None, "backend/tensorrt"):
        options = {"recipe": given} if given else {"target": "tensorrt"}
        result = qtrace.quantize(traced, mixed, tmp_path / "a.onnx", progress=False, force=True, **options)
        exact = traced(Tensor(mixed)).numpy()
        noise[given] = float(((result.converted(Tensor(mixed)).numpy() - exact) ** 2).mean())
    assert noise[None] < 0.9 * noise["backend/tensorrt"]
