"""Computes nodes whose inputs are stored: constants, and sizes that are read from shapes.

The reference implementation of ONNX computes them, after shape inference has said how large the results are.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper, shape_inference

from qtrace.importing.onnx.model import OnnxNode
from qtrace.onnxfile.model import RANDOM_OPS

__all__ = ["SHOWN_TO_INFERENCE", "CannotEvaluate", "evaluate", "infer_shapes"]

_MAX_STORED = 2**27  # elements of a computed constant
SHOWN_TO_INFERENCE = 4096  # elements: larger arrays hold weights, not sizes


class CannotEvaluate(Exception):
    """A node cannot be computed here; the text says why, as a clause."""


def evaluate(
    node: OnnxNode, inputs: Sequence[np.ndarray | None], opsets: Mapping[str, int]
) -> list[np.ndarray]:
    """Computes a node.

    Args:
        node: the node.
        inputs: one an input; None where it is left out.
        opsets: the versions that the model imports.

    Raises:
        CannotEvaluate: when the node is random, lacks a reference, fails, or its result would be huge.
    """
    if node.op in RANDOM_OPS:
        raise CannotEvaluate("is random")
    known = {name: value for name, value in zip(node.inputs, inputs, strict=True) if value is not None}
    shapes = infer_shapes(node, {n: (v.dtype, v.shape) for n, v in known.items()}, known, opsets)
    for _, shape in shapes.values():
        if shape is not None and math.prod(shape) > _MAX_STORED:
            raise CannotEvaluate(f"would compute a constant of the shape {list(shape)}")
    try:
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            results = _run(node, inputs, opsets)
    except Exception as error:  # the reference raises errors of many classes for damaged nodes
        raise CannotEvaluate(f"cannot be computed ({type(error).__name__}: {error})") from error
    arrays = []
    for result in results:
        if not isinstance(result, (np.ndarray, np.generic)):
            raise CannotEvaluate("gives a sequence or text, not a tensor")
        arrays.append(np.asarray(result))
    return arrays


def _run(node: OnnxNode, inputs: Sequence[Any], opsets: Mapping[str, int]) -> Sequence[Any]:
    from onnx.reference import ReferenceEvaluator  # here: it loads slowly, and most files need none
    from onnx.reference.ops import load_op

    if not node.domain:
        implementation = load_op(node.domain, node.op, node.version)
        if not getattr(implementation, "op_domain", "") and not hasattr(implementation, "evaluator_cls"):
            settings = {
                "log": _silent,
                "opsets": dict(opsets),
                "verbose": 0,
                "new_ops": None,
                "existing_functions": {},
            }
            return implementation(node.proto, settings).run(*inputs)
    evaluator = ReferenceEvaluator(node.proto)
    return list(evaluator.run(None, dict(zip(node.inputs, inputs, strict=True))))


def _silent(*_: Any) -> None:
    """Takes the reference's log."""


def infer_shapes(
    node: OnnxNode,
    types: Mapping[str, tuple[Any, Sequence[int]]],
    stored: Mapping[str, np.ndarray],
    opsets: Mapping[str, int],
) -> dict[str, tuple[np.dtype[Any], tuple[int, ...] | None]]:
    """Infers dtypes and shapes of a node's outputs without computing them.

    Args:
        node: the node.
        types: dtype and shape of each input that is there.
        stored: the values of inputs that are known; sizes may be among them.
        opsets: the versions that the model imports.

    Returns:
        Dtype and shape of the outputs that ONNX can infer, by name; None for a shape that depends on values.

    Raises:
        CannotEvaluate: when the inputs do not fit the node.
    """
    if node.domain:
        return {}
    schema = onnx.defs.get_schema(node.op, node.version)
    kinds = {
        name: onnx.helper.make_tensor_type_proto(
            onnx.helper.np_dtype_to_tensor_dtype(np.dtype(d)), list(shape)
        )
        for name, (d, shape) in types.items()
    }
    data = {n: numpy_helper.from_array(v) for n, v in stored.items() if v.size <= SHOWN_TO_INFERENCE}
    imports = [onnx.helper.make_opsetid(domain, version) for domain, version in opsets.items()]
    try:
        outputs = shape_inference.infer_node_outputs(schema, node.proto, kinds, data, opset_imports=imports)
    except (shape_inference.InferenceError, onnx.checker.ValidationError, RuntimeError, ValueError) as error:
        text = (str(error).strip().splitlines() or ["ONNX gives no reason"])[0][:200]
        raise CannotEvaluate(f"does not fit its inputs ({text})") from error
    inferred: dict[str, tuple[np.dtype[Any], tuple[int, ...] | None]] = {}
    for name, kind in outputs.items():
        tensor = kind.tensor_type
        if not kind.HasField("tensor_type") or not tensor.elem_type:
            continue
        axes = tensor.shape.dim if tensor.HasField("shape") else None
        known = axes is not None and all(axis.HasField("dim_value") for axis in axes)
        shape = tuple(int(axis.dim_value) for axis in axes) if axes is not None and known else None
        inferred[name] = (np.dtype(onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type)), shape)
    return inferred
