"""The limits of onnxruntime's kernels on this processor."""

from __future__ import annotations

import functools
import importlib.util

import numpy as np

from qtrace.onnxfile.local_session import SessionSettings
from qtrace.onnxfile.sessions import open_session
from qtrace.runtimes.host import RuntimeHost

__all__ = ["SAFE_BITS", "products_saturate"]

SAFE_BITS = 7
"""The bits of weights of which two products with uint8 fit into 16 bits."""


@functools.cache
def products_saturate(host: RuntimeHost | None = None) -> bool:
    """Returns whether onnxruntime's products of uint8 and int8 saturate on this processor, or on a host's.

    x86 processors without VNNI add two neighbouring products in 16 bits. A product whose sums pass that
    bound is computed once and compared with its exact value. Without onnxruntime the answer is no.
    """
    packages = ("onnx", "onnxruntime") if host is None else ("onnx",)
    if not all(map(importlib.util.find_spec, packages)):
        return False
    from onnx import TensorProto, helper, numpy_helper

    left, right = np.full((8, 64), 255, np.uint8), np.full((64, 16), 127, np.int8)
    graph = helper.make_graph(
        [helper.make_node("MatMulInteger", ["x", "w"], ["y"])],
        "product",
        [helper.make_tensor_value_info("x", TensorProto.UINT8, left.shape)],
        [helper.make_tensor_value_info("y", TensorProto.INT32, (8, 16))],
        [numpy_helper.from_array(right, "w")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    (product,) = open_session(model.SerializeToString(), SessionSettings(host=host), "a product").run(
        None, {"x": left}
    )
    return not np.array_equal(product, left.astype(np.int32) @ right.astype(np.int32))
