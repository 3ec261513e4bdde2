"""Collects the layers of one ncnn net and writes them as ``.param`` text and ``.bin`` bytes."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from qtrace.errors import ExportError
from qtrace.export.layer_net import LayerNetWriter
from qtrace.graph.types import Node, TensorNode
from qtrace.ops import OpCall
from qtrace.scheme import QParams

__all__ = ["NcnnLayer", "NcnnWriter", "Weight", "floats", "integers", "scale_of", "tagged"]

_MAGIC = "7767517"
_INT8 = 0x000D4B38


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
            f"qtrace/{name}" if self.kind == "Input" else name,  # the mark of `qtrace.storage.ownership`
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
    """Collects the layers of one ncnn net, whose blobs have no axis for the batch.

    A rounded node keeps its blob from before the rounding. A layer of 8 bits reads its integers. An op that
    only moves values reads the blob, because rounding before or after the move gives the same. Any other op
    reads the dequantized integers.
    """

    runtime = "ncnn"

    def __init__(self, batch: int) -> None:
        super().__init__()
        self.batch = batch
        self.layers: list[NcnnLayer] = []
        self.weights: dict[Node, Weight] = {}
        self.rounded: dict[Node, Rounded] = {}
        self.moving = False
        self.integer_blobs: dict[str, str] = {}

    def shape(self, node: TensorNode) -> list[int]:
        """Returns the shape of a sample.

        Raises:
            ExportError: when the node's first axis is not the batch.
        """
        shape = [int(n) for n in node.shape or ()]
        if len(shape) < 2 or shape[0] != self.batch:
            raise ExportError(
                f"{node.name} has shape {tuple(shape)}, and ncnn computes sample by sample: leave axis 0 to "
                f"the batch of {self.batch}"
            )
        return shape[1:]

    def name(self, node: Any) -> str:
        """Returns the blob that an op reads for ``node``: for a rounded node, the dequantized integers."""
        blob = super().name(node)
        return blob if self.moving or node not in self.rounded else self._dequantized(node)

    def integer_blob(self, node: TensorNode) -> str:
        """Returns the blob with the integers of a rounded node, and adds it when it is first read."""
        rounded = self.rounded[node]
        blob = f"{rounded.name}_int"
        if blob not in self.integer_blobs:
            scale = floats(np.float32(1) / rounded.qparams.scale)
            self.integer_blobs[blob] = self.layer("Quantize", [self.names[node]], blob, {0: 1}, [scale])
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
    ) -> None:
        """Adds a layer that computes an op; without ``bottoms``, it reads the first input of the op."""
        self.shape(call.out)
        read = bottoms or [self.name(call.inputs[0])]
        self.names[call.out] = self.layer(kind, read, call.out.name, params, weights)

    def slice(self, source: str, tops: Sequence[str], sizes: Sequence[int], axis: int) -> None:
        """Adds a layer that cuts a blob into parts along an axis."""
        self.layers.append(NcnnLayer("Slice", [source], list(tops), {-23300: list(sizes), 1: axis}))

    def memory(self, value: np.ndarray, name: str) -> str:
        """Adds a stored blob, of a shape without the batch."""
        if value.ndim not in (1, 2, 3):
            raise ExportError(
                f"ncnn stores blobs of 1 to 3 axes, and {name} has {value.ndim}: drop axes of size 1"
            )
        sizes = dict(zip((0, 1, 2), reversed(value.shape), strict=False))
        return self.layer("MemoryData", [], name, sizes, [floats(value)])

    def param(self) -> bytes:
        """Returns the content of the ``.param``."""
        blobs = {top for layer in self.layers for top in layer.tops}
        lines = [_MAGIC, f"{len(self.layers)} {len(blobs)}", *(layer.line() for layer in self.layers)]
        return ("\n".join(lines) + "\n").encode()

    def bin(self) -> bytes:
        """Returns the content of the ``.bin``."""
        return b"".join(part for layer in self.layers for part in layer.weights)


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
