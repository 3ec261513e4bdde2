"""Notes: the state, groups and float island of each op, with the reason for its state."""

from __future__ import annotations

from collections.abc import Mapping

from qtrace.graph.types import Constant, Expr, GetAttr, TensorNode
from qtrace.graph.walk import is_float_tensor, module_path, op_label, tensor_inputs
from qtrace.ops import OpCall, Role
from qtrace.ops.base import count_macs
from qtrace.preparation.annotation import DYNAMIC, ExprNote, Plan, Site
from qtrace.preparation.passes._chains import Chain, Chains, find_summands, output_choice
from qtrace.preparation.passes._requests import Requests
from qtrace.preparation.passes._sites import Placement
from qtrace.preparation.passes._view import STATIC, View

__all__ = ["write_notes"]


def write_notes(
    view: View,
    chains: Chains,
    requests: Requests,
    placement: Placement,
    weights: Mapping[Expr, Site],
) -> tuple[ExprNote, ...]:
    """Writes one note for each op, in execution order.

    Args:
        view: the graph under its config.
        chains: expr -> the chain that it belongs to.
        requests: node -> the requests of its readers.
        placement: the activation sites, and the nodes that hold integers.
        weights: layer -> the site of its weight.
    """
    states = _find_states(view, chains, placement)
    islands = _number_islands(view, states)
    unrounded = _find_unrounded(view, chains, requests)
    plans = {r.reader: r.plan for node in requests for r in requests[node] if not r.partial}
    notes = []
    for expr, state in states.items():
        call, outputs = view.calls.get(expr), expr.outputs
        output = placement.groups.get(outputs[0], "") if outputs else ""
        note = ExprNote(
            name=outputs[0].name if outputs else "",
            op=op_label(expr),
            kind=call.kind if call else "",
            role=call.role.value if call else "",
            path=module_path(expr),
            state=state,
            into=chains[expr].head.outputs[0].name if state == "fused" else "",
            inputs=tuple(placement.group_read(expr, n) for n in call.inputs) if call else (),
            reads=_names_read(expr, call),
            gives=tuple(n.name for n in outputs),
            asks=_asks(view, plans, expr),
            output=output,
            scheme=placement.plan(output).scheme.describe() if output else "",
            weight=weights[expr].name if expr in weights else "",
            rule=call.rule if call else "",
            matched=view.choices[expr].rules if call else (),
            ranks=view.choices[expr].ranks if call else (),
            causes=_causes(view, expr, state),
            reason=_reason(view, chains, placement, expr, state, unrounded),
            macs=count_macs(call) if call else 0,
            island=islands.get(expr, 0),
        )
        notes.append(note)
    return tuple(notes)


def _asks(view: View, plans: Mapping[Expr, Plan], expr: Expr) -> str:
    if view.method(expr) == "dynamic":
        return DYNAMIC
    return plans[expr].describe() if expr in plans else ""


def _find_unrounded(view: View, chains: Chains, requests: Requests) -> dict[TensorNode, str]:
    """Maps the results that the backend leaves in float, whatever a config says, to the reason."""
    reasons = {}
    if view.backend.rounds_for_readers:
        unread = (chain.output for chain in chains.values() if chain.output not in requests)
        reasons.update(dict.fromkeys(unread, "no op on integers reads it"))
    for total, summand in find_summands(view, chains).items():
        reasons[summand.result] = f"{total.outputs[0].name} adds it in the same kernel"
    return reasons


def _find_states(view: View, chains: Chains, placement: Placement) -> dict[Expr, str]:
    """Maps each op, in execution order, to its state as `ExprNote` defines it."""
    ops = (expr for expr in view.order if not isinstance(expr, (GetAttr, Constant)))
    return {expr: _state(view, chains, placement, expr) for expr in ops}


def _state(view: View, chains: Chains, placement: Placement, expr: Expr) -> str:
    if view.method(expr) == "dynamic":
        return "int"
    if expr in chains:
        return "int" if chains[expr].head is expr else "fused"
    if view.carries(expr) and any(node in placement.groups for node in expr.outputs):
        return "carried"
    call = view.calls.get(expr)
    reads_shapes = call is not None and call.role is Role.SHAPE
    floats = any(map(view.is_data, expr.outputs))
    return "float" if floats and not reads_shapes else "shape"


def _number_islands(view: View, states: Mapping[Expr, str]) -> dict[Expr, int]:
    """Numbers the connected parts of float ops that integers enter and leave, in execution order.

    Returns:
        float op -> the number of its island; 0 for a part that integers do not both enter and leave.
    """
    numbers: dict[Expr, int] = {}
    count = 0
    for expr, state in states.items():
        if state == "float" and expr not in numbers:
            part, is_island = _connected_floats(view, states, expr)
            count += is_island
            numbers.update(dict.fromkeys(part, count if is_island else 0))
    return numbers


