"""Layers with as many columns as onnxruntime's kernels for AMX compute right.

On processors with AMX, onnxruntime 1.21 to 1.24 computes the last row of each block of 32 rows wrong. It does
so in the last block of columns, from its 17th on, if that has 17 to 31 (corrected by its pull request 27671).
A convolution is one such product per group, whose columns are its output channels. A matrix product is split
between threads, too, at multiples of 16, so that any rest may be a part of a wrong block.

A layer gets columns of zeros up to the next multiple of 16, and a ``Slice``, or a ``Gather`` after groups,
takes them away after its rounding. The integers of the others stay. A product whose columns do not come
from a stored weight, as of two activations, is kept in float instead. A ``LeakyRelu`` of slope 1 changes no
value, and no kernel of integers reads across it. onnxruntime moves roundings across what only moves values.
So a product that reads or gives moved integers counts, too.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from onnx import helper, numpy_helper

from qtrace.onnxfile import external_data
from qtrace.onnxfile.external_data import load_model
from qtrace.onnxfile.kernels import products_are_wrong
from qtrace.onnxfile.model import OnnxEditor, rename_tensors

WHOLE = "_whole"
"""What stands after the name of a result that has columns of zeros."""
MOVES = {
    *("Reshape", "Transpose", "Squeeze", "Unsqueeze", "Flatten", "Slice", "Identity", "MaxPool", "Gather"),
    "Split",
}
"""What onnxruntime moves roundings across, or leaves out."""

_LOG = logging.getLogger("qtrace")
_TILE, _BLOCK = 16, 32
_FUSED = ("Relu", "Clip")


def choose_columns(model: Any, cures: frozenset[str], amx: bool | None) -> None:
    """Writes whole columns where they are asked for, or needed on this processor.

    Args:
        model: an ONNX model with its tensors; it is changed in place.
        cures: what the file's backend needs, see `Backend.cures`.
        amx: whether they are written; None: if the target's kernels here need them.
    """
    own = "columns" in cures  # onnxruntime's kernels of integers run the file
    if amx is None and not (own and products_are_wrong()):
        if own and (count := _count_odd(model)):
            _LOG.info(
                "layers that onnxruntime 1.21 to 1.24 computes wrong on processors with AMX (Intel's servers "
                f"since 2023): {count}. For those, export with amx=true."
            )
        elif not own and products_are_wrong() and (count := _count_odd(model)):
            _LOG.info(
                f"layers that onnxruntime computes wrong on this processor (AMX): {count}. The file is for "
                "another runtime; to run it in onnxruntime here, export with amx=true."
            )
        return
    if amx is not False and (changed := write_whole_columns(model)) and amx is None:
        _LOG.info(
            "layers that have columns of zeros, or stay in float, since onnxruntime computes them wrong on "
            f"this processor (AMX): {changed}. Elsewhere, or from onnxruntime 1.25 on, export with amx=false."
        )


def has_odd_columns(path: Path) -> bool:
    """Returns whether layers of a file would get more columns: those that AMX's kernels may compute wrong."""
    return write_whole_columns(load_model(path)[0]) > 0


def write_whole_columns(model: Any) -> int:
    """Gives layers on integers as many columns as are right on processors with AMX.

    Args:
        model: an ONNX model with its tensors; it is changed in place.

    Returns:
        The number of layers that were changed.
    """
    graph = _Graph(model)
    changed = sum(graph.widen(node) for node in graph.nodes())
    held = graph.hold(_odd_products(graph))
    graph.drop_copied()
    graph.finish()
    return changed + held


def _count_odd(model: Any) -> int:
    """Returns how many layers `write_whole_columns` would change; changes nothing."""
    graph = _Graph(model)
    layers = sum(graph.plan(node) is not None or graph.is_odd_dynamic(node) for node in graph.nodes())
    return layers + len(_odd_products(graph))


def _odd_products(graph: _Graph) -> list[Any]:
    """Returns the products on integers whose columns may be a part of a wrong block, and are not widened."""
    import onnx

    products = [node for node in graph.nodes() if graph.is_left(node)]
    if not products:
        return []
    inferred = onnx.shape_inference.infer_shapes(external_data.skeleton(graph.model)).graph
    values = (*inferred.value_info, *inferred.input, *inferred.output)
    shapes = {value.name: _sizes(value.type.tensor_type.shape.dim) for value in values}
    shapes |= {name: list(tensor.dims) for name, tensor in graph.stored.items()}
    return [node for node in products if not _is_right(node, *(shapes.get(name) for name in node.input[:2]))]


