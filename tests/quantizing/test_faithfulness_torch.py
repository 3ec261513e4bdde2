"""The float graph beside a module of torch."""

from __future__ import annotations

import numpy as np
import pytest

import qtrace
from qtrace.data import open_data
from qtrace.errors import GraphError
from qtrace.preparation.faithfulness import Faithfulness
from qtrace.quantizing.sources import open_original
from tests.nets import images
from tests.quantizing.test_faithfulness import _change_weight

torch = pytest.importorskip("torch")
pytest.importorskip("onnxscript")

DATA = images(8, 3, 8, 8)


class Net(torch.nn.Module):
    def __init__(self, keeps: bool = False) -> None:
        super().__init__()
        self.a = torch.nn.Conv2d(3, 8, 3)
        self.bn = torch.nn.BatchNorm2d(8)
        self.b = torch.nn.Conv2d(8, 4, 1)
        self.register_buffer("peak", torch.ones(()))
        self.keeps = keeps

    def forward(self, x):
        peak = torch.maximum(self.peak, x.max())
        if self.keeps:
            self.peak.copy_(peak)
        y = self.b(torch.relu(self.bn(self.a(x / peak))))
        return {"logits": y, "both": (y.mean((2, 3)), y.amax((2, 3)))}


def _prepared(traced):
    return qtrace.prepare(traced, {"ptq": ["fuse_bn"]})


def _traced(module):
    return qtrace.from_torch(module, torch.from_numpy(DATA[:2]))


def test_a_module_of_torch_is_compared_with_its_graph() -> None:
    torch.manual_seed(0)
    module = Net()
    module.train()
    traced = _traced(module)
    compared = Faithfulness(open_original(module, traced), traced, open_data(DATA))
    assert len(compared._expected[0][1]) == 3
    compared.check(_prepared(traced))
    assert module.training
    with pytest.raises(GraphError, match="prepare changed what the network computes in float"):
        compared.check(_change_weight(_prepared(traced)))
    with pytest.raises(GraphError, match="does not compute what Net computes"):
        compared.check(_prepared(_change_weight(traced)))


def test_a_module_of_torch_that_keeps_a_state_is_refused_and_stays_as_it_is() -> None:
    torch.manual_seed(0)
    module = Net(keeps=True)
    traced = _traced(Net())
    data = open_data(DATA[:2] * np.float32([3, 9]).reshape(2, 1, 1, 1))
    with pytest.raises(GraphError, match="a call of Net changes the results of the next ones"):
        Faithfulness(open_original(module, traced), traced, data).check(_prepared(traced))
    assert module.peak == 1


def test_the_copies_of_a_module_of_torch_share_its_parameters() -> None:
    module = Net()
    run = open_original(module, _traced(module)).start()
    copied = next(c.cell_contents for c in run.__closure__ if isinstance(c.cell_contents, Net))
    assert copied is not module
    assert copied.a.weight is module.a.weight
    assert copied.peak is not module.peak


def test_a_module_of_torchscript_is_run_itself() -> None:
    class Logits(Net):
        def forward(self, x):
            return super().forward(x)["logits"]

    module = torch.jit.trace(Logits().eval(), torch.from_numpy(DATA[:2]))
    traced = _traced(module)
    Faithfulness(open_original(module, traced), traced, open_data(DATA)).check(_prepared(traced))
