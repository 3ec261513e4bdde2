"""What the time of an ONNX file depends on, as a hash: files of like structure are measured once."""

from __future__ import annotations

import hashlib
import math
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["has_same_nodes", "hash_structure", "is_in_float"]

_INTEGER_OPS = ("ConvInteger", "MatMulInteger", "MatMulNBits")
_SMALL = 64  # elements of an initializer that may be the sizes, scales or axes of a node
_TRAINED = {
    "BatchNormalization": (1, 2, 3, 4),
    "Conv": (1, 2),
    "ConvTranspose": (1, 2),
    "DequantizeLinear": (0,),
    "Gemm": (1, 2),
    "MatMul": (1,),
}
"""Op -> the inputs on whose values its time does not depend, if they are stored."""
_SCALE, _ZERO_POINT = (
    {"QuantizeLinear": 1, "DequantizeLinear": 1},
    {"QuantizeLinear": 2, "DequantizeLinear": 2},
)
"""Op -> the inputs of whose values only matters which are equal, and which are 0."""


def hash_structure(path: Path) -> str:
    """Returns a hash of what the time of a file depends on: its nodes, types, shapes, and stored arguments.

    The values of weights, biases, scales and zero points do not count: a network trained or calibrated anew
    has the same hash. Of scales counts which are equal, as a rounding to the scale that a tensor has is no
    work, and of zero points which are 0 or the least integer: two others are often equal by chance.

    Returns:
        Two hashes with a dot between: of all but the equal scales, and of these.
    """
    import onnx

    model = onnx.load(path, load_external_data=False)
    digest, equals = hashlib.sha256(), hashlib.sha256()
    digest.update(repr(sorted((entry.domain, entry.version) for entry in model.opset_import)).encode())
    arguments, scales, zero_points = _stored_inputs(model.graph)
    numbers: dict[str, int] = {}
    equal: dict[bytes, int] = {}
    for tensor in model.graph.initializer:
        numbers[tensor.name] = len(numbers)
        digest.update(f"{tensor.data_type}{list(tensor.dims)}".encode())
        if tensor.name in arguments | scales | zero_points and (
            math.prod(tensor.dims) <= _SMALL
            or tensor.data_type in (onnx.TensorProto.INT32, onnx.TensorProto.INT64)
        ):
            values = onnx.numpy_helper.to_array(tensor, str(path.parent))
            content = values.tobytes()
            if tensor.name in arguments:
                digest.update(content)
            elif tensor.name in scales:
                equals.update(f"{equal.setdefault(content, len(equal))} ".encode())
            else:
                lowest = np.iinfo(values.dtype).min if values.dtype.kind in "iu" else 0
                # A zero point at the lower end makes a rounding clip at 0, as a ReLU does.
                digest.update(f"{(values == 0).all()}{(values == lowest).all()}".encode())
    for value in model.graph.input:
        numbers[value.name] = len(numbers)
        digest.update(value.type.SerializeToString(deterministic=True))
    for node in model.graph.node:
        for name in node.output:
            numbers[name] = len(numbers)
        attributes = sorted(a.SerializeToString(deterministic=True) for a in node.attribute)
        ends = [numbers.get(name, -1) for name in (*node.input, *node.output)]
        digest.update(f"{node.domain}:{node.op_type}{ends}{attributes}".encode())
    digest.update(repr([numbers.get(value.name, -1) for value in model.graph.output]).encode())
    return f"{digest.hexdigest()[:32]}.{equals.hexdigest()[:16]}"


def is_in_float(path: Path) -> bool:
    """Returns whether no op of an ONNX file rounds floats to integers, or reads rounded weights."""
    import onnx

    nodes = onnx.load(path, load_external_data=False).graph.node
    return not any("Quantize" in node.op_type or node.op_type in _INTEGER_OPS for node in nodes)


def has_same_nodes(first: str, second: str) -> bool:
    """Returns whether two files have hashes that differ in their equal scales at most."""
    return first.partition(".")[0] == second.partition(".")[0]


def _stored_inputs(graph: Any) -> tuple[set[str], set[str], set[str]]:
    """Returns the values that are an argument of a node and not trained, the scales, and the zero points."""
    arguments, scales, zero_points = set[str](), set[str](), set[str]()
    for node in graph.node:
        for place, name in enumerate(node.input):
            if place == _SCALE.get(node.op_type):
                scales.add(name)
            elif place == _ZERO_POINT.get(node.op_type):
                zero_points.add(name)
            elif place not in _TRAINED.get(node.op_type, ()):
                arguments.add(name)
    return arguments, scales, zero_points
