"""Rules and readings of exprs: one `OpCall` for a module, its functional twin and its Tensor method."""

from __future__ import annotations

import enum
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from qtrace.graph.types import Expr, TensorNode
from qtrace.graph.walk import is_float_tensor

__all__ = ["INTEGERS", "Callee", "OpCall", "OpRule", "Reading", "Role", "op_rule", "typed"]


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
        methods: names of Tensor methods.
        kernels: names of kernels.
        reason: for a float or shape role, why the op is not quantized.
    """
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
