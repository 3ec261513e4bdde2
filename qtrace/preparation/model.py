"""A prepared or converted module as an object: its record is parsed once, and its sites know their nodes.

MegEngine saves plain attributes of a TracedModule; JSON keeps the record free of classes.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
from megengine import Tensor
from megengine.module import Module
from pydantic import Json

from qtrace.config import QConfig
from qtrace.errors import ConfigError, GraphError
from qtrace.fakequant.base import FakeQuant
from qtrace.fakequant.following.bias import BIAS_QMAX, BiasQuant
from qtrace.fakequant.following.bn_fold import BnFold, BnFoldCall
from qtrace.fakequant.following.dynamic import DynamicQuant
from qtrace.graph.edit import RECORD_ATTRIBUTE
from qtrace.graph.failures import Saved, from_json, parsing
from qtrace.graph.kernels import read_array
from qtrace.graph.types import Expr, Node, TensorNode, TracedModule
from qtrace.graph.walk import describe_path, exprs, owner, users
from qtrace.numerics import quantize, quantize_bias
from qtrace.preparation.annotation import Annotation, Plan, Site, Sort
from qtrace.preparation.passes.insert import CONTAINER
from qtrace.scheme import QParams
from qtrace.storage.checkpoints import hash_arrays

# The hash by which a graph is known again: checkpoints and exported files hold it.


def graph_hash(model: TracedModule) -> str:
    """Computes the SHA-256, in hex, of a graph's record and tensors: parameters, scales, zero points.

    A copy or a reloaded module has the same hash; another calibration gives another hash.
    """
    # Not by state_dict, whose time is quadratic in the number of modules.
    return hash_tensors(getattr(model, RECORD_ATTRIBUTE, ""), model.named_tensors())


def hash_tensors(text: str, tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Computes the SHA-256, in hex, of a text and of named tensors, independent of their order."""
    ordered = sorted(tensors, key=lambda named: named[0])
    return hash_arrays(text, ((name, np.atleast_1d(read_array(tensor))) for name, tensor in ordered))


# The quantization record that a prepared or converted module carries, and its fake quants.


@dataclass(frozen=True)
class NativeScale(Saved):
    """A scale that a model brought from MegEngine's own quantization.

    Attributes:
        origin: the tensor and its layer, such as ``the result of stem (qat.ConvBnRelu2d)``.
        scale: the scale that the group of sites began with.
    """

    origin: str
    scale: float


@dataclass(frozen=True)
class Record(Saved):
    """The decisions, config and reports with which a graph was quantized.

    Attributes:
        stage: "prepared" or "converted".
        annotation: the decisions that were executed.
        qconfig: the config as plain data.
        log: one line for each change of a pass, and for each candidate that a pass left unchanged.
        ptq: the reports of the post-training algorithms that have run, as plain data.
        native: group -> the scale that the model brought for it.
        native_notes: a line for each scale of the model that was changed or is not used, and for each
            algorithm that did not run because of them.
        float_ranges: node -> its largest magnitude in the calibration, for what ops in float read and give;
            empty unless the config asks for float16.
    """

    stage: Literal["prepared", "converted"]
    annotation: Json[Annotation]
    qconfig: dict[str, Any]
    log: tuple[str, ...]
    ptq: tuple[dict[str, Any], ...] = ()
    native: Mapping[str, NativeScale] = field(default_factory=dict)
    native_notes: tuple[str, ...] = ()
    float_ranges: Mapping[str, float] = field(default_factory=dict)


def write_record(model: TracedModule, record: Record) -> None:
    """Attaches ``record`` to ``model``."""
    document = {
        "stage": record.stage,
        "annotation": record.annotation.to_json(),
        "qconfig": record.qconfig,
        "log": list(record.log),
        "ptq": list(record.ptq),
    }
    if record.native or record.native_notes:  # other records stay as they were, and their hashes too
        document["native"] = {group: vars(scale) for group, scale in record.native.items()}
        document["native_notes"] = list(record.native_notes)
    if record.float_ranges:
        document["float_ranges"] = dict(record.float_ranges)
    setattr(model, RECORD_ATTRIBUTE, json.dumps(document, sort_keys=True))


