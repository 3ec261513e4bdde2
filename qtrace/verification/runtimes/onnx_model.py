"""ONNX files with their integer tensors as outputs, for the runtimes that read ONNX."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from qtrace.errors import ExportError
from qtrace.onnxfile.external_data import load_model
from qtrace.onnxfile.selecting import expose_places
from qtrace.verification.float16 import read_float16_ops
from qtrace.verification.runtimes.base import RuntimeRun

_SUFFIX = "_as_8_bits"

# Type of a tensor of a graph -> types of inputs that it carries, as runtimes call them -> numpy's name.
_CARRIED = {
    "int32": {name: name for name in ("int64", "uint16", "uint32", "uint64")},
    "float32": {"float16": "float16", "double": "float64", "float64": "float64"},
}


@dataclass(frozen=True)
class Exposed:
    """An ONNX model whose integer tensors are outputs, too.

    Attributes:
        data: the serialized model.
        outputs: names of the model's own outputs.
        integers: names of the sites.
        tensors: the name of the integer tensor of each site; these outputs follow the model's own.
        places: the tensors with the places that nodes select; these outputs follow the integers.
        kinds: the ops of the nodes that select.
        folder: the folder of the external tensors that ``data`` refers to; None without such tensors.
        graph_hash: the hash of the exported graph; "" where the file does not store it.
        deployed: the serialized model without the integers as outputs if it is not the file as it is. It
            differs if the file preprocesses, or selects: places are outputs that follow its own. Else b"".
        fixed_samples: input -> the size of its first axis, where the file fixes that.
        float16: the ops of the graph that the file has in float16.
    """

    data: bytes
    outputs: list[str]
    integers: list[str]
    tensors: list[str]
    places: list[str] = field(default_factory=list)
    kinds: list[str] = field(default_factory=list)
    folder: Path | None = None
    graph_hash: str = ""
    deployed: bytes = b""
    fixed_samples: Mapping[str, int] = field(default_factory=dict)
    float16: tuple[str, ...] = ()


def as_declared(inputs: Sequence[np.ndarray], types: Sequence[str]) -> list[np.ndarray]:
    """Converts the tensors of a graph to the types that the inputs of a file declare.

    Args:
        inputs: one array for each input.
        types: the type of each input of the file, such as ``int64`` or ``float16``.
    """
    converted = []
    for value, name in zip(inputs, types, strict=True):
        carried = _CARRIED.get(value.dtype.name, {})
        converted.append(value.astype(carried[name]) if name in carried else value)
    return converted


def with_integer_outputs(path: Path) -> Exposed:
    """Reads an ONNX file and adds the result of every QuantizeLinear, and all places, to its outputs.

    Raises:
        ExportError: when the file, or the file of its tensors, is missing, damaged or of another kind.
    """
    import onnx
    from onnx import TensorProto

    from qtrace.export.onnx.ends import without_detections, without_preprocessing
    from qtrace.export.onnx.whole_columns import WHOLE

    model, folder = load_model(path)
    changed = [without_preprocessing(model), without_detections(model)]
    outputs = [o.name for o in model.graph.output]
    kinds, places = expose_places(model)
    deployed = model.SerializeToString() if any(changed) or places else b""
    told = [model.graph.output.pop() for _ in places][::-1]
    wider = {TensorProto.INT4: TensorProto.INT8, TensorProto.UINT4: TensorProto.UINT8}
    integers: list[str] = []
    tensors: list[str] = []
    stored = {t.name: t.data_type for t in model.graph.initializer}
    for node in model.graph.node:
        # Integers with columns of zeros come again without them.
        if node.op_type == "QuantizeLinear" and f"_int{WHOLE}" not in node.output[0]:
            name = node.output[0]
            # Other tools name the integers otherwise: their site has the name of the tensor that is rounded.
            site = name if name.endswith("_int") else re.sub(r"\W", "_", node.input[0])
            integers.append(site.removesuffix("_int"))
            kind = stored.get(node.input[2]) if len(node.input) > 2 else None
            if kind is None:
                raise ExportError(
                    f"{path}: QuantizeLinear {name!r} lacks a stored zero point: qtrace.export did not write "
                    "this file; export the module again."
                )
            if kind in wider:  # numpy lacks types of 4 bits
                kind, wide = wider[kind], f"{name}{_SUFFIX}"
                model.graph.node.append(onnx.helper.make_node("Cast", [name], [wide], to=kind))
                name = wide
            model.graph.output.append(onnx.helper.make_tensor_value_info(name, kind, None))
            tensors.append(name)
    model.graph.output.extend(told)
    facts = {p.key: p.value for p in model.metadata_props}
    data = model.SerializeToString()
    fixed = {i.name: i.type.tensor_type.shape.dim[:1] for i in model.graph.input}
    sizes = {
        name: axes[0].dim_value for name, axes in fixed.items() if axes and axes[0].HasField("dim_value")
    }
    graph, halves = facts.get("qtrace.graph", ""), read_float16_ops(model)
    return Exposed(data, outputs, integers, tensors, places, kinds, folder, graph, deployed, sizes, halves)


class ExposedSession:
    """Runs an exposed ONNX file; see `Session`.

    With optimizations, outputs and places come from the file as it is, and the integers from a copy in which
    they are outputs, across which a runtime does not fuse.

    Attributes:
        input_names: the names of the inputs.
        compiled: what runs the file with its integers as outputs.
        deployed: what runs the file as it is; None without optimizations.
    """

    input_names: Sequence[str]
    compiled: Any
    deployed: Any

    def __init__(self, model: Exposed) -> None:
        self.output_names, self.place_kinds = model.outputs, model.kinds
        self.integer_names: Sequence[str] = model.integers
        self.graph_hash, self.fixed_samples = model.graph_hash, model.fixed_samples
        self.float16 = model.float16

    def infer(self, file: Any, inputs: list[np.ndarray]) -> list[np.ndarray]:
        """Returns all outputs of `compiled` or `deployed`."""
        raise NotImplementedError

    def run(self, inputs: list[np.ndarray]) -> RuntimeRun:
        """Runs the model; see `Session`.

        Raises:
            ExportError: for inputs that are not the file's, or a batch of another size than it fixes.
        """
        self._check(inputs)
        values = self.infer(self.compiled, inputs)
        count, end = len(self.output_names), len(self.output_names) + len(self.integer_names)
        outputs, places = values[:count], values[end:]
        if self.deployed is not None:
            deployed = self.infer(self.deployed, inputs)
            outputs, places = deployed[:count], deployed[count:]
        integers = [v if v.dtype.kind in "iu" else np.rint(v).astype(np.int32) for v in values[count:end]]
        return RuntimeRun(outputs, dict(zip(self.integer_names, integers, strict=True)), places)

    def run_outputs(self, inputs: list[np.ndarray]) -> list[np.ndarray]:
        """Runs the model and returns only its outputs; see `run`."""
        self._check(inputs)
        return self.infer(self.deployed or self.compiled, inputs)[: len(self.output_names)]

    def _check(self, inputs: list[np.ndarray]) -> None:
        if len(inputs) != len(self.input_names):
            raise ExportError(f"the model takes {len(self.input_names)} inputs, not {len(inputs)}.")
        for name, x in zip(self.input_names, inputs, strict=True):
            size = self.fixed_samples.get(name)
            if size is not None and x.ndim and x.shape[0] != size:
                raise ExportError(
                    f"{name} has shape {x.shape}, but the file fixes its first axis to {size}, since the "
                    f"graph takes no other size: give batches of {size}."
                )
