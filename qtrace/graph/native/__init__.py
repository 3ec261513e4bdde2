"""MegEngine's own quantized modules: float layers in their place, and the scales that they were trained with.

`reading` takes scale and zero point from observers, fake quants and integer types. `lowering` puts float
layers in the place of `megengine.module.qat` and `megengine.module.quantized`, and `ranges` is the record of
the scales that a traced module carries.
"""

from qtrace.graph.native.lowering import lower
from qtrace.graph.native.ranges import LayerRanges, NativeRanges, drop_ranges, read_ranges, write_ranges

__all__ = [
    "LayerRanges",
    "NativeRanges",
    "drop_ranges",
    "lower",
    "read_ranges",
    "write_ranges",
]
