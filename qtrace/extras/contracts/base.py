"""What a contract is made of: rules, each with its source, and what they find in a file."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from onnx import NodeProto

from qtrace.errors import ExportError
from qtrace.extras.contracts.qdq_graph import QdqGraph, label
from qtrace.plugins import ObjectPlugins

CPU = "the CPU"
"""Where an op runs that its device does not take."""


@dataclass(frozen=True, eq=False)
class Violation:
    """A place of a file that breaks a rule.

    Attributes:
        node: the node; None for the file as a whole.
        what: what is wrong there, as a clause.
        cure: what to do, as an imperative.
        repair: changes the graph so that the rule is kept; None where that is not mechanical.
    """

    node: NodeProto | None
    what: str
    cure: str
    repair: Callable[[], None] | None = None

    def describe(self) -> str:
        """Returns the violation as a sentence."""
        place = "the file" if self.node is None else label(self.node)
        return f"{place}: {self.what}: {self.cure}."


Violations = Iterator[Violation]


@dataclass(frozen=True)
class ContractRule:
    """One rule of a target.

    Attributes:
        name: its name, such as ``int8-activations``.
        source: the document that states it.
        find: finds the places of a graph that break it.
    """

    name: str
    source: str
    find: Callable[[QdqGraph], Violations]


@dataclass(frozen=True)
class FloatOp:
    """An op that the target will compute in float.

    Attributes:
        node: the name of the node.
        op: its type.
        reason: why, as a clause.
        runs_on: where it runs then; "" if the target computes floats as fast as anything else that it has.
    """

    node: str
    op: str
    reason: str
    runs_on: str = ""

    @property
    def falls_back(self) -> bool:
        """Whether the op leaves the device for the CPU."""
        return self.runs_on == CPU

    def to_dict(self) -> dict[str, Any]:
        """Returns the op as plain data."""
        return dict(vars(self))


@dataclass(frozen=True)
class Contract:
    """What a target expects of a quantized ONNX file.

    Attributes:
        name: the name of the target.
        title: the target in words.
        rules: the rules, in the order in which files are repaired.
        ops: the types of ops that the target computes on integers.
        fused: the types of ops that it computes in float inside of the kernel before them.
        rounds_results: the types of ops whose result has to be rounded for an integer kernel.
        measured: whether the target is onnxruntime, which says here which ops it computes in float.
        device_ops: the types of ops that the device takes in some type. None if all others than `ops` run
            elsewhere, or if the target is no device besides a CPU.
        floats_run_on: where the ops run that the target computes in float: `CPU` if they leave the device.
    """

    name: str
    title: str
    rules: tuple[ContractRule, ...]
    ops: frozenset[str]
    fused: frozenset[str]
    rounds_results: frozenset[str]
    measured: bool = False
    device_ops: frozenset[str] | None = None
    floats_run_on: str = ""

    def place_of_floats(self, kind: str) -> str:
        """Returns where an op of a type runs in float; "" where that does not matter."""
        if self.device_ops is not None and kind not in self.device_ops:
            return CPU
        return self.floats_run_on


CONTRACTS = ObjectPlugins("qtrace.contracts", Contract, ExportError)
"""The contracts by target: entry points in the group ``qtrace.contracts``."""