def remove_record(model: TracedModule) -> None:
    """Removes the record and the fake quants of a graph that no longer calls them: it becomes a plain one."""
    delattr(model, RECORD_ATTRIBUTE)
    delattr(model, CONTAINER)


def read_record(model: Module, stage: str | None = None) -> Record:
    """Reads the record of a prepared or converted module.

    Args:
        model: the module.
        stage: the stage that the caller needs; None for either.

    Raises:
        GraphError: when the module is not at that stage, or its record is damaged.
        ConfigError: when its backend lies in a module of the user's that is not imported.
    """
    if problem := describe_path(model):
        raise GraphError(f"a {stage or 'quantized'} module is needed, and {problem}.")
    text = getattr(model, RECORD_ATTRIBUTE, None)
    if not isinstance(model, TracedModule) or text is None:
        raise GraphError(
            f"{type(model).__name__} is not a {stage or 'prepared'} module: "
            "call qtrace.prepare on a traced one first, or give a file that `qtrace calibrate` wrote."
        )
    with parsing("the quantization record of the model is", "make the model again"):
        record = from_json(Record, text)
    _check_backend(record.annotation.backend)
    if stage is not None and record.stage != stage:
        todo = (
            "call qtrace.convert on it first, or give the file quantized.mge"
            if stage == "converted"
            else "use the prepared one it came from (prepared.mge)"
        )
        raise GraphError(f"the module is {record.stage}, not {stage}: {todo}.")
    return record


def _check_backend(name: str) -> None:
    """Refuses a backend in a user's module that nobody has imported: a file may name any module."""
    module, own, _ = name.partition(":")
    if own and module not in sys.modules:
        raise ConfigError(
            f"the model was made for the backend {name!r} of your own: import {module} first, on the command "
            f"line with --allow {name}, if you trust it."
        )


def is_quantized(model: Module) -> bool:
    """Returns whether ``model`` was made by ``prepare`` or ``convert``."""
    return getattr(model, RECORD_ATTRIBUTE, None) is not None


def check_quantized(model: Module, name: str) -> None:
    """Refuses a model that is not quantized.

    Args:
        model: the model.
        name: how the user calls it, a file for instance.

    Raises:
        GraphError: naming the file to give instead.
    """
    if not is_quantized(model):
        raise GraphError(
            f"{name} is traced, not quantized: give the quantized.mge or prepared.mge that "
            "`qtrace calibrate` made of it."
        )


def fake_quants(model: TracedModule) -> Iterator[FakeQuant]:
    """Yields the fake quants of a prepared or converted module, in the order of their sites."""
    return (m for m in _children(model) if isinstance(m, FakeQuant))


def followers(model: TracedModule) -> Iterator[BiasQuant | BnFold | DynamicQuant]:
    """Yields the modules with a phase but no parameters: of biases, folded layers and dynamic inputs."""
    return (m for m in _children(model) if isinstance(m, (BiasQuant, BnFold, DynamicQuant)))


def _children(model: TracedModule) -> Iterator[Module]:
    container = getattr(model, CONTAINER)
    return (m for m in container.__dict__.values() if isinstance(m, Module))


