"""What explain says under every recipe and of every network of the zoo, in small files that people have read.

A change of a rule, a recipe or a backend shows there, network by network. Where the change is meant, this
writes the files anew; read their diff before committing it:

    QTRACE_GOLDEN=write python -m pytest -m "" tests/inspection/explanation/test_golden.py
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

import qtrace
from qtrace.config.recipe import recipe_names
from qtrace.graph.types import TracedModule
from qtrace.inspection.explanation import Explanation
from tests.inspection.explanation.proposing import unkept
from tests.nets import MobileNetV2, ResNet, images, randomize
from tests.zoo.catalog import CNN
from tests.zoo.detectors.entries import DETECTORS
from tests.zoo.transformers.entries import TRANSFORMERS, USER_NETS

FOLDER = Path(__file__).parents[2] / "golden" / "explain"
WRITE = os.environ.get("QTRACE_GOLDEN") == "write"


@dataclass(frozen=True)
class Case:
    """A network under a recipe.

    Attributes:
        name: of the file.
        recipe: the recipe's name.
        trace: makes the traced network.
    """

    name: str
    recipe: str
    trace: Callable[[], TracedModule]


def _ours(name: str, build: Callable[[], Any], *recipes: str) -> list[Case]:
    @lru_cache(maxsize=1)
    def trace() -> TracedModule:
        return qtrace.trace(randomize(build()), images(1, 3, 64, 64), check=False)

    return [Case(f"{name}-{recipe.replace('/', '-')}", recipe, trace) for recipe in recipes]


def _of_the_zoo(entry: Any) -> Case:
    def trace() -> TracedModule:
        """The forward that its own tests trace; weights play no part here."""
        if hasattr(entry, "inputs"):
            example = entry.inputs(1, 0, entry.size)
        else:
            example = (images(1, *entry.input_shape),)
        return qtrace.trace(entry.build(), *example, check=False)

    return Case(f"zoo-{entry.name.replace(':', '-')}", entry.recipe, trace)


NAMES = recipe_names()
TARGETS = tuple(name for name in NAMES if name.startswith("backend/"))
# Recipes that differ from one that is here in the size of images, or in nothing.
ALIKE = {"efficientnet_b0", "efficientnet_b1", "efficientnet_b2"}
ALIKE |= {"megengine", "onnxruntime", "resnet18", "resnet50"}
# Widths for any target: tests/config/test_precision.py, tests/export/onnx/test_methods.py.
ALIKE |= {"w4", "w4a16", "w4a8", "w8", "w8a16", "w8a8", "w8a8_dynamic"}

OF_NO_FAMILY = ("int8", "w4a4_lsq", "w4a4_reconstruct", "w4a8_adaround")

CASES = [
    *_ours("resnet", lambda: ResNet(8, (1, 1, 1, 1)), "resnet", *OF_NO_FAMILY, *TARGETS),
    *_ours("mobilenet_v2", MobileNetV2, "mobilenet_v2"),
]
SLOW = [
    *_ours("mobilenet_v2", MobileNetV2, *TARGETS),
    *(_of_the_zoo(entry) for entry in (*CNN, *DETECTORS, *TRANSFORMERS, *USER_NETS)),
]


def _params() -> list[Any]:
    slow = [pytest.mark.slow]
    return [pytest.param(c, id=c.name, marks=marks) for cs, marks in ((CASES, []), (SLOW, slow)) for c in cs]


@pytest.mark.parametrize("case", _params())
def test_the_summary_is_as_reviewed_and_every_proposal_holds(case: Case) -> None:
    traced = case.trace()
    # Times and noise, by which a placement chooses, differ a little between machines.
    explanation = qtrace.explain(traced, qtrace.load_recipe(case.recipe).without_placement())
    _compare(case, explanation)
    assert unkept(traced, explanation) == []


def _compare(case: Case, explanation: Explanation) -> None:
    told = f"recipe:        {case.recipe}\n{explanation.summary(None)}\n"
    told = re.sub(r"(\.yaml):\d+", r"\1", told)  # lines move whenever a comment is written
    told = re.sub("; backends with one: .*", "", told)  # these become more
    file = FOLDER / f"{case.name}.txt"
    if WRITE:
        FOLDER.mkdir(parents=True, exist_ok=True)
        file.write_text(told, encoding="utf-8")
    assert file.exists(), f"{file} is missing; see the top of {Path(__file__).name}"
    assert told == file.read_text(encoding="utf-8")


def test_golden_summaries_match_the_networks() -> None:
    assert {path.stem for path in FOLDER.glob("*")} == {case.name for case in (*CASES, *SLOW)}


def test_every_recipe_is_here() -> None:
    parts = {name for name in NAMES if name.startswith("common/")}
    assert set(NAMES) - parts - ALIKE == {case.recipe for case in (*CASES, *SLOW)} - ALIKE
