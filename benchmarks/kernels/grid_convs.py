"""The grid of convolutions in a cost table: one list for each sort of kernel."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations_with_replacement

from benchmarks.kernels.cases import Case, conv, conv_branches
from qtrace.costs import FLOAT, INTEGER

__all__ = ["conv_cases"]

_MOST_MACS = 1_200_000_000  # of one layer: about 25 ms in float
_FULL, _ODD, _DEEP = (16, 64, 192, 512, 1024), (12, 40, 120, 360), (16, 64, 256, 1024)
_SIDES, _ODD_SIDES = (3, 10, 40, 160), (3, 20, 80)


def conv_cases() -> Iterator[Case]:
    """Returns convolutions of every sort, in float and in integers."""
    for form in (FLOAT, INTEGER):
        yield from _dense(form)
        yield from _grouped(form)
        yield from _stems(form)


def _dense(form: str) -> Iterator[Case]:
    for kernel in (1, 3):
        for channels, sides in ((_FULL, _SIDES), (_ODD, _ODD_SIDES)):
            for inputs, outputs in combinations_with_replacement(channels, 2):
                for side in sides:
                    if inputs * outputs * kernel**2 * side**2 <= _MOST_MACS:
                        yield conv(form, inputs, outputs, kernel, side)
    for inputs, outputs in combinations_with_replacement((16, 96, 512), 2):
        yield conv(form, inputs, outputs, 1, 1)
    for kernel in (5, 7):
        for inputs, outputs in combinations_with_replacement((16, 96), 2):
            for side in (5, 20, 80):
                yield conv(form, inputs, outputs, kernel, side)


def _grouped(form: str) -> Iterator[Case]:
    for kernel in (3, 5):
        for channels, sides in ((_DEEP, _SIDES), (_ODD, _ODD_SIDES)):
            for count in channels:
                for side in sides:
                    if count * side**2 > 2**22:
                        continue
                    yield conv(form, count, count, kernel, side, groups=count)
                    yield conv_branches(form, count, count, kernel, max(side // 2, 1), groups=count)
    for count in (32, 128):
        for side in (5, 20, 80):
            yield conv(form, count, count, 3, side, groups=4)


def _stems(form: str) -> Iterator[Case]:
    for kernel in (3, 7):
        for outputs in (16, 64):
            for side in (12, 48, 160):
                yield conv_branches(form, 3, outputs, kernel, side)
