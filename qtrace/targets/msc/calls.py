"""Calls of a traced graph as plain data, fit for JSON: what an op type and its attributes do not say.

A call names its callee and has the arguments as data: ``{"function": "megengine.functional.nn:relu", "args":
[{"ref": "input_0"}]}``. A ``ref`` is an input of the node or a type of its weights, with the shape that
MegEngine's layer takes if the document has another. Callees are looked up in the allow-lists of model files,
so that a document can name nothing else.
"""

from __future__ import annotations

import enum
import hashlib
import inspect
import json
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import megengine.functional as F
import numpy as np
from megengine.core.ops import builtin
from megengine.module import Module

from qtrace.errors import GraphError
from qtrace.gradients import plain
from qtrace.graph.types import Apply, CallFunction, CallMethod, Expr, ModuleNode, Node
from qtrace.graph.walk import owner, signature
from qtrace.targets.msc.document import MSCNode

_KINDS = ("parameter", "buffer", "constant")
_BUFFERS = ("mean", "var")
_ENDINGS = ("weight", "bias")


@dataclass(frozen=True)
class StoredPlace:
    """Where a tensor is stored.

    Attributes:
        path: its path in the module.
        kind: ``parameter``, ``buffer`` (no gradient), or ``constant`` of the graph.
    """

    path: str
    kind: str


def default_place(name: str, role: str) -> StoredPlace:
    """Returns the place of a weight of which the node says nothing: ``conv_weight`` is ``conv.weight``."""
    head, _, ending = name.rpartition("_")
    path = f"{head}.{ending}" if head and ending in _ENDINGS else name
    return StoredPlace(path, "buffer" if role in _BUFFERS else "parameter")


def stored_place(node: MSCNode, role: str) -> StoredPlace:
    """Returns the place of a weight.

    Raises:
        GraphError: when the node's attribute ``stored`` is damaged; the message is a clause.
    """
    default = default_place(node.weights[role].name, role)
    if "stored" not in node.attrs:
        return default
    try:
        places = json.loads(node.attrs["stored"])
        path, kind = places.get(role, (default.path, default.kind))
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise GraphError(f"its attribute 'stored' is damaged ({type(error).__name__})") from error
    if not isinstance(path, str) or kind not in _KINDS:
        raise GraphError(f"its attribute 'stored' cannot hold {role!r}")
    return StoredPlace(path, kind)


# Modules without attributes that call one of these functions.
_MODULES = {
    f"megengine.module.activation:{name}": f"megengine.functional.nn:{name.lower()}"
    for name in ("ReLU", "SiLU", "Sigmoid")
}
# Attributes that the way back reads whatever the call: an edit of them is followed.
_FOLLOWED = ("call", "no_call", "stored", "roundings", "traced_shape")

BOOKKEEPING = frozenset(
    {
        *("_modules", "name", "training", "quantize_disabled", "_name", "_short_name"),
        *("_forward_pre_hooks", "_forward_hooks"),
    }
)
"""The attributes that every module has, which say nothing about what it computes."""


def write_call(
    expr: Expr, refs: Mapping[Node, dict[str, Any]], tensors: Mapping[str, Any], path: str
) -> dict[str, Any]:
    """Writes a call as data.

    Args:
        expr: a call in a flat graph.
        refs: a node that it reads -> its reference.
        tensors: path of a tensor in the called module -> its reference.
        path: the path of the called module.

    Raises:
        GraphError: when an argument or an attribute cannot be written as data; the message is a clause.
    """
    if isinstance(expr, Apply):
        state = {
            key: v.name if isinstance(v, enum.Enum) else v for key, v in expr.opdef.__getstate__().items()
        }
        kernel = type(expr.opdef)
        if getattr(builtin, kernel.__name__, None) is not kernel:
            raise GraphError(f"the kernel {kernel.__name__} is none of MegEngine's public ones")
        return {
            "kernel": kernel.__name__,
            "state": _write(state, refs),
            "args": [_write(node, refs) for node in expr.inputs],
        }
    arguments, options = list(expr.args), dict(expr.kwargs)
    module = owner(expr)
    if isinstance(expr, CallFunction):
        callee: dict[str, Any] = {"function": _key(plain(expr.func))}
    elif module is not None:
        arguments = arguments[1:]
        attributes = _attributes(module, refs)
        callee = {
            "module": _key(type(module)),
            "path": path,
            "attributes": attributes,
            "tensors": dict(tensors),
        }
    elif isinstance(expr, CallMethod) and isinstance(arguments[0], Node):
        callee = {"method": expr.method}
    else:
        raise GraphError(f"a {type(expr).__name__} of a class cannot be written as data")
    callee["args"] = [_write(value, refs) for value in arguments]
    if options:
        callee["kwargs"] = {key: _write(value, refs) for key, value in options.items()}
    return callee


def _key(thing: Any) -> str:
    return f"{thing.__module__}:{thing.__qualname__}"


def _attributes(module: Module, refs: Mapping[Node, dict[str, Any]]) -> dict[str, Any]:
    """Returns the attributes of a module that are no tensors."""
    if module._forward_pre_hooks or module._forward_hooks:
        raise GraphError(f"a {type(module).__name__} with hooks cannot be written as data")
    own = {name: value for name, value in vars(module).items() if name not in BOOKKEEPING}
    if any(True for _ in module.named_children()):
        raise GraphError(f"a {type(module).__name__} that holds modules cannot be written as data")
    named = {name for name, _ in module.named_tensors()}
    return {name: _write(value, refs) for name, value in own.items() if name not in named}


