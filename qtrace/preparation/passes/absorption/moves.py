"""The places to which a move takes elements: a reshape, a transpose, a split, a slice, a shuffle."""

from __future__ import annotations

import numpy as np
from megengine import Tensor

from qtrace.graph.interpreter import interpret
from qtrace.graph.types import ModuleNode, TensorNode
from qtrace.graph.walk import output_index, owner
from qtrace.ops import OpCall
from qtrace.preparation.passes.absorption.maps import LinearMap

__all__ = ["MOVES", "element_places", "pull_back", "push_forward"]

_SAME_ORDER = ("reshape", "flatten", "expand_dims", "squeeze", "identity", "dropout")
MOVES = (
    *_SAME_ORDER,
    *("transpose", "swapaxes", "split", "getitem", "repeat", "tile", "roll", "pixel_shuffle", "broadcast_to"),
)
_LARGEST_INDEX = 1 << 24  # float32 counts exactly up to here


def element_places(call: OpCall, out: TensorNode) -> np.ndarray | None:
    """Returns the flat index in the input of each element of ``out``; None if it is not known from shapes.

    Args:
        call: a move of the kinds `MOVES`.
        out: one of its outputs.
    """
    (x,) = call.inputs
    shape = tuple(int(n) for n in x.shape)
    count = int(np.prod(shape))
    places = np.arange(count).reshape(shape)
    if call.kind in _SAME_ORDER:
        return places.reshape(tuple(int(n) for n in out.shape))
    others = [n for n in call.expr.inputs if n is not x and not isinstance(n, ModuleNode)]
    if others or count > _LARGEST_INDEX:
        return None
    module, values = owner(call.expr), Tensor(places.astype(np.float32))
    inputs = [module if isinstance(n, ModuleNode) else values for n in call.expr.inputs]
    results = interpret(call.expr, inputs)
    assert results is not None
    return results[output_index(out)].numpy().astype(np.int64)


def pull_back(map: LinearMap, places: np.ndarray, shape: tuple[int, ...]) -> LinearMap | None:
    """Returns the map of the input for which the move gives ``map``; None if there is no such map.

    Args:
        map: the map of the move's output.
        places: the places that `element_places` gives.
        shape: the shape of the move's input.
    """
    whole = map.full(places.shape)
    arrays = []
    for values in (whole.gain, whole.shift):
        array = np.full(int(np.prod(shape)), np.nan)
        array[places.reshape(-1)] = values.reshape(-1)
        if not np.array_equal(array[places], values, equal_nan=True):
            return None  # one element is read several times, with different gains
        arrays.append(array.reshape(shape))
    return LinearMap(*arrays).compressed()


def push_forward(map: LinearMap, places: np.ndarray, shape: tuple[int, ...]) -> LinearMap:
    """Returns the map of the move's output if its input has ``map``."""
    whole = map.full(shape)
    return LinearMap(*(a.reshape(-1)[places] for a in (whole.gain, whole.shift))).compressed()
