"""ONNX with QuantizeLinear and DequantizeLinear nodes (QDQ): opset 13; 16 or 21 where an op or type needs it.

Weights are stored as integers per channel, biases as int32 at the scale of the accumulator. Every tensor
of integers in the graph is one in the file, called ``{site}_int``.
Inputs have the names of the traced arguments, outputs those of the nodes that compute them.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from qtrace import ops
from qtrace.errors import ExportError
from qtrace.export.converted.allow_float import float_kinds, only_floats_read
from qtrace.export.converted.graph import ConvertedGraph, ConvertedOp
from qtrace.export.converted.located import located, site_expr
from qtrace.export.onnx import external_data
from qtrace.export.onnx.kernels import softmax_overflows
from qtrace.graph.types import Expr, TensorNode
from qtrace.graph.walk import is_float_tensor, op_label
from qtrace.ops import OpCall
from qtrace.preparation.model import QuantizedSite
from qtrace.preparation.record import graph_hash
from qtrace.scheme import QParams

__all__ = ["SUFFIXES", "OnnxExporter", "check", "files"]

SUFFIXES = (".onnx",)


def files(
    converted: ConvertedGraph,
    path: Path,
    packed: bool = False,
    external: bool | None = None,
    allow_float: Iterable[str] = (),
) -> dict[Path, bytes]:
    """Returns the converted module as an ONNX file and, if it is large, a file with its tensors.

    Args:
        converted: the graph of a converted module.
        path: the path of the model; the file of its tensors has that name with ``.data`` behind it.
        packed: whether weights of 4 bits and less are stored two in a byte, which needs opset 21. Otherwise
            they are int8 values of a small range, for which runtimes have integer kernels.
        external: whether tensors are in a file of their own; None: if the model exceeds 2 GB, the most that
            one file holds.
        allow_float: kinds of layers, such as ``conv2d``, whose weights and biases are stored as floats (those
            that the graph rounded to), so that runtimes compute the layer in float.

    Raises:
        ExportError: when a node has no ONNX form or rounds in another way than ONNX, naming it, an option is
            neither true nor false, or onnx is not installed.
    """
    for name, value in (("packed", packed), ("external", external)):
        if not (isinstance(value, bool) or (name == "external" and value is None)):
            raise ExportError(f"{name}={value!r} is no choice of the ONNX export: choose true or false.")
    model = OnnxExporter(converted, packed, float_kinds(allow_float)).run()
    check(model)
    size = sum(len(t.raw_data) for t in model.graph.initializer)
    if external or (external is None and size >= external_data.LIMIT):
        beside = path.with_name(f"{path.name}.data")
        data = external_data.move_out(model, beside.name)
        if data:
            return {beside: data, path: bytes(model.SerializeToString())}
    return {path: bytes(model.SerializeToString())}


def check(model: Any) -> None:
    """Refuses a model that is not valid ONNX.

    Raises:
        ExportError: with the first line of the checker's message.
    """
    import onnx

    try:
        onnx.checker.check_model(external_data.skeleton(model), full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        line = str(error).strip().splitlines()[0]
        raise ExportError(
            f"the graph makes no valid ONNX model: {line}. End the graph before the op that it names."
        ) from error


class OnnxExporter:
    """Writes a converted graph into one ONNX model.

    Args:
        converted: the graph of a converted module.
        packed: whether weights of 4 bits and less are stored two in a byte.
        floats: kinds of layers whose weights and biases are stored as floats.

    Raises:
        ExportError: when onnx is not installed.
    """

    def __init__(
        self, converted: ConvertedGraph, packed: bool = False, floats: frozenset[str] = frozenset()
    ) -> None:
        if importlib.util.find_spec("onnx") is None:
            raise ExportError("ONNX export needs the package onnx: run pip install 'qtrace[onnx]'.")
        from qtrace.export.onnx.moves import MOVES
        from qtrace.export.onnx.ops import EMITTERS
        from qtrace.export.onnx.writer import OnnxWriter

        self.graph, self.floats = converted, floats
        self.emitters = {**EMITTERS, **MOVES}
        self.writer = OnnxWriter(packed)

    def run(self) -> Any:
        """Returns the model."""
        self._check_rounding()
        inputs = self.graph.inputs
        self.writer.names.update(inputs)
        self.writer.values.update(self.graph.values)
        for step in self.graph.steps:
            self.emit(step)
        first = next(iter(inputs), None)
        batch = int(first.shape[0]) if first is not None and first.shape else None
        infos = [self._value_info(n, name, batch) for n, name in inputs.items()]
        used_names = set(inputs.values())
        outputs = [self._value_info(n, self._name_output(n, used_names), batch) for n in self.graph.outputs]
        own, name = version("qtrace"), self.graph.module.graph.name or "qtrace"
        return self.writer.model(name, infos, outputs, self._metadata(own), own)

    def _metadata(self, own: str) -> dict[str, str]:
        """Returns the origin of the file, for the model's metadata properties."""
        return {
            "qtrace.version": own,
            "qtrace.backend": self.graph.annotation.backend,
            "qtrace.recipe": json.dumps(self.graph.model.record.qconfig, sort_keys=True),
            "qtrace.graph": graph_hash(self.graph.module),
        }

    def _check_rounding(self) -> None:
        """Refuses sites that ONNX rounds in another way than the graph; parameters are stored rounded."""
        annotation = self.graph.annotation
        for site in annotation.sites:
            if site.plan is not None and not site.static and site.plan.scheme.rounding != "half_even":
                raise ExportError(
                    f"site {site.name} rounds half away from zero, as backend {annotation.backend} "
                    "does, but ONNX rounds half to even: prepare the module with backend onnxruntime."
                )

    def _name_output(self, node: TensorNode, used_names: set[str]) -> str:
        """Gives the tensor of a graph output the name of its node if that is free, and returns its name."""
        name = self.writer.output(self.writer.name(node), self.graph.model.unrounded_name(node), used_names)
        used_names.add(name)
        return name

    @staticmethod
    def _value_info(node: TensorNode, name: str, batch: int | None) -> Any:
        from onnx import helper

        kind = helper.np_dtype_to_tensor_dtype(np.dtype(node.dtype))
        shape = [int(n) for n in node.shape]
        dims: list[Any] = ["N" if i == 0 and n == batch else n for i, n in enumerate(shape)]
        return helper.make_tensor_value_info(name, kind, dims)

    def emit(self, step: ConvertedOp | QuantizedSite) -> None:
        """Writes an op or a rounding."""
        if isinstance(step, QuantizedSite):
            with located(site_expr(step.source, step.value)):
                self._emit_site(step)
        elif not self._emit_rescaled(step):
            self._emit_op(step)

    def _emit_op(self, op: ConvertedOp) -> None:
        with located(op.expr):
            self._emit_call(op.expr, op.call)
        for node in op.expr.outputs:
            qparams = self.graph.moved.get(node.name)
            if qparams is not None:
                self._requantize(node, qparams)

    def _emit_call(self, expr: Expr, call: OpCall | None) -> None:
        for node in expr.outputs:
            if isinstance(node, TensorNode) and node.dtype == np.float16:
                raise ExportError(
                    f"{node.name}: {op_label(expr)} computes in float16, which is not written to ONNX yet: "
                    "compute in float32, or end the graph before it."
                )
        if call is not None and call.kind in self.emitters:
            names = dict(self.writer.names)
            if call.kind in self.floats or softmax_overflows(self.graph, call):
                self._keep_float(call)
            self.emitters[call.kind](self.writer, call)
            self.writer.names.update((n, names[n]) for n in call.inputs if n in names)
            return
        raise ExportError(
            f"{expr.outputs[0].name}: {op_label(expr)} has no ONNX form ({ops.unsupported(expr)}): end the "
            "graph before it, or write it with ops that have one."
        )

    def _keep_float(self, call: OpCall) -> None:
        """Puts a node that changes no value between each input and its DequantizeLinear.

        Behind that node no runtime fuses the op into an integer kernel. Float weights alone would not be
        enough: onnxruntime quantizes them itself, in another way than the graph.
        """
        w = self.writer
        for node in call.inputs:
            if is_float_tensor(node) and w.value(node) is None:
                lowest = w.constant("const_lowest", np.finfo(np.float32).min)
                w.names[node] = w.node("Max", [w.name(node), lowest], w.fresh(f"{node.name}_float"))

    def _emit_rescaled(self, op: ConvertedOp) -> bool:
        """Writes a carried ``mul`` or ``div`` as the same integers, read with another scale."""
        call, moved = op.call, self.graph.moved
        if call is None or call.kind not in ("mul", "div") or call.out.name not in moved:
            return False
        node, source = call.out, self.writer.name(call.inputs[0])
        name = self.writer.rescale(source, node.name, f"{node.name}_dq", moved[node.name])
        if name is not None:
            self.writer.names[node] = name
        return name is not None

    def _requantize(self, node: TensorNode, qparams: QParams) -> None:
        """Writes the integers of a node that carries them; with equal parameters nothing is rounded again."""
        w = self.writer
        w.names[node] = w.quantize_dequantize(w.name(node), node.name, f"{node.name}_dq", qparams)

    def _emit_site(self, site: QuantizedSite) -> None:
        value = self.writer.value(site.source)
        try:
            if site.sort == "bias":
                self._emit_bias(site, value)
            elif site.sort == "weight" and value is not None:
                self._emit_weight(site, value)
            elif value is not None:
                axis = site.qparams.scheme.axis or 0
                parts = (site.name, site.integers(value), site.qparams, axis, site.value.name)
                self.writer.names[site.value] = self.writer.dequantize(*parts)
            else:
                self._emit_computed(site)
        except ExportError as error:
            raise ExportError(f"site {site.name}: {error}.") from error

    def _emit_computed(self, site: QuantizedSite) -> None:
        w, axes = self.writer, site.decision.channel_axes
        name = w.name(site.source)
        if axes == (0, 1):  # a grouped convolution's weight: ONNX knows one axis of channels
            name = w.node("Reshape", [name, w.ints([-1, *site.source.shape[2:]])], w.fresh(site.source.name))
            w.laid_out.add(site.value)
            axes = (0,)
        axis = axes[0] if axes else 0
        w.names[site.value] = w.quantize_dequantize(name, site.name, site.value.name, site.qparams, axis)

    def _emit_weight(self, site: QuantizedSite, value: np.ndarray) -> None:
        from qtrace.export.onnx.ops import weight_layout

        laid_out, axis = weight_layout(self._layer(site), site.integers(value))
        w = self.writer
        w.laid_out.add(site.value)
        w.names[site.value] = w.dequantize(site.name, laid_out, site.qparams, axis, site.value.name)

    def _layer(self, site: QuantizedSite) -> OpCall:
        for user in site.consumers:
            call = self.graph.call(user)
            if call is not None:
                return call
        raise ExportError(f"{site.value.name} is a weight that no layer reads: set quantize: false for it")

    def _emit_bias(self, site: QuantizedSite, value: np.ndarray | None) -> None:
        w, out = self.writer, site.value
        if value is None:
            if not only_floats_read(out, self.floats):
                raise ExportError(
                    "its bias is computed, which int32 storage cannot express: set quantize: false for its "
                    "layer, or name the kind of the layer in allow_float, and the bias stays as computed"
                )
            w.names[out] = w.name(site.source)
            return
        scale = site.bias_scale
        stored = w.constant(f"{site.name}_int", site.integers(value))
        factor = w.constant(f"{site.name}_scale", scale)
        zero = w.constant(f"{site.name}_zero_point", np.zeros(scale.shape, np.int32))
        extra = {"axis": 0} if scale.ndim else {}
        w.names[out] = w.node("DequantizeLinear", [stored, factor, zero], out.name, **extra)
