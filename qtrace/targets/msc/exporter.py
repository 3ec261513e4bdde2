"""MSCGraph, the graph document of TVM's multi-system compiler: JSON, weights and a prototxt for viewers.

Nodes name their parents, and MSC derives the children from them; tensors are called ``NODE:INDEX``. Weights
and tensors have types and layouts; the values of weights are in a ``.npz`` file by their names. Quantization
parameters are attributes of the nodes: ``qparams_input_0``, ``qparams_output_0``, ``qparams_weight`` and so
on, each a JSON text.

What MSC cannot hold, and the way back (`qtrace.graph.to_traced`) needs, are attributes, too, only where
they say more than the type and the names do: ``scope`` (below ``block``), ``call``, ``stored``,
``roundings`` and ``traced_shape``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from qtrace.errors import ExportError, GraphError
from qtrace.export.converted import ConvertedGraph
from qtrace.export.document import (
    DocumentOp,
    GraphDocument,
    Rounding,
    TensorQuantization,
    Value,
    is_plain,
    read_graph,
)
from qtrace.export.format import Format
from qtrace.export.open_axes import open_axes_of
from qtrace.graph.inference import TensorType, recorded_type
from qtrace.graph.open_axes import BATCH, OpenAxis, infer_types, other_sizes, resize_axes
from qtrace.graph.types import CallFunction, CallMethod, GetAttr, Node, TensorNode
from qtrace.graph.walk import owner, reads_shape
from qtrace.storage.checkpoints import pack_arrays
from qtrace.targets.msc.calls import StoredPlace, default_place, node_digest, same_call, write_call
from qtrace.targets.msc.document import BLOCK, MSCGraph, MSCNode, MSCPrim, MSCTensor
from qtrace.targets.msc.kinds import find_kind, standard_calls

# Tensor method or function -> prim, and how it is computed.
_ARITHMETIC: dict[str, tuple[str, Callable[[int, int], int]]] = {
    "add": ("Add", lambda a, b: a + b),
    "sub": ("Sub", lambda a, b: a - b),
    "mul": ("Mul", lambda a, b: a * b),
    "floordiv": ("FloorDiv", lambda a, b: a // b),
    "mod": ("FloorMod", lambda a, b: a % b),
    "maximum": ("Max", max),
    "minimum": ("Min", min),
}
_FUNCTIONS = {"floor_div": "floordiv"}


class DocumentSizes:
    """The open sizes and the prims of one graph.

    Args:
        graph: the graph.
        free_batch: whether the first axis of every input is open, too.

    Attributes:
        prims: the prims so far: `axes` and `add` add to them.

    Raises:
        ExportError: when the graph does not run at other sizes of its open axes.
    """

    def __init__(self, graph: ConvertedGraph, free_batch: bool) -> None:
        self.prims: list[MSCPrim] = []
        self._values: dict[MSCPrim, tuple[int, ...]] = {}
        self._nodes: dict[Node, MSCPrim] = {}  # the nodes of sizes
        self._vectors: dict[Node, tuple[str, int, Node]] = {}  # the nodes of whole shapes: tensor that has it
        opened = _open_axes(graph, free_batch)
        self._types = [{n: recorded_type(n) for n in (*graph.inputs, *_outputs(graph))}]
        if opened:
            self._infer(graph, opened)
        self._by_name = {graph.inputs.get(node, node.name): node for node in self._types[0]}
        self._is_open = bool(opened)
        for axis in opened:
            node = graph.nodes[axis.input]
            size = self._sizes(node, axis.axis)
            if size not in self._values.values():
                self._shape_prim(graph.inputs[node], 0, axis.axis, size, axis.label)

    def _infer(self, graph: ConvertedGraph, opened: Sequence[OpenAxis]) -> None:
        """Infers the types of all tensors at other sizes of the open axes."""
        shapes = {str(n.name): tuple(int(s) for s in n.shape or ()) for n in graph.inputs}
        for sizes in other_sizes(shapes, opened):
            try:
                self._types.append(infer_types(graph.module, sizes))
            except GraphError as error:
                raise ExportError(f"format msc: the graph does not run at other sizes: {error}") from error
        try:  # sizes that halves and doubles do not give back, if the graph takes them
            odd = resize_axes(shapes, opened, lambda unit, number: unit + 2 * (number or 0) + 1)
            self._types.append(infer_types(graph.module, odd))
        except GraphError:
            return

    def axes(self, name: str, producer: str, index: int) -> tuple[tuple[int, ...] | None, tuple[str, ...]]:
        """Returns the sizes of a tensor and its prims; (None, ()) if no axis is open.

        Args:
            name: the name of its node, or of an input.
            producer: the node of the document that gives it.
            index: its position among the outputs of that node.
        """
        node = self._by_name.get(name)
        if not self._is_open or node is None or (recorded := self._types[0][node]) is None:
            return None, ()
        shape, prims = [], []
        for axis, size in enumerate(recorded.shape):
            sizes = self._sizes(node, axis)
            is_open = any(other != size for other in sizes)
            shape.append(-1 if is_open else size)
            prims.append(self._named(producer, index, axis, sizes).name if is_open else str(size))
        return (tuple(shape), tuple(prims)) if -1 in shape else (None, ())

    def add(self, op: DocumentOp) -> None:
        """Adds the prims of an op, if it computes sizes from shapes."""
        expr = op.expr
        if expr is None or len(expr.outputs) != 1:
            return
        out = expr.outputs[0]
        if reads_shape(expr):
            source, axis = op.inputs[0], int(expr.opdef.axis)
            vector = (source.producer, source.index, self._by_name.get(source.name, expr.inputs[0]))
            if axis < len(expr.inputs[0].shape or ()):
                self._add_size(out, vector, axis)
            else:
                self._vectors[out] = vector
            return
        if isinstance(expr, CallMethod) and expr.method == "__getitem__":
            vector, place = expr.args[0], expr.args[1]
            known = self._vectors.get(vector)
            rank = 0 if known is None else len(known[2].shape or ())
            if known is not None and type(place) is int and -rank <= place < rank:
                self._add_size(out, known, place % rank)
            return
        self._add_arithmetic(expr, out)

    def _add_size(self, out: TensorNode, vector: tuple[str, int, Node], axis: int) -> None:
        producer, index, node = vector
        self._nodes[out] = self._shape_prim(producer, index, axis, self._sizes(node, axis), out.name)

    def _add_arithmetic(self, expr: Any, out: TensorNode) -> None:
        if isinstance(expr, CallMethod):
            name = expr.method.strip("_")
            reflected = name.startswith("r") and name[1:] in _ARITHMETIC
            name = name[1:] if name not in _ARITHMETIC and name[:1] in "ri" else name
        elif isinstance(expr, CallFunction):
            name, reflected = _FUNCTIONS.get(expr.func.__name__, expr.func.__name__), False
        else:
            return
        if name not in _ARITHMETIC or len(expr.args) != 2:
            return
        operands = [self._operand(value) for value in expr.args]
        if None in operands:
            return
        first, second = (operand for operand in operands[:: -1 if reflected else 1] if operand is not None)
        optype, compute = _ARITHMETIC[name]
        try:
            values = zip(self._values[first], self._values[second], strict=True)
            sizes = tuple(compute(a, b) for a, b in values)
        except ZeroDivisionError:
            return
        self._nodes[out] = self._prim(out.name, optype, (first, second), {}, sizes)

    def _operand(self, value: Any) -> MSCPrim | None:
        if type(value) is int:
            attrs = {"value": str(value)}
            return self._prim(f"INT_{len(self.prims)}", "Int", (), attrs, (value,) * len(self._types))
        return self._nodes.get(value) if isinstance(value, Node) else None

    def _named(self, producer: str, index: int, axis: int, sizes: tuple[int, ...]) -> MSCPrim:
        """Returns the first prim of these sizes, or a new one for the axis."""
        for prim, known in self._values.items():
            if known == sizes:
                return prim
        return self._shape_prim(producer, index, axis, sizes, f"SHAPE_{len(self.prims)}")

    def _shape_prim(self, producer: str, index: int, axis: int, sizes: tuple[int, ...], name: str) -> MSCPrim:
        attrs = {"producer": producer, "out_idx": str(index), "dim": str(axis)}
        return self._prim(name, "shape", (), attrs, sizes)

    def _prim(
        self,
        name: str,
        optype: str,
        parents: tuple[MSCPrim, ...],
        attrs: Mapping[str, str],
        sizes: tuple[int, ...],
    ) -> MSCPrim:
        for prim in self.prims:
            if (prim.optype, prim.parents, prim.attrs) == (optype, parents, attrs):
                return prim
        names = {prim.name for prim in self.prims}
        while name in names:
            name = f"{name}_{len(self.prims)}"
        prim = MSCPrim(len(self.prims), name, optype, parents, attrs)
        self.prims.append(prim)
        self._values[prim] = sizes
        return prim

    def _sizes(self, node: Node, axis: int) -> tuple[int, ...]:
        """Returns the recorded size of an axis, and those at other inputs; -1 where values decide them."""
        kinds: Sequence[TensorType | None] = [types.get(node) for types in self._types]
        rank = len(kinds[0].shape) if kinds[0] is not None else 0
        return tuple(
            int(k.shape[axis]) if k is not None and len(k.shape) == rank > axis else -1 for k in kinds
        )


def _outputs(graph: ConvertedGraph) -> list[TensorNode]:
    nodes = (node for step in graph.steps for node in step.expr.outputs)
    return [node for node in nodes if isinstance(node, TensorNode) and node.dtype is not None]


def _open_axes(graph: ConvertedGraph, free_batch: bool) -> tuple[OpenAxis, ...]:
    axes = open_axes_of(graph)
    if free_batch:
        known = {axis.input for axis in axes if axis.axis == 0}
        size, name = next(((a.size, a.name) for a in axes if a.axis == 0), (BATCH, BATCH))
        inputs = (str(n.name) for n in graph.inputs if n.shape is not None and len(n.shape))
        axes += tuple(OpenAxis(node, 0, size, name) for node in inputs if node not in known)
    return axes


_SPATIAL = frozenset(
    {
        "conv2d",
        "conv_transpose2d",
        "max_pool2d",
        "avg_pool2d",
        "adaptive_avg_pool2d",
        "adaptive_max_pool2d",
        "interpolate",
    }
)
# Kinds after which the letters of a layout no longer apply.
_MOVES = "reshape flatten getitem expand_dims squeeze broadcast_to tile repeat stack matmul"
_RESHAPES = frozenset(_MOVES.split())


def in_words_of_msc(op: DocumentOp, node: MSCNode) -> MSCNode:
    """Returns a node with MSC's type and attributes; a kind that MSC lacks keeps qtrace's words."""
    entry = find_kind(op.kind, node, op.attrs)
    optype, values = op.kind or op.label, op.attrs
    if entry is not None:
        optype, values = entry[0], entry[1].written(node, op.attrs)
    texts = {key: _text(value) for key, value in values.items() if is_plain(value)}
    return replace(node, optype=optype, attrs=texts)


def _text(value: Any) -> str:
    """Writes a value as TVM does: numbers with commas between them, and one after a single one of a list."""
    if isinstance(value, (tuple, list)):
        return ",".join(map(_text, value)) + ("," if len(value) == 1 else "")
    return "" if value is None else str(int(value)) if isinstance(value, bool) else str(value)


def weight_layout(kind: str, value: Value) -> str:
    """Returns the layout of a layer's weight, whose axis of groups was merged by `weight_shape`."""
    if kind == "linear":
        return "OI"
    if kind == "prelu":
        return "O"
    if kind == "embedding":
        return ""
    spatial = {"conv1d": "W", "conv3d": "DHW"}.get(kind, "HW")
    front = "IO" if kind.startswith("conv_transpose") else "OI"
    return f"{front}{spatial}"


