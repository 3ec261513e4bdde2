"""RetinaNet's head is called for five levels: one site a weight, and ranges for each level or for all."""

from __future__ import annotations

from pathlib import Path

import pytest

import qtrace
from qtrace.graph.types import TracedModule
from qtrace.preparation.annotation import Annotation, Site
from qtrace.preparation.model import fake_quants
from tests.zoo.detectors.dense import STRIDES, RetinaNet
from tests.zoo.detectors.entry import bounded, trained

SHARED = "rules: [{match: {shared: true}, share: true}]\n"
LAYERS = ("cls_subnet_0", "cls_subnet_2", "bbox_subnet_0", "bbox_subnet_2", "cls_score", "bbox_pred")


@pytest.fixture(scope="module")
def traced() -> TracedModule:
    return qtrace.trace(trained(RetinaNet()), bounded(1, 0, 64), check=False)


def _prepared(traced: TracedModule, folder: Path, more: str = "") -> TracedModule:
    """By the recipe, with ranges that can be foretold."""
    recipe = folder / "mine.yaml"
    recipe.write_text(
        "schema: qtrace/1\nimports: [retinanet]\nplacement: everything\nptq: [fuse_bn]\n"
        f"observers: {{activation: minmax}}\n{more}",
        encoding="utf-8",
    )
    return qtrace.calibrate(qtrace.prepare(traced, recipe), [bounded(2, 1, 64)], progress=False)


def _read(annotation: Annotation, layer: str) -> list[str]:
    """The groups that the calls of a layer read, a level each."""
    (weight,) = _weights(annotation, layer)
    calls = [n for n in annotation.notes if n.weight == weight.name]
    assert len(calls) == len(STRIDES) == 5
    return [note.inputs[0] for note in calls]


def _weights(annotation: Annotation, layer: str) -> list[Site]:
    return [s for s in annotation.sites if s.sort == "weight" and s.node == f"head_{layer}_weight"]


def test_each_level_has_its_ranges_or_all_have_the_widest(traced: TracedModule, tmp_path: Path) -> None:
    apart, shared = _prepared(traced, tmp_path), _prepared(traced, tmp_path, SHARED)
    scales = [{fq.site: float(fq.qparams().scale.max()) for fq in fake_quants(m)} for m in (apart, shared)]
    notes = [qtrace.explain(m).annotation for m in (apart, shared)]
    for layer in LAYERS:
        levels, together = (_read(a, layer) for a in notes)
        assert len(set(levels)) == 5
        assert len(set(together)) == 1
        if layer.endswith("subnet_0"):  # both towers read what the pyramid gives: not above zero only
            assert scales[1][together[0]] >= max(scales[0][group] for group in levels)
        else:
            assert scales[1][together[0]] == max(scales[0][group] for group in levels)