def _connected_floats(view: View, states: Mapping[Expr, str], start: Expr) -> tuple[set[Expr], bool]:
    """Returns the float ops that are connected with ``start``, and whether integers enter and leave them."""
    part, borders, stack = {start}, set(), [start]
    while stack:
        expr = stack.pop()
        before = [n.expr for n in expr.inputs if view.is_data(n)]
        behind = [u for n in expr.outputs if is_float_tensor(n) for u in n.users]
        for side, neighbours in (("in", before), ("out", behind)):
            for other in neighbours:
                state = states.get(other)
                if state in ("int", "carried", "fused"):
                    borders.add(side)
                elif state == "float" and other not in part:
                    part.add(other)
                    stack.append(other)
    return part, borders == {"in", "out"}


def _names_read(expr: Expr, call: OpCall | None) -> tuple[str, ...]:
    """Returns the names of the op's inputs, then of its other tensors except weight and bias."""
    inputs = call.inputs if call else ()
    used = {*inputs, call.weight, call.bias} if call else set()
    others = {n.name: None for n in tensor_inputs(expr) if n not in used}
    return (*(n.name for n in inputs), *others)


def _causes(view: View, expr: Expr, state: str) -> tuple[str, ...]:
    """Returns the codes of what keeps the op in float, if it stays float."""
    if state != "float":
        return ()
    return tuple(cause.code for cause in view.float_causes.get(expr, ())) or ("idle",)


def _reason(
    view: View,
    chains: Chains,
    placement: Placement,
    expr: Expr,
    state: str,
    unrounded: Mapping[TensorNode, str],
) -> str:
    """Explains the state of the op, and which of its arguments are read as the traced sizes.

    Args:
        view: the graph under its config.
        chains: expr -> the chain that it belongs to.
        placement: the activation sites, and the nodes that hold integers.
        expr: the op.
        state: its state.
        unrounded: result that the backend leaves in float -> why.
    """
    call = view.calls.get(expr)
    if view.method(expr):
        reason = view.float_causes[expr][0].reason
    elif state in ("int", "fused"):
        chain = chains[expr]
        reason = _without_effect(view, chain, expr) or _unrounded(view, placement, chain, expr, unrounded)
    elif state == "carried":
        reason = ""
        if expr in view.scaling:
            reason = f"the integers stay: it multiplies their scale by {view.scaling[expr]:g}"
    else:
        reason = _float_reason(view, expr, state)
    return "; ".join(part for part in (reason, call.fixed if call else "") if part)


def _float_reason(view: View, expr: Expr, state: str) -> str:
    """Explains why the op stays float or has nothing to quantize."""
    if not any(is_float_tensor(node) for node in expr.outputs):
        return "integer or shape arithmetic"
    causes = view.float_causes.get(expr, ())
    if state == "shape":  # rules and regions have no effect on shape arithmetic
        return next((cause.reason for cause in causes if cause.code == "shape"), STATIC)
    return causes[0].reason if causes else "its input is float and not all its readers ask for integers"


def _without_effect(view: View, chain: Chain, expr: Expr) -> str:
    """Explains why a rule for a fused op takes effect in part or not at all; "" if it takes full effect."""
    choice = view.choices[expr]
    if choice.rank <= view.choices[chain.head].rank:
        return ""
    if chain.tail is not expr:
        kernel = chain.head.outputs[0].name
        return f"{choice.rules[-1]} does nothing: nothing is rounded inside of the kernel of {kernel}"
    return f"{choice.rules[-1]} changes its result only: what it reads is not rounded inside of the kernel"


def _unrounded(
    view: View, placement: Placement, chain: Chain, expr: Expr, unrounded: Mapping[TensorNode, str]
) -> str:
    """Explains why the result of ``chain`` stays float; "" if it is rounded or ``expr`` is not the tail."""
    if chain.tail is not expr or chain.output in placement.groups:
        return ""
    for results in (view.mixed.results, view.mixed.selecting.results):
        if chain.output in results:
            return f"its result stays float: {results[chain.output]}"
    if not output_choice(view, chain).quantize_output:
        return "its result stays float: the config says quantize_output: false"
    if view.must_not_vanish(chain.output):
        return "its result stays float: a logarithm, root or quotient of it must not meet a rounded zero"
    if chain.output in unrounded:
        return f"its result stays float: {unrounded[chain.output]}"
    return "its readers ask for different parameters: each rounds the result for itself"
