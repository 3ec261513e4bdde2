"""The packaged recipes: what each is, and that every family goes with every target."""

from __future__ import annotations

import os
import re
from functools import lru_cache
from pathlib import Path

import pytest
import yaml

from qtrace.config import QConfig, backends
from qtrace.config.checking import SYMMETRIC, is_precision, mistakes
from qtrace.config.recipe import dump_recipe, load_recipe, recipe_names
from qtrace.config.written import resolve_recipe
from tests.each import each_of

ROOT = Path(__file__).parents[2]
GOLDEN = Path(__file__).parents[1] / "golden" / "recipes.yaml"

TARGETS = tuple(name for name in recipe_names() if name.startswith("backend/"))
PARTS = tuple(n for n in recipe_names() if n.startswith("common/") and n != SYMMETRIC)
SHORT = backends.known()  # `onnxruntime` is short for `backend/onnxruntime`
FAMILIES = tuple(
    n for n in recipe_names() if "/" not in n and n not in SHORT and not n.startswith(("int8", "w4", "w8"))
)

WITHOUT_RULES = ("darknet53", "densenet", "hrnet", "regnet_x", "vgg")
UNCHECKED = {
    "ncnn",
    "openvino_avx2",
    "tflite",
}  # their measured times were not right, or not tried, on whole networks


@each_of("name", backends.known())
def test_every_backend_has_a_recipe_of_its_name(name: str) -> None:
    assert load_recipe(f"backend/{name}").backend == name


@pytest.mark.parametrize("name", ["onnxruntime", "megengine"])
def test_short_names_of_targets_stay(name: str) -> None:
    short, full = (load_recipe(n).to_dict() for n in (name, f"backend/{name}"))
    assert {**short, "description": ""} == {**full, "description": ""}


@each_of("name", recipe_names())
def test_says_what_it_is_and_is_right_and_the_same_written_out(name: str, tmp_path: Path) -> None:
    config, resolved = load_recipe(name), resolve_recipe(name)
    assert config.description
    assert not config.description.endswith(".")
    assert mistakes(config) == ()
    assert config.origin == (name if is_precision(name) else f"qtrace/recipes/{name}.yaml")
    assert all(rule.origin.startswith("qtrace/recipes/") for rule in config.rules)
    for text in (resolved.text(), dump_recipe(config)):
        (tmp_path / "again.yaml").write_text(text, encoding="utf-8")
        assert load_recipe(tmp_path / "again.yaml") == resolved.config == config


@each_of("name", recipe_names())
def test_every_rule_has_its_reason(name: str) -> None:
    """A comment above it, or above the rule right before it."""
    reason, file = False, ""
    for entry in resolve_recipe(name).entries:
        if entry.keys == ("rules",):
            here = entry.origin.partition(":")[0]
            reason = bool(entry.comment) or (reason and here == file)
            assert reason, entry.origin
            file = here


@each_of("name", [*FAMILIES, *PARTS])
def test_family_recipes_set_nothing_of_the_target(name: str) -> None:
    """So that it may be imported behind any: no schemes or observers for every op, structure in the rules."""
    config = load_recipe(name)
    said = config.model_fields_set
    assert not said & {"backend", "activation", "weight", "observers", "fakequant", "region", "name"}
    assert config.qat is None or config.qat.fakequant is None
    for rule in config.rules:
        assert rule.match.name is None
        assert rule.match.subgraph is None
        assert rule.optional or rule.match.position == "last" or rule.match.op is not None, rule.origin


@each_of("name", FAMILIES)
def test_a_family_says_all_that_is_needed(name: str) -> None:
    config = load_recipe(name)
    assert config.preprocess is not None
    assert config.preprocess.channels == "bgr"
    assert config.ptq is not None
    assert config.qat is not None
    assert config.qat.epochs
    assert config.qat.lr
    assert config.expect is not None


@each_of("family", FAMILIES)
def test_a_family_is_the_default_and_what_is_known_of_it(family: str) -> None:
    own, default = load_recipe(family), load_recipe("int8")
    assert own.placement == default.placement == "balanced"
    assert own.ptq == default.ptq
    assert own.rules[: len(default.rules)] == default.rules


@each_of("family", WITHOUT_RULES)
def test_a_family_without_rules_is_quantized_as_by_default_and_says_so(family: str) -> None:
    own, default = load_recipe(family), load_recipe("int8")
    same = ("backend", "activation", "weight", "observers", "fakequant", "rules", "placement", "ptq")
    composed = load_recipe(f"{family}+onnxruntime")
    assert all(getattr(composed, key) == getattr(default, key) for key in same)
    assert own.rules == default.rules
    assert "No rules" in (ROOT / "recipes" / f"{family}.yaml").read_text(encoding="utf-8")


def test_only_the_target_with_times_that_were_checked_is_placed() -> None:
    """In either order: the targets that are not read the family's placement first, and change it."""
    for target in TARGETS:
        placed = load_recipe(f"resnet+{target}").placement
        assert placed == ("everything" if target.removeprefix("backend/") in UNCHECKED else "balanced")


def test_a_target_that_rounds_everything_says_so_in_a_line() -> None:
    for name in TARGETS:
        if load_recipe(name).placement != "balanced":
            text = (ROOT / "recipes" / "backend" / f"{name.removeprefix('backend/')}.yaml").read_text("utf-8")
            assert any(re.match("# .*[Rr]ounds everything", line) for line in text.splitlines()), name


_loaded = lru_cache(load_recipe)


@pytest.mark.quick(1)
@pytest.mark.parametrize("target", TARGETS)
@each_of("family", FAMILIES)
def test_family_recipe_joins_every_target(family: str, target: str, tmp_path: Path) -> None:
    own, base = _loaded(family), _loaded(target)
    path = tmp_path / "mine.yaml"
    path.write_text(f"schema: qtrace/1\nimports: [{target}, {family}]\n")
    config = load_recipe(path)
    assert mistakes(config) == ()
    same = ("backend", "activation", "weight", "observers", "fakequant")
    assert all(getattr(config, key) == getattr(base, key) for key in same)
    assert config.rules == (*base.rules, *own.rules)
    assert (config.description, config.preprocess) == (own.description, own.preprocess)
    assert config.placement == load_recipe(f"{family}+{target}").placement


def test_more_than_one_part_counts_once() -> None:
    origins = [rule.origin for rule in load_recipe("yolox").rules]
    assert len(origins) == len(set(origins))


def test_packaged_recipes_match_their_golden_file() -> None:
    """In a file that people read; where a change is meant, ``QTRACE_GOLDEN=write pytest`` writes it anew."""
    found = {name: load_recipe(name).to_dict() for name in recipe_names()}
    if os.environ.get("QTRACE_GOLDEN") == "write":
        text = yaml.safe_dump(found, sort_keys=False, width=110, default_flow_style=None)
        GOLDEN.write_text(text, encoding="utf-8")
    assert yaml.safe_load(GOLDEN.read_text(encoding="utf-8")) == found


def test_every_recipe_is_a_config_of_its_dump() -> None:
    for name in recipe_names():
        config = load_recipe(name)
        assert QConfig(**config.to_dict()) == config
