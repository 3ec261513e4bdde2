"""Finds the nodes and parameters of a graph that the scales of its model belong to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from megengine import Parameter
from megengine.module import Module

from qtrace.config import QConfig
from qtrace.graph.native import LayerRanges, NativeRanges, read_ranges
from qtrace.graph.types import GetAttr, TracedModule
from qtrace.graph.walk import exprs, get_module, owner
from qtrace.scheme import QParams

__all__ = ["Located", "Origin", "locate", "without_changed_layers", "without_refitting"]

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
    kept = tuple(spec for spec in config.ptq or () if spec.name in _KEPT_ALGORITHMS)
    reason = "the weights were trained with the scales that the model brings, so it does not run"
    return config.model_copy(update={"ptq": kept}), tuple(f"{name}: {reason}" for name in dropped)


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
