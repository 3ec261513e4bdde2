"""Cost tables: the seconds that an op takes in a runtime, by its shapes and its form, from measured points.

A table holds what ``python -m benchmarks.kernels`` measured on one processor. Its times compare forms of one
op, and predict the time of a whole network before it is exported.
"""

from __future__ import annotations

from qtrace.costs.table import (
    FLOAT,
    FORMS,
    INTEGER,
    LOOKUP,
    PLAIN_MAX_POOL,
    CostTable,
    Machine,
    Measurement,
    OpShape,
)

__all__ = [
    "FLOAT",
    "FORMS",
    "INTEGER",
    "LOOKUP",
    "PLAIN_MAX_POOL",
    "CostTable",
    "Machine",
    "Measurement",
    "OpShape",
]
