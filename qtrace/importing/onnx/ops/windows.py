"""Windows of convolutions and poolings: kernel, strides, dilations and padding, as ONNX writes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import megengine.functional as F

from qtrace.importing.onnx.call import Call

__all__ = ["Window", "pad", "read_window"]


@dataclass(frozen=True)
class Window:
    """A window that moves along the last axes.

    Attributes:
        kernel: the size of the window along each axis.
        stride: the step of the window along each axis.
        dilation: the distance between the places of the window.
        before: zeros before the first place of each axis.
        after: zeros after the last place of each axis.
    """

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    before: tuple[int, ...]
    after: tuple[int, ...]

    @property
    def symmetric(self) -> bool:
        """Whether both ends are padded alike."""
        return self.before == self.after


def read_window(call: Call, kernel: Sequence[int]) -> Window:
    """Reads the attributes of a window.

    Args:
        call: the node; its input 0 is the image.
        kernel: the size of the window; its length is the number of axes.
    """
    count = len(kernel)
    stride = call.ints("strides", [1] * count)
    dilation = call.ints("dilations", [1] * count)
    pads = call.ints("pads", [0] * 2 * count)
    automatic = call.attribute("auto_pad", "NOTSET")
    if not len(stride) == len(dilation) == len(pads) // 2 == count:
        call.refuse("has strides, dilations or pads of another number of axes than its kernel")
    if any(n < 1 for n in (*stride, *dilation, *kernel)):
        call.refuse("has a kernel, stride or dilation below 1")
    if automatic in ("SAME_UPPER", "SAME_LOWER"):
        if any(s != 1 for s in stride):
            call.refuse_open(0, range(2, call.rank(0)), f"has auto_pad {automatic} and strides for an input")
        pads = _same(call.shape(0)[2:], kernel, stride, dilation, automatic == "SAME_UPPER")
        if any(n < 0 for n in pads[:count]):
            call.refuse(f"has auto_pad {automatic} with strides by which its first window begins inside")
        pads = [max(n, 0) for n in pads]
    elif automatic == "VALID":
        pads = [0] * 2 * count
    elif automatic != "NOTSET":
        call.refuse(f"has auto_pad {automatic!r}")
    if any(n < 0 for n in pads):
        call.refuse("has negative pads")
    return Window(tuple(kernel), tuple(stride), tuple(dilation), tuple(pads[:count]), tuple(pads[count:]))


def _same(
    sizes: Sequence[int], kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int], upper: bool
) -> list[int]:
    """Returns the pads with which the result has the size of the image divided by the stride, rounded up.

    Where the stride exceeds the kernel, they are negative: onnxruntime skips places at both ends.
    """
    before, after = [], []
    for size, k, s, d in zip(sizes, kernel, stride, dilation, strict=True):
        total = (-(-size // s) - 1) * s + (k - 1) * d + 1 - size
        before.append(int((total if upper else total + 1) / 2))  # towards 0, as in C
        after.append(total - before[-1])
    return [*before, *after]


def pad(call: Call, node: Any, before: Sequence[int], after: Sequence[int], value: float = 0.0) -> Any:
    """Pads the last axes of an image with a number."""
    if not any((*before, *after)):
        return node
    widths = ((0, 0), (0, 0), *zip(before, after, strict=True))
    return call.function(F.nn.pad, node, widths, "constant", value, name=f"{call.name}_padded")
