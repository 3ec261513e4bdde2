"""The type of what stays float in a file: what the recipe or the user asks for, and what a format has.

The option ``allow_float``: layers that a file computes in float, with weights that the graph rounded.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from typing import Any

from qtrace import ops
from qtrace.config.rule import FLOAT_TYPES
from qtrace.errors import ExportError
from qtrace.export.converted.graph import ConvertedGraph
from qtrace.export.converted.plain_graph import PlainGraph
from qtrace.graph.types import TensorNode
from qtrace.graph.walk import users
from qtrace.preparation.float16 import float_values, uses_float16

__all__ = ["FLOAT16_KEY", "asks_float16", "check_float_type", "float_kinds", "only_floats_read"]

FLOAT16_KEY = "qtrace.float16"
"""The metadata of an ONNX file that list the ops of the graph that it has in float16."""


def check_float_type(converted: ConvertedGraph, format: str, known: Sequence[str], float: Any) -> None:
    """Refuses a type of what stays float that a format does not write.

    Args:
        converted: the graph of a converted module, or of a plain one.
        format: the name of the format.
        known: the types that it writes; () for a format that holds no such numbers.
        float: the type that the user asks for; None for what the recipe says.

    Raises:
        ExportError: naming the format and the way out.
    """
    if float is not None and float not in FLOAT_TYPES:
        raise ExportError(
            f"float={float!r} is no choice of the export: choose one of {', '.join(FLOAT_TYPES)}."
        )
    if not known or isinstance(converted, PlainGraph):
        return
    if float == "fp16" and "fp16" not in known:
        raise ExportError(f"format {format} writes what stays float in float32: leave out float=fp16.")
    if float is None and uses_float16(converted.model) and "fp16" not in known:
        raise ExportError(
            f"format {format} writes what stays float in float32, and the recipe says float: fp16: export "
            "with float=fp32, or to format onnx."
        )


def asks_float16(converted: ConvertedGraph, float: str | None) -> bool:
    """Returns whether a file is to have what stays float in float16.

    Args:
        converted: the graph of a converted module, or of a plain one.
        float: the type that the user asks for; None for what the recipe says.

    Raises:
        ExportError: when the graph lacks ranges of what stays float.
    """
    if isinstance(converted, PlainGraph):
        return False
    asks = uses_float16(converted.model)
    if float == "fp32" or (float is None and not asks):
        return False
    if not asks or (float_values(converted.model) and not converted.model.record.float_ranges):
        raise ExportError(
            "float16 needs the ranges of what stays float, which this calibration did not observe: calibrate "
            "with float: fp16 in the recipe."
        )
    return True


def float_kinds(names: str | Iterable[str]) -> frozenset[str]:
    """Returns the kinds of ops that ``allow_float`` names.

    Raises:
        ExportError: for a name that is no kind of op.
    """
    kinds = frozenset((names,) if isinstance(names, str) else names)
    known = ops.kinds()
    for name in sorted(kinds - set(known)):
        near = difflib.get_close_matches(name, known, 3)
        hint = f"did you mean {' or '.join(near)}" if near else "qtrace.explain lists those of a graph"
        raise ExportError(f"allow_float names {name!r}, which is no kind of op: {hint}.")
    return kinds


def only_floats_read(node: TensorNode, kinds: frozenset[str]) -> bool:
    """Whether every layer that reads ``node``, a weight or a bias, is of one of ``kinds``."""
    calls = [ops.read(user) for user in users(node)]
    return bool(calls) and all(call is not None and call.kind in kinds for call in calls)
