"""Rules and readings of exprs: one `OpCall` for a module, its functional twin and its Tensor method."""

from __future__ import annotations

import enum
import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from qtrace.graph.opaque import OpaqueOp
from qtrace.graph.operations import KERNELS, METHODS
from qtrace.graph.types import Expr, TensorNode
from qtrace.graph.walk import is_float_tensor, owner


class Role(enum.Enum):
    """The way in which quantization treats an op."""

    COMPUTE = "compute"  # has a weight or multiplies two activations; inputs and output are sites
    ELEMENTWISE = "elementwise"  # new values from old; inputs and output are sites
    ACTIVATION = "activation"  # like elementwise, and may be fused into the op before it
    NORM = "norm"  # per-channel affine; folded or fused into the op before it, else elementwise
    CARRY = "carry"  # only moves values: qparams pass through
    CONCAT = "concat"  # moves values of several inputs into one output
    FLOAT = "float"  # known, and kept in float on purpose
    SHAPE = "shape"  # integers and shapes: never quantized


@dataclass(frozen=True)
class Reading:
    """An expr as its rule reads it.

    Attributes:
        inputs: the tensor nodes that carry activations, in the op's order.
        attrs: constants under the op's own names (stride, axis, ...).
        weight: the weight's node, if the op has one.
        bias: the bias's node, if the op has one.
        channel_axes: the axes of the weight that count output channels, in MegEngine's layout.
        role: the role of this call if it depends on the arguments; None for the role of the rule.
        reason: why this call has a float or shape role, if that depends on the arguments.
        kind: the kind of this call if it depends on the arguments; "" for the kind of the rule.
        fixed: a clause that lists the arguments computed from shapes, which are read as the traced sizes.
    """

    inputs: tuple[TensorNode, ...]
    attrs: Mapping[str, Any] = field(default_factory=dict)
    weight: TensorNode | None = None
    bias: TensorNode | None = None
    channel_axes: tuple[int, ...] = ()
    role: Role | None = None
    reason: str = ""
    kind: str = ""
    fixed: str = ""


class Callee(NamedTuple):
    """The callee of an expr, as a key of the table of rules.

    The graph has a kernel if the tracer did not see the function that called it, such as ``F.relu`` kept in
    an attribute or a closure.

    Attributes:
        sort: whether the callee is a module, a function, a Tensor method or a kernel.
        callee: a module class, a function, or the name of a Tensor method or of a kernel.
    """

    sort: Literal["module", "function", "method", "kernel"]
    callee: Any


@dataclass(frozen=True)
class OpRule:
    """The callees of one kind of op, and the function that reads their calls.

    Attributes:
        kind: the name that configs and exporters use, such as ``conv2d``.
        role: the role of the op.
        targets: the callees that stand for the op.
        read: reads a matching expr; raises `UnreadableError` if the form of the call is not supported.
        reason: for a float or shape role, why the op is not quantized.
    """

    kind: str
    role: Role
    targets: tuple[Callee, ...]
    read: Callable[[Expr], Reading]
    reason: str = ""

    @property
    def source(self) -> str:
        """File and line of the reader, for ``explain``; for a rule of the user's, its module and line."""
        read = inspect.unwrap(self.read)
        line, path = read.__code__.co_firstlineno, read.__code__.co_filename.replace("\\", "/")
        if read.__module__.startswith("qtrace.ops."):
            return f"qtrace/ops/{path.rpartition('/ops/')[2]}:{line}"
        return f"{read.__module__}:{line}"


def op_rule(
    kind: str,
    role: Role,
    read: Callable[[Expr], Reading],
    *callees: Callable[..., Any],
    methods: Iterable[str] = (),
    kernels: Iterable[str] = (),
    reason: str = "",
) -> OpRule:
    """Builds the rule of one kind of op.

    Args:
        kind: the name of the op.
        role: the role of the op.
        read: reads a matching expr.
        *callees: module classes and functions.
        methods: names of Tensor methods that `METHODS` does not have.
        kernels: names of kernels that `KERNELS` does not have.
        reason: for a float or shape role, why the op is not quantized.
    """
    methods = (*(name for name, function in METHODS.items() if function in callees), *methods)
    kernels = (*(name for name, function in KERNELS.items() if function in callees), *kernels)
    targets = (
        *(Callee("module" if isinstance(c, type) else "function", c) for c in callees),
        *(Callee("method", name) for name in methods),
        *(Callee("kernel", name) for name in kernels),
    )
    return OpRule(kind, role, targets, read, reason)


