"""Products of a run, beside those of its definition: each value of a result is a sum of so many products."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from onnx import TensorProto, helper, numpy_helper

from qtrace.extras.contracts.checking import RunPrice, price_run
from qtrace.extras.contracts.qdq_graph import QdqGraph
from tests.each import each_of


def _price(op: str, shape: tuple[int, ...], weight: tuple[int, ...], **attributes: object) -> RunPrice:
    """The price of one layer in float, whose batch is open."""
    node = helper.make_node(op, ["x", "w"], ["y"], **attributes)
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", *shape[1:]])]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)]
    stored = [numpy_helper.from_array(np.ones(weight, np.float32), "w")]
    graph = helper.make_graph([node], "net", inputs, outputs, stored)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    return price_run(QdqGraph(model), (), Path("net.onnx"))


@each_of(
    ("op", "shape", "weight", "attributes", "products"),
    [
        ("Conv", (1, 8, 10, 10), (16, 8, 3, 3), {}, 16 * 8 * 8 * 8 * 9),
        ("Conv", (1, 8, 10, 10), (16, 2, 3, 3), {"group": 4, "strides": [2, 2]}, 16 * 4 * 4 * 2 * 9),
        ("Conv", (1, 8, 10), (4, 8, 3), {"pads": [1, 1]}, 4 * 10 * 8 * 3),
        # Each value of the input is multiplied by the whole kernel of each result.
        ("ConvTranspose", (1, 8, 5, 5), (8, 4, 2, 2), {"strides": [2, 2]}, 8 * 25 * 4 * 4),
        ("MatMul", (1, 7, 32), (32, 10), {}, 7 * 32 * 10),
        ("Gemm", (1, 32), (10, 32), {"transB": 1}, 32 * 10),
    ],
)
def test_products_are_those_of_the_definition(
    op: str, shape: tuple[int, ...], weight: tuple[int, ...], attributes: dict[str, object], products: int
) -> None:
    price = _price(op, shape, weight, **attributes)
    assert dict(price.products) == {"float": products}
    assert price.unknown == 0
    assert "in float (100%)" in price.text()
