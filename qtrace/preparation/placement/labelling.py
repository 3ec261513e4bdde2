"""Labels each op of a graph "integer" or "float" so that time plus weighted noise is smallest: a minimum cut.

An op costs its time in the form that its label says. A tensor that an integer op writes and float ops read
is dequantized for each of these. One that a float op writes and integer ops read is quantized once. Changes
of layout cost time where kernels order a tensor differently, and each rounded tensor and weight adds noise at
the outputs. All these costs are unary or of the form "this is integer and that is float". So the energy is
submodular and a minimum cut of a graph finds its exact minimum, whatever the network looks like (Kolmogorov
and Zabih, What Energy Functions Can Be Minimized via Graph Cuts?, TPAMI 2004).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

from qtrace.preparation.placement.problem import Problem, Tensor, Unit

__all__ = ["Cuts", "minimize"]

_UNBOUNDED = 2**30  # capacity of an arc that no minimum cut takes; finite costs add up to less
_RESOLUTION = 2**28  # the sum of all finite costs in the integers of scipy's maximum flow


def minimize(problem: Problem, weight: float) -> dict[str, bool]:
    """Returns the labels with the least time plus ``weight`` times noise: unit -> whether it is integer.

    Exact up to a part in 10^8 of the sum of all costs. Of labellings that cost the same, one with the fewest
    integer ops is chosen.
    """
    return Cuts(problem).minimize(weight)


class Cuts:
    """The network whose minimum cut is the labelling of a problem: nodes on the source's side are integer.

    An arc from p to q with capacity c adds c to a labelling in which p is integer and q is not. The network
    is built once for all weights of the noise.
    """

    def __init__(self, problem: Problem) -> None:
        self._indices: dict[str, int] = {}
        self._arcs: dict[tuple[int, int], float] = {}
        self._noises: dict[tuple[int, int], tuple[float, float]] = {}  # arc -> factor and noise
        self._source, self._sink = self._index("\0source"), self._index("\0sink")
        self._names = [unit.name for unit in problem.units]
        units = {unit.name: unit for unit in problem.units}
        for unit in problem.units:
            self._add_unit(unit)
        for tensor in problem.tensors:
            self._add_tensor(tensor, units.get(tensor.producer))

    def minimize(self, weight: float) -> dict[str, bool]:
        """Returns the labels with the least time plus ``weight`` times noise; see `minimize`."""
        source_side = self._solve(weight)
        return {name: source_side[self._index(name)] for name in self._names}

    def _index(self, name: str) -> int:
        """Returns the number of the node ``name``, which is added if it is new."""
        return self._indices.setdefault(name, len(self._indices))

    def _add_unit(self, unit: Unit) -> None:
        """Adds the label of ``unit`` and its costs."""
        node = self._index(unit.name)
        if unit.fixed is not None:
            self._force(node, unit.fixed)
            return
        self._add(self._source, node, unit.float_seconds)
        self._add(node, self._sink, unit.integer_seconds or 0.0)
        self._noises[node, self._sink] = unit.noise_weight, unit.noise

    def _add_tensor(self, tensor: Tensor, producer: Unit | None) -> None:
        """Adds the costs of quantizing, dequantizing, moving and rounding ``tensor``."""
        written, read, rounded = (self._index(f"{tensor.name}\0{role}") for role in range(3))
        if producer is None:
            self._force(written, False)
        else:
            unit = self._index(producer.name)
            self._add(written, unit, math.inf)
            if not producer.float_result:
                self._add(unit, written, math.inf)
        for name in tensor.readers:
            reader = self._index(name)
            self._add(reader, read, math.inf)  # read: some reader is integer
            self._add(written, reader, tensor.dequantize_seconds * (1 + (name in tensor.double_readers)))
        if tensor.leaves:
            self._add(written, self._sink, tensor.dequantize_seconds)
        self._add(read, written, tensor.quantize_seconds)
        self._add_layouts(tensor, written, read)
        self._add(written, rounded, math.inf)
        self._add(read, rounded, math.inf)
        factor = 1.0 if producer is None else producer.noise_weight
        self._noises[rounded, self._sink] = factor, tensor.noise

    def _add_layouts(self, tensor: Tensor, written: int, read: int) -> None:
        """Adds the costs of changes of layout."""
        layouts = tensor.layouts
        reorder, transpose = layouts.reorder_seconds, layouts.transpose_seconds
        self._add(read, written, transpose)
        if tensor.leaves:
            self._add(written, self._sink, transpose)
        elif transpose:
            self._add(written, self._all_integer(tensor, "read on integers", tensor.readers), transpose)
        if not reorder:
            return
        in_blocks = self._all_integer(tensor, "blocks", layouts.block_readers)
        if not layouts.blocked:
            self._add(self._source, in_blocks, reorder)
            return
        self._add(written, in_blocks, reorder)
        if tensor.leaves or not layouts.block_readers.issuperset(tensor.readers):
            self._add(self._source, written, reorder)
        else:
            self._add(read, written, reorder)

    def _all_integer(self, tensor: Tensor, role: str, readers: Iterable[str]) -> int:
        """Returns a node that is integer only if all of ``readers`` are."""
        node = self._index(f"{tensor.name}\0{role}")
        for name in readers:
            self._add(node, self._index(name), math.inf)
        return node

    def _force(self, node: int, integer: bool) -> None:
        self._add(*((self._source, node) if integer else (node, self._sink)), math.inf)

    def _add(self, start: int, end: int, cost: float) -> None:
        if cost > 0:
            self._arcs[start, end] = self._arcs.get((start, end), 0.0) + cost

    def _solve(self, weight: float) -> Sequence[bool]:
        """Returns for each node whether it is on the source's side of a minimum cut."""
        from scipy.sparse import csr_matrix  # here: scipy loads slowly
        from scipy.sparse.csgraph import breadth_first_order, maximum_flow

        arcs = dict(self._arcs)
        for arc, (factor, noise) in self._noises.items():
            if (cost := weight * factor * noise) > 0:
                arcs[arc] = arcs.get(arc, 0.0) + cost
        total = math.fsum(cost for cost in arcs.values() if cost < math.inf)
        scale = _RESOLUTION / total if total > 0 else 0.0
        capacities = [
            min(_UNBOUNDED, math.ceil(cost * scale)) if cost < math.inf else _UNBOUNDED
            for cost in arcs.values()
        ]
        starts, ends = np.array(list(arcs), np.int32).reshape(-1, 2).T
        shape = (len(self._indices),) * 2
        network = csr_matrix((np.array(capacities, np.int32), (starts, ends)), shape)
        flow = maximum_flow(network, self._source, self._sink).flow
        residual = network - flow
        residual.data = (residual.data > 0).astype(np.int32)
        residual.eliminate_zeros()
        reached = breadth_first_order(residual, self._source, return_predecessors=False)
        return np.isin(np.arange(len(self._indices)), reached).tolist()
