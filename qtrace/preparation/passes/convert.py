"""Convert: freezes a calibrated graph and records the quantization parameters on its nodes.

A network may mask, scale, standardize, reshape or transpose a parameter before its layer reads it. These ops
stay while the graph is trained, so that gradients reach the parameters; a converted graph has their result.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import numpy as np
from megengine import Parameter, Tensor
from megengine.core.tensor.dtype import QuantDtypeMeta, _builtin_quant_dtypes
from megengine.quantization.utils import QParams as NodeQParams
from megengine.quantization.utils import QuantMode, create_qparams

from qtrace import ops
from qtrace.config import backends
from qtrace.errors import ConfigError
from qtrace.fakequant.base import FakeQuant
from qtrace.fakequant.fixed import FixedFakeQuant
from qtrace.fakequant.following.bias import BiasQuant
from qtrace.fakequant.following.bn_fold import LAYERS, BnFold, BnFoldCall
from qtrace.gradients import conv2d, plain
from qtrace.graph.edit import GraphEditor
from qtrace.graph.flatten import delete_attribute, flatten, set_parameter
from qtrace.graph.interpreter import evaluate_fixed, fixed_nodes
from qtrace.graph.stepping import exchange_function
from qtrace.graph.types import CallFunction, Constant, Expr, GetAttr, ModuleNode, TensorNode, TracedModule
from qtrace.graph.walk import exprs, get_module, owner, users
from qtrace.numerics import choose
from qtrace.ops import Role
from qtrace.preparation.annotation import Annotation, Fold, Site, free_name, value_name
from qtrace.preparation.model import QuantizedModel, write_record
from qtrace.preparation.passes.insert import CONTAINER
from qtrace.process import on_engine_thread
from qtrace.scheme import QParams, QScheme

# The ranges that a target fixes, bounds or runs faster, for the qparams of a calibrated model.


def centre_ranges(model: QuantizedModel) -> tuple[str, ...]:
    """Makes ranges symmetric where the placement says so, and layers are slower with a zero point.

    The zero point of such an unsigned range is its middle, so that `convert` can store it as signed integers
    with zero point 0. Ranges from 0 on have none.

    Args:
        model: a prepared model; its fake quants are changed in place. Those without qparams are skipped, and
            those whose scales the model brings.

    Returns:
        The groups that were changed.
    """
    placement = model.annotation.placement
    if placement is None or not placement.centred:
        return ()
    changed = []
    for group in sorted(_read_by_layers(model) - set(model.record.native)):
        fake_quant = model.fake_quants[group]
        scheme = fake_quant.scheme
        if scheme.signed or scheme.symmetric or scheme.per_channel or not fake_quant.calibrated:
            continue
        qparams = fake_quant.qparams()
        scale, zero_point = float(qparams.scale), int(qparams.zero_point)
        ends = (-zero_point * scale, (scheme.qmax - zero_point) * scale)
        wanted = choose(*ends, scheme.replace(symmetric=True))
        if zero_point and qparams.zero_point != wanted.zero_point:
            fake_quant.set_qparams(QParams(scheme, wanted.scale, wanted.zero_point))
            changed.append(group)
    return tuple(changed)


def _read_by_layers(model: QuantizedModel) -> set[str]:
    """Returns the groups that layers read which are slower with a zero point."""
    layers = backends.get(model.annotation.backend).slower_with_zero_point
    kinds = {note.name: note.kind for note in model.annotation.notes}
    readers = [(site.group, site.consumers) for site in model.sites if site.sort == "activation"]
    carried = model.annotation.carried.items()
    readers += [(group, tuple(users(model.nodes[name]))) for name, group in carried]
    return {
        group
        for group, exprs in readers
        if any(kinds.get(out.name) in layers for expr in exprs for out in expr.outputs)
    }


def limit_ranges(model: QuantizedModel) -> tuple[str, ...]:
    """Gives activations the ranges that the backend fixes, or at least its smallest range.

    Args:
        model: a prepared model; its fake quants are changed in place. Those without qparams are skipped.

    Returns:
        The groups that were changed.
    """
    backend = backends.get(model.annotation.backend)
    if not backend.fixed_results and not backend.smallest_range:
        return ()
    kinds = {note.name: note.kind for note in model.annotation.notes}
    nodes: dict[str, list[str]] = defaultdict(list)
    for site in model.annotation.sites:
        if site.sort == "activation":
            nodes[site.group].append(site.node)
    changed = []
    for group, names in nodes.items():
        fake_quant = model.fake_quants[group]
        if not fake_quant.calibrated:
            continue
        fixed = {
            backend.fixed_results.get(kinds.get(name, ""), {}).get(fake_quant.scheme.bits) for name in names
        }
        ends = fixed.pop() if len(fixed) == 1 else None
        if ends is not None:
            wanted = choose(*ends, fake_quant.scheme)
        else:
            wanted = _widened(fake_quant, backend.smallest_range)
        if wanted != fake_quant.qparams():
            fake_quant.set_qparams(wanted)
            changed.append(group)
    return tuple(changed)


def _widened(fake_quant: FakeQuant, smallest: float) -> QParams:
    """Returns the qparams with the scale at which the range is at least ``smallest``."""
    qparams, scheme = fake_quant.qparams(), fake_quant.scheme
    scale = np.maximum(qparams.scale, _smallest_scale(scheme, smallest))
    return QParams(scheme, scale.astype(np.float32), qparams.zero_point)


def _smallest_scale(scheme: QScheme, smallest: float) -> np.float32:
    scale = np.float32(smallest / (scheme.qmax - scheme.qmin))
    if scheme.power_of_two and scale > 0:
        return np.float32(2.0 ** np.ceil(np.log2(scale)))
    return scale


# Writes weights and biases that a graph computes from parameters as parameters, for `convert`.


def write_computed(model: TracedModule, annotation: Annotation) -> Annotation:
    """Replaces each weight, bias and static site that is computed only from parameters by a parameter.

    The parameter's node has the name of the node that it replaces. Parameters that no expr reads any more are
    deleted.

    Args:
        model: a prepared graph that is being converted; it is edited in place.
        annotation: the decisions for the graph.

    Returns:
        The decisions without the notes of the removed exprs; sites of new parameters are static.
    """
    before = exprs(model)
    computed = _find_computed(model, annotation)
    if not computed:
        return annotation
    values, names = evaluate_fixed(model, computed), {node.name for node in computed}
    with GraphEditor(model, renews_record=True) as editor:
        for node in computed:
            path = free_name(node.name, dir(model))
            set_parameter(model, path, Parameter(values[node].numpy()))
            editor.put_in_place(editor.get_attr(path), node)
    _delete_unread(model, before)
    alive = {node.name for expr in exprs(model) for node in expr.outputs}
    notes = tuple(note for note in annotation.notes if note.name in alive)
    sites = (dataclasses.replace(s, static=True) if s.node in names else s for s in annotation.sites)
    return dataclasses.replace(annotation, notes=notes, sites=tuple(sites))


def _find_computed(model: TracedModule, annotation: Annotation) -> list[TensorNode]:
    """Finds the nodes to replace, in graph order: they are computed only from unrounded parameters."""
    fixed = fixed_nodes(model, without=lambda expr: isinstance(owner(expr), (FakeQuant, BiasQuant)))
    sites = {site.node for site in annotation.sites}
    read = {node for expr in exprs(model) for node in _unrounded_parameters(expr)}
    return [
        node
        for expr in exprs(model)
        if not isinstance(expr, (GetAttr, Constant))
        for node in expr.outputs
        if node in fixed and (node.name in sites or node in read)
    ]


def _unrounded_parameters(expr: Expr) -> Iterator[TensorNode]:
    """Yields the weight, the bias and the factors that a layer or product reads, before their rounding."""
    if isinstance(owner(expr), BnFold):
        fold = BnFoldCall(*expr.args)
        yield from (node for node in (fold.weight, fold.bias) if node is not None)
    call = ops.read(expr)
    for node in (
        () if call is None or call.role is not Role.COMPUTE else (call.weight, call.bias, *call.inputs)
    ):
        if node is not None:
            yield node.expr.args[1] if isinstance(owner(node.expr), (FakeQuant, BiasQuant)) else node


def _delete_unread(model: TracedModule, before: list[Expr]) -> None:
    """Deletes the tensors that only exprs of ``before`` read, unless a called module owns them."""
    read = {expr.name: expr for expr in exprs(model) if isinstance(expr, GetAttr)}
    modules = tuple(f"{name}." for name, e in read.items() if not isinstance(e.outputs[0], TensorNode))
    deleted: set[str] = set()
    for expr in before:
        if not isinstance(expr, GetAttr) or not isinstance(expr.outputs[0], TensorNode):
            continue
        if expr.name not in read and expr.name not in deleted and not expr.name.startswith(modules):
            delete_attribute(model, expr.name)
            deleted.add(expr.name)


@on_engine_thread
def convert(prepared: TracedModule) -> TracedModule:
    """Returns a frozen copy of a calibrated module, ready to export.

    The copy is without observers and learned ranges. It computes exactly what ``prepared`` computes in the
    phase ``quantize``; a range that the target fixes is as fixed, whatever training has made of it. Weights
    and biases that are computed only from parameters are parameters of the copy.
    Every site's node, and every node that carries its integers, has ``qparams``.

    Args:
        prepared: a calibrated module; it is not changed.

    Returns:
        A converted ``TracedModule``.

    Raises:
        GraphError: when the module is not prepared.
        CalibrationError: when a site was never calibrated; the message names the site.
        ConfigError: when two sites share a weight and the fake quant of one transforms it.
    """
    before = QuantizedModel(prepared, "prepared")
    for fq in before.fake_quants.values():
        fq.qparams()
    model = flatten(before.module)
    container = getattr(model, CONTAINER)
    annotation = write_computed(model, before.annotation)
    view = QuantizedModel(model, record=dataclasses.replace(before.record, annotation=annotation))
    _write_transforms(view)
    centred = annotation.placement is not None and annotation.placement.centred
    for name, fq in view.fake_quants.items():
        setattr(container, name, _freeze(fq, signed=centred))
    annotation = _with_schemes(view) if centred else annotation
    view = QuantizedModel(model, record=dataclasses.replace(before.record, annotation=annotation))
    limit_ranges(view)
    _limit_paddings(view)
    for module in view.followers:
        module.phase = "quantize"
    annotation = _write_folds(model, annotation)
    exchange_function(model, conv2d, plain(conv2d))
    model._update_ref()
    for expr in exprs(model):
        if isinstance(expr, GetAttr) and isinstance(expr.outputs[0], ModuleNode):
            expr.outputs[0].module_type = type(expr.outputs[0].owner)
    record = dataclasses.replace(before.record, stage="converted", annotation=annotation)
    _record_nodes(QuantizedModel(model, record=record))
    write_record(model, record)
    return model


def _freeze(fq: FakeQuant, signed: bool) -> FixedFakeQuant:
    """Returns a fake quant without what was learned or observed.

    Args:
        fq: a calibrated fake quant.
        signed: whether an unsigned range with its zero point in the middle becomes a signed one with zero
            point 0, whose values are the same.
    """
    qparams = fq.qparams()
    if signed and not fq.static:
        qparams = _as_signed(qparams)
    frozen = FixedFakeQuant(
        fq.site,
        qparams.scheme,
        shape=fq.shape,
        static=fq.static,
        numel=fq.numel,
        channel_axes=fq.counted_axes,
    )
    frozen.set_qparams(qparams)
    frozen.phase = "quantize"
    frozen.training = fq.training
    return frozen


def _with_schemes(model: QuantizedModel) -> Annotation:
    """Returns the annotation with the schemes that the fake quants have."""
    sites = []
    for site in model.annotation.sites:
        if site.plan is not None and site.sort == "activation":
            scheme = model.fake_quants[site.group].scheme
            site = dataclasses.replace(site, plan=dataclasses.replace(site.plan, scheme=scheme))
        sites.append(site)
    return dataclasses.replace(model.annotation, sites=tuple(sites))


def _as_signed(qparams: QParams) -> QParams:
    """Returns the qparams with signed integers and zero point 0 if these stand for the same values."""
    scheme = qparams.scheme
    middle = 1 << (scheme.bits - 1)
    if scheme.signed or scheme.narrow or np.any(qparams.zero_point != middle):
        return qparams
    signed = scheme.replace(signed=True, symmetric=True)
    return QParams(signed, qparams.scale, np.zeros_like(qparams.zero_point))


def _write_transforms(model: QuantizedModel) -> None:
    """Applies the transforms of fake quants to their weights: the frozen fake quants only round."""
    for site in model.sites:
        if site.sort == "bias" or not site.fake_quant.transforms:
            continue
        if sum(site.node is other.node for other in model.sites) > 1:
            raise ConfigError(
                f"site {site.name}: a fake quant that transforms {site.node.name} cannot share it with "
                "another scheme: give all readers one scheme, or use another fake quant there."
            )
        expr = site.node.expr
        shaped = Parameter(site.fake_quant.transformed(expr.interpret(model.module)[0]).numpy())
        if isinstance(expr, Constant):
            expr.value = shaped
        else:
            set_parameter(model.module, expr.name, shaped)


def _write_folds(model: TracedModule, annotation: Annotation) -> Annotation:
    """Replaces layers whose BatchNorm was kept by plain layers with folded parameters."""
    container = getattr(model, CONTAINER)
    calls = {e.outputs[0].name: e for e in exprs(model) if e.outputs}
    sites = {s.name: s for s in annotation.sites}
    with GraphEditor(model, renews_record=True) as editor:
        for fold in annotation.folds:
            sites.update((s.name, s) for s in _write_fold(editor, container, fold, calls[fold.norm], sites))
    for fold in annotation.folds:
        delattr(container, BnFoldCall(*calls[fold.norm].args).module.expr.name.rpartition(".")[2])
    for norm in dict.fromkeys(BnFoldCall(*calls[fold.norm].args).norm.expr.name for fold in annotation.folds):
        delete_attribute(model, norm)  # once, if several layers share the BatchNorm
    model._update_ref()
    return dataclasses.replace(annotation, sites=tuple(sites.values()), folds=())


def _write_fold(
    editor: GraphEditor, container: Any, fold: Fold, expr: Expr, sites: dict[str, Site]
) -> tuple[Site, ...]:
    """Replaces the call ``expr`` of one `BnFold` by its layer; returns the sites of weight and bias."""
    module: Any = owner(expr)
    _, x, weight, bias, norm, _, source = BnFoldCall(*expr.args)
    scales, out = getattr(container, fold.weight), expr.outputs[0]
    path = weight.expr.name
    bias_path = (
        bias.expr.name if bias is not None else f"{path.removesuffix('weight').rstrip('.')}.bias".lstrip(".")
    )
    raw_bias = None if bias is None else get_module(editor.traced, bias_path)
    activation = getattr(container, fold.activation) if source is not None else None
    raw_weight, frozen = get_module(editor.traced, path), scales.qparams()
    *folded, factor = module.fold(raw_weight, raw_bias, norm.owner, scales, activation)
    scales.set_qparams(QParams(frozen.scheme, factor.numpy().reshape(-1), frozen.zero_point))
    for parameter_path, value in zip((path, bias_path), folded, strict=True):
        set_parameter(editor.traced, parameter_path, Parameter(value.numpy()))
    weight_node, bias_node = editor.get_attr(path), editor.get_attr(bias_path)
    weight_site = sites[fold.weight]
    quantized = editor.call_module(
        f"{CONTAINER}.{fold.weight}",
        weight_node,
        after=weight_node.expr,
        like=weight_node,
        name=value_name(fold.weight),
    )
    added = [dataclasses.replace(weight_site, consumers=(out.name,))]
    if source is not None:
        name = free_name(f"{fold.layer}_bias", sites)
        setattr(container, name, BiasQuant(name, module.bias_shape))
        getattr(container, name).phase = "quantize"
        groups = tuple(editor.get_attr(f"{CONTAINER}.{g}") for g in (fold.activation, fold.weight))
        bias_site = Site(
            name, "bias", bias_node.name, (out.name,), name, None, (), True, fold.activation, fold.weight
        )
        added.append(bias_site)
        bias_node = editor.call_module(
            f"{CONTAINER}.{name}",
            bias_node,
            *groups,
            after=bias_node.expr,
            like=bias_node,
            name=value_name(name),
        )
    layer = LAYERS[module.kind]
    new = editor.call_function(layer, x, quantized, bias_node, after=expr, like=out, **module.options)
    editor.replace_expr(expr, new)
    return tuple(added)


def _record_nodes(model: QuantizedModel) -> None:
    """Sets ``qparams`` of every site's node, and of every node that carries integers."""
    fake_quants, annotation = model.fake_quants, model.annotation
    for site in model.sites:
        if site.sort == "bias":
            activation, weight = (fake_quants[g] for g in (site.decision.activation, site.decision.weight))
            scale, _ = site.fake_quant.scale(activation, weight)
            value = create_qparams(QuantMode.SYMMERTIC, "qint32", scale=Tensor(scale.numpy()))
        else:
            value = _node_qparams(site.fake_quant)
        assert site.value is not None  # folds are written as layers
        site.node.qparams = site.value.qparams = value
    for name, group in annotation.carried.items():
        model.nodes[name].qparams = _node_qparams(fake_quants[group], annotation.factors.get(name, 1.0))


