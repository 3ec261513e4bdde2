"""`prepare` compares its copy with the graph that it was given, where it has samples."""

from __future__ import annotations

import megengine as mge
import megengine.functional as F
import megengine.module as M
import numpy as np
import pytest

import qtrace
from qtrace.errors import GraphError
from qtrace.graph.flatten import set_parameter
from qtrace.preparation import prepare as room
from qtrace.preparation.faithfulness import read_batches
from tests.nets import images, net

DATA = images(4, 3, 8, 8)


def traced():
    mge.random.seed(1)
    layers = {"a": M.Conv2d(3, 8, 3), "bn": M.BatchNorm2d(8), "b": M.Conv2d(8, 4, 1)}
    return qtrace.trace(net(lambda self, x: self.b(F.relu(self.bn(self.a(x)))), **layers), DATA)


@pytest.fixture
def wrong(monkeypatch):
    """An algorithm that scales one output channel of a layer."""
    make = room.make_float_graph

    def changed(*given):
        graph = make(*given)
        weight = dict(graph.model.named_parameters())["b.weight"].numpy().copy()
        weight[1] *= 1.5
        set_parameter(graph.model, "b.weight", mge.Parameter(weight))
        return graph

    monkeypatch.setattr(room, "make_float_graph", changed)


BATCHES = {
    "array": DATA,
    "tensor": mge.Tensor(DATA),
    "tuple": (DATA,),
    "list of tensors": [mge.Tensor(DATA)],
    "by name": {"x": DATA},
}


@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
def test_a_copy_that_computes_something_else_is_an_error(wrong, batch):
    message = r"prepare changed what the network computes in float: on the first samples .* of its largest"
    with pytest.raises(GraphError, match=message):
        qtrace.prepare(traced(), samples=[batch])


@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
def test_a_right_copy_is_none(batch):
    prepared = qtrace.prepare(traced(), samples=[batch])
    assert qtrace.calibrate(prepared, [batch], progress=False) is prepared


def test_without_samples_nothing_runs(wrong):
    assert qtrace.prepare(traced()) is not None


def test_batches_of_other_structures_end_the_reading():
    nested = {"x": [DATA, DATA]}
    assert list(read_batches([nested])) == []
    (batch,) = read_batches([DATA, nested, DATA])
    assert np.array_equal(batch[0], DATA)