@dataclass(frozen=True, eq=False)
class QuantizedSite:
    """One quantized tensor with its nodes in the graph.

    Attributes:
        decision: the decision of `annotate` for the site.
        expr: the call of the fake quant, or of the layer that rounds its weight itself, because its BatchNorm
            trains on.
        node: the node whose value is quantized; it is not the result of another rounding.
        source: the node that is rounded: ``node``, or the node that holds ``node`` as another site rounds it.
        value: the node that holds the rounded value; None for a weight that its layer rounds.
        fake_quant: the module that rounds the value: a `FakeQuant`, for a bias a `BiasQuant`.
    """

    decision: Site
    expr: Expr
    node: TensorNode
    source: TensorNode
    value: Any
    fake_quant: Any

    @property
    def consumers(self) -> tuple[Expr, ...]:
        """The exprs that read the rounded value."""
        return (self.expr,) if self.value is None else tuple(users(self.value))

    @property
    def name(self) -> str:
        """The name of the site."""
        return self.decision.name

    @property
    def sort(self) -> Sort:
        """Whether the site is an activation, a weight or a bias."""
        return self.decision.sort

    @property
    def group(self) -> str:
        """The group of sites that share the parameters of ``fake_quant``."""
        return self.decision.group

    @property
    def plan(self) -> Plan | None:
        """Scheme, observer and fake quant of the site; None for a bias."""
        return self.decision.plan

    @property
    def static(self) -> bool:
        """Whether the value is a parameter."""
        return self.decision.static

    @property
    def qparams(self) -> QParams:
        """The quantization parameters of an activation or a weight.

        Raises:
            CalibrationError: when the site was never calibrated.
        """
        qparams: QParams = self.fake_quant.qparams()
        return qparams

    @cached_property
    def bias_scale(self) -> np.ndarray:
        """The scale of a bias, float32 of shape ``()`` or ``(channels,)``: input scale times weight scale."""
        groups = (node.owner for node in self.expr.args[2:])
        scale = self.fake_quant.scale(*groups)[0].numpy().astype(np.float32)
        return scale.reshape(-1) if scale.ndim else scale

    def integers(self, parameter: np.ndarray) -> np.ndarray:
        """Quantizes a stored value to the integers (int32) of the site.

        Args:
            parameter: the value of `source`.

        Returns:
            The integers in the shape of ``parameter``; a bias gives a vector.
        """
        if self.sort == "bias":
            return quantize_bias(parameter.reshape(-1), self.bias_scale, BIAS_QMAX)
        if self.sort == "activation":
            return quantize(parameter, self.qparams)
        fake_quant = self.fake_quant
        if fake_quant.scheme.block is not None:
            return quantize(parameter.astype(np.float32), self.qparams)
        integers = quantize(fake_quant.channels_first(parameter).astype(np.float32), self.qparams)
        if not fake_quant.scheme.per_channel:
            return integers.reshape(parameter.shape)
        axes = fake_quant.counted_axes
        moved = np.moveaxis(parameter, axes, range(len(axes))).shape
        return np.moveaxis(integers.reshape(moved), range(len(axes)), axes)

    def rounded_bias(self, parameter: np.ndarray) -> np.ndarray:
        """Returns the float32 values of a bias's integers, in the shape of ``parameter``."""
        return (self.integers(parameter) * self.bias_scale).astype(np.float32).reshape(parameter.shape)


