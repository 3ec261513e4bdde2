"""Insert: puts the fake quants of an annotation into the graph. It decides nothing."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping
from typing import Any

import megengine.functional as F
from megengine.module import Module

from qtrace import ops, plugins
from qtrace.fakequant.base import FakeQuant, builtin
from qtrace.fakequant.following.bias import BiasQuant
from qtrace.fakequant.following.bn_fold import BnFold
from qtrace.fakequant.following.dynamic import DynamicQuant
from qtrace.gradients import conv2d
from qtrace.graph.edit import RECORD_ATTRIBUTE, GraphEditor
from qtrace.graph.stepping import exchange_function
from qtrace.graph.types import Expr, TensorNode, TracedModule
from qtrace.graph.walk import exprs
from qtrace.observers.base import Observer
from qtrace.preparation.annotation import Annotation, Fold, Plan, Site, free_name, value_name
from qtrace.preparation.passes.base import PassResult

# The attribute of the prepared module below which all fake quants live.
CONTAINER = "qsites"


def insert(
    traced: TracedModule, annotation: Annotation, known: Mapping[str, Module] | None = None
) -> PassResult:
    """Adds one module per group of sites below ``qsites`` and one call per site.

    Convolutions get the gradients of `qtrace.gradients`; their results stay the same.

    Args:
        traced: the flat, expanded graph that was annotated; it is edited in place.
        annotation: the decisions.
        known: group -> the module that rounds it, where it is not a new one.
    """
    known = known or {}
    container = Container()
    setattr(traced, CONTAINER, container)
    nodes: dict[str, TensorNode] = {n.name: n for n in traced.graph.inputs}
    nodes.update((n.name, n) for e in exprs(traced) for n in e.outputs)
    producers: dict[str, Expr] = {name: n.expr for name, n in nodes.items()}
    changed: list[str] = []
    with GraphEditor(traced) as editor:
        for site in annotation.sites:
            node = nodes[site.node]
            if site.group == site.name:
                setattr(container, site.name, known.get(site.name) or _module(site, node))
        for fold in annotation.folds:
            new = _insert_fold(editor, container, fold, producers, {s.name for s in annotation.sites})
            nodes[fold.norm] = new
            producers[fold.layer] = producers[fold.norm] = new.expr
            changed.append(f"{fold.norm}: BatchNorm kept in training")
        folded = {f.weight for f in annotation.folds}
        for site in annotation.sites:
            if site.name in folded:  # called inside of its layer's BnFold
                continue
            node = nodes[site.node]
            path = f"{CONTAINER}.{site.group}"
            args: tuple[Any, ...] = (node,)
            if site.sort == "bias":
                groups = (site.activation, site.weight)
                args += tuple(editor.get_attr(f"{CONTAINER}.{g}") for g in groups)
            new = editor.call_module(path, *args, after=node.expr, like=node, name=value_name(site.name))
            readers = None if site.consumers is None else [producers[c] for c in site.consumers]
            editor.replace_uses(node, new, readers)
            if readers is None:  # readers with another scheme round the rounded value
                nodes[site.node] = new
            changed.append(f"{site.name}: {site.sort}")
        for entry in annotation.dynamic:
            node = nodes[entry.node]
            setattr(container, entry.name, DynamicQuant(entry.name))
            path = f"{CONTAINER}.{entry.name}"
            new = editor.call_module(path, node, after=node.expr, like=node, name=value_name(entry.name))
            editor.replace_uses(node, new, [producers[name] for name in entry.consumers])
            changed.append(f"{entry.name}: rounded by the range of each batch")
    exchange_function(traced, F.conv2d, conv2d)
    return PassResult(tuple(changed))


def _insert_fold(
    editor: GraphEditor, container: Module, fold: Fold, producers: dict[str, Expr], sites: set[str]
) -> TensorNode:
    """Replaces a layer and its BatchNorm by one call of a `BnFold`."""
    layer, norm = producers[fold.layer], producers[fold.norm]
    call = ops.read(layer)
    assert call is not None
    assert call.weight is not None
    channels = math.prod(call.weight.shape[a] for a in call.channel_axes)
    shape = (channels,) if call.kind == "linear" else (1, channels, 1, 1)
    name = free_name(f"{fold.layer}_bn", sites)
    setattr(container, name, BnFold(fold.layer, call.kind, dict(call.attrs), shape))
    source = editor.get_attr(f"{CONTAINER}.{fold.activation}") if fold.activation else None
    scales = editor.get_attr(f"{CONTAINER}.{fold.weight}")
    args = (call.inputs[0], call.weight, call.bias, norm.inputs[0], scales, source)
    new = editor.call_module(f"{CONTAINER}.{name}", *args, after=norm, like=norm.outputs[0])
    editor.replace_expr(norm, new)
    editor.remove(layer)
    return new


@builtin
class Container(Module):
    """Holds the fake quants of a prepared graph under the names of their sites."""

    only_holds = True  # for lint: a container without fake quants is no leftover

    def forward(self, *args: Any) -> None:
        """Raises `NotImplementedError`: the graph calls the children of the container instead."""
        raise NotImplementedError("qtrace's container of fake quants is not a layer")


def headline(module: TracedModule) -> str:
    """Returns the stage, phase, sites and recipe of a quantized module, and whether it is calibrated."""
    record = json.loads(getattr(module, RECORD_ATTRIBUTE))
    config, sites = record["qconfig"], json.loads(record["annotation"])["sites"]
    rounding = [child for child in getattr(module, CONTAINER).__dict__.values() if isinstance(child, Module)]
    calibrated = all(child.calibrated for child in rounding if isinstance(child, FakeQuant))
    phases = sorted({child.phase for child in rounding}) or ["float"]
    named = config.get("name") or (config.get("description") or "without a name").partition(",")[0]
    return (
        f"{record['stage']}, phase {' and '.join(phases)}: {len(sites)} "
        f"sites, recipe {named}, backend {config.get('backend', 'onnxruntime')}, "
        f"{'calibrated' if calibrated else 'not calibrated'}"
    )


def _repr(module: TracedModule) -> str:
    """Returns MegEngine's text of a graph, below a line on its quantization if there is one."""
    try:
        return f"{headline(module)}\n{Module.__repr__(module)}"
    except (AttributeError, LookupError, TypeError, ValueError):  # it is in float, edited or damaged
        return Module.__repr__(module)


