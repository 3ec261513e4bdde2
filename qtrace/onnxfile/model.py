"""The graph of an ONNX model: its constants, which node gives a tensor and which read it, and its editor.

Bodies of control flow nodes (If, Loop, Scan) count, too: which tensors of the graph around them they read.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from qtrace.errors import ExportError
from qtrace.onnxfile.external_data import load_model, onnx, read_model

RANDOM_OPS = frozenset(
    ("RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Multinomial", "Bernoulli")
)
"""ONNX's ops whose results are drawn at random in each run."""

MAX_DEPTH = 16
"""The most functions, bodies and sums of sizes inside of each other: Python's stack has room for them."""
MAX_NODES = 50_000
"""The most nodes of a file, with those of a function at each of its calls, and the most runs of a loop."""

_LIMIT = "qtrace_limit_of_"
_OWN_DOMAINS = ("", "ai.onnx")


class OnnxModel:
    """A model with an index of its graph.

    Args:
        model: the model.

    Attributes:
        model: the model.
        graph: its graph.
        stored: name -> constant: an initializer, or the value of a Constant node.
        producers: tensor -> the node that gives it.
        readers: tensor -> the nodes that read it, one entry for each input, and one if bodies read it.
        output_names: the names of the outputs.
    """

    def __init__(self, model: onnx.ModelProto) -> None:
        self.model, self.graph = model, model.graph
        self.refresh()

    def refresh(self) -> None:
        """Reads constants, producers and readers again, after a change of nodes."""
        self.stored: dict[str, onnx.TensorProto] = {tensor.name: tensor for tensor in self.graph.initializer}
        self.producers: dict[str, onnx.NodeProto] = {}
        self.readers: dict[str, list[onnx.NodeProto]] = {}
        self.output_names = {value.name for value in self.graph.output}
        for node in self.nodes():
            self.producers.update((name, node) for name in node.output if name)
            for name in read_names(node):
                self.readers.setdefault(name, []).append(node)
            if node.op_type == "Constant" and not node.domain:
                values = (tensor for a in node.attribute if (tensor := _constant(a)) is not None)
                self.stored.update((node.output[0], tensor) for tensor in values)

    @property
    def opset(self) -> int:
        """The version of ONNX's own operators."""
        return max((e.version for e in self.model.opset_import if e.domain in ("", "ai.onnx")), default=0)

    @property
    def metadata(self) -> dict[str, str]:
        """What the file says of itself: key -> text."""
        return {entry.key: entry.value for entry in self.model.metadata_props}

    @property
    def inputs(self) -> list[onnx.ValueInfoProto]:
        """The inputs without stored tensors, which files of old IR versions list, too."""
        return [value for value in self.graph.input if value.name not in self.stored]

    @property
    def outputs(self) -> list[onnx.ValueInfoProto]:
        """The outputs."""
        return list(self.graph.output)

    def names(self) -> set[str]:
        """Returns the names that tensors and nodes of the graph have."""
        nodes = {node.name for node in self.nodes()}
        return {*self.stored, *self.producers, *self.readers, *nodes, *(v.name for v in self.graph.input)}

    def nodes(self, *kinds: str) -> list[onnx.NodeProto]:
        """Returns the nodes of these types, in order; all nodes without types."""
        return [node for node in self.graph.node if not kinds or node.op_type in kinds]

    def value(self, name: str) -> np.ndarray | None:
        """Returns the value of a constant; None for a computed tensor, and for one that was not loaded.

        Raises:
            ExportError: when the constant is damaged.
        """
        tensor = self.stored.get(name)
        if tensor is None or tensor.data_location == onnx.TensorProto.EXTERNAL:
            return None
        try:
            return np.asarray(onnx.numpy_helper.to_array(tensor))
        except (ValueError, TypeError, KeyError) as error:
            raise ExportError(f"tensor {name!r} cannot be read ({error}): is the file whole?") from error

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Returns tensor -> shape, for those whose sizes the file says."""
        kinds = {
            i.name: i.type.tensor_type for i in (*self.graph.input, *self.outputs, *self.graph.value_info)
        }
        return {
            name: tuple(dim.dim_value for dim in kind.shape.dim)
            for name, kind in kinds.items()
            if kind.HasField("shape") and all(dim.HasField("dim_value") for dim in kind.shape.dim)
        }


class OnnxEditor(OnnxModel):
    """A finished model whose graph is changed in place.

    Nodes are put around those that are there, and are part of the model after `finish`. The index stays as it
    was until it is refreshed. New tensors are stored at once.

    Args:
        model: the model.
    """

    def __init__(self, model: onnx.ModelProto) -> None:
        self.set_nodes(model.graph.node)
        super().__init__(model)
        self._taken = self.names()
        read = {*self.readers, *self.output_names}
        # Their results may be asked for, as the places of a selection are.
        self._idle = {name for node in self.nodes() if read.isdisjoint(node.output) for name in node.output}

    def set_nodes(self, nodes: Iterable[onnx.NodeProto]) -> None:
        """Gives the graph other nodes, in order."""
        self._groups = {id(node): [node] for node in nodes}  # a node -> itself among the new ones around it

    def nodes(self, *kinds: str) -> list[onnx.NodeProto]:
        """Returns the nodes of these types, in order, with those that are new; all nodes without types."""
        nodes = itertools.chain.from_iterable(self._groups.values())
        return [node for node in nodes if not kinds or node.op_type in kinds]

    def fresh(self, name: str) -> str:
        """Returns ``name``, with a number if a tensor or node has it; no other one gets it from now on."""
        numbered = (f"{name}_{number}" for number in itertools.count(1))
        new = next(each for each in itertools.chain([name], numbered) if each not in self._taken)
        self._taken.add(new)
        return new

    def store(self, name: str, value: Any) -> str:
        """Adds a constant with a name like ``name``; returns its name."""
        new = self.fresh(name)
        self.graph.initializer.append(onnx.numpy_helper.from_array(np.asarray(value), new))
        self.stored[new] = self.graph.initializer[-1]
        return new

    def replace(self, node: onnx.NodeProto, *nodes: onnx.NodeProto) -> None:
        """Puts nodes in the place of one of the model, which may be among them."""
        group = self._groups[id(node)]
        place = next(index for index, own in enumerate(group) if own is node)
        group[place : place + 1] = nodes

    def add_after(self, node: onnx.NodeProto, *nodes: onnx.NodeProto) -> None:
        """Puts nodes after one of the model, and after those that were put there before."""
        self._groups[id(node)] += nodes

    def insert(
        self, name: str, readers: Iterable[onnx.NodeProto], op: str, suffix: str, **attributes: Any
    ) -> str:
        """Lets readers of a computed tensor read what a new node makes of it; returns the name of that."""
        new = self.fresh(f"{name}{suffix}")
        self.add_after(self.producers[name], onnx.helper.make_node(op, [name], [new], name=new, **attributes))
        for reader in readers:
            reader.input[:] = [new if read == name else read for read in reader.input]
        return new

    def dequantized(self, name: str) -> Any:
        """Returns the DequantizeLinear that gives a tensor; None if another node does."""
        node = self.producers.get(name)
        return node if node is not None and node.op_type == "DequantizeLinear" else None

    def stored_of(self, name: str) -> Any:
        """Returns the stored tensor that a name is, or is dequantized from; None if it is computed."""
        source = self.dequantized(name)
        return self.stored.get(name if source is None else source.input[0])

    def rename_result(self, node: onnx.NodeProto, suffix: str) -> tuple[str, str]:
        """Gives the first result of a node a new name; returns the old one, now free, and the new one."""
        old = node.output[0]
        node.output[0] = self.fresh(f"{old}{suffix}")
        return old, node.output[0]

    def drop_unread(self, *kinds: str) -> None:
        """Drops the nodes, of these types or all, and the constants that nothing reads any more."""
        read = {*self.output_names, *self._idle}
        for group in reversed(self._groups.values()):
            for node in reversed(group.copy()):
                if (kinds and node.op_type not in kinds) or not read.isdisjoint(node.output):
                    read.update(read_names(node))
                else:
                    group[:] = [own for own in group if own is not node]
        read.update(value.name for value in self.graph.input)
        for index in reversed(range(len(self.graph.initializer))):
            if self.graph.initializer[index].name not in read:
                del self.graph.initializer[index]

    def finish(self) -> None:
        """Writes the nodes."""
        nodes = self.nodes()
        del self.graph.node[:]
        self.graph.node.extend(nodes)


def infer_shapes(model: onnx.ModelProto, sizes: Mapping[str, Sequence[int]], path: Path) -> OnnxModel:
    """Returns a model in which the shapes of all tensors are known that follow from the input shapes.

    Args:
        model: the model; it is changed.
        sizes: input -> shape, for inputs whose sizes the file leaves open; 1 for a batch without.
        path: its file, for messages.

    Raises:
        ExportError: when shapes contradict each other, or a size besides the batch stays open.
    """
    for info in model.graph.input:
        shape = sizes.get(info.name)
        for axis, dim in enumerate(info.type.tensor_type.shape.dim):
            if shape is not None and axis < len(shape):
                dim.dim_value = shape[axis]
            elif not dim.dim_value and axis:
                raise ExportError(f"axis {axis} of input {info.name!r} of {path} is open: give its shape.")
            elif not dim.dim_value:
                dim.dim_value = 1
    for info in (*model.graph.output, *model.graph.value_info):
        info.type.tensor_type.ClearField("shape")
    try:
        return OnnxModel(onnx.shape_inference.infer_shapes(model, data_prop=True))
    except (onnx.shape_inference.InferenceError, ValueError) as error:
        raise ExportError(
            f"the shapes of {path} cannot be inferred: {str(error).splitlines()[0]}."
        ) from error


_CONSTANTS = {
    "value_float": np.float32,
    "value_floats": np.float32,
    "value_int": np.int64,
    "value_ints": np.int64,
}


def _constant(attribute: onnx.AttributeProto) -> onnx.TensorProto | None:
    """Returns the value of an attribute of a Constant node; None for strings and sparse tensors."""
    if attribute.name == "value":
        return attribute.t
    kind = _CONSTANTS.get(attribute.name)
    if kind is None:
        return None
    return onnx.numpy_helper.from_array(np.asarray(onnx.helper.get_attribute_value(attribute), kind))


def bodies_of(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    """Yields the graphs in the attributes of a node."""
    for attribute in node.attribute:
        if attribute.type == onnx.AttributeProto.GRAPH:
            yield attribute.g
        yield from attribute.graphs


def own_operators(graph: onnx.GraphProto) -> Iterator[str]:
    """Yields the kinds of the nodes of a graph and of its bodies that are ONNX's own."""
    for node in graph.node:
        if node.domain in _OWN_DOMAINS:
            yield node.op_type
        for body in bodies_of(node):
            yield from own_operators(body)


