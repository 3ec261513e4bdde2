"""The benchmark of open axes: a file computes at other sizes what the graph does, op by op."""

from __future__ import annotations

from pathlib import Path

import megengine as mge
import megengine.functional as F
import megengine.module as M
import numpy as np
import pytest

import qtrace
from benchmarks import open_sizes
from benchmarks.open_sizes import NETWORKS, Network, check, main, networks
from qtrace.graph.types import TracedModule
from tests.nets import net, randomize


def _small() -> Network:
    """A network that joins a map with its half as YOLOX does, and flattens it."""

    def forward(self: M.Module, x: mge.Tensor) -> mge.Tensor:
        half = F.relu(self.down(x))
        y = F.concat([F.vision.interpolate(half, scale_factor=2, mode="nearest"), x], 1)
        return F.flatten(self.last(y), 2)

    module = randomize(net(forward, down=M.Conv2d(3, 4, 3, 2, 1), last=M.Conv2d(7, 2, 1)))

    def trace(shape: tuple[int, ...], opened: bool) -> TracedModule:
        x = np.random.default_rng(0).standard_normal(shape, np.float32)
        axes = {"x": {0: "N", 2: "H", 3: "W"}}
        return qtrace.trace(module, x, dynamic=axes if opened else None)

    return Network("small", trace, (2, 3, 8, 8), ((1, 3, 8, 16), (3, 3, 16, 12)))


def test_a_file_is_verified_and_measured_at_other_sizes(tmp_path: Path) -> None:
    result = check(_small(), tmp_path, seconds=0.05)
    assert result.passed
    assert result.worst <= 1
    assert result.equal > 0.999
    assert result.speed is not None
    begin = f"| small | {result.worst} LSB | 9" if result.equal < 1 else "| small | 0 LSB"
    assert result.row().startswith(begin)


def test_the_networks_are_those_of_the_page() -> None:
    listed = list(networks(Path()))
    assert tuple(network.name for network in listed) == NETWORKS
    assert [network.name for network in networks()] == list(NETWORKS[3:])
    assert all(len({network.shape, *network.others}) == 5 for network in listed)


def test_a_wrong_integer_is_an_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = open_sizes.Checked("vit", 2, 0.99, False, None, 1.0)
    monkeypatch.setattr(open_sizes, "check", lambda *_: found)
    assert main(["vit"]) == 1
    assert "| vit | 2 LSB, not passed | 99.0000% |  |" in capsys.readouterr().out


def test_an_unknown_network_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["no such"])
    assert "there is no network 'no such'" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("name", ["yolox", "vit"])
def test_published_networks_run_at_four_other_sizes(name: str, tmp_path: Path) -> None:
    (network,) = (network for network in networks() if network.name == name)
    result = check(network, tmp_path)
    assert result.passed
    assert result.worst <= 1
