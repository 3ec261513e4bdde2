"""The glossary has each term once, and a term for each room of the package."""

from __future__ import annotations

import re
from pathlib import Path

from tests.each import each_of
from tests.test_architecture import PLUG_INS
from tests.test_architecture import ROOMS as ALL_ROOMS

TEXT = (Path(__file__).parents[2] / "docs" / "glossary.md").read_text(encoding="utf-8")
ROOMS = {room for room in ALL_ROOMS if not room.startswith(PLUG_INS)}  # a plug-in has a name of its own
NOT_ROOMS = {"__init__", "__main__"}
_ENTRY = re.compile(r"^(?P<terms>[^\n:#`-].*)\n:   (?P<meaning>(?:.+\n?)(?:    .+\n?)*)", re.MULTILINE)


def read_entries(text: str) -> list[tuple[list[str], str]]:
    """The terms of each entry, and its meaning in one line."""
    entries = _ENTRY.finditer(text)
    return [(re.split(r", | \(|\)", e["terms"]), " ".join(e["meaning"].split())) for e in entries]


def named_rooms(text: str) -> dict[str, list[str]]:
    """Room -> the terms of the entries that end with it."""
    rooms: dict[str, list[str]] = {}
    for terms, meaning in read_entries(text):
        if match := re.search(r"Room: `(\w+)(?:/|\.py)`\.$", meaning):
            rooms.setdefault(match[1], []).extend(terms)
    return rooms


def names(term: str, room: str) -> bool:
    """Whether a room bears the name of a term: `preparation` of "prepare", `ops` of "op"."""
    letters = re.sub(r"[^a-z]", "", term.lower())
    return bool(letters) and room.startswith(letters[:4])


def test_every_definition_is_read() -> None:
    assert len(read_entries(TEXT)) == len(re.findall(r"^:   ", TEXT, re.MULTILINE))


def test_glossary_has_at_most_60_entries() -> None:
    assert len(ROOMS) < len(read_entries(TEXT)) <= 60


def test_every_term_stands_once() -> None:
    terms = [term for terms, _ in read_entries(TEXT) for term in terms if term]
    assert sorted(terms) == sorted(set(terms))


def test_the_rooms_of_the_glossary_are_those_of_the_package() -> None:
    assert set(named_rooms(TEXT)) == set(ROOMS) - NOT_ROOMS
    assert len(re.findall(r"\bRoom: ", TEXT)) == len(ROOMS) - len(NOT_ROOMS)


@each_of("room", sorted(set(ROOMS) - NOT_ROOMS))
def test_a_room_is_named_by_a_term(room: str) -> None:
    assert any(names(term, room) for term in named_rooms(TEXT)[room])


def test_another_name_is_no_name_of_the_room() -> None:
    assert names("prepare", "preparation")
    assert names("fine-tune", "finetuning")
    assert not names("phase", "preparation")
    assert not names("calibrate", "collection")
    assert named_rooms("a, b (c)\n:   Text\n    more. Room: `x/`.\n\nd\n:   None.\n") == {
        "x": ["a", "b", "c", ""]
    }
