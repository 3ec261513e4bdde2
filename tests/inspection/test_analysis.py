"""What each op costs: counts by hand, memory by liveness, times; for float, quantized and nested graphs."""

from __future__ import annotations

import json
from typing import Any

import megengine as mge
import megengine.functional as F
import megengine.module as M
import numpy as np
import pytest

import qtrace
from qtrace.errors import GraphError
from qtrace.graph import GraphBuilder, dot
from qtrace.inspection.analysis import analyze
from tests.graph.counting import count_calls
from tests.nets import images, net

X = images(1, 4, 8, 8)


def _branches(self: Any, x: Any) -> Any:
    y = F.relu(self.a(x))
    return self.fc(F.flatten(F.concat([self.a(x), y], 1), 1)), self.t(y)


@pytest.fixture(scope="module")
def traced() -> Any:
    module = net(
        _branches,
        a=M.Conv2d(4, 6, 3, groups=2),
        t=M.ConvTranspose2d(6, 2, 2),
        fc=M.Linear(432, 5, bias=False),
    )
    return qtrace.trace(module, X, check=False)


def test_counts_are_those_by_hand(traced: Any) -> None:
    analysis = analyze(traced)
    costs = {op.name: op for op in analysis.ops}
    assert {name: op.macs for name, op in costs.items() if op.macs} == {
        "a_out": 6 * 36 * 2 * 9,
        "a_1_out": 6 * 36 * 2 * 9,
        "t_out": 6 * 36 * 2 * 4,
        "fc_out": 432 * 5,
    }
    # The second call of a layer reads no parameter that is not counted yet.
    assert {name: op.parameters for name, op in costs.items() if op.parameters} == {
        "a_out": 6 * 2 * 9 + 6,
        "t_out": 6 * 2 * 4 + 2,
        "fc_out": 432 * 5,
    }
    assert analysis.parameters == sum(int(np.prod(p.shape)) for p in traced.parameters())
    assert analysis.macs == sum(op.macs for op in analysis.ops)
    assert costs["a_out"].kind == "conv2d"
    assert costs["a_out"].output_bytes == 4 * 6 * 36
    assert analysis.uncounted == ()


def test_memory_is_what_exists_while_an_op_runs() -> None:
    def forward(self: Any, x: Any) -> Any:  # of 256 values, 1 KiB each
        y = F.exp(x)  # x, y
        z = F.exp(F.exp(y))  # y and its successor, which is freed
        return F.concat([y, z], 1)  # y, z and 2 KiB

    analysis = analyze(qtrace.trace(net(forward), X, check=False))
    assert [op.live_bytes / 1024 for op in analysis.ops] == [2, 2, 3, 4]
    assert analysis.peak is not None
    assert analysis.peak.name == "concat_out"
    outputs = analyze(qtrace.trace(net(lambda self, x: (F.exp(x), F.abs(x))), X, check=False))
    assert [op.live_bytes / 1024 for op in outputs.ops] == [2, 3]  # an output stays


def test_times_are_measured_on_request_and_in_the_table(traced: Any) -> None:
    assert analyze(traced).seconds is None
    analysis = analyze(traced, runs=2)
    assert all(op.seconds is not None and op.seconds > 0 for op in analysis.ops)
    assert analysis.seconds == pytest.approx(sum(op.seconds or 0 for op in analysis.ops))
    assert " ms" in analysis.table().splitlines()[0]
    assert "time of the ops:" in analysis.table()
    assert "time of the ops:" not in analyze(traced).table()


def test_inputs_of_every_type_are_made_for_the_times() -> None:
    def forward(self: Any, x: Any, index: Any) -> Any:
        return F.indexing_one_hot(x, index, axis=1) + self.table

    module = net(forward, table=mge.Tensor(np.ones(1, np.float32)))
    analysis = analyze(qtrace.trace(module, X[:, :, 0, 0], np.zeros(1, np.int32), check=False), runs=1)
    assert analysis.seconds
    assert analysis.macs == 0
    assert analysis.parameters == 1


def test_ops_without_a_formula_are_named() -> None:
    module = net(lambda self, x: self.c(x), c=M.LocalConv2d(4, 4, 8, 8, 3))
    analysis = analyze(qtrace.trace(module, X, check=False))
    assert analysis.uncounted == ("c_out",)
    assert "MACs not counted: c_out" in analysis.table()


def test_a_quantized_graph_is_counted_too(traced: Any) -> None:
    prepared = qtrace.calibrate(qtrace.prepare(traced), [X], progress=False)
    assert analyze(prepared).macs == analyze(traced).macs
    assert analyze(qtrace.convert(prepared)).macs == analyze(traced).macs


def test_the_data_are_plain(traced: Any) -> None:
    data = json.loads(json.dumps(analyze(traced).to_dict()))
    assert set(data["totals"]) == {"macs", "parameters", "peak_activation_bytes", "peak_at", "seconds"}
    assert data["totals"]["macs"] == sum(op["macs"] for op in data["ops"])
    assert data["ops"][0]["shape"] == [1, 6, 6, 6]


def test_a_graph_without_ops_has_no_peak() -> None:
    analysis = analyze(qtrace.trace(net(lambda self, x: x), X, check=False))
    assert analysis.peak is None or analysis.macs == 0
    assert analysis.to_dict()["totals"]["macs"] == 0


def test_only_a_traced_module_is_taken() -> None:
    with pytest.raises(GraphError, match="inspect takes a TracedModule, not a ReLU"):
        analyze(M.ReLU())  # type: ignore[arg-type]


def test_a_drawing_has_every_op_and_edge(traced: Any) -> None:
    lines = dot(qtrace.graph.flatten(traced)).splitlines()
    assert lines[0] == 'digraph "Net" {'
    assert lines[-1] == "}"
    boxes = [line for line in lines if line.startswith("  op") and "->" not in line]
    assert [box.split('label="')[1].split("\\n")[0] for box in boxes] == [
        *("Conv2d", "F.relu", "Conv2d", "F.concat", "F.flatten", "Linear", "ConvTranspose2d")
    ]
    edges = [line for line in lines if "->" in line]
    assert len(edges) == 8 + 2  # concat has two inputs; two outputs
    assert '  in0 -> op0 [label="1x4x8x8"];' in edges


def test_a_drawing_escapes_names_and_says_what_is_no_float() -> None:
    builder = GraphBuilder('a "net"')
    x = builder.input("x", (), np.int32)
    text = dot(builder.finish(builder.call_function(F.add, x, 1)))
    assert 'digraph "a \\"net\\"" {' in text
    assert '[label="int32 scalar"]' in text


def test_the_work_grows_in_step_with_the_graph() -> None:
    def chain(length: int) -> Any:
        builder = GraphBuilder()
        y = builder.input("x", (1, 2))
        for index in range(length):
            y = builder.call_function(F.mul, y, builder.parameter(f"p{index}", np.ones(2, np.float32)))
        return builder.finish(y)

    short, long = chain(40), chain(160)
    assert count_calls(lambda: analyze(long)) < 5 * count_calls(lambda: analyze(short))
    assert count_calls(lambda: dot(long)) < 5 * count_calls(lambda: dot(short))
