"""The schemes of given grids: integer types and zero points as a `QScheme` says them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from qtrace.preparation.passes.quantized_file.tensors import StoredGrid
from qtrace.scheme import QScheme

__all__ = ["Schemes"]

_BITS = {f"{sign}int{bits}": (bits, not sign) for bits in (2, 4, 8, 16) for sign in ("", "u")}


class Schemes:
    """Chooses the scheme of each grid.

    A scheme is symmetric if all grids of its kind in the file are: one zero point of 0 may be chance.

    Args:
        activations: all grids of activations.
        parameters: path -> grid of the parameters.
    """

    def __init__(self, activations: Sequence[StoredGrid], parameters: Mapping[str, StoredGrid]) -> None:
        signed = [grid for grid in activations if grid.kind in ("int8", "int16")]
        self._symmetric = bool(signed) and all(not grid.zero_point.any() for grid in signed)
        integers = [g for g in parameters.values() if g.kind == "int8" and g.integers is not None]
        lowest = [int(g.integers.min()) for g in integers if g.integers is not None and g.integers.size]
        self._narrow = bool(lowest) and min(lowest) > -128

    def activation(self, grid: StoredGrid) -> QScheme | None:
        """Returns the scheme of an activation; None if there is none."""
        if grid.kind not in _BITS or grid.scale.size != 1 or grid.scale.ndim:
            return None
        bits, signed = _BITS[grid.kind]
        return QScheme(bits=bits, signed=signed, symmetric=signed and self._symmetric)

    def weight(self, grid: StoredGrid) -> QScheme | None:
        """Returns the scheme of a stored tensor, without its axis; None if there is none."""
        if grid.kind not in _BITS:
            return None
        bits, signed = _BITS[grid.kind]
        middle = 0 if signed else 1 << (bits - 1)
        symmetric = bool(np.all(grid.zero_point == middle))
        narrow = signed and symmetric and bits == 8 and self._narrow
        return QScheme(bits=bits, signed=signed, symmetric=symmetric, narrow=narrow)
