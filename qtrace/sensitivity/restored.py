"""Gives layers that are raised to float the weights that they had before the algorithms of `ptq`."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager

import numpy as np

from qtrace.graph.types import GetAttr, TracedModule
from qtrace.graph.walk import exprs, get_module
from qtrace.preparation.annotation import Annotation
from qtrace.ptq.layers.quantized import write
from qtrace.sensitivity.layers import RaisableLayer

__all__ = ["FloatValues"]


class FloatValues:
    """The weights and biases of the float network and of the graph that was prepared from it.

    A layer in float must have the network's weight. With the weight that, say, ``gptq`` has rounded, raising
    the layer would seem to gain nothing.

    Args:
        prepared: the prepared graph.
        twin: the float network, with the same nodes.
        annotation: the annotation of the prepared graph.
        layers: the layers of the prepared graph.
    """

    def __init__(
        self,
        prepared: TracedModule,
        twin: TracedModule,
        annotation: Annotation,
        layers: Iterable[RaisableLayer],
    ) -> None:
        self.prepared = prepared
        paths = {e.outputs[0].name: e.name for e in exprs(prepared) if isinstance(e, GetAttr) and e.outputs}
        weights = {s.group: paths.get(s.node) for s in annotation.sites if s.sort == "weight"}
        biases = {s.name: paths.get(s.node) for s in annotation.sites if s.sort == "bias"}
        self.changed: dict[str, list[tuple[str, np.ndarray, np.ndarray]]] = {}
        for layer in layers:
            for name in (weights.get(layer.weight), *(biases.get(bias) for bias in sorted(layer.biases))):
                if name is None:
                    continue
                original, changed = (get_module(model, name).numpy().copy() for model in (twin, prepared))
                if original.size == changed.size and not np.array_equal(original.ravel(), changed.ravel()):
                    self.changed.setdefault(layer.name, []).append((name, original, changed))

    @contextmanager
    def of(self, raised: Collection[str]) -> Iterator[None]:
        """Gives the layers named in ``raised`` their float values inside the block."""
        entries = [entry for name in raised for entry in self.changed.get(name, ())]
        try:
            for name, original, _ in entries:
                write(self.prepared, name, original)
            yield
        finally:
            for name, _, changed in entries:
                write(self.prepared, name, changed)
