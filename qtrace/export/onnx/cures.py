"""Forms of a written file that keep runtimes from computing it wrong or slowly: how, and a table of them.

The values of the file stay. Columns of zeros are in ``whole_columns.py``. Poolings get the form that
onnxruntime computes fast: their padding is their own, and they round afterwards. A convolution of integers is
given its padding, too: onnxruntime merges only paddings of floats.

A graph pads before a pooling where both ends of an axis differ, as ``ceil_mode`` has it. A ``Pad``
leaves the layout of convolutions, and lacks an integer kernel between roundings. ONNX's poolings have
paddings of their own at both ends, so that the node is left out.

Integers are pooled fast with the channels last, the layout in which integer convolutions write, and 20 to 40
times as slowly in the plain one. A maximum and a rounding can change places, as rounding keeps the order:
where the pooling reads what a float op or an input gives, it pools floats. The few values that are left are
rounded after it. If nothing stood between, onnxruntime would move that rounding forward again. A maximum of
one tensor, which is a copy, stands there for it. So it would where the places of the largest values are read,
too, and a rounding makes other values the first of the largest.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from onnx import TensorProto, helper, numpy_helper, shape_inference

from qtrace.export.onnx.whole_columns import MOVES, choose_columns
from qtrace.onnxfile.kernels import passes_7_bits
from qtrace.onnxfile.model import OnnxEditor, read_names

_LOWEST = float(np.finfo(np.float32).min)
_UNLIKE_PADS, _KEEPS_PADS = 19, 21
"""The opset from which on onnxruntime 1.23 averages wrong where padding differs at both ends, and the one
from which on it no longer merges such a padding itself."""
_OF_INTEGERS_ALONE = "Conv ConvTranspose Gemm MatMul Add Sub Mul Div Concat"
"""Ops whose integer kernels take no float operand, not even a stored one."""

_LAYERS = ("Conv", "ConvTranspose", "Gemm")
_MERGED = {*MOVES, "Relu", "Clip", "Add", "Sub", "Mul", "Div", "BatchNormalization", "Dropout", "Cast"}
"""What onnxruntime merges into a layer or a rounding after it, leaves out, or moves roundings across."""
_IN_FRONT = {*_MERGED, "Pad"}
"""What may vanish between a DequantizeLinear and a layer."""
_ROUNDINGS = ("QuantizeLinear", "DequantizeLinear")
_READS_WEIGHT = ("DequantizeLinear", "MatMulInteger")  # as the first operand, and as the second
_MOVED_ALONG = ("Add", "Sub", "Mul", "Div", "Identity")
"""What OpenVINO moves the scale after a convolution across."""


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
        dequantize = self.dequantized(name)
        quantize = None if dequantize is None else self.producers.get(dequantize.input[0])
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
        return all(graph.dequantized(name) for name in data)
    data = [name for name in node.input[:2] if name]
    return any(graph.dequantized(name) for name in data if name not in graph.stored)


def hold_float_layers(model: Any) -> int:
    """Keeps layers with float weights in float where onnxruntime would round their weights.

    It does so with one scale for all of a weight, where the layer reads dequantized values and its result is
    quantized at once. Neither the placement nor the user wanted integers there. A ``LeakyRelu`` of slope 1
    after the layer changes no value and keeps it in float. Where nothing else reads the result, onnxruntime
    computes it in the kernel of a convolution or a ``Gemm``. A ``MatMul`` and the ``Add`` of a stored bias
    become a ``Gemm`` before.

    Args:
        model: an ONNX model with its tensors; it is changed in place.

    Returns:
        The number of layers.
    """
    editor = OnnxEditor(model)
    readers, stored, count = editor.readers, _constants(editor), 0
    for node in editor.nodes():
        last = _last_node(node, readers, stored)
        if last is not None and _reads_rounded(node, editor.producers, stored) and _is_rounded(last, readers):
            name = last.output[0]
            editor.insert(name, readers.get(name, ()), "LeakyRelu", "_float", alpha=1.0)
            count += 1
    editor.finish()
    return count


def _constants(editor: OnnxEditor) -> set[str]:
    """Returns the names of tensors that depend on no input and that no DequantizeLinear gives."""
    stored = set(editor.stored)
    for node in editor.nodes():
        if node.op_type != "DequantizeLinear" and all(name in stored for name in read_names(node)):
            stored.update(node.output)
    return stored


def _last_node(node: Any, readers: Mapping[str, list[Any]], stored: set[str]) -> Any:
    """Returns the node that gives the result of a layer with a float weight; None where there is none."""
    if node.op_type in _LAYERS and node.input[1] in stored:
        return node
    if node.op_type == "MatMul" and node.input[1] in stored:
        adds = [n for n in readers.get(node.output[0], ()) if n.op_type == "Add"]
        return next((n for n in adds if not stored.isdisjoint(n.input)), None)
    return None


def _reads_rounded(layer: Any, producers: Mapping[str, Any], stored: set[str]) -> bool:
    """Whether a layer reads dequantized values, at once or through what moves them or may vanish."""
    node = producers.get(layer.input[0])
    while node is not None and node.op_type in _IN_FRONT:
        computed = [name for name in node.input if name and name not in stored]
        node = producers.get(computed[0]) if len(computed) == 1 else None
    return node is not None and node.op_type == "DequantizeLinear"


def _is_rounded(layer: Any, readers: Mapping[str, list[Any]]) -> bool:
    """Whether a reader of a layer's result quantizes it, at once or after what merges with one of them."""
    waiting, seen = [layer.output[0]], {layer.output[0]}
    while waiting:
        for node in readers.get(waiting.pop(), ()):
            if node.op_type == "QuantizeLinear":
                return True
            if node.op_type in _MERGED:
                new = [output for output in node.output if output not in seen]
                seen.update(new)
                waiting += new
    return False


