"""Every family's recipe on a network of that family, for targets that differ."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import megengine as mge
import pytest

import qtrace
from qtrace.config import backends
from qtrace.config.recipe import recipe_names
from qtrace.graph.types import TracedModule
from qtrace.preparation.annotation import ExprNote
from qtrace.preparation.prepare import plan
from tests.zoo.catalog import CNN
from tests.zoo.detectors.entries import DETECTORS
from tests.zoo.parts import pictures
from tests.zoo.quick import one_of_each
from tests.zoo.shares import LAYERS
from tests.zoo.transformers.entries import TRANSFORMERS

# One scale per tensor, float results, 16 bits, affine weights, tied inputs.
TARGETS = tuple(f"backend/{name}" for name in ("megengine", "ncnn", "qnn_a16", "snpe", "tensorrt"))
# Layers of the zoo that a target computes in float.
WITHOUT_KERNEL = {"backend/ncnn": {("conv_transpose2d", "float")}}
ENTRIES: tuple[Any, ...] = (*CNN, *DETECTORS, *TRANSFORMERS)
# Short names of a target, and recipes of which another family's is a part in all but numbers.
TARGETS_BY_SHORT_NAME = {"onnxruntime", "megengine"}
ALIKE = {"resnet18", "resnet50", "efficientnet_b0", "efficientnet_b1", "efficientnet_b2", "w4a4_lsq"}
ALIKE |= {"int8", "w4a4_reconstruct", "w4a8_adaround"}
PRECISIONS = {"w8a8", "w8a16", "w4a8", "w4a16"}  # of any network: tests/config/test_precision.py
METHODS = {"w8", "w4", "w8a8_dynamic"}  # tests/export/onnx/test_methods.py
CASES = one_of_each([entry for entry in ENTRIES if not entry.plain])
SLOW = {"freeanchor"}  # RetinaNet's network and recipe with another loss


def test_every_family_has_a_network_that_the_quick_tests_run() -> None:
    general = TARGETS_BY_SHORT_NAME | ALIKE | PRECISIONS | METHODS
    families = {name for name in recipe_names() if "/" not in name} - general
    assert {entry.recipe for entry in ENTRIES if not entry.plain} == families
    assert {entry.recipe for entry in ENTRIES if not entry.plain and not entry.slow} == families - SLOW


def test_every_family_is_tried_on_every_target() -> None:
    assert {entry.recipe for entry in CASES} == {entry.recipe for entry in ENTRIES if not entry.plain}


def test_plain_entries_are_families_without_a_recipe() -> None:
    assert not {entry.family for entry in ENTRIES if entry.plain} & set(recipe_names())


@pytest.fixture(scope="module")
def case(request: pytest.FixtureRequest) -> Iterator[tuple[TracedModule, str]]:
    entry = request.param
    level = mge.config.async_level
    mge.config.async_level = 0  # F.arange races when several are queued
    inputs = entry.inputs(1, 1, entry.size) if hasattr(entry, "size") else (pictures(1, *entry.input_shape),)
    yield qtrace.trace(entry.build(), *inputs, check=False), entry.recipe
    mge.config.async_level = level


def _constant(note: ExprNote, recipe: str) -> bool:
    """Of DETR's first decoder layer: until it meets the image, zeros and learned queries are all it sees."""
    return recipe == "detr" and note.state == "shape" and note.path.startswith("decoder.0.")


def _pairs() -> list[Any]:
    """Each network on two targets in turn in the slow tests, and on the others in the long ones."""
    marks = (pytest.mark.slow, pytest.mark.long)
    return [
        pytest.param(
            entry, target, id=f"{entry.name}-{target}", marks=marks[(number - index) % 5 not in (0, 2)]
        )
        for index, entry in enumerate(CASES)
        for number, target in enumerate(TARGETS)
    ]


@pytest.mark.parametrize(("case", "target"), _pairs(), indirect=["case"], scope="module")
def test_layers_are_on_integers_and_nothing_is_rounded_twice(
    case: tuple[TracedModule, str], target: str, tmp_path: Path
) -> None:
    traced, recipe = case
    path = tmp_path / "mine.yaml"
    path.write_text(f"schema: qtrace/1\nimports: [{target}, {recipe}]\n")
    annotation = plan(traced, path)
    layers = [note for note in annotation.notes if note.kind in LAYERS and not _constant(note, recipe)]
    kernels = backends.get(annotation.backend).ops  # ncnn has none for transposed convolutions
    slow = {note.name for note in layers if note.causes == ("speed",)}  # the zoo's networks are narrow
    assert not slow or target in ("backend/tensorrt", "backend/ncnn")
    # A layer that gives integers alone is in float where a gate decides by its result.
    gates = {note.name for note in layers if note.causes == ("selection",)}
    assert not gates or (recipe == "centernet" and len(gates) == 1)
    in_float = slow | gates
    assert {note.state for note in layers if note.kind in kernels and note.name not in in_float} <= {"int"}
    without = [note for note in layers if note.kind not in kernels]
    assert {(note.kind, note.state) for note in without} <= WITHOUT_KERNEL.get(target, set())
    assert all("kernel" in note.causes for note in without)
    sites = [site for site in annotation.sites if site.sort == "activation"]
    # QNN's convolutions give as many bits as they read: a reader that wants more rounds again.
    nodes = [(s.node, s.plan.scheme.bits if s.plan and annotation.backend == "qnn" else 0) for s in sites]
    assert len(nodes) == len(set(nodes)), "a tensor is rounded twice"
