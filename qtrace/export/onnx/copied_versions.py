"""The versions of nodes that are copied from an imported file into one that is written."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from onnx import helper

from qtrace.errors import ExportError
from qtrace.export.onnx.opset import LOWEST, SourceVersions
from qtrace.onnxfile.bodies import bodies_of, own_operators
from qtrace.onnxfile.model import OnnxModel

__all__ = ["CopiedFormError", "CopiedVersions"]

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
                    f"{op} is kept as in the imported file, but opset {opset} of the written file defines it "
                    f"otherwise: choose opset={last}, or end the graph before it.",
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
