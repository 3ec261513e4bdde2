"""The graph under its config, as all stages of `annotate` read it: op calls, choices, causes for float."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple, TypeVar

import numpy as np

from qtrace import ops
from qtrace.config import QConfig, backends
from qtrace.config.backends import Backend
from qtrace.errors import ConfigError
from qtrace.graph.interpreter import fixed_nodes, static_nodes
from qtrace.graph.types import Expr, Node, TensorNode, TracedModule
from qtrace.graph.walk import exprs, is_float_tensor
from qtrace.ops import OpCall, Role
from qtrace.preparation.annotation import Plan
from qtrace.preparation.passes._choices import GIVEN, Choice, choose, find_region
from qtrace.preparation.passes._infinity import INFINITE, find_infinite, read_paddings

STATIC = "it is computed only from shapes and constants"

_SINGULAR = ("log", "sqrt", "pow", "div")
INT_ROLES = (Role.COMPUTE, Role.ELEMENTWISE, Role.ACTIVATION, Role.NORM, Role.CONCAT)
_T = TypeVar("_T")


class FloatCause(NamedTuple):
    """A cause that keeps an expr in float.

    Attributes:
        code: a code of `ExprNote.causes`, or "shape" or "static" for exprs that are never quantized.
        reason: the cause as a clause, for reports.
    """

    code: str
    reason: str


@dataclass(frozen=True)
class Selecting:
    """What stays in float on account of selections.

    Attributes:
        floats: expr that stays in float -> why.
        results: result of an op on integers that is not rounded -> why.
    """

    floats: Mapping[Expr, str] = field(default_factory=dict)
    results: Mapping[Node, str] = field(default_factory=dict)


@dataclass(frozen=True)
class MixedRanges:
    """What stays in float since one grid would spoil a part of a value with parts of unlike ranges.

    Attributes:
        floats: expr that stays in float -> why.
        results: result of an op on integers that is not rounded -> why.
        large_inputs: input of the graph -> its values in the samples, where some may stand for infinity.
        selecting: what stays in float on account of selections.
    """

    floats: Mapping[Expr, str] = field(default_factory=dict)
    results: Mapping[Node, str] = field(default_factory=dict)
    large_inputs: Mapping[str, np.ndarray] = field(default_factory=dict)
    selecting: Selecting = field(default_factory=Selecting)


@dataclass(frozen=True)
class View:
    """One graph under one config.

    Attributes:
        traced: the flat, expanded graph.
        calls: expr -> the `OpCall` that it is read as.
        choices: expr -> the config's choice for it.
        backend: the description of the target.
        region: the exprs in the config's region; None for all.
        static: the nodes whose values depend on no input of the graph.
        placed: expr that the placement keeps in float -> why.
        infinite: the exprs that read or write numbers that stand for infinity.
        mixed: the ops and results that one grid would spoil.
    """

    traced: TracedModule
    calls: Mapping[Expr, OpCall]
    choices: Mapping[Expr, Choice]
    backend: Backend
    region: set[Expr] | None
    static: set[Node]
    placed: Mapping[Expr, str] = field(default_factory=dict)
    infinite: set[Expr] = field(default_factory=set)
    mixed: MixedRanges = field(default_factory=MixedRanges)

    @cached_property
    def order(self) -> list[Expr]:
        """The exprs in execution order."""
        return exprs(self.traced)

    @cached_property
    def node_names(self) -> set[str]:
        """The names of the nodes of the graph."""
        return {
            node.name for node in (*self.traced.graph.inputs, *(n for e in self.order for n in e.outputs))
        }

    @cached_property
    def fixed(self) -> set[Node]:
        """The nodes that are computed only from parameters and constants."""
        return fixed_nodes(self.traced)

    @cached_property
    def outputs(self) -> set[Node]:
        """The graph's outputs."""
        return set(self.traced.graph.outputs)

    def is_data(self, node: Node) -> bool:
        """Returns whether ``node`` holds floats that depend on an input of the graph."""
        return is_float_tensor(node) and node not in self.static

    @cached_property
    def float_causes(self) -> dict[Expr, list[FloatCause]]:
        """Expr -> every cause that keeps it in float; each of them would be enough."""
        float_causes = {expr: causes for expr in self.order if (causes := self._find_causes(expr))}
        return (
            {**float_causes, **self._unread_concats(float_causes)}
            if self.backend.rounds_for_readers
            else float_causes
        )

    def _unread_concats(self, causes: Mapping[Expr, list[FloatCause]]) -> dict[Expr, list[FloatCause]]:
        """Finds the joins that no op on integers reads, moved or not: rounding would serve nothing."""
        reading: set[Node] = set()  # the nodes that some op on integers reads
        unread: dict[Expr, list[FloatCause]] = {}
        for expr in reversed(self.order):
            call = self.calls.get(expr)
            if call is None or expr in causes:
                continue
            joins = call.role is Role.CONCAT and not self.choices[expr].quantize
            if (joins or call.role is Role.CARRY) and reading.isdisjoint(expr.outputs):
                if joins:
                    unread[expr] = [FloatCause("speed", "no op on integers reads the result")]
                continue
            reading.update(call.inputs)
        return unread

    def _find_causes(self, expr: Expr) -> list[FloatCause]:
        call = self.calls.get(expr)
        if call is None:
            reason = ops.unsupported(expr)
            return [FloatCause("unread", reason)] if reason else []
        if call.role is Role.SHAPE:
            return [FloatCause("shape", call.reason or "integer or shape arithmetic")]
        if call.role is not Role.CARRY and expr.outputs and all(n in self.static for n in expr.outputs):
            return [FloatCause("static", STATIC)]
        if expr in self.infinite:
            return [FloatCause("infinity", INFINITE)]
        if self.choices[expr].method != "static" and call.role in INT_ROLES:
            return [*self._asked_causes(expr, call), FloatCause("method", self._method_reason(call))]
        causes = []
        if self.region is not None and expr not in self.region:
            causes.append(FloatCause("region", "it lies outside of the region"))
        choice = self.choices[expr]
        if call.role is Role.COMPUTE and choice.decided != GIVEN and (reason := self._computed(call)):
            if choice.quantize and not causes:
                cure = ", or give the weight all of 8 bits (narrow: false)" if "weight" in reason else ""
                raise ConfigError(
                    f"{choice.decided}: {reason} ({call.out.name}), so quantize: true cannot be had; drop "
                    f"it{cure if self.backend.computed_weights == 'rounded' else ''}."
                )
            causes.append(FloatCause("role", reason))
        if expr in self.mixed.floats and not choice.quantize:
            causes.append(FloatCause("range", self.mixed.floats[expr]))
        if expr in self.mixed.selecting.floats:
            causes.append(FloatCause("selection", self.mixed.selecting.floats[expr]))
        if expr in self.placed:
            causes.append(FloatCause("placement", self.placed[expr]))
        elif choice.quantize is False:
            causes.append(FloatCause("rule", f"{choice.decided} says quantize: false"))
        if call.role is Role.FLOAT and not choice.quantize:
            causes.append(FloatCause("role", call.reason))
        if not all(is_float_tensor(n) for n in (*call.inputs, *call.outputs)):
            causes.append(FloatCause("dtype", "its values are not float32"))
        elif call.role in (*INT_ROLES, Role.FLOAT) and call.kind not in self.backend.ops:
            causes += self._without_kernel(call, choice, bool(causes))
        elif self.backend.slower is not None and not choice.quantize and call.role in INT_ROLES:
            reason = self.backend.slower(call, expr in self._first)
            causes += [FloatCause("speed", reason)] if reason else []
        return causes

    def _asked_causes(self, expr: Expr, call: OpCall) -> list[FloatCause]:
        """Returns the causes by which an op stays in float whatever its method."""
        causes = []
        if self.region is not None and expr not in self.region:
            causes.append(FloatCause("region", "it lies outside of the region"))
        if self.choices[expr].quantize is False:
            causes.append(FloatCause("rule", f"{self.choices[expr].decided} says quantize: false"))
        if not all(is_float_tensor(n) for n in (*call.inputs, *call.outputs)):
            causes.append(FloatCause("dtype", "its values are not float32"))
        return causes

    def _method_reason(self, call: OpCall) -> str:
        """Says what the method of a layer rounds, or why another op's method rounds nothing."""
        choice = self.choices[call.expr]
        origin = f"{choice.method_origin} says method: {choice.method}"
        if call.weight is None:
            return f"{origin}, which quantizes only layers with a weight"
        if call.weight not in self.fixed:
            return f"{origin}, and its weight is computed from the model's input"
        if call.kind not in self.backend.kinds_of(choice.method):
            return f"{origin}, which backend {self.backend.name} does not have for {call.kind}"
        if choice.method == "dynamic":
            return f"it rounds what it reads by the range of each batch, and gives floats: {origin}"
        return f"only its weight is stored as integers: {origin}"

    def method(self, expr: Expr) -> str:
        """Returns "dynamic" or "weight_only" for a layer that is quantized so, "" for any other op."""
        call = self.calls.get(expr)
        causes = self.float_causes.get(expr, ())
        if call is None or call.weight is None or [cause.code for cause in causes] != ["method"]:
            return ""
        method = self.choices[expr].method
        able = call.weight in self.fixed and is_float_tensor(call.weight)
        return method if able and call.kind in self.backend.kinds_of(method) else ""

    def _computed(self, call: OpCall) -> str:
        """Returns why the weight or bias of a layer cannot be rounded as it depends on an input; else ""."""
        backend, known = self.backend, self.fixed | self.static
        computed = [
            role
            for role, node in (("weight", call.weight), ("bias", call.bias))
            if node is not None and node not in known
        ]
        if computed and backend.computed_weights == "refused":
            raise ConfigError(
                f"{call.out.name}: its {computed[0]} is computed from the model's input, but files for "
                f"{backend.name} hold only stored ones: store it, or end the graph before it."
            )
        reason = f"is computed from the input, which {backend.name}'s file cannot hold as integers"
        if "bias" in computed and backend.biases != "float":
            return f"its bias {reason}"
        if "weight" not in computed:
            return ""
        scheme = self.weight_plan(call)[0].scheme
        clipped = scheme.narrow or scheme.bits not in (8, 16)
        if backend.computed_weights == "float" or (scheme.per_channel and clipped):
            return (
                f"its weight is computed from the input, which {backend.name}'s file cannot hold as integers"
            )
        return ""

    @cached_property
    def _first(self) -> set[Expr]:
        """The layers and products before which there is no other."""
        computed: set[Node] = set()  # nodes that depend on a layer
        first = set()
        for expr in self.order:
            behind = not computed.isdisjoint(expr.inputs)
            call = self.calls.get(expr)
            if call is not None and call.role is Role.COMPUTE and not behind:
                first.add(expr)
                behind = True
            if behind:
                computed.update(expr.outputs)
        return first

    def _without_kernel(self, call: OpCall, choice: Choice, already_float: bool) -> list[FloatCause]:
        """Returns the cause that the backend lacks a kernel, unless it rounds around the float op instead."""
        if self.backend.rounds_around_float and (choice.quantize or call.role is Role.FLOAT):
            return []
        slower = "" if self.backend.slower is None else self.backend.slower(call, False)
        reason = slower or f"backend {self.backend.name} has no integer kernel for {call.kind}"
        if choice.quantize and not already_float:
            raise ConfigError(
                f"{choice.decided}: {reason} ({call.out.name}), so quantize: true is impossible: drop it."
            )
        return [FloatCause("kernel", reason)]

    @cached_property
    def scaling(self) -> dict[Expr, float]:
        """Expr -> the factor, for multiplications that only change the scale of their input."""
        trains_norms = any(c.role is Role.NORM for c in self.calls.values())
        if not self.backend.scales_freely or trains_norms:
            return {}
        factors = {e: self._factor(e) for e in self.order if e not in self.float_causes}
        return {expr: factor for expr, factor in factors.items() if factor is not None}

    def _factor(self, expr: Expr) -> float | None:
        """Returns the factor by which ``expr`` multiplies if a change of the scale does the same.

        A power of two keeps float32 values exact. By others the file is off by a part in 10^7 before it
        rounds. That changes integers where many values lie half-way between two, as in a sum of tensors with
        equal scales. It does not in a product with another tensor.
        """
        call = self.calls.get(expr)
        if call is None or call.kind not in ("mul", "div") or "scalar" not in call.attrs:
            return None
        choice, scalar = self.choices[expr], call.attrs["scalar"]
        has_rule = (
            choice.output is not None or not choice.quantize_output or choice.activation.scheme.per_channel
        )
        if has_rule or (call.kind == "div" and call.attrs["side"] != "right"):
            return None
        if not 2.0**-16 <= scalar <= 2.0**16:
            return None
        if math.frexp(scalar)[0] != 0.5 and not self._is_factor(call.out):
            return None
        return 1.0 / scalar if call.kind == "div" else float(scalar)

    def _is_factor(self, node: TensorNode) -> bool:
        """Returns whether all that reads ``node`` are products with other tensors."""
        readers = [self.calls.get(user) for user in node.users]
        return node not in self.outputs and all(
            call is not None and call.kind == "mul" and len(set(call.inputs)) == 2 for call in readers
        )

    def on_integers(self, expr: Expr) -> bool:
        """Returns whether ``expr`` (the head of its chain) computes on quantized inputs."""
        call = self.calls.get(expr)
        if call is None or expr in self.float_causes or expr in self.scaling:
            return False
        return call.role in INT_ROLES or call.role is Role.FLOAT

    def carries(self, expr: Expr) -> bool:
        """Returns whether ``expr`` moves integers as it moves floats, or changes nothing but their scale."""
        call = self.calls.get(expr)
        if call is None or expr in self.float_causes:
            return False
        return call.role is Role.CARRY or expr in self.scaling

    def must_not_vanish(self, node: TensorNode) -> bool:
        """Returns whether a float op without a value or slope at zero reads ``node``, moved or not.

        Small values round to zero; their logarithm, quotient or gradient of a root is then infinite.
        """
        for user in node.users:
            call = self.calls.get(user)
            if call is None or self.on_integers(user):
                continue
            if self.carries(user):
                if any(self.must_not_vanish(n) for n in user.outputs):
                    return True
            elif call.kind in _SINGULAR and (call.kind != "div" or call.attrs["operands"][1] is node):
                return True
        return False

    def only_user(self, expr: Expr) -> Expr | None:
        """Returns the only reader of the result, if it reads nothing else and may run on integers.

        The reader needs no kernel of its own if it is fused into the kernel before it.
        """
        node = expr.outputs[0]
        if len(node.users) != 1 or node in self.outputs:
            return None
        user = node.users[0]
        call = self.calls.get(user)
        fits = all(cause.code == "kernel" for cause in self.float_causes.get(user, ()))
        return user if call is not None and fits and call.inputs == (node,) else None

    def weight_plan(self, call: OpCall) -> tuple[Plan, tuple[int, ...]]:
        """Returns the plan of a layer's weight, and the axes that count its channels."""
        choice = self.choices[call.expr]
        scheme, axes = choice.weight.scheme, call.channel_axes
        origin = choice.rules[-1] if choice.rules else choice.method_origin
        if scheme.block is not None and (call.kind != "linear" or choice.method != "weight_only"):
            raise ConfigError(
                f"{origin}: a scale for each block of inputs needs a linear layer with method: weight_only, "
                f"but {call.out.name} is {call.kind} with method: {choice.method}: give block in a rule "
                "{match: {op: linear}, method: weight_only}."
            )
        if choice.method == "dynamic" and scheme.bits > 8:
            raise ConfigError(
                f"{origin}: {call.out.name} has a weight of {scheme.bits} bits, but method: dynamic "
                "multiplies integers of 8 bits: set weight: {bits: 8}, or fewer bits."
            )
        if call.kind in self.backend.weights_per_tensor:
            scheme = scheme.replace(axis=None)
        if not scheme.per_channel or (call.kind == "conv_transpose2d" and len(axes) > 1):
            # Runtimes have no per-channel scales for grouped transposed convolutions.
            scheme, axes = scheme.replace(axis=None), ()
        else:
            scheme = scheme.replace(axis=0)
        return choice.weight.plan(scheme), axes

    def all_values_read_by(self, node: TensorNode, readers: list[Expr]) -> bool:
        """Returns whether only ``readers`` and shape arithmetic read ``node``."""
        others = [u for u in node.users if u not in readers]
        return node not in self.outputs and not any(is_float_tensor(n) for u in others for n in u.outputs)


