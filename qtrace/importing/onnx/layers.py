"""The modules and stored tensors of a graph that is built from a file."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from megengine.module import Module

from qtrace.graph.builder import GraphBuilder
from qtrace.graph.types import TensorNode
from qtrace.importing.onnx.model import OnnxNode
from qtrace.importing.onnx.naming import ModuleNames, is_anonymous
from qtrace.importing.onnx.values import BatchMultiple, Stored
from qtrace.preparation.passes.given.tensors import GivenGrid

__all__ = ["Layers", "Refusal"]

_INT32 = np.iinfo(np.int32)
_CARRIED = {"float32", "int32", "int16", "int8", "uint8", "bool"}


class Refusal(Exception):
    """A node has no equal in MegEngine; the text says why, as a clause that follows the node's name."""


class Layers:
    """The modules and stored tensors that a graph has so far.

    Args:
        builder: the graph.
        batch: the recorded batch; 1 if none is free.
        source: the input whose axis is the batch, and that axis.

    Attributes:
        grids: name of a stored tensor -> the grid of the integers that it was stored as.
        parameters: path of a parameter -> that grid.
        paths: name of stored integers -> the path of their parameter, where the file says it.
        roundings: the number of roundings of activations.
        learnable: names of single numbers that stay tensors.
        kept: the paths of these tensors.
    """

    def __init__(self, builder: GraphBuilder, batch: int, source: tuple[TensorNode, int] | None) -> None:
        self.grids: dict[str, GivenGrid] = {}
        self.parameters: dict[str, GivenGrid] = {}
        self.paths: dict[str, str] = {}
        self.roundings = 0
        self.learnable: frozenset[str] = frozenset()
        self.kept: set[str] = set()
        self.builder = builder
        self.batch = batch
        self._source = source
        self.names = ModuleNames()
        self._tensors: dict[Any, TensorNode] = {}
        self._modules: dict[Any, str] = {}
        self._sizes: dict[int, TensorNode] = {}  # by the multiple of the batch

    def size(self, size: int | BatchMultiple) -> int | TensorNode:
        """Returns a size as an argument of a MegEngine function; one of the batch is read from the input."""
        if not isinstance(size, BatchMultiple):
            return size
        assert self._source is not None
        if size.factor not in self._sizes:
            batch = self._sizes.setdefault(1, self.builder.size(*self._source))
            if size.factor != 1:
                product = self.builder.call_method("__mul__", batch, size.factor, name="batch_multiple")
                self._sizes[size.factor] = product
        return self._sizes[size.factor]

    def tensor(self, stored: Stored) -> TensorNode:
        """Returns the node of a stored tensor; equal numbers of one name are one node.

        Raises:
            Refusal: when MegEngine has no such tensor.
        """
        array = _carried(stored.array, stored.name)
        key = (_identity(stored), array.dtype.name)
        if key not in self._tensors:
            path = self.names.tensor(stored.name)
            kept = stored.name in self.learnable
            constant = array.size == 1 and is_anonymous(stored.name)
            trainable = kept or (stored.learned and not constant)
            self._tensors[key] = self.builder.parameter(path, array, trainable)
            if kept:
                self.kept.add(path)
            if stored.name in self.grids:
                self.parameters[path] = self.grids[stored.name]
        return self._tensors[key]

    def module(
        self, node: OnnxNode, module: Module, tensors: Mapping[str, Stored], args: Sequence[Any], name: str
    ) -> TensorNode:
        """Calls a module with the stored tensors as its parameters.

        Two nodes with the same tensors and settings call one module.

        Args:
            node: the node of the file.
            module: a new module.
            tensors: name of the parameter -> its values, in the layout of the module.
            args: the arguments of the call.
            name: the name of the result.
        """
        key = (type(module), _settings(module), tuple((k, _identity(t)) for k, t in tensors.items()))
        if key in self._modules and all(tensor.name for tensor in tensors.values()):
            return self.builder.call_module(self._modules[key], None, *args, name=name)
        for attribute, stored in tensors.items():
            parameter = getattr(module, attribute)
            if stored.array.size != math.prod(parameter.shape):
                needed = [int(n) for n in parameter.shape]
                raise Refusal(f"reads {stored.name!r} {list(stored.array.shape)}, where {needed} belongs")
            values = np.ascontiguousarray(_carried(stored.array, stored.name), np.float32)
            parameter._reset(type(parameter)(values.reshape(tuple(int(n) for n in parameter.shape))))
        path = self.names.layer(node, [tensor.name for tensor in tensors.values()])
        self._modules[key] = path
        grids = {f"{path}.{key}": self.grids.get(stored.name) for key, stored in tensors.items()}
        self.parameters.update({name: grid for name, grid in grids.items() if grid is not None})
        return self.builder.call_module(path, module, *args, name=name)


def _identity(stored: Stored) -> Any:
    """Returns a key of a stored tensor; a transposed tensor of the same name has another."""
    return stored.name, stored.array.shape, hash(np.ascontiguousarray(stored.array).tobytes())


def _settings(module: Module) -> tuple[tuple[str, str], ...]:
    """Returns the plain attributes of a module; MegEngine's own text of a Conv1d fails."""
    plain = (bool, int, float, str, tuple, type(None))
    return tuple((name, repr(value)) for name, value in vars(module).items() if isinstance(value, plain))


def _carried(array: np.ndarray, name: str) -> np.ndarray:
    """Returns numbers in a dtype that MegEngine has: int64 as int32.

    Raises:
        Refusal: when MegEngine has no such numbers.
    """
    if array.dtype in (np.int64, np.uint32, np.uint64):
        if array.size and (array.min() < _INT32.min or array.max() > _INT32.max):
            raise Refusal(f"reads {name!r}, whose numbers exceed int32, the largest integers of MegEngine")
        return array.astype(np.int32)
    if array.dtype == np.float16 or array.dtype.name == "bfloat16":
        return array.astype(np.float32)
    if array.dtype.name not in _CARRIED:
        raise Refusal(f"reads {name!r}, which is {array.dtype.name}: MegEngine has no such tensors")
    if array.ndim > 7:
        raise Refusal(f"reads {name!r}, which has {array.ndim} axes: MegEngine's tensors have at most 7")
    return array
