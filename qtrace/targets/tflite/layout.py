"""Where tensors of images have their channels, and the plan of a file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from qtrace.errors import ExportError
from qtrace.export.converted import ConvertedGraph
from qtrace.fakequant.base import FakeQuant
from qtrace.graph.interpreter import needed_nodes
from qtrace.graph.types import Apply, Expr, TensorNode
from qtrace.graph.walk import is_float_tensor, owner, users
from qtrace.ops import OpCall
from qtrace.preparation.annotation import ExprNote
from qtrace.preparation.model import QuantizedSite
from qtrace.scheme import QScheme

Order = tuple[int, ...]


def natural(rank: int) -> Order:
    """Returns the graph's order of ``rank`` axes."""
    return tuple(range(rank))


def channels_last(rank: int) -> Order:
    """Returns the order of sequences, images or volumes that TFLite's kernels work in."""
    return (0, *range(2, rank), 1)


CHANNELS_LAST = channels_last(len("NCHW"))


def file_shape(shape: Sequence[int], order: Order) -> tuple[int, ...]:
    """Returns the shape in the file of a tensor that has ``shape`` in the graph."""
    return tuple(int(shape[axis]) for axis in order)


def moves_values(shape: Sequence[int], old: Order, new: Order) -> bool:
    """Whether going from one order to the other moves values, rather than only axes of size 1.

    Args:
        shape: the shape in the graph.
        old: the present order.
        new: the other order.
    """
    wide = [axis for axis in range(len(shape)) if axis == 0 or int(shape[axis]) != 1]
    return [a for a in old if a in wide] != [a for a in new if a in wide]


