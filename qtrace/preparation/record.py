"""The quantization record that a prepared or converted module carries, and its fake quants.

MegEngine saves plain attributes of a TracedModule; JSON keeps the record free of classes.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from megengine.module import Module

from qtrace.errors import ConfigError, GraphError
from qtrace.fakequant.base import FakeQuant
from qtrace.fakequant.following.bias import BiasQuant
from qtrace.fakequant.following.bn_fold import BnFold
from qtrace.fakequant.following.dynamic import DynamicQuant
from qtrace.graph.edit import RECORD_ATTRIBUTE
from qtrace.graph.failures import parsing
from qtrace.graph.types import TracedModule
from qtrace.graph.walk import describe_path
from qtrace.preparation.annotation import Annotation
from qtrace.preparation.passes.insert import CONTAINER

__all__ = [
    "NativeScale",
    "Record",
    "check_quantized",
    "fake_quants",
    "followers",
    "is_quantized",
    "read_record",
    "remove_record",
    "write_record",
]


@dataclass(frozen=True)
class NativeScale:
    """A scale that a model brought from MegEngine's own quantization.

    Attributes:
        origin: the tensor and its layer, such as ``the result of stem (qat.ConvBnRelu2d)``.
        scale: the scale that the group of sites began with.
    """

    origin: str
    scale: float


@dataclass(frozen=True)
class Record:
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

    stage: str
    annotation: Annotation
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
        record = _parse(text)
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


def _parse(text: str) -> Record:
    """Parses the text that `write_record` attached; the text comes from a file and may be anything."""
    data = json.loads(text)
    annotation = Annotation.from_json(data["annotation"])
    log, ptq = tuple(data["log"]), tuple(data.get("ptq", ()))
    if data["stage"] not in ("prepared", "converted") or not isinstance(data["qconfig"], dict):
        raise ValueError
    brought = data.get("native", {}).items()
    native = {str(g): NativeScale(str(s["origin"]), float(s["scale"])) for g, s in brought}
    notes = tuple(str(note) for note in data.get("native_notes", ()))
    ranges = {str(node): float(largest) for node, largest in data.get("float_ranges", {}).items()}
    return Record(data["stage"], annotation, data["qconfig"], log, ptq, native, notes, ranges)


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
