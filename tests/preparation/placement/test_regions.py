"""Noise of networks with ``roi_align``: its kernel trusts numbers of images."""

from __future__ import annotations

import megengine as mge
import megengine.functional as F
import megengine.module as M
import numpy as np
import pytest

import qtrace
from qtrace.preparation.placement.reference import make_regions, region_inputs
from tests.nets import images, net


@pytest.fixture(scope="module")
def traced() -> qtrace.TracedModule:
    def forward(self, x, regions):
        pooled = F.vision.roi_align(self.b(F.relu(self.a(x))), regions * 1.0, (4, 4))
        return self.head(F.flatten(F.relu(self.c(pooled)), 1))

    model = net(
        forward,
        a=M.Conv2d(3, 8, 3, padding=1),
        b=M.Conv2d(8, 8, 3),
        c=M.Conv2d(8, 8, 1),
        head=M.Linear(128, 3),
    )
    regions = np.array([[0, 1.5, 2, 9, 12], [1, 0, 0.5, 7, 7], [1, 3, 3, 14, 15]], np.float32)
    return qtrace.trace(model, images(2, 3, 16, 16), regions, check=False)


def test_regions_are_of_the_first_image(traced):
    assert {node.name for node in region_inputs(traced)} == {"regions"}
    (node,) = region_inputs(traced)
    value = make_regions(node, np.random.default_rng(0)).numpy()
    assert value.shape == (3, 5)
    assert (value[:, 0] == 0).all()
    assert (value[:, 1:3] <= value[:, 3:]).all()


def test_prepare_without_samples_survives_regions(traced):
    for _ in range(3):
        qtrace.prepare(traced)
    mge._full_sync()
