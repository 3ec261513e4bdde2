"""Layouts: the order in which a tensor of the file holds the axes of the graph's tensor. Pure functions.

An *order* is a permutation: axis ``i`` of the file's tensor is axis ``order[i]`` of the graph's. A transpose
of the graph therefore changes only the order, and values move only where an op needs its axes in a certain
order. Convolutions and poolings want the channels last, a reshape wants the axes that it joins side by side.

Axes of size 1 may stand anywhere: to move them is a reshape. The first axis of the graph counts samples, and
is not taken for one of size 1.

Chains of reshapes and transposes that are not written yet, as one permutation.

The axes of a tensor are cut into *atoms*, the largest parts that every reshape of the chain keeps whole. A
reshape or transpose then says which atoms make up each axis, and nothing moves until an op reads the values.
A channel shuffle, three ops in the graph, is one transpose in the file, or none where only a slice is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

__all__ = ["CHANNELS_LAST", "Moved", "Order", "file_shape", "moves_values", "natural", "window_pads"]

Order = tuple[int, ...]

# Of an image tensor (N, C, H, W): the order that TFLite's kernels work in.
CHANNELS_LAST: Order = (0, 2, 3, 1)


def natural(rank: int) -> Order:
    """Returns the graph's order of ``rank`` axes."""
    return tuple(range(rank))


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
