"""The demo, run as `make demo` runs it."""

from __future__ import annotations

import ast
import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

import qtrace
from tests.each import each_of

ROOT = Path(__file__).parent.parent
# What is documented beside the names of `qtrace` itself.
PUBLIC = {f"qtrace.{name}" for name in ("fakequant", "gradients.fast_gradients", "graph", "observers")}


def _run(out: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, str(ROOT / "examples/demo.py"), "--out", str(out), *arguments]
    return subprocess.run(words, capture_output=True, text=True, cwd=ROOT)


@each_of("file", sorted((ROOT / "examples").glob("*.py")), ids=lambda p: p.name)
def test_examples_use_public_names_only(file: Path) -> None:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            assert all(a.name == "qtrace" or not a.name.startswith("qtrace.") for a in node.names)
        elif isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] == "qtrace":
            for name in (a.name for a in node.names):
                public = node.module in PUBLIC and name in importlib.import_module(node.module).__all__
                assert public or f"{node.module}.{name}" in PUBLIC or name in qtrace.__all__, name
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            assert "qsites" not in node.value


@pytest.mark.slow
def test_quick_demo_leaves_every_artefact(tmp_path: Path) -> None:
    run = _run(tmp_path / "out", "--quick")
    assert run.returncode == 0, run.stderr
    left = {p.name for p in (tmp_path / "out").iterdir()}
    assert {"README.md", "results.json", "float.mge", "w8a8", "w8a8.onnx", "w4a4_qat.mge"} <= left
    text = (tmp_path / "out" / "README.md").read_text()
    assert all(name in text for name in left - {"README.md", "test.npz", "calibration.npz"})
    variants = json.loads((tmp_path / "out" / "results.json").read_text())["variants"]
    assert variants[0]["name"] == "float"
    assert all(v["same"] >= 99.5 for v in variants if v["same"] is not None)


@pytest.mark.slow
def test_demo_meets_its_targets(tmp_path: Path) -> None:
    run = _run(tmp_path / "out")
    assert run.returncode == 0, run.stdout + run.stderr
    assert json.loads((tmp_path / "out" / "results.json").read_text())["missed"] == []
    assert "All targets are met." in run.stdout