def hold_forked_layers(model: Any) -> int:
    """Lets the readers of convolutions without bias read a ``LeakyRelu`` of slope 1, where they are several.

    OpenVINO moves the scale after a convolution on integers towards the next rounding. It happens if the
    sizes of the file are open, the convolution lacks a bias, and two ops read its result. One of them reads
    it up to a rounding, and gets 0 everywhere. A bias of zeros is left out before, and a product or a sum
    with a constant moves along. The ``LeakyRelu`` changes no value, is part of the convolution's kernel, and
    keeps the scale where it is.

    Args:
        model: an ONNX model with its tensors; it is changed in place.

    Returns:
        The number of convolutions.
    """
    if not any(_is_open(value) for value in model.graph.input):
        return 0
    editor, count = OnnxEditor(model), 0
    for node in editor.nodes("Conv"):
        if _is_on_integers(node, editor) and _forks(node.output[0], editor):
            old, new = editor.rename_result(node, "_held")
            editor.add_after(node, helper.make_node("LeakyRelu", [new], [old], name=new, alpha=1.0))
            count += 1
    editor.finish()
    return count


def _is_open(value: Any) -> bool:
    """Whether a size of an input is open."""
    return any(not size.HasField("dim_value") for size in value.type.tensor_type.shape.dim)


def _is_on_integers(layer: Any, editor: OnnxEditor) -> bool:
    """Whether a convolution reads dequantized values and weights, and adds nothing."""
    if not all(editor.dequantized(name) for name in layer.input[:2]):
        return False
    return len(layer.input) < 3 or not layer.input[2] or _is_zero(layer.input[2], editor)


def _is_zero(name: str, editor: OnnxEditor) -> bool:
    """Whether a bias is 0 everywhere."""
    bias = editor.stored_of(name)
    return bias is not None and not np.any(numpy_helper.to_array(bias))


def _forks(name: str, editor: OnnxEditor) -> bool:
    """Whether several ops read a value, as it is or after a product or a sum with a constant."""
    while True:
        readers = editor.readers.get(name, [])
        if len(readers) + (name in editor.output_names) != 1:
            return len(readers) > 0
        if not readers or readers[0].op_type not in _MOVED_ALONG:
            return False
        others = [other for other in readers[0].input if other != name]
        if any(other not in editor.stored for other in others):
            return False
        name = readers[0].output[0]


def write_biases_apart(model: Any) -> int:
    """Takes the stored biases of convolutions out of them, if the model reads a shape.

    OpenVINO computes a convolution with a bias, whose result is rounded, wrong if the batch is open. Its size
    is then part of the shape of an ``Expand`` or ``Tile``, or the end of a ``Range``, anywhere in the file.
    It adds one number, the largest bias, to all channels. A bias that an ``Add`` after the convolution adds,
    in the shape of the result, is right, and joins the same kernel. Transposed convolutions and products are
    right.

    Args:
        model: an ONNX model with all of its tensors; it is changed in place.

    Returns:
        The number of convolutions.
    """
    editor, count = OnnxEditor(model), 0
    if not editor.nodes("Shape"):
        return 0
    readers = editor.readers
    stored = {tensor.name: tensor for tensor in model.graph.initializer}  # only these get another shape
    for bias in list(readers):
        source = editor.dequantized(bias)
        tensor = stored.get(bias if source is None else source.input[0])
        layers = readers[bias]
        if tensor is None or len(tensor.dims) != 1 or (source is not None and len(readers[tensor.name]) > 1):
            continue
        ranks = {_rank_of_weight(layer, bias, editor) for layer in layers}
        rank = ranks.pop()
        if ranks or rank is None:
            continue
        # One axis for each of the result, the second of which counts the channels.
        tensor.dims[:] = [1, tensor.dims[0], *[1] * (rank - 2)]
        if source is not None:
            del source.attribute[:]
            source.attribute.append(helper.make_attribute("axis", 1))
        for layer in layers:
            del layer.input[2:]
            result, new = editor.rename_result(layer, "_without_bias")
            editor.add_after(layer, helper.make_node("Add", [new, bias], [result], name=f"{result}_Add"))
            count += 1
    editor.finish()
    return count


