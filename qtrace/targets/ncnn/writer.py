"""Collects the layers of one ncnn net and writes them as ``.param`` text and ``.bin`` bytes.

A net computes a graph for one sample: its shapes, the axes along which samples lie, and what depends only on
shapes.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from typing import Any

import megengine as mge
import numpy as np

from qtrace.errors import ExportError
from qtrace.export.converted import ConvertedGraph, ConvertedOp
from qtrace.export.layer_net import LayerNetWriter
from qtrace.export.open_axes import grown_axes, resized
from qtrace.graph.inference import OpError, TensorType
from qtrace.graph.interpreter import interpret
from qtrace.graph.open_axes import infer_types
from qtrace.graph.types import Node, TensorNode
from qtrace.graph.walk import owner
from qtrace.ops import OpCall
from qtrace.scheme import QParams

_RESHAPES = ("reshape", "flatten", "expand_dims", "squeeze")
# Ops that read only the shape of their input.
_SHAPED = ("shape", "full_like")

_MAGIC = "7767517"
_INT8 = 0x000D4B38
ARRAY = -23300
"""The key of a parameter that is an array, from which its number is taken."""
# ncnn's numbers of the sizes of a blob with 1, 2, 3 and 4 axes, the last axis first.
_AXES = ((0,), (0, 1), (0, 1, 2), (0, 1, 11, 2))


@dataclass(frozen=True)
class SampleAxes:
    """Where the samples of a batch are.

    Attributes:
        axes: node -> its axes whose sizes grow with the number of samples; none if only one sample runs.
        inside: node -> how many values of such an axis lie around each sample, where samples do not lie
            around all others of the axis.
    """

    axes: Mapping[Node, frozenset[int]] = field(default_factory=dict)
    inside: dict[Node, int] = field(default_factory=dict)

    def holds(self, node: Node, axis: int) -> bool:
        """Returns whether an axis of a node grows with the number of samples."""
        return axis in self.axes.get(node, ())

    def follow(self, call: OpCall) -> None:
        """Notes where the samples are after an op.

        Raises:
            ExportError: when the op mixes samples, so that it gives something else for one of them.
        """
        source = next((node for node in call.inputs if self.axes.get(node)), None)
        if source is None:
            return
        around = self._around(source)
        for node in call.outputs:
            own = self.axes.get(node, frozenset())
            before = prod(int(n) for n in node.shape[: min(own)]) if own else 0
            inside = self.inside.get(source, 1)
            if call.kind in _RESHAPES and before:
                inside = around // before if around % before == 0 else 0
            if len(own) != 1 or not inside or int(node.shape[min(own)]) % inside:
                raise ExportError(
                    "it mixes samples of the batch, and ncnn computes sample by sample: leave one axis "
                    "to the batch"
                )
            if inside > 1:
                self.inside[node] = inside

    def _around(self, node: Node) -> int:
        """Returns how many values lie around the samples of a node."""
        assert isinstance(node, TensorNode)
        return prod(int(n) for n in node.shape[: min(self.axes[node])]) * self.inside.get(node, 1)


@contextmanager
def one_sample(graph: ConvertedGraph) -> Iterator[SampleAxes]:
    """Gives the nodes of a graph the shapes that they have for one sample, and theirs back in the end.

    Raises:
        ExportError: when the inputs lack an axis of samples, or the graph does not run on one sample.
    """
    batch = _batch(graph)
    single = _types(graph, 1)
    if single is None:
        raise ExportError(
            f"the graph has numbers of its batch of {batch}, and ncnn runs one sample: trace it with one, "
            "or reshape with -1 for the batch"
        )
    several = _types(graph, batch if batch > 1 else 2) or {}
    with resized(single):
        yield SampleAxes(grown_axes(single, several))


def shapes_of_one_sample(graph: ConvertedGraph, nodes: Sequence[Node]) -> list[tuple[int, ...]] | None:
    """Returns the shapes of some nodes for one sample; None if it is the first axis of each of them.

    Blobs then have the same axes in ncnn: the axes of a sample, at most 4. One number for a
    sample is without an axis in the graph, and has one in ncnn.
    """
    with one_sample(graph) as samples:
        shapes = [tuple(int(n) for n in node.shape or ()) for node in nodes if isinstance(node, TensorNode)]
    leading = (samples.axes.get(node, frozenset()) == {0} for node in nodes)
    same = all(shape[:1] == (1,) and 2 <= len(shape) <= 5 for shape in shapes)
    return None if all(leading) and same else shapes


def _batch(graph: ConvertedGraph) -> int:
    first = next(iter(graph.inputs), None)
    batch = int(first.shape[0]) if first is not None and first.shape else 1
    for node in graph.inputs:
        shape = tuple(int(n) for n in node.shape or ())
        if len(shape) < 2 or shape[0] != batch:
            raise ExportError(
                f"{node.name} has shape {shape}, and ncnn computes sample by sample: leave axis 0 to the "
                f"batch of {batch}"
            )
    return batch


def _types(graph: ConvertedGraph, samples: int) -> dict[Node, TensorType | None] | None:
    """Returns the types for a number of samples; None if the graph does not run on so many."""
    shapes = {str(node.name): (samples, *(int(n) for n in node.shape[1:])) for node in graph.inputs}
    try:
        return infer_types(graph.module, shapes)
    except OpError:
        return None


def fold(op: ConvertedOp, values: Mapping[Node, np.ndarray]) -> tuple[np.ndarray, ...] | None:
    """Computes an op that depends only on shapes, parameters and constants.

    Args:
        op: the op, in a graph whose nodes have the shapes for one sample.
        values: node -> its value, for nodes that depend on nothing else.

    Returns:
        The values of its outputs; None if it depends on an input of the graph.
    """
    expr, call = op.expr, op.call
    if call is None:
        return None
    inputs = []
    for node in expr.inputs:
        if not isinstance(node, TensorNode):
            inputs.append(owner(expr))
        elif node in values:
            inputs.append(mge.Tensor(values[node]))
        elif call.kind in _SHAPED and node.shape is not None:
            inputs.append(mge.Tensor(np.zeros([int(n) for n in node.shape], np.dtype(node.dtype))))
        else:
            return None
    results = interpret(expr, inputs)
    return None if results is None else tuple(np.asarray(result.numpy()) for result in results)


@dataclass
class NcnnLayer:
    """One layer: ``params`` by ncnn's numbers; ``weights``, its parts of the ``.bin``."""

    kind: str
    bottoms: list[str]
    tops: list[str]
    params: dict[int, Any] = field(default_factory=dict)
    weights: list[bytes] = field(default_factory=list)

    def line(self) -> str:
        """Returns the line of the layer in the ``.param``."""
        name = self.tops[0] if self.tops else f"{self.bottoms[0]}_unused"
        words = [
            self.kind,
            f"qtrace/{name}" if self.kind == "Input" else name,  # the mark of `qtrace.storage.outputs`
            str(len(self.bottoms)),
            str(len(self.tops)),
            *self.bottoms,
            *self.tops,
        ]
        return " ".join([*words, *(f"{key}={_text(value)}" for key, value in self.params.items())])


