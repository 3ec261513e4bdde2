"""Layouts: the order in which a tensor of the file holds the axes of the graph's tensor. Pure functions.

An *order* is a permutation: axis ``i`` of the file's tensor is axis ``order[i]`` of the graph's. A transpose
of the graph therefore changes only the order, and values move only where an op needs its axes in a certain
order. Convolutions and poolings want the channels last, a reshape wants the axes that it joins side by side.

Axes of size 1 may stand anywhere: to move them is a reshape. The first axis of the graph counts samples, and
is not taken for one of size 1.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = [
    "CHANNELS_LAST",
    "Order",
    "file_shape",
    "moves_values",
    "natural",
    "window_pads",
]

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
