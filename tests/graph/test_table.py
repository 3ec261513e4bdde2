"""The printed table of a graph, and the helper that other reports print with."""

from __future__ import annotations

import megengine as mge
import megengine.functional as F
import megengine.module as M
import pytest

from qtrace.display import format_table
from qtrace.errors import GraphError
from qtrace.graph.views import table
from tests.each import each_of
from tests.graph.samples import (
    MODELS,
    ConvBnRelu,
    Pair,
    Residual,
    SplitConcat,
    expr,
    function,
    traced_model,
)


def cells(text: str, column: str) -> list[str]:
    """The cells of one column, by its place in the header; the last column reaches to the end."""
    header, rule, *rows = text.splitlines()
    start = 0
    for width, name in zip(map(len, rule.split("  ")), header.split(), strict=True):
        if name == column:
            return [row[start : start + width].strip() for row in rows]
        start += width + 2
    raise AssertionError(f"no column {column}")


def test_conv_bn_relu():
    assert table(traced_model(ConvBnRelu)).splitlines() == [
        "id  op           output    inputs    module  shape    dtype",
        "--  -----------  --------  --------  ------  -------  -------",
        " 1  input        x                           2x4x6x6  float32",
        " 2  getattr      conv      self      conv",
        " 3  Conv2d       conv_out  x         conv    2x4x6x6  float32",
        " 4  getattr      bn        self      bn",
        " 5  BatchNorm2d  bn_out    conv_out  bn      2x4x6x6  float32",
        " 6  F.relu       relu_out  bn_out            2x4x6x6  float32",
        "    output                 relu_out",
    ]


def test_shows_arguments_and_several_outputs():
    text = table(traced_model(SplitConcat))
    assert "split_out, split_out_1" in cells(text, "output")
    inputs = cells(text, "inputs")
    assert "x, 2, 1" in inputs
    assert "split_out, split_out" in inputs
    assert any(i.startswith("[split_out_1, add_out, ") for i in inputs)


def test_shows_slices_keywords_and_several_inputs():
    assert "x, (:, 1:3, ...)" in cells(table(function(lambda x: x[:, 1:3, ...])), "inputs")
    assert "x, (::2, 0)" in cells(table(function(lambda x: x[::2, 0])), "inputs")
    x = mge.Tensor([1.0])
    pair = table(traced_model(Pair, True, {"a": x, "b": x + 1}, bias=x + 2))
    assert cells(pair, "op")[:3] == ["input"] * 3
    assert "scalar" in table(function(lambda x: F.sum(x)))


def test_a_nested_call_is_one_row():
    text = table(traced_model(Residual, flat=False))
    assert cells(text, "module").count("block") == 3  # the module, and two calls
    assert "Conv2d" not in text


@each_of("model", MODELS)
@each_of("width", [110, 160])
def test_fits_the_width(model, width):
    for flat in (True, False):
        assert max(map(len, table(traced_model(model, flat), width).splitlines())) <= width


def test_shows_a_broken_graph_too():
    traced = traced_model(ConvBnRelu)
    expr(traced, "relu_out").const_val.append((1, None))
    expr(traced, "bn_out").outputs[0].shape = None
    assert " ?" in table(traced)


def test_refuses_what_is_no_trace():
    with pytest.raises(GraphError, match="takes a TracedModule, not a ReLU"):
        table(M.ReLU())


def test_table_aligns_numbers_right():
    text = format_table(("name", "count", "share"), [("a", 5, "99.5%"), ("bcd", 1234, "")])
    assert text.splitlines() == [
        "name  count  share",
        "----  -----  -----",
        "a         5  99.5%",
        "bcd    1234",
    ]


def test_table_without_rows_has_a_header():
    assert format_table(("a", "bc"), []) == "a  bc\n-  --"


def test_line_breaks_become_spaces():
    assert format_table(("a",), [("x\n  y",)]).splitlines()[-1] == "x y"


def test_the_widest_columns_give_way_first():
    rows = [("short", "a sentence that is quite long, in fact", "dotted.path.of.a.module.weight")]
    header, rule, row = format_table(("one", "two", "three"), rows, max_width=39).splitlines()
    assert row == "short  a sentence tha…  dotted.….weight"
    assert len(rule) == 39
    assert header.startswith("one    two")


@each_of("width", range(30, 90))
def test_table_uses_the_full_width(width):
    rows = [("x" * 3, "y" * 20, "z" * 50, "w" * 33)]
    rule = format_table(("a", "b", "c", "d"), rows, max_width=width).splitlines()[1]
    assert len(rule) == width


def test_does_not_cut_what_fits():
    rows = [("x" * 20, "y" * 20)]
    assert format_table(("a", "b"), rows, max_width=42) == format_table(("a", "b"), rows, max_width=None)


def test_too_many_columns_stay_readable():
    line = format_table(("a", "b", "c"), [("x" * 9,) * 3], max_width=10).splitlines()[2]
    assert line == "xxx…xx  xxx…xx  xxx…xx"


def test_a_row_has_a_cell_for_each_header():
    with pytest.raises(ValueError, match="row 1 has 1 cells, but the table has 2 columns"):
        format_table(("a", "b"), [("x", "y"), ("x",)])
