"""The scales that a traced module carries: their text, copies, files and damage."""

from __future__ import annotations

from pathlib import Path

import megengine.module as M
import numpy as np
import pytest
from megengine.traced_module import TracedModule

import qtrace
from qtrace.errors import GraphError
from qtrace.graph.flatten import flatten
from qtrace.graph.native import LayerRanges, NativeRanges, read_ranges, write_ranges
from qtrace.preparation.model import QuantizedModel
from qtrace.scheme import QParams, QScheme
from tests.each import each_of
from tests.native_nets import images, trained

INT8 = QParams(QScheme(signed=True, symmetric=True), np.float32(0.1), np.int32(0))


@pytest.fixture(scope="module")
def traced() -> TracedModule:
    return qtrace.trace(trained(M.Sequential(M.QuantStub(), M.ConvBnRelu2d(3, 4, 3))), images(7), check=False)


def test_copies_and_files_keep_the_scales(traced: TracedModule, tmp_path: Path) -> None:
    expected = read_ranges(traced)
    assert expected is not None
    assert set(expected.layers) == {"0", "1"}
    qtrace.save(traced, tmp_path / "m.mge")
    for copy in (qtrace.trace(traced), flatten(traced), qtrace.load(tmp_path / "m.mge")):
        assert read_ranges(copy) == expected


def test_the_text_holds_everything() -> None:
    layers = {"a.b": LayerRanges("qat.Conv2d", INT8, None, ("no scale for its weight: why",))}
    ranges = NativeRanges(layers)
    assert NativeRanges.from_json(ranges.to_json()) == ranges


@each_of(
    "text",
    [
        "[",
        "[]",
        "3",
        '{"a": {}}',
        '{"a": {"kind": 3, "notes": [], "activation": null, "weight": null}}',
        '{"a": {"kind": "qat.Conv2d", "notes": [3], "activation": null, "weight": null}}',
        '{"a": {"kind": "qat.Conv2d", "notes": [], "activation": {"scale": 1}, "weight": null}}',
        '{"a": {"kind": "qat.Conv2d", "notes": [], "weight": null, "activation": {"zero_point": [0],'
        ' "scheme": {"axis": 0}, "scale": [0.1]}}}',
    ],
)
def test_damaged_scales_are_refused(traced: TracedModule, text: str) -> None:
    copy = qtrace.trace(traced)
    copy.native_ranges = text
    with pytest.raises(GraphError, match="the scales that the model brings are damaged .* trace it again"):
        qtrace.prepare(copy)


def test_a_scale_for_a_weight_that_is_not_there_is_not_used(traced: TracedModule) -> None:
    copy = qtrace.trace(traced)
    ranges = read_ranges(copy)
    assert ranges is not None
    for path in ("0", ""):
        layer = LayerRanges("qat.QuantStub", ranges.layers["0"].activation, INT8)
        write_ranges(copy, NativeRanges({**ranges.layers, path: layer}))
        assert QuantizedModel(qtrace.prepare(copy)).record.native