def _sizes(dims: Any) -> list[int | None]:
    return [dim.dim_value if dim.HasField("dim_value") else None for dim in dims]


def _is_right(node: Any, left: list[int | None] | None, right: list[int | None] | None) -> bool:
    """Whether a product has fewer rows than a block, or columns that fill tiles.

    onnxruntime joins a batch with the rows if the right operand lacks them.
    """
    numbers = {a.name: a.i for a in node.attribute}
    if not right:
        return False
    if node.op_type == "Conv":  # its weight is moved
        groups = numbers.get("group", 1)
        columns = None if right[0] is None else right[0] // groups
        return columns is not None and _wanted("Conv", columns, groups, None) == columns
    columns = right[0 if numbers.get("transB") else -1]
    if columns is not None and _fills(columns):
        return True
    if not left or any(size is None for size in left):
        return False
    sizes = [size or 0 for size in left]
    return (sizes[1] if numbers.get("transA") else math.prod(sizes[:-1])) < _BLOCK


def _fills(columns: int) -> bool:
    return columns <= _TILE or columns % _TILE == 0


class _Graph(OnnxEditor):
    """A model whose layers get more columns.

    Args:
        model: the model.
    """

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.copies: dict[str, str] = {}  # a tensor with more columns -> the tensor without them

    def widen(self, node: Any) -> bool:
        """Gives a layer columns of zeros, if it needs them; returns whether it did."""
        if node.op_type == "MatMulInteger":
            return self._widen_dynamic(node)
        layer = self.plan(node)
        if layer is None:
            return False
        total = layer.pad.groups * layer.pad.columns
        if not (self._grows(node.input[1], total) and self._grows(layer.bias, total)):
            return self.hold([node]) > 0
        self._replace_dequantized(node, 1, layer.weight, layer.pad)
        if layer.bias:
            self._replace_bias(layer.add, list(layer.add.input).index(layer.bias), layer.pad)
        self._cut(layer.last, 1 if node.op_type == "Conv" else -1, layer.pad)
        return True

    def plan(self, node: Any) -> _OddLayer | None:
        """Returns what has to be done for a layer with a stored weight; None if its columns are right."""
        if node.op_type not in ("Conv", "MatMul", "Gemm"):
            return None
        weight = self.dequantized(node.input[1])
        integer = self.stored.get(weight.input[0]) if weight is not None else None
        if integer is None or not self._is_moved(node.input[0]):
            return None
        axis, groups = _axis_and_groups(node, len(integer.dims))
        add, bias = self._bias(node)
        last = self._end_of_kernel(node, add)
        if last is None or len(integer.dims) < 2 or self._is_blocked(weight):
            return None
        columns = integer.dims[axis] // groups
        whole = _wanted(node.op_type, columns, groups, integer)
        if whole == columns:
            return None
        return _OddLayer(weight, add, bias, last, _Padding(axis, groups, columns, whole))

    def _bias(self, node: Any) -> tuple[Any, str]:
        """Returns the node that adds the bias of a layer, and the bias; the layer itself and "" for none."""
        if node.op_type != "MatMul":
            return node, node.input[2] if len(node.input) > 2 else ""
        readers = self.readers.get(node.output[0], [])
        if len(readers) == 1 and readers[0].op_type == "Add" and node.output[0] not in self.output_names:
            other = next((name for name in readers[0].input if name != node.output[0]), "")
            if self.stored_of(other) is not None:
                return readers[0], other
        return node, ""

    def _is_blocked(self, dequantize: Any) -> bool:
        """Whether a weight has scales of blocks, which no kernel of integers multiplies."""
        scale = self.value(dequantize.input[1])
        return scale is None or scale.ndim > 1

    def _grows(self, name: str, columns: int) -> bool:
        """Whether a weight or bias has one number, or one along its last axis, for each column."""
        tensor = self.stored_of(name)
        if not name or tensor is None:
            return not name
        source = self.dequantized(name)
        if source is None:
            return math.prod(tensor.dims) == 1 or tensor.dims[-1] == columns
        numbers = [self.value(other) for other in source.input[1:]]
        return all(n is not None and n.size in (1, columns) for n in numbers)

    def is_left(self, node: Any) -> bool:
        """Whether a node multiplies dequantized values, if they are moved before, and was not widened."""
        if node.op_type not in ("Conv", "MatMul", "Gemm"):
            return False
        direct = self.dequantized(node.input[1])
        if direct is not None and direct.input[0] in self.stored:
            return False  # it was looked at
        if node.op_type == "Conv" and self._end_of_kernel(node, node) is None:
            return False
        return all(self._is_moved(name) for name in node.input[:2])

    def _is_moved(self, name: str) -> bool:
        """Whether a tensor is dequantized, at once or before what only moves values."""
        node = self.producers.get(name)
        while node is not None and node.op_type in MOVES:
            node = self.producers.get(node.input[0])
        return node is not None and node.op_type == "DequantizeLinear"

    def hold(self, nodes: list[Any]) -> int:
        """Keeps products in float; returns how many."""
        for node in nodes:
            self.insert(node.input[0], [node], "LeakyRelu", "_float", alpha=1.0)
        return len(nodes)

    def drop_copied(self) -> None:
        """Drops the weights that no node reads any more; a single copy of one gets its name."""
        self.drop_unread()
        self.refresh()
        free = {*self.copies.values()} - {*self.producers, *self.stored}
        copies: dict[str, list[str]] = {}
        for new, old in self.copies.items():
            copies.setdefault(old, []).append(new)
        names = {new[0]: old for old, new in copies.items() if len(new) == 1 and old in free}
        for node in self.nodes():
            rename_tensors(node, names)
            node.name = names.get(node.name, node.name)
        for tensor in self.graph.initializer:
            tensor.name = names.get(tensor.name, tensor.name)

    def _end_of_kernel(self, node: Any, add: Any) -> Any:
        """Returns the last node of a layer's kernel of integers, after its bias; None if there is none."""
        last = add
        while (
            len(readers := self.readers.get(last.output[0], [])) == 1
            and last.output[0] not in self.output_names
        ):
            if readers[0].op_type == "QuantizeLinear":
                return readers[0]
            if readers[0].op_type in MOVES and node.op_type == "Conv":
                return last  # the rounding after what moves values comes before it
            if readers[0].op_type not in _FUSED:
                break
            last = readers[0]
        return None if node.op_type == "Conv" else add  # products of integers may give floats

    def is_odd_dynamic(self, node: Any) -> bool:
        """Whether a node is a product of integers with a stored weight whose columns may be wrong."""
        weight = self.stored.get(node.input[1]) if node.op_type == "MatMulInteger" else None
        return weight is not None and len(weight.dims) == 2 and not _fills(weight.dims[1])

    def _widen_dynamic(self, node: Any) -> bool:
        """Gives a product of integers whose scale comes from the batch more columns."""
        if not self.is_odd_dynamic(node):
            return False
        weight = self.stored[node.input[1]]
        columns = weight.dims[1]
        pad = _Padding(1, 1, columns, _wanted(node.op_type, columns, 1, weight))
        zero = self.value(node.input[3]) if len(node.input) > 3 else None
        node.input[1] = self._padded(node.input[1], pad, 0 if zero is None else zero.flat[0])
        if zero is not None and zero.size > 1:
            node.input[3] = self._padded(node.input[3], pad.flat(), zero.flat[0])
        self._cut(node, -1, pad)
        return True

    def _replace_dequantized(self, node: Any, index: int, dequantize: Any, pad: _Padding) -> None:
        """Lets an input of a node read a dequantized tensor with more columns."""
        inputs = list(dequantize.input)
        zero = self.value(inputs[2]) if len(inputs) > 2 else None
        inputs[0] = self._padded(inputs[0], pad, 0 if zero is None else zero.flat[0])
        flat = pad.flat()
        for place in range(1, len(inputs)):  # the last scale: a bias keeps the product of two scales
            numbers = self.value(inputs[place])
            if numbers is not None and numbers.size > 1:
                inputs[place] = self._padded(inputs[place], flat, numbers.flat[-1])
        name = self.fresh(f"{dequantize.output[0]}{WHOLE}")
        wide = helper.make_node("DequantizeLinear", inputs, [name], name=name)
        wide.attribute.extend(dequantize.attribute)
        self.add_after(dequantize, wide)
        self.copies[name] = dequantize.output[0]
        node.input[index] = name

    def _replace_bias(self, node: Any, index: int, pad: _Padding) -> None:
        """Gives the bias of a layer more columns, be it stored as floats or dequantized."""
        name = node.input[index]
        if math.prod(self.stored_of(name).dims) == 1:
            return
        dequantize = self.dequantized(name)
        if dequantize is not None:
            self._replace_dequantized(node, index, dequantize, pad.flat())
        else:
            node.input[index] = self._padded(name, pad.flat(), 0)

    def _cut(self, last: Any, axis: int, pad: _Padding) -> None:
        """Takes the columns of zeros away after a node, under the name of its result.

        Integers are taken through a pair of roundings, which onnxruntime leaves out, so that targets and
        checks find no other form of a file.
        """
        name, wide = self.rename_result(last, WHOLE)
        if last.op_type != "QuantizeLinear":
            self.add_after(last, self._cutting(wide, name, axis, pad))
            return
        values, kept, grid = self.fresh(f"{wide}_dq"), self.fresh(f"{name}_kept"), last.input[1:]
        self.add_after(
            last,
            helper.make_node("DequantizeLinear", [wide, *grid], [values], name=values),
            self._cutting(values, kept, axis, pad),
            helper.make_node("QuantizeLinear", [kept, *grid], [name], name=f"{name}_again"),
        )

    def _cutting(self, wide: str, kept: str, axis: int, pad: _Padding) -> Any:
        """Returns the node that keeps the columns of a result that are not new."""
        name = self.fresh(f"{kept}_columns")
        if pad.groups > 1:
            indices = self.store(f"{kept}_indices", pad.kept())
            return helper.make_node("Gather", [wide, indices], [kept], name=name, axis=axis)
        numbers = {"starts": [0], "ends": [pad.columns], "axes": [axis]}
        inputs = [self.store(f"{kept}_{key}", np.array(v, np.int64)) for key, v in numbers.items()]
        return helper.make_node("Slice", [wide, *inputs], [kept], name=name)

    def _padded(self, name: str, pad: _Padding, fill: Any) -> str:
        """Stores a copy of a tensor with more columns; returns its name."""
        array = numpy_helper.to_array(self.stored[name])
        new = self.store(f"{name}{WHOLE}", pad.apply(array, fill))
        self.copies[new] = name
        return new


