"""Walks over a converted graph and writes its inputs, ops, sites, outputs and metadata as a TFLite file."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import astuple
from importlib.metadata import version
from typing import Any

import megengine as mge
import numpy as np

from qtrace import ops
from qtrace.errors import ExportError
from qtrace.export.converted import ConvertedGraph, ConvertedOp, located, site_expr
from qtrace.export.open_axes import find_open_batch, find_sample_axes
from qtrace.graph.types import Node, TensorNode
from qtrace.graph.walk import is_float_tensor, op_label
from qtrace.preparation.model import QuantizedSite
from qtrace.targets.tflite import ops as forms
from qtrace.targets.tflite.build import Builder, BuildOptions, OpInFloat, integer_type
from qtrace.targets.tflite.choice import emit_op
from qtrace.targets.tflite.detections import add_detections
from qtrace.targets.tflite.layers import record_bias
from qtrace.targets.tflite.layout import CHANNELS_LAST, KernelPlan, Order, file_shape, natural
from qtrace.targets.tflite.writer import FileTensor, Grid

__all__ = ["Exporter"]

_LOG = logging.getLogger("qtrace")


class Exporter:
    """Writes a converted module as one TFLite file.

    Args:
        converted: the graph of a module that was converted for backend tflite.
        options: the options of the export.
    """

    def __init__(self, converted: ConvertedGraph, options: BuildOptions) -> None:
        self.options, self.plan = options, KernelPlan(converted)
        self.graph = self.plan.graph
        self.inputs = list(self.graph.inputs)
        sizes = {int(n.shape[0]) if n.shape else 0 for n in self.inputs}
        self.batch = sizes.pop() if len(sizes) == 1 else 0
        self.build = Builder(self.plan, options, self.batch)
        self.build.values.update(self.graph.values)
        self.build.sample_axes.update(find_sample_axes(self.graph) if self.batch else {})
        self.orders: dict[Node, Order] = {}

    def run(self) -> bytes:
        """Returns the content of the file."""
        self.plan.check()
        inputs = self._inputs()
        for step in self.graph.steps:
            if any(node in self.plan.needed for node in step.expr.outputs):
                self._emit(step)
        outputs = self._outputs({t.index for _, t in inputs})
        b = self.build
        if self.options.suppression is not None:
            names = [name for name, _ in outputs]
            outputs += add_detections(b, self.graph.outputs, names, self.options.suppression)
            b.float_ops.append(OpInFloat(outputs[-1][0], "nms", "boxes are chosen in float"))
        if self.graph.sites:  # else the whole file is float
            _log_floats(b.float_ops)
        kept = b.writer.prune([t for _, t in outputs])
        free = self.batch if self._is_open() else None
        metadata = {"qtrace": self._metadata(kept, free is not None)}
        return b.writer.finish(inputs, outputs, metadata, f"qtrace {version('qtrace')}", free)

    def _is_open(self) -> bool:
        """Returns whether the first axis of all inputs and outputs may have another size."""
        if not self.batch or self.build.fixed:
            return False
        open_batch = find_open_batch(self.graph)
        return open_batch.inputs == set(self.inputs) and open_batch.is_leading

    # -- inputs and outputs ---------------------------------------------------------------------------

    def _inputs(self) -> list[tuple[str, FileTensor]]:
        inputs = []
        for node, name in self.graph.inputs.items():
            rank = len(node.shape)
            image = rank == 4 and self.plan.reaches(node, forms.SPATIAL, forms.AGNOSTIC)
            order = CHANNELS_LAST if image else natural(rank)
            shape = file_shape(node.shape, order)
            if self.options.io == "int8" and is_float_tensor(node):
                tensor = self._integer_input(node, shape)
            else:
                tensor = self.build.writer.tensor(name, shape, _input_type(node))
            self.build.put(node, tensor, order)
            self.orders[node] = order
            inputs.append((name, tensor))
        return inputs

    def _integer_input(self, node: TensorNode, shape: tuple[int, ...]) -> FileTensor:
        site = self.plan.site_of(node)
        if site is None:
            raise ExportError(
                f"input {node.name} is read in float or rounded in two ways, so it cannot be int8: "
                "export with io='float32', or give its readers one scheme."
            )
        kind, grid = integer_type(site), Grid.of(site.qparams)
        return self.build.writer.tensor(f"{site.name}_int", shape, kind, grid)

    def _outputs(self, used: set[int]) -> list[tuple[str, FileTensor]]:
        outputs: list[tuple[str, FileTensor]] = []
        names: Counter[str] = Counter()
        for node in self.graph.outputs:
            name = self.graph.model.unrounded_name(node)
            names[name] += 1
            tensor = self._output(node, name)
            if tensor.index in used or tensor.value is not None:
                tensor = self._copied(tensor, name)
            used.add(tensor.index)
            outputs.append((name if names[name] == 1 else f"{name}_{names[name]}", tensor))
        return outputs

    def _output(self, node: TensorNode, name: str) -> FileTensor:
        b = self.build
        order = b.moved_from(node)[1].nearest()
        order = CHANNELS_LAST if order == CHANNELS_LAST else natural(len(order))
        tensor = b.ordered(node, order)
        self.orders[node] = order
        if self.options.io == "int8" and tensor.dtype == np.float32:
            raise ExportError(
                f"output {name} is float, so it cannot be int8: export with io='float32', or end the "
                "graph before it."
            )
        if tensor.grid is None or self.options.io == "int8":
            return tensor
        return b.writer.add("DEQUANTIZE", [tensor], name, tensor.shape, kind="DequantizeOptions")

    def _copied(self, tensor: FileTensor, name: str) -> FileTensor:
        """Copies a tensor: an output tensor may be neither an input, nor a constant, nor another output."""
        target = [-1, *tensor.shape[1:]] if tensor.shape else []
        return self.build.add(
            "RESHAPE", [tensor, target], f"{name}_output", tensor.shape, kind="ReshapeOptions"
        )

    def _metadata(self, kept_names: set[str], free: bool) -> dict[str, Any]:
        """Returns the origin of the file, and what `qtrace.verify` needs to compare its integers."""
        b, integers = self.build, {}
        named: dict[str, Node] = {
            s.name: s.value for s in self.graph.sites if s.sort == "activation" and not s.decision.static
        }
        named.update((name, self.graph.nodes[name]) for name in self.graph.moved)
        for name, node in named.items():
            source = b.node_tensors.get(node)
            if source is None and node in b.integers:
                source = b.get(node)
            if source is None or source.tensor.grid is None:
                continue
            if source.tensor.name in kept_names or source.tensor.value is not None:
                b.writer.keep(source.tensor)
                integers[name] = [source.tensor.name, list(source.order)]
        return {
            "version": version("qtrace"),
            "backend": self.graph.annotation.backend,
            "recipe": self.graph.model.record.qconfig,
            "graph": self.graph.hash,
            "inputs": [list(self.orders[n]) for n in self.inputs],
            "outputs": [list(self.orders[n]) for n in self.graph.outputs],
            "integers": integers,
            "inexact": b.inexact,
            "floats": [astuple(op) for op in b.float_ops] if self.graph.sites else [],
            "free_batch": free,
        }

    # -- parameters and sites -------------------------------------------------------------------------

    def _emit(self, step: ConvertedOp | QuantizedSite) -> None:
        if isinstance(step, QuantizedSite):
            with located(site_expr(step.source, step.value)):
                self._emit_site(step)
        elif step.expr not in self.plan.members:
            with located(step.expr):
                if not forms.fold(self.build, step.expr):
                    self._emit_op(step)

    def _emit_site(self, site: QuantizedSite) -> None:
        b, out = self.build, site.value
        value = b.value(site.source)
        if site.sort == "bias":
            record_bias(b, site, value)
        elif value is not None:
            b.integers[out] = (site.integers(value).astype(integer_type(site)), Grid.of(site.qparams))
            b.lazy[out] = lambda: site.fake_quant(mge.Tensor(value)).numpy()
        elif site.sort == "weight":
            raise ExportError(
                f"site {site.name}: the weight is computed from the model's input, which TFLite cannot "
                "express: use matmul, or end the graph before it."
            )
        else:
            source, grid = b.get(site.source), Grid.of(site.qparams)
            tensor = b.quantized(source.tensor, grid, integer_type(site), f"{site.name}_int")
            b.put(out, tensor, source.order)

    # -- ops ------------------------------------------------------------------------------------------

    def _emit_op(self, op: ConvertedOp) -> None:
        expr, call = op.expr, op.call
        if call is None:
            reason = ops.unsupported(expr)
            raise ExportError(
                f"{expr.outputs[0].name}: {op_label(expr)} cannot become TFLite ({reason}): end the graph "
                "before it, or write it with ops that have one."
            )
        emit_op(self.build, self.plan.fused_op(expr, call))


def _log_floats(float_ops: list[OpInFloat]) -> None:
    """Logs how many ops compute in float, and why."""
    if not float_ops:
        _LOG.info("the TFLite file computes no op in float.")
        return
    groups: dict[tuple[str, str], list[str]] = {}
    for op in float_ops:
        groups.setdefault((op.kind, op.reason), []).append(op.name)
    causes = "; ".join(f"{len(names)} {kind} ({reason})" for (kind, reason), names in groups.items())
    _LOG.info(f"ops that compute in float in the TFLite file: {len(float_ops)}: {causes}.")


def _input_type(node: TensorNode) -> np.dtype:
    kind = np.dtype(node.dtype)
    if kind not in (np.float32, np.int32, np.int64, np.bool_):
        raise ExportError(
            f"{node.name} is {kind.name}, which is not written to TFLite: use float32 or int32."
        )
    return kind
