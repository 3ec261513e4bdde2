"""Plans the kernels of a TFLite file: which site's integers an op computes, and what it fuses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from qtrace.errors import ExportError
from qtrace.export.converted.graph import ConvertedGraph
from qtrace.fakequant.base import FakeQuant
from qtrace.graph.dataflow import needed_nodes
from qtrace.graph.types import Apply, Expr, TensorNode
from qtrace.graph.walk import is_float_tensor, owner, users
from qtrace.ops import OpCall
from qtrace.preparation.annotation import ExprNote
from qtrace.preparation.model import QuantizedSite
from qtrace.scheme import QScheme

__all__ = ["FUSED", "FusedOp", "KernelPlan", "bounds", "reads_values"]

CLAMPS = ("relu", "relu6", "clip")
# Bounds of the activation functions that an operator fuses -> the schema's number of the function.
FUSED: dict[tuple[Any, Any], int] = {(0.0, None): 1, (-1.0, 1.0): 2, (0.0, 6.0): 3}
_FUSING = frozenset({"conv1d", "conv2d", "conv3d", "linear", "add", "sub", "mul", "div"})
"""The kinds whose operators fuse an activation function in float."""


@dataclass(frozen=True, eq=False)
class FusedOp:
    """One op of the graph with the activation function and the rounding that its operator fuses.

    Attributes:
        call: the op.
        clamp: the fused activation function; None for none.
        out: the node of the result: the clamp's, if there is one.
        site: the site that rounds ``out``, when nothing else reads its value.
        state: the op's state in the annotation; "int" and "fused" are computed on integers.
    """

    call: OpCall
    clamp: OpCall | None
    out: TensorNode
    site: QuantizedSite | None
    state: str

    @property
    def kind(self) -> str:
        """The op's kind."""
        return self.call.kind

    @property
    def on_integers(self) -> bool:
        """Whether the graph was prepared so that the op computes on integers."""
        return self.state in ("int", "fused")


def bounds(clamp: OpCall) -> tuple[float | None, float | None]:
    """Returns the lowest and the highest value of an activation function."""
    if clamp.kind == "relu":
        return 0.0, None
    if clamp.kind == "relu6":
        return 0.0, 6.0
    return clamp.attrs["lower"], clamp.attrs["upper"]


def reads_values(expr: Expr) -> bool:
    """Whether ``expr`` reads the values of its inputs rather than their shapes."""
    return not (isinstance(expr, Apply) and str(expr.opdef) == "GetVarShape")


class KernelPlan:
    """Decides which ops, activation functions and sites one operator of the file computes.

    Attributes:
        graph: the converted graph.
        shapes: node -> its shape.
        members: the exprs that are fused into an op before them.
        needed: the nodes on whose values an output depends.
    """

    def __init__(self, graph: ConvertedGraph) -> None:
        self.graph = graph
        self.outputs = set(self.graph.outputs)
        self.notes: dict[str, ExprNote] = {n.name: n for n in self.graph.annotation.notes}
        self.members: set[Expr] = set()
        self.shapes = self.graph.shapes
        self.needed = needed_nodes(graph.module)

    def check(self) -> None:
        """Refuses sites that TFLite lacks a type for, or rounds in another way.

        Raises:
            ExportError: naming the first one and what to change.
        """
        for site in self.graph.sites:
            if site.sort == "bias":
                continue
            scheme, static = site.qparams.scheme, site.decision.static
            problem = _weight_problem(scheme) if site.sort == "weight" else _problem(scheme, static)
            if problem:
                raise ExportError(f"site {site.name} is {scheme.describe()}: {problem}.")

    def state(self, call: OpCall) -> str:
        """Returns the annotated state of an op; a layer with a folded BatchNorm is found under the norm."""
        note = self.notes.get(call.out.name)
        return "" if note is None else note.state

    def fused_op(self, expr: Expr, call: OpCall) -> FusedOp:
        """Returns ``expr`` with what its operator fuses."""
        clamp = self._clamp(call) if len(expr.outputs) == 1 else None
        out = call.out if clamp is None else clamp.out
        site = self.site_of(out) if len(expr.outputs) == 1 else None
        if clamp is not None:
            self.members.add(clamp.expr)
        return FusedOp(call, clamp, out, site, self.state(call))

    def _clamp(self, call: OpCall) -> OpCall | None:
        if call.kind in CLAMPS or call.out in self.outputs:
            return None
        readers = self._needed_readers(call.out)
        activation = self.graph.call(readers[0]) if len(readers) == 1 else None
        if activation is None or activation.kind not in CLAMPS:
            return None
        if self.state(call) in ("int", "fused"):
            return activation if self.state(activation) == "fused" else None
        # In float, an operator fuses what it has a number for; a rounding follows as an operator of its own.
        in_float = self.state(activation) not in ("int", "fused") and self.site_of(activation.out) is None
        fits = call.kind in _FUSING and is_float_tensor(call.out) and bounds(activation) in FUSED
        return activation if in_float and fits else None

    def site_of(self, node: TensorNode) -> QuantizedSite | None:
        """Returns the site that rounds ``node``, if nothing else reads its value."""
        readers = [e for e in self._needed_readers(node) if reads_values(e)]
        if node in self.outputs or len(readers) != 1:
            return None
        site = self.graph.site_of(readers[0].outputs[0])
        return site if site is not None and site.sort == "activation" else None

    def _needed_readers(self, node: TensorNode) -> list[Expr]:
        """Returns the readers of ``node`` on which an output depends."""
        return [expr for expr in users(node) if any(n in self.needed for n in expr.outputs)]

    def reaches(self, node: TensorNode, kinds: frozenset[str], through: frozenset[str]) -> bool:
        """Whether a value arrives at an op of the kinds ``kinds`` through ops of the kinds ``through``."""
        visited: set[Expr] = set()
        stack = [node]
        while stack:
            for expr in users(stack.pop()):
                if expr in visited:
                    continue
                visited.add(expr)
                kind = self._kind(expr)
                if kind in kinds:
                    return True
                if kind in through:
                    stack.extend(n for n in expr.outputs if isinstance(n, TensorNode))
        return False

    def _kind(self, expr: Expr) -> str:
        """Returns the kind of an op; a fake quant counts as an identity."""
        if isinstance(owner(expr), FakeQuant):
            return "identity"
        call = self.graph.call(expr)
        return "" if call is None else call.kind


def _weight_problem(scheme: QScheme) -> str:
    if scheme.bits > 8 or not scheme.signed or not scheme.symmetric:
        return "TFLite's weights are signed, symmetric and of 8 bits: give this layer that weight scheme"
    return ""


def _problem(scheme: QScheme, static: bool) -> str:
    """Returns why TFLite cannot express the integers of an activation; "" if it can."""
    if scheme.per_channel:
        return "TFLite has one scale for each activation: set axis: null there"
    if not scheme.signed:
        return "TFLite's activations are signed: prepare the module with backend tflite"
    if scheme.bits == 16 and not scheme.symmetric:
        return "TFLite's 16-bit integers have no zero point: set symmetric: true there"
    if scheme.bits not in (8, 16):
        return "TFLite has kernels for 8 and 16 bits: use 8 there, or keep it in float"
    if scheme.narrow and not static:
        return "TFLite's kernels saturate at the lowest integer: set narrow: false there"
    if scheme.rounding != "half_even" and not static:
        return "LiteRT rounds half to even: prepare the module with backend tflite"
    return ""
