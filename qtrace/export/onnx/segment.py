"""Parts of a graph as ONNX models, which onnxruntime evaluates for qtrace.

A segment computes what the graph computes in its current phase, without MegEngine. The model of a prepared
graph gives its activations, for calibration in onnxruntime.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from qtrace.errors import ExportError, install
from qtrace.export.converted import ConvertedGraph, ConvertedOp, bare_graph
from qtrace.export.onnx.exporter import OnnxExporter, OnnxOptions
from qtrace.export.onnx.opset import HIGHEST
from qtrace.export.open_axes import SharedAxes
from qtrace.fakequant.base import FakeQuant
from qtrace.graph.opaque import divides_by_inputs
from qtrace.graph.types import Expr, Node, TensorNode, TracedModule
from qtrace.graph.walk import owner
from qtrace.numerics import expand_blocks
from qtrace.onnxfile import external_data
from qtrace.preparation.model import QuantizedModel
from qtrace.scheme import QParams

# Bytes of weights from which on onnxruntime maps them from a file, instead of two copies of them in memory.
_LARGE = 2**27


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
    exporter = _SegmentExporter(ConvertedGraph(converted), OnnxOptions(contrib=False, opset=HIGHEST))
    names = exporter.read({node: (value.dtype, value.shape) for node, value in inputs.items()})
    exporter.writer.values.update(exporter.graph.values_of(segment))
    members = set(segment)
    for step in exporter.graph.steps:
        if step.expr in members:
            exporter.emit(step)
    return exporter.model([output])[0].SerializeToString(), names


class _SegmentExporter(OnnxExporter):
    """Writes a model that is never stored: the names of an imported file mean nothing there.

    It is without metadata, since hashing the graph takes as long as the rest of the export.
    """

    def _interface(self) -> None:
        return None

    def _metadata(self, own: str) -> dict[str, str]:
        return {}

    def read(self, inputs: Mapping[TensorNode, tuple[Any, Sequence[int | None]]]) -> list[str]:
        """Declares the tensors that come from outside; returns their names."""
        from onnx import helper

        names = [f"given_{index}" for index in range(len(inputs))]
        self.infos = [
            helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(np.dtype(dtype)), shape)
            for name, (dtype, shape) in zip(names, inputs.values(), strict=True)
        ]
        self.writer.reserve(names)
        self.writer.names.update(zip(inputs, names, strict=True))
        return names

    def model(self, outputs: Sequence[TensorNode]) -> tuple[Any, list[str]]:
        """Returns the model that computes ``outputs``, and the names that they have there."""
        from onnx import TensorProto, helper

        results, tensors = [], []
        for index, node in enumerate(outputs):
            kind = helper.np_dtype_to_tensor_dtype(np.dtype(node.dtype))
            results.append(self.writer.node("Identity", [self.writer.name(node)], f"result_{index}"))
            tensors.append(helper.make_tensor_value_info(results[-1], kind or TensorProto.FLOAT, None))
        return self.writer.model("segment", self.infos, tensors, {}, ""), results


class PreparedSegments:
    """Writes parts of a prepared graph as ONNX models in floats, in which fake quants are ops that round.

    Args:
        model: the view of a flat prepared module; it is not changed.

    Raises:
        ExportError: when the package onnx is missing.
    """

    def __init__(self, model: QuantizedModel) -> None:
        if importlib.util.find_spec("onnx") is None:
            raise ExportError(f"the package onnx is not installed: run {install('onnx')}.")
        # Without sites, fake quants are steps like any op.
        annotation = dataclasses.replace(model.annotation, sites=(), carried={}, factors={}, folds=())
        record = dataclasses.replace(model.record, stage="converted", annotation=annotation)
        self._graph = ConvertedGraph(QuantizedModel(model.module, record=record))
        self._steps = {step.expr: step for step in self._graph.steps}

    def model(
        self,
        exprs: Sequence[Expr],
        inputs: Mapping[TensorNode, tuple[Any, Sequence[int | None]]],
        values: Mapping[Node, np.ndarray],
        outputs: Sequence[TensorNode],
    ) -> tuple[bytes, list[str], list[str]]:
        """Writes some exprs as a model.

        Args:
            exprs: exprs of the graph, in the order of computation.
            inputs: node that is read from outside -> its type and its shape, with None for a length that
                varies.
            values: node -> the value of a parameter, of a constant, or of what is computed only from these.
            outputs: nodes that the exprs compute.

        Returns:
            The serialized model and the names of its inputs and outputs, in the order of the arguments.

        Raises:
            ExportError: when ONNX cannot express an expr.
        """
        exporter = _SegmentExporter(self._graph)
        names = exporter.read(inputs)
        exporter.writer.values.update(values)
        for expr in exprs:
            module, step = owner(expr), self._steps.get(expr)
            if isinstance(module, FakeQuant):
                _emit_rounding(exporter, module, expr)
            elif isinstance(step, ConvertedOp):
                exporter.emit(step)
            else:
                raise ExportError(
                    f"{expr} computes no tensor, which no ONNX model expresses: use engine megengine."
                )
        model, results = exporter.model(outputs)
        try:
            return model.SerializeToString(), names, results
        except ValueError as error:
            raise ExportError("the model is larger than 2 GiB: use engine megengine.") from error


def _emit_rounding(exporter: OnnxExporter, module: FakeQuant, expr: Expr) -> None:
    """Writes the call of a fake quant: nothing in the phase ``float``, else its formula."""
    writer, (_, source), (out,) = exporter.writer, expr.args, expr.outputs
    name = writer.name(source)
    if module.phase == "float":
        writer.names[out] = name
        return
    if module.phase != "quantize" or module.transforms:
        raise ExportError(f"site {module.site}: its fake quant transforms values: use engine megengine.")
    qparams = module.qparams()
    if qparams.scheme.rounding == "half_even" and _fills_its_type(qparams):
        writer.names[out] = writer.quantize_dequantize(name, out.name, out.name, qparams)
        return
    if qparams.scheme.block is not None:
        parts = expand_blocks(qparams, tuple(int(n) for n in source.shape))
    else:
        parts = (qparams.scale.reshape(module.shape), qparams.zero_point.reshape(module.shape))
    scale, zero = (part.astype(np.float32) for part in parts)
    writer.names[out] = _emit_formula(exporter, name, out.name, qparams, (scale, zero))


def _fills_its_type(qparams: QParams) -> bool:
    """Whether QuantizeLinear saturates at the ends of the scheme, which has one scale."""
    scheme = qparams.scheme
    full = (scheme.qmin, scheme.qmax) == ((-128, 127) if scheme.signed else (0, 255))
    return full and not qparams.scale.ndim


def _emit_formula(
    exporter: OnnxExporter,
    source: str,
    base: str,
    qparams: QParams,
    parameters: tuple[np.ndarray, np.ndarray],
) -> str:
    """Writes ``clip(round(x / s), qmin - z, qmax - z) * s`` and returns its result."""
    writer, scheme, (scale, zero) = exporter.writer, qparams.scheme, parameters
    step = writer.constant(f"{base}_scale", scale)
    low = writer.constant(f"{base}_low", (scheme.qmin - zero).astype(np.float32))
    high = writer.constant(f"{base}_high", (scheme.qmax - zero).astype(np.float32))
    value = writer.node("Div", [source, step], writer.fresh(base))
    if scheme.rounding == "half_even":
        value = writer.node("Round", [value], writer.fresh(base))
    elif scheme.rounding == "half_up":  # as the fake quant does
        whole = writer.node("Floor", [value], writer.fresh(base))
        fraction = writer.node("Sub", [value, whole], writer.fresh(base))
        twice = writer.node("Add", [fraction, fraction], writer.fresh(base))
        step_up = writer.node("Floor", [twice], writer.fresh(base))
        step_up = writer.node("Min", [step_up, writer.scalar(1.0)], writer.fresh(base))
        value = writer.node("Add", [whole, step_up], writer.fresh(base))
    else:  # the integer next to the magnitude, with the sign
        sign = writer.node("Sign", [value], writer.fresh(base))
        value = writer.node("Abs", [value], writer.fresh(base))
        value = writer.node("Add", [value, writer.scalar(0.5)], writer.fresh(base))
        value = writer.node("Floor", [value], writer.fresh(base))
        value = writer.node("Mul", [value, sign], writer.fresh(base))
    value = writer.node("Max", [value, low], writer.fresh(base))
    value = writer.node("Min", [value, high], writer.fresh(base))
    return writer.node("Mul", [value, step], writer.fresh(base))


@dataclass(frozen=True)
class Activations:
    """A float model, and the inputs and outputs of it that are nodes of a graph.

    Attributes:
        data: the ONNX file; from `_LARGE` bytes of weights on without them.
        folder: the folder of its weights, which goes with this object; None if they are in ``data``.
        inputs: the names of the model's inputs, in the order of the graph's.
        outputs: node -> the output that holds its value.
        input_nodes: node -> the input that is its value.
    """

    data: bytes
    inputs: tuple[str, ...]
    outputs: dict[str, str]
    input_nodes: dict[str, str]
    folder: tempfile.TemporaryDirectory[str] | None = None


def activations(prepared: TracedModule, nodes: Sequence[str], axes: SharedAxes | None = None) -> Activations:
    """Writes the part of a prepared graph that ``nodes`` depend on, in float.

    Args:
        prepared: a module made by ``qtrace.prepare``.
        nodes: names of nodes, inputs of the graph included.
        axes: the open axes of the files of the network; None to find this network's.

    Raises:
        ExportError: when ONNX cannot express a node, or the package onnx is missing.
    """
    if divides_by_inputs(prepared):
        raise ExportError(
            "it divides by integers, and onnxruntime ends the process where one is 0: use engine megengine."
        )
    exporter = _SegmentExporter(bare_graph(prepared), OnnxOptions(axes=axes))
    model = exporter.run()
    from onnx import TensorProto, helper

    names, known = exporter.writer.names, exporter.graph.nodes
    inputs = tuple(i.name for i in model.graph.input)
    if missing := [name for name in nodes if known[name] not in names]:
        raise ExportError(f"{missing[0]} is no tensor of the file: collect with engine megengine.")
    tensors = {name: names[known[name]] for name in nodes}
    graph_inputs = {name: tensor for name, tensor in tensors.items() if tensor in inputs}
    outputs = {name: tensor for name, tensor in tensors.items() if name not in graph_inputs}
    del model.graph.output[:]
    for tensor in dict.fromkeys(outputs.values()):
        model.graph.output.append(helper.make_tensor_value_info(tensor, TensorProto.FLOAT, None))
    if external_data.tensor_bytes(model) < _LARGE:
        return Activations(bytes(model.SerializeToString()), inputs, outputs, graph_inputs)
    light, pieces = external_data.split_off(model, "weights")
    try:
        folder = tempfile.TemporaryDirectory(prefix="qtrace-activations-")
        with Path(folder.name, "weights").open("wb") as file:
            file.writelines(pieces)
    except OSError as error:
        raise ExportError(
            f"its weights cannot be written to {tempfile.gettempdir()}: {error.strerror or error}."
        ) from error
    return Activations(bytes(light.SerializeToString()), inputs, outputs, graph_inputs, folder)