# A class of its own could not be saved: MegEngine's pickles and qtrace's loader take graphs of this one.
TracedModule.__repr__ = _repr


@functools.lru_cache(maxsize=64)
def _plugin(package: str, name: str, base: type) -> type:
    return plugins.resolve(package, name, base)


def _module(site: Site, node: TensorNode) -> Module:
    shape = tuple(int(n) for n in node.shape)
    if site.plan is None:
        return BiasQuant(site.name, shape, site.factor)
    plan: Plan = site.plan
    observer_class = _plugin("qtrace.observers", plan.observer, Observer)
    observer = observer_class(plan.scheme, **dict(plan.observer_options))
    fake_class = _plugin("qtrace.fakequant", plan.fakequant, FakeQuant)
    axes = [a % len(shape) for a in site.channel_axes]
    scales = tuple(n if i in axes else 1 for i, n in enumerate(shape)) if axes else ()
    if plan.scheme.block is not None:
        scales = (shape[0], -(-shape[1] // plan.scheme.block), 1)
    numel = math.prod(shape if site.static else shape[1:]) // max(math.prod(scales), 1)
    module: Module = fake_class(
        site.name,
        plan.scheme,
        shape=scales,
        observer=observer,
        static=site.static,
        numel=numel,
        channel_axes=tuple(axes),
        **dict(plan.fakequant_options),
    )
    return module
