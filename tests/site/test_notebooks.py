"""The notebooks run in a kernel of their own, show what is stored, and stand as pages on the site."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from scripts import notebooks
from scripts.site import notebooks as site
from tests.each import each_of

NOTEBOOKS = notebooks.notebooks()
_LINES = 40
_BYTES = 150_000
_POINTS = 10  # of an accuracy, between processors


def _code_cells(path: Path) -> list[Any]:
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return [SimpleNamespace(**cell) for cell in cells if cell["cell_type"] == "code"]


def test_three_notebooks_exist() -> None:
    assert [path.stem for path in NOTEBOOKS] == ["cure", "four-bits", "onnx"]


@each_of("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_outputs_are_stored_short_and_without_warnings(path: Path) -> None:
    assert path.stat().st_size < _BYTES
    cells = _code_cells(path)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell.outputs]
    assert outputs
    for output in outputs:
        assert output["output_type"] != "error"
        assert output.get("name") != "stderr", output
        text = "".join(output.get("text") or output["data"]["text/plain"])
        assert len(text.splitlines()) <= _LINES
        assert "object at 0x" not in text


@each_of("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_a_notebook_is_a_page_with_its_outputs(path: Path) -> None:
    page = site.pages()[f"notebooks/{path.stem}.md"]
    assert page.startswith("# ")
    assert ".ipynb)" not in page.replace(f"({path.name})", "")  # links lead to pages
    shown = site.with_outputs(page)
    assert "data-output" not in shown
    cells = _code_cells(path)
    assert page.count("```python\n") == len(cells)
    assert shown.count('class="cell-output"') == sum(bool(cell.outputs) for cell in cells)
    assert shown.count("<table") >= 2


def test_an_output_is_not_read_as_markdown_or_html(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outputs = [
        {"output_type": "stream", "name": "stdout", "text": ["<b> *a*\n"]},
        {"output_type": "display_data", "data": {"text/plain": "x", "image/png": "QUJD\n"}},
        {"output_type": "execute_result", "data": {"text/plain": "x", "text/html": ["<i>y</i>"]}},
    ]
    cells = [
        {"cell_type": "markdown", "id": "a", "source": ["# T\n", "[b](other.ipynb#c)"]},
        {"cell_type": "code", "id": "b", "source": ["1"], "outputs": outputs},
    ]
    (tmp_path / "own.ipynb").write_text(json.dumps({"cells": cells}))
    monkeypatch.setattr(site, "FOLDER", tmp_path)
    (page,) = site.pages().values()
    assert "(other.md#c)" in page
    shown = site.with_outputs(page)
    assert "<pre>&lt;b&gt; *a*\n</pre>" in shown
    assert 'src="data:image/png;base64,QUJD"' in shown
    assert "<i>y</i></div>" in shown


def _cell(text: str, *tags: str) -> Any:
    output = {"output_type": "stream", "name": "stdout", "text": text}
    return _Cell({"outputs": [output]}, metadata={"tags": list(tags)})


class _Cell(dict):
    def __init__(self, content: dict[str, Any], metadata: dict[str, Any]) -> None:
        super().__init__(content)
        self.metadata = metadata


def test_what_counts_of_a_text() -> None:
    assert notebooks.stable_text(_cell("a  12.5 dB\n-----\n")) == notebooks.stable_text(_cell("a 9 dB\n---"))
    assert notebooks.stable_text(_cell("verdict   good")) != notebooks.stable_text(_cell("verdict   check"))
    first, second = ("site  dB\nverdict   good\nx  1", "site  dB\nverdict   good\ny  2")
    assert notebooks.stable_text(_cell(first, "varies")) == notebooks.stable_text(_cell(second, "varies"))
    other = _cell(second.replace("good", "broken"), "varies")
    assert notebooks.stable_text(_cell(first, "varies")) != notebooks.stable_text(other)


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_a_notebook_shows_what_is_stored(path: Path) -> None:
    nbformat = pytest.importorskip("nbformat", reason="nbformat is installed with the extra dev")
    pytest.importorskip("nbclient", reason="nbclient is installed with the extra dev")
    stored = nbformat.read(path, as_version=4)
    ran = notebooks.execute(path)
    for old, new in zip(stored.cells, ran.cells, strict=True):
        if new.cell_type != "code":
            continue
        assert not [output for output in new.outputs if output.get("name") == "stderr"], new.source
        shown = notebooks.stable_text(new)
        assert shown == notebooks.stable_text(old), f"{new.source}\nrun `make notebooks` and look at it"
        if notebooks.VARIES not in new.metadata.get("tags", ()):
            percents = [re.findall(r"([\d.]+) %", "\n".join(notebooks.texts(cell))) for cell in (old, new)]
            for before, after in zip(*percents, strict=True):
                assert abs(float(before) - float(after)) <= _POINTS, new.source
