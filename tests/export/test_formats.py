"""Formats: each packaged one says in its ``FORMAT`` what its writer takes."""

from __future__ import annotations

import inspect

from qtrace.export import format_by_name, formats
from tests.each import each_of


@each_of("name", formats())
def test_a_format_lists_the_options_of_its_writer(name: str) -> None:
    chosen = format_by_name(name)
    assert chosen.name == name
    assert ("converted", "path", *chosen.options) == tuple(inspect.signature(chosen.write).parameters)
    assert set(chosen.float_options or ()) <= set(chosen.options)
