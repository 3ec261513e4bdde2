"""ONNX with QuantizeLinear and DequantizeLinear nodes (QDQ): opset 13, or higher where an op needs it.

Weights are stored as integers per channel, biases as int32 at the scale of the accumulator. Every tensor
of integers in the graph is one in the file, called ``{site}_int``.
Inputs have the names of the traced arguments, outputs those of the nodes that compute them; a network
that was imported has the names, versions and document strings of its file.
"""

from __future__ import annotations

import importlib.util
import json
import logging
from collections import ChainMap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from qtrace import ops
from qtrace.config import backends
from qtrace.errors import ExportError, install
from qtrace.export.converted.allow_float import float_kinds, only_floats_read
from qtrace.export.converted.graph import ConvertedGraph, ConvertedOp
from qtrace.export.converted.located import located, site_expr
from qtrace.export.converted.open_axes import SharedAxes, Types, find_declared_axes, resized
from qtrace.export.converted.plain_graph import PlainGraph
from qtrace.export.detections import Suppression
from qtrace.export.format import Content, Format
from qtrace.export.onnx.kernels import softmax_overflows
from qtrace.export.onnx.weight_types import kinds_in_float, stores_unsigned, write_weight_types
from qtrace.graph.dataflow import static_nodes
from qtrace.graph.interface import Interface, read_interface
from qtrace.graph.opaque import OpaqueOp
from qtrace.graph.origin import FileOrigin, read_origin
from qtrace.graph.types import Expr, GetAttr, Node, TensorNode
from qtrace.graph.walk import is_float_tensor, op_label, output_index, owner
from qtrace.onnxfile import external_data
from qtrace.ops import OpCall
from qtrace.preparation.model import QuantizedSite
from qtrace.scheme import QParams

if TYPE_CHECKING:
    from qtrace.export.onnx.origin import OwnNames

__all__ = ["FORMAT", "OnnxExporter", "OnnxOptions", "check", "contents_of", "write_model"]

_LOG = logging.getLogger("qtrace")

_ARITHMETIC = frozenset(("add", "sub", "mul", "div"))
_CLAMPS = ("relu", "relu6", "clip")  # the kinds that are part of the rounding behind them


