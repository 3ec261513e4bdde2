"""The modules, stored tensors and values of a graph that is built from a file."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, Protocol

import megengine.functional as F
import numpy as np
import onnx
from megengine.core.ops.builtin import GetVarShape
from megengine.module import Module

from qtrace.errors import ImportingError
from qtrace.graph.builder import GraphBuilder
from qtrace.graph.kernels import stored_tensor
from qtrace.graph.origin import Move, joined, moved, reshaped_to, undone
from qtrace.graph.types import TensorNode
from qtrace.importing.onnx.folding import Number, Size, SizeError, axis_size, whole
from qtrace.importing.onnx.model import Graph, OnnxNode, Sizes, Stored, Value
from qtrace.importing.onnx.naming import LayerPaths, is_anonymous
from qtrace.onnxfile.external_data import release
from qtrace.preparation.passes.quantized_file import StoredGrid
from qtrace.process import LargeFrees

_INT32 = np.iinfo(np.int32)
_CARRIED = {"float32", "int32", "int16", "int8", "uint8", "bool"}


class Refusal(Exception):
    """MegEngine lacks an equal of a node; the text says why, as a clause that follows the node's name."""


class Contradiction(Refusal):
    """A node contradicts itself or the tensors that it reads, or needs too much memory, in every runtime."""


@dataclass(frozen=True)
class StoredSource:
    """The stored tensor of the file that a parameter was made of.

    Attributes:
        name: the name of the stored tensor.
        shape: the shape of the numbers as the layer reads them from the file.
        moves: what made the parameter of the stored tensor.
    """

    name: str
    shape: tuple[int, ...]
    moves: tuple[Move, ...] = ()


