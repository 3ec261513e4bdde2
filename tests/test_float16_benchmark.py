"""The benchmark of float16 beside float32."""

from __future__ import annotations

import megengine.functional as F
import megengine.module as M
import numpy as np

import qtrace
from benchmarks import float16
from benchmarks.float16 import Network, measure, networks
from tests.nets import images, net


def test_a_network_is_measured_beside_float32() -> None:
    module = net(lambda self, x: self.b(F.relu(self.a(x))), a=M.Conv2d(3, 32, 3), b=M.Conv2d(32, 32, 3))
    network = Network(
        "small", lambda x: qtrace.trace(module, x), lambda seed: images(4, 3, 12, 12, seed=seed)
    )
    row = measure(network, "float")
    assert (row.network, row.halves, row.floats, row.passed) == ("small, float", 3, 3, True)
    assert row.float16_bytes < 0.6 * row.float32_bytes
    assert 50.0 < row.db < 100.0
    assert row.cells()[:2] == ("small, float", "3 of 3")


def test_the_stored_networks_are_those_that_are_measured() -> None:
    named = {network.name for network in networks()}
    assert named == set(float16._STORED)
    assert {network.name for network in networks(every=True)} > named
    drawn = float16._draw_text(0, 48, 160)
    assert drawn.shape == (4, 3, 48, 160)
    assert np.ptp(drawn) > 1.0
