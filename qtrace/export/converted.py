"""What all exporters read: a converted graph, or a plain traced module as one without sites.

Ops stand in order, with sites as objects, parameters and shapes. The integers of weights and biases, the
scale of a bias and its rounding are computed here for every format. A plain module has float ops with the
names of modules. Formats with a separate file of quantization parameters write it, and calibration may run it
in another runtime.

What stays float has the type that the recipe or the user asks for. With the option ``allow_float`` a file
computes layers in float with weights that the graph rounded. A refusal names the node, its op, and the line
of the user's code.
"""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from megengine import Parameter
from megengine.module import Module

from qtrace import ops
from qtrace.config.rule import FLOAT_TYPES
from qtrace.errors import ExportError
from qtrace.fakequant.base import FakeQuant
from qtrace.fakequant.following.bias import BiasQuant
from qtrace.fakequant.following.bn_fold import LAYERS, BnFold, BnFoldCall
from qtrace.fakequant.following.dynamic import DynamicQuant
from qtrace.graph.edit import GraphEditor
from qtrace.graph.flatten import flatten, set_parameter
from qtrace.graph.kernels import read_array
from qtrace.graph.notes import source_line
from qtrace.graph.renewal import renew_all
from qtrace.graph.tracing.hazards import debugging_marks, native_quantization
from qtrace.graph.types import Constant, Expr, GetAttr, Input, Node, TensorNode, TracedModule
from qtrace.graph.walk import exprs, get_module, module_path, op_label, owner, users
from qtrace.ops import OpCall
from qtrace.preparation.annotation import Annotation
from qtrace.preparation.float16 import float_values, uses_float16
from qtrace.preparation.model import (
    QuantizedModel,
    QuantizedSite,
    Record,
    graph_hash,
    is_quantized,
    write_record,
)
from qtrace.preparation.passes.compose import write_pieces
from qtrace.preparation.passes.expand import align_biases, expand
from qtrace.preparation.passes.folding import fuse_bn, fuse_scale
from qtrace.scheme import QParams

GATE = (1.0 / 6.0, 0.5)
"""Slope and offset of hsigmoid, ``clip(slope * x + offset, 0, 1)``, and of the gate of hswish."""

FLOAT16_KEY = "qtrace.float16"
"""The metadata of an ONNX file that list the ops of the graph that it has in float16."""


class LocatedError(ExportError):
    """An export error that names the op that caused it."""


def place(expr: Expr, with_name: bool = True) -> str:
    """Describes ``expr`` for the brackets after a refusal: ``relu_out, F.relu, net.py:12``."""
    name = [expr.outputs[0].name] if with_name and expr.outputs else []
    return ", ".join(part for part in (*name, op_label(expr), source_line(expr)) if part)


def locate_by_name(error: ExportError, converted: TracedModule) -> ExportError:
    """Adds op and line to an error that begins with the name of a site or node, unless it has them."""
    if isinstance(error, LocatedError):
        return error
    match = re.match(r"(?:site |input |output )?(\w+)", str(error))
    name = match.group(1) if match else ""
    for expr in exprs(converted):
        known = any(n.name == name for n in expr.outputs)
        if known and not isinstance(expr, Constant):
            about = next(users(expr.outputs[0]), expr) if isinstance(expr, GetAttr) else expr
            return refusal(error, about)
    return error


@contextmanager
def located(expr: Expr) -> Iterator[None]:
    """Adds op and line of ``expr`` to an `ExportError` that leaves the block.

    An error that an inner block located stays as it is.
    """
    try:
        yield
    except ExportError as error:
        if isinstance(error, LocatedError):
            raise
        raise refusal(error, expr) from error


def refusal(error: ExportError | str, expr: Expr) -> LocatedError:
    """Appends to ``error`` name, op and line of ``expr``, without those that it begins with."""
    text, name, label = str(error).rstrip("."), expr.outputs[0].name, op_label(expr)
    if text.startswith(f"{name}: {label} "):
        position = source_line(expr)
    else:
        position = place(expr, with_name=not text.startswith(f"{name}: "))
    return LocatedError(f"{text} (in {position})." if position else f"{text}.")


def site_expr(source: TensorNode, out: TensorNode) -> Expr:
    """Returns the op of a site: that which computes its value, or the first reader of a parameter or input.

    Args:
        source: the node whose value is rounded.
        out: the node of the rounded value.
    """
    if isinstance(source.expr, (GetAttr, Constant, Input)):
        return next(users(out), source.expr)
    return source.expr


