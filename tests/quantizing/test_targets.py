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
from qtrace.config import QConfig, backends, recipe
from qtrace.errors import ConfigError, ExportError
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


def _write(text: str, name: str = "mine.yaml") -> str:
    Path(name).write_text(f"schema: qtrace/1\n{text}")
    return name


def _settings(config: QConfig) -> dict[str, Any]:
    return {key: value for key, value in config.to_dict().items() if key != "description"}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("names", ["resnet", "int8", "w8a8+resnet", "efficientnet_b0+vit", "resnet+int8"])
@pytest.mark.parametrize("target", backends.packaged())
def test_a_file_that_imports_a_family_is_as_the_family_by_its_name(target: str, names: str) -> None:
    out, imports = Path("net" + _suffix(target)), names.split("+")
    named = choose_config(target, names, out)
    file = choose_config(target, _write(f"imports: {imports}\n"), out)
    mapping = choose_config(target, {"imports": imports}, out)
    assert _settings(file) == _settings(mapping) == _settings(named)
    if target != "onnxruntime":  # which is what the recipe says already
        assert (file.origin, mapping.origin) == (f"mine.yaml+{target}", f"QConfig+{target}")


@pytest.mark.usefixtures("folder")
def test_precision_of_a_recipe_file_is_applied_after_the_target() -> None:
    """LiteRT's activations of 16 bits have no zero point, and a target clips its activations of 8 bits."""
    config = choose_config("tflite", _write("imports: [w8a16, resnet]\n"), Path("a.tflite"))
    assert _settings(config) == _settings(qtrace.load_recipe("resnet+w8a16+tflite"))
    with pytest.raises(ConfigError, match="^ncnn lacks w8a16: it runs weights of 8 bits"):
        choose_config("ncnn", "mine.yaml", Path("a.param"))


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("target", [None, "tflite"])
def test_a_precision_alone_is_the_default_in_a_file_too(target: str | None) -> None:
    out = Path("a.onnx" if target is None else "a.tflite")
    named = choose_config(target, "w8a16", out)
    assert _settings(choose_config(target, _write("imports: [w8a16]\n"), out)) == _settings(named)
    assert _settings(choose_config(target, {"imports": ["w8a16"]}, out)) == _settings(named)
    assert "ptq" in _settings(named)
    own = choose_config(None, _write("imports: [w8a16]\nbackend: tflite\n"), Path("a.tflite"))
    assert "ptq" not in _settings(own)


@pytest.mark.usefixtures("folder")
def test_what_a_file_says_itself_wins_over_the_target() -> None:
    _write("placement: balanced\n", "team.yaml")
    own = "observers: {activation: minmax}\nrules: [{match: {op: linear}, weight: {axis: 0}}]\n"
    config = choose_config("tflite", _write(f"imports: [resnet, team.yaml]\n{own}"), Path("a.tflite"))
    assert (config.placement, config.activation_observer.name) == ("balanced", "minmax")
    assert config.weight_observer.name == "minmax"  # of the target
    assert config.place("placement") == "team.yaml:2"
    assert [rule.origin.partition(":")[0] for rule in config.rules[-2:]] == [
        "qtrace/recipes/backend/tflite.yaml",
        "mine.yaml",
    ]


@pytest.mark.usefixtures("folder")
def test_a_changed_config_keeps_its_changes_for_a_target() -> None:
    rule = QConfig(rules=[{"match": {"op": "conv2d"}, "quantize": False}]).rules[0]
    loaded = qtrace.load_recipe(_write("imports: [resnet]\n"))
    changed = loaded.model_copy(update={"placement": "fastest", "rules": (*loaded.rules, rule)})
    config = choose_config("tflite", changed, Path("a.tflite"))
    assert config.placement == "fastest"
    assert config.observers == qtrace.load_recipe("backend/tflite").observers
    assert config.rules == (*qtrace.load_recipe("resnet+tflite").rules, rule)


