"""ONNX files with their integer tensors as outputs, for the runtimes that read ONNX."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path

from qtrace.errors import ExportError

__all__ = ["Exposed", "with_integer_outputs"]

# The types of 4 bits by their numbers in ONNX, and what holds their values.
_WIDER = {22: 3, 21: 2}  # int4 -> int8, uint4 -> uint8
_SUFFIX = "_as_8_bits"


@dataclass(frozen=True)
class Exposed:
    """A model whose integer tensors are outputs, too.

    Attributes:
        data: the file.
        outputs: names of the model's own outputs.
        integers: names of the sites.
        tensors: the names of their integers, in that order; these outputs follow the model's own.
    """

    data: bytes
    outputs: list[str]
    integers: list[str]
    tensors: list[str]


def with_integer_outputs(path: Path) -> Exposed:
    """Reads an ONNX file and makes the result of every QuantizeLinear an output.

    Raises:
        ExportError: when the file is missing or no ONNX file.
    """
    if importlib.util.find_spec("onnx") is None:
        raise ExportError("verification needs the package onnx: run pip install 'qtrace[onnx]'.")
    import onnx

    if not path.is_file():
        raise ExportError(f"{path} does not exist: export the module first.")
    try:
        model = onnx.load(str(path))
    except Exception as error:
        raise ExportError(f"{path} is not an ONNX file: {error}") from error
    outputs = [o.name for o in model.graph.output]
    integers: list[str] = []
    tensors: list[str] = []
    stored = {t.name: t.data_type for t in model.graph.initializer}
    for node in model.graph.node:
        if node.op_type == "QuantizeLinear":
            name = node.output[0]
            integers.append(name.removesuffix("_int"))
            kind = stored[node.input[2]]
            if kind in _WIDER:  # numpy has no type of 4 bits
                kind, wide = _WIDER[kind], f"{name}{_SUFFIX}"
                model.graph.node.append(onnx.helper.make_node("Cast", [name], [wide], to=kind))
                name = wide
            model.graph.output.append(onnx.helper.make_tensor_value_info(name, kind, None))
            tensors.append(name)
    return Exposed(model.SerializeToString(), outputs, integers, tensors)
