"""The limits of onnxruntime's kernels on this processor."""

from __future__ import annotations

import functools
import importlib.util
import re
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

import numpy as np

from qtrace.onnxfile.local_session import SessionSettings
from qtrace.onnxfile.sessions import open_session
from qtrace.runtimes.host import RuntimeHost

__all__ = ["SAFE_BITS", "products_are_wrong", "products_saturate"]

SAFE_BITS = 7
"""The bits of weights of which two products with uint8 fit into 16 bits."""

_CPU_INFO = Path("/proc/cpuinfo")
_AMX = "amx_int8"
_FIRST_WRONG, _FIRST_RIGHT = (1, 21), (1, 25)  # versions of onnxruntime


@functools.cache
def products_saturate(host: RuntimeHost | None = None) -> bool:
    """Returns whether onnxruntime's products of uint8 and int8 saturate on this processor, or on a host's.

    x86 processors without VNNI add two neighbouring products in 16 bits. A product whose sums pass that
    bound is computed once and compared with its exact value. Without onnxruntime the answer is no.
    """
    return not _multiplies([np.full((8, 64), 255, np.uint8)], np.full((64, 16), 127, np.int8), host)


@functools.cache
def products_are_wrong(host: RuntimeHost | None = None) -> bool:
    """Returns whether onnxruntime's products of uint8 and int8 are wrong here, or on a host, for some shapes.

    On processors with AMX, onnxruntime 1.21 to 1.24 computes the last of each 32 rows wrong where the number
    of columns leaves 17 to 31 over a multiple of 32 (issue 26324). It adds what its memory holds of before,
    which may be 0: one right product proves nothing, so the processor's flags decide here. Elsewhere
    products of several shapes are computed, one after the other, of numbers that no 16 bits overflow with.
    """
    if host is None and _has_wrong_kernels():
        return True
    random = np.random.default_rng(0)
    for inner in (64, 8, 24):
        left = [random.integers(0, 256, (64, inner)).astype(np.uint8) for _ in range(4)]
        right = random.integers(-64, 65, (inner, 24)).astype(np.int8)
        if not _multiplies(left, right, host):
            return True
    return False


def _has_wrong_kernels() -> bool:
    """Whether the processor and the version of onnxruntime are those that are known to be wrong."""
    if importlib.util.find_spec("onnxruntime") is None or not _CPU_INFO.is_file():
        return False
    if _AMX not in _CPU_INFO.read_text(errors="replace").split():
        return False
    numbers = re.findall(r"\d+", metadata.version("onnxruntime"))
    return _FIRST_WRONG <= tuple(map(int, numbers[:2])) < _FIRST_RIGHT


def _multiplies(lefts: Sequence[np.ndarray], right: np.ndarray, host: RuntimeHost | None) -> bool:
    """Whether onnxruntime's products of matrices of integers are exact; they are without onnxruntime."""
    packages = ("onnx", "onnxruntime") if host is None else ("onnx",)
    if not all(map(importlib.util.find_spec, packages)):
        return True
    from onnx import TensorProto, helper, numpy_helper

    shape = (len(lefts[0]), right.shape[1])
    graph = helper.make_graph(
        [helper.make_node("MatMulInteger", ["x", "w"], ["y"])],
        "product",
        [helper.make_tensor_value_info("x", TensorProto.UINT8, lefts[0].shape)],
        [helper.make_tensor_value_info("y", TensorProto.INT32, shape)],
        [numpy_helper.from_array(right, "w")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    session = open_session(model.SerializeToString(), SessionSettings(host=host), "a product")
    products = (session.run(None, {"x": left})[0] for left in lefts)
    exact = (left.astype(np.int32) @ right.astype(np.int32) for left in lefts)
    return all(map(np.array_equal, products, exact))
