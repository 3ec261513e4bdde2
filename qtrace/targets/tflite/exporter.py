"""Walks over a converted graph and writes its inputs, ops, sites, outputs and metadata as a TFLite file.

An op becomes a move, an integer operator, a look-up table, or floats between roundings. After the outputs of
a detector, operators choose its boxes by NON_MAX_SUPPRESSION_V5.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import astuple, replace
from importlib.metadata import version
from typing import Any

import megengine as mge
import numpy as np

from qtrace import ops
from qtrace.errors import ExportError
from qtrace.export.converted import ConvertedGraph, ConvertedOp, located, site_expr
from qtrace.export.detections import NMS, Heads, Suppression, find_heads
from qtrace.export.open_axes import find_open_batch, find_sample_axes
from qtrace.graph.opaque import cure_for_opaque
from qtrace.graph.types import Node, TensorNode
from qtrace.graph.walk import is_float_tensor, op_label
from qtrace.ops import OpCall, Role
from qtrace.preparation.model import QuantizedSite
from qtrace.targets.tflite import ops as forms
from qtrace.targets.tflite.build import Builder, BuildOptions, OpInFloat, Store, allowing, integer_type
from qtrace.targets.tflite.layers import record_bias
from qtrace.targets.tflite.layout import CHANNELS_LAST, FusedOp, KernelPlan, Order, file_shape, natural
from qtrace.targets.tflite.writer import FileTensor, Grid, TfliteWriter

__all__ = [
    "Exporter",
    "add_detections",
    "emit_op",
]

_LOG = logging.getLogger("qtrace")


def add_detections(
    store: Store, nodes: Sequence[TensorNode], names: Sequence[str], choice: Suppression
) -> list[tuple[str, FileTensor]]:
    """Adds the operators; the file takes batches of one image then.

    Args:
        store: the values of the graph.
        nodes: the outputs of the graph.
        names: their names in the file.
        choice: how boxes are chosen.

    Returns:
        Names and tensors of further outputs: ``detection_boxes`` (limit, 4) as corners (x1, y1, x2, y2),
        ``detection_scores`` (limit,), ``detection_classes`` (limit,), and ``detection_count``, the number of
        rows that are boxes; the rows after them have the score 0.

    Raises:
        ExportError: for an unknown output, or one of another shape, or another batch than one image.
    """
    shapes = [store.shape(node) for node in nodes]
    heads = find_heads(choice, list(zip(names, shapes, strict=True)))
    if shapes[heads.boxes][0] != 1:
        raise ExportError(
            f"nms in a TFLite file needs batches of one, and the model was traced with "
            f"{shapes[heads.boxes][0]}: trace it with one sample."
        )
    store.fixed = store.fixed or names[heads.boxes]
    floats = {}
    for place in heads.outputs:
        tensor = store.as_floats(store.ordered(nodes[place], natural(3)))
        if tensor.dtype != np.float32:
            raise ExportError(
                f"nms needs float outputs, and {names[place]} is {tensor.dtype.name}: name another."
            )
        floats[place] = tensor
    return _Operators(store.writer, heads).run(floats, choice)


class _Operators:
    """Writes the operators."""

    def __init__(self, writer: TfliteWriter, heads: Heads) -> None:
        self.writer, self.heads = writer, heads

    def run(self, floats: dict[int, FileTensor], choice: Suppression) -> list[tuple[str, FileTensor]]:
        """Writes all operators; returns the outputs."""
        heads, count = self.heads, self.heads.anchors
        boxes = self.columns(floats[heads.boxes], 0, 4, "raw")
        corners = self.corners(boxes) if choice.form == "cxcywh" else boxes
        scores = self.columns(floats[heads.scores], heads.first, heads.classes, "of_classes")
        if heads.objectness is not None:
            factor = self.columns(floats[heads.objectness], heads.factor, 1, "objectness")
            scores = self.add("MUL", [scores, factor], "scores", scores.shape)
        best = self.add("REDUCE_MAX", [scores, [1]], "best", [count])
        axis = self.writer.constant(f"{NMS}_axis", np.array(1, np.int32))
        label = self.add("ARG_MAX", [scores, axis], "label", [count], np.int32, outputType=2)
        limits = [
            np.array(choice.limit, np.int32),
            *(np.array(n, np.float32) for n in (choice.iou, choice.score, 0)),
        ]
        settings = [
            self.writer.constant(f"{NMS}_{name}", value)
            for name, value in zip(("limit", "iou", "score", "sigma"), limits, strict=True)
        ]
        apart = self.apart(corners, label) if heads.classes > 1 else corners
        chosen = self.writer.tensor(f"{NMS}_chosen", [choice.limit], np.int32)
        written = self.writer.tensor("detection_scores", [choice.limit])
        number = self.writer.tensor("detection_count", [], np.int32)
        self.writer.op(
            "NON_MAX_SUPPRESSION_V5",
            [apart, best, *settings],
            [chosen, written, number],
        )
        gathered, labels = (
            self.writer.add("GATHER", [source, chosen], name, shape, source.dtype, axis=0)
            for source, name, shape in (
                (corners, "detection_boxes", [choice.limit, 4]),
                (label, "detection_classes", [choice.limit]),
            )
        )
        return [(tensor.name, tensor) for tensor in (gathered, written, labels, number)]

    def add(
        self, code: str, inputs: Any, name: str, shape: Any, dtype: Any = np.float32, **options: Any
    ) -> FileTensor:
        """Adds an operator; returns its result."""
        return self.writer.add(code, inputs, f"{NMS}_{name}", shape, dtype, **options)

    def columns(self, source: FileTensor, start: int, count: int, name: str) -> FileTensor:
        """Takes columns of the last axis, without the axis of the batch."""
        rows = source.shape[1]
        if count < source.shape[2]:
            bounds = [[0, 0, start], [1, rows, count]]
            source = self.add("SLICE", [source, *bounds], name, [1, rows, count])
        shape = [rows, count]
        return self.add("RESHAPE", [source, shape], f"{name}_rows", shape)

    def corners(self, boxes: FileTensor) -> FileTensor:
        """Computes the corners of boxes that are stored as center and size."""
        rows = boxes.shape[0]
        center, size = (
            self.add("SLICE", [boxes, [0, start], [rows, 2]], name, [rows, 2])
            for start, name in ((0, "center"), (2, "size"))
        )
        half = self.add("MUL", [size, self.number(0.5)], "half", [rows, 2])
        ends = [
            self.add(code, [center, half], name, [rows, 2])
            for code, name in (("SUB", "low"), ("ADD", "high"))
        ]
        return self.add("CONCATENATION", ends, "corners", [rows, 4], axis=1)

    def apart(self, corners: FileTensor, label: FileTensor) -> FileTensor:
        """Moves the boxes of each class away from the other boxes."""
        rows = corners.shape[0]
        ends = [self.add(f"REDUCE_{n}", [corners, [0, 1]], n.lower(), []) for n in ("MAX", "MIN")]
        width = self.add("SUB", ends, "width", [])
        span = self.add("ADD", [width, self.number(1.0)], "span", [])
        number = self.add("CAST", [label], "number", [rows])
        shift = self.add("MUL", [number, span], "shift", [rows])
        shift = self.add("RESHAPE", [shift, [rows, 1]], "shift_of_box", [rows, 1])
        return self.add("ADD", [corners, shift], "apart", [rows, 4])

    def number(self, value: float) -> FileTensor:
        """A constant."""
        return self.writer.constant(f"{NMS}_{value:g}", np.array(value, np.float32))


def emit_op(b: Builder, op: FusedOp) -> None:
    """Writes one op, in the form that computes what the graph does.

    Args:
        b: the file.
        op: the op, with what its operator fuses.

    Raises:
        ExportError: when TFLite cannot express the op, or only as something else.
    """
    call = op.call
    if op.state == "carried" and call.kind in ("mul", "div"):
        forms.rescaled(b, op, Grid.of(b.plan.graph.carried[op.out.name]))
        return
    # Of the modes of interpolate, only nearest moves values. All other moves work on every type.
    if call.kind in forms.MOVES and (call.kind != "interpolate" or call.role is Role.CARRY):
        forms.MOVES[call.kind](b, op)
        return
    unable = ""
    if _between_integers(b, op):
        if b.options.functions != "float" and call.kind in forms.FUNCTIONS and forms.tabular(op):
            _function(b, op)
            return
        if op.on_integers and call.kind in forms.INTEGER and not _in_float(b, call.kind):
            unable = forms.why_in_float(b, op)
            if not unable:
                _check_widths(b, op)
                forms.INTEGER[call.kind](b, op)
                return
    _float(b, op, unable)


def _in_float(b: Builder, kind: str) -> bool:
    """Whether an op with an integer kernel computes in float: the caller allows it, or only that is exact."""
    return kind in b.options.allow_float or (kind in forms.INEXACT and b.options.functions == "float")


def _between_integers(b: Builder, op: FusedOp) -> bool:
    """Whether the op reads integers only, and its result is rounded at one site."""
    call = op.call
    weights = [n for n in (call.weight, call.bias) if n is not None]
    known = all(b.on_integers(n) for n in call.inputs) and all(n in b.integers for n in weights)
    return known and bool(call.inputs) and op.site is not None


def _function(b: Builder, op: FusedOp) -> None:
    """Writes a function of one value without floats."""
    if b.options.functions == "native" and op.kind in forms.NATIVE:
        _check_widths(b, op)
        forms.NATIVE[op.kind](b, op)
    else:
        forms.table(b, op)


def _check_widths(b: Builder, op: FusedOp) -> None:
    """Refuses an op whose inputs and result are integers of different widths."""
    kind = b.site_grid(op)[1]
    for node in op.call.inputs:
        input_kind = b.integer_type(node)
        if input_kind != kind:
            raise ExportError(
                f"{op.out.name} reads {input_kind.name} from {b.plan.graph.site_name(node)} and gives "
                f"{kind.name}, but TFLite's kernels have one width for both: give both one scheme, or "
                f"{allowing(op.kind)}"
            )


def _float(b: Builder, op: FusedOp, unable: str) -> None:
    """Writes an op in float.

    Args:
        b: the file.
        op: the op.
        unable: why its integer kernel cannot compute it, "" if another reason keeps it in float.

    Raises:
        ExportError: when the graph computes the op on integers, and nothing but a missing kernel or an input
            in float is in the way.
    """
    call = op.call
    if call.kind not in forms.FLOAT:
        cure = cure_for_opaque(call.out.expr)
        cure = cure or f"end the graph before {call.out.name}, or write it with others"
        raise ExportError(f"it cannot become TFLite yet: {cure}")
    allowed = _in_float(b, call.kind)
    # A sum whose result stays float in the graph is computed in float. A layer is refused,
    # because its weights would be floats too.
    bare = op.site is None and call.role is not Role.COMPUTE
    refused = op.on_integers and not allowed and not bare and call.kind not in forms.FUNCTIONS
    if refused and not unable:
        raise ExportError(_why_not(op))
    b.float_ops.append(OpInFloat(call.out.name, call.kind, unable or _why_float(b, op)))
    if not op.on_integers:
        forms.FLOAT[call.kind](b, replace(op, site=None))
        return
    forms.FLOAT[call.kind](b, _alone(op, call))
    if op.clamp is not None:
        forms.FLOAT[op.clamp.kind](b, _alone(op, op.clamp))


def _alone(op: FusedOp, call: OpCall) -> FusedOp:
    """Returns ``call`` as an op of its own, with nothing fused."""
    return FusedOp(call, None, call.out, None, op.state)


def _why_float(b: Builder, op: FusedOp) -> str:
    """Returns why an op computes in float, although its kind may have an integer kernel."""
    kind, note = op.kind, b.plan.notes.get(op.call.out.name)
    if kind in b.options.allow_float:
        return "allow_float names it"
    if note is not None and note.reason and not op.on_integers:
        return note.reason
    if op.site is None:
        return "its result is not rounded"
    if kind in forms.FUNCTIONS or kind in forms.INEXACT:
        return f"functions={b.options.functions!r} computes it between DEQUANTIZE and QUANTIZE"
    return "it stays in float in the graph"


def _why_not(op: FusedOp) -> str:
    kind = op.call.kind
    if op.site is None:
        return (
            f"the result of {op.out.name} is read in float or rounded in two ways, but TFLite's {kind} "
            "gives integers of one scale: let it be rounded and give its readers one scheme, or "
            f"{allowing(kind)}"
        )
    if kind not in forms.INTEGER:
        return (
            f"{kind} has no integer kernel in TFLite: keep it in float by a rule that says "
            f"quantize: false, or {allowing(kind)}"
        )
    return f"not everything that {op.out.name} reads is integers: quantize its inputs, or {allowing(kind)}"


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
        written = b.writer.prune([t for _, t in outputs])
        free = self.batch if self._is_open() else None
        metadata = {"qtrace": self._metadata(written, free is not None)}
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
        return b.writer.add("DEQUANTIZE", [tensor], name, tensor.shape)

    def _copied(self, tensor: FileTensor, name: str) -> FileTensor:
        """Copies a tensor: an output tensor may be neither an input, nor a constant, nor another output."""
        target = [-1, *tensor.shape[1:]] if tensor.shape else []
        return self.build.add("RESHAPE", [tensor, target], f"{name}_output", tensor.shape)

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
