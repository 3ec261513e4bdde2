"""The ops that onnxruntime has in integer kernels, why others are in float, and the limits of its kernels."""

from __future__ import annotations

import functools
import importlib.util
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from qtrace.errors import shorten_list
from qtrace.onnxfile.external_data import onnx, read_model
from qtrace.onnxfile.local_session import SessionSettings
from qtrace.onnxfile.sessions import open_session
from qtrace.runtimes.host import RuntimeHost
from qtrace.runtimes.worker import describe_machine

# The ops that compute. Ops that only move values run on any type.
_COMPUTING = (
    "Conv ConvTranspose Gemm MatMul Add Sub Mul Div Concat AveragePool GlobalAveragePool MaxPool ReduceMean "
    "Sigmoid LeakyRelu Softmax Tanh HardSigmoid HardSwish Resize"
)
_WITHOUT_INTEGER_KERNEL = "ConvTranspose Sub Div ReduceMean HardSigmoid HardSwish Tanh"
_INTEGER_OPS = ("QGemm", "MatMulInteger", "ConvInteger", "MatMulIntegerToFloat")
_MOVES = "MaxPool Resize Transpose Reshape Flatten Concat Split Slice Squeeze Unsqueeze Gather Pad"

SAFE_BITS = 7
"""The bits of weights of which two products with uint8 fit into 16 bits."""

_AMX = "amx_int8"
_FIRST_WRONG, _FIRST_RIGHT = (1, 21), (1, 25)  # versions of onnxruntime


@dataclass(frozen=True)
class Kernels:
    """How a runtime computes the quantized ops of a file.

    Attributes:
        integer: names of the results that integer kernels compute.
        floats: result, op and reason for those that run in float between rounded tensors.
        saturates: whether products of the file's types saturate on the processor that it runs on.
        wrong: whether its integer products are wrong there for some shapes, a known fault with AMX.
        side: versions and machine of a runtime on another host; empty for one in this interpreter.
    """

    integer: tuple[str, ...]
    floats: tuple[tuple[str, str, str], ...]
    saturates: bool = False
    wrong: bool = False
    side: Mapping[str, Any] = field(default_factory=dict)

    def describe(self) -> list[str]:
        """Says in lines how many ops run on integers, and what keeps the others in float."""
        count = len(self.integer) + len(self.floats)
        rest = "; the others compute in float, with the same values" if self.floats else ""
        lines = [f"integer kernels: {len(self.integer)} of {count} ops of the file that read integers{rest}"]
        groups: dict[tuple[str, str], list[str]] = {}
        for name, op, why in self.floats:
            groups.setdefault((op, why), []).append(name)
        for (op, why), names in groups.items():
            lines.append(f"  in float: {op} {shorten_list(names)}: {why}")
        return lines


def find_kernels(path: Path, host: RuntimeHost | None = None) -> Kernels:
    """Optimizes the file as for deployment and finds the kernel of each of its quantized ops.

    A quantized op is one that reads dequantized integers.

    Args:
        path: the file.
        host: the interpreter or machine that has onnxruntime; None for this process.

    Raises:
        ExportError: when onnxruntime cannot run the file.
    """
    from qtrace.onnxfile.model import OnnxModel

    model = OnnxModel(read_model(path))
    producers, readers = model.producers, model.readers
    optimized, side = _optimize(path, host)
    integers = _integer_tensors(optimized)
    remaining = {node.name: node for node in optimized.graph.node}
    names, floats = [], []
    for node in model.graph.node:
        sources = [producers.get(name) for name in node.input]
        quantized = any(s is not None and s.op_type == "DequantizeLinear" for s in sources)
        if node.op_type not in _COMPUTING.split() or not quantized:
            continue
        deployed = remaining.get(node.name)
        if deployed is None or _is_integer(deployed, integers):
            names.append(node.output[0])
        else:
            floats.append((node.output[0], node.op_type, _explain_float(node, producers, readers)))
    saturates = has_large_signed_weights(model.model) and products_saturate(host)
    wrong = bool(names) and products_are_wrong(host)
    return Kernels(tuple(names), tuple(floats), saturates, wrong, side)


def has_large_signed_weights(model: Any) -> bool:
    """Returns whether a stored tensor of int8 is read as the integers of a weight, and passes 7 bits."""
    signed = {tensor.name for tensor in model.graph.initializer if tensor.dims and passes_7_bits(tensor)}
    kinds: tuple[str, ...] = ("QLinear", "MatMulInteger", "ConvInteger")
    if any(node.op_type == "QuantizeLinear" for node in model.graph.node):  # else floats multiply the weights
        kinds += ("DequantizeLinear",)
    readers = (n for n in model.graph.node if n.op_type.startswith(kinds))
    return any(signed.intersection(node.input) for node in readers)