@dataclass(frozen=True, eq=False)
class ConvertedOp:
    """An op that computes or moves values.

    Attributes:
        expr: the expr of the graph.
    """

    expr: Expr

    @cached_property
    def call(self) -> OpCall | None:
        """Returns the expr as its rule reads it; None if no rule does."""
        return ops.read(self.expr)


@dataclass(frozen=True)
class IndexPart:
    """The part of an index for one axis of the source, or for the axes of a mask.

    Attributes:
        axis: the axis; None for a new axis.
        value: a slice, an int, or a node or array of positions.
    """

    axis: int | None
    value: Any

    @property
    def whole(self) -> bool:
        """Whether the part keeps the whole axis."""
        cut = self.value
        return isinstance(cut, slice) and (cut.start, cut.stop, cut.step) == (None, None, None)

    @property
    def single(self) -> bool:
        """Whether the part takes one position and drops the axis."""
        if isinstance(self.value, TensorNode):
            return tuple(self.value.shape) == ()
        return isinstance(self.value, (int, np.integer))

    @property
    def gathers(self) -> bool:
        """Whether the part takes a list of positions."""
        return self.axis is not None and not isinstance(self.value, slice) and not self.single

    @property
    def is_mask(self) -> bool:
        """Whether the part is a mask."""
        if isinstance(self.value, TensorNode):
            return np.dtype(self.value.dtype) == np.bool_
        return isinstance(self.value, (list, np.ndarray)) and np.asarray(self.value).dtype == np.bool_


def index_parts(index: Any, axes: int) -> list[IndexPart]:
    """Returns the parts of an index for a tensor of so many axes, in order, with those that it leaves out."""
    values = list(index) if isinstance(index, tuple) else [index]
    widths = [0 if v is None or v is Ellipsis else _width(v) for v in values]
    place = next((k for k, v in enumerate(values) if v is Ellipsis), len(values))
    rest = axes - sum(widths)
    values[place : place + 1], widths[place : place + 1] = [slice(None)] * rest, [1] * rest
    starts = itertools.accumulate(widths, initial=0)
    return [IndexPart(s if w else None, v) for s, w, v in zip(starts, widths, values, strict=False)]


def _width(value: Any) -> int:
    """Returns the number of axes that a part of an index takes; a mask takes as many as it has."""
    return len(value.shape) if IndexPart(0, value).is_mask else 1


class ConvertedGraph:
    """A module made by ``qtrace.convert``, read once for an export.

    Args:
        converted: the module, or its view; it is not changed.

    Attributes:
        model: the view of the module: its record and its sites.
        module: the module.
        annotation: the decisions that were executed.
        sites: every site, in the order of the annotation.
        steps: ops and roundings in the order of execution; parameters and constants are in `values`.
        inputs: input node -> its name as an argument of the traced module.
        outputs: the nodes that leave the graph.

    Raises:
        GraphError: when the module is not converted.
    """

    def __init__(self, converted: Module | QuantizedModel) -> None:
        self.model = QuantizedModel.of(converted, "converted")
        self.module, self.annotation = self.model.module, self.model.annotation
        self.sites = self.model.sites
        self.inputs: dict[TensorNode, str] = _input_names(self.module)
        self.outputs: list[TensorNode] = self.module.graph.outputs
        sites = {site.expr: site for site in self.sites}
        computed = (e for e in exprs(self.module) if not isinstance(e, (GetAttr, Constant)))
        self.steps: tuple[ConvertedOp | QuantizedSite, ...] = tuple(
            sites.get(expr) or ConvertedOp(expr) for expr in computed
        )
        self._ops = {step.expr: step for step in self.steps if isinstance(step, ConvertedOp)}

    @property
    def hash(self) -> str:
        """The hash of the graph by which `qtrace.verify` knows that a file was exported from it."""
        return graph_hash(self.module)

    @property
    def ops(self) -> tuple[ConvertedOp, ...]:
        """Returns the ops in the order of execution."""
        return tuple(self._ops.values())

    def attribute(self, expr: GetAttr | Constant) -> Any:
        """Returns the parameter, constant or module of ``expr``."""
        return expr.interpret(self.module)[0] if isinstance(expr, GetAttr) else expr.value

    @cached_property
    def values(self) -> Mapping[Node, np.ndarray]:
        """Returns node -> value for parameters and constants."""
        return self.values_of(exprs(self.module))

    def values_of(self, among: Iterable[Expr]) -> Mapping[Node, np.ndarray]:
        """Returns node -> value for the parameters and constants in ``among``, read when it is asked for."""
        stored = (e for e in among if isinstance(e, (GetAttr, Constant)))
        return StoredValues(self, {e.outputs[0]: e for e in stored if isinstance(e.outputs[0], TensorNode)})

    @property
    def nodes(self) -> dict[str, Node]:
        """Returns name -> node, for the inputs of the graph and the outputs of its exprs."""
        return self.model.nodes

    @cached_property
    def carried(self) -> dict[str, QParams]:
        """Returns name -> qparams of the nodes that carry integers without rounding."""
        return self.model.carried_qparams()

    @cached_property
    def moved(self) -> dict[str, QParams]:
        """Returns `carried` without the outputs of ops that do nothing: the nodes that an export writes."""
        return {name: self.carried[name] for name in self.annotation.moved()}

    def call(self, expr: Expr) -> OpCall | None:
        """Returns ``expr`` as its rule reads it; None for roundings, parameters and exprs without a rule."""
        op = self._ops.get(expr)
        return None if op is None else op.call

    def site_of(self, node: Node) -> QuantizedSite | None:
        """Returns the site whose rounded value is ``node``, or None."""
        return self.model.rounded.get(node.name)

    def site_name(self, node: Node) -> str:
        """Returns the name of the integers of ``node``: its site's name, else the node's name."""
        site = self.site_of(node)
        return node.name if site is None else site.name


