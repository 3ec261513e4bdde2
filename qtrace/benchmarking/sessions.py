"""Sessions of onnxruntime that are timed: with one number of threads, all optimizations, and its profile."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from qtrace.errors import ExportError

__all__ = ["NodeRun", "ProfiledSession", "open_session"]

_KERNEL = "_kernel_time"
_MICROSECOND = 1e-6


@dataclass(frozen=True)
class NodeRun:
    """One node of one run.

    Attributes:
        name: the name of the node in the optimized graph.
        op: its ONNX op.
        seconds: the time of its kernel.
        inputs: the types and shapes of its inputs, as onnxruntime writes them.
    """

    name: str
    op: str
    seconds: float
    inputs: tuple[tuple[str, tuple[int, ...]], ...]


def open_session(model: bytes | str, threads: int, profile: str = "") -> Any:
    """Opens a session with all optimizations.

    Args:
        model: a serialized model, or the path of a file.
        threads: the number of threads of an op.
        profile: the beginning of the path of the profile; "" for none.

    Raises:
        ExportError: when onnxruntime cannot load the model.
    """
    import onnxruntime as ort

    from qtrace.process.onnxruntime import onnxruntime_errors

    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_ALL
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    if profile:
        options.enable_profiling = True
        options.profile_file_prefix = profile
    try:
        return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    except onnxruntime_errors() as error:
        name = model if isinstance(model, str) else "a network for measuring"
        raise ExportError(f"onnxruntime cannot run {name}: {' '.join(str(error).split())[:300]}") from error


class ProfiledSession:
    """A session whose nodes are timed by onnxruntime's own profile."""

    def __init__(self, model: bytes | str, threads: int = 1) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="qtrace-profile-")
        self._session = open_session(model, threads, os.path.join(self._folder.name, "run"))
        self.inputs = self._session.get_inputs()

    def run(self, feeds: Mapping[str, np.ndarray]) -> None:
        """Runs the model once."""
        self._session.run(None, dict(feeds))

    def finish(self) -> list[list[NodeRun]]:
        """Ends the profile and returns the nodes of each run, in the order of execution."""
        path = Path(self._session.end_profiling())
        events = json.loads(path.read_text(encoding="utf-8"))
        self._folder.cleanup()
        return _split_runs(events)


def _split_runs(events: list[dict[str, Any]]) -> list[list[NodeRun]]:
    """Sorts the events of kernels into runs: an event of a whole run follows those of its kernels."""
    runs: list[list[NodeRun]] = []
    nodes: list[NodeRun] = []
    for event in events:
        name = event.get("name", "")
        if event.get("cat") == "Node" and name.endswith(_KERNEL):
            nodes.append(_node(event))
        elif name == "model_run":
            runs.append(nodes)
            nodes = []
    return runs


def _node(event: dict[str, Any]) -> NodeRun:
    arguments = event.get("args", {})
    shapes = [
        (kind, tuple(int(n) for n in sizes))
        for entry in arguments.get("input_type_shape", ())
        for kind, sizes in entry.items()
    ]
    name = event["name"].removesuffix(_KERNEL)
    return NodeRun(name, arguments.get("op_name", ""), event["dur"] * _MICROSECOND, tuple(shapes))
