"""Poolings in the form that onnxruntime computes fast: their padding is their own, and they round afterwards.

A convolution of integers is given its padding, too: onnxruntime merges only paddings of floats.

A graph pads before a pooling where both ends of an axis differ, as ``ceil_mode`` has it. A ``Pad``
leaves the layout of convolutions, and lacks an integer kernel between roundings. ONNX's poolings have
paddings of their own at both ends, so that the node is left out.

Integers are pooled fast with the channels last, the layout in which integer convolutions write, and 20 to 40
times as slowly in the plain one. A maximum and a rounding can change places, as rounding keeps the order:
where the pooling reads what a float op or an input gives, it pools floats. The few values that are left
are rounded after it. onnxruntime would move that rounding forward again if nothing stood between: for
it, a maximum of one tensor does, which is a copy. So it would where the places of the largest values are
read, too, and a rounding makes other values the first of the largest.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from onnx import helper

from qtrace.onnxfile.model import OnnxEditor

__all__ = ["write_fast_poolings"]

_LOWEST = float(np.finfo(np.float32).min)
_UNLIKE_PADS, _KEEPS_PADS = 19, 21
"""The opset from which on onnxruntime 1.23 averages wrong where padding differs at both ends, and the one
from which on it no longer merges such a padding itself."""
_OF_INTEGERS_ALONE = "Conv ConvTranspose Gemm MatMul Add Sub Mul Div Concat"
"""Ops whose integer kernels take no float operand, not even a stored one."""


def write_fast_poolings(model: Any, in_onnxruntime: bool = False) -> int:
    """Merges paddings into the poolings that are their only readers, and rounds after poolings of floats.

    The file computes the same values. A padding before max pooling is merged if no value is below its
    number, and one before average pooling if it is 0 and counts.

    Args:
        model: an ONNX model with its tensors; it is changed in place.
        in_onnxruntime: whether onnxruntime runs the file, which is kept from rounding before a pooling.
            A pooling of floats is then worth its rounding even if others read the integers before it.
            Paddings with zeros become paddings of convolutions, too.

    Returns:
        The number of poolings and convolutions that were changed.
    """
    if {"MaxPool", "Pad"}.isdisjoint(node.op_type for node in model.graph.node):
        return 0
    graph = _Graph(model)
    changed = 0
    kinds = ("MaxPool", "AveragePool", *(("Conv",) if in_onnxruntime else ()))
    for node in graph.nodes(*kinds):
        merged = _merge_padding(graph, node)
        moved = node.op_type == "MaxPool" and _round_behind(graph, node, in_onnxruntime)
        apart = in_onnxruntime and node.op_type == "MaxPool" and _keep_places(graph, node)
        changed += merged or moved or apart
    if changed:
        graph.drop_unread()
        graph.finish()
    return changed


@dataclass(frozen=True)
class _Rounding:
    """A QuantizeLinear and the DequantizeLinear after it."""

    quantize: Any
    dequantize: Any

    @property
    def source(self) -> str:
        return str(self.quantize.input[0])


class _Graph(OnnxEditor):
    """A model in which poolings read other tensors."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.input_names = {value.name for value in self.inputs}
        self._copies: dict[str, str] = {}  # a copy -> the tensor that it was made of

    def read_once(self, name: str) -> bool:
        """Whether only one node reads a tensor, and the file does not give it."""
        return len(self.readers.get(name, ())) == 1 and name not in self.output_names

    def rounding(self, name: str) -> _Rounding | None:
        """Returns the rounding that gives a tensor; None if no rounding does."""
        dequantize = self.producers.get(name)
        if dequantize is None or dequantize.op_type != "DequantizeLinear":
            return None
        quantize = self.producers.get(dequantize.input[0])
        if quantize is None or quantize.op_type != "QuantizeLinear" or not self._alike(quantize, dequantize):
            return None
        return _Rounding(quantize, dequantize)

    def _alike(self, first: Any, second: Any) -> bool:
        """Whether two nodes round by the same scale and zero point."""
        pairs = zip(first.input[1:], second.input[1:], strict=False)
        values = [(self.value(a), self.value(b), a == b) for a, b in pairs]
        return len(first.input) == len(second.input) and all(
            same or (a is not None and b is not None and a.dtype == b.dtype and np.array_equal(a, b))
            for a, b, same in values
        )

    def same_rounding(self, first: _Rounding, second: _Rounding) -> bool:
        """Whether two roundings have the same grid, one for the whole tensor."""
        scale = self.value(first.quantize.input[1])
        return scale is not None and scale.size == 1 and self._alike(first.quantize, second.quantize)

    def lowest(self, name: str) -> float:
        """Returns a number that no value of a tensor is below."""
        rounding = self.rounding(name)
        scale, zero = (None, None) if rounding is None else map(self.value, rounding.quantize.input[1:3])
        if scale is None or zero is None or scale.size != 1:
            return _LOWEST
        return float(np.float32(int(np.iinfo(zero.dtype).min) - int(zero)) * np.float32(scale))

    def readers_of(self, name: str) -> list[Any]:
        """Returns the nodes that read a tensor, in their bodies, too."""
        return list({id(node): node for node in self.readers.get(name, ())}.values())

    def read(self, node: Any, name: str) -> None:
        """Lets ``node`` read another tensor as its first operand."""
        before = self.readers[node.input[0]]
        before.remove(node)
        self.readers.setdefault(name, []).append(node)
        node.input[0] = name

    def hold(self, name: str, readers: Iterable[Any]) -> None:
        """Lets ``readers`` read a copy of a tensor, which onnxruntime moves no rounding across."""
        self._copies[self.insert(name, readers, "Max", "_pooled")] = name

    def uncopied(self, name: str) -> str:
        """Returns the tensor that a copy was made of; the tensor itself if it is none."""
        return self._copies.get(name, name)


