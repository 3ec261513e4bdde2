"""Structural selectors see gates and swishes of imported files, however these are written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import qtrace
from qtrace.config import QConfig
from qtrace.preparation.prepare import plan

Nodes = list[Any]


def _hard_sigmoid(source: str, result: str, written: str) -> Nodes:
    """Writes a hard sigmoid, or a sigmoid, as exporters do."""
    node = helper.make_node
    if written == "Sigmoid":
        return [node("Sigmoid", [source], [result])]
    if written == "HardSigmoid":
        return [node("HardSigmoid", [source], [result], alpha=1 / 6, beta=0.5)]
    if written == "HardSigmoid of slope 0.2":
        return [node("HardSigmoid", [source], [result], alpha=0.2, beta=0.5)]
    first = [
        node("Add", [source, "three"], [f"{result}_moved"]),
        node("Clip", [f"{result}_moved", "zero", "six"], [f"{result}_cut"]),
    ]
    op, number = ("Div", "six") if written == "divided pieces" else ("Mul", "sixth")
    return [*first, node(op, [f"{result}_cut", number], [result])]


def _network(path: Path, gate: str, swish: str) -> Path:
    """Writes a convolution with a swish, behind which a squeeze and excitation scales the channels."""
    rng, node = np.random.default_rng(0), helper.make_node
    numbers = {"zero": 0.0, "three": 3.0, "six": 6.0, "sixth": 1 / 6}
    arrays = {name: np.float32(value) for name, value in numbers.items()}
    for name, shape in (
        ("w0", (8, 4, 3, 3)),
        ("w1", (4, 8, 1, 1)),
        ("w2", (8, 4, 1, 1)),
        ("w3", (4, 8, 1, 1)),
    ):
        arrays[name] = rng.normal(size=shape).astype(np.float32)
    nodes = [
        node("Conv", ["x", "w0"], ["stem"], pads=[1, 1, 1, 1]),
        *(
            [node("HardSwish", ["stem"], ["swish"])]
            if swish == "HardSwish"
            else [*_hard_sigmoid("stem", "opened", swish), node("Mul", ["stem", "opened"], ["swish"])]
        ),
        node("GlobalAveragePool", ["swish"], ["pooled"]),
        node("Conv", ["pooled", "w1"], ["squeezed"]),
        node("Relu", ["squeezed"], ["kept"]),
        node("Conv", ["kept", "w2"], ["excited"]),
        *_hard_sigmoid("excited", "gate", gate),
        node("Mul", ["swish", "gate"], ["scaled"]),
        node("Conv", ["scaled", "w3"], ["y"]),
    ]
    info = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes,
        "net",
        [info("x", TensorProto.FLOAT, [1, 4, 8, 8])],
        [info("y", TensorProto.FLOAT, [1, 4, 8, 8])],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in arrays.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 14)])
    model.ir_version = 8
    onnx.save(model, str(path))
    return path


def _matched(traced: Any, match: dict[str, Any], backend: str = "onnxruntime") -> list[str]:
    config = QConfig(backend=backend, rules=[{"match": match, "quantize": False, "optional": True}])
    return [f"{n.kind} {n.name}" for n in plan(traced, config).notes if "rules[0]" in n.matched]


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    ("written", "kind"),
    [
        ("Sigmoid", "sigmoid"),
        ("HardSigmoid", "hsigmoid"),
        ("HardSigmoid of slope 0.2", "hard_sigmoid"),
        ("divided pieces", "hsigmoid"),
        ("multiplied pieces", "hsigmoid"),
    ],
)
def test_gate_sees_every_writing_of_a_gate(tmp_path: Path, written: str, kind: str) -> None:
    traced = qtrace.from_onnx(_network(tmp_path / "net.onnx", written, "HardSwish"))
    matched = _matched(traced, {"gate": True})
    assert [line.split()[0] for line in matched] == [kind]
    assert matched[0].split()[1].startswith("gate")
    assert _matched(traced, {"gate": True, "op": kind}) == matched
    assert matched[0] not in _matched(traced, {"gate": False})


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    ("written", "kind"),
    [
        ("Sigmoid", "silu"),
        ("HardSwish", "hswish"),
        ("HardSigmoid", "hswish"),
        ("divided pieces", "hswish"),
        ("multiplied pieces", "hswish"),
    ],
)
def test_rules_of_swishes_see_every_writing_of_a_swish(tmp_path: Path, written: str, kind: str) -> None:
    traced = qtrace.from_onnx(_network(tmp_path / "net.onnx", "HardSigmoid", written))
    assert [line.split()[0] for line in _matched(traced, {"op": ["silu", "hswish"]})] == [kind]
    assert "conv2d stem" in _matched(traced, {"feeds": kind})
    assert "adaptive_avg_pool2d pooled" in _matched(traced, {"follows": kind})
