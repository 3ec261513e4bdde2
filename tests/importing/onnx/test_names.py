"""Names of a file that meet each other or the names that qtrace derives: the record and the files fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from megengine import Tensor
from onnx import helper
from onnx.reference import ReferenceEvaluator

import qtrace
from qtrace.graph.types import TracedModule
from qtrace.preparation.model import QuantizedModel
from tests.importing.onnx.networks import model, node, save, weights

X = np.random.default_rng(0).standard_normal((1, 3, 8, 8)).astype(np.float32)

# The names of the input, the first weight, the results of the first conv and of the pooling, and the output.
NAMES = {
    "rounded": ("x_q", "c.weight", "x_int", "t_int", "x"),
    "integers": ("x", "x_q", "x_int", "t_q", "x_q_int"),
    "a layer's weight": ("attn_weight", "attn.weight", "conv_bias", "conv.bias", "attn_weight_1"),
    "the container": ("qsites", "qsites.weight", "qsites_x", "qsites.x", "qsites_x_q"),
    "dots and underscores": ("a.b", "a_b", "a/b", "a__b", "a:b"),
    "words of Python": ("class", "None.weight", "nan", "inf", "self"),
    "umlauts and no identifiers": ("x y", "größe.weight", "größe", "ü", "0"),
    "nodes of a file": ("input:0", "y_Conv", "Conv", "x__1", "const_0.0"),
}


@pytest.mark.quick(1)
@pytest.mark.parametrize("case", NAMES)
def test_any_name_keeps_record_and_file_together(case: str, tmp_path: Path) -> None:
    x, weight, conv, pooled, y = NAMES[case]
    proto = model(
        [
            helper.make_node("Conv", [x, weight, f"{weight}_bias"], [conv]),
            helper.make_node("Relu", [conv], ["t"]),
            helper.make_node("MaxPool", ["t"], [pooled], kernel_shape=[2, 2], strides=[2, 2]),
            helper.make_node("Conv", [pooled, "w2"], [y]),
        ],
        {x: (1, 3, 8, 8)},
        [y],
        {weight: weights(4, 3, 3, 3) / 5, f"{weight}_bias": weights(4), "w2": weights(4, 4, 3, 3) / 5},
    )
    converted = _convert(proto, {x: X}, tmp_path)
    qtrace.export(converted, tmp_path / "m.onnx")
    assert qtrace.verify(tmp_path / "m.onnx", converted, [X], optimized=False).passed


@pytest.mark.parametrize("stored", ["bias", "weight", "both"])
def test_equal_parameters_that_an_exporter_merged_by_identity(stored: str, tmp_path: Path) -> None:
    values = {"l0.bias": weights(8), "l0.weight": weights(8, 8), "l1.bias": weights(8, seed=1)}
    values["l1.weight"] = weights(8, 8, seed=1)
    nodes = [
        node("MatMul", "x l0.weight", "m"),
        node("Add", "m l0.bias", "h"),
        node("MatMul", "h l1.weight", "n"),
        node("Add", "n l1.bias", "y"),
    ]
    for part in ("weight", "bias"):
        if stored in (part, "both"):  # a chain of two
            del values[f"l1.{part}"]
            chain = (
                node("Identity", f"l0.{part}", f"mid.{part}"),
                node("Identity", f"mid.{part}", f"l1.{part}"),
            )
            nodes[:0] = chain
    proto = model(nodes, {"x": (2, 8)}, ["y"], values)
    converted = _convert(proto, {"x": weights(2, 8, seed=2)}, tmp_path)
    assert [site.sort for site in QuantizedModel(converted).sites].count("bias") == 2


def _convert(proto: Any, feeds: dict[str, np.ndarray], folder: Path) -> TracedModule:
    """Converts the network; it computes what the file computes, and its sites fit its graph."""
    path = save(proto, folder)
    batch = tuple(feeds.values())
    (expected,) = ReferenceEvaluator(str(path)).run(None, feeds)
    prepared = qtrace.prepare(qtrace.from_onnx(path))
    qtrace.calibrate(prepared, [batch], progress=False)
    qtrace.save(qtrace.convert(prepared), folder / "converted.mge")
    converted = qtrace.load(folder / "converted.mge")
    for site in QuantizedModel(converted).sites:
        assert site.node.name == site.decision.node
    result = converted(*map(Tensor, batch)).numpy()
    assert 10 * np.log10((expected**2).mean() / ((result - expected) ** 2).mean()) > 25
    return converted