def weight_shape(kind: str, value: Value) -> tuple[int, ...]:
    """Returns the shape of a layer's weight without an axis of groups: the channel axis has all groups."""
    shape = value.shape
    grouped = kind.startswith("conv") and len(shape) == len(weight_layout(kind, value)) + 1
    return (shape[0] * shape[1], *shape[2:]) if grouped else shape


def output_layout(op: DocumentOp, value: Value, inputs: list[str]) -> str:
    """Returns the layout of an output, or "" if it is not known."""
    rank = len(value.shape)
    if op.kind == "input" or op.kind in _SPATIAL:
        return {4: "NCHW", 3: "NCW", 2: "NC"}.get(rank, "")
    before = inputs[0] if inputs else ""
    if op.kind in ("transpose", "swapaxes"):
        order = op.attrs.get("pattern") or tuple(reversed(range(rank)))
        fits = before and all(isinstance(p, int) for p in order) and len(order) == len(before)
        return "".join(before[p] for p in order) if fits else ""
    if op.kind in _RESHAPES or not before:
        return "NC" if rank == 2 and before.startswith("NC") else ""
    if len(before) == rank:
        return before
    return "NC" if rank == 2 and before == "NCHW" else ""  # a mean over the image


def files(converted: ConvertedGraph, path: Path, free_batch: bool = False) -> dict[Path, bytes]:
    """Returns the JSON document, the weights and the prototxt.

    Args:
        converted: the graph of a converted module, or of a plain traced one. Sizes that depend on its open
            axes are -1.
        path: the path of the JSON document; the others get the suffixes ``.npz`` and ``.prototxt``.
        free_batch: whether the first axis of every input is open, too.

    Raises:
        ExportError: when ``path`` has the suffix of another file, ``free_batch`` is no truth value, or the
            graph does not run with one more sample.
    """
    if path.suffix == ".prototxt":
        raise ExportError(f"{path.name} is the name of the document for viewers: name the one in JSON.")
    if path.suffix == ".npz":
        raise ExportError(f"{path.name} is the name of the file of weights: name the document in JSON.")
    if not isinstance(free_batch, bool):
        raise ExportError(f"free_batch of format msc is {free_batch!r}: give true or false.")
    document = read_graph(converted)
    graph = _Writer(document, DocumentSizes(converted, free_batch)).graph()
    weights = {t.name: t.shape for t in graph.get_weights()}
    values = {name: v.reshape(weights[name]) for name, v in document.parameters.items()}
    return {
        path.with_suffix(".npz"): pack_arrays(values),
        path.with_suffix(".prototxt"): graph.visualize().encode(),
        path: graph.to_json().encode(),
    }


