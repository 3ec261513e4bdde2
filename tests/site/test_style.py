"""The words that `scripts.style` counts; tests/test_budget.py holds the counts."""

from __future__ import annotations

import pytest

from scripts import style
from tests.each import each_of


def test_sentences_leave_out_code_tables_and_headings():
    text = "# Title\n\nOne sentence. Another\none: with a `name`.\n\n```\ncode that of\n```\n\n| a | b |\n"
    text += "\n- A point\n- Two. Three.\n"
    assert style.sentences(text) == [
        *("One sentence.", "Another one: with a `name`."),
        *("- A point", "- Two.", "Three."),
    ]


@each_of(
    ("text", "name"),
    [
        ("The range of a and that of b.", "that of, those of"),
        ("An op behind a layer.", "behind, in front of"),
        ("Weights alone are rounded.", "alone"),
        ("The file beside float.", "beside"),
        ("An op has no kernel.", "has not, have no"),
        ("A line tells of the loss.", "tells of"),
    ],
)
def test_words_are_counted_per_thousand(text, name):
    counts = style.measure([text])
    assert counts[name] == pytest.approx(1000 / len(text.split()))
    assert sum(counts.values()) == counts[name]


def test_long_sentences_are_a_share():
    assert style.measure(["One two.", "word " * 26 + "end."])[style.LONG] == 50
    assert style.measure([])[style.LONG] == 0


def test_docstrings_and_messages_are_found():
    text = '''"""Module."""

class A:
    """Class."""

    def f(self, x):
        """Function."""
        raise ValueError(f"{x} is wrong: give another")
'''
    assert style.docstrings(text) == ["Module.", "Class.", "Function."]
    assert style.messages(text) == ["X is wrong: give another"]
