"""The line of the user's code that an expr was recorded for."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import megengine as mge
import megengine.functional as F
import megengine.module as M
import pytest

import qtrace
from qtrace.graph.flatten import flatten
from qtrace.graph.notes import attach_lines, detach_lines, source_line
from qtrace.graph.types import TracedModule
from tests.each import each_of
from tests.nets import images, randomize

IMAGE = images(1, 3, 8, 8)


class Block(M.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = M.Conv2d(3, 3, 1)

    def forward(self, x: mge.Tensor) -> mge.Tensor:
        y = self.conv(x)
        return F.relu(y) + 1  # two ops on one line


class Twice(M.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: mge.Tensor) -> mge.Tensor:
        return self.block(self.block(x))


def _number(part: str) -> int:
    return next(n for n, line in enumerate(Path(__file__).read_text().splitlines(), 1) if part in line)


def _lines(traced: TracedModule) -> dict[str, int]:
    """Output of each op -> its line; every line is one of this file."""
    lines = {}
    for expr in traced.graph._exprs:
        line = source_line(expr)
        if line:
            file, _, number = line.rpartition(":")
            assert file.endswith("tests/graph/test_source_lines.py")
            assert not file.startswith("/")
            lines[expr.outputs[0].name] = int(number)
    return lines


@pytest.fixture(scope="module")
def traced() -> TracedModule:
    return qtrace.trace(randomize(Twice()), IMAGE, check=False)


def test_each_op_of_a_block_that_is_called_twice_has_its_line(traced: TracedModule) -> None:
    conv, relu = _number("y = self.conv(x)"), _number("return F.relu(y) + 1")
    assert sorted(_lines(flatten(traced)).values()) == [conv, conv, relu, relu, relu, relu]


def test_copies_and_files_keep_the_lines(traced: TracedModule, tmp_path: Path) -> None:
    expected = _lines(flatten(traced))
    assert _lines(flatten(copy.deepcopy(traced))) == expected
    qtrace.save(traced, tmp_path / "m.mge")
    assert _lines(flatten(qtrace.load(tmp_path / "m.mge"))) == expected
    assert _lines(flatten(traced)) == expected  # saving changes nothing
    assert not [k for m in traced.modules() for k in m.__dict__ if "qtrace_line" in k]
    mge.load(str(tmp_path / "m.mge"))(mge.Tensor(IMAGE))  # MegEngine reads the file too


def test_what_takes_the_place_of_a_layer_has_its_line(traced: TracedModule) -> None:
    prepared = qtrace.prepare(traced)
    convs = {name: n for name, n in _lines(prepared).items() if name.startswith("block_conv")}
    assert set(convs.values()) == {_number("y = self.conv(x)")}


@each_of(
    "text",
    [
        "",
        "{",
        "[]",
        "{}",
        '{"lines": 3}',
        json.dumps({"lines": ["a:1"], "exprs": [[0, 9], ["x"]]}),
        "[" * 9999,
    ],
)
def test_a_file_with_other_lines_loses_them_only(text: str) -> None:
    module = flatten(qtrace.trace(randomize(Block()), IMAGE, check=False))
    attach_lines(module)
    module.__dict__["_qtrace_lines"] = text
    detach_lines(module)
    assert "_qtrace_lines" not in module.__dict__
    module(mge.Tensor(IMAGE))
