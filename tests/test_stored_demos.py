"""The command that stores the results of the demos."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import deployed, torch_files
from benchmarks.deployed import runtimes, tuning
from benchmarks.shipped import rows as shipped
from examples.ocr import dropin
from scripts import demos, onnx_coverage, onnx_open_axes, stored
from scripts.site import measured


def _results(seconds: float) -> dict[str, object]:
    machine = {"cores": 2, "cpu": "a cpu", "date": "a day", "load_before": 0.1, "load_after": 1.0}
    variant = {"name": "float", "graph": 50.0, "runtime": None, "worst_lsb": None}
    return {"machine": machine, "seconds": seconds, "variants": [variant]}


def test_an_unknown_demo_is_refused_with_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert demos.main(["digit"]) == 2
    assert "unknown: digit; known: digits, detector, ocr" in capsys.readouterr().err


def test_every_stored_file_is_one_of_a_demo_or_of_a_benchmark() -> None:
    names = {file for _, file in demos.DEMOS.values()}
    names |= {stored.FamilyRow.FILE, stored.ExportRow.FILE, onnx_coverage.FILE.name, deployed.RESULTS.name}
    names |= {
        "accuracy.json",
        "latest.json",
        "fake_quants.json",
        "torch_families.json",
        "family_recipes.json",
        stored.ToolsRow.FILE,
        stored.Float16Row.FILE,
        "measured.json",
        "kept.json",
        onnx_open_axes.FILE.name,
        runtimes.RESULTS.name,
        tuning.RESULTS.name,
        shipped.RESULTS.name,
        torch_files.RESULTS.name,
    }
    assert {path.name for path in stored.RESULTS.iterdir()} == names


def test_a_demo_that_misses_a_target_stores_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demos, "store_results", lambda *_: pytest.fail("stored"))
    monkeypatch.setitem(demos.DEMOS, "digits", (("-c", "raise SystemExit(1)"), "demo.json"))
    assert demos.main(["--write", "digits"]) == 1


def test_stored_results_are_what_the_page_shows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(measured, "RESULTS", tmp_path)
    assert demos.store_results("detector", _results(12.4), tmp_path) == tmp_path / "detector_demo.json"
    text = measured.detector_demo()
    assert "| float | 50.00 |  |  |" in text
    assert text.endswith("It took 12 s on 2 cores of a cpu, a day, load 0.1 before and 1.0 after.")


def test_the_client_with_our_files_stands_beside_float_and_the_peers() -> None:
    text = measured.ocr_client()
    assert "| qtrace.quantize | 99." in text
    assert "| float | 100.00 % |" in text
    assert "| NNCF |" in text
    rows = json.loads((stored.RESULTS / "ocr_client.json").read_text(encoding="utf-8"))["client"]
    assert dropin.missed_targets([dropin.from_dict(row) for row in rows]) == []


def test_results_come_from_the_folder_that_the_demo_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    program = "import sys, pathlib; pathlib.Path(sys.argv[2], 'results.json').write_text('{\"seconds\": 3}')"
    monkeypatch.setitem(demos.DEMOS, "digits", (("-c", program), "demo.json"))
    results = demos.run("digits")
    assert results["seconds"] == 3
    assert {"date", "load_before", "load_after"} <= set(results["machine"])


@pytest.mark.slow
def test_the_quick_demo_gives_results(tmp_path: Path) -> None:
    results = demos.run("digits", "--quick")
    assert results["variants"][0]["name"] == "float"
    path = demos.store_results("digits", results, tmp_path)
    assert json.loads(path.read_text())["quick"] is True


def test_the_command_runs_as_a_module() -> None:
    command = [sys.executable, "-m", "scripts.demos", "nothing"]
    run = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent.parent)
    assert run.returncode == 2