# Named by format=: many documents end in .json.
FORMAT = Format("msc", files, options=("free_batch",), float_options=("free_batch",), float_types=())


class _Writer:
    """Makes the nodes of a document, each from its op and the nodes before it."""

    def __init__(self, document: GraphDocument, sizes: DocumentSizes) -> None:
        self.document, self.sizes = document, sizes
        self.nodes: dict[str, MSCNode] = {}
        self.tensors: dict[str, MSCTensor] = {}
        self.owners: dict[str, str] = {}  # name of a layer's first weight -> the first node that uses it
        # Name of a tensor -> its alias: only inputs and outputs of the graph have one.
        self.aliases = {_tensor_name(op.outputs[0]): op.name for op in document.ops if op.kind == "input"}
        counts = {op.name: len(op.outputs) for op in document.ops}
        for value in document.outputs:
            alias = value.producer if counts[value.producer] == 1 else f"{value.producer}_{value.index}"
            self.aliases.setdefault(_tensor_name(value), alias)

    def graph(self) -> MSCGraph:
        """Returns the graph without values."""
        for index, op in enumerate(self.document.ops):
            node = self._node(index, op)
            self.nodes[node.name] = node
            self.tensors.update((tensor.name, tensor) for tensor in node.outputs)
        inputs = tuple(_tensor_name(op.outputs[0]) for op in self.document.ops if op.kind == "input")
        outputs = tuple(_tensor_name(value) for value in self.document.outputs)
        return MSCGraph(
            self.document.name, inputs, outputs, tuple(self.nodes.values()), tuple(self.sizes.prims)
        )

    def _node(self, index: int, op: DocumentOp) -> MSCNode:
        inputs = tuple(self.tensors[_tensor_name(value)] for value in op.inputs)
        outputs = tuple(self._output(op, value, [t.layout for t in inputs]) for value in op.outputs)
        weights = {key: _weight(op, key, value) for key, value in op.weights.items()}
        self.sizes.add(op)
        first = next((t.name for key, t in weights.items() if key != "const"), None)
        shared = op.name if first is None else self.owners.setdefault(first, op.name)
        node = MSCNode(
            index,
            op.name,
            "" if shared == op.name else shared,
            op.kind,
            tuple(self.nodes[name] for name in dict.fromkeys(v.producer for v in op.inputs)),
            inputs,
            outputs,
            {},
            weights,
            () if op.expr is None else (BLOCK, *(part for part in op.path.split(".") if part)),
        )
        node = in_words_of_msc(op, node)
        node = replace(node, attrs={**node.attrs, **_qparams(op)})
        return replace(node, attrs={**node.attrs, **self._way_back(op, node)})

    def _output(self, op: DocumentOp, value: Value, before: list[str]) -> MSCTensor:
        name = _tensor_name(value)
        shape, prims = self.sizes.axes(value.name, value.producer, value.index)
        layout = output_layout(op, value, before)
        alias = self.aliases.get(name, "")
        return MSCTensor(name, alias, value.dtype, layout, shape or value.shape, prims)

    def _way_back(self, op: DocumentOp, node: MSCNode) -> dict[str, str]:
        """Returns what the type, the attributes and the names of a node do not say of its op."""
        texts = {"stored": _stored(op), "roundings": self._roundings(op)}
        if any(-1 in tensor.shape for tensor in node.outputs) and op.kind == "input":
            texts["traced_shape"] = ",".join(map(str, op.outputs[0].shape))
        if op.expr is not None:
            try:
                call = _call(op, node)
                if not _is_standard(call, node):
                    texts["call"] = json.dumps({**call, "node": node_digest(node)})
            except GraphError as error:
                texts["no_call"] = str(error)
        return {key: text for key, text in texts.items() if text}

    def _roundings(self, op: DocumentOp) -> str:
        """Returns the roundings of what an op reads, and of the graph's outputs that it gives."""
        steps = {operand.key: operand.roundings for operand in op.operands.values()}
        ends = zip(self.document.outputs, self.document.output_roundings, strict=True)
        for index, (value, roundings) in enumerate(ends):
            if value.producer == op.name:
                steps[f"graph_output_{index}"] = roundings
        named = {key: [_step(step) for step in each] for key, each in steps.items() if each}
        return json.dumps(named) if named else ""


