"""The time of each node of an ONNX model in onnxruntime, by its own profile."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from qtrace.onnxfile.local_session import SessionSettings
from qtrace.onnxfile.sessions import open_session
from qtrace.runtimes.host import RuntimeHost

__all__ = ["NodeRun", "ProfiledSession"]

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


class ProfiledSession:
    """A session whose nodes are timed by onnxruntime's own profile."""

    def __init__(self, model: bytes | str, threads: int = 1, host: RuntimeHost | None = None) -> None:
        self._session = open_session(model, SessionSettings(threads=threads, profile=True, host=host))
        self.inputs = self._session.inputs

    def run(self, feeds: Mapping[str, np.ndarray]) -> None:
        """Runs the model once."""
        self._session.run(None, feeds)

    def finish(self) -> list[list[NodeRun]]:
        """Ends the profile and returns the nodes of each run, in the order of execution."""
        events = json.loads(self._session.end_profile())
        return _split_runs(events)


def _split_runs(events: list[dict[str, Any]]) -> list[list[NodeRun]]:
    """Sorts the events of kernels into runs: an event of a whole run follows the events of its kernels."""
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
