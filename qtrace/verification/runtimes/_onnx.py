"""ONNX files with their integer tensors as outputs, for the runtimes that read ONNX."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from qtrace.errors import ExportError
from qtrace.verification.onnx_file import load_onnx

__all__ = ["Exposed", "as_declared", "with_integer_outputs"]

# ONNX's number of a type of 4 bits -> that of the type of 8 bits with the same sign.
_WIDER = {22: 3, 21: 2}  # int4 -> int8, uint4 -> uint8
_SUFFIX = "_as_8_bits"

# Types of inputs that MegEngine carries as int32.
_CARRIED_AS_INT32 = ("int64", "uint32", "uint64")


@dataclass(frozen=True)
class Exposed:
    """An ONNX model whose integer tensors are outputs, too.

    Attributes:
        data: the serialized model.
        outputs: names of the model's own outputs.
        integers: names of the sites.
        tensors: the name of the integer tensor of each site; these outputs follow the model's own.
        folder: the folder of the external tensors that ``data`` refers to; None without such tensors.
        graph_hash: the hash of the exported graph; "" where the file does not store it.
        deployed: the serialized model without the integers as outputs if it is not the file as it is, because
            it is verified without the preprocessing in the file; else b"".
    """

    data: bytes
    outputs: list[str]
    integers: list[str]
    tensors: list[str]
    folder: Path | None = None
    graph_hash: str = ""
    deployed: bytes = b""


def as_declared(inputs: Sequence[np.ndarray], types: Sequence[str]) -> list[np.ndarray]:
    """Converts the int32 tensors of a graph to the integer types that the inputs of a file declare.

    Args:
        inputs: one array for each input.
        types: the type of each input of the file, such as ``int64``.
    """
    pairs = zip(inputs, types, strict=True)
    return [v.astype(t) if v.dtype == np.int32 and t in _CARRIED_AS_INT32 else v for v, t in pairs]


def with_integer_outputs(path: Path) -> Exposed:
    """Reads an ONNX file and adds the result of every QuantizeLinear to its outputs.

    Raises:
        ExportError: when the file, or the file of its tensors, is missing, damaged or of another kind.
    """
    import onnx

    from qtrace.export.onnx.detections import without_detections
    from qtrace.export.onnx.ends import without_preprocessing

    model, folder = load_onnx(path)
    changed = [without_preprocessing(model), without_detections(model)]
    deployed = model.SerializeToString() if any(changed) else b""
    outputs = [o.name for o in model.graph.output]
    integers: list[str] = []
    tensors: list[str] = []
    stored = {t.name: t.data_type for t in model.graph.initializer}
    for node in model.graph.node:
        if node.op_type == "QuantizeLinear":
            name = node.output[0]
            # Other tools name the integers otherwise: their site has the name of the tensor that is rounded.
            site = name if name.endswith("_int") else re.sub(r"\W", "_", node.input[0])
            integers.append(site.removesuffix("_int"))
            kind = stored.get(node.input[2]) if len(node.input) > 2 else None
            if kind is None:
                raise ExportError(
                    f"{path}: QuantizeLinear {name!r} has no stored zero point: qtrace.export did not write "
                    "this file; export the module again."
                )
            if kind in _WIDER:  # numpy has no type of 4 bits
                kind, wide = _WIDER[kind], f"{name}{_SUFFIX}"
                model.graph.node.append(onnx.helper.make_node("Cast", [name], [wide], to=kind))
                name = wide
            model.graph.output.append(onnx.helper.make_tensor_value_info(name, kind, None))
            tensors.append(name)
    facts = {p.key: p.value for p in model.metadata_props}
    data = model.SerializeToString()
    return Exposed(data, outputs, integers, tensors, folder, facts.get("qtrace.graph", ""), deployed)