def _is_standard(call: dict[str, Any], node: MSCNode) -> bool:
    """Returns whether the type and the attributes of a node say its call."""
    try:
        calls = standard_calls(node)
    except GraphError:
        return False
    return calls.results is None and len(calls.steps) == 1 and same_call(call, calls.steps[0])


def _step(rounding: Rounding) -> list[Any]:
    return [rounding.site, list(rounding.shape)]


def _call(op: DocumentOp, node: MSCNode) -> dict[str, Any]:
    """Returns the call of an op as data.

    Raises:
        GraphError: when an argument cannot be written as data.
    """
    assert op.expr is not None
    references = {each: _reference(op, node, operand.key) for each, operand in op.operands.items()}
    path, tensors = "", {}
    if owner(op.expr) is not None:
        source = op.expr.inputs[0].expr
        path = source.name if isinstance(source, GetAttr) else op.expr.inputs[0].name
        prefix = len(path) + 1
        tensors = {place.path[prefix:]: _reference(op, node, key) for key, place in op.stored.items()}
    return write_call(op.expr, references, tensors, path)


def _reference(op: DocumentOp, node: MSCNode, key: str) -> dict[str, Any]:
    """Returns how a call refers to a tensor; with its shape, if that is another one in the document."""
    if key not in op.stored or op.stored[key].shape == node.weights[key].shape:
        return {"ref": key}
    return {"ref": key, "shape": list(op.stored[key].shape)}