def read_view(
    traced: TracedModule,
    qconfig: QConfig,
    choices: Mapping[Expr, Choice] | None = None,
    placed: Mapping[Expr, str] | None = None,
    mixed: MixedRanges | None = None,
) -> View:
    """Reads the exprs of ``traced``.

    Args:
        traced: a flat, expanded graph.
        qconfig: the config.
        choices: expr -> its choice; None to choose by the rules of the config.
        placed: expr that the placement keeps in float -> why.
        mixed: the ops and results that one grid would spoil.
    """
    backend = backends.get(qconfig.backend)
    calls = {e: c for e in exprs(traced) if (c := ops.read(e)) is not None}
    calls |= read_paddings(traced, calls)
    infinite = find_infinite(traced, calls, None if mixed is None else mixed.large_inputs)
    if choices is None:
        choices = choose(traced, calls, qconfig, backend)
    region = None if qconfig.region is None else find_region(traced, qconfig.region, qconfig.place)
    return View(
        traced,
        calls,
        choices,
        backend,
        region,
        static_nodes(traced),
        placed or {},
        infinite=infinite,
        mixed=mixed or MixedRanges(),
    )


def distinct(values: Iterable[_T]) -> list[_T]:
    """Removes duplicates from ``values`` and keeps their order (plans need not be hashable)."""
    different: list[_T] = []
    for value in values:
        if value not in different:
            different.append(value)
    return different
