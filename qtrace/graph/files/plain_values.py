"""Rules for single values: tensors, devices, dtypes of quantization, signatures, and calls of plain types.

Each rule takes what a pickle hands over, checks it, and makes the value.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable
from inspect import FullArgSpec
from typing import Any

import megengine as mge
import numpy as np
from megengine import Parameter, Tensor
from megengine.core._imperative_rt.common import CompNode
from megengine.core._imperative_rt.ops import Copy
from megengine.core.tensor.dtype import QuantDtypeMeta, _builtin_quant_dtypes
from megengine.quantization.utils import LSQParams, QParams, QuantMode

from qtrace.graph.files.names import LoadBudget, RefusedError, shown
from qtrace.graph.files.nesting import weigh

__all__ = ["Devices", "DtypeMetas", "Rule", "only", "weight"]

Rule = Callable[..., Any]

_DEVICE = re.compile(r"[a-z]{3,12}[0-9]{0,9}(:[0-9]{1,9})?\Z")
_KEPT_DEVICE = re.compile(r"[a-z]{3,12}[0-9]{0,3}(:[0-9]{1,3})?\Z")
_MANY_METAS = 1000
_TENSOR = 64  # bytes that a tensor takes besides its data


class Devices:
    """The devices that a file names: all are the default one, unless the caller wants those of the file.

    A device is more than a name: MegEngine starts the threads of one that it has not seen yet.

    Args:
        keep: whether to use the devices of the file.
    """

    def __init__(self, keep: bool) -> None:
        self._keep = keep

    def name(self, name: Any) -> str:
        """The device to put a tensor on.

        Raises:
            RefusedError: when ``name`` is no name of a device.
        """
        if type(name) is not str or not (_KEPT_DEVICE if self._keep else _DEVICE).match(name):
            raise RefusedError(f"it names the device {shown(name)}")
        return name if self._keep else mge.get_default_device()

    def comp_node(self, _: None, state: Any) -> CompNode:
        """The device that the state of a CompNode names; "invalid" is an op's that may run anywhere."""
        return Copy().comp_node if state == "invalid" else CompNode(self.name(state))


class DtypeMetas:
    """One object for equal dtype metas, MegEngine's own where there is one: it compares with ``is``."""

    def __init__(self) -> None:
        self._known: dict[tuple, QuantDtypeMeta] = {tuple(m): m for m in _builtin_quant_dtypes.values()}

    def make(self, *fields: Any) -> QuantDtypeMeta:
        """The meta with these fields.

        Raises:
            RefusedError: when they are not what MegEngine writes.
        """
        names, bounds = fields[:3:2], fields[3:5]
        known = len(fields) == 6 and isinstance(fields[1], (str, type(None))) and type(fields[5]) is bool
        if not known or not all(type(n) is str and n for n in names) or not all(_fits_64(b) for b in bounds):
            raise RefusedError(f"a quantized dtype in it is {shown(fields)}")
        if len(self._known) > _MANY_METAS:
            raise RefusedError(f"it has more than {_MANY_METAS} quantized dtypes")
        meta = QuantDtypeMeta(*fields)
        return self._known.setdefault(tuple(meta), meta)


def _fits_64(value: Any) -> bool:
    return type(value) is int and -(2**63) <= value < 2**63


def only(make: Rule, *kinds: type) -> Rule:
    """A call of ``make`` with arguments of exactly these types."""

    def rule(*args: Any) -> Any:
        if tuple(map(type, args)) != kinds:
            raise RefusedError(f"it calls {getattr(make, '__name__', make)} with {shown(args)}")
        return make(*args)

    return rule


def singleton_type(*args: Any) -> type:
    """The type of None or of Ellipsis, which have no name."""
    if len(args) != 1 or not (args[0] is None or args[0] is Ellipsis):
        raise RefusedError("it calls builtins:type with other arguments than None or Ellipsis")
    return type(args[0])


def make_slice(*args: Any) -> slice:
    """A slice of plain numbers; MegEngine's own slices of nodes are taken apart in files."""
    if len(args) != 3 or not all(
        part is None or type(part) in (int, bool) or isinstance(part, np.integer) for part in args
    ):
        raise RefusedError(f"it makes a slice of {shown(args)}")
    return slice(*args)


def make_defaultdict(*args: Any) -> defaultdict:
    """An empty defaultdict that makes plain things."""
    if len(args) > 1 or not all(
        any(factory is known for known in (None, list, dict, int)) for factory in args
    ):
        raise RefusedError("it calls collections:defaultdict with a factory of its own")
    return defaultdict(*args)


def weight(state: Any) -> int:
    """Returns the cost of copying a state or arguments: entries of a dict, bytes of data."""
    if type(state) is dict:
        return len(state)
    items = state if type(state) is tuple else ()
    return sum(len(item) for item in items if type(item) in (bytes, bytearray))


def tensor(cls: type[Tensor], budget: LoadBudget, devices: Devices) -> Rule:
    """Makes a tensor of a class from data, dtype and device."""

    def rule(*args: Any) -> Tensor:
        shape = len(args) == 3 and type(args[0]) is np.ndarray and isinstance(args[1], np.dtype)
        if not shape or type(args[2]) is not str:
            raise RefusedError(f"it makes a {cls.__name__} from something that is not data, dtype and device")
        budget.take(_TENSOR + args[0].size * max(args[0].itemsize, args[1].itemsize))
        device = devices.name(args[2])
        return cls.__new__(cls, args[0], args[1], device)  # type: ignore[call-overload]

    return rule


def tensor_state(tensor: Tensor, state: Any) -> None:
    """Gives a tensor its quantization parameters."""
    if type(state) is not dict or not {"qparams"}.issuperset(state):
        raise RefusedError(f"it gives a {type(tensor).__name__} a state that MegEngine never writes")
    if type(state.get("qparams")) not in (QParams, LSQParams, type(None)):
        raise RefusedError(f"it gives a {type(tensor).__name__} the qparams {shown(state['qparams'])}")
    tensor.__setstate__(dict(state))


def qparams_state(params: QParams, state: Any) -> None:
    """Gives MegEngine's quantization parameters their parts."""
    slots = state[1] if type(state) is tuple and len(state) == 2 and state[0] is None else None
    names = {name for cls in type(params).__mro__ for name in getattr(cls, "__slots__", ())}
    if type(slots) is not dict or not names.issuperset(slots):
        raise RefusedError("it gives quantization parameters a state that MegEngine never writes")
    for name in names:
        value = slots.get(name)
        kinds = {"mode": (QuantMode,), "dtype_meta": (QuantDtypeMeta,)}.get(
            name, (Tensor, Parameter, int, float, np.float32, np.float64)
        )
        if value is not None and type(value) not in kinds:
            raise RefusedError(f"it gives quantization parameters the {name} {shown(value)}")
        setattr(params, name, value)


def argspec(budget: LoadBudget) -> Rule:
    """Makes the signature of a traced module's forward."""

    def rule(*args: Any) -> FullArgSpec:
        if len(args) != 7:
            raise RefusedError("a signature in it is not a FullArgSpec")
        weigh(args, budget)
        positional, varargs, varkw, defaults, named, named_defaults, annotations = args
        lists = type(positional) is list and type(named) is list
        texts = (
            [*positional, *named, *(name for name in (varargs, varkw) if name is not None)]
            if lists
            else [None]
        )
        plain = type(defaults) in (tuple, type(None)) and type(named_defaults) in (dict, type(None))
        if not plain or type(annotations) is not dict or not all(type(name) is str for name in texts):
            raise RefusedError("a signature in it is not one of a function")
        return FullArgSpec(*args)

    return rule
