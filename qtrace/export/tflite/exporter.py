"""TFLite (LiteRT) with int8 kernels: images with the channels last, weights per channel, int32 biases.

Every site is a tensor of integers called ``{site}_int``; an op writes the integers of its site itself, with
the activation function that it fuses. Image tensors (N, C, H, W) are (N, H, W, C) in the file, its inputs
and outputs too; metadata called ``qtrace`` say how the axes of each tensor stand, and which tensor holds
what.

An op that the annotation keeps in float stands between DEQUANTIZE and QUANTIZE, as the graph computes it.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import numpy as np

from qtrace import ops
from qtrace.errors import ExportError
from qtrace.export.converted.allow_float import float_kinds
from qtrace.export.converted.graph import ConvertedOp, ConvertedSite
from qtrace.export.converted.located import located, site_expr
from qtrace.graph.types import Node, TensorNode, TracedModule
from qtrace.graph.walk import is_float_tensor, op_label
from qtrace.preparation.record import graph_hash

if TYPE_CHECKING:
    from qtrace.export.tflite.writer import Stored

__all__ = ["SUFFIXES", "serialize"]

SUFFIXES = (".tflite",)

_IO = ("float32", "int8")
_FUNCTIONS = ("float", "table", "native")


def serialize(
    converted: TracedModule,
    *,
    io: str = "float32",
    functions: str = "float",
    allow_float: Iterable[str] = (),
) -> bytes:
    """The converted module as a TFLite file.

    Args:
        converted: a module made by ``qtrace.convert`` for backend tflite.
        io: "float32", or "int8" for a model whose float inputs and outputs are the integers of their sites:
            int16 where a site has 16 bits.
        functions: how functions of one value (sigmoid, SiLU, hard swish ...) and products of two activations
            are written between integers. "float" computes them between DEQUANTIZE and QUANTIZE: LiteRT makes
            a look-up of a function. "table" is a GATHER, for devices without floats: exact, and slow on a
            CPU. "native" is TFLite's integer kernel where it has one: up to one step off in a tenth of the
            values. Products have no table: they are integer kernels with both.
        allow_float: op kinds that may compute in float although the graph computes them on integers.

    Raises:
        ExportError: when a node has no TFLite form or a site rounds in another way, naming it, or LiteRT is
            not installed.
    """
    if importlib.util.find_spec("ai_edge_litert") is None:
        raise ExportError("TFLite export needs the package ai-edge-litert: run pip install 'qtrace[tflite]'.")
    from qtrace.export.tflite.build import Options

    for name, given, known in (("io", io, _IO), ("functions", functions, _FUNCTIONS)):
        if given not in known:
            raise ExportError(
                f"{name}={given!r} is no choice of the TFLite export: choose {' or '.join(known)}."
            )
    return _Exporter(converted, Options(io, functions, float_kinds(allow_float))).run()


class _Exporter:
    def __init__(self, converted: TracedModule, options: Any) -> None:
        from qtrace.export.tflite import ops as tflite_ops
        from qtrace.export.tflite.build import Build
        from qtrace.export.tflite.plan import Plan

        self.options, self.forms = options, tflite_ops
        self.plan = Plan(converted)
        self.graph = self.plan.graph
        self.inputs = list(self.graph.inputs)
        sizes = {int(n.shape[0]) if n.shape else 0 for n in self.inputs}
        self.batch = sizes.pop() if len(sizes) == 1 else 0
        self.build = Build(self.plan, options, self.batch)
        self.build.values.update(self.graph.values)
        self.ends: dict[Node, tuple[int, ...]] = {}

    def run(self) -> bytes:
        """The whole file."""
        self.plan.check()
        inputs = self._inputs()
        for step in self.graph.steps:
            if any(node in self.plan.needed for node in step.expr.outputs):
                self._emit(step)
        outputs = self._outputs({t.index for _, t in inputs})
        b = self.build
        kept = b.writer.prune([t for _, t in outputs])
        free = self.batch if self.batch and not b.fixed else None
        metadata = {"qtrace": self._metadata(kept, free is not None)}
        return b.writer.finish(inputs, outputs, metadata, f"qtrace {version('qtrace')}", free)

    # -- inputs and outputs ---------------------------------------------------------------------------

    def _inputs(self) -> list[tuple[str, Stored]]:
        from qtrace.export.tflite.layout import CHANNELS_LAST, file_shape, natural

        found = []
        for node, name in self.graph.inputs.items():
            rank = len(node.shape)
            image = rank == 4 and self.plan.reaches(node, self.forms.SPATIAL, self.forms.AGNOSTIC)
            order = CHANNELS_LAST if image else natural(rank)
            shape = file_shape(node.shape, order)
            if self.options.io == "int8" and is_float_tensor(node):
                stored = self._integer_input(node, shape)
            else:
                stored = self.build.writer.tensor(name, shape, self._kind(node))
            self.build.put(node, stored, order)
            self.ends[node] = order
            found.append((name, stored))
        return found

    def _integer_input(self, node: TensorNode, shape: tuple[int, ...]) -> Stored:
        from qtrace.export.tflite.build import integer_type
        from qtrace.export.tflite.writer import Grid

        site = self.plan.site_of(node)
        if site is None:
            raise ExportError(
                f"input {node.name} is read in float or rounded in two ways, so it cannot be int8: "
                "export with io='float32', or give all its readers one scheme."
            )
        kind, grid = integer_type(site), Grid.of(site.qparams)
        return self.build.writer.tensor(f"{site.name}_int", shape, kind, grid)

    @staticmethod
    def _kind(node: TensorNode) -> np.dtype:
        kind = np.dtype(node.dtype)
        if kind not in (np.float32, np.int32, np.int64, np.bool_):
            raise ExportError(
                f"{node.name} is {kind.name}, which is not written to TFLite: use float32 or int32."
            )
        return kind

    def _outputs(self, taken: set[Node]) -> list[tuple[str, Stored]]:
        found: list[tuple[str, Stored]] = []
        names: dict[str, int] = {}
        for node in self.graph.outputs:
            name = self.graph.value_name(node)
            names[name] = names.get(name, 0) + 1
            stored = self._output(node, name)
            if stored.index in taken or stored.value is not None:
                stored = self._copied(stored, name)
            taken.add(stored.index)
            found.append((name if names[name] == 1 else f"{name}_{names[name]}", stored))
        return found

    def _output(self, node: TensorNode, name: str) -> Stored:
        from qtrace.export.tflite.layout import CHANNELS_LAST, natural

        b = self.build
        order = b.moved_from(node)[1].nearest()
        order = CHANNELS_LAST if order == CHANNELS_LAST else natural(len(order))
        stored = b.ordered(node, order)
        self.ends[node] = order
        if stored.grid is None:
            if self.options.io == "int8" and stored.dtype == np.float32:
                raise ExportError(
                    f"output {name} is float, so it cannot be int8: export with io='float32', or end the "
                    "graph before it."
                )
            return stored
        if self.options.io == "int8":
            return stored
        made = b.writer.tensor(name, stored.shape)
        b.writer.op("DEQUANTIZE", [stored], [made], "DequantizeOptions")
        return made

    def _copied(self, stored: Stored, name: str) -> Stored:
        """Another tensor of the same values: a tensor is given once, and an input is not given at all."""
        b = self.build
        made = b.like(stored, f"{name}_output", stored.shape)
        target = b.writer.ints([-1, *stored.shape[1:]] if stored.shape else [])
        b.writer.op("RESHAPE", [stored, target], [made], "ReshapeOptions")
        return made

    def _metadata(self, kept: set[str], free: bool) -> dict[str, Any]:
        """Where the file comes from, and what a reader needs to compare its integers with the graph's."""
        b, integers, nodes = self.build, {}, self.graph.nodes
        named: dict[str, Node] = {
            s.name: s.value for s in self.graph.sites if s.sort == "activation" and not s.decision.static
        }
        named.update((name, nodes[name]) for name in self.graph.moved if name in nodes)
        for name, node in named.items():
            held = b.held.get(node)
            if held is None and node in b.integers:
                held = b.get(node)
            if held is None or held.stored.grid is None:
                continue
            if held.stored.name in kept or held.stored.value is not None:
                b.writer.keep(held.stored)
                integers[name] = [held.stored.name, list(held.order)]
        ends = (self.inputs, self.graph.outputs)
        orders = [[list(self.ends[n]) for n in nodes] for nodes in ends]
        return {
            "version": version("qtrace"),
            "backend": self.graph.annotation.backend,
            "recipe": self.graph.record.qconfig,
            "graph": graph_hash(self.graph.module),
            "inputs": orders[0],
            "outputs": orders[1],
            "integers": integers,
            "free_batch": free,
        }

    # -- parameters and sites -------------------------------------------------------------------------

    def _emit(self, step: ConvertedOp | ConvertedSite) -> None:
        if isinstance(step, ConvertedSite):
            with located(site_expr(step.source, step.value)):
                self._emit_site(step)
        elif step.expr not in self.plan.members:
            with located(step.expr):
                if not self.forms.fold(self.build, step.expr):
                    self._emit_op(step)

    def _emit_site(self, site: ConvertedSite) -> None:
        from qtrace.export.tflite.build import integer_type
        from qtrace.export.tflite.writer import Grid

        b, out = self.build, site.value
        value = b.value(site.source)
        if site.sort == "bias":
            self._emit_bias(site, value)
        elif value is not None:
            b.integers[out] = (site.integers(value).astype(integer_type(site)), Grid.of(site.qparams))
            b.lazy[out] = lambda: self._rounded(site.fake_quant, value)
        elif site.sort == "weight":
            raise ExportError(
                f"site {site.name}: the weight is computed from the model's input, which TFLite has no form "
                "for: use matmul, or end the graph before it."
            )
        else:
            held, grid = b.get(site.source), Grid.of(site.qparams)
            stored = b.quantized(held.stored, grid, integer_type(site), f"{site.name}_int")
            b.put(out, stored, held.order)

    @staticmethod
    def _rounded(module: Any, value: np.ndarray) -> np.ndarray:
        import megengine as mge

        return module(mge.Tensor(value)).numpy()

    def _emit_bias(self, site: ConvertedSite, value: np.ndarray | None) -> None:
        from qtrace.export.tflite.writer import Grid

        if value is None:
            raise ExportError(
                f"site {site.name}: its bias is computed, which int32 storage cannot express: "
                "set quantize: false for its layer."
            )
        self.build.integers[site.value] = (site.integers(value), Grid.symmetric(site.bias_scale))
        self.build.lazy[site.value] = lambda: site.rounded_bias(value)

    # -- ops ------------------------------------------------------------------------------------------

    def _emit_op(self, op: ConvertedOp) -> None:
        from qtrace.export.tflite.choice import emit_job

        expr, call = op.expr, op.call
        if call is None:
            reason = ops.unsupported(expr)
            raise ExportError(
                f"{expr.outputs[0].name}: {op_label(expr)} has no TFLite form ({reason}): end the graph "
                "before it, or write it with ops that have one."
            )
        emit_job(self.build, self.plan.job(expr, call))
