"""What annotate says about each expr: its state, its groups, and why."""

from __future__ import annotations

import math
from collections.abc import Mapping

from qtrace.graph.types import Constant, Expr, GetAttr, Node, TensorNode
from qtrace.graph.walk import is_float_tensor, module_path, op_label, tensor_inputs
from qtrace.ops import OpCall, Role
from qtrace.preparation.annotation import ExprNote, Plan
from qtrace.preparation.passes._chains import Chains
from qtrace.preparation.passes._view import STATIC, View

__all__ = ["Notes", "macs"]


class Notes:
    """Writes the notes of one graph.

    Args:
        view: the graph under its config.
        chains: which ops are computed as one.
        groups: node -> the group of its value, for nodes that hold integers.
        reads: (node, expr) -> the group of what the expr reads, where that differs from the node's.
        weights: expr -> the site of its weight.
        plans: site -> how it is quantized.
        asks: expr -> what it asks for at its inputs.
    """

    def __init__(
        self,
        view: View,
        chains: Chains,
        groups: Mapping[Node, str],
        reads: Mapping[tuple[Node, Expr], str],
        weights: Mapping[Expr, str],
        plans: Mapping[str, Plan],
        asks: Mapping[Expr, str],
    ) -> None:
        self.view, self.chains = view, chains
        self.groups, self.reads, self.weights, self.plans = groups, reads, weights, plans
        self.asks = asks
        self.order = [e for e in view.order if not isinstance(e, (GetAttr, Constant))]

    def all(self) -> tuple[ExprNote, ...]:
        """One note for each op, in graph order."""
        islands = self._islands()
        return tuple(self._note(e, islands.get(e, 0)) for e in self.order)

    def _note(self, expr: Expr, island: int) -> ExprNote:
        call, head = self.view.calls.get(expr), self.chains.head.get(expr)
        state = self._state(expr)
        output = self.groups.get(expr.outputs[0], "") if expr.outputs else ""
        return ExprNote(
            name=expr.outputs[0].name if expr.outputs else "",
            op=op_label(expr),
            kind=call.kind if call else "",
            role=call.role.value if call else "",
            path=module_path(expr),
            state=state,
            into=head.outputs[0].name if state == "fused" and head is not None else "",
            inputs=tuple(self._read(expr, n) for n in call.inputs) if call else (),
            reads=self._names_read(expr),
            gives=tuple(n.name for n in expr.outputs),
            asks=self.asks.get(expr, ""),
            output=output,
            scheme=self.plans[output].scheme.describe() if output else "",
            weight=self.weights.get(expr, ""),
            rule=call.rule if call else "",
            matched=self.view.choices[expr].rules if call else (),
            ranks=self.view.choices[expr].ranks if call else (),
            causes=self._causes(expr, state),
            reason=self._reason(expr, state),
            macs=macs(call) if call else 0,
            island=island,
        )

    def _read(self, expr: Expr, node: TensorNode) -> str:
        return self.reads.get((expr, node)) or self.groups.get(node, "")

    def _names_read(self, expr: Expr) -> tuple[str, ...]:
        call = self.view.calls.get(expr)
        first = call.inputs if call else ()
        used = {*first, call.weight, call.bias} if call else set()
        others = {n.name: None for n in tensor_inputs(expr) if n not in used}
        return (*(n.name for n in first), *others)

    def _causes(self, expr: Expr, state: str) -> tuple[str, ...]:
        if state != "float":
            return ()
        return tuple(c.code for c in self.view.float_causes.get(expr, ())) or ("idle",)

    def _state(self, expr: Expr) -> str:
        head = self.chains.head.get(expr)
        if head is not None:
            return "int" if head is expr else "fused"
        if self.view.carries(expr) and any(n in self.groups for n in expr.outputs):
            return "carried"
        return "float" if self._computes_floats(expr) else "shape"

    def _computes_floats(self, expr: Expr) -> bool:
        call = self.view.calls.get(expr)
        if call is not None and call.role is Role.SHAPE:
            return False
        return any(is_float_tensor(n) and n not in self.view.static for n in expr.outputs)

    def _reason(self, expr: Expr, state: str) -> str:
        call = self.view.calls.get(expr)
        said = (self._cause(expr, state), call.fixed if call else "")
        return "; ".join(part for part in said if part)

    def _cause(self, expr: Expr, state: str) -> str:
        if state in ("int", "fused"):
            return (self._without_effect(expr) if state == "fused" else "") or self._unrounded(expr)
        if state == "carried" and expr in self.view.scaling:
            return f"the integers stay: it multiplies their scale by {self.view.scaling[expr]:g}"
        if state not in ("float", "shape"):
            return ""
        if not any(is_float_tensor(n) for n in expr.outputs):
            return "integer or shape arithmetic"
        causes = self.view.float_causes.get(expr, ())
        if state == "shape":  # a rule or a region that covers it has no say
            return next((c.reason for c in causes if c.code == "shape"), STATIC)
        return causes[0].reason if causes else "its input is float and not all its readers ask for integers"

    def _without_effect(self, expr: Expr) -> str:
        """Why a rule for a fused op does not do all that it says."""
        head = self.chains.head[expr]
        own, first = self.view.choices[expr], self.view.choices[head]
        if own.rank <= first.rank:
            return ""
        where = own.rules[-1]
        if self.chains.tail[head] is not expr:
            return f"{where} has no effect: nothing is rounded inside of the kernel of {head.outputs[0].name}"
        return f"{where} changes its result only: what it reads is not rounded inside of the kernel"

    def _unrounded(self, expr: Expr) -> str:
        """Why the result of a chain is no site, if it is none."""
        head = self.chains.head[expr]
        if self.chains.tail[head] is not expr or expr.outputs[0] in self.groups:
            return ""
        if not self.chains.output_choice(head).quantize_output:
            return "its result stays float: the config says quantize_output: false"
        if self.view.must_not_vanish(expr.outputs[0]):
            return "its result stays float: a logarithm, root or quotient of it must not meet a rounded zero"
        return "its readers ask for different parameters: each rounds the result for itself"

    def _islands(self) -> dict[Expr, int]:
        """Id of expr -> the number of its float island: connected float ops that integers enter and leave."""
        member = {e: e for e in self.order if self._state(e) == "float"}
        number: dict[Expr, int] = {}
        count = 0
        for expr in self.order:
            if expr not in member or expr in number:
                continue
            found, borders = self._connected(expr, member)
            if borders == {"in", "out"}:
                count += 1
                number.update(dict.fromkeys(found, count))
            else:
                number.update(dict.fromkeys(found, 0))
        return number

    def _connected(self, start: Expr, member: Mapping[Node, Expr]) -> tuple[set[Expr], set[str]]:
        found, borders, stack = {start}, set(), [start]
        while stack:
            expr = stack.pop()
            before = [n.expr for n in expr.inputs if is_float_tensor(n) and n not in self.view.static]
            behind = [u for n in expr.outputs if is_float_tensor(n) for u in n.users]
            for side, near in (("in", before), ("out", behind)):
                for other in near:
                    if other in member:
                        if other not in found:
                            found.add(other)
                            stack.append(other)
                    elif self._state(other) in ("int", "carried", "fused"):
                        borders.add(side)
        return found, borders


def macs(call: OpCall) -> int:
    """How many multiplications with accumulation a call makes, at the shapes it was traced with."""
    if call.out.shape is None:
        return 0
    out = math.prod(int(n) for n in call.out.shape)
    if call.weight is not None and call.kind in ("conv1d", "conv2d", "conv3d", "conv_transpose2d", "linear"):
        weight = math.prod(int(n) for n in call.weight.shape)
        if call.kind == "conv_transpose2d":
            values, channels = math.prod(int(n) for n in call.inputs[0].shape), int(call.inputs[0].shape[1])
        else:
            values, channels = out, math.prod(int(call.weight.shape[a]) for a in call.channel_axes)
        return values * weight // max(channels, 1)
    if call.kind == "matmul" and call.inputs[0].shape:
        axis = -2 if call.attrs.get("transpose_a") else -1
        return out * int(call.inputs[0].shape[axis])
    return 0
