"""A dump for MegEngine's own runtimes, whose convolutions, linear layers and sums compute on int8.

For modules that were prepared for backend megengine. The file is what ``megengine.jit.trace(...).dump``
writes; ``megengine.utils.comp_graph_tools.GraphInference`` and MegEngine Lite load it. Its usual suffix is
``.mge``, like the suffix of ``qtrace.save``, so this format has to be named: ``format="megengine"``.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from megengine import Tensor
from megengine.jit import trace

from qtrace.errors import ExportError
from qtrace.export.converted import ConvertedGraph, float_kinds
from qtrace.export.format import Format
from qtrace.graph.types import TensorNode
from qtrace.graph.walk import unused_name
from qtrace.targets.megengine.graph import QuantizedGraph

__all__ = ["FORMAT"]


def files(converted: ConvertedGraph, path: Path, allow_float: Iterable[str] = ()) -> dict[Path, bytes]:
    """Returns the dump.

    Args:
        converted: the graph of a converted module.
        path: the path of the dump.
        allow_float: kinds of layers, such as ``conv2d``, that compute in float, with weights that the graph
            rounded: in any way, also one that MegEngine's int8 kernels cannot express.

    Raises:
        ExportError: when a site has another scheme than MegEngine's int8 kernels, naming it, or an op cannot
            be dumped.
    """
    graph = QuantizedGraph(converted, float_kinds(allow_float))
    names = list(graph.graph.inputs.values())
    outputs = _output_names(graph.graph, names)
    samples = [_sample(node) for node in graph.graph.inputs]
    traced = trace(lambda *inputs: graph.run(*inputs), symbolic=True, capture_as_const=True)
    stream = io.BytesIO()
    try:
        # The plain run computes and keeps the constants; the traced run records them.
        for result in (*graph.run(*samples), *traced(*samples)):
            result.numpy()  # a kernel's error appears here at the latest
        integers = list(dict.fromkeys(graph.integers))
        facts = {"qtrace": 1, "inputs": names, "integers": integers, "merged": graph.merged}
        # As text, so that a reader need not unpickle it.
        traced.dump(stream, arg_names=names, output_names=outputs, user_info=json.dumps(facts))
    except (RuntimeError, AssertionError, TypeError, ValueError) as error:
        line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ExportError(
            f"MegEngine cannot dump the graph: {line}. End the graph before the op that it names."
        ) from error
    return {path: stream.getvalue()}


# Chosen by name: .mge stands for a model that qtrace.save wrote.
FORMAT = Format("megengine", files, suffixes=(".mge",), options=("allow_float",), runs_graph=True)


def _sample(node: TensorNode) -> Tensor:
    return Tensor(np.zeros([int(n) for n in node.shape], np.dtype(node.dtype)))


def _output_names(graph: ConvertedGraph, used: list[str]) -> list[str]:
    """Returns a unique name for each output of the graph."""
    names: list[str] = []
    for node in graph.outputs:
        name, taken = graph.site_name(node), (*used, *names)
        names.append(unused_name(f"{name}_output", taken.__contains__) if name in taken else name)
    return names
