"""ONNX with QuantizeLinear and DequantizeLinear nodes (QDQ): opset 13, or higher where an op needs it.

Weights are stored as integers per channel, biases as int32 at the scale of the accumulator. Every tensor
of integers in the graph is one in the file, called ``{site}_int``.
Inputs have the names of the traced arguments, outputs the names of the nodes that compute them. A network
that was imported has the names, versions and document strings of its file.

Whether a file holds for other sizes of open axes is checked: it is written for these, and compared.
"""

from __future__ import annotations

import importlib.util
import json
import logging
from collections import ChainMap
from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx

from qtrace import ops
from qtrace.config import backends
from qtrace.errors import ExportError, install
from qtrace.export.converted import ConvertedGraph, ConvertedOp, PlainGraph, located, site_expr
from qtrace.export.onnx.norms import softmax_overflows
from qtrace.export.onnx.sites import CONVS, TRANSPOSED, SiteWriter
from qtrace.export.onnx.writer import OnnxWriter
from qtrace.export.open_axes import SharedAxes, Types, find_declared_axes, resized
from qtrace.graph.inference import TensorType
from qtrace.graph.interface import Interface, read_interface
from qtrace.graph.interpreter import static_nodes
from qtrace.graph.origin import FileOrigin, read_origin
from qtrace.graph.types import Expr, GetAttr, Node, TensorNode
from qtrace.graph.walk import is_float_tensor, op_label
from qtrace.onnxfile.model import read_names
from qtrace.ops import OpCall
from qtrace.preparation.float16 import choose_float16
from qtrace.preparation.model import QuantizedSite
from qtrace.scheme import QParams

if TYPE_CHECKING:
    from qtrace.export.detections import Suppression
    from qtrace.export.onnx.origin import OwnNames

# Kinds whose ONNX form depends on no batch: most of a network, with nearly all of its numbers.
_WITHOUT_SIZES = frozenset((*CONVS, *TRANSPOSED, "linear", "matmul", "batch_norm", "relu", "relu6", "clip"))
_WITHOUT_SIZES |= {"add", "sub", "mul", "div"}

_LOG = logging.getLogger("qtrace")

_ARITHMETIC = frozenset(("add", "sub", "mul", "div"))
_CLAMPS = ("relu", "relu6", "clip")  # the kinds that are part of the rounding after them


def _size_problem(first: OnnxExporter, other: OnnxExporter, types: Types) -> str:
    """Says which node of a file would be another one at other sizes, by the ops that may hold a size.

    Args:
        first: an exporter of the graph that has written nothing.
        other: another one.
        types: the types of all tensors at other sizes.

    Returns:
        The end of a sentence; "" if the file holds for these sizes.
    """
    with resized(types):
        if problem := _other_numbers(first):
            return problem
    grown = {node for node, kind in types.items() if isinstance(node, TensorNode) and _differs(node, kind)}
    steps = [step for step in first.graph.steps if isinstance(step, ConvertedOp) and _may_hold(step, grown)]
    if not steps:
        return ""
    for pieces in (first, other):
        # Each op is written by itself, as if all others were there.
        pieces.prepare_writer()
        written = (node for step in pieces.graph.steps for node in step.expr.outputs)
        pieces.writer.names.update((node, node.name) for node in (*pieces.graph.inputs, *written))
    for step in steps:
        first.emit(step)
    other.writer.known = first.writer.initializers
    with resized(types):
        try:
            for step in steps:
                other.emit(step)
        except ExportError as error:
            return str(error).rstrip(".")
    return _describe(first_difference(first.writer, other.writer))


def _other_numbers(writer: OnnxExporter) -> str:
    """Returns which op would be read with other numbers at the present sizes; "" if none."""
    for step in writer.graph.steps:
        if isinstance(step, ConvertedOp) and step.call is not None and step.call.fixed:
            present = ops.read(step.expr)
            if present is None or present.fixed != step.call.fixed:
                return _describe(f"{step.call.kind} {step.call.out.name!r}")
    return ""


def _differs(node: TensorNode, kind: TensorType | None) -> bool:
    return kind is None or tuple(kind.shape) != tuple(node.shape or ())


def _may_hold(step: ConvertedOp, grown: set[Node]) -> bool:
    """Whether an op may be written with a size of tensors of which some have another one."""
    if step.call is None or step.call.kind in _WITHOUT_SIZES:
        return False
    return not grown.isdisjoint((*step.expr.inputs, *step.expr.outputs))


def _describe(node: str) -> str:
    return f"{node} is written for this size alone" if node else ""


