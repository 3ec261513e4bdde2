"""What the packaged recipes do to a network."""

from __future__ import annotations

import megengine.module as M
import pytest

import qtrace
from qtrace.passes.record import fake_quants
from tests.nets import MobileNetV2, ResNet, images


@pytest.mark.parametrize("model", [ResNet(4), MobileNetV2(0.25)])
def test_w4a4_learns_scales_inside_and_keeps_those_at_both_ends(model: M.Module) -> None:
    model.eval()
    traced = qtrace.trace(model, images(1, 3, 32, 32), check=False)
    fakes = list(fake_quants(qtrace.prepare(traced, "w4a4_lsq")))
    assert {(fq.scheme.bits, type(fq)) for fq in fakes} == {
        (4, qtrace.fakequant.LSQFakeQuant),
        (8, qtrace.fakequant.FixedFakeQuant),
    }
    assert {"x", "fc_weight"} <= {fq.site for fq in fakes if fq.scheme.bits == 8}