@dataclass(frozen=True)
class OnnxOptions:
    """Options of the ONNX export.

    Attributes:
        packed: whether weights of 4 bits and less are stored two in a byte.
        floats: kinds of layers whose weights and biases are stored as floats.
        opset: the opset of the file; None for the lowest that it needs.
        end_names: names for the inputs and for the outputs; None for their names in the graph.
        preprocess: whether the file normalizes pixels itself.
        suppression: how the file chooses boxes; None for the outputs of the graph alone.
        names_parameters: whether parameters of an imported graph have their names of that file.
        contrib: whether weights may have forms that onnxruntime alone has.
        axes: the open axes that the file has in common with others of its network, which are measured and
            thrown away: it does not say what it was made of. None to find its own.
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


def files(
    converted: ConvertedGraph,
    path: Path,
    packed: bool = False,
    external: bool | None = None,
    allow_float: Iterable[str] = (),
    opset: int | None = None,
    input_names: Iterable[str] | None = None,
    output_names: Iterable[str] | None = None,
    preprocess: bool = False,
    nms: Any = None,
    weights: str = "auto",
    amx: bool | None = None,
) -> dict[Path, Content]:
    """Returns a module as an ONNX file and, if it is large, a file with its tensors.

    Args:
        converted: the graph of a converted module, or of a plain one, which is written in float.
        path: the path of the model; the file of its tensors has that name with ``.data`` behind it.
        packed: whether weights of 4 bits and less are stored two in a byte, which needs opset 21. Otherwise
            they are int8 values of a small range, for which runtimes have integer kernels.
        external: whether tensors are in a file of their own; None: if the model exceeds 2 GB, the most that
            one file holds.
        allow_float: kinds of layers, such as ``conv2d``, whose weights and biases are stored as floats (those
            that the graph rounded to), so that runtimes compute the layer in float.
        opset: the opset of the file, from 13 to 21; None for that of the file that the graph was imported
            from, or the lowest that its ops and types need. In a float file, LayerNorm is one node from
            opset 17 on, and GroupNorm from 21 on.
        input_names: names for all inputs of the file, in order; None for those of the traced arguments.
        output_names: names for all outputs of the file, in order; None for those of the nodes.
        preprocess: whether the file takes uint8 pixels (N, H, W, C) and normalizes them itself, as the recipe
            says; images are resized before.
        nms: how the file of a detector chooses boxes, as a mapping of `Suppression`; None for a file with the
            outputs of the graph alone. The boxes are further outputs.
        weights: the type of the integers of weights: ``int8``; ``uint8`` with zero point 128, the same
            numbers, for which onnxruntime has exact kernels on every processor; or ``auto``: for backends
            onnxruntime and openvino ``uint8`` for weights of more than 7 bits if products of uint8 and int8
            saturate on this processor (x86 without VNNI), and for those of `weights_behind_joined_rows`; else
            ``int8``. With ``uint8``, openvino gets the weights of transposed convolutions as floats.
        amx: whether layers on integers get as many columns as onnxruntime 1.21 to 1.24 computes right on
            processors with AMX, as `write_whole_columns` does; None: for backends onnxruntime and generic, if
            such a version is installed here on such a processor.

    Raises:
        ExportError: when a node has no ONNX form or rounds in another way than ONNX, naming it, an option has
            no such value, or onnx is not installed.
    """
    for name, value in (("packed", packed), ("external", external), ("preprocess", preprocess), ("amx", amx)):
        if not (isinstance(value, bool) or (name in ("external", "amx") and value is None)):
            raise ExportError(f"{name}={value!r} is no choice of the ONNX export: choose true or false.")
    if opset is not None and (type(opset) is not int or not 13 <= opset <= 21):
        raise ExportError(f"opset={opset!r} is no choice of the ONNX export: choose one from 13 to 21.")
    suppression = None if nms is None else Suppression.of(nms)
    ends = (input_names, output_names)
    options = OnnxOptions(packed, float_kinds(allow_float), opset, ends, preprocess, suppression)
    return files_with(options, converted, path, weights, external, amx)


def files_with(
    options: OnnxOptions,
    converted: ConvertedGraph,
    path: Path,
    weights: str = "auto",
    external: bool | None = None,
    amx: bool | None = None,
) -> dict[Path, Content]:
    """Returns what `files` does, which has the other arguments, by options that users do not all have."""
    unsigned = stores_unsigned(converted, weights)
    if unsigned:
        options = replace(options, floats=options.floats | kinds_in_float(converted))
    exporter, model = write_model(converted, options)
    from qtrace.export.onnx.float_layers import TARGETS, hold_float_layers
    from qtrace.export.onnx.pools import write_fast_poolings
    from qtrace.export.onnx.whole_columns import choose_columns

    plain = isinstance(converted, PlainGraph)
    target = "" if plain else converted.annotation.backend
    write_fast_poolings(model, in_onnxruntime=target == "onnxruntime")
    if target in TARGETS:
        hold_float_layers(model)
    if exporter.writer.version_change:
        _LOG.info(exporter.writer.version_change)
    write_weight_types(converted, model, weights, unsigned)
    choose_columns(model, target, amx)
    check(model)
    return contents_of(model, path, external)


def contents_of(model: Any, path: Path, external: bool | None = None) -> dict[Path, Content]:
    """Returns a model as the contents of its files.

    Args:
        model: the model, which must not be changed until the files are written.
        path: its path; the file of its tensors has that name with ``.data`` behind it.
        external: whether its large tensors are in a file of their own; None: if one file cannot hold them.

    Raises:
        ExportError: when the model is too large for one file, and ``external`` is False.
    """
    size, beside = external_data.tensor_bytes(model), path.with_name(f"{path.name}.data")
    too_large = external is None and size >= external_data.LIMIT
    if external is False and size >= external_data.FILE_LIMIT:
        raise ExportError(
            f"{path.name} would have {size / 1e9:.1f} GB of tensors, more than one ONNX file holds: leave "
            "out external=false."
        )
    if external or too_large:
        light, pieces = external_data.split_off(model, beside.name)
        if light is not model:
            if external is None:
                _LOG.warning(
                    f"{path.name} has {size / 1e9:.1f} GB of tensors, more than one ONNX file holds: "
                    f"they are in {beside.name}, which stays beside it. A copy of {path.name} reads the "
                    f"{beside.name} beside the copy: copy both into a folder of their own, since another "
                    f"export to {path.name} changes what a copy here computes."
                )
            return {beside: pieces, path: bytes(light.SerializeToString())}
    return {path: bytes(model.SerializeToString())}


FORMAT = Format(
    "onnx",
    files,
    suffixes=(".onnx",),
    options=(
        *("packed", "external", "allow_float", "opset", "input_names", "output_names", "preprocess", "nms"),
        *("weights", "amx"),
    ),
    float_options=("external", "opset", "input_names", "output_names", "nms"),
    has_composites=True,
)


def check(model: Any) -> None:
    """Refuses a model that is not valid ONNX.

    Raises:
        ExportError: with the first line of the checker's message.
    """
    import onnx

    skeleton, full = external_data.skeleton(model), True
    for value in skeleton.graph.output:
        if not value.type.tensor_type.HasField("shape"):  # values decide the number of axes
            value.type.tensor_type.shape.SetInParent()
            full = False
    try:
        onnx.checker.check_model(skeleton, full_check=full)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        line = str(error).strip().splitlines()[0]
        raise ExportError(
            f"the graph makes no valid ONNX model: {line}. End the graph before the op that it names."
        ) from error


def _rank_of_opaque(node: TensorNode) -> int | None:
    """Returns the number of axes of a result of an opaque node; None if the values decide it."""
    op = owner(node.expr)
    assert isinstance(op, OpaqueOp)
    tensor = op.fragment.model.graph.output[output_index(node)].type.tensor_type
    return len(tensor.shape.dim) if tensor.HasField("shape") else None


def write_model(converted: ConvertedGraph, options: OnnxOptions) -> tuple[OnnxExporter, Any]:
    """Writes a graph, once more if nodes that are copied are to be converted to the opset that it needs.

    Which opset a graph needs, as for integers of 16 bits, is known only when it is written.

    Returns:
        What wrote the model, and the model.

    Raises:
        ExportError: when a node has no ONNX form, naming it, or onnx is not installed.
    """
    exporter = OnnxExporter(converted, options)
    from qtrace.export.onnx.copied_versions import CopiedFormError

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

    Raises:
        ExportError: when onnx is not installed.
    """

    def __init__(self, converted: ConvertedGraph, options: OnnxOptions | None = None) -> None:
        if importlib.util.find_spec("onnx") is None:
            raise ExportError(f"ONNX export needs the package onnx: run {install('onnx')}.")
        from qtrace.export.onnx.moves import MOVES
        from qtrace.export.onnx.naming import ModuleNames, OutputNames
        from qtrace.export.onnx.ops import EMITTERS
        from qtrace.export.onnx.opset import HIGHEST, SourceVersions
        from qtrace.export.onnx.writer import OnnxWriter

        self.graph = converted
        self.options = options = OnnxOptions() if options is None else options
        self.emitters = {**EMITTERS, **MOVES}
        static = static_nodes(converted.module)
        self._sizes = {n for n in static if n.dtype is not None and np.dtype(n.dtype).kind in "iu"}
        plain = isinstance(converted, PlainGraph)
        naming = ModuleNames(converted) if isinstance(converted, PlainGraph) else OutputNames()
        origin = self._origin()
        source = SourceVersions() if origin is None else SourceVersions(origin.opset, origin.ir_version)
        whole_norms = (options.opset or source.writable or HIGHEST) if plain else 0
        self.writer = OnnxWriter(options.packed, naming, options.opset, whole_norms, source)

    def run(self) -> Any:
        """Returns the model."""
        from qtrace.export.onnx.origin import PRODUCER, OwnNames, describe

        self._check_rounding()
        self._emit_all()
        inputs = self.graph.inputs
        shared = self.options.axes
        declared = (find_declared_axes if shared is None else shared.find)(self.graph, self._problem_at)
        origin = self._origin()
        own_names = None if origin is None else OwnNames.find(self.writer, origin, self._origin_paths())
        infos = [self._value_info(n, name, declared.inputs.get(n, {})) for n, name in inputs.items()]
        used_names = set(inputs.values())
        outputs = [
            self._value_info(n, self._name_output(n, used_names), declared.outputs.get(n, {}))
            for n in self.graph.outputs
        ]
        own, name = version("qtrace"), self.graph.module.graph.name or "qtrace"
        interface = self._interface()
        imported = {} if interface is None else dict(interface.metadata)
        ends = self._finish_ends(infos, outputs, own_names)
        metadata = {**imported, **self._metadata(own), **ends}
        if origin is not None and origin.producer:
            metadata[PRODUCER] = origin.producer
        model = self.writer.model(name, infos, outputs, metadata, own)
        if origin is not None:
            describe(model, origin)
        return model

    def _emit_all(self) -> None:
        """Writes all ops and roundings."""
        inputs = self.graph.inputs
        self.writer.names.update(inputs)
        self.writer.reserve(inputs.values())
        own = dict(self.writer.values)  # alone is written
        self.writer.values = ChainMap(own, self.graph.values)  # type: ignore[arg-type]
        self.writer.rounded = self._rounded_results()
        on_integers = {note.kind for note in self.graph.annotation.notes if note.state == "int"}
        self.writer.number_kinds |= _ARITHMETIC & on_integers
        if not isinstance(self.graph, PlainGraph):
            self.writer.in_pieces = backends.get(self.graph.annotation.backend).without_kernels
        for step in self.graph.steps:
            self.emit(step)

    def _problem_at(self, types: Types) -> str:
        """Returns which node would be written otherwise for other sizes; "" if there is none."""
        from qtrace.export.onnx.sized import first_difference

        other = OnnxExporter(self.graph, self.options)
        other.writer.known = self.writer.initializers
        with resized(types):
            try:
                other._emit_all()
            except ExportError as error:
                return str(error).rstrip(".")
        node = first_difference(self.writer, other.writer)
        return f"{node} is written for this size alone" if node else ""

    def _finish_ends(
        self, infos: list[Any], outputs: list[Any], own_names: OwnNames | None
    ) -> dict[str, str]:
        """Gives tensors the names and types of the imported file; returns metadata on inputs and outputs."""
        from qtrace.export.onnx.detections import add_detections
        from qtrace.export.onnx.ends import PREPROCESS, add_preprocessing, choose_names
        from qtrace.export.onnx.interface import restore_interface

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

    def _interface(self) -> Interface | None:
        """Returns the interface that the file gets; None for the names and types of the graph."""
        return read_interface(self.graph.module)

    def _origin(self) -> FileOrigin | None:
        """Returns the file that the graph was imported from; None for the names of the graph."""
        return read_origin(self.graph.module) if self._interface() is not None else None

    def _origin_paths(self) -> dict[str, str]:
        """Returns initializer -> path of its parameter, for those that get their names of the file back."""
        if not self.options.names_parameters:
            return {}
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

    @staticmethod
    def _value_info(node: TensorNode, name: str, axes: Mapping[int, str | None]) -> Any:
        """Declares a tensor with open ``axes``, each with the name of its size; None for one of its own."""
        from onnx import helper

        kind = helper.np_dtype_to_tensor_dtype(np.dtype(node.dtype))
        if node.shape is None:  # the values decide it
            rank = _rank_of_opaque(node)
            sizes = None if rank is None else [f"{name}_{axis}" for axis in range(rank)]
            return helper.make_tensor_value_info(name, kind, sizes)
        dims: list[Any] = [int(n) for n in node.shape]
        for axis, size in axes.items():
            dims[axis] = size or f"{name}_{axis}"
        return helper.make_tensor_value_info(name, kind, dims)

    def emit(self, step: ConvertedOp | QuantizedSite) -> None:
        """Writes an op or a rounding."""
        if isinstance(step, QuantizedSite):
            with located(site_expr(step.source, step.value)):
                self._emit_site(step)
        elif not self._emit_rescaled(step):
            self._emit_op(step)

    def _emit_op(self, op: ConvertedOp) -> None:
        self.writer.naming.enter(op.expr)
        first = len(self.writer.nodes)
        with located(op.expr):
            self._emit_call(op.expr, op.call)
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
                integers = site.integers(value)
                integers = integers.reshape(-1) if self._is_bias(site) else integers
                parts = (site.name, integers, site.qparams, axis, site.value.name)
                self.writer.names[site.value] = self.writer.dequantize(*parts)
            else:
                self._emit_computed(site)
        except ExportError as error:
            raise ExportError(f"site {site.name}: {error}.") from error

    def _is_bias(self, site: QuantizedSite) -> bool:
        """Whether layers read the value as their bias, which ONNX has as a vector."""
        calls = (self.graph.call(user) for user in site.consumers)
        return any(call is not None and call.bias is site.value for call in calls)

    def _emit_computed(self, site: QuantizedSite) -> None:
        w, axes = self.writer, site.decision.channel_axes
        name = w.name(site.source)
        if axes == (0, 1):  # a grouped convolution's weight: ONNX knows one axis of channels
            name = w.node("Reshape", [name, w.ints([-1, *site.source.shape[2:]])], w.fresh(site.source.name))
            w.laid_out.add(site.value)
            axes = (0,)
        axis = axes[0] if axes else 0
        rounded = w.quantize_dequantize(name, site.name, site.value.name, site.qparams, axis)
        w.names[site.value] = rounded
        if not axes:
            w.rounded_to[site.source] = w.integers[rounded]

    def _emit_weight(self, site: QuantizedSite, value: np.ndarray) -> None:
        from qtrace.export.onnx.stored_weights import store_weight

        store_weight(self.writer, site, value, self._layer(site), self._weight_forms.get(site.name, ""))

    @cached_property
    def _weight_forms(self) -> dict[str, str]:
        from qtrace.export.onnx.stored_weights import find_forms

        return find_forms(self.graph.annotation, self.options.contrib)

    def _layer(self, site: QuantizedSite) -> OpCall:
        for user in site.consumers:
            call = self.graph.call(user)
            if call is not None:
                return call
        raise ExportError(f"{site.value.name} is a weight that no layer reads: set quantize: false for it")

    def _emit_bias(self, site: QuantizedSite, value: np.ndarray | None) -> None:
        w, out = self.writer, site.value
        if value is None:
            if not only_floats_read(out, self.options.floats):
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