def first_difference(first: OnnxWriter, second: OnnxWriter) -> str:
    """Returns the first node of ``first`` that ``second``, of the same graph at another size, has otherwise.

    Returns:
        Its op and its name; "" if both files are equal.
    """
    for one, other in zip(first.nodes, second.nodes, strict=False):
        if one != other or not _reads_same(first, second, one):
            return f"{one.op_type} {one.output[0]!r}"
    if len(first.nodes) != len(second.nodes):
        return f"{_last(first.nodes)}"
    return ""


def _reads_same(first: OnnxWriter, second: OnnxWriter, node: onnx.NodeProto) -> bool:
    """Returns whether the stored tensors that a node reads are the same in two writers."""
    pairs = [(first.initializers.get(n), second.initializers.get(n)) for n in read_names(node)]
    return all(a is b or (a and b and a.raw_data == b.raw_data) for a, b in pairs)


def _last(nodes: Sequence[onnx.NodeProto]) -> str:
    return f"{nodes[-1].op_type} {nodes[-1].output[0]!r}" if nodes else "the graph"


@dataclass(frozen=True)
class OnnxOptions:
    """Options of the ONNX export.

    Attributes:
        packed: whether weights of 4 bits and less are stored two in a byte.
        floats: kinds of layers whose weights and biases are stored as floats.
        opset: the opset of the file; None for the lowest that it needs.
        end_names: names for the inputs and for the outputs; None for their names in the graph.
        preprocess: whether the file normalizes pixels itself.
        suppression: how the file chooses boxes; None for only the outputs of the graph.
        names_parameters: whether parameters of an imported graph have their names of that file.
        contrib: whether weights may have forms that only onnxruntime has.
        axes: the open axes that the file has in common with others of its network. These are measured and
            thrown away: the file does not say what it was made of. None to find its own.
        float16: whether ops that stay float are in float16 where the ranges of the calibration allow it.
    """

    packed: bool = False
    floats: frozenset[str] = frozenset()
    opset: int | None = None
    end_names: tuple[Iterable[str] | None, Iterable[str] | None] = (None, None)
    preprocess: bool = False
    suppression: Suppression | None = None
    names_parameters: bool = True
    contrib: bool = True
    axes: SharedAxes | None = None
    float16: bool = False


def write_model(converted: ConvertedGraph, options: OnnxOptions) -> tuple[OnnxExporter, Any]:
    """Writes a graph, once more if nodes that are copied are to be converted to the opset that it needs.

    Which opset a graph needs, as for integers of 16 bits, is known only when it is written.

    Returns:
        What wrote the model, and the model.

    Raises:
        ExportError: when ONNX cannot express a node, naming it, or onnx is not installed.
    """
    exporter = OnnxExporter(converted, options)
    from qtrace.export.onnx.opset import CopiedFormError

    try:
        return exporter, exporter.run()
    except CopiedFormError as error:
        if options.opset is not None:
            raise
        again = OnnxExporter(converted, replace(options, opset=error.opset))
    model = again.run()
    again.writer.version_change = exporter.writer.version_change
    return again, model