def _rank_of_weight(node: Any, bias: str, editor: OnnxEditor) -> int | None:
    """Returns the number of axes of a convolution's weight; None if ``bias`` is no bias of ``node``."""
    if node.op_type != "Conv" or list(node.input).index(bias) != 2:
        return None
    weight = editor.stored_of(node.input[1])
    return None if weight is None else len(weight.dims)


class UnsignedWeights(OnnxEditor):
    """The weights of a model, of which int8 ones become uint8 with zero point 128: the same numbers.

    Without VNNI instructions, x86 processors multiply uint8 activations by int8 weights with ``vpmaddubsw``,
    which adds two neighbouring products in 16 bits and saturates: ``255 * 127 + 255 * 127`` becomes 32767.
    uint8 weights take a kernel that adds in 32 bits (onnxruntime, "Quantize ONNX models", "Data type
    selection"). Integers up to 64 need no other type: ``255 * 64 + 255 * 64`` fits. OpenVINO's kernels
    saturate, too, except for depthwise convolutions.

    Args:
        model: an ONNX model with all of its tensors, in which only weights are int8; it is changed in place.
    """

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self._changed: set[str] = set()  # the weights that are uint8 now

    def after_joined_rows(self) -> set[str]:
        """Returns the dequantized weights of the products that read rows which a concat joins.

        OpenVINO's plugin takes the rows of a concat along axis 1 for channels, and then refuses a product of
        them with int8 weights: "[MatMulTransformation] ... cannot be broadcasted".
        """
        weights: dict[str, set[str]] = {}  # what a concat joins -> the weights that it is multiplied by
        for node in self.nodes("MatMul"):
            rows = node.input[0]
            while (before := self.producers.get(rows)) and before.op_type in _ROUNDINGS:
                rows = before.input[0]
            if before is not None and before.op_type == "Concat":
                weights.setdefault(rows, set()).add(node.input[1])
        if not weights:
            return set()
        inferred = shape_inference.infer_shapes(self.model).graph.value_info
        ranks = {value.name: len(value.type.tensor_type.shape.dim) for value in inferred}
        ranks = {rows: rank for rows, rank in ranks.items() if rows in weights and rank > 2}
        joined = (rows for rows, rank in ranks.items() if self.producers[rows].attribute[0].i % rank == 1)
        return {name for rows in joined for name in weights[rows]}

    def saturating(self, depthwise: bool) -> set[str]:
        """Returns the dequantized int8 weights of which two products may not fit into 16 bits.

        Args:
            depthwise: whether depthwise convolutions count.
        """
        safe = {name for name, tensor in self.stored.items() if not passes_7_bits(tensor)}
        integers = {n.output[0]: n.input[0] for n in self.nodes("DequantizeLinear")}
        for node in () if depthwise else self.nodes("Conv"):
            weight = integers.get(node.input[1], "")
            if weight in self.stored and _is_depthwise(node, self.stored[weight].dims):
                safe.add(weight)
        return {name for name, integer in integers.items() if integer not in safe}

    def saturating_products(self) -> set[str]:
        """Returns the results of MatMulInteger whose int8 weights may not fit into 16 bits two by two."""
        products = ((node.output[0], self.stored.get(node.input[1])) for node in self.nodes("MatMulInteger"))
        return {name for name, weight in products if weight is not None and passes_7_bits(weight)}

    def write(self, chosen: Collection[str] | None = None) -> int:
        """Stores weights as uint8; those that the file computes are rounded to uint8 there.

        Args:
            chosen: the dequantized weights that are stored so, and the results of MatMulInteger whose weights
                are; None for all.

        Returns:
            The number of weights that were changed.
        """
        if chosen is not None:
            chosen = {*chosen, *(n.input[0] for n in self.nodes(*_READS_WEIGHT) if n.output[0] in chosen)}
        for node in self.nodes("QuantizeLinear", *_READS_WEIGHT):
            if chosen is not None and node.output[0] not in chosen:
                continue
            zero = self.stored.get(next(iter(node.input[2:]), ""))
            if node.op_type != "QuantizeLinear":
                self._change_stored(node)
            elif _is_int8(zero) and self._is_weight(node.output[0], "DequantizeLinear"):
                self._give_zero_point(node, 2)
                self._changed.add(node.output[0])
        self.drop_unread()
        self.finish()
        return len(self._changed)

    def _is_weight(self, name: str, kind: str) -> bool:
        """Whether only nodes of a type read a tensor."""
        return {node.op_type for node in self.readers.get(name, ())} == {kind}

    def _change_stored(self, node: Any) -> None:
        """Changes the weight that a node reads, if it is stored as int8 or rounded in the file."""
        place = _READS_WEIGHT.index(node.op_type)
        name = node.input[place]
        weight: Any = self.stored.get(name)
        if _is_int8(weight) and self._is_weight(name, node.op_type):
            weight.CopyFrom(numpy_helper.from_array(_shifted(numpy_helper.to_array(weight)), name))
            self._changed.add(name)
        if name in self._changed:
            self._give_zero_point(node, place + 2)

    def _give_zero_point(self, node: Any, place: int) -> None:
        """Gives ``node`` the zero point of uint8 in the place of its own, which is 0 if it is absent."""
        old = self.value(node.input[place]) if len(node.input) > place else None
        if old is None:
            old = np.zeros(tuple(self.stored[node.input[1]].dims) if place == 2 else (), np.int8)
        new = self.store(f"{node.output[0]}_zero_point_uint8", _shifted(old))
        node.input[:] = [*node.input[:place], new]


