"""Writes an op as the nodes of simpler ops that ONNX defines it by.

Many ops of ONNX have a function body: LayerNormalization, Attention, the losses. If qtrace lacks a lowering
of its own, it adds the nodes of the body instead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx

from qtrace.importing.onnx.model import OnnxNode
from qtrace.onnxfile.model import bodies_of, rename_tensors

__all__ = ["Expansion", "expand", "titled_parts"]


@dataclass(frozen=True)
class Expansion:
    """The body of an op for one of its nodes.

    Attributes:
        graph: the nodes, whose values are named after the first output of the node.
        opsets: the versions of the domains that the body means.
        inputs: name of a parameter in ``graph`` -> the index of the node's input.
        outputs: the names in ``graph`` of the node's outputs.
    """

    graph: onnx.GraphProto
    opsets: Mapping[str, int]
    inputs: Mapping[str, int]
    outputs: tuple[str, ...]


def expand(
    node: OnnxNode, types: Sequence[tuple[np.dtype[Any], Sequence[int]] | None], opset: int
) -> Expansion | None:
    """Returns the body of a node's op; None if ONNX defines none.

    Args:
        node: the node.
        types: dtype and shape of each input; None for one that is left out.
        opset: the opset that the model imports.
    """
    body = _body(node, types, opset)
    if body is None:
        return None
    prefix = next(name for name in node.outputs if name)
    present = {f"{prefix}/{formal}": i for i, formal in enumerate(body.input) if i < len(types) and types[i]}
    names = {formal: f"{prefix}/{formal}" for formal in body.input if f"{prefix}/{formal}" in present}
    names.update({formal: "" for formal in body.input if formal not in names})
    for part in body.node:
        for output in part.output:
            if output:
                names[output] = f"{prefix}/{output}"
    # The results keep the names that the file gives them.
    names.update({f: name for f, name in zip(body.output, node.outputs, strict=False) if name})
    graph = onnx.GraphProto()
    schema: Any = onnx.defs.get_schema(node.op, node.version, node.domain)
    defaults = {name: a.default_value for name, a in schema.attributes.items() if a.default_value.type}
    defaults.update({attribute.name: attribute for attribute in body.attribute_proto})
    attributes = {**defaults, **{attribute.name: attribute for attribute in node.proto.attribute}}
    for part in body.node:
        graph.node.append(_renamed(part, names, attributes))
    opsets = {("" if i.domain == "ai.onnx" else i.domain): i.version for i in body.opset_import}
    pairs = zip(body.output, node.outputs, strict=False)
    outputs = tuple(names.get(formal, "") if name else "" for formal, name in pairs)
    return Expansion(graph, opsets, present, outputs)


def titled_parts(node: OnnxNode, parts: Sequence[OnnxNode]) -> list[OnnxNode]:
    """Returns the nodes of a body with the title of the node that it stands for, if that has one."""
    if not node.title:
        return list(parts)
    whole = set(node.outputs)
    return [
        replace(part, title=node.title if whole & {*part.outputs} else f"{node.title}.{part.op.lower()}")
        for part in parts
    ]


def _body(
    node: OnnxNode, types: Sequence[tuple[np.dtype[Any], Sequence[int]] | None], opset: int
) -> onnx.FunctionProto | None:
    schema: Any = onnx.defs.get_schema(node.op, node.version, node.domain)
    body = onnx.FunctionProto()
    if schema.has_context_dependent_function:
        kinds = [_type(kind) for kind in types]
        try:
            text = schema.get_context_dependent_function_with_opset_version(
                _registered(schema.context_dependent_function_opset_versions, opset),
                node.proto.SerializeToString(),
                kinds,
            )
        except (RuntimeError, ValueError):  # ONNX builds no body for these types
            return None
        if not text:
            return None
        body.ParseFromString(text)
        return body
    if schema.has_function:
        version = _registered(schema.function_opset_versions, opset)
        body.ParseFromString(schema.get_function_with_opset_version(version))
        return body
    return None


def _registered(versions: Sequence[int], opset: int) -> int:
    """Returns the newest of the opsets for which a body is written that is not newer than ``opset``."""
    return max((v for v in versions if v <= opset), default=min(versions))


def _type(kind: tuple[np.dtype[Any], Sequence[int]] | None) -> bytes:
    if kind is None:
        return onnx.TypeProto().SerializeToString()
    element = onnx.helper.np_dtype_to_tensor_dtype(np.dtype(kind[0]))
    return onnx.helper.make_tensor_type_proto(element, list(kind[1])).SerializeToString()


def _renamed(
    part: onnx.NodeProto, names: Mapping[str, str], attributes: Mapping[str, onnx.AttributeProto]
) -> onnx.NodeProto:
    """Copies a node of a body with the names and attributes of the call."""
    result = onnx.NodeProto()
    result.CopyFrom(part)
    rename_tensors(result, names)
    _bind(result, attributes)
    return result


def _bind(node: onnx.NodeProto, attributes: Mapping[str, onnx.AttributeProto]) -> None:
    """Gives a node, and the nodes of its bodies, the attributes of the call that they name."""
    node.name = ""
    for attribute in list(node.attribute):
        given, name = attributes.get(attribute.ref_attr_name), attribute.name
        if given is not None:
            attribute.CopyFrom(given)
            attribute.name = name
        elif attribute.ref_attr_name:  # an optional attribute that the call leaves out
            node.attribute.remove(attribute)
    for body in bodies_of(node):
        for part in body.node:
            _bind(part, attributes)
