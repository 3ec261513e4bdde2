"""The limits of onnxruntime's kernels on this processor."""

from __future__ import annotations

import functools
import importlib.util

import numpy as np

from qtrace.onnxfile.local_session import SessionSettings
from qtrace.onnxfile.sessions import open_session
from qtrace.runtimes.host import RuntimeHost

__all__ = ["SAFE_BITS", "products_are_wrong", "products_saturate"]

SAFE_BITS = 7
"""The bits of weights of which two products with uint8 fit into 16 bits."""


@functools.cache
def products_saturate(host: RuntimeHost | None = None) -> bool:
    """Returns whether onnxruntime's products of uint8 and int8 saturate on this processor, or on a host's.

    x86 processors without VNNI add two neighbouring products in 16 bits. A product whose sums pass that
    bound is computed once and compared with its exact value. Without onnxruntime the answer is no.
    """
    return not _multiplies(np.full((8, 64), 255, np.uint8), np.full((64, 16), 127, np.int8), host)


@functools.cache
def products_are_wrong(host: RuntimeHost | None = None) -> bool:
    """Returns whether onnxruntime's products of uint8 and int8 are wrong here, or on a host, for some shapes.

    On processors with AMX, onnxruntime 1.21 to 1.24 computes the last of each 32 rows wrong where the number
    of columns leaves 17 to 31 over a multiple of 32 (issue 26324). Such a product is computed once, of
    numbers that no 16 bits overflow with.
    """
    random = np.random.default_rng(0)
    left = random.integers(0, 256, (64, 64)).astype(np.uint8)
    return not _multiplies(left, random.integers(-64, 65, (64, 24)).astype(np.int8), host)


def _multiplies(left: np.ndarray, right: np.ndarray, host: RuntimeHost | None) -> bool:
    """Whether onnxruntime's product of two matrices of integers is exact; it is without onnxruntime."""
    packages = ("onnx", "onnxruntime") if host is None else ("onnx",)
    if not all(map(importlib.util.find_spec, packages)):
        return True
    from onnx import TensorProto, helper, numpy_helper

    shape = (len(left), right.shape[1])
    graph = helper.make_graph(
        [helper.make_node("MatMulInteger", ["x", "w"], ["y"])],
        "product",
        [helper.make_tensor_value_info("x", TensorProto.UINT8, left.shape)],
        [helper.make_tensor_value_info("y", TensorProto.INT32, shape)],
        [numpy_helper.from_array(right, "w")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    (product,) = open_session(model.SerializeToString(), SessionSettings(host=host), "a product").run(
        None, {"x": left}
    )
    return np.array_equal(product, left.astype(np.int32) @ right.astype(np.int32))
