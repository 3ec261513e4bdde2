"""docs/measured/families.md says of every network of the zoo what the script measures."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from scripts.families import NETWORKS, main, measure, render

PAGE = (Path(__file__).parents[2] / "docs" / "measured" / "families.md").read_text(encoding="utf-8")
ROWS = [
    tuple(cell.strip() for cell in line.strip("|").split("|"))
    for line in PAGE.splitlines()
    if "dB |" in line or " % |" in line
]


def test_the_page_has_every_network_with_its_recipe_above_its_floor() -> None:
    found = {network: (family, recipe, float(sqnr)) for family, recipe, network, _, sqnr, _ in ROWS[1:]}
    assert list(found) == [entry.name for entry in NETWORKS]
    for entry in NETWORKS:
        family, recipe, sqnr = found[entry.name]
        assert (family, recipe) == (entry.family, f"`{entry.recipe}`")
        assert entry.sqnr <= sqnr <= entry.sqnr + 3.5


@pytest.mark.parametrize("name", ["resnet_basic", "vit"])
def test_the_script_measures_what_the_page_says(name: str) -> None:
    entry = next(e for e in NETWORKS if e.name == name)
    row = measure(entry)
    family, recipe, network, share, sqnr, islands = next(r for r in ROWS if r[2] == name)
    assert (family, recipe, network, share, islands) == (*row.cells()[:4], row.cells()[5])
    assert float(sqnr) == pytest.approx(row.sqnr, abs=0.5)
    assert re.fullmatch(r"\|( --- \|){6}", render([row]).splitlines()[1])


def test_an_unknown_name_is_told_with_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["resnett"]) == 2
    assert "unknown: resnett; known: alexnet, atss" in capsys.readouterr().err
