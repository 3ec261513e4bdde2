"""Chooses the ONNX opset that a model needs, and brings its nodes into the form of that opset.

The versions of nodes that are copied from an imported file into one that is written.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import NodeProto, TensorProto, helper, numpy_helper

from qtrace.errors import ExportError
from qtrace.onnxfile.model import OnnxModel, bodies_of, own_operators

# Runtimes fuse opset 13 best. Opset 21 added integers of 4 and 16 bits.
LOWEST, HIGHEST = 13, 21

# Op -> the first opset that has it in the form that qtrace writes: RoiAlign does not widen small regions,
# GroupNormalization has a weight for each channel.
OPSETS = {"GridSample": 16, "RoiAlign": 16, "LayerNormalization": 17, "GroupNormalization": 21}

# Opset -> the first IR version that has it.
IR_VERSIONS = {**dict.fromkeys(range(LOWEST, 19), 8), 19: 9, 20: 9, 21: 10}
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
            needs. Without a source it is the lowest that the model needs.
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
    highest = IR_VERSIONS.get(chosen, 11)
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


_OWN = ("", "ai.onnx")
# The first opset in which a resize says how it finds its places. ONNX's converter leaves that out, though the
# one way of older opsets is not the default of newer ones.
_PLACED_RESIZE = 11


class CopiedFormError(ExportError):
    """A copied node means something else in the opset that the file needs.

    Attributes:
        opset: the opset that the file needs.
    """

    def __init__(self, message: str, opset: int) -> None:
        super().__init__(message)
        self.opset = opset


class CopiedVersions:
    """Holds copied nodes to the opset of the file that is written.

    Args:
        opset: the opset that the user asks for; None for the source's, or a higher one that is needed.
        source: the versions of the file that the graph was imported from.

    Attributes:
        needed: op -> the first opset that has it in the form of the imported file.
    """

    def __init__(self, opset: int | None, source: SourceVersions) -> None:
        self._opset, self._source = opset, source
        self.needed: dict[str, int] = {}
        self._domains: dict[str, int] = {}
        self._last: dict[str, int] = {}  # op -> the last opset in which it has that form

    def converted(self, model: Any, label: str) -> Any:
        """Returns the model of an opaque node with nodes as the written file has them.

        Args:
            model: the model, which is not changed.
            label: the nodes in words.

        Raises:
            ExportError: when ONNX cannot convert a node to the opset of the written file.
        """
        own = next((entry.version for entry in model.opset_import if entry.domain in _OWN), None)
        if own is not None:
            target = self._opset or max(self._source.writable, LOWEST)
            forms = _forms(model, own)
            first = max((form[0] for form in forms.values()), default=LOWEST)
            if self._opset is None:
                target = max(target, first)
            if any(not low <= target <= high for low, high in forms.values()):
                model, forms = _convert(model, own, target, label), {}
                forms = _forms(model, target)
            for op, (low, high) in forms.items():
                self.needed[op] = max(low, self.needed.get(op, 0))
                self._last[op] = min(high, self._last.get(op, high))
        for entry in model.opset_import:
            if entry.domain not in _OWN:
                self._domains[entry.domain] = max(entry.version, self._domains.get(entry.domain, 0))
        return model

    def use(self, domain: str, version: int) -> None:
        """Adds the import of a domain other than ONNX's own."""
        self._domains[domain] = max(version, self._domains.get(domain, 0))

    def check(self, opset: int) -> None:
        """Refuses an opset in which a copied node means something else than in its file.

        Raises:
            CopiedFormError: naming the op.
        """
        for op, last in self._last.items():
            if opset > last:
                raise CopiedFormError(
                    f"{op} is kept as in the imported file, but opset {opset} defines it otherwise: "
                    f"choose opset={last}, or end the graph before it.",
                    opset,
                )

    def imports(self, opset: int) -> list[Any]:
        """Returns the opset imports of a file."""
        more = [helper.make_opsetid(domain, version) for domain, version in self._domains.items()]
        return [helper.make_opsetid("", opset), *more]


def _forms(model: Any, opset: int) -> dict[str, tuple[int, int]]:
    """Returns op of ONNX's own -> the first and the last opset that define it as ``opset`` does."""
    forms: dict[str, tuple[int, int]] = {}
    versions: dict[str, list[int]] = {}
    for schema in onnx.defs.get_all_schemas_with_history():
        if schema.domain in _OWN:
            versions.setdefault(schema.name, []).append(schema.since_version)
    for op in own_operators(model.graph):
        known = versions.get(op, [1])
        since = max((v for v in known if v <= opset), default=1)
        later = [v for v in known if v > opset]
        forms[op] = since, min(later, default=10**6) - 1
    return forms


def _convert(model: Any, own: int, target: int, label: str) -> Any:
    """Converts the nodes of a model to another opset.

    Raises:
        ExportError: when ONNX cannot do it, or changes the inputs or outputs.
    """
    refused = ExportError(
        f"{label} is kept as in the imported file, which has opset {own}, and has no form of opset {target}: "
        f"choose opset={max(own, LOWEST)}, or end the graph before it."
    )
    try:
        if own < _PLACED_RESIZE < target:
            model = onnx.version_converter.convert_version(model, _PLACED_RESIZE)
            _place_resizes(model.graph, OnnxModel(model))
        result = onnx.version_converter.convert_version(model, target)
    except (RuntimeError, ValueError) as error:
        raise refused from error
    ends = [[value.name for value in (*m.graph.input, *m.graph.output)] for m in (model, result)]
    if ends[0] != ends[1]:
        raise refused
    return result


def _place_resizes(graph: Any, model: OnnxModel) -> None:
    """Lets the resizes of a graph and of its bodies, which come from older opsets, find the places of these.

    Raises:
        ValueError: when one picks neighbours by a rule that no newer opset has.
    """
    for node in graph.node:
        for body in bodies_of(node):
            _place_resizes(body, model)
        if node.op_type != "Resize" or node.domain not in _OWN:
            continue
        scales = model.value(node.input[2])
        scales = np.ones(1) if scales is None else scales
        smaller, larger = bool((scales < 1).any()), bool((scales > 1).any())
        if smaller and larger and _mode(node) == "nearest":
            raise ValueError("onnxruntime rounds up where an axis shrinks, and down where one grows")
        node.attribute.append(helper.make_attribute("coordinate_transformation_mode", "asymmetric"))
        node.attribute.append(helper.make_attribute("nearest_mode", "ceil" if smaller else "floor"))


def _mode(node: Any) -> str:
    return next((a.s.decode() for a in node.attribute if a.name == "mode"), "nearest")
