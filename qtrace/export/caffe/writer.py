"""Collects the layers of one Caffe net."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from qtrace.errors import ExportError
from qtrace.export.caffe.proto import message
from qtrace.graph.types import Node
from qtrace.ops import OpCall

__all__ = ["CaffeWriter"]


class CaffeWriter:
    """One net in the making. Layers and the blobs that they give have the names of the graph's nodes."""

    def __init__(self, name: str) -> None:
        self.net = message("NetParameter")(name=name)
        self.weights = message("NetParameter")(name=name)
        self.names: dict[Node, str] = {}
        self.values: dict[Node, np.ndarray] = {}
        self.counter = 0

    def name(self, node: Any) -> str:
        """The blob that holds the value of ``node``."""
        if isinstance(node, Node) and node in self.names:
            return self.names[node]
        what = node.name if isinstance(node, Node) else repr(node)
        raise ExportError(
            f"{what} is a parameter, a number or a shape, and Caffe has those inside of layers only: "
            "compute it from the input, or end the graph before it"
        )

    def value(self, node: Any) -> np.ndarray | None:
        """The value of a parameter or constant, None for what is computed."""
        return self.values.get(node) if isinstance(node, Node) else None

    def fresh(self, base: str) -> str:
        """A name for a step on the way to ``base``."""
        self.counter += 1
        return f"{base}__{self.counter}"

    def layer(
        self,
        kind: str,
        bottoms: Sequence[str],
        top: str,
        blobs: Sequence[np.ndarray] = (),
        **parameters: dict[str, Any],
    ) -> str:
        """Adds a layer with one output and returns the output's name.

        Args:
            kind: Caffe's name of the layer.
            bottoms: the blobs that it reads.
            top: its own name and that of the blob that it gives.
            blobs: its parameters.
            **parameters: by the field of the layer, such as ``relu_param``.
        """
        self.layers(kind, bottoms, top, [top], blobs, **parameters)
        return top

    def layers(
        self,
        kind: str,
        bottoms: Sequence[str],
        name: str,
        tops: Sequence[str],
        blobs: Sequence[np.ndarray] = (),
        **parameters: dict[str, Any],
    ) -> None:
        """Adds a layer with several outputs."""
        self.net.layer.add(name=name, type=kind, bottom=bottoms, top=tops, **parameters)
        if blobs:
            stored = self.weights.layer.add(name=name, type=kind, bottom=bottoms, top=tops)
            for value in blobs:
                flat = np.ascontiguousarray(value, np.float32)
                stored.blobs.add(shape={"dim": flat.shape}, data=flat.reshape(-1))

    def emit(
        self,
        kind: str,
        call: OpCall,
        blobs: Sequence[np.ndarray] = (),
        bottoms: Sequence[str] = (),
        **parameters: dict[str, Any],
    ) -> None:
        """Adds a layer that computes an op; without ``bottoms``, it reads the first input of the op."""
        read = bottoms or [self.name(call.inputs[0])]
        self.names[call.out] = self.layer(kind, read, call.out.name, blobs, **parameters)

    def stored(self, node: Any, what: str) -> np.ndarray:
        """The value of a parameter that a layer holds.

        Raises:
            ExportError: when the parameter is computed; ``what`` names it.
        """
        value = self.value(node)
        if value is None:
            raise ExportError(
                f"its {what} is computed, and Caffe stores those in the file: make it a parameter"
            )
        return value