@dataclass(frozen=True)
class _Padding:
    """Columns of zeros after the columns of each group.

    Attributes:
        axis: the axis of the columns in the weight.
        groups: how many groups of columns there are.
        columns: how many a group has.
        whole: how many it gets.
    """

    axis: int
    groups: int
    columns: int
    whole: int

    def flat(self) -> _Padding:
        """Returns the padding of what has one number, or one row of numbers, for each column."""
        return replace(self, axis=-1)

    def apply(self, array: np.ndarray, fill: Any) -> np.ndarray:
        """Returns an array with more columns."""
        moved = np.moveaxis(array, self.axis, 0)
        grouped = moved.reshape(self.groups, self.columns, *moved.shape[1:])
        new = np.full((self.groups, self.whole - self.columns, *moved.shape[1:]), fill, array.dtype)
        joined = np.concatenate([grouped, new], axis=1).reshape(self.groups * self.whole, *moved.shape[1:])
        return np.ascontiguousarray(np.moveaxis(joined, 0, self.axis))

    def kept(self) -> np.ndarray:
        """Returns the indices of the columns that are not new."""
        return (
            np.arange(self.groups * self.whole)
            .reshape(self.groups, self.whole)[:, : self.columns]
            .reshape(-1)
        )


def _axis_and_groups(node: Any, axes: int) -> tuple[int, int]:
    """Returns the axis of the columns in a weight of so many axes, and the number of groups."""
    numbers = {a.name: a.i for a in node.attribute}
    if node.op_type == "Conv":
        return 0, numbers.get("group", 1)
    return (0 if numbers.get("transB") else axes - 1), 1


def _wanted(kind: str, columns: int, groups: int, weight: Any) -> int:
    """Returns the number of columns that is computed right: no smaller one than there are."""
    whole = -(-columns // _TILE) * _TILE
    if kind != "Conv":
        return columns if _fills(columns) else whole
    if columns % _BLOCK <= _TILE:  # no threads share the columns of a convolution
        return columns
    # Another kernel multiplies signed weights of whole quads of channels.
    quads = weight is not None and groups == 1 and columns % 4 == 0 and weight.dims[1] % 4 == 0
    return columns if quads and weight.data_type == weight.INT8 else whole


@dataclass(frozen=True)
class _OddLayer:
    """A layer on integers that needs columns of zeros.

    Attributes:
        weight: the node that dequantizes its weight.
        add: the node that adds its bias.
        bias: the bias; "" for none.
        last: the last node of its kernel.
        pad: the columns.
    """

    weight: Any
    add: Any
    bias: str
    last: Any
    pad: _Padding
