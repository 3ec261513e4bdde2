"""What the file that a traced module was imported from says of itself, and the names in it.

A layer may read a transposed weight, or a third of the one matrix that a file stores for queries, keys and
values. The moves say where each number of the parameter stands in the stored tensor, so that tuned numbers
find their way back.

MegEngine names nodes and parameters by identifiers, and a prepared graph has other nodes than the file. The
origin keeps the file's own words for the export. It is a plain attribute of the traced module, as JSON text,
which ``flatten``, ``prepare``, ``convert``, ``save`` and ``load`` keep.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
from pydantic import BeforeValidator, Field

from qtrace.errors import GraphError
from qtrace.graph.failures import Saved, from_json, parsing
from qtrace.graph.types import TracedModule

# How a parameter of a graph was made of a stored tensor of a file: by moves, which computed nothing.

# The kind, and its numbers: ("transpose", axes), ("reshape", sizes), ("part", (axis, first, end)),
# ("take", (axis, *places)).
Move = tuple[Literal["transpose", "reshape", "part", "take"], tuple[int, ...]]


def transposed_by(axes: Sequence[int]) -> Move:
    """Returns the move that puts the axes into another order, as `numpy.transpose` does."""
    return "transpose", tuple(int(axis) for axis in axes)


def reshaped_to(sizes: Sequence[int]) -> Move:
    """Returns the move that gives the numbers another shape, in the order of C."""
    return "reshape", tuple(int(size) for size in sizes)


def part_of(axis: int, first: int, end: int) -> Move:
    """Returns the move that takes the places from ``first`` up to ``end`` of an axis."""
    return "part", (int(axis), int(first), int(end))


def taken_at(axis: int, places: Iterable[int]) -> Move:
    """Returns the move that takes places of an axis in any order, one of them several times or not at all."""
    return "take", (int(axis), *(int(place) for place in places))


def joined(moves: Sequence[Move], *more: Move) -> tuple[Move, ...]:
    """Returns moves one after the other, of which a transpose and its inverse are none."""
    result = list(moves)
    for kind, numbers in more:
        if kind == "transpose" and result and result[-1][0] == kind:
            before = result.pop()[1]
            numbers = tuple(before[axis] for axis in numbers)
        if kind != "transpose" or numbers != tuple(range(len(numbers))):
            result.append((kind, numbers))
    return tuple(result)


def undone(shape: Sequence[int], moves: Iterable[Move]) -> tuple[Move, ...] | None:
    """Returns the moves that make the stored tensor of a parameter again; None if numbers are missing.

    Args:
        shape: the shape of the stored tensor.
        moves: what made the parameter.
    """
    back, own = list[Move](), tuple(shape)
    for kind, numbers in moves:
        if kind == "transpose":
            back.insert(0, transposed_by(np.argsort(numbers).tolist()))
            own = tuple(own[axis] for axis in numbers)
        elif kind == "reshape":
            back.insert(0, reshaped_to(own))
            own = np.empty(own, np.bool_).reshape(numbers).shape
        else:
            return None
    return tuple(back)


def places_of(shape: Sequence[int], moves: Iterable[Move]) -> np.ndarray:
    """Returns where each number of the result of some moves stands in the flattened stored tensor.

    Args:
        shape: the shape of the stored tensor.
        moves: the moves in their order.

    Returns:
        int64 indices, of the shape of the result.

    Raises:
        ValueError: when the moves do not fit the shape.
    """
    return moved(np.arange(int(np.prod(shape, dtype=np.int64))).reshape(tuple(shape)), moves)


def moved(values: np.ndarray, moves: Iterable[Move]) -> np.ndarray:
    """Returns the result of some moves of an array.

    Raises:
        ValueError: when the moves do not fit its shape.
    """
    for kind, numbers in moves:
        if kind == "transpose":
            values = values.transpose(numbers)
        elif kind == "reshape":
            values = values.reshape(numbers)
        elif kind == "part":
            axis, first, end = numbers
            values = values.take(range(first, end), axis)
        else:
            axis, *taken = numbers
            try:
                values = values.take(np.array(taken, np.int64), axis)
            except IndexError as error:
                raise ValueError(f"no such places on axis {axis} of a stored tensor") from error
    return values


_ATTRIBUTE = "onnx_origin"
_MAX_VERSION = int(np.iinfo(np.int64).max)  # of a number in a protobuf file
# Keys that most networks do not have.
_RARE = (
    "norms",
    "computed",
    "tied",
    "absent",
    "merged",
    "frozen",
    "parts",
    "graph_facts",
    "end_facts",
    "output_axes",
    "node_remarks",
    "programs",
)

Facts = tuple[tuple[str, str], ...]
_Fill = Annotated[float, Field(ge=0, le=1, multiple_of=1)]


@dataclass(frozen=True)
class FileResult(Saved):
    """The result of a node of the file.

    Attributes:
        tensor: the name of the tensor.
        node: the name of the node that computes it; "" if it is unnamed.
        op: the type of the node.
        pieces: names of the nodes and tensors that were joined into it.
    """

    tensor: str
    node: str
    op: str
    pieces: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """All names that it has in the file."""
        return tuple(name for name in (self.tensor, self.node, *self.pieces) if name)

    def joined(self, others: Iterable[FileResult]) -> FileResult:
        """Returns the result with the names of others, which were joined into it."""
        names = dict.fromkeys((*self.pieces, *(name for other in others for name in other.names)))
        own = (self.tensor, self.node)
        return replace(self, pieces=tuple(name for name in names if name not in own))


class FileRemark(NamedTuple):
    """What the file says of a node.

    Attributes:
        doc: the document string.
        facts: keys and values of its metadata.
    """

    doc: str = ""
    facts: Facts = ()


class FileParameter(NamedTuple):
    """A stored tensor of the file.

    Attributes:
        tensor: the name of the tensor.
        shape: its shape.
        moves: what makes the parameter of the tensor, up to a reshape.
    """

    tensor: str
    shape: tuple[int, ...]
    moves: tuple[Move, ...] = ()


class FileNorm(NamedTuple):
    """A BatchNorm of the file that stands directly after a layer, and that `prepare` may fold into it.

    Attributes:
        bias: the path of the layer's bias, whether the layer has one or not.
        eps: the number that the BatchNorm adds to the variance.
        tensors: the stored tensors of the BatchNorm: gamma, beta, running mean and running variance; "" for
            one that the file does not name.
    """

    bias: str
    eps: float
    tensors: tuple[str, str, str, str]


def _name_texts(texts: list[str]) -> dict[str, Any]:
    tensor, node, op, *pieces = texts
    return {"tensor": tensor, "node": node, "op": op, "pieces": tuple(pieces)}


@dataclass(frozen=True)
class FileOrigin(Saved):
    """The file that a traced module was imported from.

    Attributes:
        graph: the name of its graph.
        doc: the document string of the model.
        graph_doc: the document string of the graph.
        producer: the tool that wrote it, and the version of that.
        domain: the domain of the model.
        model_version: the version that the author gave the model.
        opset: the version of ONNX's own ops.
        ir_version: the version of the file format.
        end_docs: name of an input or output -> its document string.
        graph_facts: keys and values of the graph's own metadata, apart from the model's metadata.
        end_facts: name of an input or output -> keys and values of its metadata.
        output_axes: name of an output -> the names of its axes; "" for one without.
        node_remarks: name of a node -> what the file says of it.
        results: name of a node of the traced graph -> the result of a node of the file.
        parameters: path of a parameter -> the stored tensor of the file.
        norms: path of the weight of a layer -> the BatchNorm after it; of networks from torch only.
        computed: path of a parameter that is no tensor of the state, such as one that the import computed
            from it -> hash of its values. Of networks from torch only.
        tied: another name of a stored tensor in torch's state -> its name in ``parameters``.
        absent: the tensors of numbers in torch's state that the graph does not hold, since the network reads
            none of them or the import computed other tensors from them.
        merged: path of a parameter of a layer that was merged into another one, and is no longer in the
            graph. Its value is the number with which the layer adds nothing, and how many of it the parameter
            held.
        frozen: a stored tensor from which the import computed numbers that stay as they are -> hash of its
            values, "" until they are known; of networks from torch only.
        parts: a tensor of torch's state that is a part of a parameter, as of a recurrent layer. Its value is
            the path of the parameter in the place of a tensor's name, and the moves that take the part.
        programs: path of a parameter that nodes of the file compute of stored tensors -> hash of its values,
            and the ONNX model with these nodes, in base64.

    Raises:
        GraphError: for anything but text and whole numbers of 64 bits.
    """

    graph: str = ""
    doc: str = ""
    graph_doc: str = ""
    producer: str = ""
    domain: str = ""
    model_version: int = 0
    opset: int = 0
    ir_version: int = 0
    end_docs: Mapping[str, str] = field(default_factory=dict)
    graph_facts: Facts = ()
    end_facts: Mapping[str, Facts] = field(default_factory=dict)
    output_axes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    node_remarks: Mapping[str, FileRemark] = field(default_factory=dict)
    results: Mapping[str, Annotated[FileResult, BeforeValidator(_name_texts)]] = field(default_factory=dict)
    parameters: Mapping[str, FileParameter] = field(default_factory=dict)
    norms: Mapping[str, FileNorm] = field(default_factory=dict)
    computed: Mapping[str, str] = field(default_factory=dict)
    tied: Mapping[str, str] = field(default_factory=dict)
    absent: tuple[str, ...] = ()
    merged: Mapping[str, tuple[_Fill, Annotated[int, Field(ge=0)]]] = field(default_factory=dict)
    frozen: Mapping[str, str] = field(default_factory=dict)
    parts: Mapping[str, FileParameter] = field(default_factory=dict)
    programs: Mapping[str, tuple[str, str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        numbers = (self.model_version, self.opset, self.ir_version)
        if not all(type(n) is int and 0 <= n <= _MAX_VERSION for n in numbers):
            raise GraphError(f"the versions of an imported file are whole numbers, not {numbers}.")
        try:
            json.dumps(vars(self), default=vars, ensure_ascii=False).encode()
        except (TypeError, UnicodeEncodeError) as error:
            raise GraphError(
                "names and document strings of an imported file are text that UTF-8 can express."
            ) from error

    def to_json(self) -> str:
        """Returns the origin as JSON text."""
        document: dict[str, Any] = dict(vars(self))
        document["results"] = {key: [r.tensor, r.node, r.op, *r.pieces] for key, r in self.results.items()}
        for kind in ("parameters", "parts"):
            document[kind] = {key: p if p.moves else p[:2] for key, p in document[kind].items()}
        for key in _RARE:
            if not document[key]:
                del document[key]
        return json.dumps(document, ensure_ascii=True, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> FileOrigin:
        """Parses the text that `to_json` wrote.

        Raises:
            GraphError: when the text is anything else.
        """
        with parsing("the model's record of the file that it was imported from is", "import the file again"):
            origin = from_json(cls, text)
            for _, model in origin.programs.values():
                base64.b64decode(model, validate=True)
        return origin


def hash_values(array: np.ndarray) -> str:
    """Returns a hash of the numbers of a parameter, whatever its shape."""
    return hashlib.blake2b(np.ascontiguousarray(array, np.float32).tobytes(), digest_size=16).hexdigest()


def write_origin(traced: TracedModule, origin: FileOrigin) -> None:
    """Attaches ``origin`` to ``traced``."""
    setattr(traced, _ATTRIBUTE, origin.to_json())


def read_origin(traced: TracedModule) -> FileOrigin | None:
    """Returns the origin that ``traced`` carries, or None if it was not imported from a file.

    Raises:
        GraphError: when the origin is damaged.
    """
    text = getattr(traced, _ATTRIBUTE, None)
    return None if text is None else FileOrigin.from_json(text)


def copy_origin(source: TracedModule, target: TracedModule) -> None:
    """Gives ``target``, which was made of nodes of ``source``, the origin of ``source`` if it has one."""
    text = getattr(source, _ATTRIBUTE, None)
    if text is not None:
        setattr(target, _ATTRIBUTE, text)


def move_results(traced: TracedModule, moved: Mapping[str, str]) -> None:
    """Says that nodes now give what other nodes gave: their tensors have the names of those.

    Args:
        traced: a module that was imported; another one is not changed.
        moved: name of a node that was folded -> name of the node that it was folded into, in the order of
            the edits.
    """
    origin = read_origin(traced)
    if origin is None or not moved:
        return
    results = dict(origin.results)
    for old, new in moved.items():
        gone, own = results.pop(old, None), results.get(new)
        if own is not None:
            moved_on = replace(own, tensor="" if gone is None else gone.tensor)
            results[new] = moved_on.joined(result for result in (own, gone) if result is not None)
        elif gone is not None:
            results[new] = gone
    write_origin(traced, replace(origin, results=results))
