"""The float twin: the nodes of a graph that was placed, with the values of the network."""

from __future__ import annotations

import megengine as mge
import megengine.functional as F
import megengine.module as M
import numpy as np
import pytest

import qtrace
from qtrace.graph.types import TracedModule
from qtrace.inspection.twin import check_nodes, float_twin
from qtrace.preparation.model import QuantizedModel
from qtrace.preparation.passes import place as placing
from tests.nets import images, net, randomize

X = images(1, 8, 8, 8, seed=3)
FUNCTIONS = {
    "silu": F.silu,
    "sigmoid": lambda x: x * F.sigmoid(x),  # the pieces of silu, as many networks write them
    "hswish": F.hswish,
    "gelu": F.gelu,
    "hsigmoid": F.hsigmoid,
    "mish": lambda x: x * F.tanh(F.softplus(x)),
}


class Times:
    """Times by which everything gains from integers, the pieces of an activation function most."""

    def seconds(self, op: object, form: str) -> float | None:
        if op.kind in ("quantize", "dequantize"):
            return 1e-6
        if op.kind == "conv2d":
            return 1e-3 if form == "float" else 3e-4
        return 1e-4 if form == "float" else 1e-5 if op.kind in ("sigmoid", "mul", "add") else None


def _placed(function: str, monkeypatch: pytest.MonkeyPatch) -> tuple[TracedModule, TracedModule]:
    """Returns a network with an activation function twice, traced, and calibrated after a placement."""
    monkeypatch.setattr(placing.CostTable, "packaged", classmethod(lambda cls, runtime: {runtime: Times()}))
    monkeypatch.setattr(placing.CostTable, "nearest", classmethod(lambda cls, runtime, flags: runtime))
    apply = FUNCTIONS[function]

    def forward(self: M.Module, x: mge.Tensor) -> mge.Tensor:
        return self.c(apply(self.b(apply(self.a(x)))))

    traced = qtrace.trace(randomize(net(forward, **{k: M.Conv2d(8, 8, 1) for k in "abc"}), 1), X, check=False)
    prepared = qtrace.prepare(traced, {"placement": "fastest"})
    return traced, qtrace.calibrate(prepared, [X], progress=False)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_the_twin_of_a_network_has_the_nodes_of_its_placed_graph(
    function: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    traced, prepared = _placed(function, monkeypatch)
    model = QuantizedModel(prepared)
    twin = float_twin(model, traced)
    check_nodes(twin, (s.node for s in model.annotation.sites if s.sort == "activation"))
    np.testing.assert_allclose(twin(mge.Tensor(X)).numpy(), traced(mge.Tensor(X)).numpy(), atol=1e-5)


@pytest.mark.parametrize("function", ["silu", "hswish"])
def test_a_placed_graph_is_compared_with_its_network(function: str, monkeypatch: pytest.MonkeyPatch) -> None:
    traced, prepared = _placed(function, monkeypatch)
    kinds = {note.kind for note in QuantizedModel(prepared).annotation.notes}
    assert "mul" in kinds  # else the case shows nothing
    assert function not in kinds
    own, network = qtrace.compare(prepared, [X]), qtrace.compare(prepared, [X], float_model=traced)
    pairs = zip(own.sites, network.sites, strict=True)
    assert all(a.site == b.site and abs(a.sqnr_db - b.sqnr_db) < 1e-2 for a, b in pairs)
    ranking = qtrace.sensitivity.analyze(prepared, [X], float_model=traced, progress=False)
    assert ranking.layers
