"""Workers on a local Ray cluster; only where Ray is installed (the extra `ray`)."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest

import qtrace
from qtrace.calibration.running import LocalCollection, RunSettings, Source, collect_all
from qtrace.errors import ConfigError
from qtrace.observers.base import to_dict
from qtrace.workers import RayTasks
from tests.nets import Chain, images

_INSTALLED = importlib.util.find_spec("ray") is not None


@pytest.mark.slow
@pytest.mark.skipif(not _INSTALLED, reason="Ray is not installed")
def test_a_local_cluster_gives_the_same(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", images(9, 3, 8, 8))
    data = Source(str(tmp_path / "x.npy"), batch_size=2)
    traced = qtrace.trace(Chain(2, 3), images(2, 3, 8, 8), check=False)
    prepared = qtrace.prepare(traced, {"observers": {"activation": "mse"}})
    states = []
    for number, ray in enumerate((None, "")):
        folder = tmp_path / str(number)
        folder.mkdir()
        settings = RunSettings("megengine", workers=2 if ray == "" else 1, ray=ray)
        statistics = collect_all(prepared, data.open(), data, folder, settings).collected.statistics
        assert sorted(statistics.batches) == [0, 1, 2, 3, 4]
        states.append({name: to_dict(observer) for name, observer in statistics.observers.items()})
    assert states[0] == states[1]


@pytest.mark.skipif(_INSTALLED, reason="Ray is installed")
def test_ray_is_asked_for_where_it_is_missing() -> None:
    with (
        pytest.raises(ConfigError, match=r"--ray needs the package ray: run pip install -e '\.\[ray\]'"),
        RayTasks(LocalCollection(), 1, ""),
    ):
        pass
