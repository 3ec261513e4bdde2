"""`each_of` runs every case, gives it what a test of its own would have, and names what failed."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from tests.each import each_of, quick_cases


def test_every_case_runs_and_those_that_fail_are_named() -> None:
    seen = []

    @each_of("a, b", [(1, 2), (3, 3), (5, 6)])
    def below(a: int, b: int) -> None:
        seen.append(a)
        assert a == b

    with pytest.raises(AssertionError, match=r"^2 of 3 cases: \(1, 2\), \(5, 6\)$"):
        below()
    assert seen == [1, 3, 5]


@each_of("number", range(2))
@each_of(("name", "value"), [("a", 1), ("b", 2)], ids=["first", "second"])
def test_a_case_has_its_own_folder_and_patches(
    number: int, name: str, value: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not list(tmp_path.iterdir())
    assert "QTRACE_OF_A_CASE" not in os.environ
    monkeypatch.setenv("QTRACE_OF_A_CASE", name)
    (tmp_path / name).write_text(str(value))


def test_random_numbers_of_a_case_do_not_depend_on_the_case_before() -> None:
    drawn: list[float] = []

    @each_of("count", [1, 2])
    def draw(count: int) -> None:
        drawn.append(np.random.random(count)[-1])

    draw()
    np.random.random(5)
    draw()
    assert drawn[:2] == drawn[2:]


@pytest.mark.parametrize("a", range(3))
@pytest.mark.parametrize(("b", "c"), [("x", "y"), ("x", "z")])
def test_product(a: int, b: str, c: str) -> None:
    pass


@pytest.mark.quick(2)
@pytest.mark.parametrize("a", range(6))
def test_marked(a: int) -> None:
    pass


def test_quick_cases_show_each_value_once_or_are_as_many_as_marked(request: pytest.FixtureRequest) -> None:
    module = request.node.getparent(pytest.Module)
    names: dict[str, list[str]] = {}
    for test in (test_product, test_marked, test_every_case_runs_and_those_that_fail_are_named):
        cases = [item for item in module.collect() if getattr(item, "obj", None) is test]
        names[test.__name__] = [case.name.partition("[")[2] for case in quick_cases(cases)]
    assert names == {"test_product": ["x-y-0]", "x-z-1]", "x-y-2]"], "test_marked": ["0]", "3]"]} | {
        "test_every_case_runs_and_those_that_fail_are_named": [""]
    }
