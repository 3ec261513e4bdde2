"""The benchmarks run and report; their figures are for `make bench` on an idle machine."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace

import numpy as np
import pytest

from benchmarks import beside, whole
from benchmarks.__main__ import GROUPS, LATEST, main
from benchmarks.limits import limit
from benchmarks.rows import Row, Size, render
from benchmarks.timing import Sample, Samples, Spread, run_interleaved
from tests.each import each_of


@pytest.mark.long
def test_quick_run_prints_and_writes_every_group(tmp_path, capsys):
    target = tmp_path / "quick.json"
    assert main(["--quick", "--json", str(target)]) == 0  # whatever the figures are
    document = json.loads(target.read_text())
    assert list(document) == list(GROUPS)
    assert [group for group in GROUPS if not document[group]["rows"]] == ["beside"]  # that needs other tools
    assert document["tools"]["machine"]["megengine"] == "1.13.0"
    printed = capsys.readouterr().out
    rows = [row for group in document.values() for row in group["rows"]]
    assert all(row["name"] in printed and row["value"]["median"] > 0 for row in rows)


def test_a_group_takes_the_place_of_its_old_rows(tmp_path, monkeypatch):
    latest = tmp_path / "latest.json"
    monkeypatch.setattr("benchmarks.__main__.LATEST", latest)
    latest.write_text(json.dumps({"training": {"rows": ["kept"]}, "ranges": {"rows": ["old"]}}))
    value = Spread(1.0, 1.0, 1.0, 1.0)
    monkeypatch.setattr("benchmarks.ranges.run", lambda size: [Row("a row", value, "x")])
    main(["--quick", "--only", "ranges"])
    assert "old" in latest.read_text()  # figures of --quick mean nothing
    main(["--only", "ranges"])
    document = json.loads(latest.read_text())
    assert document["training"] == {"rows": ["kept"]}
    assert [row["name"] for row in document["ranges"]["rows"]] == ["a row"]


@pytest.mark.parametrize(("target", "code"), [(1e9, 0), (0.0, 1)])
def test_check_fails_only_when_a_target_is_missed(monkeypatch, target, code):
    value = Spread(1.0, 1.0, 1.0, 1.0)
    monkeypatch.setattr("benchmarks.ranges.run", lambda size: [Row("a row", value, "x", target)])
    assert main(["--quick", "--only", "ranges", "--check"]) == code
    assert main(["--quick", "--only", "ranges"]) == 0


def test_ratio_is_the_median_of_the_ratios_of_each_round():
    side = [Sample(2.0, 2.0), Sample(30.0, 3.0), Sample(4.0, 8.0)]
    unit = [Sample(1.0, 2.0), Sample(10.0, 1.0), Sample(4.0, 4.0)]
    ratio = Samples({"side": side, "unit": unit}).ratio("side", "unit")
    assert ratio == Spread(median=2.0, low=1.0, high=3.0, cpu=2.0)


def test_sides_take_turns_and_warm_up_does_not_count():
    calls = []
    samples = run_interleaved({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, 2, warm_up=1)
    assert "".join(calls) == "ab" * 3  # neither runs twice in a row
    assert [len(s) for s in samples.by_side.values()] == [2, 2]
    calls.clear()
    run_interleaved({name: lambda name=name: calls.append(name) for name in "abc"}, 2, warm_up=1)
    assert "".join(calls) == "abc" + "bca" + "cab"


@each_of(
    ("value", "target", "met", "word"),
    [(1.0, 1.0, True, "met"), (1.1, 1.0, False, "MISSED"), (9.0, None, None, "9.000 x")],
)
def test_row_says_whether_its_target_is_met(value, target, met, word):
    row = Row("name", Spread(value, value, value, value), "x", target)
    assert row.met is met
    assert word in render({"group": [row]})


def test_a_tool_that_is_not_installed_is_reported():
    with pytest.raises(RuntimeError, match=r"torch_ao.py failed: .*No module named 'torch'"):
        list(beside.run(replace(Size.quick(), torch=sys.executable)))


def test_the_table_has_every_stored_row_with_what_limits_it(capsys):
    assert main(["--table"]) == 0
    lines = capsys.readouterr().out.splitlines()[2:]
    stored = json.loads(LATEST.read_text(encoding="utf-8"))
    assert len(lines) == sum(len(group["rows"]) for group in stored.values())
    assert all(line.split(" | ")[-1].rstrip(" |") for line in lines)
    with pytest.raises(LookupError, match="a new row"):
        limit("a new row")


def test_no_stored_row_misses_its_target():
    stored = json.loads(LATEST.read_text(encoding="utf-8"))
    assert [row["name"] for group in stored.values() for row in group["rows"] if row["met"] is False] == []


def test_whole_runs_are_shown_with_their_ratios_and_stages():
    runs = {
        "default": [
            whole.Run(9.0, 6.0, {"prepare": (2.0, 1.5)}),
            whole.Run(11.0, 8.0, {"prepare": (2.0, 2.5)}),
        ],
        "NNCF full": [whole.Run(4.0, 3.5), whole.Run(6.0, 3.5)],
    }
    lines = [line.split() for line in whole.table(runs).splitlines()]
    assert ["default", "/", "NNCF", "full", "2.00", "2.00"] in lines
    assert ["prepare", "2.0", "(1.5", "to", "2.5)", "2.0", "(2.0", "to", "2.0)"] in lines


def test_whole_runs_of_every_tool_have_the_bytecode_of_modules(tmp_path, monkeypatch):
    seen = []

    def run():
        seen.append(os.environ.get("PYTHONDONTWRITEBYTECODE"))
        return whole.Run(1.0, 1.0)

    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.setattr(whole, "_own", lambda variant, *others: {variant: run})
    monkeypatch.setattr(whole, "_peer", lambda *arguments: run)
    np.save(tmp_path / "samples.npy", np.zeros((2, 1)))
    arguments = ["network.onnx", str(tmp_path / "samples.npy"), "--rounds", "1"]
    assert whole.main([*arguments, "--only", "default", "--only", "onnxruntime MinMax"]) == 0
    assert seen == [None, None]
