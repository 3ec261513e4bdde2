"""A segment of a converted graph as an ONNX model, to be evaluated without MegEngine."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence

import numpy as np

from qtrace.errors import ExportError, install
from qtrace.export.converted.graph import ConvertedGraph
from qtrace.export.onnx.exporter import OnnxExporter, OnnxOptions
from qtrace.export.onnx.opset import at_opset
from qtrace.graph.types import Expr, TensorNode, TracedModule

__all__ = ["segment_model"]

# The first opset at which ONNX's reference evaluator knows every op that qtrace writes.
_OPSET, _IR_VERSION = 21, 10


def segment_model(
    converted: TracedModule,
    segment: Sequence[Expr],
    inputs: Mapping[TensorNode, np.ndarray],
    output: TensorNode,
) -> tuple[bytes, list[str]]:
    """Writes ``segment`` as an ONNX model that computes ``output``.

    Args:
        converted: a module made by ``qtrace.convert``.
        segment: exprs of its graph, in order, which read parameters, each other and ``inputs`` only.
        inputs: node -> its value, for the tensors that the segment reads from outside.
        output: the node that the segment computes.

    Returns:
        The serialized model and the names of its inputs, in the order of ``inputs``.

    Raises:
        ExportError: when ONNX cannot express an expr, or the package onnx is missing.
    """
    if importlib.util.find_spec("onnx") is None:
        raise ExportError(f"the package onnx is not installed: run {install('onnx')}.")
    from onnx import helper

    exporter = OnnxExporter(ConvertedGraph(converted), OnnxOptions(contrib=False))
    writer = exporter.writer
    names = [f"given_{index}" for index in range(len(inputs))]
    infos = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(value.dtype), value.shape)
        for name, value in zip(names, inputs.values(), strict=True)
    ]
    writer.reserve(names)
    writer.names.update((node, name) for node, name in zip(inputs, names, strict=True))
    writer.values.update(exporter.graph.values_of(segment))
    members = set(segment)
    for step in exporter.graph.steps:
        if step.expr in members:
            exporter.emit(step)
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(output.dtype))
    result = writer.node("Identity", [writer.name(output)], "result")
    outputs = [helper.make_tensor_value_info(result, kind, None)]
    nodes, added = at_opset(writer.nodes, _OPSET)
    graph = helper.make_graph(nodes, "segment", infos, outputs, [*writer.initializers.values(), *added])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", _OPSET)])
    model.ir_version = _IR_VERSION
    return model.SerializeToString(), names
