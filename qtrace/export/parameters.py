"""Files with quantization parameters by tensor name: each kind is an entry point in ``qtrace.parameters``.

The name of the entry point is what the option ``params`` takes. Every kind is written from one table of all
quantized tensors of a float model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import numpy as np

from qtrace.errors import ExportError
from qtrace.export.converted import ConvertedGraph
from qtrace.fakequant.base import FakeQuant
from qtrace.graph.types import Node
from qtrace.graph.walk import owner, users
from qtrace.plugins import ObjectPlugins
from qtrace.scheme import QParams, QScheme

_OUTPUT = "the model's output"


@dataclass(frozen=True)
class ParameterLayer:
    """A layer with a weight, as a float model stores it.

    Attributes:
        name: the name of the layer.
        weight: the name of its weight.
        bias: the name of its bias.
        value: the weight's values.
        axis: the axis of the weight that counts output channels.
        groups: the number of groups of a convolution, where the model's format says it.
    """

    name: str
    weight: str
    bias: str
    value: np.ndarray
    axis: int
    groups: int = 1


@dataclass(frozen=True)
class Names:
    """The names of the graph's nodes and layers in a float model.

    Attributes:
        tensors: name of a node -> the tensor that holds its value.
        layers: name of the output of a layer with a weight -> the layer.
    """

    tensors: Mapping[str, str]
    layers: Mapping[str, ParameterLayer]


@dataclass(frozen=True)
class Row:
    """One tensor of the float model and how it is quantized: ``x = (q - zero_point) * scale``.

    Attributes:
        tensor: the tensor's name in the float model.
        site: the site, or the node that carries a site's integers.
        sort: activation, weight or bias.
        scheme: the scheme; None for a bias, which is int32 and symmetric.
        scale: float32 of shape ``()`` or ``(channels,)``.
        zero_point: int32, of the same shape.
        axis: the axis of the channels, in the layout of the float model; None for one scale.
        stored: whether the tensor is a parameter.
        layers: the layers with a weight that read the integers.
        elsewhere: for an activation, another op that computes with the integers; "" for none.
        floating: for an activation, an op that reads the tensor before it is rounded; "" for none.
        value: a weight's values.
        outputs: the number of a weight's output channels.
        groups: the number of groups of the convolution that has the weight.
    """

    tensor: str
    site: str
    sort: Literal["activation", "weight", "bias"]
    scheme: QScheme | None
    scale: np.ndarray
    zero_point: np.ndarray
    axis: int | None = None
    stored: bool = False
    layers: tuple[str, ...] = ()
    elsewhere: str = ""
    floating: str = ""
    value: np.ndarray | None = field(default=None, repr=False)
    outputs: int = 0
    groups: int = 1

    def describe(self) -> str:
        """Returns the scheme in words."""
        return "int32 sym" if self.scheme is None else self.scheme.describe()


def site_table(graph: ConvertedGraph, names: Names) -> tuple[Row, ...]:
    """Returns a row for each quantized tensor of the float model: activations, weights and biases.

    A bias is left out if a layer adds it at several scales, because the inputs of its calls have several. Its
    scale is the call's input scale times the weight's, for a reader to compute.

    Args:
        graph: the converted graph.
        names: the names of nodes and layers in the float model.

    Raises:
        ExportError: when a tensor is quantized in two ways for two readers.
    """
    rows: dict[str, Row] = {}
    ambiguous: set[str] = set()
    for row in (*_activations(graph, names), *_parameters(graph, names)):
        known = rows.setdefault(row.tensor, row)
        if not _same(known, row):
            if known.sort == row.sort == "bias":
                ambiguous.add(row.tensor)
                continue
            raise ExportError(
                f"site {row.site} ({row.describe()}) quantizes tensor {row.tensor} otherwise than site "
                f"{known.site} ({known.describe()}), but a parameter file has one entry a tensor. Give "
                "all its readers one scheme, or export format onnx."
            )
        if known is not row:
            rows[row.tensor] = _joined(known, row)
    return tuple(row for tensor, row in rows.items() if tensor not in ambiguous)


def _activations(graph: ConvertedGraph, names: Names) -> list[Row]:
    readers = _TensorReaders(graph, names)
    rows = []
    for site in graph.sites:
        if site.sort == "activation" and site.node.name in names.tensors:
            ends = (site.value, site.decision.static, readers.in_float(site.node))
            rows.append(readers.row(names.tensors[site.node.name], site.name, site.qparams, *ends))
    for name, qparams in graph.carried.items():
        if name in names.tensors:
            rows.append(readers.row(names.tensors[name], name, qparams, graph.nodes[name], False, ""))
    return rows


class _TensorReaders:
    """Makes rows of activations from the ops that read them."""

    def __init__(self, graph: ConvertedGraph, names: Names) -> None:
        self.graph, self.names = graph, names
        self.outputs = set(graph.outputs)

    def row(
        self, tensor: str, site: str, qparams: QParams, integers: Node, stored: bool, floating: str
    ) -> Row:
        """Returns the row of a tensor whose integers are the node ``integers``."""
        layers: list[str] = []
        elsewhere = _OUTPUT if integers in self.outputs else ""
        for expr in users(integers):
            call = self.graph.call(expr)
            if call is not None and call.out.name in self.names.layers and call.inputs[0] is integers:
                layers.append(self.names.layers[call.out.name].name)
            elif not any(n.name in self.graph.annotation.carried for n in expr.outputs):
                elsewhere = expr.outputs[0].name
        numbers = (qparams.scheme, qparams.scale, qparams.zero_point, qparams.scheme.axis)
        return Row(tensor, site, "activation", *numbers, stored, tuple(layers), elsewhere, floating)

    def in_float(self, node: Node) -> str:
        """Returns the name of an op that reads ``node`` before it is rounded, or ""."""
        readers = [e.outputs[0].name for e in users(node) if not isinstance(owner(e), FakeQuant)]
        return readers[0] if readers else (_OUTPUT if node in self.outputs else "")


def _parameters(graph: ConvertedGraph, names: Names) -> list[Row]:
    rows = []
    for site in graph.sites:
        if site.sort == "activation":
            continue
        # A model may store a parameter that several layers read once, or for each of them.
        for layer in (names.layers[c] for c in site.decision.consumers or () if c in names.layers):
            if site.sort == "weight":
                rows.append(_weight(site.name, site.qparams, layer))
                continue
            scale = site.bias_scale
            zero, axis = np.zeros(scale.shape, np.int32), 0 if scale.ndim else None
            rows.append(Row(layer.bias, site.name, "bias", None, scale, zero, axis, True))
    return rows


def _weight(site: str, qparams: QParams, layer: ParameterLayer) -> Row:
    scheme = qparams.scheme
    if scheme.block is not None:
        raise ExportError(
            f"site {site} has a scale for each block of {scheme.block} inputs, which parameter files "
            "cannot hold yet: export a model (.onnx), or leave block out."
        )
    axis = layer.axis if scheme.per_channel else None
    numbers = (scheme, qparams.scale, qparams.zero_point, axis)
    row = Row(layer.weight, site, "weight", *numbers, True, (layer.name,), value=layer.value)
    return replace(row, outputs=int(layer.value.shape[layer.axis]), groups=layer.groups)


def _same(a: Row, b: Row) -> bool:
    arrays = ((a.scale, b.scale), (a.zero_point, b.zero_point))
    return a.scheme == b.scheme and a.axis == b.axis and all(np.array_equal(x, y) for x, y in arrays)


def _joined(a: Row, b: Row) -> Row:
    """Merges the rows of two sites on one tensor with the same parameters."""
    layers = tuple(dict.fromkeys((*a.layers, *b.layers)))
    elsewhere, floating = a.elsewhere or b.elsewhere, a.floating or b.floating
    return replace(a, layers=layers, elsewhere=elsewhere, floating=floating)


@dataclass(frozen=True)
class ParameterFile:
    """A kind of parameter file.

    Attributes:
        title: the name of the kind in messages.
        suffix: the end of the file's name, after the stem of the model's name.
        write: formats the table of sites as text; raises an `ExportError` for a site that it cannot express.
    """

    title: str
    suffix: str
    write: Callable[[Sequence[Row]], str]


parameter_file = ObjectPlugins("qtrace.parameters", ParameterFile, ExportError).get


def beside(model: Path, kind: ParameterFile) -> Path:
    """Returns the path of a model's parameter file."""
    return model.with_name(f"{model.stem}{kind.suffix}")


def refuse(row: Row, title: str, reason: str, change: str) -> ExportError:
    """Returns the error for a site that a kind of file cannot express.

    Args:
        row: the site.
        title: the title of the kind of file.
        reason: the limit of that kind, as a verb phrase.
        change: the change to make, as an imperative.
    """
    return ExportError(f"site {row.site} is {row.describe()}, but {title} {reason}: {change}.")


def refuse_floating(row: Row, title: str) -> None:
    """Refuses a tensor that some ops read rounded and others in float: an entry would apply to all.

    Raises:
        ExportError: naming the site and the op that reads it in float.
    """
    if row.floating:
        change = f"quantize {row.floating} as well, or export format onnx"
        raise refuse(
            row, title, f"rounds {row.tensor} for {row.floating} too, which reads it in float", change
        )
