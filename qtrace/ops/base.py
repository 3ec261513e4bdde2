"""How an expr is read: one `OpCall` for a module, its functional twin and its Tensor method."""

from __future__ import annotations

import enum
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from megengine import Tensor
from megengine.module import Module

from qtrace.graph.edit import signature
from qtrace.graph.types import Apply, CallFunction, CallMethod, Expr, TensorNode, is_call_module
from qtrace.graph.walk import is_float_tensor

__all__ = [
    "OpCall",
    "OpRule",
    "Reading",
    "Role",
    "Target",
    "arguments",
    "axes",
    "children",
    "named",
    "positional",
    "tensors",
    "typed",
]


class Role(enum.Enum):
    """What quantization means for an op."""

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
    """What a rule's reader found in an expr.

    Attributes:
        inputs: the tensor nodes that carry activations, in the op's order.
        attrs: constants under the op's own names (stride, axis, ...).
        weight: the weight's node, if the op has one.
        bias: the bias's node, if the op has one.
        channel_axes: the axes of the weight that count output channels, in MegEngine's layout.
        role: the role of this very call, where it depends on the arguments.
        reason: why this very call has a float or shape role, where it depends on the arguments.
        kind: the kind of this very call, where its arguments make another op of it.
    """

    inputs: tuple[TensorNode, ...]
    attrs: Mapping[str, Any] = field(default_factory=dict)
    weight: TensorNode | None = None
    bias: TensorNode | None = None
    channel_axes: tuple[int, ...] = ()
    role: Role | None = None
    reason: str = ""
    kind: str = ""


@dataclass(frozen=True)
class Target:
    """What an expr calls: a module class, a function, a Tensor method, or a kernel.

    A kernel stands in the graph where the tracer did not see the function that called it, such as
    ``F.relu`` kept in an attribute or a closure.
    """

    module: type[Module] | None = None
    function: Callable[..., Any] | None = None
    method: str | None = None
    kernel: str | None = None

    @property
    def key(self) -> tuple[str, Any]:
        """Hashable identity, equal to that of the exprs it matches."""
        if self.module is not None:
            return ("module", self.module)
        if self.function is not None:
            return ("function", self.function)
        if self.kernel is not None:
            return ("kernel", self.kernel)
        return ("method", self.method)


@dataclass(frozen=True)
class OpRule:
    """How one kind of op is recognised and read.

    Attributes:
        kind: the name that configs and exporters use, such as ``conv2d``.
        role: what quantization means for it.
        targets: what may be called.
        read: reads a matching expr; a string says why this call is not supported.
        reason: for a float or shape role, why.
    """

    kind: str
    role: Role
    targets: tuple[Target, ...]
    read: Callable[[Expr], Reading | str]
    reason: str = ""

    @property
    def source(self) -> str:
        """File and line of the reader, for ``explain``."""
        code = inspect.unwrap(self.read).__code__
        name = code.co_filename.replace("\\", "/").rpartition("/ops/")[2]
        return f"qtrace/ops/{name}:{code.co_firstlineno}"


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
        """Joins what the rule says and what its reader found."""
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
        )


def arguments(expr: Expr) -> dict[str, Any]:
    """The arguments of a call by parameter name, defaults included.

    For a module call the names are those of its ``forward`` without ``self``; for a Tensor method, whose
    signature may be unknown, the names are ``arg0`` (the tensor itself), ``arg1`` ...
    """
    args, kwargs = expr.args, expr.kwargs
    if isinstance(expr, CallFunction):
        return _bind(expr.func, args, kwargs)
    assert isinstance(expr, CallMethod)
    if is_call_module(expr):
        owner = expr.inputs[0].owner
        return _bind(type(owner).forward, (owner, *args[1:]), kwargs)
    return {**{f"arg{i}": a for i, a in enumerate(args)}, **kwargs}


def method_arguments(expr: Expr) -> dict[str, Any]:
    """The arguments of a Tensor method by its parameter names; the tensor itself is ``self``."""
    return _bind(getattr(Tensor, expr.method), expr.args, expr.kwargs)


def named(expr: Expr) -> dict[str, Any]:
    """The arguments of a function and of the Tensor method like it, by name; the tensor is ``inp``."""
    if isinstance(expr, CallFunction):
        return arguments(expr)
    found = method_arguments(expr)
    found["inp"] = found.pop("self")
    return found


def _bind(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    bound = signature(func).bind(*args, **kwargs)
    bound.apply_defaults()
    return dict(bound.arguments)


def positional(expr: Expr) -> tuple[Any, ...]:
    """The positional operands of a function, a method, a module (without itself) or a kernel."""
    if isinstance(expr, Apply):
        return tuple(expr.inputs)
    return tuple(expr.args[1:] if is_call_module(expr) else expr.args)


def tensors(*values: Any) -> tuple[TensorNode, ...]:
    """The tensor nodes among ``values``."""
    return tuple(v for v in values if isinstance(v, TensorNode))


def children(value: Any) -> tuple[TensorNode, ...]:
    """The tensor nodes in nested tuples, lists, dicts and slices."""
    if isinstance(value, TensorNode):
        return (value,)
    if isinstance(value, slice):
        value = (value.start, value.stop, value.step)
    if isinstance(value, dict):
        value = tuple(value.values())
    return tuple(n for v in value for n in children(v)) if isinstance(value, (tuple, list)) else ()


def axes(value: Any) -> tuple[int, ...] | None:
    """An axis, several, or None (all) as a tuple or None."""
    if value is None:
        return None
    return tuple(int(i) for i in (value if isinstance(value, (tuple, list)) else [value]))


INTEGERS = "integer or shape arithmetic"


def typed(expr: Expr, inputs: tuple[TensorNode, ...], attrs: Mapping[str, Any] | None = None) -> Reading:
    """A reading whose role follows the types of inputs and outputs.

    Float32 throughout has the rule's role. Where no float32 is read or written it is shape arithmetic, and
    where both sorts meet the call stays float.
    """
    floats = [is_float_tensor(n) for n in (*inputs, *expr.outputs)]
    if all(floats) and inputs:
        return Reading(inputs, attrs or {})
    if not any(floats) or not inputs:
        return Reading(inputs, attrs or {}, role=Role.SHAPE, reason=INTEGERS)
    return Reading(inputs, attrs or {}, role=Role.FLOAT, reason="it mixes float32 with other types")
