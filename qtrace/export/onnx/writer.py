"""Collects the nodes and initializers of one ONNX graph, with their names and types.

Every tensor has the type that it has in the graph. ONNX requires int64 for shapes and indices, which are
int32 in MegEngine. They are converted where an op reads them (`int64`, `shape_vector`) and where one computes
them (`emit_as`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from qtrace.errors import ExportError
from qtrace.export.converted import PlainGraph
from qtrace.export.onnx.opset import CopiedVersions, SourceVersions, at_opset, choose_versions
from qtrace.graph.kernels import MAX_RANK
from qtrace.graph.types import CallMethod, Constant, Expr, GetAttr, Node, TensorNode
from qtrace.graph.walk import reads_shape, unused_name
from qtrace.onnxfile.model import MAX_DEPTH, read_names, rename_tensors
from qtrace.ops import OpCall
from qtrace.scheme import QParams, QScheme

_FLOAT = TensorProto.FLOAT


class OutputNames:
    """Names after tensors: a node after its output, an initializer after the node of the graph."""

    def enter(self, expr: Expr) -> None:
        """Says that the nodes that follow compute ``expr``."""

    def node(self, op: str, output: str) -> str:
        """Returns the name of a new node of type ``op`` whose first output is ``output``."""
        return f"{output}_{op}"

    def initializer(self, source: Node | str) -> str | None:
        """Returns the preferred name of a parameter, given by its node or its path; None if there is none."""
        return None


class ModuleNames(OutputNames):
    """Names after modules, from which an importer builds the modules again.

    The initializer of a parameter has its key in the ``state_dict``, ``backbone.conv.weight``, and a node the
    path of its module and its type, ``/backbone/conv/Conv``, as PyTorch's exporter names them.

    Args:
        graph: the graph that is written.
    """

    def __init__(self, graph: PlainGraph) -> None:
        self._graph = graph
        self._scope = ""
        self._used: set[str] = set()
        self._counts: Counter[str] = Counter()
        stored = (GetAttr, Constant)
        self._tensors = {node.name for node in graph.nodes.values() if not isinstance(node.expr, stored)}
        self._tensors.update(graph.inputs.values())

    def enter(self, expr: Expr) -> None:
        """Says that the nodes that follow compute ``expr``."""
        self._scope = self._graph.scopes[expr]

    def node(self, op: str, output: str) -> str:
        """Returns the name of a new node of type ``op`` in the module of the current expr."""
        parts = [*self._scope.split("."), op] if self._scope else [op]
        name = base = "".join(f"/{part}" for part in parts)
        while name in self._used:
            self._counts[base] += 1
            name = f"{base}_{self._counts[base]}"
        self._used.add(name)
        return name

    def initializer(self, source: Node | str) -> str | None:
        """Returns the key of a parameter in the ``state_dict``, unless a tensor has that name."""
        key = self._graph.parameter_key(source)
        return None if key in self._tensors else key


def integer_type(scheme: QScheme, packed: bool = False) -> Any:
    """Returns the numpy type for integers of ``scheme`` in an ONNX file.

    Args:
        scheme: the scheme; its integers may use fewer bits than the type has.
        packed: whether 4 bits and less are stored two in a byte; runtimes have faster kernels for int8.
    """
    import ml_dtypes

    if scheme.bits > 8:
        return np.int16 if scheme.signed else np.uint16
    if packed and scheme.bits <= 4:
        return ml_dtypes.int4 if scheme.signed else ml_dtypes.uint4
    return np.int8 if scheme.signed else np.uint8


class OnnxWriter:
    """Collects one ONNX graph. Tensors have the names of the nodes of the traced graph.

    A name that another tensor has gets a suffix: the methods that add a tensor return its name.

    Args:
        packed: whether integers of 4 bits and less are stored two in a byte.
        naming: the names of nodes and parameters.
        opset: the opset of the file; None for the lowest that its nodes and tensors need.
        whole_norms: normalizations are single nodes if an opset up to this one has them, else pieces.
        source: the versions of the file that the graph was imported from.
    """

    def __init__(
        self,
        packed: bool = False,
        naming: OutputNames | None = None,
        opset: int | None = None,
        whole_norms: int = 0,
        source: SourceVersions | None = None,
    ) -> None:
        self.packed, self.naming = packed, naming or OutputNames()
        self.opset, self.whole_norms, self.source = opset, whole_norms, source
        self.version_change = ""  # why the model differs from the opset of ``source``, after `model`
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: dict[str, onnx.TensorProto] = {}
        self._computed: set[str] = set()  # the inputs of the model and the outputs of its nodes
        self._constants: dict[str, list[str]] = {}  # a name that was asked for -> the initializers of it
        self.names: dict[Node, str] = {}
        self.values: MutableMapping[Node, np.ndarray] = {}
        self.laid_out: set[Node] = set()  # weights and biases whose integers are stored in ONNX's layout
        self.blocked: dict[Node, tuple[str, str, int]] = {}  # weights in blocks, as `sites` has them
        self.dynamic: dict[Node, tuple[str, str, str]] = {}  # rounded by the batch, in three parts
        self.integer_weights: dict[Node, tuple[str, str, str]] = {}  # the weights of `dynamic`, likewise
        self.counter = 0
        self.integers: dict[str, str] = {}  # a dequantized tensor -> its integers
        self.kinds: dict[str, Any] = {}  # a dequantized tensor -> the type of its integers
        self.rounded: frozenset[Node] = frozenset()  # the results of ops that are rounded
        self.size_vectors: dict[Node, str] = {}  # a size -> the int64 vector that holds it
        self.shape_vectors: dict[str, str] = {}  # a tensor -> its shape
        self.rounded_to: dict[Node, str] = {}  # a rounded node -> its integers
        self.sizes: set[str] = set()  # results of ops on sizes, which are left out where nothing reads them
        self.paths: dict[str, str] = {}  # an initializer -> the path of its parameter
        self.numbers: dict[str, str] = {}  # a number of some type -> the tensor that dequantizes it
        self.versions = CopiedVersions(opset, source or SourceVersions())
        self.copies: dict[bytes, list[str]] = {}  # a node that was copied, with its inputs -> its outputs
        self.wider: dict[str, tuple[str, str]] = {}  # a converted tensor -> the one before, and its dtype
        self.number_kinds = frozenset(("add", "mul"))  # ops whose stored number becomes an integer
        self.in_pieces: frozenset[str] = frozenset()  # types of nodes that are written as simpler ones
        self._float16: list[tuple[onnx.NodeProto, str]] = []
        self.known: Mapping[str, onnx.TensorProto] = {}  # tensors of another writer, which are used if equal

    def name(self, node: Node) -> str:
        """Returns the ONNX tensor of ``node``; parameters are written when they are first read."""
        if node not in self.names:
            self.names[node] = self.parameter(node, node.name, self.values[node])
        return self.names[node]

    def value(self, node: Node) -> np.ndarray | None:
        """Returns the value of a parameter or constant, None for a computed node."""
        return self.values.get(node)

    def reserve(self, names: Iterable[str]) -> None:
        """Keeps names, such as the names of the inputs, from other tensors."""
        self._computed.update(names)

    def constant(self, name: str, value: Any) -> str:
        """Adds an initializer (once per name and value) and returns its name."""
        tensor = numpy_helper.from_array(np.array(value, order="C"))
        for known in self._constants.setdefault(name, []):
            if _is_same(self.initializers[known], tensor):
                return known
        tensor.name = self._unique(name)
        other = self.known.get(tensor.name)
        if other is not None and _is_same(other, tensor):
            tensor = other
        self.initializers[tensor.name] = tensor
        self._constants[name].append(tensor.name)
        return str(tensor.name)

    def _unique(self, name: str) -> str:
        count, free = 0, name
        while free in self._computed or free in self.initializers:
            count += 1
            free = f"{name}_{count}"
        return free

    def outputs(self, names: Iterable[str]) -> list[str]:
        """Returns the names of the results of a new node, which are free from now on for no other tensor."""
        unique = []
        for name in names:
            unique.append(self._unique(name))
            self._computed.add(unique[-1])
        return unique

    def parameter(self, source: Node | str, name: str, value: np.ndarray) -> str:
        """Adds the value of a parameter (once if all readers store it alike) and returns its name.

        Args:
            source: the node of the parameter, or its path in the module.
            name: the name in this form, unless the parameter has a name of its own in the file.
            value: the value in the form that the op reads.
        """
        own = self.naming.initializer(source)
        if own is None:
            name = self.constant(name, value)
            if isinstance(source, str):
                self.paths[name] = source
            elif isinstance(source.expr, GetAttr):
                self.paths[name] = source.expr.name
            return name
        stored = self.initializers.get(own)
        if stored is None or np.array_equal(numpy_helper.to_array(stored), value):
            return self.constant(own, value)
        return self.constant(name, value)

    def scalar(self, value: float) -> str:
        """Adds a float constant."""
        return self.constant(f"const_{value!r}", np.array(value, np.float32))

    def integer_number(self, value: float, other: str) -> str | None:
        """Adds the integer 1, -1 or 0 with a scale, of the type of another tensor's integers.

        Args:
            value: the number that they make.
            other: a dequantized tensor.

        Returns:
            The dequantized number; None if ``other`` holds no integers of 8 or 16 bits, or no scale makes the
            number. Signed integers have the zero point 0, which symmetric targets require.
        """
        kind, scale = self.kinds.get(other), np.abs(np.float32(value or 1.0))
        if (
            kind not in (np.int8, np.uint8, np.int16, np.uint16)
            or not np.finfo(np.float32).tiny <= scale < np.inf
        ):
            return None
        name = f"const_{np.dtype(kind).name}_{value!r}"
        if name not in self.numbers:
            negative = (-1, 0) if np.issubdtype(kind, np.signedinteger) else (0, 1)
            sign = (0, 0) if value == 0 else (1, 0) if value > 0 else negative
            parts = zip(("int", "scale", "zero_point"), (kind(sign[0]), scale, kind(sign[1])), strict=True)
            integer, factor, zero = (self.constant(f"{name}_{part}", number) for part, number in parts)
            self.numbers[name] = self.node("DequantizeLinear", [integer, factor, zero], name)
        return self.numbers[name]

    def ints(self, values: Sequence[int]) -> str:
        """Adds an int64 vector constant."""
        return self.constant("const_ints_" + "_".join(str(v) for v in values), np.array(values, np.int64))

    def fresh(self, base: str) -> str:
        """Returns a new name for a step on the way to ``base``."""
        self.counter += 1
        return f"{base}__{self.counter}"

    def node(self, op: str, inputs: Sequence[str], output: str, **attributes: Any) -> str:
        """Adds a node with one output and returns the output's name."""
        (output,) = self.outputs([output])
        name = self.naming.node(op, output)
        self.nodes.append(helper.make_node(op, list(inputs), [output], name=name, **attributes))
        return output

    def add(self, op: str, inputs: Sequence[str], outputs: Sequence[str], **attributes: Any) -> list[str]:
        """Adds a node with several outputs and returns their names."""
        names = self.outputs(outputs)
        name = self.naming.node(op, names[0])
        self.nodes.append(helper.make_node(op, list(inputs), names, name=name, **attributes))
        return names

    def emit(self, op: str, inputs: Sequence[str], node: TensorNode, **attributes: Any) -> None:
        """Adds a node that computes the graph's ``node``."""
        self.names[node] = self.node(op, inputs, node.name, **attributes)

    def mark_float16(self, first: int, op: str) -> None:
        """Keeps the nodes from the place ``first`` on as nodes of an op in float16.

        Args:
            first: the place of the first of the nodes that the op has become.
            op: the name of the op's first output in the graph.
        """
        self._float16 += [(node, op) for node in self.nodes[first:]]

    @property
    def float16_tensors(self) -> dict[str, str]:
        """Result of a node that is to be in float16 -> the op of the graph, by the present names."""
        return {node.output[0]: op for node, op in self._float16}

    def output(self, name: str, new_name: str, used: set[str]) -> str:
        """Makes the tensor ``name`` an output of the model and returns the output's name.

        Args:
            name: the tensor.
            new_name: the output's name; it gets a suffix if an input, output or initializer has it.
            used: the names of inputs and of other outputs. A tensor that is one of these, or an
                initializer, is copied.
        """
        fixed = used | set(self.initializers)
        if new_name in fixed:
            new_name = self._free(f"{new_name}_output", fixed)
        if name in fixed:
            return self.node("Identity", [name], new_name)
        self._rename(name, new_name, fixed)
        return new_name

    def _free(self, base: str, fixed: set[str]) -> str:
        return unused_name(base, fixed.union(*(node.output for node in self.nodes)).__contains__)

    def _rename(self, old: str, new: str, fixed: set[str]) -> None:
        """Renames a computed tensor; another computed tensor of that name gets a suffix."""
        if old == new:
            return
        self.rename({new: self._free(f"{new}_float", fixed), old: new})

    def rename(self, names: Mapping[str, str]) -> None:
        """Renames tensors, all at once: old name -> new name."""
        for node in self.nodes:
            rename_tensors(node, names)
        self.names = {key: names.get(name, name) for key, name in self.names.items()}
        self.numbers = {key: names.get(name, name) for key, name in self.numbers.items()}
        self.paths = {names.get(name, name): path for name, path in self.paths.items()}
        self.sizes = {names.get(name, name) for name in self.sizes}
        self._computed = {names.get(name, name) for name in self._computed}
        for known in self._constants.values():
            known[:] = [names.get(name, name) for name in known]
        for old in [name for name in self.initializers if name in names]:
            self.initializers[old].name = names[old]
        self.initializers = {tensor.name: tensor for tensor in self.initializers.values()}

    def quantize_dequantize(
        self, source: str, base: str, output: str, qparams: QParams, axis: int = 0
    ) -> str:
        """Adds QuantizeLinear and DequantizeLinear; the integers are named ``{base}_int``.

        QuantizeLinear saturates at the bounds of its type. Where the scheme ends earlier, the values are
        clipped before it.

        Raises:
            ExportError: for a scheme that ends earlier and has a scale per channel; the caller adds the site.
        """
        scheme, kind = qparams.scheme, integer_type(qparams.scheme)
        scale, zero = self._parameters(base, qparams, kind)
        integers = f"{base}_int"
        if (scheme.qmin, scheme.qmax) != (np.iinfo(kind).min, np.iinfo(kind).max):
            source = self._clip(source, base, qparams)
        extra = {"axis": axis} if qparams.scale.ndim else {}
        integers = self.node("QuantizeLinear", [source, scale, zero], integers, **extra)
        output = self.node("DequantizeLinear", [integers, scale, zero], output, **extra)
        self.integers[output] = integers
        self.kinds[output] = kind
        return output

    def _clip(self, source: str, base: str, qparams: QParams) -> str:
        scheme = qparams.scheme
        if qparams.scale.ndim:
            raise ExportError(
                "it is computed and has a scale per channel, and QuantizeLinear does not clip to "
                f"{scheme.describe()}: set narrow: false and 8 bits there"
            )
        ends = [np.float32((q - int(qparams.zero_point)) * qparams.scale) for q in (scheme.qmin, scheme.qmax)]
        names = [self.constant(f"{base}_{n}", end) for n, end in zip(("low", "high"), ends, strict=True)]
        return self.node("Clip", [source, *names], f"{base}_clipped")

    def rescale(self, source: str, base: str, output: str, qparams: QParams) -> str | None:
        """Reads the integers of ``source`` with other parameters; None if ``source`` is without integers."""
        integers = self.integers.get(source)
        if integers is None:
            return None
        scale, zero = self._parameters(base, qparams, integer_type(qparams.scheme))
        output = self.node("DequantizeLinear", [integers, scale, zero], output)
        self.integers[output] = integers
        self.kinds[output] = self.kinds.get(source)
        return output

    def dequantize(self, base: str, integers: np.ndarray, qparams: QParams, axis: int, output: str) -> str:
        """Adds stored integers ``{base}_int`` and the DequantizeLinear that reads them."""
        if qparams.scheme.block is not None:
            return self._dequantize_blocks(base, integers, qparams, axis, output)
        kind = integer_type(qparams.scheme, self.packed)
        scale, zero = self._parameters(base, qparams, kind)
        stored = self.constant(f"{base}_int", integers.astype(kind))
        extra = {"axis": axis} if qparams.scale.ndim else {}
        return self.node("DequantizeLinear", [stored, scale, zero], output, **extra)

    def _dequantize_blocks(
        self, base: str, integers: np.ndarray, qparams: QParams, axis: int, output: str
    ) -> str:
        """Adds a stored weight with a scale per block of inputs; ``axis`` is the axis of its outputs.

        Integers of 4 bits are always stored two in a byte, as the file is meant to be small.
        """
        scheme, rows = qparams.scheme, integers.shape[axis]
        kind = integer_type(scheme, packed=True)
        blocks = (param.reshape(rows, -1) for param in (qparams.scale, qparams.zero_point))
        scale, zero = (param if axis == 0 else np.ascontiguousarray(param.T) for param in blocks)
        stored = self.constant(f"{base}_int", integers.astype(kind))
        inputs = [stored, self.constant(f"{base}_scale", scale.astype(np.float32))]
        if not scheme.symmetric or scheme.symmetric_zero_point:
            inputs.append(self.constant(f"{base}_zero_point", zero.astype(kind)))
        return self.node("DequantizeLinear", inputs, output, axis=1 - axis, block_size=scheme.block)

    def _parameters(self, base: str, qparams: QParams, kind: Any) -> tuple[str, str]:
        scale = self.constant(f"{base}_scale", qparams.scale.astype(np.float32))
        zero = self.constant(f"{base}_zero_point", qparams.zero_point.astype(kind))
        return scale, zero

    def _drop_unread_sizes(self, read: set[str]) -> None:
        """Leaves out ops on sizes whose results are written in another form."""
        nodes = []
        for node in reversed(self.nodes):
            if read.intersection(node.output) or not self.sizes.issuperset(node.output):
                nodes.append(node)
                read.update(read_names(node))
        self.nodes = nodes[::-1]

    def model(
        self, name: str, inputs: list[Any], outputs: list[Any], metadata: dict[str, str], version: str
    ) -> onnx.ModelProto:
        """Returns the model, without dequantized tensors and initializers that no node reads.

        The tensors move into the model one by one: the writer is without them afterwards.
        """
        self._drop_unread_sizes({value.name for value in outputs})
        used = {i for n in self.nodes for i in read_names(n)}.union(value.name for value in outputs)
        self.nodes = [n for n in self.nodes if n.op_type != "DequantizeLinear" or used.intersection(n.output)]
        read = {i for n in self.nodes for i in read_names(n)}
        initializers = [t for n, t in self.initializers.items() if n in read]
        versions = choose_versions(initializers, self.nodes, self.opset, self.source, self.versions.needed)
        self.version_change = versions.change
        self.versions.check(versions.opset)
        nodes, more = at_opset(self.nodes, versions.opset)
        _name_nodes(nodes)
        graph = helper.make_graph(nodes, name, inputs, outputs)
        model = helper.make_model(graph, opset_imports=self.versions.imports(versions.opset))
        del initializers
        for stored in list(self.initializers):
            tensor = self.initializers.pop(stored)
            if stored in read:
                model.graph.initializer.append(tensor)
        model.graph.initializer.extend(more)
        model.ir_version = versions.ir_version
        model.producer_name, model.producer_version = "qtrace", version
        helper.set_model_props(model, metadata)
        return model


