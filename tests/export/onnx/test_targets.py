"""Networks of the zoo for devices that are not here: the contract of the target, and the graph's integers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import qtrace
from qtrace.extras.contracts import check_contract
from tests.nets import calibrated_if_quantized
from tests.zoo.catalog import CNN
from tests.zoo.checks import rounded_to_nearest
from tests.zoo.detectors.entries import DETECTORS
from tests.zoo.parts import pictures
from tests.zoo.quick import one_of_each
from tests.zoo.transformers.entries import TRANSFORMERS

pytestmark = pytest.mark.usefixtures("synchronous")

TARGETS = ("tensorrt", "qnn", "ryzenai")
# Each network on one target in turn in the slow tests, and each family on each target in the long ones.
ENTRIES: tuple[Any, ...] = (*CNN, *DETECTORS, *TRANSFORMERS)
SHOWN = one_of_each(ENTRIES)
CASES = [
    pytest.param(
        *(entry, target),
        id=f"{entry.name}-{target}",
        marks=pytest.mark.slow if number == index % len(TARGETS) else pytest.mark.long,
    )
    for index, entry in enumerate(ENTRIES)
    for number, target in enumerate(TARGETS)
    if entry in SHOWN or number == index % len(TARGETS)
]


@pytest.mark.parametrize(("entry", "target"), CASES)
def test_network(entry: Any, target: str, tmp_path: Path) -> None:
    args = entry.inputs(2, 0, entry.size) if hasattr(entry, "size") else (pictures(2, *entry.input_shape),)
    recipe = tmp_path / "r.yaml"
    family = "" if entry.plain else f", {entry.recipe}"
    recipe.write_text(f"schema: qtrace/1\nimports: [backend/{target}{family}]\n")
    traced = qtrace.trace(entry.build(), *args, check=False)
    prepared = qtrace.prepare(traced, rounded_to_nearest(qtrace.load_recipe(recipe)), outputs=entry.ends)
    converted = qtrace.convert(calibrated_if_quantized(prepared, [args]))
    path = qtrace.export(converted, tmp_path / "m.onnx")
    report = check_contract(path, target)
    assert report.findings == (), report.findings
    verified = qtrace.verify(path, converted, [args], optimized=False)
    assert verified.worst_lsb() <= 1, verified.table()
    assert verified.equal_share() >= 0.999, verified.table()
