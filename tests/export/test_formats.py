"""Formats: each packaged one says in its ``FORMAT`` what its writer takes."""

from __future__ import annotations

import importlib
import inspect

from qtrace.export import formats
from qtrace.export.format import Format
from tests.each import each_of


@each_of("name", formats())
def test_a_format_lists_the_options_of_its_writer(name: str) -> None:
    chosen: Format = importlib.import_module(f"qtrace.export.{name}").FORMAT
    assert chosen.name == name
    assert ("converted", "path", *chosen.options) == tuple(inspect.signature(chosen.write).parameters)
    assert set(chosen.float_options or ()) <= set(chosen.options)