def _is_same(first: onnx.TensorProto, second: onnx.TensorProto) -> bool:
    """Returns whether two tensors have one type, one shape and the same bits."""
    return (
        first.data_type == second.data_type
        and list(first.dims) == list(second.dims)
        and first.raw_data == second.raw_data
    )


def _name_nodes(nodes: Sequence[onnx.NodeProto]) -> None:
    """Gives each node whose name an earlier node has a suffix."""
    used: set[str] = set()
    for node in nodes:
        name, count = node.name, 0
        while node.name in used:
            count += 1
            node.name = f"{name}_{count}"
        used.add(node.name)


_OPERATORS = {"__mul__": "Mul", "__add__": "Add", "__sub__": "Sub"}

Emitter = Callable[[OnnxWriter, OpCall], None]


def array(value: Any) -> np.ndarray:
    """Converts a MegEngine tensor, or anything that numpy accepts, to an array."""
    return np.asarray(value.numpy() if hasattr(value, "numpy") else value)


def axes_of(call: OpCall, name: str = "axis") -> list[int]:
    """Returns the axes that an attribute names, counted from the front; all axes for None."""
    named_axes, count = call.attrs[name], len(call.inputs[0].shape)
    if named_axes is None:
        return list(range(count))
    return [
        int(axis) % count for axis in (named_axes if isinstance(named_axes, (tuple, list)) else [named_axes])
    ]


