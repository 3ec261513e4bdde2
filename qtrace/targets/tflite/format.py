"""TFLite (LiteRT) with int8 kernels: images with the channels last, weights per channel, int32 biases.

Each site becomes a tensor of integers called ``{site}_int``. An op writes the integers of its site, with
the activation function that it fuses. Image tensors (N, C, H, W) are (N, H, W, C) in the file, inputs
and outputs included. The metadata entry ``qtrace`` gives the axis order of inputs and outputs, and names
the tensor with the integers of each site.

An op that the annotation keeps in float is written between DEQUANTIZE and QUANTIZE. The logger ``qtrace``
and the metadata have these ops, and the others that compute in float, with the reason of each.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from qtrace.errors import ExportError, install
from qtrace.export.converted import ConvertedGraph, float_kinds
from qtrace.export.detections import Suppression
from qtrace.export.format import Format

_CHOICES = {"io": ("float32", "int8"), "functions": ("float", "table", "native")}
# A file with integers at its ends is for devices without floats.
_FUNCTIONS = {"float32": "float", "int8": "table"}


def files(
    converted: ConvertedGraph,
    path: Path,
    *,
    io: str = "float32",
    functions: str | None = None,
    allow_float: Iterable[str] = (),
    nms: Any = None,
) -> dict[Path, bytes]:
    """Returns a module as a TFLite file.

    Args:
        converted: the graph of a module that was converted for backend tflite.
        path: the path of the file.
        io: "float32", or "int8" for a model whose float inputs and outputs are the integers of their sites:
            int16 where a site has 16 bits.
        functions: how functions of one value (sigmoid, SiLU, hard swish ...) and products of two activations
            are written between integers. "float" computes them between DEQUANTIZE and QUANTIZE: LiteRT makes
            that a look-up table. "table" is a GATHER, for devices without floats: exact, and slow on a
            CPU. `"native"` is TFLite's integer kernel where it has one: up to one step off in a tenth of the
            values. Products never use a table: they are integer kernels with both. None is "float" with
            ``io="float32"`` and "table" with ``io="int8"``, whose file then lacks float tensors unless the
            graph keeps an op in float.
        allow_float: op kinds that may compute in float although the graph computes them on integers.
        nms: how the file of a detector chooses boxes, as a mapping of `Suppression`; None for only the
            outputs of the graph. The boxes are further outputs, of batches of one.

    Raises:
        ExportError: when TFLite cannot express a node or rounds in another way, naming it, or LiteRT is
            not installed.
    """
    if importlib.util.find_spec("ai_edge_litert") is None:
        raise ExportError(f"TFLite export needs the package ai-edge-litert: run {install('tflite')}.")
    for name, choice in (("io", io), ("functions", functions)):
        if choice is not None and choice not in _CHOICES[name]:
            known = " or ".join(_CHOICES[name])
            raise ExportError(f"{name}={choice!r} is no choice of the TFLite export: choose {known}.")
    # Imported here, since these modules import LiteRT's.
    from qtrace.targets.tflite.build import BuildOptions
    from qtrace.targets.tflite.exporter import Exporter

    suppression = None if nms is None else Suppression.of(nms)
    options = BuildOptions(io, functions or _FUNCTIONS[io], float_kinds(allow_float), suppression)
    return {path: Exporter(converted, options).run()}


FORMAT = Format(
    "tflite",
    files,
    suffixes=(".tflite",),
    options=("io", "functions", "allow_float", "nms"),
    float_options=("nms",),
    fixes_sizes=True,
    folds_norms=True,
)
