"""onnxruntime: runs the float form of a graph that has an ONNX form, several times as fast on CPU."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from qtrace.calibration.base import Arguments, EngineError, Observe
from qtrace.errors import ExportError
from qtrace.export.onnx.activations import activations
from qtrace.graph.interpreter import Interpreter
from qtrace.graph.types import TensorNode, TracedModule
from qtrace.graph.walk import exprs

__all__ = ["OnnxRuntime"]

# Bytes of activations at once. A constant, not a share of what is free: which nodes are outputs decides what
# onnxruntime fuses, and thereby the last bits of the values.
_LIMIT = 2 << 30


class OnnxRuntime:
    """Runs the graph as an ONNX model whose outputs are the watched nodes.

    All of a batch's activations are in memory when it has run; each is freed when it was observed. Where they
    are too many, the model runs in parts, each time as far as the last of some nodes.

    Args:
        prepared: a module made by ``qtrace.prepare``.
        nodes: the names of the nodes that are watched, in the order of the graph.
        threads: how many threads compute; None for all cores.
        limit: how many bytes of activations may be in memory at once.

    Raises:
        EngineError: when the graph has no ONNX form, or onnxruntime is missing or refuses it.
    """

    name = "onnxruntime"

    def __init__(
        self,
        prepared: TracedModule,
        nodes: Sequence[str],
        threads: int | None = None,
        limit: int = _LIMIT,
    ) -> None:
        if importlib.util.find_spec("onnxruntime") is None:
            raise EngineError("the package onnxruntime is not installed (pip install 'qtrace[onnx]')")
        if len(prepared.argdef_graph_map) != 1:
            raise EngineError("the model was traced with several structures of arguments")
        try:
            self._model = activations(prepared, nodes)
        except ExportError as error:
            raise EngineError(f"the graph has no ONNX form: {str(error).rstrip('.')}") from error
        self._prepared, self._nodes, self._threads, self._limit = prepared, tuple(nodes), threads, limit
        self._inputs = [n for n in prepared.graph.inputs if isinstance(n, TensorNode)]
        produced = [*self._inputs, *(n for e in exprs(prepared) for n in e.outputs)]
        self._bytes = {n.name: 4 * math.prod(n.shape or ()) for n in produced if isinstance(n, TensorNode)}
        self._sessions: dict[tuple[str, ...], Any] = {}
        self._session(self._nodes)

    def run(self, arguments: Arguments, index: int, observe: Observe) -> None:
        """Runs one batch; see `Engine`."""
        feeds = self._feeds(arguments)
        for part in self._parts(next(iter(feeds.values()))):
            names = [self._model.outputs[n] for n in part if n in self._model.outputs]
            session = self._session(part)
            try:
                values = session.run(names, feeds)[::-1] if session is not None else []
            except Exception as error:  # onnxruntime's own exceptions derive from nothing else
                raise EngineError(f"onnxruntime refuses the batch: {_line(error)}") from error
            for node in part:
                given = self._model.input_nodes.get(node)
                observe(node, feeds[given] if given is not None else values.pop())

    def _feeds(self, arguments: Arguments) -> dict[str, np.ndarray]:
        args, kwargs = arguments
        _, (_, *tensors) = Interpreter(self._prepared).bind(args, kwargs)
        arrays = [t.numpy().astype(n.dtype, copy=False) for t, n in zip(tensors, self._inputs, strict=True)]
        return dict(zip(self._model.inputs, arrays, strict=True))

    def _parts(self, first: np.ndarray) -> list[tuple[str, ...]]:
        """The watched nodes in groups whose values fit, if a batch's are as large as its first input."""
        growth = first.nbytes / max(1, self._bytes[self._inputs[0].name])
        parts: list[list[str]] = [[]]
        total = 0.0
        for node in self._nodes:
            size = self._bytes[node] * growth
            if parts[-1] and total + size > self._limit:
                parts.append([])
                total = 0.0
            parts[-1].append(node)
            total += size
        return [tuple(part) for part in parts]

    def _session(self, part: tuple[str, ...]) -> Any:
        """The session that computes some nodes; None when all of them are inputs."""
        wanted = {self._model.outputs[node] for node in part if node in self._model.outputs}
        if not wanted:
            return None
        if part not in self._sessions:
            data = self._model.data if part == self._nodes else _with_outputs(self._model.data, wanted)
            self._sessions[part] = _open(data, self._threads)
        return self._sessions[part]


def _with_outputs(data: bytes, wanted: set[str]) -> bytes:
    import onnx

    model = onnx.load_from_string(data)
    kept = [output for output in model.graph.output if output.name in wanted]
    del model.graph.output[:]
    model.graph.output.extend(kept)
    return model.SerializeToString()


def _open(data: bytes, threads: int | None) -> Any:
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads = threads or 0
    options.log_severity_level = 4
    # Between two runs its threads would take the cores from those that observe.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    options.add_session_config_entry("session.set_denormal_as_zero", "1")  # as MegEngine does
    try:
        return ort.InferenceSession(data, options, providers=["CPUExecutionProvider"])
    except Exception as error:
        raise EngineError(f"onnxruntime refuses the graph: {_line(error)}") from error


def _line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text[:300].rstrip(".")
