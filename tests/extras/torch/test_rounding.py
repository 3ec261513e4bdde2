"""Learned rounding in torch: one step equals MegEngine's, whole runs agree, and what torch lacks is left."""

from __future__ import annotations

import dataclasses
from typing import Any

import megengine.functional as F
import megengine.module as M
import numpy as np
import pytest

import qtrace
from qtrace import learning
from qtrace.errors import CalibrationError, ConfigError
from qtrace.graph.kernels import synchronous
from qtrace.graph.types import TracedModule
from qtrace.preparation.model import QuantizedModel
from qtrace.ptq.rounding.block_run import MegEngineGradients
from qtrace.ptq.rounding.blockwise import learn_block
from tests.each import each_of
from tests.nets import images, net, randomize
from tests.ptq.rounding.test_descent import SETTINGS, _run

DATA = [images(16, 4, 8, 8, seed=1)]


def _forward(self: Any, x: Any) -> Any:
    x = F.relu(self.a(x))
    x = F.relu(x + self.c(F.silu(self.b(x))))
    return self.fc(F.flatten(F.avg_pool2d(x, 8), 1))


def _prepared(algorithm: dict[str, Any]) -> TracedModule:
    module = net(
        _forward,
        a=M.Conv2d(4, 8, 3, padding=1),
        b=M.Conv2d(8, 8, 3, padding=1, groups=2),
        c=M.Conv2d(8, 8, 1),
        fc=M.Linear(8, 4),
    )
    traced = qtrace.trace(randomize(module, seed=3), DATA[0][:1], check=False)
    config = {"backend": "generic", "weight": {"bits": 3}, "activation": {"bits": 8}, "ptq": [algorithm]}
    return qtrace.prepare(traced, config)


def _noise(prepared: TracedModule) -> float:
    """The SQNR of the output in dB that the report of the algorithm has."""
    (report,) = (r for r in QuantizedModel(prepared, "prepared").ptq if r["algorithm"] != "fuse_bn")
    return float(report["outputs"][0]["after"])


def test_torch_is_refused_by_name_where_it_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learning.importlib.util, "find_spec", lambda name: None)
    model = _prepared({"adaround": {"iterations": 2}})
    assert learning.choose_learning(model, "auto") is None
    with pytest.raises(
        CalibrationError, match=r"torch does not apply: it is not installed .*; use megengine"
    ):
        learning.choose_learning(model, "torch")
    with pytest.raises(
        ConfigError, match="unknown learning engine 'jax': choose one of auto, megengine, torch"
    ):
        qtrace.calibrate(model, DATA, progress=False, learning_engine="jax")


class TestWithTorch:
    """What needs torch."""

    @pytest.fixture(autouse=True)
    def _torch(self) -> None:
        pytest.importorskip("torch", reason="the engine torch needs the extra torch")

    @each_of("drop", [0.0, 0.5])
    @each_of("scale_lr", [0.0, 0.01])
    def test_a_step_equals_that_of_megengine(self, drop: float, scale_lr: float) -> None:
        from qtrace.extras.torch.learning.engine import TorchEngine, TorchGraph
        from qtrace.extras.torch.rounding_block import TorchGradients

        with synchronous():
            run, data = _run(activation_bits=12)
            settings = dataclasses.replace(SETTINGS, drop=drop, scale_lr=scale_lr)
            engine = TorchEngine(TorchGraph(run.twins.quantized.traced))
            slow = MegEngineGradients(run, data, settings, 0.01, traced=False)
            fast = TorchGradients(engine, run, data, settings, 0.01)
            for seed in range(3):
                want, have = (g(np.random.default_rng(seed), drop) for g in (slow, fast))
                assert have[0] == pytest.approx(want[0], rel=1e-3)
                assert len(have[1]) == len(run.layers) + (len(run.scales) if scale_lr else 0)
                for a, b in zip(want[1], have[1], strict=True):
                    assert np.abs(a).max() > 0
                    # A sum in another order may turn the rounding of a value between two integers.
                    assert np.linalg.norm(a - b) <= 0.02 * np.linalg.norm(a)
                    assert np.median(np.abs(a - b)) <= 1e-2 * np.abs(a).max()

    def test_a_descent_ends_where_that_of_megengine_ends(self) -> None:
        results = []
        with synchronous():
            for engine in ("megengine", "torch"):
                run, data = _run()
                chosen = learning.choose_learning(run.twins.quantized.traced, engine)
                learn_block(run, data, SETTINGS, 0.01, chosen)
                results.append(
                    [s.rounding.v for s in run.layers] + [s.numpy() for _, s in run.scales.values()]
                )
        for want, have in zip(*results, strict=True):
            np.testing.assert_allclose(have, want, rtol=1e-2, atol=1e-2)

    @pytest.mark.parametrize("name", ["adaround", "reconstruct"])
    def test_a_calibration_learns_as_well(self, name: str, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level("INFO", "qtrace")
        noises = {}
        for engine in ("megengine", "torch"):
            prepared = _prepared({name: {"iterations": 60, "batch": 8}})
            qtrace.calibrate(prepared, DATA, progress=False, learning_engine=engine)
            noises[engine] = _noise(prepared)
        assert noises["torch"] == pytest.approx(noises["megengine"], abs=0.5)
        assert "MegEngine learns" not in caplog.text

    def test_a_block_on_which_the_engines_differ_is_left_to_megengine(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        from qtrace.extras.torch import rounding_block as torch_block

        caplog.set_level("INFO", "qtrace")
        exact = torch_block.TorchGradients.__call__

        def wrong(self: Any, rng: Any, drop: float) -> Any:
            loss, gradients = exact(self, rng, drop)
            return loss, [-gradient for gradient in gradients]

        monkeypatch.setattr(torch_block.TorchGradients, "__call__", wrong)
        noises = []
        for engine in ("megengine", "torch"):
            prepared = _prepared({"adaround": {"iterations": 5, "batch": 8}})
            qtrace.calibrate(prepared, DATA, progress=False, learning_engine=engine)
            noises.append(_noise(prepared))
        assert noises[0] == noises[1]
        assert "MegEngine learns relu_out: in torch the gradient of parameter 0 differs" in caplog.text

    def test_an_op_without_a_form_is_named(self) -> None:
        module = net(lambda self, x: F.relu(F.cumsum(self.a(x), 1)), a=M.Conv2d(4, 4, 1))
        traced = qtrace.trace(randomize(module), DATA[0][:1], check=False)
        prepared = qtrace.prepare(traced, {"backend": "generic", "ptq": [{"adaround": {"iterations": 2}}]})
        with pytest.raises(CalibrationError, match="torch does not apply: .*cumsum.* cannot run in torch"):
            qtrace.calibrate(prepared, DATA, progress=False, learning_engine="torch")
        qtrace.calibrate(prepared, DATA, progress=False)