class Layers:
    """The modules and stored tensors that a graph has so far.

    Args:
        builder: the graph.
        source: the input whose axis is the batch, and that axis, if no other axis is open.

    Attributes:
        grids: name of a stored tensor -> the grid of the integers that it was stored as.
        parameters: path of a parameter -> that grid.
        paths: name of stored integers -> the path of their parameter, where the file says it.
        roundings: the number of roundings of activations.
        learnable: names of single numbers that stay tensors.
        kept: the paths of these tensors and of constants of one number, which a composite may take.
        sources: path of a parameter -> the stored tensor that it was made of.
        read: names of the stored tensors that became parameters as they are.
        frozen: names of the learned tensors from which numbers were computed that stay as they are.
        shapes: name of a stored tensor -> its shape in the file.
        frees: gives back the memory of stored tensors that became parameters.
    """

    def __init__(self, builder: GraphBuilder, source: tuple[TensorNode, int] | None = None) -> None:
        self.grids: dict[str, StoredGrid] = {}
        self.parameters: dict[str, StoredGrid] = {}
        self.paths: dict[str, str] = {}
        self.roundings = 0
        self.learnable: frozenset[str] = frozenset()
        self.kept: set[str] = set()
        self.sources: dict[str, StoredSource] = {}
        self.read: set[str] = set()
        self.frozen: set[str] = set()
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.builder = builder
        self._source = source
        self.names = LayerPaths()
        self._tensors: dict[Any, TensorNode] = {}
        self._modules: dict[Any, str] = {}
        self._parameters: dict[str, tuple[str, tuple[Move, ...]]] = {}
        self._sizes: dict[Any, TensorNode] = {}
        self.frees = LargeFrees()

    def axis(self, node: TensorNode, axis: int) -> int | Size:
        """Returns the size of an axis; a multiple of the batch is read from the input."""
        values = tuple(shape[axis] for shape in self.builder.shapes(node))
        size = axis_size(node, axis, values)
        if self._source is None or not isinstance(size, Size):
            return size
        source, place = self._source
        batch = Size("axis", self._source, tuple(shape[place] for shape in self.builder.shapes(source)))
        factor = values[-1] - values[0]
        if factor < 1 or factor * batch.values[0] != values[0]:
            return size
        return batch if factor == 1 else Size("mul", (batch, factor), values)

    def size(self, size: Number) -> int | TensorNode:
        """Returns an integer as an argument of a MegEngine function; a `Size` is computed by the graph.

        Raises:
            Refusal: when the number is no integer.
        """
        try:
            number = whole(size)
        except SizeError as error:
            raise Refusal(str(error)) from error
        return self._computed(number) if isinstance(number, Size) else number

    def _computed(self, size: Size) -> TensorNode:
        key = _size_key(size)
        if key not in self._sizes:
            if size.op == "axis":
                node, axis = size.parts
                shape_key = ("shape", node)
                if shape_key not in self._sizes:
                    self._sizes[shape_key] = self.builder.call_kernel(
                        GetVarShape(), node, name=f"{node._name}_shape"
                    )
                shape = self._sizes[shape_key]
                name = f"{node._name}_size_{axis}"
                self._sizes[key] = self.builder.call_method("__getitem__", shape, axis, name=name)
            else:
                parts = [self._computed(p) if isinstance(p, Size) else p for p in size.parts]
                self._sizes[key] = self._operation(size.op, parts)
        return self._sizes[key]

    def _operation(self, op: str, parts: list[Any]) -> TensorNode:
        if op in ("min", "max"):
            function = F.minimum if op == "min" else F.maximum
            return self.builder.call_function(function, *parts, name="size")
        if not isinstance(parts[0], TensorNode):
            reflected = {"add": "__radd__", "sub": "__rsub__", "mul": "__rmul__"}
            method = reflected.get(op, f"__r{op}__")
            return self.builder.call_method(method, parts[1], parts[0], name="size")
        name = "batch_multiple" if op == "mul" and self._source is not None else "size"
        return self.builder.call_method(f"__{op}__", *parts, name=name)

    def sizes_tensor(self, sizes: Sizes, name: str) -> TensorNode:
        """Returns sizes as an int32 tensor that the graph computes.

        Raises:
            Refusal: when they are no integers, or have several axes.
        """
        numbers = sizes.numbers
        if numbers.ndim > 1 or sizes.arrays[0].dtype.kind not in "iu":
            raise Refusal(f"computes with {name!r}, fractions or a table of sizes of open axes")
        parts = [self.size(number) for number in numbers.reshape(-1).tolist()]
        if numbers.ndim == 0:
            assert isinstance(parts[0], TensorNode)
            return parts[0]
        nodes = [
            part
            if isinstance(part, TensorNode)
            else self.tensor(Stored(np.array(part, np.int32), f"{name}_{index}"))
            for index, part in enumerate(parts)
        ]
        stacked = self.builder.call_function(F.stack, nodes, name=name)
        if tuple(stacked.shape) == numbers.shape:
            return stacked
        # MegEngine stacks numbers that are computed as rows of one number.
        return self.builder.call_function(F.reshape, stacked, (-1,), name=name)

    def tensor(self, stored: Stored) -> TensorNode:
        """Returns the node of a stored tensor; equal numbers of one name are one node.

        Raises:
            Refusal: when MegEngine lacks such a tensor.
        """
        array = _carried(stored.array, stored.name)
        key = (stored.identity, array.dtype.name)
        self.read.add(stored.name)
        if key not in self._tensors and (shared := self.parameter_of(stored)) is not None:
            self._tensors[key] = shared
        if key not in self._tensors:
            path = self.names.tensor(stored.name)
            learned = stored.name in self.learnable
            constant = array.size == 1 and is_anonymous(stored.name)
            trainable = learned or (stored.learned and not constant)
            self._tensors[key] = self.builder.parameter(path, array, trainable)
            release(stored.array)
            self.frees.note(array.nbytes)
            self._note_source(path, stored)
            if stored.learned and array.size > 1:
                self._parameters.setdefault(stored.name, (path, stored.moves))
            if learned or (array.size == 1 and not trainable):
                self.kept.add(path)
            if stored.name in self.grids:
                self.parameters[path] = self.grids[stored.name]
        return self._tensors[key]

    def has_module(self, module: Module, tensors: Mapping[str, Stored]) -> bool:
        """Returns whether a module of the graph has these settings and stored tensors."""
        return _module_key(module, tensors) in self._modules and all(t.name for t in tensors.values())

    def parameter_of(self, stored: Stored) -> TensorNode | None:
        """Returns a stored tensor as a node that reads the parameter made of it; None without one."""
        self.read.add(stored.name)
        path, moves = self._made_of(stored)
        if not path:
            return None
        node: Any = self.builder.attribute(path)
        for kind, numbers in moves:
            name = f"{node.name}_{kind}"
            if kind == "part":
                places = (*[slice(None)] * numbers[0], slice(*numbers[1:]))
                node = self.builder.call_method("__getitem__", node, places, name=name)
            else:
                function = F.transpose if kind == "transpose" else F.reshape
                node = self.builder.call_function(function, node, numbers, name=name)
        return node if isinstance(node, TensorNode) else None

    def owns(self, module: Module, tensors: Mapping[str, Stored]) -> bool:
        """Returns whether a layer may be this module, as no other form of it reads its weight.

        Calls of one quantized layer are modules: each has a bias of its own, on the grid of its input.
        """
        weight = tensors["weight"]
        return self.has_module(module, tensors) or weight.name in self.grids or not self._made_of(weight)[0]

    def _made_of(self, stored: Stored) -> tuple[str, tuple[Move, ...]]:
        """Returns the path of the parameter made of a stored tensor, and what makes the tensor of it.

        Bodies of control flow may have tensors of the same name and other numbers: those have "".
        """
        path, made = self._parameters.get(stored.name, ("", ()))
        back = undone(self.shapes.get(stored.name, ()), made) if path else None
        if back is None or not stored.learned:
            return "", ()
        moves = joined(back, *stored.moves)
        if any(kind == "take" for kind, _ in moves):
            return "", ()
        parameter: Any = functools.reduce(getattr, path.split("."), self.builder.traced)
        try:
            values = moved(parameter.numpy(), moves)
        except ValueError:
            return "", ()
        return (path, moves) if np.array_equal(values, stored.array) else ("", ())

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
        key = _module_key(module, tensors)
        self.read.update(stored.name for stored in tensors.values())
        if self.has_module(module, tensors):
            return self.builder.call_module(self._modules[key], None, *args, name=name)
        for attribute, stored in tensors.items():
            parameter = getattr(module, attribute)
            if stored.array.size != math.prod(parameter.shape):
                needed = [int(n) for n in parameter.shape]
                raise Refusal(f"reads {stored.name!r} {list(stored.array.shape)}, where {needed} belongs")
            values = np.ascontiguousarray(_carried(stored.array, stored.name), np.float32)
            parameter._reset(stored_tensor(values.reshape(tuple(int(n) for n in parameter.shape))))
            release(stored.array)
            self.frees.note(2 * values.nbytes)  # with the random numbers that the module began with
        path = self.names.layer(node, [tensor.name for tensor in tensors.values()])
        self._modules[key] = path
        for attribute, stored in tensors.items():
            self._note_source(f"{path}.{attribute}", stored)
            shape = tuple(int(n) for n in getattr(module, attribute).shape)
            moves = stored.moves if shape == stored.array.shape else (*stored.moves, reshaped_to(shape))
            self._parameters.setdefault(stored.name, (f"{path}.{attribute}", moves))
        grids = {f"{path}.{key}": self.grids.get(stored.name) for key, stored in tensors.items()}
        self.parameters.update({name: grid for name, grid in grids.items() if grid is not None})
        return self.builder.call_module(path, module, *args, name=name)

    def note_frozen(
        self, values: Sequence[Value | None], results: Sequence[Value], read: Set[str] = frozenset()
    ) -> None:
        """Notes the learned tensors of which a node made other numbers: its results bear none of their names.

        Args:
            values: the inputs of the node.
            results: its results.
            read: names of the tensors that became parameters as they are.
        """
        learned = {value.name for value in values if isinstance(value, Stored) and value.learned}
        moved = {result.name for result in results if isinstance(result, Stored) and result.learned}
        self.frozen |= learned - moved - read

    def _note_source(self, path: str, stored: Stored) -> None:
        if stored.name:
            self.sources[path] = StoredSource(stored.name, stored.array.shape, stored.moves)


