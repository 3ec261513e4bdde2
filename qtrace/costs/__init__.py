"""Cost tables: the seconds that an op takes in a runtime, by its shapes and its form, from measured points.

A table holds what ``python -m benchmarks.kernels`` measured on one processor. Its times compare forms of one
op, and predict the time of a whole network before it is exported.
"""

from __future__ import annotations

from qtrace.costs.shape import FLOAT, FORMS, INTEGER, INTEGER_7, LOOKUP, PLAIN_MAX_POOL, OpShape
from qtrace.costs.table import FITTED, CostTable, Machine, Measurement

__all__ = [
    "FITTED",
    "FLOAT",
    "FORMS",
    "INTEGER",
    "INTEGER_7",
    "LOOKUP",
    "PLAIN_MAX_POOL",
    "CostTable",
    "Machine",
    "Measurement",
    "OpShape",
]
