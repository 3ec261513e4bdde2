"""The quantization record that a prepared or converted module carries, and its fake quants."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from megengine import Tensor
from megengine.module import Module

from qtrace.errors import GraphError
from qtrace.fakequant.base import FakeQuant
from qtrace.fakequant.following.bias import BiasQuant
from qtrace.fakequant.following.bn_fold import BnFold
from qtrace.graph.types import TracedModule
from qtrace.preparation.annotation import Annotation
from qtrace.preparation.passes.insert import CONTAINER
from qtrace.storage.hashing import hash_arrays

__all__ = [
    "Record",
    "fake_quants",
    "followers",
    "graph_hash",
    "hash_tensors",
    "is_quantized",
    "read_record",
    "write_record",
]

# MegEngine saves plain attributes of a TracedModule; JSON keeps the record free of classes.
_ATTRIBUTE = "qtrace_record"


@dataclass(frozen=True)
class Record:
    """The decisions, config and reports with which a graph was quantized.

    Attributes:
        stage: "prepared" or "converted".
        annotation: the decisions that were executed.
        qconfig: the config as plain data.
        log: one line for each change of a pass, and for each candidate that a pass left unchanged.
        ptq: the reports of the post-training algorithms that have run, as plain data.
    """

    stage: str
    annotation: Annotation
    qconfig: dict[str, Any]
    log: tuple[str, ...]
    ptq: tuple[dict[str, Any], ...] = ()


def write_record(model: TracedModule, record: Record) -> None:
    """Attaches ``record`` to ``model``."""
    document = {
        "stage": record.stage,
        "annotation": record.annotation.to_json(),
        "qconfig": record.qconfig,
        "log": list(record.log),
        "ptq": list(record.ptq),
    }
    setattr(model, _ATTRIBUTE, json.dumps(document, sort_keys=True))


def read_record(model: Module, stage: str | None = None) -> Record:
    """Reads the record of a prepared or converted module.

    Args:
        model: the module.
        stage: the stage that the caller needs; None for either.

    Raises:
        GraphError: when the module is not at that stage, or its record is damaged.
    """
    text = getattr(model, _ATTRIBUTE, None)
    if not isinstance(model, TracedModule) or text is None:
        raise GraphError(
            f"{type(model).__name__} is not a {stage or 'prepared'} module: "
            "call qtrace.prepare on a traced one first, or give a file that `qtrace calibrate` wrote."
        )
    try:
        record = _parse(text)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise GraphError(
            f"the quantization record of the model is damaged ({type(error).__name__}): make the model again."
        ) from error
    if stage is not None and record.stage != stage:
        todo = (
            "call qtrace.convert on it first, or give the file quantized.mge"
            if stage == "converted"
            else "use the prepared one it came from (prepared.mge)"
        )
        raise GraphError(f"the module is {record.stage}, not {stage}: {todo}.")
    return record


def _parse(text: str) -> Record:
    """Parses the text that `write_record` attached; the text comes from a file and may be anything."""
    data = json.loads(text)
    annotation = Annotation.from_json(data["annotation"])
    log, ptq = tuple(data["log"]), tuple(data.get("ptq", ()))
    if data["stage"] not in ("prepared", "converted") or not isinstance(data["qconfig"], dict):
        raise ValueError
    return Record(data["stage"], annotation, data["qconfig"], log, ptq)


def graph_hash(model: TracedModule) -> str:
    """Computes the SHA-256, in hex, of a graph's record and tensors: parameters, scales, zero points.

    A copy or a reloaded module has the same hash; another calibration gives another hash.
    """
    # Not by state_dict, whose time is quadratic in the number of modules.
    return hash_tensors(getattr(model, _ATTRIBUTE, ""), model.named_tensors())


def hash_tensors(text: str, tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Computes the SHA-256, in hex, of a text and of named tensors, independent of their order."""
    ordered = sorted(tensors, key=lambda named: named[0])
    return hash_arrays(text, ((name, np.atleast_1d(tensor.numpy())) for name, tensor in ordered))


def is_quantized(model: Module) -> bool:
    """Returns whether ``model`` was made by ``prepare`` or ``convert``."""
    return getattr(model, _ATTRIBUTE, None) is not None


def fake_quants(model: TracedModule) -> Iterator[FakeQuant]:
    """Yields the fake quants of a prepared or converted module, in the order of their sites."""
    return (m for m in _children(model) if isinstance(m, FakeQuant))


def followers(model: TracedModule) -> Iterator[BiasQuant | BnFold]:
    """Yields the modules with a phase but without parameters of their own: biases and folded layers."""
    return (m for m in _children(model) if isinstance(m, (BiasQuant, BnFold)))


def _children(model: TracedModule) -> Iterator[Module]:
    container = getattr(model, CONTAINER)
    return (m for m in container.__dict__.values() if isinstance(m, Module))
