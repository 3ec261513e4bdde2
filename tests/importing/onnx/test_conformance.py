"""ONNX's conformance tests: what is stored on the docs' page holds, and nothing is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from scripts.onnx_coverage import FILE, main, measure, measure_shares, short_reason, summarize
from tests.importing.onnx.cases import KINDS
from tests.importing.onnx.judging import Verdict

STORED: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))["kinds"]


# Kept nodes where onnxruntime gives other values than ONNX stores, or float64 is carried as float32.
DIFFERENT = {
    *("maxunpool_export_with_output_shape", "ai_onnx_ml_tree_ensemble_single_tree", "reversesequence_batch"),
    *(f"resize_downsample_scales_{mode}_align_corners" for mode in ("cubic", "linear")),
}


def equal(kind: str) -> set[str]:
    """The names of the stored cases that are equal."""
    return {name for op in STORED[kind].values() for name in op["equal"]}


def test_stored_conformance_has_enough_equal_cases_and_none_wrong() -> None:
    assert set(STORED) == {*KINDS, "light"}
    assert len(equal("node")) >= 1470
    assert sum(len(equal(kind)) for kind in KINDS[1:]) >= 110
    assert len(equal("light")) == 9
    for kind in STORED.values():
        for op in kind.values():
            assert set(op) <= {"equal", "refused", "wrong"}
            assert DIFFERENT.issuperset(case for cases in op.get("wrong", {}).values() for case in cases)


@pytest.mark.parametrize("kind", KINDS[1:])
def test_files_give_what_is_stored(kind: str) -> None:
    verdicts = measure([kind])
    assert {v.case for v in verdicts if v.verdict == "equal"} == equal(kind)
    refused = {"refused" for op in STORED[kind].values() if op.get("refused")}
    assert {v.verdict for v in verdicts} == {"equal"} | refused


def test_a_node_of_each_op_gives_what_is_stored() -> None:
    chosen = {op["equal"][-1] for op in STORED["node"].values() if op["equal"]}
    assert {v.case for v in measure(chosen) if v.verdict == "equal"} >= chosen


@pytest.mark.slow
def test_nodes_give_what_is_stored() -> None:
    verdicts = measure(["node"])
    assert {v.case for v in verdicts if v.verdict == "equal"} == equal("node")
    assert {v.case for v in verdicts if v.verdict not in ("equal", "refused")} <= DIFFERENT


@pytest.mark.slow
def test_light_networks_are_equal() -> None:
    assert {v.verdict for v in measure(["light"])} == {"equal"}


def test_light_networks_run_on_integers() -> None:
    stored = json.loads(FILE.read_text(encoding="utf-8"))["shares"]
    assert len(stored) == 9
    assert min(share["integers"] for share in stored.values()) >= 0.99


@pytest.mark.parametrize("name", ["light_squeezenet", "light_shufflenet"])
def test_a_light_network_gives_the_share_that_is_stored(name: str) -> None:
    stored = json.loads(FILE.read_text(encoding="utf-8"))["shares"]
    assert measure_shares([name]) == {name: stored[name]}


def test_what_is_stored_groups_cases_by_op_and_reason() -> None:
    reason = "/tmp/x/model.onnx: a node has no equal in a traced graph: Foo 'y' has mode 'z'."
    verdicts = [
        Verdict("b", "node", "Foo", "refused", reason),
        Verdict("a", "node", "Foo", "refused", reason.replace("'y'", "'q'")),
        Verdict("c", "node", "Bar", "equal"),
    ]
    kinds = summarize(verdicts)["kinds"]
    assert kinds == {
        "node": {
            "Bar": {"equal": ["c"]},
            "Foo": {
                "equal": [],
                "refused": {"a node has no equal in a traced graph: Foo has mode 'z'.": ["a", "b"]},
            },
        }
    }
    assert len(short_reason("x" * 1000)) == 200


def test_the_script_refuses_what_it_does_not_know(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr("scripts.onnx_coverage.KINDS", ("simple",))
    assert main(["NoSuchOp"]) == 2
    assert "no test is about NoSuchOp" in capsys.readouterr().err
    assert main(["--write", "Conv"]) == 2
    assert "--write stores all tests" in capsys.readouterr().err
    assert main(["single_relu_model"]) == 0
    assert "simple 1 equal" in capsys.readouterr().out
