"""MSC's names of op kinds, its form of their arguments, and the layouts of tensors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from qtrace.export.converted.document import DocumentOp, Value, is_plain
from qtrace.targets.msc.document import MSCNode
from qtrace.targets.msc.kinds import find_kind

__all__ = ["in_words_of_msc", "output_layout", "weight_layout", "weight_shape"]

_SPATIAL = frozenset(
    {
        "conv2d",
        "conv_transpose2d",
        "max_pool2d",
        "avg_pool2d",
        "adaptive_avg_pool2d",
        "adaptive_max_pool2d",
        "interpolate",
    }
)
# Kinds after which the letters of a layout no longer apply.
_MOVES = "reshape flatten getitem expand_dims squeeze broadcast_to tile repeat stack matmul"
_RESHAPES = frozenset(_MOVES.split())


def in_words_of_msc(op: DocumentOp, node: MSCNode) -> MSCNode:
    """Returns a node with MSC's type and attributes; a kind that MSC lacks keeps qtrace's words."""
    found = find_kind(op.kind, node, op.attrs)
    optype, values = op.kind or op.label, op.attrs
    if found is not None:
        optype, values = found[0], found[1].written(node, op.attrs)
    texts = {key: _text(value) for key, value in values.items() if is_plain(value)}
    return replace(node, optype=optype, attrs=texts)


def _text(value: Any) -> str:
    """Writes a value as TVM does: numbers with commas between them, and one after a single one of a list."""
    if isinstance(value, (tuple, list)):
        return ",".join(map(_text, value)) + ("," if len(value) == 1 else "")
    return "" if value is None else str(int(value)) if isinstance(value, bool) else str(value)


def weight_layout(kind: str, value: Value) -> str:
    """Returns the layout of a layer's weight, whose axis of groups was merged by `weight_shape`."""
    if kind == "linear":
        return "OI"
    if kind == "prelu":
        return "O"
    if kind == "embedding":
        return ""
    spatial = {"conv1d": "W", "conv3d": "DHW"}.get(kind, "HW")
    front = "IO" if kind.startswith("conv_transpose") else "OI"
    return f"{front}{spatial}"


def weight_shape(kind: str, value: Value) -> tuple[int, ...]:
    """Returns the shape of a layer's weight without an axis of groups: the channel axis has all groups."""
    shape = value.shape
    grouped = kind.startswith("conv") and len(shape) == len(weight_layout(kind, value)) + 1
    return (shape[0] * shape[1], *shape[2:]) if grouped else shape


def output_layout(op: DocumentOp, value: Value, inputs: list[str]) -> str:
    """Returns the layout of an output, or "" if it is not known."""
    rank = len(value.shape)
    if op.kind == "input" or op.kind in _SPATIAL:
        return {4: "NCHW", 3: "NCW", 2: "NC"}.get(rank, "")
    before = inputs[0] if inputs else ""
    if op.kind in ("transpose", "swapaxes"):
        order = op.attrs.get("pattern") or tuple(reversed(range(rank)))
        fits = before and all(isinstance(p, int) for p in order) and len(order) == len(before)
        return "".join(before[p] for p in order) if fits else ""
    if op.kind in _RESHAPES or not before:
        return "NC" if rank == 2 and before.startswith("NC") else ""
    if len(before) == rank:
        return before
    return "NC" if rank == 2 and before == "NCHW" else ""  # a mean over the image
