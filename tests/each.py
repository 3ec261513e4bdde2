"""Many small cases in one test: what pytest does around each of thousands takes longer than they do."""

from __future__ import annotations

import functools
import inspect
import reprlib
import sys
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import pytest

__all__ = ["each_of", "quick_cases", "seed"]


def seed(name: str) -> None:
    """Random numbers that depend on ``name`` alone, not on the tests that ran before in this worker."""
    number = zlib.crc32(name.encode())
    np.random.seed(number)
    if "megengine" in sys.modules:
        sys.modules["megengine"].random.seed(number)


def each_of(names: str | Sequence[str], cases: Iterable[Any], ids: Any = None) -> Callable[..., Any]:
    """Runs a test for each case, as ``pytest.mark.parametrize`` does, but as one test that names what failed.

    A case has random numbers by its place, its own folder in ``tmp_path``, and undoes its own patches.

    Args:
        names: of the arguments, as ``parametrize`` takes them.
        cases: their values: one, or a tuple where there are several names.
        ids: their names; the values otherwise, also where it is a function.
    """
    keys = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
    rows = list(cases)
    single = len(keys) == 1 and isinstance(names, str)
    labels = [reprlib.repr(row) for row in rows] if ids is None or callable(ids) else list(ids)

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def run(*args: Any, **fixtures: Any) -> None:
            failed: dict[str, BaseException] = {}
            for number, (label, row) in enumerate(zip(labels, rows, strict=True)):
                values = dict(zip(keys, [row] if single else row, strict=True))
                own = dict(fixtures)
                if "tmp_path" in own:
                    own["tmp_path"] = own["tmp_path"] / str(number)
                    own["tmp_path"].mkdir()
                seed(f"{test.__module__}.{test.__qualname__}[{number}]")
                with pytest.MonkeyPatch.context() as patch:
                    if "monkeypatch" in own:
                        own["monkeypatch"] = patch
                    try:
                        test(*args, **values, **own)
                    except (Exception, pytest.fail.Exception) as error:
                        failed[str(label)] = error
            if failed:
                first = next(iter(failed.values()))
                raise AssertionError(f"{len(failed)} of {len(rows)} cases: {', '.join(failed)}") from first

        signature = inspect.signature(test)
        kept = [value for name, value in signature.parameters.items() if name not in keys]
        run.__signature__ = signature.replace(parameters=kept)  # type: ignore[attr-defined]
        return run

    return decorate


def quick_cases(cases: list[pytest.Item]) -> list[pytest.Item]:
    """Returns the cases of a test that the quick suite runs.

    Of a test with several `parametrize`, as many as show each value once; of one that is marked ``quick``, as
    many as the mark says, evenly; else all.
    """
    if (mark := cases[0].get_closest_marker("quick")) is not None:
        return [cases[i * len(cases) // mark.args[0]] for i in range(mark.args[0])]
    quick, new = list[pytest.Item](), set().union(*map(_values, cases))
    while new:
        quick.append(max(cases, key=lambda case: len(_values(case) & new)))
        new -= _values(quick[-1])
    return quick or cases


def _values(case: pytest.Item) -> set[tuple[int, str]]:
    """Returns the place of each `parametrize` of a test and the name of the value that it gives."""
    return {*enumerate(case.callspec._idlist)} if hasattr(case, "callspec") else set()
