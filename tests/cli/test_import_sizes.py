"""``qtrace import``: open axes stay open, or are fixed on demand, and outputs are chosen."""

from __future__ import annotations

import qtrace
from qtrace.graph.interface import read_interface
from qtrace.graph.open_axes import read_open_axes
from tests.importing.onnx.networks import model, node, save


def open_names(path: str) -> list[str]:
    record = read_open_axes(qtrace.load(path))
    return [] if record is None else [axis.name for axis in record.axes]


def test_open_axes_stay_open_or_are_fixed(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    net = save(model([node("Relu", "x", "y")], {"x": ["N", 2, "H", "W"]}), tmp_path)
    for words in ((), ("--fixed",)):
        result = run("import", str(net), "--shape", "x=1x2x8x8", "-o", "net.mge", *words)
        assert result.code == 0, result.err
        assert open_names("net.mge") == (["N"] if words else ["N", "H", "W"])


def test_a_file_is_cut_at_the_outputs_that_are_named(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    nodes = [node("Relu", "x", "a"), node("Neg", "a", "b"), node("Exp", "b", "y")]
    net = save(model(nodes, {"x": [1, 2]}), tmp_path)
    result = run("import", str(net), "--outputs", "b", "--outputs", "a", "-o", "net.mge")
    assert result.code == 0, result.err
    interface = read_interface(qtrace.load("net.mge"))
    assert [info.name for info in interface.outputs] == ["b", "a"]
    result = run("import", str(net), "--outputs", "c", "-o", "other.mge")
    assert result.code == 2
    assert "'c'" in result.err
