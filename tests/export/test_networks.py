"""The table of docs/measured/runtimes.md: every network in every promised form, held to the targets."""

from __future__ import annotations

from pathlib import Path

import pytest

import qtrace
from tests.export.networks import NETWORKS, Network, Prepared, measure
from tests.export.reference import assert_agrees

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("network", NETWORKS, ids=lambda n: n.name)
def test_files_compute_what_the_graph_does(network: Network, tmp_path: Path) -> None:
    result = measure(network, tmp_path)
    for runtime, report in result.reports.items():
        assert report.worst_lsb() <= 1, runtime
        if runtime != "openvino":  # which has floats of its own between the roundings
            # 99.9 % equal; fewer where LiteRT's kernels round ties another way.
            assert not report.short_shares(), runtime
    main = result.reports["onnxruntime"]
    assert main.agreement() == 1.0
    assert result.integer >= 0.9 * (result.counted - result.ends), result.floats
    if network.learned:
        assert main.sqnr_db("deployed") >= 35


@pytest.mark.parametrize("network", NETWORKS, ids=lambda n: n.name)
def test_onnx_reference_agrees_with_onnxruntime(network: Network, tmp_path: Path) -> None:
    prepared = Prepared(network, 2)
    path = qtrace.export(prepared.converted("onnx", tmp_path), tmp_path / "m.onnx")
    assert_agrees(path, [prepared.batches[-1]])