def _stored(op: DocumentOp) -> str:
    """Returns where weights are stored, as far as their names do not say it."""
    places = {}
    for key, stored in op.stored.items():
        kind = ("parameter" if stored.trainable else "buffer") if stored.path else "constant"
        name = op.weights[key].name
        place, default = StoredPlace(stored.path or name, kind), default_place(name, key)
        if op.expr is not None and owner(op.expr) is not None:  # the call says the path
            place = StoredPlace(default.path, kind)
        if place != default:
            places[key] = [place.path, place.kind]
    return json.dumps(places) if places else ""


def _weight(op: DocumentOp, key: str, value: Value) -> MSCTensor:
    if key == "bias" or op.kind in ("batch_norm", "prelu"):  # (1, C, 1, 1) in the graph
        value = replace(value, shape=(math.prod(value.shape),))
    if key == "weight":
        value = replace(value, shape=weight_shape(op.kind, value))
    layout = weight_layout(op.kind, value) if key == "weight" else "" if key == "const" else "O"
    return MSCTensor(
        value.name, "", value.dtype, layout if len(layout) == len(value.shape) else "", value.shape
    )


def _tensor_name(value: Value) -> str:
    return f"{value.producer}:{value.index}"


def _qparams(op: DocumentOp) -> dict[str, str]:
    by_key = {f"qparams_input_{i}": v.quantized for i, v in enumerate(op.inputs)}
    by_key.update((f"qparams_output_{i}", v.quantized) for i, v in enumerate(op.outputs))
    by_key.update((f"qparams_{key}", v.quantized) for key, v in op.weights.items())
    return {key: _numbers(quantized) for key, quantized in by_key.items() if quantized is not None}


def _numbers(quantized: TensorQuantization) -> str:
    return json.dumps(
        {
            "site": quantized.site,
            "scheme": quantized.scheme,
            "scale": quantized.scale.tolist(),
            "zero_point": quantized.zero_point.tolist(),
        }
    )
