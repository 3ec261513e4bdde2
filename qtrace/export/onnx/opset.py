"""Chooses the ONNX opset that a model needs, and brings its nodes into the form of that opset."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from onnx import NodeProto, TensorProto, helper, numpy_helper

from qtrace.errors import ExportError

__all__ = ["HIGHEST", "LOWEST", "OPSETS", "SourceVersions", "Versions", "at_opset", "choose_versions"]

# Runtimes fuse opset 13 best. Opset 21 added integers of 4 and 16 bits.
LOWEST, HIGHEST = 13, 21

# Op -> the first opset that has it in the form that qtrace writes: RoiAlign does not widen small regions,
# GroupNormalization has a weight for each channel.
OPSETS = {"GridSample": 16, "RoiAlign": 16, "LayerNormalization": 17, "GroupNormalization": 21}

# Opset -> the first IR version that has it.
_IR_VERSIONS = {**dict.fromkeys(range(LOWEST, 19), 8), 19: 9, 20: 9, 21: 10}
_WIDE_TYPES = (TensorProto.INT4, TensorProto.UINT4, TensorProto.INT16, TensorProto.UINT16)

# Reductions whose axes became an input at opset 18; the axes of ReduceSum did at 13.
_REDUCTIONS = tuple(
    f"Reduce{n}" for n in ["Mean", "Max", "Min", "Prod", "L1", "L2", "LogSum", "LogSumExp", "SumSquare"]
)


@dataclass(frozen=True)
class SourceVersions:
    """The versions of the file that a graph was imported from, which its exports have if they can.

    Attributes:
        opset: the opset; 0 if it is not known.
        ir_version: the IR version; 0 if it is not known.
    """

    opset: int = 0
    ir_version: int = 0

    @property
    def writable(self) -> int:
        """The opset that comes closest and that qtrace writes; 0 if the file's is not known."""
        return min(max(self.opset, LOWEST), HIGHEST) if self.opset else 0


@dataclass(frozen=True)
class Versions:
    """The versions of a file that is written.

    Attributes:
        opset: the opset.
        ir_version: the IR version.
        change: a sentence that says why the opset differs from the imported file; "" if it is.
    """

    opset: int
    ir_version: int
    change: str = ""


def choose_versions(
    stored: Iterable[TensorProto],
    nodes: Iterable[NodeProto] = (),
    opset: int | None = None,
    source: SourceVersions | None = None,
    copied: Mapping[str, int] | None = None,
) -> Versions:
    """Chooses the opset and the IR version of a model with these initializers and nodes.

    Every QuantizeLinear has a zero point, whose type is the type of its result.

    Args:
        stored: the initializers.
        nodes: the nodes.
        opset: the opset that the user asks for; None for the one of ``source`` or a higher one that the model
            needs, and for the lowest that it needs if there is no source.
        source: the versions of the file that the graph was imported from.
        copied: op that was copied from a file -> the first opset that has it in the form of the file.

    Raises:
        ExportError: when the model needs a higher opset than ``opset``, naming what needs it.
    """
    nodes = tuple(nodes)
    needs = {node.op_type: OPSETS.get(node.op_type, LOWEST) for node in nodes if not node.domain}
    needs |= {op: max(first, needs.get(op, LOWEST)) for op, first in (copied or {}).items()}
    if any(
        attribute.name == "block_size" and not node.domain for node in nodes for attribute in node.attribute
    ):
        needs["scales for blocks of a weight"] = HIGHEST
    if any(t.data_type in _WIDE_TYPES for t in stored):
        needs["integers of 4 or 16 bits"] = HIGHEST
    source = source or SourceVersions()
    reason = max(needs, key=lambda name: needs[name], default="")
    needed = needs.get(reason, LOWEST)
    if opset is not None and opset < needed:
        raise ExportError(f"opset={opset} lacks {reason}: leave the option out, or choose {needed}.")
    chosen = opset or max(needed, source.writable)
    change = ""
    if opset is None and source.opset and chosen != source.opset:
        cause = f"it has {reason}" if needed > source.writable else f"qtrace writes {LOWEST} to {HIGHEST}"
        change = f"the file has opset {chosen}, not {source.opset} as the imported one: {cause}."
    highest = _IR_VERSIONS.get(chosen, 11)
    lowest = helper.find_min_ir_version_for([helper.make_opsetid("", chosen)])
    highest = max(highest, lowest)
    ir_version = min(max(source.ir_version, lowest), highest) if source.ir_version else highest
    return Versions(chosen, ir_version, change)


def at_opset(nodes: list[NodeProto], opset: int) -> tuple[list[NodeProto], list[TensorProto]]:
    """Converts nodes of opset 13 to ``opset``; returns them and the initializers that they add."""
    if opset < 18:
        return nodes, []
    changed: list[NodeProto] = []
    added: dict[str, TensorProto] = {}
    for node in nodes:
        if node.op_type == "GridSample" and opset >= 20:
            node = _renamed_mode(node)
        if node.op_type == "Split" and len(node.input) == 1:
            node.attribute.append(helper.make_attribute("num_outputs", len(node.output)))
        axes = next((list(a.ints) for a in node.attribute if a.name == "axes"), None)
        if node.op_type not in _REDUCTIONS or axes is None:
            changed.append(node)
            continue
        name = "const_axes_" + "_".join(str(axis) for axis in axes)
        added[name] = numpy_helper.from_array(np.array(axes, np.int64), name)
        attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute if a.name != "axes"}
        inputs = [node.input[0], name]
        changed.append(
            helper.make_node(node.op_type, inputs, list(node.output), name=node.name, **attributes)
        )
    return changed, list(added.values())


def _renamed_mode(node: NodeProto) -> NodeProto:
    """Returns a GridSample with the name that opset 20 gave its mode."""
    attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    if attributes.get("mode", b"bilinear") == b"bilinear":
        attributes["mode"] = "linear"
    return helper.make_node(node.op_type, list(node.input), list(node.output), name=node.name, **attributes)