def _merge_padding(graph: _Graph, pool: Any) -> bool:
    """Makes the padding that a pooling or convolution reads its own; returns whether the graph has changed.

    Where the runtime would do so itself, and wrong, a copy stands between.
    """
    between = graph.rounding(pool.input[0])
    name = pool.input[0] if between is None else between.source
    pad = graph.producers.get(name)
    if pad is None or pad.op_type != "Pad" or not graph.read_once(name):
        return False
    if between is not None and not (graph.read_once(pool.input[0]) and _keeps_values(graph, pad, between)):
        return False
    attributes = {a.name: helper.get_attribute_value(a) for a in pool.attribute}
    added = _read_padding(graph, pad, pool, attributes)
    if added is None:
        return False
    own = attributes.get("pads", [0] * len(added))
    if len(own) != len(added):
        return False
    pads = [int(a) + int(b) for a, b in zip(own, added, strict=True)]
    kernel = [*attributes.get("kernel_shape", ())] * 2
    if pool.op_type != "Conv" and any(p >= k for p, k in zip(pads, kernel, strict=True)):
        return False
    if (
        pool.op_type == "AveragePool"
        and graph.opset >= _UNLIKE_PADS
        and pads[: len(pads) // 2] != pads[len(pads) // 2 :]
    ):
        apart = between is None and graph.opset < _KEEPS_PADS
        if apart:
            graph.hold(name, [pool])
        return apart
    changes: dict[str, Any] = {"pads": pads}
    if pool.op_type == "AveragePool":
        changes["count_include_pad"] = 1
    for attribute in [a for a in pool.attribute if a.name in changes]:
        pool.attribute.remove(attribute)
    pool.attribute.extend(helper.make_attribute(key, value) for key, value in changes.items())
    graph.read(pool, pad.input[0])
    return True


def _keeps_values(graph: _Graph, pad: Any, rounding: _Rounding) -> bool:
    """Whether a rounding after a padding changes no value, as they are rounded so before it."""
    before = graph.rounding(pad.input[0])
    return before is not None and graph.same_rounding(before, rounding)


def _read_padding(graph: _Graph, pad: Any, pool: Any, attributes: dict[str, Any]) -> list[int] | None:
    """Returns the numbers that a ``Pad`` adds at the beginning and end of each axis of an image.

    None if the pooling or convolution cannot add them itself.
    """
    mode = next((helper.get_attribute_value(a) for a in pad.attribute if a.name == "mode"), b"constant")
    widths = graph.value(pad.input[1])
    number = graph.value(pad.input[2]) if len(pad.input) > 2 and pad.input[2] else np.zeros((), np.float32)
    if mode != b"constant" or widths is None or number is None or len(pad.input) > 3:
        return None
    sizes = [int(n) for n in widths]
    axes = len(sizes) // 2
    if axes <= 2 or min(sizes) < 0 or any(sizes[i] for i in (0, 1, axes, axes + 1)):
        return None
    if attributes.get("ceil_mode") or attributes.get("auto_pad", b"NOTSET") != b"NOTSET":
        return None
    if pool.op_type != "Conv" and any(d != 1 for d in attributes.get("dilations", ())):
        return None
    if pool.op_type == "Conv":
        fits = float(number) == 0.0
    elif pool.op_type == "MaxPool":
        fits = float(number) <= graph.lowest(pad.input[0])
    else:
        counts = attributes.get("count_include_pad", 0) or not any(attributes.get("pads", ()))
        fits = float(number) == 0.0 and bool(counts)
    return [*sizes[2:axes], *sizes[axes + 2 :]] if fits else None


def _keep_places(graph: _Graph, pool: Any) -> bool:
    """Keeps roundings after a pooling whose places are read, as for an unpooling.

    Before it they would make values equal, and the first of them would be the largest.
    """
    if not _gives_places(pool):
        return False
    rounding = [node for node in graph.readers_of(pool.output[0]) if node.op_type == "QuantizeLinear"]
    if rounding:
        graph.hold(pool.output[0], rounding)
    return bool(rounding)


def _gives_places(pool: Any) -> bool:
    """Whether a max pooling gives the places of the largest values, too."""
    return len(pool.output) > 1 and bool(pool.output[1])


def _round_behind(graph: _Graph, pool: Any, in_onnxruntime: bool) -> bool:
    """Lets max pooling read floats if a float op writes what it reads, and the result is rounded alike."""
    before = graph.rounding(pool.input[0])
    if before is None or graph.rounding(before.source) is not None or _gives_places(pool):
        return False
    alone = graph.read_once(pool.input[0]) and graph.read_once(before.quantize.output[0])
    source = graph.uncopied(before.source)
    origin = graph.producers.get(source)
    if origin is None:
        in_float = in_onnxruntime and source in graph.input_names
    else:
        in_float = (in_onnxruntime or alone) and not _is_integer_op(graph, origin)
    if not in_float:
        return False
    readers = graph.readers_of(pool.output[0])
    if not readers or pool.output[0] in graph.output_names:
        return False
    for reader in readers:
        if reader.op_type != "QuantizeLinear" or not graph.same_rounding(before, _Rounding(reader, reader)):
            return False
    graph.read(pool, source)
    if in_onnxruntime:
        graph.hold(pool.output[0], readers)
    return True


def _is_integer_op(graph: _Graph, node: Any) -> bool:
    """Whether a runtime may compute ``node``, or the layer whose clamp it is, between integers."""
    if node.op_type in ("Relu", "Clip") and node.input[0] in graph.producers:
        node = graph.producers[node.input[0]]
    if node.op_type in _OF_INTEGERS_ALONE.split():
        data = node.input if node.op_type == "Concat" else node.input[:2]
        return all(_is_dequantized(graph, name) for name in data)
    data = [name for name in node.input[:2] if name]
    return any(_is_dequantized(graph, name) for name in data if name not in graph.stored)


def _is_dequantized(graph: _Graph, name: str) -> bool:
    producer = graph.producers.get(name)
    return producer is not None and producer.op_type == "DequantizeLinear"
