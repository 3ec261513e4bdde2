"""Runs a TFLite file in LiteRT on CPU, with all its integer tensors as outputs.

With optimizations and without, qtrace runs the kernels that LiteRT chooses by default: XNNPACK's, which
round half to even as the graph does. LiteRT's reference kernels round twice and are off by one in up to 5 %
of the values. LiteRT aborts its process for some files (a constant of -1e37), so that it runs in a child.
"""

from __future__ import annotations

import functools
import json
import struct
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from qtrace.errors import ExportError
from qtrace.onnxfile.kernels import Kernels
from qtrace.runtimes.child import RuntimeChild
from qtrace.runtimes.host import RuntimeHost
from qtrace.storage.files import check_size
from qtrace.verification.runtimes.base import Runtime, RuntimeRun


class _Interpreter:
    """A file that a child process has loaded: takes arrays, returns all its outputs.

    Attributes:
        inputs, outputs: shape, dtype and quantization of each input and output.
    """

    def __init__(self, child: RuntimeChild, data: bytes, fuses: bool) -> None:
        # Kernels with or without what XNNPACK fuses.
        self._file, facts = child.open([np.frombuffer(data, np.uint8)], fuse=fuses)
        self.inputs, self.outputs = facts["inputs"], facts["outputs"]
        self.shapes = [tuple(detail["shape"]) for detail in self.inputs]

    def run(self, inputs: list[np.ndarray]) -> list[np.ndarray]:
        """Runs the model and returns its outputs."""
        if len(inputs) != len(self.inputs):
            raise ExportError(f"the file takes {len(self.inputs)} inputs, not {len(inputs)}.")
        arrays = [_as_input(value, detail) for value, detail in zip(inputs, self.inputs, strict=True)]
        return self._file.run(arrays)