class OnnxExporter:
    """Writes a graph into one ONNX model.

    Args:
        converted: the graph of a converted module, or of a plain one.
        options: what the file is like.

    Attributes:
        paths: stored tensor of the model -> path of its parameter, after `run`.

    Raises:
        ExportError: when onnx is not installed.
    """

    def __init__(self, converted: ConvertedGraph, options: OnnxOptions | None = None) -> None:
        if importlib.util.find_spec("onnx") is None:
            raise ExportError(f"ONNX export needs the package onnx: run {install('onnx')}.")
        from qtrace.export.onnx.moves import MOVES
        from qtrace.export.onnx.ops import EMITTERS

        self.graph = converted
        self.options = OnnxOptions() if options is None else options
        self.paths: dict[str, str] = {}
        self.emitters = {**EMITTERS, **MOVES}
        static = static_nodes(converted.module)
        self._sizes = {n for n in static if n.dtype is not None and np.dtype(n.dtype).kind in "iu"}
        self._origin = self._read_origin()
        self._start()
        choices = choose_float16(converted.model) if self.options.float16 else ()
        self._float16 = {choice.op for choice in choices if not choice.reason}

    def _start(self) -> None:
        """Begins with an empty file."""
        from qtrace.export.onnx.opset import HIGHEST, SourceVersions
        from qtrace.export.onnx.writer import ModuleNames, OnnxWriter, OutputNames

        graph, options, origin = self.graph, self.options, self._origin
        plain = isinstance(graph, PlainGraph)
        naming = ModuleNames(graph) if isinstance(graph, PlainGraph) else OutputNames()
        source = SourceVersions() if origin is None else SourceVersions(origin.opset, origin.ir_version)
        # After a DequantizeLinear, onnxruntime joins the pieces of a LayerNorm in part only; it lacks a
        # kernel for the GroupNormalization of opset 21.
        known = options.opset or source.writable
        whole_norms = known or HIGHEST if plain else min(known, HIGHEST - 1)
        self.writer = OnnxWriter(options.packed, naming, options.opset, whole_norms, source)
        self.sites = SiteWriter(graph, self.writer, options.floats, options.contrib)

    def run(self) -> Any:
        """Returns the model."""
        from qtrace.export.onnx.ends import declare
        from qtrace.export.onnx.origin import PRODUCER, OwnNames, describe

        self._check_rounding()
        self.emit_all()
        inputs = self.graph.inputs
        shared = self.options.axes
        declared = (find_declared_axes if shared is None else shared.find)(self.graph, self._problem_at)
        origin = self._origin
        own_names = None if origin is None else OwnNames.find(self.writer, origin, self._origin_paths())
        infos = [declare(n, name, declared.inputs.get(n, {})) for n, name in inputs.items()]
        used_names = set(inputs.values())
        interface = self._interface()
        known = (None,) * len(self.graph.outputs) if interface is None else interface.outputs
        outputs = [
            declare(
                n,
                self._name_output(n, used_names),
                declared.outputs.get(n, {}),
                None if info is None else info.sizes,
            )
            for n, info in zip(self.graph.outputs, known, strict=True)
        ]
        own, name = version("qtrace"), self.graph.module.graph.name or "qtrace"
        imported = {} if interface is None else dict(interface.metadata)
        ends = self._finish_ends(infos, outputs, own_names)
        metadata = {**imported, **self._metadata(own), **ends}
        if origin is not None and origin.producer:
            metadata[PRODUCER] = origin.producer
        self.paths = self._written_paths()  # the tensors move into the model
        model = self.writer.model(name, infos, outputs, metadata, own)
        if origin is not None:
            describe(model, origin)
        return model

    def emit_all(self) -> None:
        """Writes all ops and roundings."""
        self.writer.names.update(self.graph.inputs)
        self.writer.reserve(self.graph.inputs.values())
        self.prepare_writer()
        for step in self.graph.steps:
            self.emit(step)

    def prepare_writer(self) -> None:
        """Tells the writer what the forms of ops depend on."""
        own = dict(self.writer.values)  # only this is written
        self.writer.values = ChainMap(own, self.graph.values)  # type: ignore[arg-type]
        self.writer.rounded = self._rounded_results()
        on_integers = {note.kind for note in self.graph.annotation.notes if note.state == "int"}
        self.writer.number_kinds |= _ARITHMETIC & on_integers
        if not isinstance(self.graph, PlainGraph):
            self.writer.in_pieces = backends.get(self.graph.annotation.backend).without_kernels

    def _problem_at(self, types: Types) -> str:
        """Returns which node would be written otherwise for other sizes; "" if there is none."""
        return _size_problem(self.twin(), self.twin(), types)

    def twin(self) -> OnnxExporter:
        """Returns an exporter of the same graph that has written nothing."""
        twin = copy(self)
        twin._start()
        return twin

    def _finish_ends(
        self, infos: list[Any], outputs: list[Any], own_names: OwnNames | None
    ) -> dict[str, str]:
        """Gives tensors the names and types of the imported file; returns metadata on inputs and outputs."""
        from qtrace.export.onnx.ends import PREPROCESS, add_detections, add_preprocessing, choose_names
        from qtrace.export.onnx.origin import restore_interface

        ends = [list(zip(self.graph.inputs, (i.name for i in infos), strict=True))]
        ends.append(list(zip(self.graph.outputs, (o.name for o in outputs), strict=True)))
        interface = choose_names(self._interface(), ends[0], ends[1], self.options.end_names)
        if interface is not None:
            restore_interface(self.writer, interface, infos, outputs)
        if own_names is not None:
            own_names.restore(self.writer, [info.name for info in (*infos, *outputs)])
        if self.options.suppression is not None:
            shapes = [tuple(node.shape) for node in self.graph.outputs]
            add_detections(self.writer, outputs, shapes, self.options.suppression)
        if not self.options.preprocess:
            return {}
        shape = tuple(next(iter(self.graph.inputs)).shape)
        return {PREPROCESS: add_preprocessing(self.writer, infos, self.graph.model.config.preprocess, shape)}

    def _rounded_results(self) -> frozenset[Node]:
        """Returns the results of ops that are rounded at once, or after a clamp that runtimes fuse."""
        sites = (s for s in self.graph.sites if s.sort == "activation" and not s.decision.static)
        rounded = {site.source for site in sites}
        for step in reversed(self.graph.steps):
            call = step.call if isinstance(step, ConvertedOp) else None
            if call is not None and call.kind in _CLAMPS and call.out in rounded:
                source = call.inputs[0]
                if len(source.users) == 1 and source not in self.graph.outputs:
                    rounded.add(source)
        return frozenset(rounded)

    def tensor_types(self) -> dict[str, Any]:
        """Returns the ONNX type of each tensor that holds a node of the graph."""
        from onnx import helper

        named = (
            (name, node.dtype) for node, name in self.writer.names.items() if isinstance(node, TensorNode)
        )
        return {name: helper.np_dtype_to_tensor_dtype(np.dtype(dtype)) for name, dtype in named if dtype}

    def _interface(self) -> Interface | None:
        """Returns the interface that the file gets; None for the names and types of the graph."""
        return read_interface(self.graph.module)

    def _read_origin(self) -> FileOrigin | None:
        """Returns the file that the graph was imported from; None for the names of the graph."""
        return read_origin(self.graph.module) if self._interface() is not None else None

    def _origin_paths(self) -> dict[str, str]:
        """Returns initializer -> path of its parameter, for those that get their names of the file back."""
        return self._written_paths() if self.options.names_parameters else {}

    def _written_paths(self) -> dict[str, str]:
        """Returns initializer -> path of its parameter."""
        if isinstance(self.graph, PlainGraph):
            return {name: name for name in self.writer.initializers} | self.writer.paths
        return self._parameter_paths()

    def _metadata(self, own: str) -> dict[str, str]:
        """Returns the origin of the file, for the model's metadata properties."""
        if self.options.axes is not None:
            return {}
        if isinstance(self.graph, PlainGraph):
            return {
                "qtrace.version": own,
                "qtrace.stage": "float",
                "qtrace.graph": self.graph.hash,
            }
        return {
            "qtrace.version": own,
            "qtrace.backend": self.graph.annotation.backend,
            "qtrace.recipe": json.dumps(self.graph.model.record.qconfig, sort_keys=True),
            "qtrace.graph": self.graph.hash,
            "qtrace.parameters": json.dumps(self._parameter_paths(), sort_keys=True),
        }

    def _parameter_paths(self) -> dict[str, str]:
        """Returns initializer -> path of its parameter, by which an importer names the modules."""
        known = self.writer.names
        stored = [node for node in self.graph.values if isinstance(node.expr, GetAttr)]
        nodes = {node: known.get(node, node.name) for node in stored}
        nodes.update({site.node: f"{site.name}_int" for site in self.graph.sites if site.node in nodes})
        written = self.writer.initializers
        paths = {name: node.expr.name for node, name in nodes.items()}
        return {name: path for name, path in {**self.writer.paths, **paths}.items() if name in written}

    def _check_rounding(self) -> None:
        """Refuses sites that ONNX rounds in another way than the graph; parameters are stored rounded."""
        annotation = self.graph.annotation
        for site in annotation.sites:
            if site.plan is not None and not site.static and site.plan.scheme.rounding != "half_even":
                ties = site.plan.scheme.rounding.replace("_", " ").replace("away", "away from zero")
                raise ExportError(
                    f"site {site.name} rounds {ties}, as backend {annotation.backend} "
                    "does, but ONNX rounds half to even: prepare the module with backend onnxruntime."
                )

    def _name_output(self, node: TensorNode, used_names: set[str]) -> str:
        """Gives the tensor of a graph output the name of its node if that is free, and returns its name."""
        name = self.writer.output(self.writer.name(node), self.graph.model.unrounded_name(node), used_names)
        used_names.add(name)
        return name

    def emit(self, step: ConvertedOp | QuantizedSite) -> None:
        """Writes an op or a rounding."""
        if isinstance(step, QuantizedSite):
            with located(site_expr(step.source, step.value)):
                self.sites.write(step)
        elif not self._emit_rescaled(step):
            self._emit_op(step)

    def _emit_op(self, op: ConvertedOp) -> None:
        self.writer.naming.enter(op.expr)
        first = len(self.writer.nodes)
        with located(op.expr):
            self._emit_call(op.expr, op.call)
        if op.expr.outputs and op.expr.outputs[0].name in self._float16:
            self.writer.mark_float16(first, op.expr.outputs[0].name)
        if self._sizes.issuperset(op.expr.outputs):
            self.writer.sizes.update(name for node in self.writer.nodes[first:] for name in node.output)
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
            if call.kind in self.options.floats or softmax_overflows(self.graph, call):
                self._keep_float(call)
            self.emitters[call.kind](self.writer, call)
            self.writer.names.update((n, names[n]) for n in call.inputs if n in names)
            return
        raise ExportError(
            f"{expr.outputs[0].name}: {op_label(expr)} cannot become ONNX ({ops.unsupported(expr)}): end the "
            "graph before it, or write it with ops that have one."
        )

    def _keep_float(self, call: OpCall) -> None:
        """Puts a node that changes no value between each input and its DequantizeLinear.

        After that node no runtime fuses the op into an integer kernel. Float weights would not be
        enough for that: onnxruntime quantizes them itself, in another way than the graph.
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