class StoredValues(Mapping[Node, np.ndarray]):
    """The values of parameters and constants, of which large ones are read again each time.

    So an export adds only one tensor at a time to the graph's memory.

    Args:
        graph: the graph.
        stored: node -> the expr that gives its value.
    """

    def __init__(self, graph: ConvertedGraph, stored: dict[Node, GetAttr | Constant]) -> None:
        self._graph, self._stored = graph, stored

    def __getitem__(self, node: Node) -> np.ndarray:
        """Returns the value of ``node``."""
        return read_array(self._graph.attribute(self._stored[node]))

    def __contains__(self, node: object) -> bool:
        """Returns whether ``node`` is one of them, without its value."""
        return node in self._stored

    def __iter__(self) -> Iterator[Node]:
        """Yields the nodes in the order of the graph."""
        return iter(self._stored)

    def __len__(self) -> int:
        """Returns the number of nodes."""
        return len(self._stored)


def _input_names(model: TracedModule) -> dict[TensorNode, str]:
    """Returns input node -> its name as an argument of the traced module.

    MegEngine numbers nodes whose names Python uses (``input_1`` for ``input``), and the parts of an argument
    that is a list or a dict; the parts keep their numbers.
    """
    nodes = model.graph.inputs[1:]
    arguments = set(model.argspec.args) if model.argspec is not None else set()
    bare = {n: n.name if n.name in arguments else re.sub(r"_\d+$", "", n.name) for n in nodes}
    free = arguments - {n.name for e in exprs(model) for n in e.outputs}
    counts = Counter(bare.values())
    return {n: name if name in free and counts[name] == 1 else n.name for n, name in bare.items()}


def is_plain(module: Module) -> bool:
    """Returns whether ``module`` is a traced module that was not prepared or converted."""
    return isinstance(module, TracedModule) and not is_quantized(module)


class PlainGraph(ConvertedGraph):
    """A plain traced module without sites: a flat copy, in which layers are functions of their parameters.

    Args:
        traced: a traced module that was not prepared; it is not changed.
        pieces: whether composites such as attention are written as their pieces.
        folded: whether a BatchNorm, or a stored scale and shift, becomes part of the layer before it.
            Runtimes that do not fold them when they load a file need that.

    Attributes:
        scopes: expr -> the path of the module that it calls, or in whose ``forward`` it was recorded. It
            ends in the number of the call from the second call of a module on: ``stage.conv_1``.

    Raises:
        ExportError: when MegEngine's own quantization changed the module, or its outputs were moved.
    """

    def __init__(self, traced: TracedModule, pieces: bool = False, folded: bool = False) -> None:
        problem = debugging_marks(traced) or native_quantization(traced)
        if problem:
            raise ExportError(f"the model cannot be exported: {problem}")
        flat = flatten(traced)
        renew_all(flat)  # a user may have changed a layer
        called = _called_scopes(flat)
        expand(flat)
        if pieces:
            write_pieces(flat)
        align_biases(flat)
        self._unfolded = graph_hash(flat) if folded else ""
        if folded:
            fuse_scale(flat, fuse_bn(flat).norms)
        record = Record("converted", Annotation("", (), ()), {}, ())
        super().__init__(QuantizedModel(flat, record=record))
        self.scopes = _expanded_scopes(flat, called)
        tensors = [(name, tensor) for name, tensor in flat.named_tensors()]
        self._keys = {id(tensor): name for name, tensor in reversed(tensors)}

    @property
    def hash(self) -> str:
        """The hash of the graph before anything was folded."""
        return self._unfolded or super().hash

    def parameter_key(self, source: Node | str) -> str | None:
        """Returns the key of a parameter or buffer in the module's ``state_dict``.

        Args:
            source: the node that reads the parameter, or a path of the parameter.

        Returns:
            The key; None for a node of another kind.
        """
        if isinstance(source, Node):
            if not isinstance(source.expr, GetAttr) or not isinstance(source, TensorNode):
                return None
            source = source.expr.name
        return self._keys.get(id(get_module(self.module, source)), source)