class LitertSession:
    """Runs a TFLite file on CPU.

    With optimizations, the file runs as it is, and its integers come from a copy in which they are outputs.
    Without, outputs and integers come from that copy, with one kernel for each operator.
    """

    def __init__(self, path: Path, optimize: bool, host: RuntimeHost | None = None) -> None:
        check_size(path, "TFLite")
        data = path.read_bytes()
        if data[4:8] != b"TFL3":
            raise ExportError(f"{path} is not a TFLite file.")
        exposed = _expose_integers(data, path)
        self.facts, self.constants, self.computed = exposed.facts, exposed.constants, exposed.computed
        self.integer_names = list(self.facts["integers"])
        self.graph_hash: str = self.facts["graph"]
        self.inexact = frozenset(self.facts.get("inexact", ()))
        child = RuntimeChild("litert", "LiteRT", path, host)
        self.full = _Interpreter(child, exposed.data, optimize)
        self.deployed = _Interpreter(child, data, True) if optimize else None
        self.side = child.side if host is not None else {}

    def run(self, inputs: list[np.ndarray]) -> RuntimeRun:
        """Runs the model; see `Session`."""
        arrays = self._arrays(inputs)
        values = self.full.run(arrays)
        count = len(values) - len(self.computed)
        tensors = {**self.constants, **dict(zip(self.computed, values[count:], strict=True))}
        integers = {
            name: _graph_layout(tensors[tensor], order)
            for name, (tensor, order) in self.facts["integers"].items()
        }
        results = values[:count] if self.deployed is None else self.deployed.run(arrays)
        return RuntimeRun(self._outputs(results), integers)

    def run_outputs(self, inputs: list[np.ndarray]) -> list[np.ndarray]:
        """Runs the model and returns only its outputs."""
        return self._outputs((self.deployed or self.full).run(self._arrays(inputs)))

    def _arrays(self, inputs: list[np.ndarray]) -> list[np.ndarray]:
        """Returns the inputs in the layouts of the file."""
        count = len(self.facts["inputs"])
        if len(inputs) != count:
            raise ExportError(f"the model takes {count} inputs, not {len(inputs)}.")
        return [self._lay_out(number, value) for number, value in enumerate(inputs)]

    def _outputs(self, results: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Returns the outputs of the file as floats, in the layouts of the graph."""
        return [
            _graph_layout(_as_floats(v, d), o)
            for v, d, o in zip(results, self.full.outputs, self.facts["outputs"], strict=False)
        ]

    def _lay_out(self, number: int, value: np.ndarray) -> np.ndarray:
        """Transposes an input of the graph to the layout of the file."""
        order, shape = self.facts["inputs"][number], self.full.shapes[number]
        if value.ndim != len(order):
            raise ExportError(f"input {number} has {value.ndim} axes, but the model takes {len(order)}.")
        array = np.ascontiguousarray(value.transpose(order))
        free = int(bool(self.facts["free_batch"]))
        if array.shape[free:] != shape[free:]:
            batch = "a batch of any size" if free else "only a batch of that size"
            raise ExportError(
                f"input {number} has shape {value.shape}, but the file was written for "
                f"{_graph_layout(np.empty(shape, np.bool_), order).shape} and takes {batch}: trace the model "
                "with the shape that you need."
            )
        return array


class _Exposed:
    """A TFLite file whose integer tensors are outputs, too.

    Attributes:
        data: the content of the file.
        facts: the metadata that qtrace.export wrote: sites, layouts and the hash of the graph.
        constants: name of an integer tensor that the file stores -> its values.
        computed: the names of the computed integer tensors, whose outputs follow the model's own.
    """

    def __init__(
        self, data: bytes, facts: dict[str, Any], constants: dict[str, np.ndarray], computed: list[str]
    ) -> None:
        self.data, self.facts, self.constants, self.computed = data, facts, constants, computed


def _read(data: bytes, path: Path) -> tuple[Any, dict[str, Any]]:
    """Reads a file: its content as an object of the schema, and the metadata that qtrace.export wrote."""
    from ai_edge_litert import schema_py_generated as schema

    try:
        model = schema.ModelT.InitFromPackedBuf(data, 0)
    except (struct.error, TypeError, ValueError) as error:  # the types that damaged files lead to
        raise ExportError(f"{path} is not a TFLite file: {_first_line(error)}") from error
    try:
        entry = next(m for m in model.metadata or () if m.name == b"qtrace")
        facts = json.loads(bytes(model.buffers[entry.buffer].data))
    except StopIteration:
        raise ExportError(
            f"{path} was not written by qtrace: it does not say where its integers are."
        ) from None
    except (IndexError, TypeError, ValueError) as error:  # an entry that names no buffer, or no JSON
        raise ExportError(f"{path} is not a TFLite file: {_first_line(error)}") from error
    return model, facts


def find_kernels(path: Path) -> Kernels:
    """Finds the operators of a file that compute on integers, and the ops of the graph that do not.

    Roundings are no ops: the operators QUANTIZE and DEQUANTIZE do not count.

    Raises:
        ExportError: when the file is no export of qtrace.
    """
    from ai_edge_litert import schema_py_generated as schema

    check_size(path, "TFLite")
    model, facts = _read(path.read_bytes(), path)
    graph, codes = model.subgraphs[0], schema.BuiltinOperator
    integer = []
    for operator in graph.operators:
        tensors = [graph.tensors[i] for i in (*operator.inputs, *operator.outputs) if i >= 0]
        code = model.operatorCodes[operator.opcodeIndex].builtinCode
        if code not in (codes.QUANTIZE, codes.DEQUANTIZE) and _only_integers(tensors):
            integer.append(graph.tensors[operator.outputs[0]].name.decode())
    return Kernels(tuple(integer), tuple((name, kind, why) for name, kind, why in facts.get("floats", ())))


def find_fixed_batch(path: Path) -> int | None:
    """Returns the only batch that a file takes, the first size of its first input in the graph's layout.

    None where it takes any.

    Raises:
        ExportError: when the file is no export of qtrace.
    """
    model, facts = _read(path.read_bytes(), path)
    graph = model.subgraphs[0]
    if facts["free_batch"] or not len(graph.inputs) or not facts["inputs"][0]:
        return None
    return int(graph.tensors[graph.inputs[0]].shape[facts["inputs"][0].index(0)])


def _only_integers(tensors: Iterable[Any]) -> bool:
    from ai_edge_litert import schema_py_generated as schema

    return all(tensor.type != schema.TensorType.FLOAT32 for tensor in tensors)


def _expose_integers(data: bytes, path: Path) -> _Exposed:
    import flatbuffers
    from ai_edge_litert import schema_py_generated as schema

    model, facts = _read(data, path)
    graph = model.subgraphs[0]
    places = {t.name.decode(): i for i, t in enumerate(graph.tensors)}
    names = dict.fromkeys(tensor for tensor, _ in facts["integers"].values())
    constants, computed = {}, []
    for name in names:
        tensor = graph.tensors[places[name]]
        stored = model.buffers[tensor.buffer].data
        if stored is not None and len(stored):
            kind = np.int16 if tensor.type == schema.TensorType.INT16 else np.int8
            constants[name] = np.frombuffer(bytes(stored), kind).reshape(tensor.shape)
        else:
            computed.append(name)
    outputs = [int(i) for i in graph.outputs]
    graph.outputs = np.array([*outputs, *(places[n] for n in computed)], np.int32)
    model.signatureDefs = []
    builder = flatbuffers.Builder(len(data) + 65536)
    builder.Finish(model.Pack(builder), file_identifier=b"TFL3")
    return _Exposed(bytes(builder.Output()), facts, constants, computed)


def _graph_layout(value: np.ndarray, order: list[int]) -> np.ndarray:
    """Transposes a tensor of the file to the layout of the graph."""
    return value.transpose([order.index(axis) for axis in range(len(order))])


def _as_input(value: np.ndarray, detail: dict[str, Any]) -> np.ndarray:
    """Converts an array to the type of an input; floats become integers where the input takes integers."""
    kind = np.dtype(detail["dtype"])
    scale, zero = detail["quantization"]
    if kind.kind != "i" or not scale or value.dtype.kind != "f":
        return value.astype(kind, copy=False)
    info = np.iinfo(kind)
    return np.clip(np.rint(value / np.float32(scale)) + zero, info.min, info.max).astype(kind)


def _as_floats(value: np.ndarray, detail: dict[str, Any]) -> np.ndarray:
    """Dequantizes the integers of an output."""
    scale, zero = detail["quantization"]
    if value.dtype.kind != "i" or not scale:
        return value
    return (value.astype(np.int32) - zero).astype(np.float32) * np.float32(scale)


def _first_line(error: Exception) -> str:
    """Returns the first line of LiteRT's message."""
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def runtime(host: RuntimeHost | None = None) -> Runtime:
    """Returns LiteRT in this interpreter, or in a host's; the file is changed here all the same."""
    opened = functools.partial(LitertSession, host=host)
    return Runtime(
        "litert",
        "ai_edge_litert",
        "tflite",
        (".tflite",),
        opened,
        find_kernels,
        find_fixed_batch,
        hosted=runtime,
        host=host,
    )


RUNTIME = runtime()