def rank(value: Any) -> int:
    """Returns the number of axes of a node or an array."""
    return len(value.shape) if isinstance(value, TensorNode) else array(value).ndim


def is_float(node: TensorNode) -> bool:
    """Whether the node holds floats."""
    return np.dtype(node.dtype).kind == "f"


def number(w: OnnxWriter, value: Any, dtype: Any) -> str:
    """Adds a constant number or array of type ``dtype``."""
    numbers, kind = array(value), np.dtype(dtype)
    if numbers.ndim:
        return w.constant(w.fresh("const_array"), numbers.astype(kind))
    name = f"const_{numbers.item()!r}" if kind == np.float32 else f"const_{kind.name}_{numbers.item()!r}"
    if kind == np.float32:
        return w.scalar(float(numbers))
    return w.constant(name, numbers.astype(kind))


def cast(w: OnnxWriter, name: str, dtype: Any, output: str | None = None) -> str:
    """Converts the tensor ``name``."""
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    return w.node("Cast", [name], output or w.fresh(name), to=kind)


def operand(w: OnnxWriter, value: Any, dtype: Any) -> str:
    """Returns a node, number or array as a tensor of type ``dtype``."""
    if not isinstance(value, TensorNode):
        return number(w, value, dtype)
    same = np.dtype(value.dtype) == np.dtype(dtype)
    return w.name(value) if same else cast(w, w.name(value), dtype)