def passes_7_bits(tensor: Any) -> bool:
    """Returns whether two products of an int8 tensor with uint8 may not fit into 16 bits."""
    if tensor.data_type != onnx.TensorProto.INT8 or tensor.data_location == onnx.TensorProto.EXTERNAL:
        return bool(tensor.data_type == onnx.TensorProto.INT8)
    return bool(np.abs(onnx.numpy_helper.to_array(tensor).astype(np.int16)).max(initial=0) > 64)


def _optimize(path: Path, host: RuntimeHost | None) -> tuple[Any, Mapping[str, Any]]:
    """Returns the model as onnxruntime optimizes it, without large tensors, and where that was done."""
    session = open_session(path, SessionSettings(optimized=True, host=host))
    return onnx.load_from_string(session.optimized()), session.side


def _integer_tensors(model: Any) -> set[str]:
    names: set[str] = set()
    for node in model.graph.node:
        if node.op_type == "QuantizeLinear" or _is_integer(node, names):
            names.update(node.output)
    return names


def _is_integer(node: Any, integers: set[str]) -> bool:
    if node.op_type.startswith("QLinear") or node.op_type in _INTEGER_OPS:
        return True
    return node.op_type in _MOVES.split() and any(name in integers for name in node.input)


def _explain_float(node: Any, producers: Mapping[str, Any], readers: Mapping[str, list[Any]]) -> str:
    """Says why no integer kernel computes an op, such as a missing QuantizeLinear after it."""
    if node.op_type in _WITHOUT_INTEGER_KERNEL.split():
        return f"onnxruntime has no integer kernel for {node.op_type}"
    data = node.input[:1] if node.op_type == "Resize" else node.input  # its other inputs are sizes
    sources = [producers[name].op_type for name in data if name in producers]
    floats = [kind for kind in sources if kind not in ("DequantizeLinear", "Constant")]
    if floats:
        return f"it reads the float result of {_join(floats)}, not integers"
    following = [n.op_type for n in readers.get(node.output[0], [])]
    if "Clip" in following:
        return (
            "its result is clipped to fewer values than its integers can hold, and onnxruntime fuses no Clip "
            "between an op and its rounding"
        )
    others = [kind for kind in following if kind not in ("QuantizeLinear", "Relu")]
    if len(others) == len(following):
        reader = f": {_join(others)} reads it in float" if others else ""
        return f"its result is not rounded{reader}"
    if others:
        return f"its result is rounded, but {_join(others)} reads it in float, too"
    return "onnxruntime has an integer kernel for this op, but not with these attributes, types or shapes"


def _join(kinds: list[str]) -> str:
    return " and ".join(dict.fromkeys(kinds))


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

    On processors with AMX, onnxruntime 1.21 to 1.24 computes the last of each 32 rows wrong (issue 26324).
    The number of columns is then 17 to 31 over a multiple of 32. It adds what its memory holds of before,
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
    if importlib.util.find_spec("onnxruntime") is None or _AMX not in describe_machine()["flags"]:
        return False
    numbers = re.findall(r"\d+", metadata.version("onnxruntime"))
    return _FIRST_WRONG <= tuple(map(int, numbers[:2])) < _FIRST_RIGHT


def _multiplies(lefts: Sequence[np.ndarray], right: np.ndarray, host: RuntimeHost | None) -> bool:
    """Whether onnxruntime's products of matrices of integers are exact; they are without onnxruntime."""
    packages = ("onnx", "onnxruntime") if host is None else ("onnx",)
    if not all(map(importlib.util.find_spec, packages)):
        return True
    shape = (len(lefts[0]), right.shape[1])
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("MatMulInteger", ["x", "w"], ["y"])],
        "product",
        [onnx.helper.make_tensor_value_info("x", onnx.TensorProto.UINT8, lefts[0].shape)],
        [onnx.helper.make_tensor_value_info("y", onnx.TensorProto.INT32, shape)],
        [onnx.numpy_helper.from_array(right, "w")],
    )
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 13)], ir_version=8)
    session = open_session(model.SerializeToString(), SessionSettings(host=host), "a product")
    products = (session.run(None, {"x": left})[0] for left in lefts)
    exact = (left.astype(np.int32) @ right.astype(np.int32) for left in lefts)
    return all(map(np.array_equal, products, exact))
