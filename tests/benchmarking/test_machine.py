"""Facts about a machine, and what differs between two of them."""

from __future__ import annotations

import sys
from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from types import SimpleNamespace

import pytest

from qtrace import costs
from qtrace.benchmarking import runners
from qtrace.benchmarking.runners import describe_machine, differences
from qtrace.errors import ExportError

CPUINFO = """processor\t: 0
model name\t: A Processor 3 GHz
flags\t\t: fpu avx2 avx512f avx512_vnni

processor\t: 1
model name\t: A Processor 3 GHz
"""


def test_processor_flags_and_version(tmp_path, monkeypatch):
    (tmp_path / "cpuinfo").write_text(CPUINFO, encoding="utf-8")
    monkeypatch.setattr(costs, "_CPUINFO", tmp_path / "cpuinfo")
    facts = describe_machine("onnxruntime", "onnxruntime", 2)
    assert facts.processor == "A Processor 3 GHz"
    assert facts.flags == ("avx2", "avx512f", "avx512_vnni")
    assert facts.threads == 2
    assert facts.version[0].isdigit()


def test_a_system_without_cpuinfo(tmp_path, monkeypatch):
    monkeypatch.setattr(costs, "_CPUINFO", tmp_path / "none")
    facts = describe_machine("onnxruntime", "onnxruntime", 1)
    assert facts.processor
    assert facts.flags == ()


def test_differences():
    here = describe_machine("onnxruntime", "onnxruntime", 1)
    assert differences(here, replace(here, date="another day")) == []
    other = replace(here, processor="P", threads=4)
    assert differences(here, other) == [f"processor {here.processor}, here P", "threads 1, here 4"]


def _no_distribution(package):
    raise PackageNotFoundError(package)


def test_the_version_is_that_of_the_module_of_whatever_distribution(monkeypatch):
    """Onnxruntime-gpu has the module onnxruntime, and OpenVINO's version has a build, too."""
    monkeypatch.setitem(sys.modules, "onnxruntime", SimpleNamespace(__version__="9.8"))
    for version in (_no_distribution, lambda package: "1.0"):
        monkeypatch.setattr(runners, "version", version)
        assert describe_machine("onnxruntime", "onnxruntime", 1).version == "9.8"
    monkeypatch.setattr(runners, "version", lambda package: "9.8.1")
    monkeypatch.setitem(sys.modules, "ai_edge_litert", SimpleNamespace(__version__="9.8.1-77-build"))
    assert describe_machine("litert", "ai-edge-litert", 1).version == "9.8.1"


def test_a_runtime_that_is_missing_is_a_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(ExportError, match="onnxruntime cannot be imported"):
        describe_machine("onnxruntime", "onnxruntime", 1)
