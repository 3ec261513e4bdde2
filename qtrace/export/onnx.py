"""ONNX with QuantizeLinear and DequantizeLinear nodes (QDQ): opset 13, int8 and uint8.

Weights are stored as integers per channel, biases as int32 at the scale of the accumulator; every tensor
that is an integer in the graph is one in the file, under the name of its site with ``_int`` behind it.
"""

from __future__ import annotations

import importlib.util
from importlib.metadata import version
from typing import Any

import numpy as np

from qtrace import ops
from qtrace.errors import ExportError
from qtrace.fakequant._bias import BiasQuant
from qtrace.fakequant.base import FakeQuant
from qtrace.graph.types import Constant, Expr, GetAttr, TensorNode, TracedModule
from qtrace.graph.walk import exprs, op_label, owner, users
from qtrace.numerics import quantize
from qtrace.ops import OpCall
from qtrace.passes.annotation import Annotation, Site
from qtrace.passes.insert import CONTAINER
from qtrace.passes.record import read_record

__all__ = ["SUFFIXES", "serialize"]

SUFFIXES = (".onnx",)


def serialize(converted: TracedModule) -> bytes:
    """The converted module as an ONNX file.

    Args:
        converted: a module made by ``qtrace.convert``.

    Raises:
        ExportError: when a node has no ONNX form, naming it, or onnx is not installed.
    """
    if importlib.util.find_spec("onnx") is None:
        raise ExportError("ONNX export needs the package onnx: run pip install 'qtrace[onnx]'.")
    import onnx

    model = _Exporter(converted).run()
    try:
        onnx.checker.check_model(model, full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        line = str(error).strip().splitlines()[0]
        raise ExportError(f"the graph makes no valid ONNX model: {line}") from error
    return bytes(model.SerializeToString())


class _Exporter:
    def __init__(self, converted: TracedModule) -> None:
        from qtrace.export._onnx_moves import MOVES, emit_shape_op
        from qtrace.export._onnx_ops import EMITTERS
        from qtrace.export._onnx_writer import OnnxWriter

        self.model = converted
        self.annotation: Annotation = read_record(converted, "converted").annotation
        self.moved = self.annotation.moved()
        self.sites: dict[str, Site] = {f"{s.name}_q": s for s in self.annotation.sites}
        self.emitters = {**EMITTERS, **MOVES}
        self.emit_shape_op = emit_shape_op
        self.writer = OnnxWriter()

    def run(self) -> Any:
        """The whole model."""
        graph = self.model.graph
        for node in graph.inputs[1:]:
            self.writer.names[id(node)] = node.name
        for expr in exprs(self.model):
            self._emit(expr)
        batch = int(graph.inputs[1].shape[0]) if len(graph.inputs) > 1 and graph.inputs[1].shape else None
        inputs = [self._value_info(n, n.name, batch) for n in graph.inputs[1:]]
        outputs = []
        for index, node in enumerate(graph.outputs):
            name = self._output_name(node, index)
            outputs.append(self._value_info(node, name, batch))
        metadata = {"qtrace.backend": self.annotation.backend}
        return self.writer.model(graph.name or "qtrace", inputs, outputs, metadata, version("qtrace"))

    def _output_name(self, node: TensorNode, index: int) -> str:
        """Outputs need names of their own, even where one tensor is returned twice or is an input."""
        name = self.writer.name(node)
        site = self.sites.get(node.name)
        wanted = site.node if site is not None else node.name
        taken = {o for n in self.writer.nodes for o in n.output} | set(self.writer.names.values())
        if wanted in taken:
            wanted = f"{wanted}_output" if index == 0 else f"{wanted}_output_{index}"
        return self.writer.node("Identity", [name], wanted)

    @staticmethod
    def _value_info(node: TensorNode, name: str, batch: int | None) -> Any:
        from onnx import helper

        kind = helper.np_dtype_to_tensor_dtype(np.dtype(node.dtype))
        shape = [int(n) for n in node.shape]
        dims: list[Any] = ["N" if i == 0 and n == batch else n for i, n in enumerate(shape)]
        return helper.make_tensor_value_info(name, kind, dims)

    def _emit(self, expr: Expr) -> None:
        if isinstance(expr, (GetAttr, Constant)):
            if isinstance(expr.outputs[0], TensorNode):
                value = expr.interpret(self.model) if isinstance(expr, GetAttr) else (expr.value,)
                self.writer.values[id(expr.outputs[0])] = value[0].numpy()
            return
        module = owner(expr)
        if isinstance(module, (FakeQuant, BiasQuant)):
            self._emit_site(expr, self.sites[expr.outputs[0].name])
            return
        self._emit_op(expr)
        for node in expr.outputs:
            group = self.moved.get(node.name)
            if group is not None:
                self._requantize(node, group)

    def _emit_op(self, expr: Expr) -> None:
        call = ops.read(expr)
        if call is not None and call.kind in self.emitters:
            try:
                self.emitters[call.kind](self.writer, call)
            except ExportError as error:
                raise ExportError(f"{error} (in {call.out.name}, {op_label(expr)}).") from error
            return
        if call is None and self.emit_shape_op(self.writer, expr):
            return
        raise ExportError(
            f"{expr.outputs[0].name}: {op_label(expr)} has no ONNX form yet: end the graph before it, or "
            "write it with ops that have one."
        )

    def _requantize(self, node: TensorNode, group: str) -> None:
        """Writes the integers of a node that carries them: the same parameters, so nothing is rounded."""
        qparams = getattr(getattr(self.model, CONTAINER), group).qparams()
        w = self.writer
        w.names[id(node)] = w.quantize_dequantize(w.name(node), node.name, f"{node.name}_dq", qparams)

    def _emit_site(self, expr: Expr, site: Site) -> None:
        module, out = owner(expr), expr.outputs[0]
        source = next(n for n in expr.inputs if isinstance(n, TensorNode))
        value = self.writer.value(source)
        try:
            if site.sort == "bias":
                self._emit_bias(out, site, value)
            elif site.sort == "weight" and value is not None:
                self._emit_weight(out, site, value)
            elif value is not None:
                qparams = module.qparams()  # type: ignore[union-attr]
                axis = qparams.scheme.axis or 0
                name = self.writer.dequantize(site.name, quantize(value, qparams), qparams, axis, out.name)
                self.writer.names[id(out)] = name
            else:
                qparams = module.qparams()  # type: ignore[union-attr]
                name = self.writer.name(source)
                self.writer.names[id(out)] = self.writer.quantize_dequantize(
                    name, site.name, out.name, qparams
                )
        except ExportError as error:
            raise ExportError(f"site {site.name}: {error}.") from error

    def _emit_weight(self, out: TensorNode, site: Site, value: np.ndarray) -> None:
        from qtrace.export._onnx_ops import weight_layout

        fq = getattr(getattr(self.model, CONTAINER), site.group)
        integers = integer_values(fq, value)
        call = self._layer(out)
        laid, axis = weight_layout(call, integers)
        w = self.writer
        w.laid.add(id(out))
        w.names[id(out)] = w.dequantize(site.name, laid, fq.qparams(), axis, out.name)

    def _layer(self, node: TensorNode) -> OpCall:
        for user in users(node):
            call = ops.read(user)
            if call is not None:
                return call
        raise ExportError(f"{node.name} is a weight that no layer reads")

    def _emit_bias(self, out: TensorNode, site: Site, value: np.ndarray | None) -> None:
        container = getattr(self.model, CONTAINER)
        if value is None:
            raise ExportError("its bias is computed, which int32 storage cannot express")
        activation, weight = getattr(container, site.activation), getattr(container, site.weight)
        scale = getattr(container, site.group).scale(activation, weight)[0].numpy().astype(np.float32)
        flat = value.astype(np.float32).reshape(-1)
        steps = flat / scale.reshape(-1)
        # Half away from zero, as BiasQuant rounds.
        integers = (np.sign(steps) * np.floor(np.abs(steps.astype(np.float64)) + 0.5)).astype(np.int32)
        w = self.writer
        stored = w.constant(f"{site.name}_int", integers)
        factor = w.constant(f"{site.name}_scale", scale.reshape(-1) if scale.ndim else scale)
        zero = w.constant(f"{site.name}_zero_point", np.zeros(scale.size if scale.ndim else (), np.int32))
        extra = {"axis": 0} if scale.ndim else {}
        w.names[id(out)] = w.node("DequantizeLinear", [stored, factor, zero], out.name, **extra)


def integer_values(fq: FakeQuant, value: np.ndarray) -> np.ndarray:
    """The integers to which ``fq`` rounds a parameter, in the parameter's own layout (int32)."""
    flat = fq._channels_first(value)
    qparams = fq.qparams()
    integers = quantize(flat.astype(np.float32), qparams)
    if not fq.scheme.per_channel:
        return integers.reshape(value.shape)
    axes = [i for i, size in enumerate(fq.shape) if size != 1] or [fq.scheme.axis or 0]
    moved = np.moveaxis(value, axes, range(len(axes))).shape
    return np.moveaxis(integers.reshape(moved), range(len(axes)), axes)