def parameter_source(call: OpCall, name: str) -> TensorNode | str:
    """Returns the node of the parameter ``name`` of an op, or its path where the op is a module."""
    value = call.attrs.get(name)
    if isinstance(value, TensorNode):
        return value
    attribute = call.expr.inputs[0].expr
    return f"{attribute.name}.{name}" if isinstance(attribute, GetAttr) else call.out


def emit_as(w: OnnxWriter, op: str, inputs: Sequence[str], node: TensorNode, **attributes: Any) -> None:
    """Adds a node whose result has another type in ONNX than ``node``, and converts the result."""
    result = w.node(op, inputs, w.fresh(node.name), **attributes)
    w.names[node] = cast(w, result, node.dtype, node.name)


def unary(op: str, **fixed: Any) -> Emitter:
    """Emits an op that is one ONNX node with one input."""

    def emit(w: OnnxWriter, call: OpCall) -> None:
        w.emit(op, [w.name(call.inputs[0])], call.out, **fixed)

    return emit


def int64(w: OnnxWriter, value: Any) -> str:
    """Returns a node of integers, or constant integers, as an int64 tensor."""
    return operand(w, value, np.int64)


def scalar_int64(w: OnnxWriter, value: Any) -> str:
    """Returns one constant or computed integer as an int64 vector of length 1."""
    if not isinstance(value, TensorNode):
        return w.ints([int(value)])
    if value.shape is not None and tuple(value.shape) == (1,):
        return int64(w, value)
    vector = _size_vector(w, value)
    if vector is not None:
        return vector
    return w.node("Reshape", [int64(w, value), w.ints([1])], w.fresh(value.name))


