"""The interface of the file that a traced module was imported from: names, order and types of its tensors.

MegEngine computes int64 as int32, and qtrace computes float16 as float32. The interface keeps the types of
the file, so that an export declares them again. It is a plain attribute of the traced module, as JSON text,
which ``flatten``, ``prepare``, ``convert``, ``save`` and ``load`` keep.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from qtrace.errors import GraphError
from qtrace.graph.types import TensorNode, TracedModule

__all__ = ["Interface", "TensorInfo", "read_interface", "write_interface"]

_ATTRIBUTE = "onnx_interface"

# Type in the file -> type of the node of the graph.
_CARRIED = {
    **{name: name for name in ("bool", "int8", "int16", "int32", "uint8", "uint16", "float32")},
    **dict.fromkeys(("int64", "uint32", "uint64"), "int32"),
    "float16": "float32",
}


@dataclass(frozen=True)
class TensorInfo:
    """Name and type of an input or output of a file.

    Attributes:
        name: the name of the tensor in the file, any text.
        dtype: the numpy name of its type in the file, such as ``int64``.

    Raises:
        GraphError: for an empty name, or a type that no traced module carries.
    """

    name: str
    dtype: str

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name.encode(errors="ignore"):
            raise GraphError(f"an interface names its tensors by text that is not empty, not {self.name!r}.")
        if self.name.encode(errors="replace").decode() != self.name:
            raise GraphError(f"tensor {self.name!r} of an interface has a name that UTF-8 cannot express.")
        if not isinstance(self.dtype, str) or self.dtype not in _CARRIED:
            raise GraphError(
                f"tensor {self.name!r} of an interface has type {self.dtype!r}; "
                f"known: {', '.join(sorted(_CARRIED))}."
            )

    @property
    def carried_dtype(self) -> str:
        """The type of the node that carries the tensor, such as ``int32`` for ``int64``."""
        return _CARRIED[self.dtype]

    @property
    def exported_dtype(self) -> str:
        """The type of the tensor in exported files: that of the file, and ``float32`` for ``float16``."""
        return "float32" if self.dtype == "float16" else self.dtype


@dataclass(frozen=True)
class Interface:
    """The inputs and outputs of the file that a traced module was imported from.

    Attributes:
        inputs: the inputs, in the order of the graph's inputs without ``self``.
        outputs: the outputs, in the order of the graph's outputs.

    Raises:
        GraphError: when two inputs, or two outputs, have one name.
    """

    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]

    def __post_init__(self) -> None:
        for kind, tensors in (("inputs", self.inputs), ("outputs", self.outputs)):
            names = [tensor.name for tensor in tensors]
            if repeated := sorted({name for name in names if names.count(name) > 1}):
                raise GraphError(f"two {kind} of an interface are called {repeated[0]!r}.")

    def to_json(self) -> str:
        """Returns the interface as JSON text: ``{"inputs": [{"name": "x", "dtype": "int64"}], ...}``."""
        return json.dumps(asdict(self), ensure_ascii=True, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Interface:
        """Parses the text that `to_json` wrote.

        Raises:
            GraphError: when the text is anything else.
        """
        try:
            document = json.loads(text)
            if set(document) != {"inputs", "outputs"}:
                raise ValueError("its keys are not 'inputs' and 'outputs'")
            return cls(_tensors(document["inputs"]), _tensors(document["outputs"]))
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise GraphError(
                f"the interface that the model carries is damaged ({type(error).__name__}): "
                "import the file again."
            ) from error


def _tensors(items: Any) -> tuple[TensorInfo, ...]:
    if not isinstance(items, list) or not all(set(item) == {"name", "dtype"} for item in items):
        raise ValueError("its tensors are not pairs of 'name' and 'dtype'")
    return tuple(TensorInfo(item["name"], item["dtype"]) for item in items)


def write_interface(traced: TracedModule, interface: Interface) -> None:
    """Attaches ``interface`` to ``traced``.

    Raises:
        GraphError: when the interface has other numbers or types of inputs or outputs than the graph.
    """
    _check(interface, traced)
    setattr(traced, _ATTRIBUTE, interface.to_json())


def read_interface(traced: TracedModule) -> Interface | None:
    """Returns the interface that ``traced`` carries, or None if it was not imported from a file.

    Raises:
        GraphError: when the interface is damaged or does not fit the graph.
    """
    text = getattr(traced, _ATTRIBUTE, None)
    if text is None:
        return None
    interface = Interface.from_json(text)
    _check(interface, traced)
    return interface


def _check(interface: Interface, traced: TracedModule) -> None:
    """Refuses an interface that does not fit the graph of ``traced``."""
    graph = traced.graph
    sides: tuple[tuple[str, Sequence[TensorInfo], list[Any]], ...] = (
        ("input", interface.inputs, graph.inputs[1:]),
        ("output", interface.outputs, graph.outputs),
    )
    for kind, tensors, nodes in sides:
        if len(tensors) != len(nodes):
            raise GraphError(
                f"the interface that the model carries has {len(tensors)} {kind}s and the graph "
                f"{len(nodes)}: import the file again, and do not change the {kind}s of the graph."
            )
        for tensor, node in zip(tensors, nodes, strict=True):
            known = isinstance(node, TensorNode) and node.dtype is not None
            dtype = np.dtype(node.dtype).name if known else tensor.carried_dtype
            if dtype != tensor.carried_dtype:
                raise GraphError(
                    f"{kind} {tensor.name!r} is {tensor.dtype} in the interface that the model carries, and "
                    f"node {node.name} of the graph is {dtype}: import the file again."
                )
