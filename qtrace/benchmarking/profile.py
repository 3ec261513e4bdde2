"""Where the time of an ONNX file goes in onnxruntime, by its own profile."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np

from qtrace.onnxfile.local_session import SessionSettings
from qtrace.onnxfile.sessions import open_session
from qtrace.runtimes.host import RuntimeHost

_KERNEL = "_kernel_time"


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
    return NodeRun(
        name,
        arguments.get("op_name", ""),
        timedelta(microseconds=event["dur"]).total_seconds(),
        tuple(shapes),
    )


INTEGER_OPS, FLOAT_OPS, ROUNDINGS, LAYOUT = "integer kernels", "float kernels", "Q/DQ", "layout changes"

_SORTS = {
    "QuantizeLinear": ROUNDINGS,
    "DequantizeLinear": ROUNDINGS,
    "ReorderInput": LAYOUT,
    "ReorderOutput": LAYOUT,
}
_INTEGER_NAMES = ("QLinear", "QGemm", "MatMulInteger", "ConvInteger", "NhwcMaxPool")
_INTEGER_TYPES = ("uint8", "int8", "uint16", "int16")

# What onnxruntime adds to the names of nodes that it copies, fuses or moves to another layout.
_ADDED = re.compile(r"(_token_\d+|_nchwc|_nhwc|/duplicated|/?\w*Fusion/?|_kernel_time)+$")


@dataclass(frozen=True)
class NodeTime:
    """A node of the optimized graph.

    Attributes:
        name: the name of the graph's node that it computes.
        op: its ONNX op.
        sort: integer kernels, float kernels, Q/DQ or layout changes.
        seconds: the median of its times.
    """

    name: str
    op: str
    sort: str
    seconds: float


@dataclass(frozen=True)
class Profile:
    """The times of all nodes of a file."""

    nodes: tuple[NodeTime, ...]

    @property
    def seconds(self) -> float:
        """The time of all nodes."""
        return sum(node.seconds for node in self.nodes)

    def by_sort(self) -> dict[str, float]:
        """Returns the seconds of each sort of node."""
        return _add_up((node.sort, node.seconds) for node in self.nodes)

    def by_op(self) -> dict[str, float]:
        """Returns the seconds of each ONNX op."""
        return _add_up((node.op, node.seconds) for node in self.nodes)

    def share(self, sort: str) -> float:
        """Returns the share of a sort in the time of all nodes."""
        return self.by_sort().get(sort, 0.0) / self.seconds if self.seconds else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Returns all nodes, for JSON."""
        nodes = [dict(vars(node)) for node in self.nodes]
        return {"seconds": self.seconds, "by_sort": self.by_sort(), "by_op": self.by_op(), "nodes": nodes}

    def table(self, count: int = 15) -> str:
        """Returns the sorts, the ops and the nodes that take most time."""
        lines = [_line("", name, seconds, self.seconds) for name, seconds in self.by_sort().items()]
        ops = list(self.by_op().items())[:count]
        lines += ["  by op:", *(_line("", name, seconds, self.seconds) for name, seconds in ops)]
        slowest = sorted(self.nodes, key=lambda node: -node.seconds)
        roundings = [node for node in slowest if node.sort == ROUNDINGS]
        for title, nodes in (("slowest nodes", slowest), ("slowest Q/DQ nodes", roundings)):
            if nodes:
                lines += [
                    f"  {title}:",
                    *(_line(n.op, n.name, n.seconds, self.seconds) for n in nodes[:count]),
                ]
        return "\n".join(lines)


def read_profile(runs: Sequence[Sequence[NodeRun]]) -> Profile:
    """Returns the median time of each node over some runs."""
    first = runs[0]
    same = [run for run in runs if len(run) == len(first)]
    nodes = []
    for index, node in enumerate(first):
        seconds = statistics.median(run[index].seconds for run in same)
        name = _ADDED.sub("", node.name) or node.op
        nodes.append(NodeTime(name, node.op, _sort(node), seconds))
    return Profile(tuple(nodes))


def _sort(node: NodeRun) -> str:
    if node.op in _SORTS:
        return _SORTS[node.op]
    integers = bool(node.inputs) and node.inputs[0][0] in _INTEGER_TYPES
    if node.op == "Transpose" and node.name.startswith("Transpose"):
        return LAYOUT
    return INTEGER_OPS if integers or node.op.startswith(_INTEGER_NAMES) else FLOAT_OPS


def _add_up(pairs: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Adds up seconds by name, the largest sum first."""
    sums: dict[str, float] = {}
    for name, seconds in pairs:
        sums[name] = sums.get(name, 0.0) + seconds
    return dict(sorted(sums.items(), key=lambda item: -item[1]))


def _line(op: str, name: str, seconds: float, whole: float) -> str:
    label = f"{op} {name}" if op else name
    return f"  {seconds * 1e3:9.3f} ms {seconds / whole:6.1%}  {label}"
