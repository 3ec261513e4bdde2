"""Walks an ONNX graph and adds its nodes to a traced graph."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import megengine.functional as F
import numpy as np
import onnx

from qtrace.errors import GraphError, ImportingError
from qtrace.graph.builder import GraphBuilder
from qtrace.graph.origin import FileResult
from qtrace.graph.types import TensorNode
from qtrace.importing.onnx import control_flow, quantization
from qtrace.importing.onnx.call import Call, Lowering
from qtrace.importing.onnx.control_flow import SEQUENCE_OPS, expand, lower_sequence, titled_parts
from qtrace.importing.onnx.folding import (
    FOLDED,
    CannotEvaluate,
    TooLarge,
    evaluate,
    fold_sizes,
    infer_shapes,
    product,
    sizes_of,
)
from qtrace.importing.onnx.layers import Contradiction, Layers, Refusal, Scope
from qtrace.importing.onnx.model import (
    MAX_ELEMENTS,
    Computed,
    Graph,
    OnnxNode,
    OpaqueValue,
    QuantizedIntegers,
    Refused,
    Sizes,
    SplitTensors,
    Stored,
    Value,
    array_of,
    is_float,
    node_like,
    read_graph,
    stored_tensors,
)
from qtrace.importing.onnx.naming import source_line
from qtrace.importing.onnx.opaque import OpaqueNodes
from qtrace.importing.onnx.ops import LOWERINGS
from qtrace.onnxfile.fragment import SMALL

_FLOAT32 = np.dtype(np.float32)

# Kept as in the file where their lowering needs the size of an open axis: no layer is among them, so that an
# axis that stays open is worth more than a form of MegEngine's.
KEPT_WHERE_OPEN = {("", "Resize"), ("", "Upsample"), ("", "GridSample")}

# Elementwise ops that give NaN for NaN in a file, and whose kernels in MegEngine may give numbers.
_LOSING_NAN = (
    "Relu Sigmoid Softplus Clip LeakyRelu Elu Selu Celu HardSwish Swish HardSigmoid PRelu Gelu Mish Exp Sign "
    "Max Min"
)
# Ops for which NaN has another reach in MegEngine than in a file: where they may read NaN, they are kept.
_SPREADING_NAN = "ReduceMax ReduceMin Softmax Hardmax MaxPool GlobalMaxPool Resize Upsample TopK Erf"

# Op -> the input of which it reads but shape or type.
_NOT_READ = {"Shape": "data", "Size": "data", "CastLike": "target_type"}


class Importer:
    """Adds the nodes of a graph to a builder, and collects the nodes without an equal.

    Args:
        builder: the graph to build.
        opsets: the versions of the domains that the model imports.
        path: the file.
        source: the input whose axis is the batch, and that axis, if no other axis is open.
        keepable: gives the first outputs of the nodes that may be kept as in the file, besides those that
            resize; None for all.
        unlike: the first outputs of nodes whose lowering was found to compute other values at other sizes;
            those that resize are kept.

    Attributes:
        opaque: the nodes that are kept as in the file.
        kept: the first outputs of these nodes.
        written: how many nodes its loops have written out.
        grown: by how many elements computed constants exceed what they are computed of.
        makers: name of a tensor that is computed of stored ones -> its node.
        made: the name and the moves of a stored value -> the name of the tensor of which it has the numbers.
    """

    def __init__(
        self,
        builder: GraphBuilder,
        opsets: Mapping[str, int],
        path: Path,
        source: tuple[TensorNode, int] | None = None,
        keepable: Callable[[], Collection[str]] | None = None,
        unlike: frozenset[str] = frozenset(),
    ) -> None:
        self.builder = builder
        self.opsets = opsets
        self.path = path
        self.layers = Layers(builder, source)
        self.opaque = OpaqueNodes(self.layers)
        self.kept: set[str] = set()
        self._keepable, self._unlike = keepable, unlike
        self.written = self.grown = 0
        self._nan: set[TensorNode] = set()  # floats that may hold NaN, and what asks for it
        self.problems: list[str] = []
        self.makers: dict[str, onnx.NodeProto] = {}
        self.made: dict[tuple[str, Any], str] = {}
        self._inferred: dict[Any, list[Any]] = {}  # what `infer_shapes` gives for nodes alike
        self.results: dict[TensorNode, FileResult] = {}  # the first of the file that each node stands for

    def subgraph(self, proto: onnx.GraphProto) -> Graph:
        """Reads the body of a control flow node."""
        return read_graph(proto, self.opsets, stored_tensors(proto, self.path), body=True)

    def run(self, graph: Graph, scope: Scope) -> list[Value]:
        """Adds all nodes of ``graph``; returns what its outputs stand for.

        Raises:
            ImportingError: when the graph is damaged.
        """
        for name, array in graph.stored.items():
            path = self.layers.paths.get(name, name)
            self.layers.shapes.setdefault(path, array.shape)
            scope.values.setdefault(name, Stored(array, path, learned=is_float(array.dtype)))
        for node in graph.nodes:
            self.add(node, scope)
        return [scope[name] for name in graph.outputs]

    def outputs(self, graph: Graph, results: Sequence[Value]) -> list[Value]:
        """Returns the outputs of the graph, of which those that are kept become results of an opaque node.

        Raises:
            ImportingError: when one is no tensor that MegEngine has.
        """
        try:
            return self.opaque.outputs(results, graph.outputs, self.opsets)
        except (Refusal, GraphError) as refusal:
            raise ImportingError(f"{str(refusal).rstrip('.')}.") from refusal

    def add(self, node: OnnxNode, scope: Scope) -> None:
        """Adds one node, or folds it; a node without an equal becomes a problem."""
        values = [scope[name] if name else None for name in node.inputs]
        added = self.builder.mark()
        read, self.layers.read = self.layers.read, set()
        try:
            if (node.domain, node.op) in KEPT_WHERE_OPEN and not self._unlike.isdisjoint(node.outputs):
                raise Refusal("computes other values at another size of an open axis")
            results = self._results(node, values, scope)
        except Contradiction as refusal:
            self.problems.append(f"{_placed(node)} {refusal}")
            results = [Refused() for _ in node.outputs]
        except Refusal as refusal:
            results = self._keep(node, values, scope, f" {refusal}", added)
        except GraphError as error:
            results = self._keep(node, values, scope, f": {error}", added)
        self.layers.note_frozen(_numbers_read(node, values), results, self.layers.read)
        self.layers.read |= read
        folded = scope.outer is None and all(value is None or isinstance(value, Stored) for value in values)
        for name, result in zip(node.outputs, results, strict=False):
            if name:
                scope.values[name] = result
            if folded and isinstance(result, Stored):
                self.makers[name] = node.proto
                self.made[result.name, result.moves] = name
            if name and isinstance(result, Computed):
                own = FileResult(name, node.proto.name, node.op)
                known = self.results.get(result.node)
                self.results[result.node] = own if known is None else known.joined([own])

    def _keep(
        self, node: OnnxNode, values: Sequence[Value | None], scope: Scope, problem: str, added: int
    ) -> Sequence[Value]:
        """Keeps a node without an equal as it is in the file; it becomes a problem if that is impossible."""
        first = next((name for name in node.outputs if name), "")
        self.builder.release_names(added)
        try:
            always = self._keepable is None or first in self._keepable()
            if always or (node.domain, node.op) in KEPT_WHERE_OPEN:
                results = self.opaque.add(node, values, scope, self.opsets, for_open_axes=not always)
                self.kept.add(first)
                return self._noting_nan(node, values, results)
        except (Refusal, GraphError) as refusal:
            problem += f", and {str(refusal).rstrip('.')}"
        self.problems.append(f"{_placed(node)}{problem}")
        return [Refused() for _ in node.outputs]

    def _results(self, node: OnnxNode, values: Sequence[Value | None], scope: Scope) -> Sequence[Value]:
        if any(isinstance(value, Refused) for value in values):
            return [Refused() for _ in node.outputs]
        if any(isinstance(value, OpaqueValue) for value in values):
            raise Refusal("reads a value that is kept as in the file")
        if node.op == "Constant" and not node.domain:
            return [Stored(self._constant(node), node.outputs[0])]
        if not node.domain and node.op in control_flow.HANDLERS:
            return control_flow.HANDLERS[node.op](self, node, values, scope)
        if not node.domain and node.op in SEQUENCE_OPS:
            return lower_sequence(node, values, self.layers, lambda n, v: self._results(n, v, scope))
        if any(isinstance(value, SplitTensors) for value in values):
            raise Refusal("reads a sequence of tensors, which MegEngine lacks")
        if not node.domain and node.op in ("Shape", "Size"):
            return self._read_shape(node, values)
        if (node.domain, node.op) in quantization.PAIRS:
            return [quantization.lower_pair(node, values, self.layers)]
        if all(value is None or isinstance(value, (Stored, Sizes)) for value in values):
            opened = any(isinstance(value, Sizes) for value in values)
            # Numbers whose count or place depends on a size: only MegEngine's own op gives them at any size.
            if not opened or (
                node.op in FOLDED and not node.domain and not _is_placed_by_sizes(node, values)
            ):
                return self._folded(node, values)
        floats, moved = quantization.unwrap(node, values)
        return quantization.wrap(self._lower(node, floats), moved)

    def _constant(self, node: OnnxNode) -> np.ndarray:
        ((name, value),) = node.attributes.items() if len(node.attributes) == 1 else ((None, None),)
        if name == "value" and isinstance(value, onnx.TensorProto):
            return array_of(value, self.path)
        if name in ("value_float", "value_floats"):
            return np.array(value, np.float32)
        if name in ("value_int", "value_ints"):
            return np.array(value, np.int64)
        raise Refusal("holds text, a sparse tensor or nothing")

    def _read_shape(self, node: OnnxNode, values: Sequence[Value | None]) -> Sequence[Value]:
        known = [Computed(v.node, v.dtype) if isinstance(v, QuantizedIntegers) else v for v in values]
        call = Call(node, known, self.layers)
        sizes = np.empty(call.rank(0), object)
        sizes[:] = [call.size(0, axis) for axis in range(call.rank(0))]
        if node.op == "Shape":
            sizes = sizes[slice(call.attribute("start", 0), call.attribute("end", None))]
            return [sizes_of(sizes, np.dtype(np.int64), node.outputs[0])]
        total = np.empty((), object)
        total[()] = product(sizes.tolist())
        return [sizes_of(total, np.dtype(np.int64), node.outputs[0])]

    def _folded(self, node: OnnxNode, values: Sequence[Value | None]) -> Sequence[Value]:
        results = quantization.follow_stored(node, values, self._fold(node, values), self.layers)
        self.layers.note_frozen(_numbers_read(node, values), results)
        return results

    def _fold(self, node: OnnxNode, values: Sequence[Value | None]) -> Sequence[Value]:
        known = [value if isinstance(value, (Stored, Sizes)) else None for value in values]
        try:
            if any(isinstance(value, Sizes) for value in known):
                return fold_sizes(node, known, self.opsets)
            arrays = [value.array if isinstance(value, Stored) else None for value in known]
            results, grown = evaluate(node, arrays, self.opsets, self.grown)
            self.grown = max(grown, self.grown)
        except TooLarge as reason:
            raise Contradiction(f"{reason}, more than qtrace stores") from reason
        except CannotEvaluate as reason:
            raise Refusal(str(reason)) from reason
        return [Stored(result, name) for name, result in zip(node.outputs, results, strict=False)]

    def _lower(self, node: OnnxNode, values: Sequence[Value | None]) -> Sequence[Value]:
        lower = self._lower_numbers
        losing, spreading = (node.op in ops.split() for ops in (_LOSING_NAN, _SPREADING_NAN))
        if (losing or spreading) and not node.domain and any(map(self._holds_nan, values)):
            if spreading:
                raise Refusal("may read NaN, of which MegEngine makes numbers")
            lower = self._lower_around_nan
        return self._noting_nan(node, values, lower(node, values))

    def _lower_numbers(self, node: OnnxNode, values: Sequence[Value | None]) -> Sequence[Value]:
        lowering = LOWERINGS.get((node.domain, node.op))
        try:
            if lowering is None or not node.is_known:
                raise Refusal("has no equal in MegEngine that qtrace knows")
            return self._lowered(lowering, node, values)
        except Refusal as refusal:  # a form of the op that qtrace writes as ONNX defines it
            try:
                results = self._expanded(node, values)
            except Refusal as inner:
                raise (inner if lowering is None else refusal) from inner
            if results is None:
                raise
            return results

    def _holds_nan(self, value: Value | None) -> bool:
        """Returns whether a float may hold NaN."""
        if isinstance(value, Stored) and is_float(value.array.dtype):
            return bool(np.isnan(value.array.astype(np.float32, copy=False)).any())
        return isinstance(value, Computed) and is_float(value.dtype) and value.node in self._nan

    def _noting_nan(
        self, node: OnnxNode, values: Sequence[Value | None], results: Sequence[Value]
    ) -> Sequence[Value]:
        """Returns the results. Notes which hold or ask for NaN; a Where that reads an answer ends it."""
        holds = [self._holds_nan(value) for value in values]
        asks = any(isinstance(value, Computed) and value.node in self._nan for value in values)
        if node.op == "Where" and isinstance(mask := values[0], Computed):
            written = [isinstance(v, Stored) and h for v, h in zip(values, holds, strict=True)]
            holds = written if mask.node in self._nan else holds
            self._nan.update([mask.node] if any(written) else [])
        for result in results:
            if isinstance(result, Computed) and (any(holds) if is_float(result.dtype) else asks):
                self._nan.add(result.node)
        return results

    def _lower_around_nan(self, node: OnnxNode, values: Sequence[Value | None]) -> Sequence[Value]:
        """Adds an elementwise op, and then puts in the NaN that it reads."""
        (output,) = node.outputs
        sources = [i for i, v in enumerate(values) if isinstance(v, Computed) and self._holds_nan(v)]
        names = [*(f"{output}_before_{i}" for i in sources), output]
        part = node_like(node, node.op, node.inputs, names[0], self.opsets, **node.attributes)
        results = self._lower_numbers(part, values)
        for i, before, after in zip(sources, names[:-1], names[1:], strict=True):
            test, name = f"{output}_holds_{i}", node.inputs[i]
            equal = node_like(node, "Equal", (name, name), test, self.opsets)
            where = node_like(node, "Where", (test, before, name), after, self.opsets)
            answer = self._lower_numbers(equal, [values[i]] * 2)
            results = self._lower_numbers(where, [*answer, *results, values[i]])
        return results

    def _expanded(self, node: OnnxNode, values: Sequence[Value | None]) -> Sequence[Value] | None:
        """Adds the nodes of the op's body; returns None if ONNX defines none."""
        call = Call(node, values, self.layers)
        types = [(call.dtype(i), call.shape(i)) if call.has(i) else None for i in range(len(values))]
        body = expand(node, types, self.opsets.get("", 1)) if not node.domain else None
        if body is None:
            return None
        others = [(call.dtype(i), call.shapes(i)[-1]) if call.has(i) else None for i in range(len(values))]
        if others != types:  # a body may have numbers of the shapes in it
            other = expand(node, others, self.opsets.get("", 1))
            if other is None or other.graph != body.graph:
                raise Refusal("is computed by ops that depend on the size of an open axis")
        parts = titled_parts(node, read_graph(body.graph, body.opsets, {}, body=True).nodes)
        scope = Scope({name: value for name, i in body.inputs.items() if (value := values[i]) is not None})
        opsets, self.opsets = self.opsets, body.opsets
        problems, self.problems = self.problems, []
        try:
            for part in parts:
                try:
                    results = self._results(part, [scope[n] if n else None for n in part.inputs], scope)
                except Refusal as refusal:
                    raise Refusal(f"is computed by {part.op}, which {refusal}") from refusal
                if self.problems:  # of a node in a branch, where the op itself may yet be kept
                    raise Refusal(f"is computed by {part.op}, in which {self.problems[0]}")
                scope.values.update((n, r) for n, r in zip(part.outputs, results, strict=False) if n)
        finally:
            self.opsets, self.problems = opsets, problems
        return [scope[name] if name else Refused() for name in body.outputs]

    def _lowered(self, lowering: Lowering, node: OnnxNode, values: Sequence[Value | None]) -> Sequence[Value]:
        call = Call(node, values, self.layers)
        inferred = self._check(node, call)
        results = lowering(call)
        if unread := call.unread_attributes():
            raise Refusal(f"has the attribute {unread[0]!r}, which qtrace does not know")
        results = results if isinstance(results, (tuple, list)) else [results]
        if sum(1 for name in node.outputs if name) > len(results):
            raise Refusal(f"gives {len(node.outputs)} results, of which qtrace computes {len(results)}")
        floats = (call.dtype(i) for i in range(len(call.values)) if call.has(i) and call.is_float(i))
        kind = next(floats, _FLOAT32)
        named = zip(node.outputs, results, strict=False)
        return [self._computed(name, result, inferred, kind) for name, result in named]

    def _computed(
        self, name: str, result: Any, inferred: Mapping[str, Any], kind: np.dtype = _FLOAT32
    ) -> Value:
        """Returns the value of a result, whose shape must be the one that ONNX infers.

        A float of which ONNX infers no type, as for ops of other domains, has the type ``kind``.
        """
        if not isinstance(result, TensorNode):
            return result
        carried = np.dtype(result.dtype)
        unknown = (kind if carried == _FLOAT32 else carried, None)
        dtype, shape = inferred.get(name, unknown) if name else unknown  # several results may be unnamed
        if shape == () and tuple(result.shape) == (1,):  # MegEngine compares scalars to a vector
            result = self.builder.call_function(F.squeeze, result, 0, name=name)
        if shape is not None and shape != tuple(result.shape):
            raise Refusal(
                f"would have the shape {tuple(result.shape)} in MegEngine, not {shape}: please report it"
            )
        return Computed(result, dtype)

    def _check(self, node: OnnxNode, call: Call) -> dict[str, Any]:
        """Infers dtype and shape of each output, where ONNX can; refuses one that is too large."""
        inputs = {
            name: (call.dtype(i), call.shape(i)) for i, name in enumerate(node.inputs) if name and call.has(i)
        }
        stored = {n: v.array for n, v in zip(node.inputs, call.values, strict=False) if isinstance(v, Stored)}
        try:
            inferred = self._infer(node, inputs, stored)
        except CannotEvaluate as reason:
            raise Contradiction(str(reason)) from reason
        for _, shape in inferred.values():
            if shape is not None and math.prod(shape) > MAX_ELEMENTS:
                raise Contradiction(
                    f"would compute a tensor of the shape {list(shape)}, which no memory holds"
                )
        return inferred

    def _infer(
        self, node: OnnxNode, inputs: Mapping[str, Any], stored: Mapping[str, np.ndarray]
    ) -> dict[str, Any]:
        """Infers once for all nodes that have equal attributes, types of inputs and shown values."""
        shown = {n: v.tobytes() for n, v in stored.items() if v.size <= SMALL}
        read = tuple((inputs.get(name), shown.get(name)) for name in node.inputs)
        attributes = tuple(attribute.SerializeToString() for attribute in node.proto.attribute)
        given = tuple(map(bool, node.outputs))
        key = (node.domain, node.op, node.version, *self.opsets.items(), attributes, read, given)
        if key not in self._inferred:
            inferred = infer_shapes(node, inputs, stored, self.opsets)
            self._inferred[key] = [inferred.get(name) for name in node.outputs]
        named = zip(node.outputs, self._inferred[key], strict=True)
        return {name: kind for name, kind in named if kind is not None}


def _placed(node: OnnxNode) -> str:
    """Returns the kind and name of a node for messages, and its line in the source if that is known."""
    line = source_line(node.proto)
    return f"{node.label} ({line})" if line else node.label


def _numbers_read(node: OnnxNode, values: Sequence[Value | None]) -> Sequence[Value | None]:
    """Returns the inputs of which a node reads the numbers, and not but shape or type."""
    if node.op not in _NOT_READ:
        return values
    ends = onnx.defs.get_schema(node.op).inputs
    return [value for value, end in zip(values, ends, strict=False) if end.name != _NOT_READ[node.op]]


def _is_placed_by_sizes(node: OnnxNode, values: Sequence[Value | None]) -> bool:
    """Returns whether sizes say how often a node repeats numbers, or which of them it takes."""
    first = {"Expand": 1, "Tile": 1, "Reshape": 1, "Slice": 1, "Gather": 1}.get(node.op)
    return first is not None and any(isinstance(value, Sizes) for value in values[first:])
