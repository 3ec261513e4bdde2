"""A profile has the names of the graph, and adds up by sort and by op."""

from __future__ import annotations

import pytest

from qtrace.benchmarking.profile import FLOAT_OPS, INTEGER_OPS, LAYOUT, ROUNDINGS, NodeRun, read_profile

UINT8, FLOAT32 = (("uint8", (1, 4)),), (("float", (1, 4)),)
RUN = [
    NodeRun("x_int", "QuantizeLinear", 1e-3, FLOAT32),
    NodeRun("Transpose_token_3", "Transpose", 1e-3, UINT8),
    NodeRun("conv1_token_2", "QLinearConv", 4e-3, UINT8),
    NodeRun("pool_token_9", "NhwcMaxPool", 1e-3, UINT8),
    NodeRun("y_dq/duplicated", "DequantizeLinear", 1e-3, UINT8),
    NodeRun("act/QuickGeluFusion/", "QuickGelu", 1e-3, FLOAT32),
    NodeRun("conv2_nchwc", "Conv", 1e-3, FLOAT32),
    NodeRun("ReorderOutput_token_10", "ReorderOutput", 0.0, FLOAT32),
]


def _slower(factor):
    return [NodeRun(n.name, n.op, n.seconds * factor, n.inputs) for n in RUN]


def test_names_are_those_of_the_graph():
    names = [node.name for node in read_profile([RUN]).nodes]
    assert names == ["x_int", "Transpose", "conv1", "pool", "y_dq", "act", "conv2", "ReorderOutput"]


def test_times_are_medians_over_the_runs():
    profile = read_profile([RUN, _slower(2), _slower(100)])
    assert profile.seconds == pytest.approx(0.02)


def test_sorts_and_ops_add_up():
    profile = read_profile([RUN])
    assert profile.by_sort() == {
        INTEGER_OPS: pytest.approx(5e-3),
        ROUNDINGS: pytest.approx(2e-3),
        FLOAT_OPS: pytest.approx(2e-3),
        LAYOUT: pytest.approx(1e-3),
    }
    assert next(iter(profile.by_op())) == "QLinearConv"
    assert profile.share(ROUNDINGS) == pytest.approx(0.2)
    assert sum(profile.to_dict()["by_op"].values()) == pytest.approx(0.01)


def test_the_table_lists_the_slowest_nodes_and_roundings():
    lines = read_profile([RUN]).table(count=1).splitlines()
    assert lines[0].split() == ["5.000", "ms", "50.0%", "integer", "kernels"]
    assert "QLinearConv conv1" in lines[lines.index("  slowest nodes:") + 1]
    assert "x_int" in lines[lines.index("  slowest Q/DQ nodes:") + 1]
    assert len(lines) == 4 + 2 * 3