def shape_vector(w: OnnxWriter, shape: Any) -> str:
    """Returns a shape as an int64 vector; it may be a node, or a sequence of ints and scalar nodes."""
    if isinstance(shape, TensorNode):
        return int64(w, shape) if len(shape.shape) == 1 else scalar_int64(w, shape)
    if isinstance(shape, int):
        return w.ints([shape])
    if not any(isinstance(v, TensorNode) for v in shape):
        return w.ints([int(v) for v in shape])
    parts = []
    for value in shape:
        if isinstance(value, TensorNode) and len(value.shape) > 1:
            raise ExportError(f"{value.name} is no shape: it has {len(value.shape)} axes")
        parts.append(scalar_int64(w, value))
    return parts[0] if len(parts) == 1 else w.node("Concat", parts, w.fresh("shape"), axis=0)


def _size_vector(w: OnnxWriter, value: TensorNode) -> str | None:
    """Writes an integer that a graph computes from shapes as an int64 vector of length 1.

    Args:
        w: the writer.
        value: a node without axes.

    Returns:
        The vector; None if the node is no axis of a shape, nor a product, sum or difference of such.
    """
    return _vector(w, value, MAX_DEPTH) if tuple(value.shape or ()) == () else None


def _vector(w: OnnxWriter, value: Any, depth: int) -> str | None:
    if isinstance(value, int) and not isinstance(value, bool):
        return w.ints([value])
    expr = getattr(value, "expr", None)
    if not isinstance(expr, CallMethod) or expr.kwargs or not depth:
        return None
    known = w.size_vectors.get(value)
    if known is not None:
        return known
    vector = None
    if expr.method == "__getitem__":
        vector = _axis(w, *expr.args)
    elif expr.method in _OPERATORS and len(expr.args) == 2:
        parts = [_vector(w, part, depth - 1) for part in expr.args]
        if all(part is not None for part in parts):
            inputs = [part for part in parts if part is not None]
            vector = w.node(_OPERATORS[expr.method], inputs, w.fresh(value.name))
    if vector is not None:
        w.size_vectors[value] = vector
    return vector


def _axis(w: OnnxWriter, shape: Any, axis: Any) -> str | None:
    """Writes the size of an axis of a tensor whose whole shape is read."""
    expr: Any = getattr(shape, "expr", None)
    if type(axis) is not int or expr is None or not reads_shape(expr) or int(expr.opdef.axis) != MAX_RANK:
        return None
    node = expr.inputs[0]
    if node not in w.names and w.value(node) is None:  # the tensor is not part of what is written
        return None
    source = w.rounded_to.get(node) or w.name(node)  # a second reader of floats would keep kernels apart
    if source not in w.shape_vectors:
        w.shape_vectors[source] = w.node("Shape", [source], w.fresh(shape.name))
    return w.node("Gather", [w.shape_vectors[source], w.ints([axis])], w.fresh(shape.name), axis=0)
