"""Holds the size of the package at budget.json, whose figures only go down; ``make budget`` shows them."""

from __future__ import annotations

import os
import shutil
import subprocess

from scripts import budget, style
from tests.each import each_of


def _figures(lines: int, **reach: int) -> dict[str, dict]:
    row = dict.fromkeys(budget.COLUMNS, 0)
    return {"rooms": {"graph": {**row, "lines": lines}}, "reach": reach, "style": {}}


def test_sizes_of_rooms_stay_within_the_budget():
    measured = budget.measure(budget.read_sources(), budget.read_pages())
    assert budget.exceeded(measured, budget.read_budget()) == []


def test_no_sentence_has_more_than_35_words():
    texts = [source.text for source in budget.read_sources()]
    prose = [text for code in texts for text in (*style.docstrings(code), *style.messages(code))]
    prose += [page.read_text(encoding="utf-8") for page in budget.read_pages()]
    assert [s for text in prose for s in style.sentences(text) if len(s.split()) > 35] == []


def test_raises_of_the_budget_are_explained():
    assert budget.unexplained_raises(budget.read_versions()) == []


def test_budget_refuses_growth_and_new_rooms():
    measured = {**_figures(11, prepare=7)}
    measured["rooms"]["new"] = dict.fromkeys(budget.COLUMNS, 1)
    sentences = budget.exceeded(measured, _figures(10, prepare=6))
    assert "rooms.graph.lines is 11, and its budget is 10." in sentences
    assert "rooms.new.files is 1, and its budget is 0." in sentences
    assert "reach.prepare is 7, and its budget is 6." in sentences
    assert budget.exceeded(_figures(10, prepare=6), _figures(10, prepare=6)) == []


def test_raise_needs_an_entry_with_its_reason():
    older, newer = _figures(10), _figures(12)
    assert budget.unexplained_raises([older, newer]) == [
        "rooms.graph.lines went from 10 to 12 without an entry in raises."
    ]
    entry = {
        "figure": "rooms.graph.lines",
        "from": 10,
        "to": 12,
        "why": "a new op",
        "taken away": "two old ones",
    }
    assert budget.unexplained_raises([older, {**newer, "raises": [entry]}]) == []
    assert budget.unexplained_raises([older, {**newer, "raises": [{**entry, "why": ""}]}]) != []
    assert budget.unexplained_raises([older, {**newer, "raises": [{**entry, "to": 11}]}]) != []
    assert budget.unexplained_raises([newer, older]) == []


def test_lowering_never_raises():
    lowered = budget.lower(_figures(8, prepare=9), {**_figures(10, prepare=7), "raises": []})
    assert lowered["rooms"]["graph"]["lines"] == 8
    assert lowered["reach"]["prepare"] == 7


def test_table_shows_the_budget_where_it_differs():
    table = budget.describe(_figures(8, prepare=9), _figures(10, prepare=9))
    assert "8/10" in table
    assert "prepare 9" in table


def test_lines_are_counted_without_docstrings_comments_and_blanks():
    text = '''"""Doc."""

# comment
X = 1  # why

def f(a,
      b):
    """Doc
    more."""
    return """a
    b"""
'''
    assert budget.measure_file(text)["lines"] == 5


@each_of(
    "text", ["A = 1", "_A = -0.5", "A = 2**20", "A: int = 3", "A, B = 1, 2", "A = {'x': 0.1}", "A = (1, 2)"]
)
def test_constants_of_numbers_are_counted(text):
    assert budget.measure_file(text)["numbers"] == 1


@each_of("text", ["A = 'x'", "A = f(1)", "A = B * 2", "def f():\n    A = 1", "A = True", "A = ()"])
def test_other_constants_are_not_counted(text):
    assert budget.measure_file(text)["numbers"] == 0


def test_long_signatures_and_large_classes_are_counted():
    arguments = ", ".join(f"a{n}" for n in range(9))
    fields = "\n".join(f"    f{n}: int" for n in range(13))
    figures = budget.measure_file(f"def f({arguments}): ...\ndef g(a): ...\nclass C:\n{fields}\n")
    assert (figures["functions"], figures["classes"]) == (1, 1)


def test_reach_follows_imports_in_functions_but_not_those_for_types():
    imports = {
        "qtrace.a": budget.imported_names("from qtrace.b import f\ndef g():\n    import qtrace.c"),
        "qtrace.b": budget.imported_names("if TYPE_CHECKING:\n    from qtrace.d import D"),
        "qtrace.c": budget.imported_names("from qtrace import b"),
        "qtrace.d": set(),
    }
    assert budget.reached_modules("qtrace.a", imports) == {"qtrace.a", "qtrace.b", "qtrace.c"}


@each_of(("seconds", "slowness", "code"), [(0, 1, 0), (3700, 1, 1), (3700, 2, 0)])
def test_ci_holds_its_time_and_ends_with_the_output_of_the_tests(tmp_path, seconds, slowness, code):
    (tmp_path / ".ci").mkdir()
    shutil.copy(budget.ROOT / ".ci/run", tmp_path / ".ci/run")
    script = tmp_path / ".ci/run"
    script.write_text(script.read_text().replace("types=$took", f"types={13 * slowness}"))
    for name, text in {"make": 'echo "stage $1"', "chromium": ""}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SECONDS": str(seconds)}
    run = subprocess.run([script], env=environment, capture_output=True, text=True)
    assert run.returncode == code
    assert run.stdout.splitlines()[-1] == "stage test"
    assert run.stderr.startswith("error: all of .ci/run took 37" if code else "")
    stages = [line.split()[-1] for line in (tmp_path / ".ci/times").read_text().splitlines()]
    assert stages[-3:] == ["test-slow", "test", "all"]
