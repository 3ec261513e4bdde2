"""The costs of a graph under its config: the time of each op and tensor, and their layouts, for `place`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from qtrace.costs import FLOAT, INTEGER, LOOKUP, PLAIN_MAX_POOL, STEM_CHANNELS, CostTable, OpShape
from qtrace.graph.types import Constant, Expr, GetAttr, Node, TensorNode
from qtrace.graph.walk import shape_of, tensor_inputs, users
from qtrace.onnxfile.local_session import stays_blocked
from qtrace.ops import OpCall, Role
from qtrace.preparation.passes._choices import Choice
from qtrace.preparation.passes._sites import Chains, output_choice
from qtrace.preparation.passes._view import View
from qtrace.preparation.passes.compose import PIECES
from qtrace.preparation.placement.labelling import Layouts, Problem, Tensor, Unit

# The shapes of ops as cost tables know them, and the times of max pooling, which belongs to no unit.

# Ops that read and write the plain layout.
_PLAIN = (
    "reshape flatten expand_dims squeeze matmul linear softmax conv_transpose2d layer_norm transpose swapaxes"
)
# Ops that write the channels last if all that they read has them so.
_KEEPING = "max_pool2d avg_pool2d relu relu6 clip add mul concat"


@dataclass(frozen=True)
class PoolTimes:
    """The times of the poolings between a value and the ops that read it.

    Attributes:
        float_seconds: in float.
        integer_seconds: on integers, after an integer op.
    """

    float_seconds: float = 0.0
    integer_seconds: float = 0.0

    def __add__(self, other: PoolTimes) -> PoolTimes:
        return PoolTimes(
            self.float_seconds + other.float_seconds, self.integer_seconds + other.integer_seconds
        )


def time_pools(view: View, expr: Expr, table: CostTable) -> PoolTimes:
    """Returns the times of ``expr`` if it is a pooling that carries integers, else no time.

    onnxruntime has a fast integer kernel for channels last, the layout that an integer convolution writes
    and most ops after it keep. In the plain layout, integers take several times as long as floats. An
    exported file pools an input in float.
    """
    call = view.calls.get(expr)
    if call is None or call.kind != "max_pool2d" or call.role is not Role.CARRY:
        return PoolTimes()
    shape = op_shape(call)
    seconds, integer = table.seconds(shape, FLOAT), table.seconds(shape, INTEGER)
    if seconds is None or integer is None:
        return PoolTimes()
    if _is_input(view, call.inputs[0]):
        return PoolTimes(seconds, seconds)
    if _has_channels_last(view, call.inputs[0], _leads_to_conv(view, expr)):
        return PoolTimes(seconds, integer)
    plain = table.seconds(replace(shape, kind=PLAIN_MAX_POOL), INTEGER) or integer
    return PoolTimes(seconds, max(plain, integer))


def _is_input(view: View, node: Node) -> bool:
    """Returns whether a value is an input of the graph, or a pooled one."""
    call = view.calls.get(node.expr)
    while call is not None and call.kind == "max_pool2d":
        node = call.inputs[0]
        call = view.calls.get(node.expr)
    return node in view.traced.graph.inputs


def _has_channels_last(view: View, node: Node, ahead: bool) -> bool:
    """Returns whether a value has the channels last if all is on integers.

    Args:
        view: the graph.
        node: the value.
        ahead: whether a convolution follows, for which functions of one value keep the layout, too.
    """
    waiting, seen = [node], {node}
    while waiting:
        call = view.calls.get(waiting.pop().expr)
        if call is None or call.kind in _PLAIN.split() or not call.inputs:
            return False
        if call.kind == "conv2d":
            continue
        if call.kind not in _KEEPING.split() and not ahead:
            return False
        waiting += [n for n in call.inputs if n not in seen and view.is_data(n)]
        seen.update(call.inputs)
    return True


def _leads_to_conv(view: View, start: Expr) -> bool:
    """Returns whether a convolution reads the result, through ops that take any layout."""
    ahead, seen = [start], {start}
    while ahead:
        for node in ahead.pop().outputs:
            for user in users(node):
                call = view.calls.get(user)
                if call is None or user in seen or call.kind in _PLAIN.split():
                    continue
                if call.kind == "conv2d":
                    return True
                seen.add(user)
                ahead.append(user)
    return False


def op_shape(call: OpCall) -> OpShape:
    """Returns what the time of ``call`` depends on.

    The weight of a grouped convolution loses its leading axis, as runtimes store it. It is (outputs, inputs /
    groups), or (inputs, outputs / groups) if it is transposed, before the sizes of the kernel.
    """
    groups = int(call.attrs.get("groups", 1))
    weight = call.attrs.get("kernel", ()) if call.weight is None else shape_of(call.weight)
    if groups > 1 and len(weight) > 3:
        weight = (math.prod(weight[:2]), *weight[2:])
    stride = call.attrs.get("stride", ())
    return OpShape(
        kind=call.kind,
        inputs=tuple(shape_of(node) for node in call.inputs),
        outputs=tuple(shape_of(node) for node in call.outputs),
        weight=weight,
        stride=tuple(int(n) for n in stride) if isinstance(stride, (tuple, list)) else (),
        groups=groups,
        stored="scalar" in call.attrs or any(isinstance(n.expr, (Constant, GetAttr)) for n in call.inputs),
    )


_ONNX_OPS = {
    **{"max_pool2d": "MaxPool", "avg_pool2d": "AveragePool", "add": "Add", "mul": "Mul", "concat": "Concat"},
    **dict.fromkeys(("adaptive_avg_pool2d", "mean"), "GlobalAveragePool"),
    **dict.fromkeys(("relu", "relu6", "clip"), "Relu"),
    **{"sigmoid": "Sigmoid", "tanh": "Tanh", "interpolate": "Resize", "batch_norm": "BatchNormalization"},
    **{"leaky_relu": "LeakyRelu", "hsigmoid": "HardSigmoid", "hard_sigmoid": "HardSigmoid"},
}
"""Kind of an op -> the ONNX op whose layout it has."""
_READ_TWICE = frozenset({"silu", "mish", "hswish"})


class FloatLayouts:
    """Follows the layouts through a graph, op by op, as if all ops were float.

    Attributes:
        block_readers: the ops that read blocks.
        double_readers: the ops that are written as two nodes, both of which read the input.
    """

    def __init__(self) -> None:
        self.block_readers: set[Expr] = set()
        self.double_readers: set[Expr] = set()
        self._convs: set[Node] = set()
        self._blocked: set[Node] = set()

    def __contains__(self, node: Node) -> bool:
        """Returns whether the value of ``node`` is written in blocks."""
        return node in self._blocked

    def add(self, call: OpCall, inputs: Sequence[Node], results: Sequence[Node]) -> None:
        """Adds the next op.

        Args:
            call: the op.
            inputs: the values that it reads, before moves.
            results: the values that it gives, or the kernel that it is the first op of.
        """
        if call.kind in _READ_TWICE:
            self.double_readers.add(call.expr)
        if not results or len(shape_of(results[0])) != 4:
            return
        if call.kind == "conv2d":
            if (*shape_of(call.inputs[0]), 0, 0)[1] >= STEM_CHANNELS:  # a graph may say anything of shapes
                self.block_readers.add(call.expr)
            self._convs.update(results)
            self._blocked.update(results)
        elif self._stays_blocked(call, inputs):
            self.block_readers.add(call.expr)
            self._blocked.update(results)

    def _stays_blocked(self, call: OpCall, inputs: Sequence[Node]) -> bool:
        """Returns whether an op has a kernel for blocks, and reads nothing else."""
        return stays_blocked(
            _ONNX_OPS.get(call.kind, ""),
            blocked=bool(inputs) and self._blocked.issuperset(inputs),
            after_conv=self._convs.issuperset(inputs),
            equal_shapes=len(call.inputs) == len(inputs) == 2
            and len({shape_of(node) for node in inputs}) == 1,
        )


def has_pieces(view: View, call: OpCall) -> bool:
    """Returns whether ``call`` is written in pieces if it runs on integers."""
    choice = view.choices[call.expr]
    return call.kind in PIECES and choice.placement != "everything" and not choice.quantize


def build_problem(view: View, chains: Chains, table: CostTable) -> Problem:
    """Returns the times of every op and tensor of the graph, without noise.

    A tensor that is only moved, such as by a transposition, is one with the tensor that it came from.
    """
    builder = _Builder(view, chains, table)
    units = tuple(builder.unit(expr) for expr in builder.names)
    sources = {node.name: source.name for node, source in builder.sources.items()}
    return add_pools(Problem(units, tuple(builder.tensors()), sources), builder.pools)


def add_pools(problem: Problem, pools: Mapping[str, PoolTimes]) -> Problem:
    """Adds the times of max pooling to the ops before it, or to the first op after an input.

    A pooling runs on integers if the op before it does: after a float op, an exported file pools floats and
    rounds what is left.

    Args:
        problem: the units and tensors of a graph.
        pools: name of a tensor -> the times of the poolings between it and its readers.
    """
    units = {unit.name: unit for unit in problem.units}
    for tensor in problem.tensors:
        times = pools.get(tensor.name)
        first = units.get(tensor.producer) or units.get(next(iter(tensor.readers), ""))
        if times is not None and first is not None:
            units[first.name] = _slower(first, times.float_seconds, times.integer_seconds)
    return replace(problem, units=tuple(units.values()))


def _slower(unit: Unit, in_float: float, on_integers: float) -> Unit:
    """Returns ``unit`` with more seconds."""
    integer = None if unit.integer_seconds is None else unit.integer_seconds + on_integers
    return replace(unit, float_seconds=unit.float_seconds + in_float, integer_seconds=integer)


class _Builder:
    """Builds the units and tensors of a graph.

    Attributes:
        names: the first expr of each unit -> the name of the unit.
        sources: node -> the node that its value came from, only by moves.
        pools: name of such a node -> the times of the poolings among the moves.
    """

    def __init__(self, view: View, chains: Chains, table: CostTable) -> None:
        self.view, self.chains, self.table = view, chains, table
        self.names: dict[Expr, str] = {}
        self.sources: dict[Node, Node] = {}
        self.pools: dict[str, PoolTimes] = {}
        for expr in view.order:
            if view.carries(expr):
                source = self._source(view.calls[expr].inputs[0])
                self.sources.update(dict.fromkeys(expr.outputs, source))
                if (times := time_pools(view, expr, table)) != PoolTimes():
                    self.pools[source.name] = self.pools.get(source.name, PoolTimes()) + times
            elif (expr not in chains or chains[expr].head is expr) and self._moves_floats(expr):
                self.names[expr] = expr.outputs[0].name

    def _source(self, node: Node) -> Node:
        return self.sources.get(node, node)

    def _moves_floats(self, expr: Expr) -> bool:
        return any(map(self.view.is_data, expr.outputs)) or any(map(self.view.is_data, expr.inputs))

    def unit(self, expr: Expr) -> Unit:
        """Returns the unit of ``expr``, the head of a chain or an op that stays float."""
        name, call, chain = self.names[expr], self.view.calls.get(expr), self.chains.get(expr)
        shape = None if call is None else op_shape(call)
        # What moves values takes no time wherever it stands: on integers it is no unit at all.
        moves = call is not None and call.role is Role.CARRY
        float_seconds = 0.0 if moves else self._seconds(shape, FLOAT, expr)
        if chain is None or shape is None or call is None:
            return Unit(name, float_seconds, None)
        choice = self.view.choices[expr]
        integer = self._integer_seconds(call, shape)
        label = None
        if choice.quantize or choice.placement == "everything" or not self._is_ordinary(choice):
            label, integer = True, float_seconds if integer is None else integer
        writes_floats = call.kind in self.view.backend.float_results
        stays_float = not output_choice(self.view, chain).quantize_output
        if stays_float and not writes_floats and integer is not None:
            integer = float_seconds  # no integer kernel gives floats, so the runtime takes the one of floats
        factor = 0.0 if choice.placement == "fastest" else 1.0
        return Unit(
            name,
            float_seconds,
            integer,
            label=label,
            float_result=choice.output is None and (stays_float or (writes_floats and len(chain.exprs) == 1)),
            noise_weight=factor,
        )

    def _integer_seconds(self, call: OpCall, shape: OpShape) -> float | None:
        if has_pieces(self.view, call):
            parts = [self._kernel(replace(shape, **changes)) for changes in PIECES[call.kind].kernels]
            return None if None in parts else sum(part for part in parts if part is not None)
        if call.kind in self.view.backend.float_kernels:
            return None
        return self._kernel(shape)

    def _kernel(self, shape: OpShape) -> float | None:
        """Returns the time of an integer kernel, which may be a look-up."""
        if len(shape.inputs) == 1 and shape.kind in ("add", "mul") and not shape.stored:
            shape = replace(shape, inputs=shape.inputs * 2)
        seconds = self.table.seconds(shape, INTEGER)
        return self.table.seconds(shape, LOOKUP) if seconds is None else seconds

    def _seconds(self, shape: OpShape | None, form: str, expr: Expr) -> float:
        """Returns the time of an op, or of a pass over its results if the table does not know the kind."""
        seconds = None if shape is None else self.table.seconds(shape, form)
        if seconds is not None:
            return seconds
        return math.fsum(self._change("dequantize", n) for n in expr.outputs if self.view.is_data(n))

    def _change(self, kind: str, node: Node, form: str = FLOAT) -> float:
        shape = shape_of(node)
        if kind == "reorder" and len(shape) != 4:
            return 0.0
        return self.table.seconds(OpShape(kind, (shape,), (shape,)), form) or 0.0

    def _is_ordinary(self, choice: Choice) -> bool:
        """Returns whether the times of the table, which are for 8 bits, hold for ``choice``."""
        return choice.activation.scheme.bits == 8 and choice.weight.scheme.bits <= 8 and choice.output is None

    def tensors(self) -> Iterator[Tensor]:
        """Yields the values that ops or the graph's inputs give, each with its readers."""
        view = self.view
        readers: dict[Node, dict[Expr, str]] = {}
        for expr, name in self.names.items():
            for node in self._inputs(expr):
                readers.setdefault(self._source(node), {})[expr] = name
        producers: dict[Node, str] = {}
        for expr, name in self.names.items():
            producers.update(dict.fromkeys(self._results(expr), name))
        outputs = {self._source(node) for node in view.outputs}
        inputs = [node for node in view.traced.graph.inputs if self.view.is_data(node)]
        layouts = self._follow_layouts()
        for node in (*inputs, *producers):
            exprs = readers.get(node, {})
            yield Tensor(
                node.name,
                producers.get(node, ""),
                tuple(exprs.values()),
                self._change("quantize", node),
                self._change("dequantize", node),
                leaves=node in outputs,
                layouts=Layouts(
                    node in layouts,
                    frozenset(exprs[expr] for expr in layouts.block_readers.intersection(exprs)),
                    self._change("reorder", node, FLOAT),
                    self._change("reorder", node, INTEGER),
                ),
                double_readers=frozenset(exprs[e] for e in layouts.double_readers.intersection(exprs)),
            )

    def _follow_layouts(self) -> FloatLayouts:
        """Follows the layouts of a runtime whose table says what a change of layout takes."""
        layouts = FloatLayouts()
        shape = ((1, 16, 8, 8),)
        if self.table.seconds(OpShape("reorder", shape, shape), FLOAT) is None:
            return layouts
        for expr in self.names:
            if expr in self.view.calls:
                inputs = [self._source(node) for node in self._inputs(expr)]
                layouts.add(self.view.calls[expr], inputs, self._results(expr))
        return layouts

    def _results(self, expr: Expr) -> list[Node]:
        nodes = self.chains[expr].tail.outputs if expr in self.chains else expr.outputs
        return [node for node in nodes if self.view.is_data(node)]

    def _inputs(self, expr: Expr) -> list[TensorNode]:
        nodes = self.view.calls[expr].inputs if expr in self.chains else tensor_inputs(expr)
        return [node for node in dict.fromkeys(nodes) if self.view.is_data(node)]
