"""The base of the ncnn and Caffe writers: nets of layers with stored parameters and blobs between them."""

from __future__ import annotations

from typing import Any

import numpy as np

from qtrace.errors import ExportError
from qtrace.graph.types import Node, TensorNode
from qtrace.graph.walk import is_float_tensor, owner
from qtrace.ops import OpCall


class LayerNetWriter:
    """Collects the layers of one net. Blobs have the names of the graph's nodes.

    Attributes:
        runtime: the name of the runtime in messages.
        names: node -> the blob that holds its value.
        values: node of a parameter or constant -> its value.
    """

    runtime: str

    def __init__(self) -> None:
        self.names: dict[Node, str] = {}
        self.values: dict[Node, np.ndarray] = {}
        self._fresh_names = 0

    def name(self, node: Any) -> str:
        """Returns the blob that an op reads for ``node``.

        Raises:
            ExportError: when no blob holds the value.
        """
        if isinstance(node, Node) and node in self.names:
            return self.names[node]
        title = node.name if isinstance(node, Node) else repr(node)
        if isinstance(node, TensorNode) and self.value(node) is None and not is_float_tensor(node):
            raise ExportError(
                f"{title} is {np.dtype(node.dtype).name}, where {self.runtime} computes in floats: end the "
                "graph before it"
            )
        raise ExportError(
            f"{title} is a parameter, a number or a shape, where {self.runtime} takes a blob: "
            "compute it from the input, or end the graph before it"
        )

    def value(self, node: Any) -> np.ndarray | None:
        """Returns the value of a parameter or constant, None for a computed node."""
        return self.values.get(node) if isinstance(node, Node) else None

    def stored(self, node: Any, role: str) -> np.ndarray:
        """Returns the value of a parameter that a layer stores.

        Raises:
            ExportError: when the parameter is computed; ``role`` names it, such as ``weight``.
        """
        value = self.value(node)
        if value is None:
            raise ExportError(
                f"its {role} is computed, and {self.runtime} stores it in the file: make it a parameter"
            )
        return value

    def batch_norm(self, call: OpCall) -> dict[str, np.ndarray | None]:
        """Returns ``weight``, ``bias``, ``running_mean`` and ``running_var`` of a BatchNorm as vectors.

        Raises:
            ExportError: when one of them is computed.
        """
        module, parameters = owner(call.expr), {}
        for name in ("weight", "bias", "running_mean", "running_var"):
            value = getattr(module, name) if module is not None else call.attrs[name]
            if isinstance(value, TensorNode):
                value = self.stored(value, name.replace("_", " "))
            parameters[name] = None if value is None else np.asarray(value).reshape(-1)
        return parameters

    def fresh(self, base: str) -> str:
        """Returns a new name for a step on the way to ``base``."""
        self._fresh_names += 1
        return f"{base}__{self._fresh_names}"