def limit_loops(graph: onnx.GraphProto, runs: str = "") -> str:
    """Lets the loops of a graph fail after `MAX_NODES` runs in all, as values may let them run for ever.

    Args:
        graph: the graph or body, which is changed.
        runs: the tensor around a body that counts the runs before it; "" for a graph.

    Returns:
        The tensor that counts the runs after it.
    """
    one, most = f"{_LIMIT}one", f"{_LIMIT}most"
    if not runs:
        runs = f"{_LIMIT}start"
        constants = {runs: 0, one: 1, most: [True] * MAX_NODES}
        graph.initializer.extend(
            onnx.numpy_helper.from_array(np.array(v), name) for name, v in constants.items()
        )
    for node in graph.node:
        loops, branches = (not node.domain and node.op_type == kind for kind in ("Loop", "If"))
        base = f"{_LIMIT}{next(filter(None, node.output), '')}"
        before, after, within = f"{base}_before", f"{base}_after", f"{base}_within"
        count = onnx.helper.make_tensor_value_info(before, onnx.TensorProto.INT64, [])
        for body in bodies_of(node):
            last = limit_loops(body, before if loops else runs)
            count.name = after
            if branches:
                body.node.append(onnx.helper.make_node("Identity", [last], [after]))
                body.output.append(count)
            if loops:
                body.node.append(onnx.helper.make_node("Gather", [most, last], [within], name=base))
                body.node.append(onnx.helper.make_node("And", [body.output[0].name, within], [base]))
                body.node.append(onnx.helper.make_node("Add", [last, one], [after]))
                body.output[0].name = base
                body.output.insert(1, count)
                count.name = before
                body.input.insert(2, count)
                node.input.insert(2, runs)
        if loops or branches:
            runs = f"{base}_runs"
            node.output.insert(0 if loops else len(node.output), runs)
    return runs


