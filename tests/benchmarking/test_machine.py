"""Facts about a machine, and what differs between two of them."""

from __future__ import annotations

from dataclasses import replace

from qtrace.benchmarking import machine
from qtrace.benchmarking.machine import describe_machine, differences

CPUINFO = """processor\t: 0
model name\t: A Processor 3 GHz
flags\t\t: fpu avx2 avx512f avx512_vnni

processor\t: 1
model name\t: A Processor 3 GHz
"""


def test_processor_flags_and_version(tmp_path, monkeypatch):
    (tmp_path / "cpuinfo").write_text(CPUINFO, encoding="utf-8")
    monkeypatch.setattr(machine, "_CPUINFO", tmp_path / "cpuinfo")
    facts = describe_machine("onnxruntime", "onnxruntime", 2)
    assert facts.processor == "A Processor 3 GHz"
    assert facts.flags == ("avx2", "avx512f", "avx512_vnni")
    assert facts.threads == 2
    assert facts.version[0].isdigit()


def test_a_system_without_cpuinfo(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "_CPUINFO", tmp_path / "none")
    facts = describe_machine("onnxruntime", "onnxruntime", 1)
    assert facts.processor
    assert facts.flags == ()


def test_differences():
    here = describe_machine("onnxruntime", "onnxruntime", 1)
    assert differences(here, replace(here, date="another day")) == []
    other = replace(here, processor="P", threads=4)
    assert differences(here, other) == [f"processor {here.processor}, here P", "threads 1, here 4"]
