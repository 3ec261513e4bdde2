"""A converted graph as every exporter reads it: ops in order, sites as objects, parameters, shapes."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import megengine as mge
import numpy as np
from megengine.module import Module

from qtrace import ops
from qtrace.errors import ExportError
from qtrace.fakequant.base import FakeQuant
from qtrace.fakequant.following.bias import BiasQuant
from qtrace.graph.interpreter import Interpreter
from qtrace.graph.tensors import read_array
from qtrace.graph.types import Constant, Expr, GetAttr, Node, TensorNode, TracedModule
from qtrace.graph.walk import exprs, op_label, owner
from qtrace.ops import OpCall
from qtrace.preparation.model import QuantizedModel, QuantizedSite, graph_hash
from qtrace.scheme import QParams

__all__ = ["ConvertedGraph", "ConvertedOp", "IndexPart", "StoredValues", "index_parts"]


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

    @cached_property
    def shapes(self) -> dict[Node, tuple[int, ...]]:
        """Returns node -> shape for inputs of the traced shapes, by running the graph."""
        return _shapes_of(self.module)

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


def _shapes_of(model: TracedModule, more: int = 0) -> dict[Node, tuple[int, ...]]:
    """Returns node -> shape for inputs of the traced shapes, by a run.

    If one module is called several times on maps of different sizes, its nodes are copies of one graph, and
    all have recorded the sizes of one call.

    Args:
        model: the traced module.
        more: by how much the first axis of every input is longer than traced.
    """
    return _ShapeRecorder(model).run_on_zeros(more)


class _ShapeRecorder(Interpreter):
    def __init__(self, model: TracedModule) -> None:
        super().__init__(model)
        self.shapes: dict[Node, tuple[int, ...]] = {}

    def run_expr(self, expr: Expr, inputs: Sequence[Any]) -> Sequence[Any] | None:
        """Computes an expr; a fake quant returns its input, which has the same shape."""
        if isinstance(owner(expr), (FakeQuant, BiasQuant)):
            return (inputs[1],)
        try:
            return super().run_expr(expr, inputs)
        except RuntimeError as error:  # such as the inverse of a matrix
            raise ExportError(
                f"{expr.outputs[0].name}: {op_label(expr)} cannot be computed on zeros, which is how shapes "
                f"are found ({str(error).splitlines()[0]}): end the graph before it."
            ) from error

    def on_node(self, node: Node, value: Any) -> Any:
        """Records the shape of a node."""
        if isinstance(node, TensorNode):
            self.shapes[node] = tuple(int(n) for n in value.shape)
        return value

    def run_on_zeros(self, more: int = 0) -> dict[Node, tuple[int, ...]]:
        """Runs the graph on zeros, with ``more`` added to the first axes, and returns its shapes."""
        module, *nodes = self.traced.graph.inputs
        shapes = [tuple(int(size) for size in n.shape) for n in nodes]
        shapes = [(s[0] + more, *s[1:]) if s else s for s in shapes]
        zeros = [mge.Tensor(np.zeros(s, np.dtype(n.dtype))) for s, n in zip(shapes, nodes, strict=True)]
        assert not isinstance(module, TensorNode)
        level, mge.config.async_level = mge.config.async_level, 0  # an error must come where it is caught
        try:
            self._execute(self.traced.graph, [self.traced, *zeros], None)
        finally:
            mge.config.async_level = level
        return self.shapes
