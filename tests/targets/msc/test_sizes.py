"""Open axes in MSCGraph: -1 in every tensor that they change, prims, and the way back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import megengine as mge
import megengine.functional as F
import megengine.module as M
import numpy as np
import pytest

import qtrace
from qtrace.errors import ExportError
from qtrace.graph import MSCGraph, from_msc, to_traced
from qtrace.graph.open_axes import read_open_axes
from qtrace.graph.types import TracedModule
from tests.nets import images, net
from tests.zoo.checks import equal, run

X = images(2, 3, 32, 24)
OPEN = {"x": {0: "N", 2: "H", 3: "W"}}


def _forward(self: Any, x: Any) -> Any:
    y = F.relu(self.conv(x))
    n, h, w = y.shape[-4], y.shape[2], y.shape[3]
    z = F.mean(y.reshape(n, 2, 2, h * w), axis=2)
    u = F.nn.interpolate(y, size=(h * 2, 3 + w), mode="nearest")
    return z, u[:, :, : h // 2], x * 2


@pytest.fixture(scope="module")
def traced() -> TracedModule:
    return qtrace.trace(net(_forward, conv=M.Conv2d(3, 4, 3, 2, 1)), X, dynamic=OPEN)


@pytest.fixture(scope="module")
def converted(traced: TracedModule) -> TracedModule:
    return qtrace.convert(qtrace.calibrate(qtrace.prepare(traced), [X], progress=False))


def _graph(module: TracedModule, folder: Path, **options: Any) -> MSCGraph:
    return from_msc(qtrace.export(module, folder / "g.json", format="msc", **options))


@pytest.mark.parametrize("stage", ["traced", "converted"])
def test_every_open_axis_is_minus_one(stage: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    graph = _graph(request.getfixturevalue(stage), tmp_path)
    shapes = {
        name: graph.find_tensor(name).shape for name in ("x", "conv_out", "reshape_out", "interpolate_out")
    }
    assert shapes == {
        "x": (-1, 3, -1, -1),
        "conv_out": (-1, 4, -1, -1),
        "reshape_out": (-1, 2, 2, -1),
        "interpolate_out": (-1, 4, -1, -1),
    }
    assert [t.shape for t in graph.get_outputs()] == [(-1, 2, -1), (-1, 4, -1, -1), (-1, 3, -1, -1)]
    assert str(graph.find_tensor("x")) == "x:0(x)<-1,3,-1,-1|float32|NCHW>"


def test_prims_are_sizes_and_what_is_computed_from_them(traced: TracedModule, tmp_path: Path) -> None:
    graph = _graph(traced, tmp_path)
    prims = {p.name: (p.optype, *(q.name for q in p.parents)) for p in graph.get_prims()}
    (h, w) = (
        p.name for p in graph.get_prims() if p.attrs.get("producer") == "relu_out" and p.attrs["dim"] != "0"
    )
    dims = {p.attrs["dim"] for p in graph.get_prims() if p.attrs.get("producer") == "relu_out"}
    assert dims == {"0", "2", "3"}
    two, three = (p.name for p in graph.get_prims() if p.optype == "Int")
    arithmetic = {name: prim for name, prim in prims.items() if prim[0] not in ("shape", "Int")}
    assert arithmetic == {
        "mul_out": ("Mul", h, w),
        "mul_out_1": ("Mul", h, two),
        "radd_out": ("Add", three, w),
        "floordiv_out": ("FloorDiv", h, two),
    }
    assert graph.find_prim("H").attrs == {"producer": "x", "out_idx": "0", "dim": "2"}
    assert [q.name for q in graph.find_prim(h).children] == ["mul_out", "mul_out_1", "floordiv_out"]
    assert graph.find_tensor("x").get_shape(with_prims=True) == ["N", 3, "H", "W"]
    # 2 * (H // 2), which is H only for even sizes.
    assert graph.find_tensor("interpolate_out").prims == ("N", "4", "mul_out_1", "radd_out")
    assert graph.find_tensor("reshape_out").prims == ("N", "2", "2", "mul_out")
    assert graph.get_outputs()[2].prims == ("N", "3", "H", "W")
    rows = str(graph).split("\n\n")
    assert rows[0].splitlines()[1:] == [
        "P_0 N <PARENTS: | CHILDERN: >",
        "  OPTYPE: shape",
        "  ATTRS: producer=x out_idx=0 dim=0 ",
    ]
    assert MSCGraph.from_json(graph.to_json()).to_json() == graph.to_json()


@pytest.mark.parametrize("stage", ["traced", "converted"])
def test_a_graph_with_open_axes_comes_back_open(
    stage: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    module = request.getfixturevalue(stage)
    graph = _graph(module, tmp_path)
    back = to_traced(graph)
    for shape in ((2, 3, 32, 24), (1, 3, 33, 27), (3, 3, 64, 48)):
        x = images(*shape, seed=3)
        equal(run(module, (x,)), run(back, (x,)))
    assert read_open_axes(back) == read_open_axes(module)
    if stage == "traced":
        assert _graph(back, tmp_path).to_json() == graph.to_json()


def test_a_free_batch_is_one_more_open_axis(tmp_path: Path) -> None:
    traced = qtrace.trace(net(_forward, conv=M.Conv2d(3, 4, 3, 2, 1)), X, dynamic={"x": {2: "H"}})
    assert _graph(traced, tmp_path).find_tensor("x").shape == (2, 3, -1, 24)
    graph = _graph(traced, tmp_path, free_batch=True)
    assert (graph.find_tensor("x").shape, graph.find_tensor("x").prims) == (
        (-1, 3, -1, 24),
        ("N", "3", "H", "24"),
    )


def test_closed_graphs_have_prims_for_shapes_only(tmp_path: Path) -> None:
    module = net(lambda self, x: x.reshape(x.shape[0] * x.shape[1], -1))
    graph = _graph(qtrace.trace(module, X, check=False), tmp_path)
    assert [(p.optype, p.attrs.get("dim")) for p in graph.get_prims()] == [
        ("shape", "0"),
        ("shape", "1"),
        ("Mul", None),
    ]
    assert [t.prims for t in graph.get_tensors()] == [()] * len(graph.get_tensors())


def test_a_graph_of_one_size_is_refused(tmp_path: Path) -> None:
    table = mge.Tensor(np.zeros((2, 3, 1, 1), np.float32))
    module = qtrace.trace(
        net(lambda self, x: F.concat([x, x * self.t], 1), t=table), images(2, 3, 4, 4), check=False
    )
    with pytest.raises(ExportError, match="format msc: the graph does not run at other sizes"):
        qtrace.export(module, tmp_path / "g.json", format="msc", free_batch=True)
    assert not list(tmp_path.iterdir())
    assert json.loads(qtrace.export(module, tmp_path / "g.json", format="msc").read_text())["prims"] == []