def _write(value: Any, refs: Mapping[Node, dict[str, Any]]) -> Any:
    if isinstance(value, Node):
        if isinstance(value, ModuleNode) or value not in refs:
            raise GraphError(f"{value._name} is no tensor of the document")
        return refs[value]
    if value is None or isinstance(value, (bool, str)) or type(value) is int:
        return value
    if isinstance(value, float) and not isinstance(value, np.generic):
        return value if math.isfinite(value) else {"float": str(value)}
    if isinstance(value, list):
        return [_write(item, refs) for item in value]
    if isinstance(value, tuple) and type(value) is tuple:
        return {"tuple": [_write(item, refs) for item in value]}
    if isinstance(value, slice):
        return {"slice": [_write(end, refs) for end in (value.start, value.stop, value.step)]}
    if isinstance(value, dict):
        return {"dict": [[_write(key, refs), _write(item, refs)] for key, item in value.items()]}
    if value is Ellipsis:
        return {"ellipsis": True}
    if isinstance(value, np.dtype) or (isinstance(value, type) and issubclass(value, np.generic)):
        dtype = np.dtype(value)
        if dtype.metadata is None:
            return {"dtype": dtype.name}
    if isinstance(value, (np.generic, np.ndarray)) and np.dtype(value.dtype).kind in "biuf":
        return {"array": [value.dtype.name, list(value.shape), _write(value.reshape(-1).tolist(), refs)]}
    raise GraphError(f"{value!r}, a {type(value).__name__}, cannot be written as data")


def read_value(value: Any, look_up: Callable[[dict[str, Any]], Any]) -> Any:
    """Reads an argument back.

    Args:
        value: plain data.
        look_up: gives what a reference stands for.

    Raises:
        GraphError: when it is no argument; the message is a clause.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, list):
        return [read_value(item, look_up) for item in value]
    if isinstance(value, dict) and "ref" in value:
        return look_up(value)
    if isinstance(value, dict) and len(value) == 1:
        ((kind, content),) = value.items()
        try:
            return _READERS[kind](content, look_up)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise GraphError(f"{kind!r} of {type(content).__name__} is no argument") from error
    raise GraphError(f"an argument is a {type(value).__name__} of no known form")


def _read_slice(content: Any, look_up: Callable[[dict[str, Any]], Any]) -> slice:
    start, stop, step = (read_value(end, look_up) for end in content)
    return slice(start, stop, step)


def _read_array(content: Any, look_up: Callable[[dict[str, Any]], Any]) -> Any:
    name, shape, numbers = content
    values = np.asarray(read_value(numbers, look_up), read_dtype(name))
    return values.reshape(shape) if shape else values.reshape(())[()]


def read_dtype(name: Any) -> np.dtype[Any]:
    """Returns the dtype called ``name``; int32 for int64, since MegEngine's integers have 32 bits.

    Raises:
        GraphError: when it is no dtype of MegEngine's plain tensors; the message is a clause.
    """
    if not isinstance(name, str) or name not in _DTYPES:
        raise GraphError(f"{ascii(name)[:60]} is no dtype of plain tensors")
    return np.dtype("int32" if name == "int64" else name)


_DTYPES = frozenset(
    {
        *("float16", "float32", "float64", "int8", "int16", "int32", "int64"),
        *("uint8", "uint16", "uint32", "uint64", "bool"),
    }
)

_READERS: dict[str, Callable[[Any, Callable[[dict[str, Any]], Any]], Any]] = {
    "tuple": lambda content, look_up: tuple(read_value(item, look_up) for item in content),
    "slice": _read_slice,
    "dict": lambda content, look_up: {
        read_value(key, look_up): read_value(item, look_up) for key, item in content
    },
    "ellipsis": lambda content, look_up: Ellipsis,
    "dtype": lambda content, look_up: read_dtype(content),
    "float": lambda content, look_up: float(content),
    "array": _read_array,
}


def same_call(call: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Returns whether two calls compute the same; False may be said of calls that do, too."""
    return _bound(call) == _bound(other)


def _bound(call: Mapping[str, Any]) -> Any:
    """Returns a call with all arguments of its function by name."""
    key = call.get("function", "")
    if not key and not call.get("attributes"):
        key = _MODULES.get(call.get("module", ""), "")
    module, _, name = key.partition(":")
    function = getattr(sys.modules.get(module), name, None) if module.startswith(F.__name__) else None
    if function is None:
        return call
    try:
        bound = signature(inspect.unwrap(function)).bind(*call["args"], **call.get("kwargs", {}))
    except (TypeError, ValueError):
        return call
    bound.apply_defaults()
    return key, {name: _size(value) for name, value in bound.arguments.items()}


def _size(value: Any) -> Any:
    """Returns one number for equal sizes."""
    sizes = value.get("tuple") if isinstance(value, dict) else None
    return sizes[0] if sizes and sizes == [sizes[0]] * len(sizes) and type(sizes[0]) is int else value


def node_digest(node: MSCNode) -> str:
    """Returns a hash of what a node says of its op apart from its attribute ``call``.

    These are its type, its attributes, the number of its inputs and the types of its weights. A call is
    stored with it, so that an edit of the node that the call does not follow is noticed.
    """
    own = {k: v for k, v in node.attrs.items() if k not in _FOLLOWED and not k.startswith("qparams_")}
    said = [node.optype, sorted(own.items()), len(node.inputs), sorted(node.weights)]
    return hashlib.blake2b(json.dumps(said).encode(), digest_size=8).hexdigest()
