"""Gives the sites of a graph the scales that its model brings from MegEngine's own quantization.

`locating` finds the nodes and parameters that these scales belong to, `fitting` writes a scale on the
integers of the target, and `giving` chooses the scale of each group of sites.
"""

from qtrace.preparation.passes.native.giving import NativeParameters, bring_scales, set_ranges
from qtrace.preparation.passes.native.locating import (
    Located,
    locate,
    without_refitting,
)

__all__ = [
    "Located",
    "NativeParameters",
    "bring_scales",
    "locate",
    "set_ranges",
    "without_refitting",
]
