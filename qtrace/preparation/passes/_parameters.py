"""Parameters: the sites of the layers' weights and biases, and the layers that fold their BatchNorm."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from qtrace.errors import ConfigError
from qtrace.graph.types import Expr, Node
from qtrace.preparation.annotation import Fold, Site, free_name
from qtrace.preparation.passes._chains import Chains, find_weights, reads_rounded
from qtrace.preparation.passes._sites import Placement
from qtrace.preparation.passes._view import View, distinct, plan_of
from qtrace.scheme import QScheme

__all__ = ["find_folds", "place_biases", "place_weights"]


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
            plan = plan_of(view.backend.biases, choice.weight_observer, choice.fakequant)
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
