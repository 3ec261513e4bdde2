"""A TFLite file in LiteRT on CPU, with all its integer tensors as outputs.

Both ways of running it use the kernels that LiteRT chooses by default: XNNPACK's, which round half to even as
the graph does. LiteRT's reference kernels round twice, and are off by one in up to a twentieth of the values.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from qtrace.errors import ExportError
from qtrace.verification.runtimes.base import Run, Runtime, check_size

__all__ = ["RUNTIME"]


class _Interpreter:
    """A loaded file: arrays in, all its outputs out."""

    def __init__(self, data: bytes, path: Path, fuses: bool) -> None:
        from ai_edge_litert.interpreter import Interpreter

        try:
            # Kernels with or without what XNNPACK fuses.
            self.loaded = Interpreter(model_content=data, experimental_disable_delegate_node_fusion=not fuses)
            self.loaded.allocate_tensors()
        except (RuntimeError, ValueError) as error:
            raise ExportError(f"LiteRT cannot run {path}: {_line(error)}") from error
        self.shapes = [tuple(int(n) for n in d["shape"]) for d in self.loaded.get_input_details()]

    def run(self, inputs: list[np.ndarray]) -> list[np.ndarray]:
        """Runs the model."""
        details = self.loaded.get_input_details()
        try:
            for detail, value in zip(details, inputs, strict=True):
                if tuple(detail["shape"]) != value.shape:
                    self.loaded.resize_tensor_input(detail["index"], value.shape)
            self.loaded.allocate_tensors()
            for detail, value in zip(details, inputs, strict=True):
                self.loaded.set_tensor(detail["index"], _as_given(value, detail))
            self.loaded.invoke()
        except (RuntimeError, ValueError) as error:
            raise ExportError(f"LiteRT refused the input: {_line(error)}") from error
        return [self.loaded.get_tensor(d["index"]) for d in self.loaded.get_output_details()]


class _Session:
    """Runs a TFLite file on CPU.

    Optimized, the file runs as it is; its integers come from a copy in which they are outputs. Not
    optimized, both come from that copy, with one kernel for each operator.
    """

    def __init__(self, path: Path, optimize: bool) -> None:
        check_size(path, "TFLite")
        data = path.read_bytes()
        if data[4:8] != b"TFL3":
            raise ExportError(f"{path} is not a TFLite file.")
        exposed = _exposed(data, path)
        self.facts, self.constants, self.computed = exposed.facts, exposed.constants, exposed.computed
        self.integer_names = list(self.facts["integers"])
        self.graph_hash: str = self.facts["graph"]
        self.full = _Interpreter(exposed.data, path, optimize)
        self.plain = _Interpreter(data, path, True) if optimize else None

    def run(self, inputs: list[np.ndarray]) -> Run:
        """Runs the model; see `Session`."""
        orders = self.facts["inputs"]
        if len(inputs) != len(orders):
            raise ExportError(f"the model takes {len(orders)} inputs, not {len(inputs)}.")
        laid = [self._laid(*given) for given in enumerate(inputs)]
        found = self.full.run(laid)
        count = len(found) - len(self.computed)
        tensors = {**self.constants, **dict(zip(self.computed, found[count:], strict=True))}
        integers = {
            name: _in_graph(tensors[tensor], order)
            for name, (tensor, order) in self.facts["integers"].items()
        }
        ends = found[:count] if self.plain is None else self.plain.run(laid)
        details = self.full.loaded.get_output_details()
        outputs = [
            _in_graph(_as_floats(v, d), o)
            for v, d, o in zip(ends, details, self.facts["outputs"], strict=False)
        ]
        return Run(outputs, integers)

    def _laid(self, number: int, value: np.ndarray) -> np.ndarray:
        """An input as the file takes it."""
        order, shape = self.facts["inputs"][number], self.full.shapes[number]
        if value.ndim != len(order):
            raise ExportError(f"input {number} has {value.ndim} axes, but the model takes {len(order)}.")
        laid = np.ascontiguousarray(value.transpose(order))
        free = int(bool(self.facts["free_batch"]))
        if laid.shape[free:] != shape[free:]:
            batch = "a batch of any size" if free else "a batch of that size alone"
            raise ExportError(
                f"input {number} has shape {value.shape}, but the file was written for "
                f"{_in_graph(np.empty(shape, np.bool_), order).shape} and takes {batch}: trace the model "
                "with the shape that you need."
            )
        return laid


class _Exposed:
    """A file whose integer tensors are outputs, too.

    Attributes:
        data: the file.
        facts: what the export says of its tensors.
        constants: integer tensors that the file holds.
        computed: the names of those that follow the model's own outputs.
    """

    def __init__(
        self, data: bytes, facts: dict[str, Any], constants: dict[str, np.ndarray], computed: list[str]
    ) -> None:
        self.data, self.facts, self.constants, self.computed = data, facts, constants, computed


def _exposed(data: bytes, path: Path) -> _Exposed:
    import flatbuffers
    from ai_edge_litert import schema_py_generated as schema

    try:
        model = schema.ModelT.InitFromPackedBuf(data, 0)
        entry = next(m for m in model.metadata or () if m.name == b"qtrace")
        facts = json.loads(bytes(model.buffers[entry.buffer].data))
    except StopIteration:
        raise ExportError(
            f"{path} was not written by qtrace: it does not say where its integers are."
        ) from None
    except Exception as error:
        raise ExportError(f"{path} is not a TFLite file: {_line(error)}") from error
    graph = model.subgraphs[0]
    places = {t.name.decode(): i for i, t in enumerate(graph.tensors)}
    wanted = dict.fromkeys(tensor for tensor, _ in facts["integers"].values())
    constants, computed = {}, []
    for name in wanted:
        tensor = graph.tensors[places[name]]
        stored = model.buffers[tensor.buffer].data
        if stored is not None and len(stored):
            kind = np.int16 if tensor.type == schema.TensorType.INT16 else np.int8
            constants[name] = np.frombuffer(bytes(stored), kind).reshape(tensor.shape)
        else:
            computed.append(name)
    given = [int(i) for i in graph.outputs]
    graph.outputs = np.array([*given, *(places[n] for n in computed)], np.int32)
    model.signatureDefs = []
    builder = flatbuffers.Builder(len(data) + 65536)
    builder.Finish(model.Pack(builder), file_identifier=b"TFL3")
    return _Exposed(bytes(builder.Output()), facts, constants, computed)


def _in_graph(value: np.ndarray, order: list[int]) -> np.ndarray:
    """A tensor of the file with its axes as in the graph."""
    return value.transpose([order.index(axis) for axis in range(len(order))])


def _as_given(value: np.ndarray, detail: dict[str, Any]) -> np.ndarray:
    """Numbers of the type that an input has: integers of its grid where it takes those."""
    kind = np.dtype(detail["dtype"])
    scale, zero = detail["quantization"]
    if kind.kind != "i" or not scale or value.dtype.kind != "f":
        return value.astype(kind, copy=False)
    info = np.iinfo(kind)
    return np.clip(np.rint(value / np.float32(scale)) + zero, info.min, info.max).astype(kind)


def _as_floats(value: np.ndarray, detail: dict[str, Any]) -> np.ndarray:
    scale, zero = detail["quantization"]
    if value.dtype.kind != "i" or not scale:
        return value
    return (value.astype(np.int32) - zero).astype(np.float32) * np.float32(scale)


def _line(error: Exception) -> str:
    """The first line of what LiteRT says."""
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


RUNTIME = Runtime("litert", "ai_edge_litert", "tflite", (".tflite",), _Session)