def limit_reached(error: Exception) -> str:
    """Says of an error of a runtime that it is the limit of `limit_loops`; "" for another error."""
    return f"its loops run more than {MAX_NODES:,} times" if _LIMIT in str(error) else ""


def read_ending(path: Path) -> Path | bytes:
    """Returns a file whose loops end by `limit_loops`, or its path: without loops, or with large tensors."""
    if "Loop" not in own_operators(read_model(path).graph):
        return path
    model, folder = load_model(path)
    limit_loops(model.graph)
    return path if folder else bytes(model.SerializeToString())


def captured_names(node: onnx.NodeProto) -> list[str]:
    """Returns the tensors of the graph around ``node`` that its bodies read, each once and in order."""
    names = dict.fromkeys(name for body in bodies_of(node) for name in _free_names(body))
    return list(names)


def read_names(node: onnx.NodeProto) -> list[str]:
    """Returns the tensors that a node reads: its inputs, and what its bodies read around it."""
    return [name for name in node.input if name] + captured_names(node)


def rename_tensors(node: onnx.NodeProto, names: Mapping[str, str]) -> None:
    """Renames the inputs and outputs of a node, and what its bodies read around it.

    Args:
        node: the node, which is changed.
        names: old name -> new name; other tensors keep their names.
    """
    for field in (node.input, node.output):
        for index, name in enumerate(field):
            field[index] = names.get(name, name)
    for body in bodies_of(node):
        own = _own_names(body)
        outer = {old: new for old, new in names.items() if old not in own}
        clashing = own & set(outer.values())
        if clashing:  # a tensor inside has the new name of one outside
            taken = own | set(outer.values()) | set(_all_names(body))
            _rename_own(body, {name: _free_name(name, taken) for name in sorted(clashing)})
        for part in body.node:
            rename_tensors(part, outer)
        for value in body.output:
            value.name = outer.get(value.name, value.name)


def _rename_own(body: onnx.GraphProto, names: Mapping[str, str]) -> None:
    for part in body.node:
        rename_tensors(part, names)
    for value in (*body.input, *body.output, *body.initializer, *body.value_info):
        value.name = names.get(value.name, value.name)


def _free_name(base: str, taken: set[str]) -> str:
    count, name = 0, base
    while name in taken:
        count += 1
        name = f"{base}_inner_{count}"
    taken.add(name)
    return name


def _own_names(body: onnx.GraphProto) -> set[str]:
    stored = {tensor.name for tensor in body.initializer}
    stored |= {tensor.values.name for tensor in body.sparse_initializer}
    results = {name for part in body.node for name in part.output if name}
    return stored | results | {value.name for value in body.input}


def _all_names(body: onnx.GraphProto) -> Iterator[str]:
    yield from _own_names(body)
    for part in body.node:
        yield from part.input
        for inner in bodies_of(part):
            yield from _all_names(inner)


def _free_names(body: onnx.GraphProto) -> Iterator[str]:
    own = _own_names(body)
    for part in body.node:
        yield from (name for name in read_names(part) if name not in own)
    yield from (value.name for value in body.output if value.name not in own)