@pytest.mark.usefixtures("folder")
def test_a_file_without_packaged_recipes_keeps_what_it_says() -> None:
    config = choose_config("tflite", _write("placement: balanced\n"), Path("a.tflite"))
    assert _settings(config) == {"backend": "tflite", "placement": "balanced"}


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("text", "backend", "line"),
    [
        ("imports: [resnet, backend/openvino]\n", "openvino", 2),
        ("imports: [int8]\nbackend: openvino\n", "openvino", 3),
        ("imports:\n- resnet\n- w4a4_lsq\n", "onnxruntime", 4),
        ("imports: [int8, onnxruntime]\n", "onnxruntime", 2),
    ],
)
def test_a_file_for_another_target_is_refused_with_its_line(text: str, backend: str, line: int) -> None:
    sentence = f"^mine.yaml:{line}: the recipe is for {backend}, and target says qnn: leave out one"
    with pytest.raises(ConfigError, match=sentence):
        choose_config("qnn", _write(text), Path("net.onnx"))


@pytest.mark.parametrize("given", ["backend/openvino", {"backend": "openvino"}])
def test_two_targets_are_refused(given: Any) -> None:
    with pytest.raises(ConfigError, match="the recipe is for openvino, and target says qnn: leave out one"):
        choose_config("qnn", given, Path("net.onnx"))


@pytest.mark.parametrize("recipe_or_name", [None, "w8a16", "resnet", {"imports": ["resnet"]}])
@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("net.xml", "net.xml has the suffix .xml, which no target takes"),
        ("net.XML", "net.XML has the suffix .XML, which no target takes"),
        ("net", "net has no suffix"),
    ],
)
def test_an_unknown_suffix_names_those_of_all_targets(name: str, what: str, recipe_or_name: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        choose_config(None, recipe_or_name, Path(name))
    assert str(caught.value) == (
        f"{what}: name the file with one of .mge (megengine), .onnx (esp_dl, esp_dl_s3, generic, "
        "onnxruntime, openvino, qnn, ryzenai, ryzenai_xint8, tensorrt, tensorrt_10), .param (ncnn), "
        ".tflite (tflite)."
    )


@pytest.mark.parametrize(("target", "given"), [("tflite", None), (None, "backend/tflite")])
@pytest.mark.parametrize("name", ["net.xml", "net.onnx", "net", "net.onnx.gz", "net.tflite.zip"])
def test_another_suffix_than_that_of_the_target(name: str, target: str | None, given: Any) -> None:
    with pytest.raises(ConfigError, match=f"^{name} is no file for tflite: name it net.tflite, or give"):
        choose_config(target, given, Path(name))


@pytest.mark.parametrize("target", [None, "generic", TARGET])
@pytest.mark.parametrize("suffix", [".onnx", ".tflite", ".param", ".mge"])
def test_a_suffix_in_upper_case_is_refused(suffix: str, target: str | None) -> None:
    with pytest.raises(ExportError, match=f"^a{suffix.upper()}: .* in lower case: name it a{suffix}.$"):
        choose_config(target, None, Path(f"a{suffix.upper()}"))


@pytest.mark.parametrize("target", ["generic", TARGET])
def test_what_no_format_writes_is_refused_before_the_calibration(target: str) -> None:
    """A target whose files may have any format."""
    assert choose_config(target, None, Path("net.tflite")).backend == target
    with pytest.raises(ExportError, match=r"no format has the suffix '.xml' of net.xml: there are .*\.onnx"):
        choose_config(target, None, Path("net.xml"))


def test_weights_are_rounded_together_for_another_target(tmp_path: Path) -> None:
    """Inputs of a layer that are correlated: gptq has less noise behind it than rounding to nearest."""
    rng = np.random.default_rng(0)
    mixed = (rng.normal(size=(64, 4)) @ rng.normal(size=(4, 32)) + 0.05 * rng.normal(size=(64, 32))).astype(
        "f4"
    )
    traced = qtrace.trace(
        net(lambda self, x: self.b(F.relu(self.a(x))), a=M.Linear(32, 32), b=M.Linear(32, 8)),
        mixed[:1],
        check=False,
    )
    noise = {}
    for given in (None, "backend/tensorrt"):
        options = {"recipe": given} if given else {"target": "tensorrt"}
        result = qtrace.quantize(traced, mixed, tmp_path / "a.onnx", progress=False, force=True, **options)
        exact = traced(Tensor(mixed)).numpy()
        noise[given] = float(((result.converted(Tensor(mixed)).numpy() - exact) ** 2).mean())
    assert noise[None] < 0.9 * noise["backend/tensorrt"]