def _called_scopes(flat: TracedModule) -> dict[str, str]:
    """Maps the name of each output of a flat graph to the scope of its expr, before layers are expanded."""
    used = {name for name, _ in flat.named_modules()}
    calls: Counter[str] = Counter()
    scopes: dict[str, str] = {}
    for expr in exprs(flat):
        path = module_path(expr)
        if owner(expr) is not None:
            attribute = expr.inputs[0].expr
            path = attribute.name if isinstance(attribute, GetAttr) else path
            calls[path] += 1
            if calls[path] > 1:
                path = _numbered(path, calls[path] - 1, used)
        scopes.update((node.name, path) for node in expr.outputs)
    return scopes


def _numbered(path: str, number: int, used: set[str]) -> str:
    """Returns ``path`` with the number of a call; never the path of another module."""
    scope = f"{path}_{number}"
    while scope in used:
        number += 1
        scope = f"{path}_{number}"
    return scope


def _expanded_scopes(flat: TracedModule, called: dict[str, str]) -> dict[Expr, str]:
    """Maps each expr of an expanded graph to its scope.

    The last expr of an expanded module has the name of the module's output. The exprs before it get the scope
    of that module, or of the part of it whose parameters they read: ``block.conv`` of the fused ``block``.
    """
    scopes: dict[Expr, str] = {}
    scope = ""
    for expr in reversed(exprs(flat)):
        scope = called.get(expr.outputs[0].name, scope) if expr.outputs else scope
        scopes[expr] = _part(expr, scope)
    return scopes


def _part(expr: Expr, scope: str) -> str:
    """Returns the scope of the part of a fused module whose parameters ``expr`` reads, else ``scope``."""
    call = ops.read(expr)
    if call is not None and call.kind == "batch_norm" and owner(expr) is not None:
        path = module_path(expr)
    elif call is not None and call.weight is not None and isinstance(call.weight.expr, GetAttr):
        path = call.weight.expr.name.rpartition(".")[0]
    else:
        return scope
    parent, _, name = path.rpartition(".")
    if re.fullmatch(rf"{re.escape(parent)}(_\d+)?", scope):
        return f"{scope}.{name}" if scope else name
    return scope


def bare_graph(prepared: TracedModule) -> ConvertedGraph:
    """Copies a prepared graph without fake quants, in float; the nodes keep their names.

    A layer whose BatchNorm is kept in training becomes a layer and a BatchNorm, as before `insert`.

    Args:
        prepared: a module made by ``qtrace.prepare``; it is not changed.

    Returns:
        A flat graph that counts as converted, with no sites.
    """
    model = QuantizedModel(prepared, "prepared")
    flat = flatten(prepared)
    with GraphEditor(flat, renews_record=True) as editor:
        _drop_fake_quants(editor)
        for expr in exprs(flat):
            module = owner(expr)
            if isinstance(module, BnFold):
                call, like = BnFoldCall(*expr.args), expr.outputs[0]
                nodes = (call.x, call.weight, call.bias)
                layer = editor.call_function(
                    LAYERS[module.kind], *nodes, after=expr, like=like, **module.options
                )
                new = editor.call_module(call.norm.expr.name, layer, after=layer.expr, like=like)
                editor.replace_expr(expr, new)
    return _without_sites(flat, model.record)