def window_pads(
    size: int, out: int, kernel: int, stride: int, padding: int, dilation: int = 1
) -> tuple[str, tuple[int, int]]:
    """Returns the padding of a window that moves along one axis.

    Args:
        size: the size of the input.
        out: the size of the output.
        kernel: the size of the window.
        stride: the step of the window.
        padding: the number of places that the graph adds at each end.
        dilation: the distance of the window's values.

    Returns:
        "VALID" or "SAME" where TFLite's rule adds exactly that, else ""; and the number of places that are
        needed before and after. Padding that no window reaches is left out.
    """
    reach = (out - 1) * stride + dilation * (kernel - 1) + 1
    need = (padding, max(reach - size - padding, 0))
    if need == (0, 0):
        return "VALID", need
    total = max(reach - size, 0)
    same = (total // 2, total - total // 2)
    return ("SAME" if same == need and out == -(-size // stride) else ""), need


@dataclass(frozen=True, eq=False)
class Moved:
    """The axes of a tensor in terms of the axes of a source tensor.

    Attributes:
        order: the order of the source's axes in the file.
        cuts: for each axis of the source, the sizes of its atoms, from the outermost on.
        axes: for each axis of this tensor, its atoms as (axis of the source, number).
        batch: the atom that grows with the batch.
    """

    order: Order
    cuts: tuple[tuple[int, ...], ...]
    axes: tuple[tuple[tuple[int, int], ...], ...]
    batch: tuple[int, int] = (0, 0)

    @classmethod
    def of(cls, shape: Sequence[int], order: Order, batch: int = 0) -> Moved:
        """Returns the axes of the source itself, of which ``batch`` grows with the batch."""
        rank = range(len(shape))
        return cls(order, tuple((int(n),) for n in shape), tuple(((axis, 0),) for axis in rank), (batch, 0))

    def size(self, atom: tuple[int, int]) -> int:
        """Returns the number of places of an atom."""
        return self.cuts[atom[0]][atom[1]]

    def transposed(self, pattern: Sequence[int]) -> Moved:
        """Transposes the axes."""
        return Moved(self.order, self.cuts, tuple(self.axes[i] for i in pattern), self.batch)

    def reshaped(self, shape: Sequence[int]) -> Moved | None:
        """Reshapes; None when no cut of the source's axes gives ``shape``."""
        atoms = [(atom, (self.size(atom),)) for axis in self.axes for atom in axis]
        parts: dict[tuple[int, int], tuple[int, ...]] = {}
        new_axes: list[list[tuple[tuple[int, int], int]]] = []
        queue = [(atom, 0, size[0]) for atom, size in atoms]  # atom, number of the part, size that is left
        for length in shape:
            left = int(length)
            atoms_taken: list[tuple[tuple[int, int], int]] = []
            while queue and (left > 1 or (queue[0][2] == 1 and not atoms_taken and left == 1)):
                atom, number, size = queue[0]
                if left % size == 0:
                    queue.pop(0)
                    part, left = size, left // size
                elif size % left == 0 and atom != self.batch:  # the batch is never cut
                    queue[0] = (atom, number + 1, size // left)
                    part, left = left, 1
                else:
                    return None
                parts[atom] = (*parts.get(atom, ()), part)
                atoms_taken.append((atom, number))
            if left != 1:
                return None
            new_axes.append(atoms_taken)
        for atom, number, size in queue:  # of size 1: after the last axis
            if size != 1 or not new_axes:
                return None
            parts[atom] = (*parts.get(atom, ()), 1)
            new_axes[-1].append((atom, number))
        return self._renumbered(parts, new_axes)

    def _renumbered(
        self, parts: dict[tuple[int, int], tuple[int, ...]], new_axes: list[list[tuple[tuple[int, int], int]]]
    ) -> Moved:
        """Makes the parts of the old atoms the new atoms."""
        cuts, first = [], {}
        for axis, sizes in enumerate(self.cuts):
            new: list[int] = []
            for number in range(len(sizes)):
                first[axis, number] = len(new)
                new.extend(parts[axis, number])
            cuts.append(tuple(new))
        axes = tuple(tuple((atom[0], first[atom] + number) for atom, number in axis) for axis in new_axes)
        return Moved(self.order, tuple(cuts), axes, self.batch)

    @property
    def shape(self) -> tuple[int, ...]:
        """Returns the shape in the graph."""
        return tuple(int(np.prod([self.size(a) for a in axis], dtype=np.int64)) for axis in self.axes)

    @property
    def file_atoms(self) -> list[tuple[int, int]]:
        """Returns the atoms in the order of the file."""
        return [(axis, number) for axis in self.order for number in range(len(self.cuts[axis]))]

    def wide(self, atom: tuple[int, int]) -> bool:
        """Whether an atom has more than one place, or is the batch, whose size may change."""
        return atom == self.batch or self.size(atom) != 1

    def nearest(self) -> Order:
        """Returns the order of this tensor's axes that moves least: by their first atoms in the file."""
        place = {atom: i for i, atom in enumerate(self.file_atoms)}

        def first(axis: int) -> tuple[int, int]:
            atoms = self.axes[axis]
            wide = [place[a] for a in atoms if self.wide(a)] or [place[a] for a in atoms]
            # A new axis stands after the axis that is before it in the graph.
            return (min(wide), axis) if wide else (first(axis - 1)[0] if axis else -1, axis)

        return tuple(sorted(range(len(self.axes)), key=first))

    def shuffle(self) -> tuple[Order, np.ndarray] | None:
        """Returns an order that needs no transpose, if only places within the last axis differ.

        Returns:
            The order, whose last axis is the graph's last, and for each place of that axis in the file, the
            place in the graph; None when other axes would have to move.
        """
        *front, last = self.axes
        order = (*(a for a in self.nearest() if a != len(front)), len(front))
        in_front = [a for axis in order[:-1] for a in self.axes[axis] if self.wide(a)]
        stored = [a for a in self.file_atoms if self.wide(a)]
        inside = [a for a in self.file_atoms if a in last and self.wide(a)]
        if stored != in_front + inside:
            return None
        atoms = [a for a in last if self.wide(a)]
        places = np.arange(int(np.prod([self.size(a) for a in atoms], dtype=np.int64)))
        cube = places.reshape([self.size(a) for a in atoms])
        return order, cube.transpose([atoms.index(a) for a in inside]).reshape(-1)


CLAMPS = ("relu", "relu6", "clip")
# Bounds of the activation functions that an operator fuses -> the schema's name of the function.
FUSED: dict[Any, str] = {(0.0, None): "RELU", (-1.0, 1.0): "RELU_N1_TO_1", (0.0, 6.0): "RELU6"}
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
        members: the exprs that are fused into an op before them.
        needed: the nodes on whose values an output depends.
    """

    def __init__(self, graph: ConvertedGraph) -> None:
        self.graph = graph
        self.outputs = set(self.graph.outputs)
        self.notes: dict[str, ExprNote] = {n.name: n for n in self.graph.annotation.notes}
        self.members: set[Expr] = set()
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
