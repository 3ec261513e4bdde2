"""The interface of the file that a traced module was imported from: names, order and types of its tensors.

MegEngine computes int64 as int32, and qtrace computes float16 and float64 as float32. The interface
keeps the types of the file, so that an export declares them again. It is a plain attribute of the traced
module, as JSON text, which ``flatten``, ``prepare``, ``convert``, ``save`` and ``load`` keep.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from qtrace.errors import GraphError
from qtrace.graph.failures import parsing
from qtrace.graph.types import TensorNode, TracedModule

__all__ = ["Interface", "TensorInfo", "read_inputs", "read_interface", "write_interface"]

_ATTRIBUTE = "onnx_interface"

# Type in the file -> type of the node of the graph.
_CARRIED = {
    **{name: name for name in ("bool", "int8", "int16", "int32", "uint8", "uint16", "float32")},
    **dict.fromkeys(("int64", "uint16", "uint32", "uint64"), "int32"),
    **dict.fromkeys(("float16", "bfloat16", "float64"), "float32"),
}
_MAX_RANK = 7  # of MegEngine's tensors


@dataclass(frozen=True)
class TensorInfo:
    """Name and type of an input or output of a file.

    Attributes:
        name: the name of the tensor in the file, any text.
        dtype: the numpy name of its type in the file, such as ``int64``.
        sizes: the size of each axis that the file fixes, and None for each axis that it leaves open; None
            if they are unknown. An output has them where its values decide its shape.

    Raises:
        GraphError: for an empty name, a type that no traced module carries, or sizes that no tensor has.
    """

    name: str
    dtype: str
    sizes: tuple[int | None, ...] | None = None

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
        if self.sizes is not None and not _are_sizes(self.sizes):
            raise GraphError(f"tensor {self.name!r} of an interface has the sizes {self.sizes!r}.")

    @property
    def carried_dtype(self) -> str:
        """The type of the node that carries the tensor, such as ``int32`` for ``int64``."""
        return _CARRIED[self.dtype]

    @property
    def exported_dtype(self) -> str:
        """The type of the tensor in exported files: the file's type, but ``float32`` for bfloat16.

        Clients of runtimes in Python lack arrays of bfloat16.
        """
        return "float32" if self.dtype == "bfloat16" else self.dtype


@dataclass(frozen=True)
class Interface:
    """The inputs and outputs of the file that a traced module was imported from.

    Attributes:
        inputs: the inputs, in the order of the graph's inputs without ``self``.
        outputs: the outputs, in the order of the graph's outputs.
        metadata: keys and values that the file carries for its users, such as the names of classes.

    Raises:
        GraphError: when two inputs, or two outputs, have one name, or the metadata are no text.
    """

    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]
    metadata: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        texts = [text for pair in self.metadata for text in pair]
        if not all(
            isinstance(text, str) and text.encode(errors="replace").decode() == text for text in texts
        ):
            raise GraphError("the metadata of an interface are pairs of texts that UTF-8 can express.")
        for kind, tensors in (("inputs", self.inputs), ("outputs", self.outputs)):
            names = Counter(tensor.name for tensor in tensors)
            if repeated := sorted((names - Counter(set(names))).keys()):
                raise GraphError(f"two {kind} of an interface are called {repeated[0]!r}.")

    def to_json(self) -> str:
        """Returns the interface as JSON text: ``{"inputs": [{"name": "x", "dtype": "int64"}], ...}``."""
        document = asdict(self)
        if not self.metadata:
            del document["metadata"]
        return json.dumps(document, ensure_ascii=True, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Interface:
        """Parses the text that `to_json` wrote.

        Raises:
            GraphError: when the text is anything else.
        """
        with parsing("the interface that the model carries is", "import the file again"):
            document = json.loads(text)
            if not {"inputs", "outputs"} <= set(document) <= {"inputs", "outputs", "metadata"}:
                raise ValueError("its keys are not 'inputs', 'outputs' and 'metadata'")
            metadata = tuple((key, value) for key, value in document.get("metadata", ()))
            return cls(_tensors(document["inputs"]), _tensors(document["outputs"]), metadata)


def _are_sizes(sizes: Any) -> bool:
    if not isinstance(sizes, tuple) or len(sizes) > _MAX_RANK:
        return False
    return all(n is None or (isinstance(n, int) and not isinstance(n, bool) and n > 0) for n in sizes)


def _tensors(items: Any) -> tuple[TensorInfo, ...]:
    keys = {"name", "dtype"}
    if not isinstance(items, list) or not all(keys <= set(item) <= keys | {"sizes"} for item in items):
        raise ValueError("its tensors are not made of 'name', 'dtype' and 'sizes'")
    sizes = (item.get("sizes") for item in items)
    return tuple(
        TensorInfo(item["name"], item["dtype"], None if axes is None else tuple(axes))
        for item, axes in zip(items, sizes, strict=True)
    )


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


def read_inputs(traced: TracedModule) -> dict[str, TensorInfo]:
    """Returns name of the argument of ``forward`` -> the input of the file that ``traced`` was imported from.

    Empty if it was not imported, or its inputs differ from the file's.

    Raises:
        GraphError: when the interface is damaged.
    """
    text, spec = getattr(traced, _ATTRIBUTE, None), traced.argspec
    if text is None or spec is None:
        return {}
    inputs, names = Interface.from_json(text).inputs, spec.args[1:]
    return dict(zip(names, inputs, strict=True)) if len(inputs) == len(names) else {}


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
                f"{len(nodes)}: import the file again, and keep the {kind}s of the graph."
            )
        for tensor, node in zip(tensors, nodes, strict=True):
            known = isinstance(node, TensorNode) and node.dtype is not None
            dtype = np.dtype(node.dtype).name if known else tensor.carried_dtype
            if dtype != tensor.carried_dtype:
                raise GraphError(
                    f"{kind} {tensor.name!r} is {tensor.dtype} in the interface that the model carries, and "
                    f"node {node.name} of the graph is {dtype}: import the file again."
                )
