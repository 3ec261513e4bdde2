"""A float Caffe net, ``.prototxt`` and ``.caffemodel``, and next to them a file of quantization parameters.

Layers and blobs have the names of the graph's nodes. Caffe lacks integers: tools that read the net quantize
it themselves, by the parameters in the file. A layer's parameters are unnamed in Caffe; the file calls them
``LAYER.weight`` and ``LAYER.bias``.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np

from qtrace.errors import ExportError, install
from qtrace.export.converted.graph import ConvertedGraph, ConvertedOp
from qtrace.export.converted.located import refusal
from qtrace.export.converted.plain_graph import float_graph
from qtrace.export.format import Format
from qtrace.export.parameters.base import beside, parameter_file
from qtrace.export.parameters.sites import Names, ParameterLayer, site_table
from qtrace.graph.dataflow import needed_nodes
from qtrace.graph.opaque import cure_for_opaque
from qtrace.graph.types import TensorNode
from qtrace.graph.walk import is_float_tensor, op_label, unused_name
from qtrace.storage.outputs import WRITTEN
from qtrace.targets.caffe.ops import EMITTERS
from qtrace.targets.caffe.writer import CaffeWriter

__all__ = ["FORMAT"]


def files(converted: ConvertedGraph, path: Path, *, params: str | None = None) -> dict[Path, bytes]:
    """Returns the net, its weights and its parameter file.

    Args:
        converted: the graph of a converted module.
        path: the path of the net; the weights get the suffix ``.caffemodel``.
        params: the kind of parameter file, such as ``ncnn``; None for none.

    Raises:
        ExportError: when Caffe cannot express a node, or the kind of file cannot express a site, naming it.
    """
    kind = None if params is None else parameter_file(params)
    if importlib.util.find_spec("google.protobuf") is None:
        raise ExportError(f"Caffe export needs the package protobuf: run {install('caffe')}.")
    from google.protobuf import text_format

    exporter = CaffeExporter(float_graph(converted))
    exporter.run()
    writer = exporter.writer
    contents: dict[Path, bytes] = {}
    if kind is not None:
        contents[beside(path, kind)] = kind.write(site_table(converted, exporter.names())).encode()
    contents[path.with_suffix(".caffemodel")] = writer.weights.SerializeToString()
    contents[path] = f"# {WRITTEN}.\n{text_format.MessageToString(writer.net)}".encode()
    if len(contents) < 2 + (kind is not None):
        raise ExportError(f"{path.name} is the name of the weights: name the net with the suffix .prototxt.")
    return contents


FORMAT = Format(
    "caffe",
    files,
    suffixes=(".prototxt",),
    companions=(".caffemodel",),
    options=("params",),
    float_options=(),
    fixes_sizes=True,
)


class CaffeExporter:
    def __init__(self, flat: ConvertedGraph) -> None:
        self.graph = flat
        self.writer = CaffeWriter(flat.module.graph.name or "qtrace")
        self.writer.values.update(self.graph.values)

    def run(self) -> None:
        """Fills the writer."""
        for node, name in self.graph.inputs.items():
            self.writer.names[node] = name
            # One sample; a deployment sets its batch size.
            shape = {"dim": [1, *(int(n) for n in node.shape[1:])]}
            self.writer.layer("Input", [], name, input_param={"shape": [shape]})
        needed = needed_nodes(self.graph.module)
        for op in self.graph.ops:
            if any(node in needed for node in op.expr.outputs):
                self._emit(op)
        self._silence_unread(self._outputs())

    def _outputs(self) -> set[str]:
        """Gives each output a blob that nothing reads, in the order of the graph; returns the blobs' names.

        Caffe takes a blob for an output if no layer reads it. An output that an inner layer reads, that is an
        input, or that stands before an earlier output of the graph is copied to the end.
        """
        w, last = self.writer, -1
        outputs: set[str] = set()
        for index, node in enumerate(self.graph.outputs):
            if node not in w.names:
                raise refusal(
                    f"output {index}, {node.name}, is {_describe(node)}, and a Caffe net gives only "
                    "floats that it computes: end the graph before it",
                    node.expr,
                )
            blob, layers = w.names[node], list(w.net.layer)
            place = next(i for i, layer in enumerate(layers) if blob in layer.top)
            read = any(blob in layer.bottom for layer in layers)
            if read or place <= last or layers[place].type == "Input":
                tops = {top for layer in layers for top in layer.top}
                name = unused_name(f"{blob}_output", tops.__contains__)
                blob, place = w.layer("Power", [blob], name, power_param={"power": 1.0}), len(layers)
            outputs.add(blob)
            last = place
        return outputs

    def _silence_unread(self, outputs: set[str]) -> None:
        """Adds Silence layers for unread inputs and parts of splits, which Caffe would take for outputs.

        Each follows the layer of its blob, because OpenCV returns the last layer of a file by default.
        """
        w = self.writer
        layers = list(w.net.layer)
        read = {blob for layer in layers for blob in layer.bottom} | outputs
        del w.net.layer[:]
        for layer in layers:
            w.net.layer.append(layer)
            if unread := [top for top in layer.top if top not in read]:
                w.layers("Silence", unread, f"{layer.name}_unused", [])

    def _emit(self, op: ConvertedOp) -> None:
        expr, call = op.expr, op.call
        name, label = expr.outputs[0].name, op_label(expr)
        if not any(is_float_tensor(n) for n in expr.outputs):
            return  # shapes: layers take them from the trace
        if call is None or call.kind not in EMITTERS:
            cure = cure_for_opaque(expr) or "end the graph before it, or write it with ops that have one"
            raise refusal(f"{name}: {label} cannot become Caffe: {cure}", expr)
        try:
            EMITTERS[call.kind](self.writer, call)
        except ExportError as error:
            raise refusal(f"{name}: {error}", expr) from error

    def names(self) -> Names:
        """Returns the net's names of the graph's nodes and layers."""
        w = self.writer
        nodes = list(self.graph.nodes.values())
        tensors = {n.name: n.name for n in nodes if n in w.values}
        tensors.update((n.name, w.names[n]) for n in nodes if n in w.names)
        blobs = {layer.name: layer.blobs[0] for layer in w.weights.layer}
        layers: dict[str, ParameterLayer] = {}
        for call in (op.call for op in self.graph.ops):
            if call is not None and call.out in w.names and call.weight is not None:
                name, value = call.out.name, w.values[call.weight]
                value = value.reshape(tuple(blobs[name].shape.dim))
                axis = 1 if call.kind == "conv_transpose2d" else 0
                ends = (name, f"{name}.weight", f"{name}.bias")
                layers[name] = ParameterLayer(*ends, value, axis, int(call.attrs.get("groups", 1)))
        return Names(tensors, layers)


def _describe(node: TensorNode) -> str:
    """Says why a node lacks a blob."""
    return "a constant" if is_float_tensor(node) else f"of type {np.dtype(node.dtype).name}"
