"""Networks in LiteRT that are small enough for every run; ``test_networks.py`` has the others."""

from __future__ import annotations

from pathlib import Path

import pytest

import qtrace
from tests.export.networks import NETWORKS, Network, Prepared
from tests.targets.tflite.files import kinds

QUICK = [n for n in NETWORKS if n.name in ("MobileNetV3", "ShuffleNetV2")]


@pytest.mark.parametrize("network", QUICK, ids=lambda n: n.name)
def test_litert_computes_every_op_as_the_graph_does(network: Network, tmp_path: Path) -> None:
    prepared = Prepared(network)
    model = prepared.converted("tflite", tmp_path)
    path = qtrace.export(model, tmp_path / "m.tflite")
    report = qtrace.verify(path, model, prepared.batches[2:], runtime="litert")
    assert report.passed, report.table()
    assert len(report.sites["op_by_op"]) > 10
    assert "TRANSPOSE" not in kinds(path)