def float_graph(graph: ConvertedGraph) -> ConvertedGraph:
    """Copies a converted graph without fake quants; the nodes keep their names.

    A weight whose scheme leaves out the lowest integer is clipped to that range: files say only the number of
    bits, and their readers would use the lowest integer.

    Args:
        graph: the converted graph; it is not changed. A plain graph is returned as it is.

    Returns:
        A flat graph that counts as converted, with no sites.
    """
    if isinstance(graph, PlainGraph):
        return graph
    flat = float_module(graph)
    paths = {e.outputs[0].name: e.name for e in exprs(flat) if isinstance(e, GetAttr)}
    for site in graph.sites:
        path = paths.get(site.node.name, "")
        if site.sort == "weight" and path and site.qparams.scheme.narrow:
            clipped = _clipped(get_module(flat, path).numpy(), site.fake_quant)
            set_parameter(flat, path, Parameter(clipped))
    return _without_sites(flat, graph.model.record)


def float_module(graph: ConvertedGraph) -> TracedModule:
    """Copies the module of a converted graph without its fake quants; the nodes keep their names."""
    flat = flatten(graph.module)
    with GraphEditor(flat, renews_record=True) as editor:
        _drop_fake_quants(editor)
    return flat


def _drop_fake_quants(editor: GraphEditor) -> None:
    for expr in exprs(editor.traced):
        if isinstance(owner(expr), (FakeQuant, BiasQuant, DynamicQuant)):
            editor.replace_uses(expr.outputs[0], expr.args[1])
            editor.remove(expr)


def _without_sites(flat: TracedModule, record: Record) -> ConvertedGraph:
    """Writes the record of a converted graph without sites into ``flat``, and reads the graph."""
    annotation = dataclasses.replace(record.annotation, notes=(), sites=(), carried={}, factors={}, folds=())
    record = dataclasses.replace(record, stage="converted", annotation=annotation)
    write_record(flat, record)
    return ConvertedGraph(QuantizedModel(flat, record=record))


def _clipped(value: np.ndarray, fake_quant: FakeQuant) -> np.ndarray:
    scale, zero = fake_quant.grid_of(value.shape)
    low, high = ((end - zero) * scale for end in (fake_quant.scheme.qmin, fake_quant.scheme.qmax))
    return np.clip(value, low, high).astype(np.float32)


def check_float_type(converted: ConvertedGraph, format: str, known: Sequence[str], float: Any) -> None:
    """Refuses a type of what stays float that a format does not write.

    Args:
        converted: the graph of a converted module, or of a plain one.
        format: the name of the format.
        known: the types that it writes; () for a format that holds no such numbers.
        float: the type that the user asks for; None for what the recipe says.

    Raises:
        ExportError: naming the format and the way out.
    """
    if float is not None and float not in FLOAT_TYPES:
        raise ExportError(
            f"float={float!r} is no choice of the export: choose one of {', '.join(FLOAT_TYPES)}."
        )
    if not known or isinstance(converted, PlainGraph):
        return
    if float == "fp16" and "fp16" not in known:
        raise ExportError(f"format {format} writes what stays float in float32: leave out float=fp16.")
    if float is None and uses_float16(converted.model) and "fp16" not in known:
        raise ExportError(
            f"format {format} writes what stays float in float32, and the recipe says float: fp16: export "
            "with float=fp32, or to format onnx."
        )


def asks_float16(converted: ConvertedGraph, float: str | None) -> bool:
    """Returns whether a file is to have what stays float in float16.

    Args:
        converted: the graph of a converted module, or of a plain one.
        float: the type that the user asks for; None for what the recipe says.

    Raises:
        ExportError: when the graph lacks ranges of what stays float.
    """
    if isinstance(converted, PlainGraph):
        return False
    asks = uses_float16(converted.model)
    if float == "fp32" or (float is None and not asks):
        return False
    if not asks or (float_values(converted.model) and not converted.model.record.float_ranges):
        raise ExportError(
            "float16 needs the ranges of what stays float, which this calibration did not observe: calibrate "
            "with float: fp16 in the recipe."
        )
    return True


def float_kinds(names: str | Iterable[str]) -> frozenset[str]:
    """Returns the kinds of ops that ``allow_float`` names.

    Raises:
        ExportError: for a name that is no kind of op.
    """
    kinds = frozenset((names,) if isinstance(names, str) else names)
    known = ops.kinds()
    for name in sorted(kinds - set(known)):
        near = difflib.get_close_matches(name, known, 3)
        hint = f"did you mean {' or '.join(near)}" if near else "qtrace.explain lists those of a graph"
        raise ExportError(f"allow_float names {name!r}, which is no kind of op: {hint}.")
    return kinds


def only_floats_read(node: TensorNode, kinds: frozenset[str]) -> bool:
    """Whether every layer that reads ``node``, a weight or a bias, is of one of ``kinds``."""
    calls = [ops.read(user) for user in users(node)]
    return bool(calls) and all(call is not None and call.kind in kinds for call in calls)
