"""Annotate: decides for every expr and tensor what is quantized, how, and why. It changes nothing.

Each stage is a walk over the flat graph that takes data and returns data. *Chains*: which ops the backend
computes in one kernel (conv + relu). *Requests*, backwards: which parameters the readers of a tensor ask for,
through ops that only move values. *Sites*, forwards: where a fake quant goes; values stay integers through
moves. *Ties*: which sites share parameters. *Weights* and *biases* follow their layers. *Notes* give reasons.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from qtrace.config import QConfig
from qtrace.errors import ConfigError
from qtrace.graph.types import Constant, Expr, GetAttr, Node, TensorNode, TracedModule
from qtrace.graph.walk import is_float_tensor, module_path, op_label, tensor_inputs
from qtrace.ops import OpCall, Role
from qtrace.ops.base import count_macs
from qtrace.preparation.annotation import (
    DYNAMIC,
    Annotation,
    ExprNote,
    Fold,
    PlacementNote,
    Plan,
    Site,
    free_name,
)
from qtrace.preparation.passes._sites import (
    Chain,
    Chains,
    Placement,
    Requests,
    find_chains,
    find_summands,
    find_weights,
    output_choice,
    place_dynamic,
    place_sites,
    propagate_requests,
    reads_rounded,
    tie_sites,
)
from qtrace.preparation.passes._view import STATIC, MixedRanges, View, distinct, read_view
from qtrace.preparation.passes.place import Placing
from qtrace.scheme import QScheme

# Parameters: the sites of the layers' weights and biases, and the layers that fold their BatchNorm.


def place_weights(view: View, chains: Chains, placement: Placement) -> dict[Expr, Site]:
    """Places one site at a weight for each different plan that its layers have for it.

    What else reads the weight, such as the look-up of rows, reads it as the first layer does.

    Returns:
        layer -> the site of its weight, in the order of the sites.
    """
    sites: dict[Expr, Site] = {}
    used_names = set(placement.sites)
    weights = find_weights(view, chains)
    for node, layers in weights.items():
        wants = [(view.weight_plan(view.calls[expr]), expr) for expr in layers]
        for index, (plan, axes) in enumerate(distinct(want for want, _ in wants)):
            readers = [reader for want, reader in wants if want == (plan, axes)]
            others = [
                user for user in node.users if user not in layers and reads_rounded(view, weights, user)
            ]
            if index or len(axes) > 1:  # exports store several axes of channels as one
                others = []
            names = tuple(reader.outputs[0].name for reader in (*readers, *others))
            preferred = node.name if index == 0 else f"{node.name}__{names[0]}"
            name = free_name(preferred, used_names, view.node_names)
            used_names.add(name)
            site = Site(name, "weight", node.name, names, name, plan, axes, node in view.fixed)
            sites.update(dict.fromkeys(readers, site))
    return sites


def place_biases(
    view: View, chains: Chains, placement: Placement, weights: Mapping[Expr, Site]
) -> list[Site]:
    """Places a site at the bias of every layer whose input has one scale and whose BatchNorm is not kept."""
    sites: list[Site] = []
    if view.backend.biases == "float":
        return sites
    rounded: set[Node] = set()
    used_names = {*placement.sites, *(site.name for site in weights.values())}
    for expr in view.order:
        if expr not in weights or expr not in chains or (call := view.calls[expr]).bias is None:
            continue
        group = placement.group_read(expr, call.inputs[0])
        if not group or chains[expr].norm is not None or placement.plan(group).scheme.per_channel:
            continue
        node, reader = call.bias, call.out.name
        preferred = f"{node.name}__{reader}" if node in rounded else node.name
        name = free_name(preferred, used_names, view.node_names)
        rounded.add(node)
        used_names.add(name)
        if isinstance(view.backend.biases, QScheme):
            choice = view.choices[expr]
            plan = choice.weight.plan(view.backend.biases)
            sites.append(Site(name, "activation", node.name, (reader,), name, plan, (), node in view.fixed))
            continue
        factor = placement.factor_read(expr, call.inputs[0])
        site = Site(name, "bias", node.name, (reader,), name, None, static=node in view.fixed)
        sites.append(replace(site, activation=group, weight=weights[expr].name, factor=factor))
    return sites


def find_folds(
    view: View, chains: Chains, placement: Placement, weights: Mapping[Expr, Site]
) -> tuple[Fold, ...]:
    """Finds the layers whose BatchNorm stays in the graph.

    Raises:
        ConfigError: for such a layer if the scales of its weight must be powers of two.
    """
    folds = []
    for layer, chain in chains.items():
        if chain.norm is None or chain.head is not layer:
            continue
        weight, norm = weights[layer], chain.norm.outputs[0].name
        if weight.plan is not None and weight.plan.scheme.power_of_two:
            raise ConfigError(
                f"site {weight.name}: its BatchNorm {norm} trains on, so folded weights lack scales that are "
                "powers of two: set qat: {bn: {fold: true}}, or power_of_two: false."
            )
        rounds_bias = view.backend.biases == "int32"
        group = placement.group_read(layer, view.calls[layer].inputs[0]) if rounds_bias else ""
        folds.append(Fold(layer.outputs[0].name, norm, weight.name, group))
    return tuple(folds)


# Notes: the state, groups and float island of each op, with the reason for its state.


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


def annotate(
    traced: TracedModule, qconfig: QConfig, placing: Placing | None = None, mixed: MixedRanges | None = None
) -> Annotation:
    """Decides what ``prepare`` will insert into ``traced``.

    Args:
        traced: a flat, expanded graph; it is only read.
        qconfig: the config; its backend says which ops run on integers.
        placing: the ops that stay float, and the choices for all; None to let the config choose.
        mixed: the ops and results that one grid would spoil; None for none.

    Returns:
        A note for every op and the list of sites; equal for equal graphs and configs.

    Raises:
        ConfigError: for rules that match nothing or ask for what the backend cannot run.
    """
    if placing is None:
        return annotate_view(read_view(traced, qconfig, mixed=mixed), qconfig)
    return annotate_view(placing.view(traced, qconfig, mixed), qconfig, placing.note)


def annotate_view(view: View, qconfig: QConfig, note: PlacementNote | None = None) -> Annotation:
    """Decides what is inserted into a graph whose ops have their choices.

    Args:
        view: the graph under its config.
        qconfig: the config.
        note: the prediction of its placement; None without one.
    """
    chains = find_chains(view)
    requests = propagate_requests(view, chains)
    placement = tie_sites(view, chains, place_sites(view, chains, requests))
    weights = place_weights(view, chains, placement)
    biases = place_biases(view, chains, placement, weights)
    weight_sites = {site.name: site for site in weights.values()}
    return Annotation(
        backend=view.backend.name,
        notes=write_notes(view, chains, requests, placement, weights),
        sites=(*placement.sites.values(), *weight_sites.values(), *biases),
        carried=placement.carried(),
        folds=find_folds(view, chains, placement, weights),
        origins=tuple(rule.origin for rule in qconfig.rules),
        inputs=tuple(n.name for n in view.traced.graph.inputs if isinstance(n, TensorNode)),
        outputs=tuple(n.name for n in view.traced.graph.outputs if isinstance(n, TensorNode)),
        factors={node.name: factor for node, factor in placement.factors.items()},
        placement=note,
        dynamic=place_dynamic(view, placement, weights),
    )
