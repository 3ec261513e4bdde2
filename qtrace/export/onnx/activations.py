"""A float ONNX model that outputs the activations of a prepared graph, for calibration in onnxruntime."""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from qtrace.errors import ExportError, install
from qtrace.export.converted.open_axes import SharedAxes
from qtrace.export.converted.plain_graph import bare_graph
from qtrace.graph.opaque import divides_by_inputs
from qtrace.graph.types import TracedModule
from qtrace.onnxfile import external_data

__all__ = ["Activations", "activations"]

# Bytes of weights from which on onnxruntime maps them from a file, instead of two copies of them in memory.
_LARGE = 2**27


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
    if importlib.util.find_spec("onnx") is None:
        raise ExportError(f"the package onnx is not installed: run {install('onnx')}.")
    if divides_by_inputs(prepared):
        raise ExportError(
            "it divides by integers, and onnxruntime ends the process where one is 0: use engine megengine."
        )
    from onnx import TensorProto, helper

    from qtrace.export.onnx.exporter import OnnxExporter, OnnxOptions

    class ActivationExporter(OnnxExporter):
        """Writes a model that is fed with the tensors of the graph and is never stored.

        It is without metadata, since hashing the graph takes as long as the rest of the export.
        """

        def _interface(self) -> None:
            return None

        def _metadata(self, own: str) -> dict[str, str]:
            return {}

    exporter = ActivationExporter(bare_graph(prepared), OnnxOptions(axes=axes))
    model = exporter.run()
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