@dataclass(frozen=True)
class OpCall:
    """One expr of a graph, read by its rule."""

    expr: Expr
    kind: str
    role: Role
    inputs: tuple[TensorNode, ...]
    attrs: Mapping[str, Any]
    weight: TensorNode | None
    bias: TensorNode | None
    channel_axes: tuple[int, ...]
    rule: str
    reason: str = ""
    fixed: str = ""

    @property
    def out(self) -> TensorNode:
        """The first output."""
        return self.expr.outputs[0]

    @property
    def outputs(self) -> tuple[TensorNode, ...]:
        """All tensor outputs."""
        return tuple(self.expr.outputs)

    @classmethod
    def of(cls, expr: Expr, rule: OpRule, reading: Reading) -> OpCall:
        """Builds the call from ``reading``; ``rule`` gives the kind, role and reason that it leaves open."""
        return cls(
            expr,
            reading.kind or rule.kind,
            reading.role or rule.role,
            reading.inputs,
            MappingProxyType(dict(reading.attrs)),
            reading.weight,
            reading.bias,
            reading.channel_axes,
            rule.source,
            reading.reason or rule.reason,
            reading.fixed,
        )


INTEGERS = "integer or shape arithmetic"


def typed(expr: Expr, inputs: tuple[TensorNode, ...], attrs: Mapping[str, Any] | None = None) -> Reading:
    """Builds a reading whose role follows the types of inputs and outputs.

    A call on float32 throughout has the rule's role. A call without float32 is shape arithmetic. A call that
    mixes float32 with other types stays float.
    """
    floats = [is_float_tensor(n) for n in (*inputs, *expr.outputs)]
    if all(floats) and inputs:
        return Reading(inputs, attrs or {})
    if not any(floats) or not inputs:
        return Reading(inputs, attrs or {}, role=Role.SHAPE, reason=INTEGERS)
    return Reading(inputs, attrs or {}, role=Role.FLOAT, reason="it mixes float32 with other types")


# Counts the multiply-accumulates of an op.

_CONVS = ("conv1d", "conv2d", "conv3d", "linear")
_TRANSPOSED = ("conv_transpose2d", "conv_transpose3d")
# Kinds that multiply and accumulate, for which `count_macs` lacks a formula.
UNCOUNTED = (
    *("correlation", "deformable_conv2d", "local_conv2d", "region_restricted_conv"),
    *("multi_head_attention", "scaled_dot_product_attention"),
)
_RECURRENT = ("LSTM", "GRU", "RNN")
# Kinds of nodes of a file that multiply and accumulate, kept without a formula.
_UNCOUNTED_NODES = {
    *("Attention", "MultiHeadAttention", "GroupQueryAttention", "Conv", "ConvTranspose", "ConvInteger"),
    *("FusedConv", "DeformConv", "MatMul", "MatMulInteger", "MatMulNBits", "FusedMatMul", "Gemm"),
    *("Einsum", "If", "Loop", "Scan", "LSTM", "GRU", "RNN", "DynamicQuantizeLSTM", "DFT", "STFT"),
}


def count_macs(call: OpCall) -> int:
    """Counts the multiply-accumulates of `call` at its traced shapes: of layers and matrix products."""
    if call.out.shape is None:
        return 0
    out = math.prod(int(n) for n in call.out.shape)
    if call.weight is not None and call.kind in (*_CONVS, *_TRANSPOSED):
        weight = math.prod(int(n) for n in call.weight.shape)
        if call.kind in _TRANSPOSED:
            values, channels = math.prod(int(n) for n in call.inputs[0].shape), int(call.inputs[0].shape[1])
        else:
            values, channels = out, math.prod(int(call.weight.shape[a]) for a in call.channel_axes)
        return values * weight // max(channels, 1)
    if call.kind == "matmul" and call.inputs[0].shape:
        axis = -2 if call.attrs.get("transpose_a") else -1
        return out * int(call.inputs[0].shape[axis])
    if call.kind in ("lstm", "gru", "rnn"):  # steps and samples; a cell has only samples
        return math.prod(int(n) for n in call.inputs[0].shape[:-1]) * int(call.attrs["multiplied"])
    return _count_recurrent(call) if call.kind == "opaque" else 0


def is_uncounted(call: OpCall) -> bool:
    """Returns whether an op multiplies and accumulates in a way for which `count_macs` lacks a formula."""
    if call.kind != "opaque":
        return call.kind in UNCOUNTED
    return not count_macs(call) and any(node.op_type in _UNCOUNTED_NODES for node in _nodes(call))


def _count_recurrent(call: OpCall) -> int:
    """Counts the recurrent layers of an opaque node: each step reads both weight matrices once."""
    op = owner(call.expr)
    assert isinstance(op, OpaqueOp)
    graph, total = op.fragment.model.graph, 0
    sizes = {tensor.name: math.prod(tensor.dims) for tensor in graph.initializer}
    shapes = {value.name: node.shape for value, node in zip(graph.input, call.inputs, strict=True)}
    for node in graph.node:
        shape = shapes.get(node.input[0]) if node.op_type in _RECURRENT else None
        if shape is not None:  # steps, samples, values; or samples, steps, values
            steps = int(shape[0]) * int(shape[1])
            total += steps * sum(sizes.get(name, 0) for name in node.input[1:3])
    return total


def _nodes(call: OpCall) -> list[Any]:
    op = owner(call.expr)
    assert isinstance(op, OpaqueOp)
    return list(op.fragment.model.graph.node)
