"""The choice of the engine of a fine-tuning where torch is not installed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import megengine.module as M
import numpy as np
import pytest

import qtrace
from qtrace import learning
from qtrace.errors import ConfigError, TrainingError
from qtrace.extras.finetune import FinetuneSettings
from tests.nets import net

RUN = FinetuneSettings(steps=1, batch_size=2, jit=False)


@pytest.fixture
def without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learning.importlib.util, "find_spec", lambda name: None)


def _finetune(engine: str) -> Any:
    data = [np.random.default_rng(0).normal(size=(4, 3, 4, 4)).astype(np.float32)]
    traced = qtrace.trace(net(lambda self, x: self.conv(x), conv=M.Conv2d(3, 2, 1)), data[0], check=False)
    prepared = qtrace.calibrate(qtrace.prepare(traced, {"fakequant": "lsq"}), data, progress=False)
    return qtrace.finetune(prepared, data, replace(RUN, engine=engine), progress=False)


@pytest.mark.usefixtures("without_torch")
def test_auto_takes_megengine_and_says_why() -> None:
    report = _finetune("auto")
    assert report.engine == report.to_dict()["engine"] == "megengine"
    assert "engine: megengine, torch does not apply: it is not installed (pip install" in report.table()
    assert _finetune("megengine").engine_reason == "as requested"


@pytest.mark.usefixtures("without_torch")
def test_torch_that_is_not_installed_is_refused_with_the_extra() -> None:
    with pytest.raises(
        TrainingError, match=r"it is not installed \(pip install -e '\.\[torch\]' in the checkout of qtrace\)"
    ):
        _finetune("torch")


def test_an_unknown_engine_is_refused() -> None:
    with pytest.raises(ConfigError, match="engine is 'tensorflow': choose one of auto, megengine, torch"):
        FinetuneSettings(engine="tensorflow")
