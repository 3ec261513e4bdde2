"""Collects the layers of one ncnn net and writes them as ``.param`` text and ``.bin`` bytes."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from qtrace.errors import ExportError
from qtrace.graph.types import Node, TensorNode
from qtrace.ops import OpCall
from qtrace.scheme import QParams

__all__ = ["Layer", "NcnnWriter", "Weight", "floats", "integers", "scale_of", "stored", "tagged"]

_MAGIC = "7767517"
_INT8 = 0x000D4B38


@dataclass
class Layer:
    """One layer: the numbers of its parameters are ncnn's; ``weights`` is what it reads from the ``.bin``."""

    kind: str
    bottoms: list[str]
    tops: list[str]
    params: dict[int, Any] = field(default_factory=dict)
    weights: list[bytes] = field(default_factory=list)

    def line(self) -> str:
        """Its line in the ``.param``."""
        words = [
            self.kind,
            self.tops[0] if self.tops else f"{self.bottoms[0]}_unused",
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
        value: what the integers stand for.
    """

    integers: np.ndarray
    scale: np.ndarray
    value: np.ndarray


@dataclass(frozen=True)
class Rounded:
    """A node whose value is rounded: ``name`` is the site or the node that carries its integers."""

    name: str
    qparams: QParams


class NcnnWriter:
    """One net in the making. Blobs have the names of the graph's nodes; there is no axis for the batch.

    A node that is rounded keeps the blob from before the rounding: a layer of 8 bits reads its integers, an
    op that only moves values reads that blob, since it does not matter whether it moves before or after
    the rounding, and anything else reads what the integers stand for.
    """

    def __init__(self, batch: int) -> None:
        self.batch = batch
        self.layers: list[Layer] = []
        self.names: dict[Node, str] = {}
        self.values: dict[Node, np.ndarray] = {}
        self.weights: dict[Node, Weight] = {}
        self.rounded: dict[Node, Rounded] = {}
        self.moving = False
        self.made: dict[str, str] = {}
        self.counter = 0

    def shape(self, node: TensorNode) -> list[int]:
        """The shape of a sample.

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

    def value(self, node: Any) -> np.ndarray | None:
        """The value of a parameter or constant, None for what is computed."""
        return self.values.get(node) if isinstance(node, Node) else None

    def name(self, node: Any) -> str:
        """The blob that an op reads for ``node``."""
        if not isinstance(node, Node) or node not in self.names:
            what = node.name if isinstance(node, Node) else repr(node)
            raise ExportError(
                f"{what} is a parameter, a number or a shape, where ncnn takes a blob: "
                "compute it from the input, or end the graph before it"
            )
        if self.moving or node not in self.rounded:
            return self.names[node]
        return self._dequantized(node)

    def integer_blob(self, node: TensorNode) -> str:
        """The blob with the integers of a rounded node; it is made when first asked for."""
        rounded = self.rounded[node]
        blob = f"{rounded.name}_int"
        if blob not in self.made:
            scale = floats(np.float32(1) / rounded.qparams.scale)
            self.made[blob] = self.layer("Quantize", [self.names[node]], blob, {0: 1}, [scale])
        return blob

    def _dequantized(self, node: Node) -> str:
        """The blob with what the integers of a rounded node stand for."""
        assert isinstance(node, TensorNode)
        rounded = self.rounded[node]
        blob = f"{rounded.name}_dq"
        if blob not in self.made:
            cast = self.layer("Cast", [self.integer_blob(node)], self.fresh(rounded.name), {0: 3, 1: 1})
            product = {0: 2, 1: 1, 2: float(rounded.qparams.scale)}
            self.made[blob] = self.layer("BinaryOp", [cast], blob, product)
        return blob

    def fresh(self, base: str) -> str:
        """A name for a step on the way to ``base``."""
        self.counter += 1
        return f"{base}__{self.counter}"

    def layer(
        self,
        kind: str,
        bottoms: Sequence[str],
        top: str,
        params: dict[int, Any] | None = None,
        weights: Sequence[bytes] = (),
    ) -> str:
        """Adds a layer with one output and returns the output's name."""
        self.layers.append(Layer(kind, list(bottoms), [top], params or {}, list(weights)))
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
        self.layers.append(Layer("Slice", [source], list(tops), {-23300: list(sizes), 1: axis}))

    def memory(self, value: np.ndarray, name: str) -> str:
        """Adds a stored blob, of a shape without the batch."""
        if value.ndim not in (1, 2, 3):
            raise ExportError(
                f"ncnn stores blobs of 1 to 3 axes, and {name} has {value.ndim}: drop axes of size 1"
            )
        sizes = dict(zip((0, 1, 2), reversed(value.shape), strict=False))
        return self.layer("MemoryData", [], name, sizes, [floats(value)])

    def param(self) -> bytes:
        """The ``.param``."""
        blobs = {top for layer in self.layers for top in layer.tops}
        lines = [_MAGIC, f"{len(self.layers)} {len(blobs)}", *(layer.line() for layer in self.layers)]
        return ("\n".join(lines) + "\n").encode()

    def bin(self) -> bytes:
        """The ``.bin``."""
        return b"".join(part for layer in self.layers for part in layer.weights)


def floats(value: Any) -> bytes:
    """float32 values, as layers read what they do not ask a type for."""
    return np.ascontiguousarray(value, np.float32).tobytes()


def tagged(value: np.ndarray) -> bytes:
    """A float weight with the mark of its type."""
    return struct.pack("<I", 0) + floats(value)


def integers(value: np.ndarray) -> bytes:
    """An int8 weight with the mark of its type, filled up to 4 bytes."""
    data = np.ascontiguousarray(value, np.int8).tobytes()
    return struct.pack("<I", _INT8) + data + b"\0" * (-len(data) % 4)


def scale_of(weight: Weight, count: int) -> np.ndarray:
    """The scales of a weight's output channels, ``count`` of them."""
    return np.broadcast_to(weight.scale.reshape(-1), (count,)).astype(np.float32)


def stored(w: NcnnWriter, node: Any, what: str) -> np.ndarray:
    """The value of a parameter."""
    value = w.value(node)
    if value is None:
        raise ExportError(f"its {what} is computed, and ncnn stores it in the file: make it a parameter")
    return value


def _text(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return ",".join([str(len(value)), *(_text(v) for v in value)])
    # A number without a point or an exponent is an integer for ncnn.
    return f"{value:.8e}" if isinstance(value, float) else str(int(value))
