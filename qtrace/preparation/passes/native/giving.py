"""Chooses for each group of sites the scale that the model brings for it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np
from megengine import Parameter

from qtrace import ops
from qtrace.config import backends
from qtrace.graph.types import GetAttr, Node, TracedModule
from qtrace.graph.walk import exprs, get_module
from qtrace.ops import Role
from qtrace.preparation.annotation import Annotation, Site
from qtrace.preparation.model import QuantizedModel
from qtrace.preparation.passes.native.fitting import Fit, fit, span
from qtrace.preparation.passes.native.locating import Located, Origin, without_changed_layers
from qtrace.preparation.record import NativeScale
from qtrace.scheme import QParams, QScheme

__all__ = ["NativeParameters", "bring_scales", "set_ranges"]

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
