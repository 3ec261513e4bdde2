"""Gives the sites of a graph the scales that its model brings from MegEngine's own quantization.

`locate` finds the nodes and parameters that these scales belong to. `bring_scales` writes each on the
integers of the target, and chooses the scale of each group of sites.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
from megengine import Parameter
from megengine.module import Module

from qtrace import ops
from qtrace.config import QConfig, backends
from qtrace.errors import SchemeError
from qtrace.graph.native import LayerRanges, NativeRanges, read_ranges
from qtrace.graph.types import GetAttr, Node, TracedModule
from qtrace.graph.walk import exprs, get_module, owner
from qtrace.numerics import choose
from qtrace.ops import Role
from qtrace.preparation.annotation import Annotation, Site
from qtrace.preparation.model import NativeScale, QuantizedModel
from qtrace.scheme import QParams, QScheme

# Finds the nodes and parameters of a graph that the scales of its model belong to.

# The algorithms of a config that leave trained weights as they are, apart from the BatchNorms behind them.
_KEPT_ALGORITHMS = ("fuse_bn",)
_GONE = "no op of the graph calls the layer any more, so its scales are not used"


@dataclass(frozen=True)
class Origin:
    """The quantization parameters of a tensor, and the layer that brings them.

    Attributes:
        qparams: the parameters.
        layer: path of the layer.
        kind: the class that the layer had, such as ``qat.ConvBnRelu2d``.
    """

    qparams: QParams
    layer: str
    kind: str

    @property
    def label(self) -> str:
        """The layer in words, such as ``stem (qat.ConvBnRelu2d)``."""
        return f"{self.layer or 'the model'} ({self.kind})"


@dataclass(frozen=True)
class Located:
    """The scales of a model at the tensors of its flat graph.

    Attributes:
        activations: name of a node -> the parameters of its value.
        weights: path of a parameter -> its parameters.
        values: path of a parameter -> its value before the float stage.
        notes: a line for each reason why layers bring no scale, or none that is used.
    """

    activations: Mapping[str, Origin]
    weights: Mapping[str, Origin]
    values: Mapping[str, np.ndarray]
    notes: tuple[str, ...]


def locate(model: TracedModule) -> Located | None:
    """Finds the tensors that the scales of ``model`` belong to; None if it brings no scales.

    Args:
        model: the flat graph before its layers are expanded.

    Raises:
        GraphError: when the scales that the model carries are damaged.
    """
    ranges = read_ranges(model)
    if ranges is None:
        return None
    modules: dict[int, tuple[str, LayerRanges]] = {}
    for path, layer in ranges.layers.items():
        if (module := _find_module(model, path)) is not None:
            modules[id(module)] = (path, layer)
    activations: dict[str, Origin] = {}
    weights: dict[str, Origin] = {}
    called = {""}
    for expr in exprs(model):
        module = owner(expr)
        if module is None or id(module) not in modules:
            continue
        path, layer = modules[id(module)]
        called.add(path)
        if layer.activation is not None:
            activations[expr.outputs[0].name] = Origin(layer.activation, path, layer.kind)
        source = expr.inputs[0].expr
        if layer.weight is not None and isinstance(source, GetAttr) and _has_weight(module):
            weights[f"{source.name}.weight"] = Origin(layer.weight, path, layer.kind)
    if (whole := ranges.layers.get("")) is not None:  # the model is one layer, whose forward is the graph
        if whole.activation is not None and len(model.graph.outputs) == 1:
            activations[model.graph.outputs[0].name] = Origin(whole.activation, "", whole.kind)
        if whole.weight is not None and _has_weight(model):
            weights["weight"] = Origin(whole.weight, "", whole.kind)
    values = {path: get_module(model, path).numpy().copy() for path in weights}
    return Located(activations, weights, values, _describe_problems(ranges, called))


def _has_weight(module: Module) -> bool:
    return isinstance(getattr(module, "weight", None), Parameter)


def _find_module(model: TracedModule, path: str) -> Module | None:
    try:
        module: Module = get_module(model, path)
    except AttributeError:
        return None
    return module


def _describe_problems(ranges: NativeRanges, called: set[str]) -> tuple[str, ...]:
    """Returns a line for each reason why layers bring no scale, or none that can be used."""
    layers: dict[str, list[str]] = {}
    for path, layer in ranges.layers.items():
        for problem in layer.notes if path in called else (_GONE,):
            layers.setdefault(problem, []).append(f"{path or 'the model'} ({layer.kind})")
    return tuple(f"{', '.join(names)}: {problem}" for problem, names in layers.items())


def without_refitting(config: QConfig, located: Located) -> tuple[QConfig, tuple[str, ...]]:
    """Returns ``config`` without the algorithms that change trained weights, and a line for each of them.

    Args:
        config: the config.
        located: the scales that the model brings; if there are none, every algorithm runs.
    """
    if not located.activations and not located.weights:
        return config, ()
    entries = [spec for _, spec in config.ptq_entries]
    dropped = [spec.name for spec in entries if spec.name not in _KEPT_ALGORITHMS]
    if not dropped:
        return config, ()
    algorithms = tuple(spec for spec in config.ptq or () if spec.name in _KEPT_ALGORITHMS)
    reason = "the weights were trained with the scales that the model brings, so it does not run"
    return config.model_copy(update={"ptq": algorithms}), tuple(f"{name}: {reason}" for name in dropped)


def without_changed_layers(located: Located, model: TracedModule) -> Located:
    """Drops the scales of the layers whose weights the float stage has changed.

    Args:
        located: the scales of the graph before the float stage.
        model: the flat, expanded graph after the float stage.
    """
    changed = {
        origin.layer: f"{origin.label}: its weight was changed behind its quantization, so its scales "
        "are not used"
        for path, origin in located.weights.items()
        if not _is_unchanged(model, path, located.values[path])
    }
    if not changed:
        return located
    activations = {n: o for n, o in located.activations.items() if o.layer not in changed}
    weights = {p: o for p, o in located.weights.items() if o.layer not in changed}
    return replace(
        located, activations=activations, weights=weights, notes=(*located.notes, *changed.values())
    )


def _is_unchanged(model: TracedModule, path: str, value: np.ndarray) -> bool:
    try:
        return np.array_equal(get_module(model, path).numpy(), value)
    except AttributeError:
        return False


# Writes a scale on the integers that a target runs: the same real numbers wherever it can.


class Fit(NamedTuple):
    """Quantization parameters for a target.

    Attributes:
        qparams: the parameters.
        note: what differs from the given parameters, as a clause; "" if they stand for the same numbers.
    """

    qparams: QParams
    note: str


def fit(source: QParams, planned: QScheme, problem: Callable[[QScheme], str | None], fixed: bool) -> Fit:
    """Writes ``source`` on the integers of a target.

    The planned scheme is kept if it has the same levels, such as uint8 with the zero point 128 for int8.
    Else the given scheme is, if ``problem`` allows it. Else the nearest parameters are derived, with a note.

    Args:
        source: the parameters of one tensor, one scale.
        planned: the scheme that the config wants there, per tensor.
        problem: says why another scheme than ``planned`` may not be used; None if it may.
        fixed: whether the integers of a narrower type may stay as they are in a wider one: those of a
            parameter that is clipped to the range of ``source``.
    """
    own = source.scheme.replace(rounding=planned.rounding)
    other = own.replace(signed=not own.signed, symmetric=False)
    runs = [s for s in (planned, own, other) if s is planned or problem(s) is None]
    for scheme in runs:
        if (qparams := _shifted(source, scheme)) is not None and scheme.narrow == own.narrow:
            return Fit(qparams, "")
    target = planned.describe()
    for scheme in (*runs, *(s.replace(narrow=not s.narrow) for s in (own, other))):
        if scheme not in runs and problem(scheme) is not None:
            continue
        if (qparams := _shifted(source, scheme)) is not None:
            step = "one step less" if scheme.narrow else "one step more"
            return Fit(qparams, f"{_name(own)} became {_name(scheme)}: {step} at the lower end")
    wide = _widened(source, planned) if fixed else None
    if wide is not None:
        return Fit(wide, f"{_name(own)} became {_name(planned)}: the same integers, of {own.bits} bits")
    derived = choose(*span(source), planned)
    return Fit(derived, f"{_name(own)} cannot be used ({problem(own)}): its range was written as {target}")


def span(source: QParams) -> tuple[float, float]:
    """Returns the lowest and the highest number that ``source`` stands for."""
    scale, zero = float(source.scale), int(source.zero_point)
    return (source.scheme.qmin - zero) * scale, (source.scheme.qmax - zero) * scale


def _name(scheme: QScheme) -> str:
    return scheme.describe().replace(" half-away", "")


def _shifted(source: QParams, scheme: QScheme) -> QParams | None:
    """Returns the parameters of ``scheme`` with the same scale and the same number at its middle, if any."""
    own = source.scheme
    if scheme.bits != own.bits:
        return None
    shift = (1 << (own.bits - 1)) * (own.signed - scheme.signed)
    try:
        return QParams(scheme, source.scale, source.zero_point + shift)
    except SchemeError:  # a zero point that a symmetric scheme lacks, or a scale that is no power of two
        return None


def _widened(source: QParams, scheme: QScheme) -> QParams | None:
    """Returns the same integers in a wider ``scheme``, if it has them all."""
    own = source.scheme
    if scheme.bits <= own.bits or scheme.signed != own.signed:
        return None
    try:
        return QParams(scheme, source.scale, source.zero_point)
    except SchemeError:
        return None


# Chooses for each group of sites the scale that the model brings for it.

_CLIPS = frozenset({"relu", "relu6", "clip"})
# Ops whose results MegEngine's own integer kernels write at the scale of their input.
_SAME_SCALE = _CLIPS | {"avg_pool2d", "adaptive_avg_pool2d", "interpolate"}


@dataclass
class NativeParameters:
    """The parameters of the groups of sites that the model brings.

    Attributes:
        annotation: the annotation, with the schemes of these parameters.
        qparams: group -> its parameters.
        scales: group -> its scale and the layer that brings it, for the record.
        missing: the groups of activations and weights that the model brings no scale for.
        notes: a line for each scale that differs from the model's own, or is not used.
        clipped: path of a weight -> the range of its scale, where the target's integers reach further.
    """

    annotation: Annotation
    qparams: dict[str, QParams] = field(default_factory=dict)
    scales: dict[str, NativeScale] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    clipped: dict[str, tuple[float, float]] = field(default_factory=dict)


def bring_scales(model: TracedModule, annotation: Annotation, located: Located | None) -> NativeParameters:
    """Chooses the parameters of every group of sites for which the model brings some.

    A site takes the scale of its own tensor, or of the tensor from which the op before it takes its scale in
    MegEngine's integer kernels. Where sites share parameters, the last tensor of the group decides, which is
    the result of a concatenation.

    Args:
        model: the flat, expanded graph that was annotated; it is only read.
        annotation: the decisions for it.
        located: the scales and their tensors in the graph before the float algorithms ran; None if the model
            brings no scales, and nothing changes.
    """
    if located is None:
        return NativeParameters(annotation)
    located = without_changed_layers(located, model)
    scales = _Giver(model, annotation, located).run()
    return replace(scales, notes=[*located.notes, *scales.notes])


def set_ranges(view: QuantizedModel, parameters: NativeParameters) -> None:
    """Sets the quantization parameters that the model brings in a prepared module.

    Args:
        view: the prepared module.
        parameters: the parameters; the biases' follow.
    """
    fake_quants = view.fake_quants
    for group, qparams in parameters.qparams.items():
        fake_quants[group].set_qparams(qparams)
    for path, (low, high) in parameters.clipped.items():
        parameter: Parameter = get_module(view.module, path)
        parameter[...] = np.clip(parameter.numpy(), np.float32(low), np.float32(high))


class _Giver:
    """One call of `bring_scales`."""

    def __init__(self, model: TracedModule, annotation: Annotation, located: Located) -> None:
        self.located = located
        self.backend = backends.get(annotation.backend)
        self.nodes: dict[str, Node] = {n.name: n for n in model.graph.inputs}
        self.nodes.update((n.name, n) for e in exprs(model) for n in e.outputs)
        self.order = {name: index for index, name in enumerate(self.nodes)}
        self.parameters = NativeParameters(annotation)
        self.used: set[str] = set()
        self.changed: dict[str, list[str]] = {}  # what was changed -> the groups

    def run(self) -> NativeParameters:
        """Returns the parameters of all groups."""
        annotation, parameters = self.parameters.annotation, self.parameters
        groups: dict[str, list[Site]] = {}
        for site in annotation.sites:
            if site.plan is not None:
                groups.setdefault(site.group, []).append(site)
        carried: dict[str, list[str]] = {}
        for node, group in annotation.carried.items():
            carried.setdefault(group, []).append(node)
        for group, sites in groups.items():
            origins = list(self._origins(sites, carried.get(group, ())))
            if not origins:
                parameters.missing.append(group)
                continue
            self._give(group, sites, origins)
        parameters.annotation = self._with_schemes(annotation)
        parameters.notes += (f"{', '.join(groups)}: {note}" for note, groups in self.changed.items())
        parameters.notes += self._unused()
        return parameters

    def _origins(self, sites: list[Site], carried: list[str] | tuple[str, ...]) -> Iterator[Origin]:
        """Yields the parameters that the tensors of a group bring, from the group's last tensor on."""
        if sites[0].sort == "weight":
            expr = self.nodes[sites[0].node].expr
            if isinstance(expr, GetAttr) and expr.name in self.located.weights:
                yield self.located.weights[expr.name]
            return
        present = [name for name in carried if name in self.located.activations]
        for name in sorted(present if len(sites) > 1 else (), key=self.order.__getitem__, reverse=True):
            yield self._unscaled(name)
        for site in sites:
            node = self.nodes[site.node]
            if (origin := self._before(node) or self._behind(node)) is not None:
                yield origin
        for name in present if len(sites) == 1 else ():
            yield self._unscaled(name)

    def _unscaled(self, name: str) -> Origin:
        """Returns the parameters of a node that carries integers, at the scale of the site before it."""
        origin, factor = self.located.activations[name], self.parameters.annotation.factors.get(name, 1.0)
        own = origin.qparams
        return replace(origin, qparams=QParams(own.scheme, own.scale / np.float32(factor), own.zero_point))

    def _before(self, node: Node) -> Origin | None:
        """Returns the parameters of ``node``, or of the tensor that its op takes its scale from."""
        while node.name not in self.located.activations:
            call = None if node.expr is None else ops.read(node.expr)
            if call is None or len(call.inputs) != 1:
                return None
            if call.role is not Role.CARRY and call.kind not in _SAME_SCALE:
                return None
            node = call.inputs[0]
        return self.located.activations[node.name]

    def _behind(self, node: Node) -> Origin | None:
        """Returns the parameters after an activation that clips ``node``, if nothing else reads it.

        MegEngine's integer kernels round to the scale of the result before they clip.
        """
        readers = {id(user): user for user in node.users}
        if len(readers) != 1:
            return None
        (reader,) = readers.values()
        call = ops.read(reader)
        clips = call is not None and call.kind in _CLIPS
        return self.located.activations.get(reader.outputs[0].name) if clips else None

    def _give(self, group: str, sites: list[Site], origins: list[Origin]) -> None:
        """Gives ``group`` the first of ``origins``."""
        parameters, origin, site = self.parameters, origins[0], sites[0]
        self.used.update((o.layer if site.sort == "weight" else f"{o.layer}:result") for o in origins)
        plan, weight = site.plan, site.sort == "weight"
        assert plan is not None
        planned = plan.scheme.replace(axis=None)
        default = (self.backend.weight if weight else self.backend.activation).replace(axis=None)
        sort = "weight" if weight else "activation"
        asked = None if planned == default else f"the config asks for {planned.describe()}"

        def problem(scheme: QScheme) -> str | None:
            return asked or self.backend.problem(sort, scheme)

        fitted: Fit = fit(origin.qparams, planned, problem, weight and asked is None)
        parameters.qparams[group] = fitted.qparams
        tensor = "the weight" if weight else "the result"
        parameters.scales[group] = NativeScale(f"{tensor} of {origin.label}", float(fitted.qparams.scale))
        if fitted.note:
            self.changed.setdefault(fitted.note, []).append(group)
        others = [o for o in origins[1:] if o.qparams != origin.qparams]
        for other in {o.label: o for o in others}.values():
            parameters.notes.append(
                f"{group}: {self.backend.name} ties its sites, so {other.label} gets the scale of "
                f"{origin.label}"
            )
        expr = self.nodes[site.node].expr
        if weight and span(fitted.qparams) != span(origin.qparams) and isinstance(expr, GetAttr):
            parameters.clipped[expr.name] = span(origin.qparams)

    def _with_schemes(self, annotation: Annotation) -> Annotation:
        """Returns ``annotation`` with the schemes of the given parameters."""
        schemes = {group: q.scheme for group, q in self.parameters.qparams.items()}
        sites = []
        for site in annotation.sites:
            if site.group in schemes and site.plan is not None:
                plan = replace(site.plan, scheme=schemes[site.group])
                site = replace(site, plan=plan, channel_axes=())
            sites.append(site)
        notes = (
            replace(n, scheme=schemes[n.output].describe()) if n.output in schemes else n
            for n in annotation.notes
        )
        return replace(annotation, sites=tuple(sites), notes=tuple(notes))

    def _unused(self) -> Iterator[str]:
        """Yields a line with the layers whose results no site rounds, and one for weights."""
        origins = {"results": self.located.activations, "weights": self.located.weights}
        for name, tensors in origins.items():
            suffix = ":result" if name == "results" else ""
            labels = {o.label: None for o in tensors.values() if f"{o.layer}{suffix}" not in self.used}
            if labels:
                yield f"no site rounds the {name} of {', '.join(labels)}: their scales are not used"
