"""The limits of onnxruntime's kernels on this processor."""

from __future__ import annotations

import functools
import importlib.util

import numpy as np

from qtrace.onnxfile.local_session import SessionSettings
from qtrace.onnxfile.sessions import open_session
from qtrace.runtimes.host import RuntimeHost

__all__ = ["SAFE_BITS", "loses_columns", "products_saturate"]

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
    left, right = np.full((8, 64), 255, np.uint8), np.full((64, 16), 127, np.int8)
    return not _multiplies_right(left, right, host)


@functools.cache
def loses_columns(host: RuntimeHost | None = None) -> bool:
    """Returns whether onnxruntime computes columns of products wrong on this processor, or on a host's.

    On processors with AMX, onnxruntime 1.21 to 1.24 does so for 17 to 31 columns in the last of 32 rows. Such
    a product is computed once and compared with its exact value. Without onnxruntime the answer is no.
    """
    packages = ("onnx", "onnxruntime") if host is None else ("onnx",)
    if not all(map(importlib.util.find_spec, packages)):
        return False
    numbers = np.arange(32 * 64, dtype=np.uint8)
    left, right = numbers.reshape(32, 64) % 7, (numbers[: 64 * 24] % 5).astype(np.int8).reshape(64, 24)
    return not _multiplies_right(left, right, host)


def _multiplies_right(left: np.ndarray, right: np.ndarray, host: RuntimeHost | None) -> bool:
    """Returns whether the product of a matrix of uint8 by a stored one of int8 is exact."""
    from onnx import TensorProto, helper, numpy_helper

    rows, columns = len(left), right.shape[1]
    graph = helper.make_graph(
        [helper.make_node("MatMulInteger", ["x", "w"], ["y"])],
        "product",
        [helper.make_tensor_value_info("x", TensorProto.UINT8, left.shape)],
        [helper.make_tensor_value_info("y", TensorProto.INT32, (rows, columns))],
        [numpy_helper.from_array(right, "w")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    (product,) = open_session(model.SerializeToString(), SessionSettings(host=host), "a product").run(
        None, {"x": left}
    )
    return bool(np.array_equal(product, left.astype(np.int32) @ right.astype(np.int32)))
