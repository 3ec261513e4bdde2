"""A float TFLite model, and next to it a file of quantization parameters by the names of its tensors.

For converters that read ranges next to a float model, as mgeconvert's users have them. Tensors have the names
of the graph's nodes; images have the channels last. Weights and biases are the trained floats; a weight is
clipped where its scheme leaves out the lowest integer.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from qtrace.errors import ExportError, install
from qtrace.export.converted import ConvertedGraph, float_graph
from qtrace.export.detections import Suppression
from qtrace.export.format import Format
from qtrace.export.parameters import Names, ParameterLayer, beside, parameter_file, site_table


def files(
    converted: ConvertedGraph, path: Path, *, params: str | None = None, nms: Any = None
) -> dict[Path, bytes]:
    """Returns the float model and its parameter file.

    Args:
        converted: the graph of a converted module.
        path: the path of the model.
        params: the kind of parameter file, such as ``mgeconvert``; None for only the model.
        nms: how the file of a detector chooses boxes, as a mapping of `Suppression`; None for only the
            outputs of the graph.

    Raises:
        ExportError: when TFLite cannot express a node, the kind of file cannot express a site, naming it, or
            LiteRT is not installed.
    """
    if importlib.util.find_spec("ai_edge_litert") is None:
        raise ExportError(f"TFLite export needs the package ai-edge-litert: run {install('tflite')}.")
    # Imported here, since these modules import LiteRT's.
    from qtrace.targets.tflite.build import BuildOptions
    from qtrace.targets.tflite.exporter import Exporter

    kind = None if params is None else parameter_file(params)
    suppression = None if nms is None else Suppression.of(nms)
    exporter = Exporter(float_graph(converted), BuildOptions(suppression=suppression))
    model = exporter.run()
    contents: dict[Path, bytes] = {}
    if kind is not None:
        contents[beside(path, kind)] = kind.write(site_table(converted, _names(exporter))).encode()
    contents[path] = model
    return contents


# Chosen by name: the suffix .tflite stands for the format with integers.
FORMAT = Format("tflite_float", files, options=("params", "nms"))


def _names(exporter: Any) -> Names:
    """Returns the names of the graph's nodes and layers in the file."""
    build = exporter.build
    sources = {**{node: source for node, (source, _) in build.moved.items()}, **build.node_tensors}
    tensors = {node.name: source.tensor.name for node, source in sources.items()}
    layers = {}
    for out, stored in build.layers.items():
        weight, bias = stored.weight, "" if stored.bias is None else stored.bias.name
        assert weight.value is not None
        name = tensors.get(out.name, out.name)
        layers[out.name] = ParameterLayer(name, weight.name, bias, weight.value, stored.axis)
    return Names(tensors, layers)
