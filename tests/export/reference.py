"""onnx.reference as a second oracle: pure numpy, by the text of the standard."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
from onnx.reference import ReferenceEvaluator

from qtrace.export.onnx.opset import at_opset
from qtrace.verification.runtimes.onnx_model import with_integer_outputs

__all__ = ["assert_agrees"]

# Before opset 19 onnx.reference has no DequantizeLinear for a scale per channel.
_OPSET = 21
_GIVEN = "_given"


def _raised(data: bytes) -> onnx.ModelProto:
    """The model at an opset that onnx.reference knows whole."""
    model = onnx.load_from_string(data)
    (own,) = model.opset_import
    if own.version < _OPSET:
        nodes, added = at_opset(list(model.graph.node), _OPSET)
        del model.graph.node[:]
        model.graph.node.extend(nodes)
        model.graph.initializer.extend(added)
        own.version, model.ir_version = _OPSET, 10
    return model


def _fed(model: onnx.ModelProto, values: dict[str, np.ndarray]) -> onnx.ModelProto:
    """Lets every op read the integers in ``values`` instead of those that the ops before it gave."""
    for node in model.graph.node:
        if node.op_type == "DequantizeLinear" and node.input[0] in values:
            node.input[0] += _GIVEN
    for name, value in values.items():
        kind = onnx.helper.np_dtype_to_tensor_dtype(value.dtype)
        model.graph.input.append(onnx.helper.make_tensor_value_info(name + _GIVEN, kind, None))
    return model


def assert_agrees(path: Path, inputs: list[np.ndarray]) -> None:
    """Fails where onnxruntime, without optimizations, and onnx.reference differ on a file.

    Each op gets the integers that onnxruntime had, since single steps grow on their way through a network.
    Integers by more than 1 or in more than one of a thousand, floats by more than one part in ten thousand
    or a step of the rounding before them.
    """
    exposed = with_integer_outputs(path)
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(exposed.data, options, providers=["CPUExecutionProvider"])
    feeds = {i.name: x for i, x in zip(session.get_inputs(), inputs, strict=True)}
    names = [*exposed.outputs, *exposed.tensors]
    runtime_values = session.run(names, feeds)
    with np.errstate(all="ignore"):
        integers = {n: v for n, v in zip(names, runtime_values, strict=True) if n in exposed.tensors}
        model = _fed(_raised(exposed.data), integers)
        integer_feeds = {f"{n}{_GIVEN}": v for n, v in integers.items()}
        reference_values = ReferenceEvaluator(model).run(names, {**feeds, **integer_feeds})
    apart, values = 0, 0
    for name, reference, from_runtime in zip(names, reference_values, runtime_values, strict=True):
        reference = np.asarray(reference)
        assert reference.shape == from_runtime.shape, name
        if name in exposed.tensors:
            difference = np.abs(reference.astype(np.int64) - from_runtime.astype(np.int64))
            assert difference.max(initial=0) <= 1, name
            apart, values = apart + np.count_nonzero(difference), values + difference.size
        elif not exposed.tensors:
            np.testing.assert_allclose(reference, from_runtime, rtol=1e-4, atol=1e-4, err_msg=name)
    assert apart <= 0.001 * values + 1
