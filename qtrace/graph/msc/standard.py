"""The calls that an op type and its attributes say by themselves, so that a document need not add them.

So are documents that another tool has written read, as far as they have these types. The functions take their
arguments in the order of MegEngine's.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Mapping
from typing import Any

import megengine.functional as F

from qtrace.errors import GraphError
from qtrace.graph.msc.document import MSCNode

__all__ = ["node_digest", "same_call", "standard_call"]

_NN, _ELEMWISE, _TENSOR = (f"megengine.functional.{name}" for name in ("nn", "elemwise", "tensor"))
# Layer -> its function, and the number of its spatial axes.
_CONVS = {
    "nn.conv1d": ("conv1d", 1),
    "msc.conv1d_bias": ("conv1d", 1),
    "nn.conv2d": ("conv2d", 2),
    "msc.conv2d_bias": ("conv2d", 2),
}
_LINEARS = ("msc.linear", "msc.linear_bias")
_FUNCTIONS = {
    "nn.relu": (1, f"{_NN}:relu"),
    "nn.silu": (1, f"{_NN}:silu"),
    "sigmoid": (1, f"{_NN}:sigmoid"),
    "tanh": (1, f"{_ELEMWISE}:tanh"),
    "exp": (1, f"{_ELEMWISE}:exp"),
    "log": (1, f"{_ELEMWISE}:log"),
    "sqrt": (1, f"{_ELEMWISE}:sqrt"),
    "abs": (1, f"{_ELEMWISE}:abs"),
    "negative": (1, f"{_ELEMWISE}:neg"),
    "add": (2, f"{_ELEMWISE}:add"),
    "subtract": (2, f"{_ELEMWISE}:sub"),
    "multiply": (2, f"{_ELEMWISE}:mul"),
    "divide": (2, f"{_ELEMWISE}:div"),
    "maximum": (2, f"{_ELEMWISE}:maximum"),
    "minimum": (2, f"{_ELEMWISE}:minimum"),
}
# Modules without attributes that call one of these functions.
_MODULES = {
    "megengine.module.activation:ReLU": f"{_NN}:relu",
    "megengine.module.activation:SiLU": f"{_NN}:silu",
    "megengine.module.activation:Sigmoid": f"{_NN}:sigmoid",
}
_PAIRS = ("stride", "padding", "dilation")
# Attributes that the way back reads whatever the call: an edit of them is followed.
_FOLLOWED = ("call", "no_call", "stored", "roundings", "traced_shape")


def standard_call(node: MSCNode) -> dict[str, Any] | None:
    """Returns the call of a node by its type, attributes and weights; None if they do not say it."""
    inputs = [{"ref": f"input_{i}"} for i in range(len(node.inputs))]
    if node.optype in _FUNCTIONS and not node.weights:
        count, function = _FUNCTIONS[node.optype]
        return {"function": function, "args": inputs} if len(inputs) == count else None
    if len(inputs) != 1 or not {"weight"} <= node.weights.keys() <= {"weight", "bias"}:
        return None
    if node.optype in _LINEARS:
        bias = {"ref": "bias"} if "bias" in node.weights else None
        return {"function": f"{_NN}:linear", "args": [*inputs, {"ref": "weight"}, bias, "default"]}
    if node.optype in _CONVS:
        try:
            return _conv_call(node, inputs)
        except (GraphError, ValueError):
            return None
    return None


def node_digest(node: MSCNode) -> str:
    """Returns a hash of what a node says of its op beside its attribute ``call``.

    These are its type, its attributes, the number of its inputs and the types of its weights. A call is
    stored with it, so that an edit of the node that the call does not follow is noticed.
    """
    own = {k: v for k, v in node.attrs.items() if k not in _FOLLOWED and not k.startswith("qparams_")}
    said = [node.optype, sorted(own.items()), len(node.inputs), sorted(node.weights)]
    return hashlib.blake2b(json.dumps(said).encode(), digest_size=8).hexdigest()


def _conv_call(node: MSCNode, inputs: list[dict[str, Any]]) -> dict[str, Any]:
    name, rank = _CONVS[node.optype]
    stride, dilation = (_sizes(node, key, rank) for key in ("strides", "dilation"))
    padding = _sizes(node, "padding", 2 * rank if rank > 1 else rank)
    (groups,) = _sizes(node, "groups", 1)
    if rank > 1 and padding[:rank] != padding[rank:]:
        raise GraphError("MegEngine's convolutions pad both ends alike")
    weight: dict[str, Any] = {"ref": "weight"}
    shape = node.weights["weight"].shape
    if groups > 1 and shape[0] % groups == 0:
        weight["shape"] = [groups, shape[0] // groups, *shape[1:]]
    bias: dict[str, Any] | None = None
    if "bias" in node.weights:
        bias = {"ref": "bias", "shape": [1, shape[0], *[1] * rank]}
    options = [*(_several(each[:rank], rank) for each in (stride, padding, dilation)), groups]
    arguments = [*inputs, weight, bias, *options, "cross_correlation", "default"]
    return {"function": f"{_NN}:{name}", "args": arguments}


def _sizes(node: MSCNode, key: str, count: int) -> list[int]:
    sizes = [int(part) for part in node.attrs.get(key, "").split(",")]
    if len(sizes) != count:
        raise GraphError(f"node {node.name} has the {key} {node.attrs.get(key)!r}")
    return sizes


def _several(sizes: list[int], rank: int) -> Any:
    return {"tuple": sizes} if rank > 1 else sizes[0]


def same_call(call: Mapping[str, Any], other: Mapping[str, Any] | None) -> bool:
    """Returns whether two calls compute the same; False may be said of calls that do, too."""
    return other is not None and _bound(call) == _bound(other)


def _bound(call: Mapping[str, Any]) -> Any:
    """Returns a call with all arguments of its function by name."""
    function = call.get("function")
    if function is None and not call.get("attributes") and call.get("module") in _MODULES:
        function = _MODULES[call["module"]]
    if function is None or not function.startswith(f"{_NN}:"):
        return call
    known = getattr(F.nn, function.partition(":")[2], None)
    if known is None:
        return call
    try:
        bound = inspect.signature(inspect.unwrap(known)).bind(*call["args"], **call.get("kwargs", {}))
    except TypeError:
        return call
    bound.apply_defaults()
    arguments = dict(bound.arguments)
    rank = {"conv2d": 2}.get(function.partition(":")[2], 1)
    for name in _PAIRS:
        if rank > 1 and isinstance(arguments.get(name), int):
            arguments[name] = {"tuple": [arguments[name]] * rank}
    return function, arguments
