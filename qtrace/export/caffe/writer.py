"""Collects the layers of one Caffe net as protobuf messages: the net, and its weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from qtrace.export.caffe.proto import message
from qtrace.export.layer_net import LayerNetWriter
from qtrace.ops import OpCall

__all__ = ["CaffeWriter"]


class CaffeWriter(LayerNetWriter):
    """Collects the layers of one Caffe net. Layers have the names of the blobs that they write."""

    runtime = "Caffe"

    def __init__(self, name: str) -> None:
        super().__init__()
        self.net = message("NetParameter")(name=name)
        self.weights = message("NetParameter")(name=name)

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
            top: the name of the layer and of the blob that it writes.
            blobs: the parameters of the layer.
            **parameters: the fields of the layer's settings, such as ``relu_param``.
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
            layer = self.weights.layer.add(name=name, type=kind, bottom=bottoms, top=tops)
            for value in blobs:
                flat = np.ascontiguousarray(value, np.float32)
                layer.blobs.add(shape={"dim": flat.shape}, data=flat.reshape(-1))

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