class QuantizedModel:
    """A view of a prepared or converted module.

    The view looks up the nodes of the graph once, on first use: call `view` for a new view after an edit.

    Args:
        module: a prepared or converted module.
        stage: "prepared" or "converted", the stage that the caller needs; None for either.
        record: the record to use; None to read the record that the module carries.

    Attributes:
        module: the prepared or converted module.
        record: the decisions, config and reports with which the module was quantized.

    Raises:
        GraphError: when the module is not at that stage, or its record is damaged.
    """

    def __init__(self, module: Module, stage: str | None = None, record: Record | None = None) -> None:
        self.record = read_record(module, stage) if record is None else record
        self.module: TracedModule = module

    @classmethod
    def of(cls, model: Module | QuantizedModel, stage: str | None = None) -> QuantizedModel:
        """Returns the view of ``model``; a view is returned as it is, without parsing its record again."""
        return model if isinstance(model, QuantizedModel) else cls(model, stage)

    def view(self, module: TracedModule) -> QuantizedModel:
        """Returns a view of ``module``, a copy or this module after an edit, with the record of this view."""
        return QuantizedModel(module, record=self.record)

    def add_reports(self, *reports: dict[str, Any]) -> None:
        """Adds reports of post-training algorithms to the records of this view and of the module."""
        self.record = replace(self.record, ptq=(*self.record.ptq, *reports))
        write_record(self.module, self.record)

    @property
    def stage(self) -> str:
        """The stage of the module: "prepared" or "converted"."""
        return self.record.stage

    @property
    def annotation(self) -> Annotation:
        """The decisions that `insert` executed."""
        return self.record.annotation

    @property
    def log(self) -> tuple[str, ...]:
        """One line for each change of a pass, and for each candidate that a pass left unchanged."""
        return self.record.log

    @property
    def ptq(self) -> tuple[dict[str, Any], ...]:
        """The reports of the post-training algorithms that have run, as plain data."""
        return self.record.ptq

    @cached_property
    def config(self) -> QConfig:
        """The config that the module was prepared with."""
        return QConfig.model_validate(self.record.qconfig)

    @cached_property
    def nodes(self) -> dict[str, TensorNode]:
        """Name -> node, for the inputs of the graph and the outputs of its exprs, in graph order."""
        nodes = {node.name: node for node in self.module.graph.inputs}
        nodes.update((node.name, node) for expr in exprs(self.module) for node in expr.outputs)
        return nodes

    @cached_property
    def sites(self) -> tuple[QuantizedSite, ...]:
        """Every site, in the order of the annotation.

        Raises:
            GraphError: when the graph lacks a node or a fake quant of a site.
        """
        # No two sites of a node share a group, whatever the nodes of the rounded values are called.
        decisions = {(site.group, site.node): site for site in self.annotation.sites}
        if not decisions:
            return ()
        sites: dict[tuple[str, str], QuantizedSite] = {}
        rounded: dict[Node, QuantizedSite] = {}
        try:
            children = getattr(self.module, CONTAINER).__dict__.items()
            groups = {module: name for name, module in children if isinstance(module, Module)}
            for expr in exprs(self.module):
                module = owner(expr)
                if isinstance(module, BnFold):
                    call = BnFoldCall(*expr.args)
                    source, value, module = call.weight, None, call.weight_quant.owner
                elif isinstance(module, (FakeQuant, BiasQuant)):
                    source, value = expr.args[1], expr.outputs[0]
                else:
                    continue
                node = rounded[source].node if source in rounded else source
                key = (groups[module], node.name)
                sites[key] = QuantizedSite(decisions[key], expr, node, source, value, module)
                rounded[value] = sites[key]
            return tuple(sites[key] for key in decisions)
        except (KeyError, AttributeError) as error:
            raise GraphError(
                f"the graph does not match its quantization record ({error}): prepare the float model again, "
                "and do not edit it afterwards."
            ) from error

    @cached_property
    def groups(self) -> dict[str, tuple[QuantizedSite, ...]]:
        """Group -> its sites, in graph order."""
        groups: dict[str, tuple[QuantizedSite, ...]] = {}
        for site in self.sites:
            groups[site.group] = (*groups.get(site.group, ()), site)
        return groups

    @cached_property
    def rounded(self) -> dict[str, QuantizedSite]:
        """Name of a node that holds a rounded value -> the site of that value."""
        return {site.value.name: site for site in self.sites if site.value is not None}

    def unrounded_name(self, node: TensorNode) -> str:
        """Returns the name of the node whose value ``node`` holds, rounded or as it is."""
        site = self.rounded.get(node.name)
        return node.name if site is None else site.node.name

    @property
    def fake_quants(self) -> dict[str, FakeQuant]:
        """Group -> its fake quant, in the order of the sites."""
        children = getattr(self.module, CONTAINER).__dict__.items()
        return {name: module for name, module in children if isinstance(module, FakeQuant)}

    @property
    def followers(self) -> tuple[BiasQuant | BnFold | DynamicQuant, ...]:
        """The modules with a phase but no parameters: of biases, folded layers and dynamic inputs."""
        return tuple(followers(self.module))

    def rounding(self, name: str) -> Any:
        """Returns the module of a group, or of a layer whose BatchNorm trains on."""
        return getattr(getattr(self.module, CONTAINER), name)

    def carried_qparams(self) -> dict[str, QParams]:
        """Maps the name of each node that carries integers without rounding to its parameters."""
        carried = self.annotation.carried
        groups = {group: self.rounding(group).qparams() for group in set(carried.values())}
        qparams = {name: groups[group] for name, group in carried.items()}
        for name, factor in self.annotation.factors.items():
            group = qparams[name]
            qparams[name] = QParams(group.scheme, group.scale * np.float32(factor), group.zero_point)
        return qparams

    def float_tensors(self) -> list[tuple[str, Tensor]]:
        """Lists name and value of the parameters and buffers outside of fake quants, sorted by name."""
        tensors = self.module.named_tensors()
        named = ((n, tensor) for n, tensor in tensors if not n.startswith(f"{CONTAINER}."))
        return sorted(named, key=lambda pair: pair[0])
