"""The view of a node that a lowering has: inputs, attributes, and the graph that it adds ops to."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import megengine.functional as F
import numpy as np
from megengine.module import Module

from qtrace.graph.types import TensorNode
from qtrace.importing.onnx.layers import Layers, Refusal
from qtrace.importing.onnx.model import OnnxNode
from qtrace.importing.onnx.values import BatchMultiple, Computed, Sizes, Stored, Value

__all__ = ["Call", "Lowering"]

_REQUIRED = object()


class Call:
    """One node while it is lowered.

    Attributes:
        node: the node.
        values: the values of the node's inputs; None for an input that is left out.
        layers: the graph's modules.
    """

    def __init__(self, node: OnnxNode, values: Sequence[Value | None], layers: Layers) -> None:
        self.node = node
        self.values = values
        self.layers = layers
        self.builder = layers.builder
        self._read: set[str] = set()

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
            Refusal: when it is missing and has no default.
        """
        self._read.add(name)
        value = self.node.attributes.get(name, default)
        if value is _REQUIRED:
            raise Refusal(f"has no attribute {name!r}")
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
            Refusal: when they depend on values or on the batch, or are missing without a default.
        """
        if isinstance(where, str):
            value = self.attribute(where, default)
            return [int(n) for n in value] if isinstance(value, (list, tuple)) else value
        array = self.array(where, default)
        return [int(n) for n in array.reshape(-1)] if isinstance(array, np.ndarray) else array

    def sizes(self, index: int) -> list[int | BatchMultiple]:
        """Returns an input of sizes, in which some may be multiples of the batch.

        Raises:
            Refusal: when it depends on values, or otherwise on the batch.
        """
        value = self.values[index]
        if not isinstance(value, Sizes):
            return list(self.ints(index))
        recorded, more = (array.reshape(-1).tolist() for array in value.arrays)
        return [self.batch_size(first, second) for first, second in zip(recorded, more, strict=True)]

    def batch_size(self, recorded: int, more: int) -> int | BatchMultiple:
        """Returns a size that is ``recorded`` for the recorded batch and ``more`` with one sample more.

        Raises:
            Refusal: when it is no multiple of the batch.
        """
        if recorded == more:
            return int(recorded)
        factor = int(more) - int(recorded)
        if factor * self.layers.batch != recorded:
            raise Refusal(f"needs a size that is {recorded} or {more} depending on the batch: fix the batch")
        return BatchMultiple(factor, int(recorded))

    def tensor(self, index: int) -> TensorNode:
        """Returns the node of an input; stored numbers become a tensor of the module.

        Raises:
            Refusal: when the input is missing, or its values depend on the batch.
        """
        value = self.values[index] if self.has(index) else None
        if isinstance(value, Computed):
            return value.node
        if isinstance(value, Stored):
            return self.layers.tensor(value)
        if isinstance(value, Sizes):
            raise Refusal(
                f"computes with {self.node.inputs[index]!r}, which depends on the batch: fix the batch"
            )
        raise Refusal(f"lacks its input {index}")

    def operand(self, index: int) -> TensorNode | float:
        """Returns an input of an elementwise op: its node, or a float if it is one constant float.

        Raises:
            Refusal: see `tensor`.
        """
        value = self.values[index] if self.has(index) else None
        others = [self.rank(i) for i in range(len(self.values)) if i != index and self.has(i)] or [0]
        if (
            isinstance(value, Stored)
            and value.array.size == 1
            and value.array.dtype.kind == "f"
            and value.array.ndim <= max(others)
            and value.name not in self.layers.grids
            and value.name not in self.layers.learnable
        ):
            return float(value.array.reshape(()))
        return self.tensor(index)

    def dtype(self, index: int) -> np.dtype:
        """Returns the dtype of an input in the file."""
        value = self.values[index]
        if isinstance(value, Stored):
            return value.array.dtype
        if isinstance(value, Sizes):
            return value.arrays[0].dtype
        assert isinstance(value, Computed)
        return value.dtype

    def shape(self, index: int) -> tuple[int, ...]:
        """Returns the recorded shape of an input."""
        return self.shapes(index)[0]

    def shapes(self, index: int) -> tuple[tuple[int, ...], ...]:
        """Returns the shapes of an input: as recorded, and with one sample more if the batch is free."""
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
        """The name of the first output."""
        return self.node.outputs[0]

    def function(
        self, function: Callable[..., Any], *args: Any, name: str | None = None, **kwargs: Any
    ) -> Any:
        """Adds a call of a MegEngine function; the result is named after the node's first output."""
        return self.builder.call_function(function, *args, name=name or self.name, **kwargs)

    def method(self, method: str, *args: Any, name: str | None = None, **kwargs: Any) -> Any:
        """Adds a call of a Tensor's method; the result is named after the node's first output."""
        return self.builder.call_method(method, *args, name=name or self.name, **kwargs)

    def broadcast_shapes(self, *indices: int) -> tuple[tuple[int, ...], ...]:
        """Returns the shapes to which inputs broadcast: as recorded, and with one sample more."""
        pairs = [self.shapes(index) for index in indices]
        probes = max(len(shapes) for shapes in pairs)
        try:
            return tuple(
                np.broadcast_shapes(*(shapes[min(p, len(shapes) - 1)] for shapes in pairs))
                for p in range(probes)
            )
        except ValueError:
            raise Refusal("has inputs that do not broadcast") from None

    def expanded(
        self, node: TensorNode, shapes: Sequence[tuple[int, ...]], name: str | None = None
    ) -> TensorNode:
        """Broadcasts a node, unless it has these shapes already.

        Args:
            node: the node.
            shapes: the shape for the recorded batch, and for one sample more if the batch is free.
            name: the name of the result.
        """
        own = self.builder.shapes(node)
        if all(own[min(p, len(own) - 1)] == tuple(shape) for p, shape in enumerate(shapes)):
            return node
        sizes = [self.batch_size(first, second) for first, second in zip(shapes[0], shapes[-1], strict=True)]
        target = tuple(self.layers.size(size) for size in sizes)
        return self.function(F.broadcast_to, node, target, name=name or f"{node.name}_expanded")

    def module(
        self, module: Module, tensors: Mapping[str, Stored], *args: Any, name: str | None = None
    ) -> TensorNode:
        """Adds a call of a module; see `Layers.module`."""
        return self.layers.module(self.node, module, tensors, args, name or self.name)


Lowering = Callable[[Call], Any]