def _is_int8(tensor: Any) -> bool:
    return tensor is not None and tensor.data_type == TensorProto.INT8


def _is_depthwise(conv: Any, shape: Sequence[int]) -> bool:
    groups = next((a.i for a in conv.attribute if a.name == "group"), 1)
    return groups > 1 and shape[1] == 1


def _shifted(values: np.ndarray) -> np.ndarray:
    return (values.astype(np.int16) + 128).astype(np.uint8)


@dataclass(frozen=True)
class RuntimeCure:
    """How files are kept from what a runtime computes wrong, or slowly.

    Attributes:
        runtime: the runtime.
        versions: those in which it was seen.
        name: what `Backend.cures` has if files get it; "" for all files.
        pattern: what the runtime does.
        evidence: what shows it; the name of a test does so on each run.
        expires: when the cure goes.
        write: changes a model, for the cures of a target and the choice of ``amx``.
        after: what is written before: "types" of weights, or "floats" in float16.
    """

    runtime: str
    versions: str
    name: str
    pattern: str
    evidence: str
    expires: str
    write: Callable[[Any, frozenset[str], bool | None], object]
    after: str = ""


CURES = (
    RuntimeCure(
        "onnxruntime",
        "1.23",
        "",
        "it pools integers slowly, and from opset 19 on averages wrong where padding differs at both ends",
        "tests/export/onnx/test_fast_poolings.py",
        "when it pools integers as fast as floats",
        lambda model, cures, _: write_fast_poolings(model, in_onnxruntime="float_maxima" in cures),
    ),
    RuntimeCure(
        "onnxruntime",
        "1.23",
        "held_floats",
        "it rounds float weights to int8 by itself (WeightBiasQuantization)",
        "tests/export/onnx/test_float_layers.py",
        "when it leaves float weights as they are",
        lambda model, *_: hold_float_layers(model),
    ),
    RuntimeCure(
        "openvino",
        "2026.4.1",
        "held_forks",
        "it computes a convolution on integers whose result two ops read as 0",
        "tests/export/onnx/test_forked_layers.py",
        "when that test finds the plain file right",
        lambda model, *_: hold_forked_layers(model),
    ),
    RuntimeCure(
        "onnxruntime",
        "1.21 to 1.24",
        "",
        "it computes some columns of integers wrong on processors with AMX",
        "https://github.com/microsoft/onnxruntime/pull/27671",
        "when qtrace needs onnxruntime 1.25",
        choose_columns,
        after="types",
    ),
    RuntimeCure(
        "openvino",
        "2026.4.1",
        "biases_apart",
        "it adds the largest bias to all channels where the file computes with the size of a batch",
        "tests/export/test_biases_apart.py",
        "when it adds each channel's own",
        lambda model, *_: write_biases_apart(model),
        after="floats",  # the sum takes the name of the layer's result
    ),
)


def cure(model: Any, cures: frozenset[str], amx: bool | None, after: str = "") -> None:
    """Applies the cures for a target.

    Args:
        model: an ONNX model with its tensors; it is changed in place.
        cures: what the file's backend needs, see `Backend.cures`.
        amx: see `choose_columns`.
        after: what was written before.
    """
    for row in CURES:
        if row.after == after and (not row.name or row.name in cures):
            row.write(model, cures, amx)