def _module_key(module: Module, tensors: Mapping[str, Stored]) -> Any:
    return type(module), _settings(module), tuple((k, t.identity) for k, t in tensors.items())


def _size_key(size: Size) -> Any:
    parts = tuple(_size_key(p) if isinstance(p, Size) else p for p in size.parts)
    return size.op, parts


def _settings(module: Module) -> tuple[tuple[str, str], ...]:
    """Returns the plain attributes of a module; MegEngine's own text of a Conv1d fails."""
    plain = (bool, int, float, str, tuple, type(None))
    return tuple((name, repr(value)) for name, value in vars(module).items() if isinstance(value, plain))


def _carried(array: np.ndarray, name: str) -> np.ndarray:
    """Returns numbers in a dtype that MegEngine has: int64 as int32, every float type as float32.

    Raises:
        Refusal: when MegEngine lacks such numbers.
    """
    if array.dtype in (np.int64, np.uint16, np.uint32, np.uint64):
        if array.size and (array.min() < _INT32.min or array.max() > _INT32.max):
            raise Refusal(f"reads {name!r}, whose numbers exceed int32, the largest integers of MegEngine")
        return array.astype(np.int32)
    if array.dtype.name in ("float16", "bfloat16", "float64"):
        return array.astype(np.float32)
    if array.dtype.name not in _CARRIED:
        raise Refusal(f"reads {name!r}, which is {array.dtype.name}: MegEngine lacks such tensors")
    if array.ndim > 7:
        raise Refusal(f"reads {name!r}, which has {array.ndim} axes: MegEngine's tensors have at most 7")
    return array


class Scope:
    """The values that a graph sees: its own, and the values of the graph around it.

    Args:
        values: the values of its inputs and initializers by name.
        outer: the scope around it, for the body of a control flow node.
    """

    def __init__(self, values: dict[str, Value], outer: Scope | None = None) -> None:
        self.values = values
        self.outer = outer

    def __getitem__(self, name: str) -> Value:
        if name in self.values:
            return self.values[name]
        if self.outer is None:
            raise ImportingError(f"{name!r} is read before a node computes it: the file is damaged.")
        return self.outer[name]

    def inner(self, values: dict[str, Value]) -> Scope:
        """Returns the scope of a body inside of this graph."""
        return Scope(values, self)


class GraphRunner(Protocol):
    """What adds the nodes of a graph to the traced graph, for a body that is run once or several times.

    Attributes:
        builder: the graph that is built.
        layers: its layers and parameters.
        written: how many nodes its loops have written out.
    """

    builder: GraphBuilder
    layers: Layers
    written: int

    def subgraph(self, proto: onnx.GraphProto) -> Graph:
        """Reads the body of a control flow node."""

    def run(self, graph: Graph, scope: Scope) -> list[Value]:
        """Adds all nodes of ``graph``; returns what its outputs stand for."""
