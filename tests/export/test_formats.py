"""Formats: each packaged one says in its ``FORMAT`` what its writer takes."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

from qtrace.export import format_by_name, formats
from tests.each import each_of


@each_of("name", formats())
def test_a_format_lists_the_options_of_its_writer(name: str) -> None:
    chosen = format_by_name(name)
    assert chosen.name == name
    parameters = tuple(inspect.signature(chosen.write).parameters)
    if "options" in parameters:  # a class has them as fields, from which the format lists them
        assert parameters == ("converted", "path", "options")
        with pytest.raises(TypeError, match="unexpected keyword argument 'other'"):
            chosen.write(None, Path("m"), other=1)
    else:
        assert ("converted", "path", *chosen.options) == parameters
    assert set(chosen.float_options or ()) <= set(chosen.options)