def _node_qparams(fq: FakeQuant, factor: float = 1.0) -> NodeQParams:
    affine = bool(np.any(fq.zero_point.numpy()))
    mode = QuantMode.ASYMMERTIC if affine or not fq.scheme.symmetric else QuantMode.SYMMERTIC
    zero_point = Tensor(fq.zero_point.numpy()) if mode is QuantMode.ASYMMERTIC else None
    scale = Tensor(fq.effective_scale().numpy() * np.float32(factor))
    return create_qparams(mode, dtype_meta(fq.scheme), scale, zero_point)


_BUILTIN_DTYPES = {
    (m.qmin, m.qmax, m.np_dtype_str): m for m in reversed(list(_builtin_quant_dtypes.values()))
}


def dtype_meta(scheme: QScheme) -> QuantDtypeMeta:
    """Returns MegEngine's dtype for the integers of ``scheme``: a built-in one if there is one."""
    storage = f"{'int' if scheme.signed else 'uint'}{8 if scheme.bits <= 8 else 16}"
    builtin = _BUILTIN_DTYPES.get((scheme.qmin, scheme.qmax, storage))
    if builtin is not None:
        return builtin
    name = f"q{'int' if scheme.signed else 'uint'}{scheme.bits}{'_narrow' if scheme.narrow else ''}"
    return QuantDtypeMeta(name, None, storage, scheme.qmin, scheme.qmax, not scheme.signed)


def _limit_paddings(model: QuantizedModel) -> None:
    """Pads integers that a maximum reads with the lowest one, instead of a number far below all of them.

    The maximum is the same: no integer is smaller. A runtime lacks another number for the padding, and some
    fail on one that its scale does not hold. For a minimum, the padding is the largest integer.

    Args:
        model: a calibrated model; the arguments of its paddings are changed in place.
    """
    with GraphEditor(model.module, renews_record=True) as editor:
        for name, qparams in model.carried_qparams().items():
            expr = model.nodes[name].expr
            call = ops.read(expr)
            value = 0.0 if call is None or call.kind != "pad" else call.attrs.get("value", 0.0)
            if not value or not isinstance(expr, CallFunction):
                continue
            scheme, zero_point = qparams.scheme, qparams.zero_point.astype(np.int64)
            low = (scheme.qmin - zero_point) * qparams.scale
            high = (scheme.qmax - zero_point) * qparams.scale
            limited = np.clip(np.float32(value), np.float32(low.min()), np.float32(high.max()))
            editor.set_argument(expr, "constant_value", float(limited))
