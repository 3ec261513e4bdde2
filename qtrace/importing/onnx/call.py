"""The view of a node that a lowering has: inputs, attributes, and the graph that it adds ops to."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn

import megengine.functional as F
import numpy as np
from megengine.module import Module

from qtrace.graph.types import TensorNode
from qtrace.importing.onnx.folding import Size, SizeError, whole
from qtrace.importing.onnx.layers import Contradiction, Layers, Refusal
from qtrace.importing.onnx.model import Computed, OnnxNode, Sizes, Stored, Value, is_float

_REQUIRED = object()
# Op -> the attributes of its older definitions that are its inputs after the first since then.
_MOVED = {
    "Slice": ("starts", "ends", "axes"),
    "Clip": ("min", "max"),
    "Pad": ("pads", "value"),
    **{"Reshape": ("shape",), "Split": ("split",), "TopK": ("k",), "Upsample": ("scales",)},
}


class Call:
    """One node while it is lowered.

    Attributes:
        node: the node.
        values: the values of the inputs, as the newest definition of the op has them; None for an input
            that is left out.
        layers: the graph's modules.
    """

    def __init__(self, node: OnnxNode, values: Sequence[Value | None], layers: Layers) -> None:
        self.node = node
        self.values = values
        self.layers = layers
        self.builder = layers.builder
        self._read: set[str] = set()
        names = _MOVED.get(node.op, ("axes",))
        if len(values) == 1 and any(name in node.attributes for name in names):
            given = [self.attribute(name, None) for name in names]
            moved = (
                None if v is None else Stored(np.asarray(v), n) for n, v in zip(names, given, strict=True)
            )
            self.values = [*values, *moved]

    @property
    def version(self) -> int:
        """The opset in which the op got this definition."""
        return self.node.version

    def refuse(self, reason: str) -> NoReturn:
        """Raises a `Refusal`.

        Args:
            reason: a clause that follows the node's name: "has ceil_mode, ...".
        """
        raise Refusal(reason)

    def contradict(self, reason: str) -> NoReturn:
        """Raises a `Contradiction`.

        Args:
            reason: a clause that follows the node's name.
        """
        raise Contradiction(reason)

    def unread_attributes(self) -> list[str]:
        """Returns the attributes that the lowering did not look at."""
        return [name for name in self.node.attributes if name not in self._read]

    # Inputs and attributes

    def has(self, index: int) -> bool:
        """Returns whether input ``index`` is there."""
        return index < len(self.values) and self.values[index] is not None

    def attribute(self, name: str, default: Any = _REQUIRED) -> Any:
        """Returns an attribute, or its default.

        Raises:
            Refusal: when it is missing without a default.
        """
        self._read.add(name)
        value = self.node.attributes.get(name, default)
        if value is _REQUIRED:
            raise Refusal(f"lacks attribute {name!r}")
        return value

    def stored(self, index: int) -> Stored:
        """Returns an input that must be stored.

        Raises:
            Refusal: when it is computed, or missing.
        """
        value = self.values[index] if self.has(index) else None
        if value is None:
            raise Refusal(f"lacks its input {index}")
        if not isinstance(value, Stored):
            raise Refusal(
                f"computes its input {self.node.inputs[index]!r}, which MegEngine needs as a constant"
            )
        return value

    def array(self, index: int, default: Any = _REQUIRED) -> Any:
        """Returns the values of an input that must be stored, or the default if it is left out.

        Raises:
            Refusal: when it is computed, or missing without a default.
        """
        return default if default is not _REQUIRED and not self.has(index) else self.stored(index).array

    def scalar(self, index: int, default: Any = _REQUIRED) -> Any:
        """Returns the one number of an input that must be stored, as a Python number; see `array`."""
        array = self.array(index, default)
        if not isinstance(array, np.ndarray):
            return array
        if array.size != 1:
            raise Refusal(f"has {array.size} values as its input {self.node.inputs[index]!r}, not one")
        return array.reshape(()).item()

    def ints(self, where: int | str, default: Any = _REQUIRED) -> Any:
        """Returns integers from an input (by position) or an attribute (by name), or the default.

        Raises:
            Refusal: when they depend on values or on open axes, or are missing without a default.
        """
        if isinstance(where, str):
            value = self.attribute(where, default)
            return [int(n) for n in value] if isinstance(value, (list, tuple)) else value
        array = self.array(where, default)
        return [int(n) for n in array.reshape(-1)] if isinstance(array, np.ndarray) else array

    def sizes(self, index: int) -> list[int | Size]:
        """Returns an input of sizes, in which some may depend on open axes.

        Raises:
            Refusal: when it depends on values, or holds fractions.
        """
        value = self.values[index]
        if not isinstance(value, Sizes):
            return list(self.ints(index))
        try:
            return [whole(number) for number in value.numbers.reshape(-1).tolist()]
        except SizeError as error:
            raise Refusal(str(error)) from error

    def size(self, index: int, axis: int) -> int | Size:
        """Returns the size of an axis of an input."""
        value = self.values[index]
        return self.layers.axis(value.node, axis) if isinstance(value, Computed) else self.shape(index)[axis]

    def refuse_open(self, index: int, axes: Iterable[int] | None = None, what: str = "") -> None:
        """Refuses the node if axes of an input are open, whose recorded sizes the lowering reads.

        Args:
            index: the input.
            axes: the axes; None for all.
            what: a clause that says what the node does.

        Raises:
            Refusal: when the size of an axis is open.
        """
        shapes = self.shapes(index)
        for axis in range(len(shapes[0])) if axes is None else axes:
            if len({shape[axis] for shape in shapes}) > 1:
                raise Refusal(
                    f"{what or 'computes with the sizes of its input'}, of which axis {axis} is open"
                )

    def tensor(self, index: int) -> TensorNode:
        """Returns the node of an input; stored numbers become a tensor of the module.

        Raises:
            Refusal: when the input is missing.
        """
        value = self.values[index] if self.has(index) else None
        if isinstance(value, Computed):
            return value.node
        if isinstance(value, Stored):
            return self.layers.tensor(value)
        if isinstance(value, Sizes):
            return self.layers.sizes_tensor(value, self.node.inputs[index])
        raise Refusal(f"lacks its input {index}")

    def operand(self, index: int) -> TensorNode | float:
        """Returns an input of an elementwise op: its node, or a float if it is one constant float.

        Raises:
            Refusal: see `tensor`.
        """
        value = self.values[index] if self.has(index) else None
        if (
            isinstance(value, Stored)
            and value.array.size == 1
            and is_float(value.array.dtype)
            and value.name not in self.layers.grids
            and value.name not in self.layers.learnable
            and self._is_scalar_for_others(index, value.array.ndim)
        ):
            return float(value.array.reshape(()))
        return self.tensor(index)

    def _is_scalar_for_others(self, index: int, rank: int) -> bool:
        """Returns whether an input of ``rank`` axes and one value gives results no axes that others lack."""
        others = (i for i in range(len(self.values)) if i != index and self.has(i))
        return rank == 0 or any(self.rank(i) >= rank for i in others)

    def dtype(self, index: int) -> np.dtype:
        """Returns the dtype of an input in the file."""
        value = self.values[index]
        if isinstance(value, Stored):
            return value.array.dtype
        if isinstance(value, Sizes):
            return value.arrays[0].dtype
        assert isinstance(value, Computed)
        return value.dtype

    def is_float(self, index: int) -> bool:
        """Returns whether an input is of a float type."""
        return is_float(self.dtype(index))

    def shape(self, index: int) -> tuple[int, ...]:
        """Returns the recorded shape of an input."""
        return self.shapes(index)[0]

    def shapes(self, index: int) -> tuple[tuple[int, ...], ...]:
        """Returns the shapes of an input: as recorded, and at other sizes if axes are open."""
        value = self.values[index]
        if isinstance(value, Computed):
            return self.builder.shapes(value.node)
        if isinstance(value, Stored):
            return (value.array.shape,)
        assert isinstance(value, Sizes)
        return (value.arrays[0].shape,)

    def rank(self, index: int) -> int:
        """Returns the number of axes of an input."""
        return len(self.shape(index))

    def axis(self, axis: int, rank: int) -> int:
        """Returns a non-negative axis of a tensor of ``rank`` axes.

        Raises:
            Refusal: when there is no such axis.
        """
        if not -rank <= axis < max(rank, 1):
            raise Refusal(f"names axis {axis} of a tensor with {rank} axes")
        return axis % rank if rank else 0

    # New ops

    @property
    def name(self) -> str:
        """The name of the node's module in the source if it is known, else of the first named output."""
        return self.node.title or next((name for name in self.node.outputs if name), "")

    @property
    def result_names(self) -> list[str]:
        """A name for the node of each output."""
        outputs = list(self.node.outputs)
        return [f"{self.name}.{i}" for i in range(len(outputs))] if self.node.title else outputs

    def function(
        self, function: Callable[..., Any], *args: Any, name: str | None = None, **kwargs: Any
    ) -> Any:
        """Adds a call of a MegEngine function; the result is named after the node's first output."""
        return self.builder.call_function(function, *args, name=name or self.name, **kwargs)

    def method(self, method: str, *args: Any, name: str | None = None, **kwargs: Any) -> Any:
        """Adds a call of a Tensor's method; the result is named after the node's first output."""
        return self.builder.call_method(method, *args, name=name or self.name, **kwargs)

    def expanded(
        self,
        node: TensorNode,
        target: Sequence[int | Size],
        shapes: Sequence[tuple[int, ...]],
        name: str | None = None,
    ) -> TensorNode:
        """Broadcasts a node, unless it has these shapes already.

        Args:
            node: the node.
            target: the sizes.
            shapes: their numbers as recorded, and at other sizes of open axes.
            name: the name of the result.
        """
        own = self.builder.shapes(node)
        if all(own[min(p, len(own) - 1)] == tuple(shape) for p, shape in enumerate(shapes)):
            return node
        sizes = tuple(self.layers.size(size) for size in target)
        return self.function(F.broadcast_to, node, sizes, name=name or f"{node.name}_expanded")

    def common_sizes(
        self, *nodes: TensorNode, but: int = 0
    ) -> tuple[list[int | Size], tuple[tuple[int, ...], ...]]:
        """Returns the sizes to which nodes broadcast, and their numbers for each probe.

        Args:
            *nodes: the nodes.
            but: the number of last axes that are left out.

        Raises:
            Refusal: when the nodes do not broadcast.
        """
        several = [[s[: len(s) - but] for s in self.builder.shapes(node)] for node in nodes]
        probes = max(len(shapes) for shapes in several)
        try:
            shapes = tuple(
                np.broadcast_shapes(*(s[min(p, len(s) - 1)] for s in several)) for p in range(probes)
            )
        except ValueError:
            raise Refusal("has inputs that do not broadcast") from None
        rank, sizes = len(shapes[0]), []
        for place in range(rank):
            numbers = tuple(shape[place] for shape in shapes)
            size: int | Size = numbers[0]
            for node, own in zip(nodes, several, strict=True):
                axis = place - rank + len(own[0])
                if axis >= 0 and tuple(s[axis] for s in own) == numbers:
                    size = self.layers.axis(node, axis)
                    break
            sizes.append(size)
        return sizes, shapes

    def module(
        self, module: Module, tensors: Mapping[str, Stored], *args: Any, name: str | None = None
    ) -> TensorNode:
        """Adds a call of a module; see `Layers.module`."""
        return self.layers.module(self.node, module, tensors, args, name or self.name)


Lowering = Callable[[Call], Any]