@dataclass(frozen=True)
class Weight:
    """A quantized weight.

    Attributes:
        integers: int8, in the graph's layout.
        scale: float32, one number or one for each output channel.
        value: the dequantized integers.
    """

    integers: np.ndarray
    scale: np.ndarray
    value: np.ndarray


@dataclass(frozen=True)
class Rounded:
    """A node whose value is rounded: ``name`` is the site or the node that carries its integers."""

    name: str
    qparams: QParams


class NcnnWriter(LayerNetWriter):
    """Collects the layers of one ncnn net, which computes one sample.

    The nodes of the graph have the shapes of one sample meanwhile, and a blob leaves out a first axis of size
    1. So the batch may be anywhere in a graph, also as part of an axis, as long as no op mixes samples.

    A rounded node keeps its blob from before the rounding. A layer of 8 bits reads its integers. An op that
    only moves values reads the blob, because rounding before or after the move gives the same. Any other op
    reads the dequantized integers.

    Attributes:
        samples: where the samples of a batch are in the graph.
        packed: a node with more axes than ncnn has -> the axes of its blob; the values have the same order.
    """

    runtime = "ncnn"

    def __init__(self) -> None:
        super().__init__()
        self.samples = SampleAxes()
        self.layers: list[NcnnLayer] = []
        self.weights: dict[Node, Weight] = {}
        self.rounded: dict[Node, Rounded] = {}
        self.moving = False
        self.integer_blobs: dict[str, str] = {}
        self.packed: dict[Node, tuple[int, ...]] = {}

    def shape(self, node: TensorNode) -> list[int]:
        """Returns the shape of a sample.

        Raises:
            ExportError: when the node's first axis is not the batch.
        """
        shape = [int(n) for n in node.shape or ()]
        if len(shape) < 2 or shape[0] != 1 or any(self.samples.holds(node, a) for a in range(1, len(shape))):
            raise ExportError(
                f"{node.name} has shape {tuple(shape)} for one sample, and ncnn computes sample by sample: "
                "leave axis 0 to the batch"
            )
        return shape[1:]

    def dims(self, node: TensorNode) -> tuple[int, ...]:
        """Returns the axes that a blob has for ``node``: all of one sample, without a first one of size 1."""
        shape = tuple(int(n) for n in node.shape or ())
        return shape[1:] if len(shape) > 1 and shape[0] == 1 else shape

    def place(self, node: TensorNode, axis: int) -> int:
        """Returns the axis of a blob that is ``axis`` of its node.

        Raises:
            ExportError: when samples lie along the axis.
        """
        rank = len(node.shape)
        place = axis % rank - (rank - len(self.dims(node)))
        if place < 0 or self.samples.holds(node, axis % rank):
            raise ExportError("it works along the batch, which ncnn does not see: use another axis")
        return place

    def name(self, node: Any) -> str:
        """Returns the blob that an op reads for ``node``: for a rounded node, the dequantized integers."""
        if node in self.packed:
            raise _too_many(f"{node.name} has {len(self.dims(node))} axes in a sample")
        return self.raw(node)

    def raw(self, node: Any) -> str:
        """Returns the blob that an op reads which moves values, whatever the axes of the blob are."""
        blob = super().name(node)
        if self.moving or node not in self.rounded:
            return blob
        if node in self.packed:
            raise _too_many(f"{node.name} has {len(self.dims(node))} axes in a sample")
        return self._dequantized(node)

    def view(self, node: TensorNode, dims: Sequence[int]) -> str:
        """Returns a blob with the values of ``node`` in other axes; a stored value gets a blob of its own."""
        value = self.value(node)
        if value is not None:
            return self.memory(value.reshape(dims), self.fresh(str(node.name)))
        blob, own = self.raw(node), self.packed.get(node, self.dims(node))
        return blob if own == tuple(dims) else self.reshape(blob, dims, self.fresh(str(node.name)))

    def reshape(self, blob: str, dims: Sequence[int], top: str) -> str:
        """Adds a layer that gives a blob other axes.

        Raises:
            ExportError: when these are more than 4.
        """
        if not 1 <= len(dims) <= len(_AXES):
            raise _too_many(f"{top} has {len(dims)} axes")
        keys = _AXES[len(dims) - 1]
        return self.layer("Reshape", [blob], top, dict(zip(keys, reversed(dims), strict=True)))

    def put(self, node: TensorNode, blob: str, dims: Sequence[int]) -> None:
        """Makes a blob the value of ``node``, in the node's axes where ncnn has as many."""
        own = self.dims(node)
        if own == tuple(dims):
            self.names[node] = blob
        elif len(own) <= len(_AXES):
            self.names[node] = self.reshape(blob, own, str(node.name))
        else:
            self.names[node], self.packed[node] = blob, tuple(dims)

    def integer_blob(self, node: TensorNode, dims: Sequence[int] = ()) -> str:
        """Returns the blob with the integers of a rounded node, and adds it when it is first read.

        Args:
            node: the node.
            dims: other axes than the node's: floats get them, as ncnn does not survive a Reshape of integers
                (1.0.20261020, measured).
        """
        rounded = self.rounded[node]
        own = self.packed.get(node, self.dims(node))
        other = bool(dims) and tuple(dims) != own
        blob = f"{rounded.name}_int_{'x'.join(map(str, dims))}" if other else f"{rounded.name}_int"
        if blob not in self.integer_blobs:
            scale = floats(np.float32(1) / rounded.qparams.scale)
            source = self.names[node]
            if other:
                source = self.reshape(source, dims, self.fresh(rounded.name))
            self.integer_blobs[blob] = self.layer("Quantize", [source], blob, {0: 1}, [scale])
        return blob

    def _dequantized(self, node: Node) -> str:
        """Returns the blob with the dequantized integers of a rounded node."""
        assert isinstance(node, TensorNode)
        rounded = self.rounded[node]
        blob = f"{rounded.name}_dq"
        if blob not in self.integer_blobs:
            cast = self.layer("Cast", [self.integer_blob(node)], self.fresh(rounded.name), {0: 3, 1: 1})
            product = {0: 2, 1: 1, 2: float(rounded.qparams.scale)}
            self.integer_blobs[blob] = self.layer("BinaryOp", [cast], blob, product)
        return blob

    def layer(
        self,
        kind: str,
        bottoms: Sequence[str],
        top: str,
        params: dict[int, Any] | None = None,
        weights: Sequence[bytes] = (),
    ) -> str:
        """Adds a layer with one output and returns the output's name."""
        self.layers.append(NcnnLayer(kind, list(bottoms), [top], params or {}, list(weights)))
        return top

    def emit(
        self,
        kind: str,
        call: OpCall,
        params: dict[int, Any],
        weights: Sequence[bytes] = (),
        bottoms: Sequence[str] = (),
        everywhere: bool = False,
    ) -> None:
        """Adds a layer that computes an op; without ``bottoms``, it reads the first input of the op.

        Args:
            kind: the kind of the layer.
            call: the op.
            params: its parameters, by ncnn's numbers.
            weights: its parts of the ``.bin``.
            bottoms: the blobs that it reads.
            everywhere: whether it computes the same wherever the samples are, as functions of each value do;
                else the first axis must be the batch.
        """
        if not everywhere:
            self.shape(call.out)
        if len(self.dims(call.out)) > len(_AXES):
            raise _too_many(f"its result has {len(self.dims(call.out))} axes in a sample")
        read = bottoms or [self.name(call.inputs[0])]
        self.names[call.out] = self.layer(kind, read, call.out.name, params, weights)

    def slice(self, source: str, tops: Sequence[str], sizes: Sequence[int], axis: int) -> None:
        """Adds a layer that cuts a blob into parts along an axis."""
        self.layers.append(NcnnLayer("Slice", [source], list(tops), {ARRAY: list(sizes), 1: axis}))

    def memory(self, value: np.ndarray, name: str) -> str:
        """Adds a stored blob, of a shape without the batch."""
        if not 1 <= value.ndim <= len(_AXES):
            raise _too_many(f"{name} has {value.ndim} axes")
        sizes = dict(zip(_AXES[value.ndim - 1], reversed(value.shape), strict=True))
        return self.layer("MemoryData", [], name, sizes, [floats(value)])

    def param(self) -> bytes:
        """Returns the content of the ``.param``."""
        blobs = {top for layer in self.layers for top in layer.tops}
        lines = [_MAGIC, f"{len(self.layers)} {len(blobs)}", *(layer.line() for layer in self.layers)]
        return ("\n".join(lines) + "\n").encode()

    def bin(self) -> bytes:
        """Returns the content of the ``.bin``."""
        return b"".join(part for layer in self.layers for part in layer.weights)


def _too_many(subject: str) -> ExportError:
    return ExportError(f"{subject}, and ncnn has blobs of 1 to 4: join some axes")


def floats(value: Any) -> bytes:
    """Serializes float32 values without a mark of their type."""
    return np.ascontiguousarray(value, np.float32).tobytes()


def tagged(value: np.ndarray) -> bytes:
    """Serializes a float weight with the mark of its type."""
    return struct.pack("<I", 0) + floats(value)


def integers(value: np.ndarray) -> bytes:
    """Serializes an int8 weight with the mark of its type, padded to 4 bytes."""
    data = np.ascontiguousarray(value, np.int8).tobytes()
    return struct.pack("<I", _INT8) + data + b"\0" * (-len(data) % 4)


def scale_of(weight: Weight, count: int) -> np.ndarray:
    """Returns the scale of each of the ``count`` output channels of a weight."""
    return np.broadcast_to(weight.scale.reshape(-1), (count,)).astype(np.float32)


def _text(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return ",".join([str(len(value)), *(_text(v) for v in value)])
    # A number without a point or an exponent is an integer for ncnn.
    return f"{value:.8e}" if isinstance(value, float) else str(int(value))
