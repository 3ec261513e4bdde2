"""Reads the JSON of an MSCGraph as plain data with every key, the right types, and no tensor from nowhere.

A document is data from anywhere: what is wrong with it is one sentence that names the node and the key.
Nothing in it is resolved or run here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from qtrace.errors import GraphError

__all__ = ["parse"]

_LARGEST_SIZE = 2**63 - 1
_SHOWN = 60  # characters of a value in a message


def parse(text: str) -> dict[str, Any]:
    """Parses and checks a document.

    Keys that MSC's own reader does not need may be missing: ``alias``, ``layout``, ``prims``, ``shared_ref``.

    Raises:
        GraphError: when it is no MSCGraph; the message is a clause.
    """
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise GraphError(f"it is no JSON ({type(error).__name__})") from error
    if not isinstance(document, dict):
        raise GraphError(f"it is a {type(document).__name__}, not an object")
    graph = _Fields(document, "the graph")
    result = {
        "name": graph.text("name"),
        "inputs": graph.texts("inputs"),
        "outputs": graph.texts("outputs"),
        "nodes": [_node(item, f"node {i}") for i, item in enumerate(graph.objects("nodes"))],
        "prims": [_prim(item, f"prim {i}") for i, item in enumerate(graph.objects("prims", optional=True))],
    }
    _check_names(result)
    return result


class _Fields:
    """The values of an object, held to types when they are read."""

    def __init__(self, item: Any, about: str) -> None:
        if not isinstance(item, dict):
            raise GraphError(f"{about} is {_shown(item)}, not an object")
        self.item, self.about = item, about

    def _value(self, key: str, kind: type, default: Any) -> Any:
        value = self.item.get(key, default)
        if value is None and key not in self.item:
            raise GraphError(f"{self.about} has no {key!r}")
        if not isinstance(value, kind) or isinstance(value, bool):
            raise GraphError(f"{self.about} has the {key} {_shown(value)}: it must be {_KINDS[kind]}")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        value: str = self._value(key, str, default)
        return value

    def integer(self, key: str) -> int:
        value: int = self._value(key, int, None)
        return value

    def texts(self, key: str, optional: bool = False) -> list[str]:
        return [self._item(key, v, str) for v in self._value(key, list, [] if optional else None)]

    def sizes(self, key: str) -> list[int]:
        sizes = [self._item(key, v, int) for v in self._value(key, list, None)]
        if any(not -1 <= size <= _LARGEST_SIZE for size in sizes):
            raise GraphError(f"{self.about} has the {key} {_shown(sizes)}: a size is -1, 0 or more")
        return sizes

    def objects(self, key: str, optional: bool = False) -> list[Any]:
        value: list[Any] = self._value(key, list, [] if optional else None)
        return value

    def mapping(self, key: str) -> dict[str, Any]:
        value: dict[str, Any] = self._value(key, dict, None)
        return value

    def text_mapping(self, key: str) -> dict[str, str]:
        return {name: self._item(key, value, str) for name, value in self.mapping(key).items()}

    def _item(self, key: str, value: Any, kind: type) -> Any:
        if not isinstance(value, kind) or isinstance(value, bool):
            raise GraphError(f"{self.about} has {_shown(value)} in its {key}: it must be {_KINDS[kind]}")
        return value


_KINDS = {str: "text", int: "an integer", list: "a list", dict: "an object"}


def _shown(value: Any) -> str:
    text = ascii(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _node(item: Any, about: str) -> dict[str, Any]:
    fields = _Fields(item, about)
    name = fields.text("name")
    fields.about = about = f"node {_shown(name)}"
    return {
        "index": fields.integer("index"),
        "name": name,
        "shared_ref": fields.text("shared_ref", ""),
        "optype": fields.text("optype"),
        "parents": fields.texts("parents"),
        "inputs": fields.texts("inputs"),
        "outputs": [_tensor(t, f"output {i} of {about}") for i, t in enumerate(fields.objects("outputs"))],
        "attrs": fields.text_mapping("attrs"),
        "weights": {k: _tensor(t, f"weight {k!r} of {about}") for k, t in fields.mapping("weights").items()},
    }


def _tensor(item: Any, about: str) -> dict[str, Any]:
    fields = _Fields(item, about)
    tensor = {
        "name": fields.text("name"),
        "alias": fields.text("alias", ""),
        "dtype": fields.text("dtype"),
        "layout": fields.text("layout", ""),
        "shape": tuple(fields.sizes("shape")),
        "prims": tuple(fields.texts("prims", optional=True)),
    }
    if len(tensor["prims"]) not in (0, len(tensor["shape"])):
        raise GraphError(f"{about} has {len(tensor['prims'])} prims for {len(tensor['shape'])} axes")
    return tensor


def _prim(item: Any, about: str) -> dict[str, Any]:
    fields = _Fields(item, about)
    return {
        "index": fields.integer("index"),
        "name": fields.text("name"),
        "optype": fields.text("optype"),
        "parents": fields.texts("parents", optional=True),
        "attrs": fields.text_mapping("attrs") if "attrs" in item else {},
    }


def _check_names(document: Mapping[str, Any]) -> None:
    """Refuses names that two things have, and what is read before it is given: so there is no cycle."""
    for sort in ("node", "prim"):
        names = [member["name"] for member in document[f"{sort}s"]]
        if len(set(names)) < len(names):
            raise GraphError(f"two {sort}s have the name {next(n for n in names if names.count(n) > 1)}")
    tensors: dict[str, str] = {}
    for node in document["nodes"]:
        _check_reads(node, tensors)
        for tensor in node["outputs"]:
            if tensor["name"] in tensors:
                raise GraphError(f"the tensor {tensor['name']} is given twice")
            tensors[tensor["name"]] = node["name"]
    for sort in ("node", "prim"):
        earlier: set[str] = set()
        for member in document[f"{sort}s"]:
            name = member["name"]
            missing = [parent for parent in member["parents"] if parent not in earlier]
            if missing:
                raise GraphError(f"{sort} {name} names the parent {missing[0]}, which is no earlier {sort}")
            earlier.add(name)
    for node in document["nodes"]:  # `earlier` has the names of the prims
        for tensor in node["outputs"]:
            unknown = [p for p in tensor["prims"] if not p.isdecimal() and p not in earlier]
            if unknown:
                raise GraphError(f"tensor {tensor['name']} names the prim {unknown[0]}, which is not there")


def _check_reads(node: Mapping[str, Any], tensors: Mapping[str, str]) -> None:
    for name in node["inputs"]:
        if name not in tensors:
            raise GraphError(f"node {node['name']} reads {name}, which no earlier node gives")
        if tensors[name] not in node["parents"]:
            raise GraphError(
                f"node {node['name']} reads {name}, and {tensors[name]} is not among its parents"
            )
