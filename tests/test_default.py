"""The default that users meet: `prepare` without a config is the recipe int8, placed by time and noise."""

from __future__ import annotations

from pathlib import Path

import megengine as mge
import megengine.functional as F
import megengine.module as M
import numpy as np
import pytest

import qtrace
from qtrace.config import recipe
from qtrace.preparation.model import QuantizedModel
from tests.nets import images, net, randomize

BATCHES = [images(4, 3, 32, 32, seed=seed) for seed in range(3)]


@pytest.fixture(autouse=True)
def default(monkeypatch: pytest.MonkeyPatch) -> None:
    """Undoes what the other tests assume."""
    monkeypatch.setattr(recipe, "DEFAULT_RECIPE", "int8")


def _forward(self: M.Module, x: mge.Tensor) -> mge.Tensor:
    x = F.relu(self.stem(x))
    for conv in self.convs:
        x = x + F.tanh(conv(x))
    return self.head(F.adaptive_avg_pool2d(x, 1).reshape(x.shape[0], -1))


def _network() -> M.Module:
    convs = [M.Conv2d(48, 48, 3, padding=1) for _ in range(4)]
    parts = {"stem": M.Conv2d(3, 48, 3, padding=1), "convs": convs, "head": M.Linear(48, 10)}
    return randomize(net(_forward, **parts), 0)


@pytest.mark.parametrize("said", [None, qtrace.QConfig(), {}], ids=["nothing", "an empty config", "{}"])
def test_prepare_without_a_config_uses_int8(said: object) -> None:
    traced = qtrace.trace(_network(), BATCHES[0], check=False)
    model = QuantizedModel(qtrace.prepare(traced, said))
    assert model.config == qtrace.load_recipe("int8")
    assert model.config.placement == "balanced"
    assert str(model.module.graph) == str(qtrace.prepare(traced, "int8").graph)


def test_the_default_quantizes_what_gains_and_says_so(tmp_path: Path) -> None:
    module = _network()
    traced = qtrace.trace(module, BATCHES[0], check=False)
    prepared = qtrace.prepare(traced, samples=BATCHES)
    kinds = {note.kind: note.state for note in QuantizedModel(prepared).annotation.notes}
    assert (kinds["conv2d"], kinds["tanh"]) == ("int", "float")
    summary = " ".join(qtrace.explain(prepared).summary().split())
    assert "balanced" in summary
    assert "ms in float" in summary
    qtrace.calibrate(prepared, BATCHES, progress=False)
    converted = qtrace.convert(prepared)
    qtrace.export(converted, tmp_path / "net.onnx")
    report = qtrace.verify(tmp_path / "net.onnx", converted, BATCHES[2:])
    assert max(tally.worst for tally in report.sites["op_by_op"].values()) <= 1
    exact, x = module(mge.Tensor(BATCHES[2])).numpy(), mge.Tensor(BATCHES[2])
    noise = converted(x).numpy() - exact
    assert 10 * np.log10(np.square(exact).sum() / np.square(noise).sum()) > 30


def test_a_network_too_small_to_gain_stays_in_float_unless_its_size_is_asked_for() -> None:
    module = randomize(net(lambda self, x: self.a(x), a=M.Conv2d(3, 4, 1)), 0)
    traced = qtrace.trace(module, BATCHES[0], check=False)
    for config, mode, state in ((None, "float", "float"), ({"placement": "small"}, "small", "int")):
        model = QuantizedModel(qtrace.prepare(traced, config))
        assert model.annotation.placement.mode == mode
        assert [note.state for note in model.annotation.notes] == [state]
