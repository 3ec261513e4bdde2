"""Notes on nodes last: through copies, flatten, edits, passes, files; and a file holds plain data alone."""

from __future__ import annotations

import copy
import functools
import io
import pickle
from pathlib import Path
from typing import Any

import megengine as mge
import megengine.functional as F
import megengine.module as M
import pytest

import qtrace
from qtrace.errors import GraphError
from qtrace.graph import GraphEditor, Transformer, exprs, flatten, load, meta, save, split
from qtrace.graph.files.serialize import sealing
from qtrace.graph.types import Node, TracedModule
from qtrace.storage.files import replacing
from tests.each import each_of
from tests.nets import images, net, randomize

X = images(2, 3, 6, 6)


class Block(M.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = M.Conv2d(3, 3, 1)

    def forward(self, x: Any) -> Any:
        return F.relu(self.conv(x))


def traced_blocks() -> TracedModule:
    block = net(lambda self, x: F.sigmoid(self.block(x)), block=Block())
    return qtrace.trace(randomize(block), X, check=False)


def nodes(traced: Any) -> dict[str, Node]:
    return {node.name: node for expr in exprs(traced) for node in expr.outputs}


def noted() -> TracedModule:
    """A flat graph with notes on each node: its own name."""
    flat = flatten(traced_blocks())
    for name, node in nodes(flat).items():
        meta(node)["name"] = name
    return flat


def assert_noted(traced: Any) -> None:
    """All nodes that stand for nodes of `noted` have their notes."""
    wanted = set(nodes(noted()))
    seen = {name: node for name, node in nodes(traced).items() if name in wanted}
    assert len(seen) >= 3
    assert {name: meta(node).get("name") for name, node in seen.items()} == {name: name for name in seen}


def test_notes_survive_copies_and_files(tmp_path: Path) -> None:
    flat = noted()
    assert_noted(copy.deepcopy(flat))
    assert_noted(flatten(flat))
    save(flat, tmp_path / "net.mge")
    assert_noted(load(tmp_path / "net.mge"))
    assert_noted(flat)  # saving changes nothing
    assert not any("meta" in name for name in vars(flat))
    for part in split(flat, at=["block_out"]):
        for name, node in nodes(part.module).items():
            assert meta(node)["name"] == name


def test_notes_survive_pickling_and_megengine_save() -> None:
    flat = noted()
    for other in (flat, pickle.loads(pickle.dumps(flat))):  # what was pickled is pickled again
        assert_noted(pickle.loads(pickle.dumps(other)))
    file = io.BytesIO()
    mge.save(flat, file)
    file.seek(0)
    again = mge.load(file)
    assert_noted(flatten(again))
    assert_noted(again)
    meta(nodes(flat)["block_out"])["value"] = object()
    with pytest.raises(GraphError, match="the notes on node 'block_out' are"):
        pickle.dumps(flat)
    meta(nodes(flat)["block_out"])["value"] = functools.reduce(lambda inner, _: [inner], range(5000), [])
    with pytest.raises(GraphError, match="the notes on node 'block_out' are"):
        pickle.dumps(flat)


def test_a_transformer_keeps_the_notes_of_what_it_writes() -> None:
    class WithoutSigmoid(Transformer):
        def call_function(self, function: Any, args: Any, kwargs: Any) -> Any:
            return args[0] if function is F.sigmoid else super().call_function(function, args, kwargs)

    flat = noted()
    meta(flat.graph.inputs[1])["name"] = "input"
    new = Transformer(flat).run()
    assert nodes(new).keys() == nodes(flat).keys()
    assert_noted(new)
    assert meta(new.graph.inputs[1]) == {"name": "input"}
    meta(new.graph.outputs[0])["name"] = "changed"
    assert_noted(flat)
    assert_noted(WithoutSigmoid(flat).run())


def test_a_copy_has_notes_of_its_own() -> None:
    flat = noted()
    other = flatten(flat)
    meta(nodes(other)["block_out"])["name"] = "changed"
    assert_noted(flat)


def test_notes_on_nested_graphs_survive_flatten_and_files(tmp_path: Path) -> None:
    traced = traced_blocks()
    inner = traced.block.graph.outputs[0]
    call = next(expr for expr in exprs(traced) if expr.outputs[0].name == "block_out")
    meta(inner)["inner"], meta(call.outputs[0])["outer"] = 1, [1.5, None, {"deep": True}]
    save(traced, tmp_path / "net.mge")
    for each in (traced, load(tmp_path / "net.mge")):
        assert meta(nodes(flatten(each))["block_out"]) == {"inner": 1, "outer": [1.5, None, {"deep": True}]}


def test_notes_survive_edits_and_passes(tmp_path: Path) -> None:
    flat = noted()
    with GraphEditor(flat) as editor:
        old = nodes(flat)["block_out"].expr
        editor.replace_expr(old, editor.call_function(F.tanh, old.inputs[0], after=old))
    assert_noted(flat)
    prepared = qtrace.prepare(noted(), {"placement": "everything"})
    assert_noted(prepared)
    qtrace.calibrate(prepared, [(X,)], progress=False)
    converted = qtrace.convert(prepared)
    assert_noted(converted)
    save(converted, tmp_path / "int8.mge")
    assert_noted(load(tmp_path / "int8.mge"))


@each_of("value", [object(), {1: 2}, (1, 2), X, b"x"], ids=lambda v: type(v).__name__)
def test_notes_that_no_file_holds_are_refused(tmp_path: Path, value: Any) -> None:
    flat = noted()
    meta(nodes(flat)["block_out"])["value"] = value
    with pytest.raises(GraphError, match="the notes on node 'block_out' are"):
        save(flat, tmp_path / "net.mge")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(GraphError, match="takes a node"):
        meta("block_out")  # type: ignore[arg-type]


@each_of("text", ["{", "[[]]", "3", 7, {"x": 1}, "[" * 100_000], ids=range(6))
def test_damaged_notes_of_a_file_are_dropped(tmp_path: Path, text: Any) -> None:
    flat = flatten(traced_blocks())
    for node in nodes(flat).values():
        node._qtrace_notes = text
    with replacing(tmp_path / "net.mge") as (file,), sealing(file) as body:
        pickle.dump(flat, body)
    assert all(meta(node) == {} for node in nodes(load(tmp_path / "net.mge")).values())
