"""Rules for single values: tensors, devices, dtypes of quantization, signatures, and calls of plain types.

A tree is built from the leaves up. Its children are whole when it gets its state, and nothing can change
them afterwards. So a tree has an end, a bounded depth and a known size. MegEngine hashes, compares and
unflattens trees by recursion, wherever a call is looked up.

Each rule takes what a pickle hands over, checks it, and makes the value.
"""

from __future__ import annotations

import math
import re
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from functools import lru_cache
from inspect import FullArgSpec
from typing import Any

import megengine as mge
import numpy as np
from megengine import Parameter, Tensor
from megengine.core._imperative_rt import OpDef, pybfloat16, pyintb1, pyintb2, pyintb4
from megengine.core._imperative_rt.common import CompNode
from megengine.core._imperative_rt.ops import Copy
from megengine.core._wrap import Device
from megengine.core.tensor.dtype import QuantDtypeMeta, _builtin_quant_dtypes, bfloat16, intb1, intb2, intb4
from megengine.distributed import Group
from megengine.module import Module
from megengine.quantization.utils import LSQParams, QParams, QuantMode
from megengine.traced_module.expr import Apply, CallFunction, CallMethod, Constant, GetAttr, Input
from megengine.traced_module.node import ModuleNode, TensorNode
from megengine.traced_module.pytree import SUPPORTED_TYPE, ArgsIndex, LeafDef, TreeDef, _leaf_type

from qtrace.graph.files.allowlist import DEPTH, OBJECT_BYTES, AllowList, LoadBudget, RefusedError, shown

# The argument structures of a file, ``TreeDef`` and ``LeafDef``: checked when they get their state.

EXPRS = (Apply, CallFunction, CallMethod, Constant, GetAttr, Input)
NODES = (ModuleNode, TensorNode)
DICTS = (dict, OrderedDict, defaultdict)
TUPLES = (tuple, FullArgSpec, QuantDtypeMeta)
CONTAINERS = frozenset((*DICTS, *TUPLES, list, set, frozenset, slice))

_DEEP = f"it nests data more than {DEPTH} levels deep"
# Their hashes differ in every process (str, bytes), are addresses, or are equal for a handful of values at
# most: nobody can choose many that are equal.
_SAFE_KEYS = frozenset((str, bytes, bool, float, type(None), type, Tensor, Parameter, *EXPRS, *NODES))


def weigh(value: Any, budget: LoadBudget, leaf: Callable[[Any], None] | None = None) -> None:
    """Goes through nested containers, each occurrence of a part anew.

    Args:
        value: anything.
        budget: pays a step for each part.
        leaf: called with each part that is no container.

    Raises:
        RefusedError: when it is nested too deeply, or within itself, or has too many parts.
    """
    todo = [(value, 0)]
    while todo:
        item, depth = todo.pop()
        kind = type(item)
        if kind not in CONTAINERS:
            if leaf is not None:
                leaf(item)
            continue
        if depth >= DEPTH:
            raise RefusedError(_DEEP)
        parts = _parts(item, kind)
        budget.work(1 + len(parts))
        todo.extend((part, depth + 1) for part in parts)


def _parts(item: Any, kind: type) -> list[Any]:
    if kind is slice:
        return [item.start, item.stop, item.step]
    return [*item.keys(), *item.values()] if kind in DICTS else list(item)


class Keys:
    """Checks values that become keys of a dict or members of a set.

    Args:
        budget: pays for hashing, and for comparing keys whose hashes are equal.
        tree_size: the number of parts of a TreeDef that has its state.
    """

    def __init__(self, budget: LoadBudget, tree_size: Callable[[TreeDef], int]) -> None:
        self._budget, self._tree_size = budget, tree_size
        self._equal: Counter[tuple[int, int]] = Counter()

    def check(self, key: Any, container: Any) -> None:
        """Refuses a key that could not be looked up in reasonable time.

        Args:
            key: the value to add to ``container``.
            container: a dict or a set.

        Raises:
            RefusedError: naming the reason.
        """
        kind = type(key)
        if kind in _SAFE_KEYS:
            return
        if kind is int:
            if not -(2**63) <= key < 2**64:  # the hashes of larger ones repeat
                raise RefusedError("it uses an integer of more than 64 bits as a key")
            return
        size = self._size(key)
        self._budget.work(size)
        place = (id(container), hash(key))
        self._budget.work(size * self._equal[place])
        self._equal[place] += 1

    def _size(self, key: Any) -> int:
        """The number of parts that hashing ``key`` goes through."""
        size, todo = 0, [(key, 0)]
        while todo:
            item, depth = todo.pop()
            if depth > DEPTH:
                raise RefusedError(f"it uses a key that is nested too deeply: {_DEEP}")
            size += 1
            if isinstance(item, (tuple, frozenset)):
                self._budget.work(1 + len(item))
                todo.extend((part, depth + 1) for part in item)
            elif type(item) in (TreeDef, LeafDef):
                size += self._tree_size(item)
        return size


_PLAIN = (bool, int, float, str, bytes, bytearray, type(None), type(Ellipsis), np.ndarray, type)
_OBJECTS = (np.generic, np.dtype, CompNode, QuantMode, OpDef, type)
_SLOTS = frozenset((*QParams.__slots__, *LSQParams.__slots__))


class Trees:
    """The trees of one file.

    Args:
        names: tells which classes the caller has listed: they may be leaves.
        budget: pays for the parts of the trees.
    """

    def __init__(self, names: AllowList, budget: LoadBudget) -> None:
        self._names, self._budget = names, budget
        self._whole: dict[int, tuple[TreeDef, int, int]] = {}  # id -> tree, number of parts, depth

    def size(self, tree: TreeDef) -> int:
        """The number of parts of a tree that has its state.

        Raises:
            RefusedError: when it lacks one.
        """
        return self._look_up(tree)[1]

    def _look_up(self, tree: Any) -> tuple[TreeDef, int, int]:
        known = self._whole.get(id(tree))
        if known is None:
            raise RefusedError(f"it uses {shown(tree)} as an argument structure before that is whole")
        return known

    def build(self, tree: TreeDef, state: dict[str, Any]) -> None:
        """Gives a tree its state.

        Raises:
            RefusedError: when it is no structure that MegEngine writes.
        """
        if id(tree) in self._whole:
            raise RefusedError(f"it changes a {type(tree).__name__} that has its state already")
        children = state.get("children_defs")
        if type(children) is not list:
            raise RefusedError(f"a {type(tree).__name__} in it has {shown(children)} for children")
        parts = [self._look_up(child) for child in children]
        size = 1 + len(children) + sum(part[1] for part in parts)
        depth = 1 + max((part[2] for part in parts), default=0)
        if depth > DEPTH:
            raise RefusedError(f"it nests argument structures more than {DEPTH} levels deep")
        self._budget.work(size)
        tree.__dict__.update(state, children_defs=list(children))
        if type(tree) is LeafDef:
            size += self._check_leaf(tree)
        else:
            self._check_tree(tree)
        self._whole[id(tree)] = (tree, size, depth)

    def _check_leaf(self, leaf: LeafDef) -> int:
        leaf.__dict__.setdefault("const_val", None)
        kinds, value = leaf.__dict__.get("type"), leaf.const_val
        if type(kinds) is not tuple or not kinds or not all(isinstance(kind, type) for kind in kinds):
            raise RefusedError(f"a LeafDef in it has the types {shown(kinds)}")
        if leaf.children_defs or leaf.__dict__.get("num_leaves") != 1:
            raise RefusedError("a LeafDef in it is not one leaf")
        if leaf.__dict__.get("aux_data") is not None:
            raise RefusedError("a LeafDef in it has data of a container")
        self.check_constant(value)
        if isinstance(value, np.dtype):
            leaf.type = _leaf_type(value)  # the class of a dtype depends on numpy's version
        return len(kinds) + (
            min(value.size, np.get_printoptions()["threshold"]) if isinstance(value, np.ndarray) else 0
        )

    def _check_tree(self, tree: TreeDef) -> None:
        kind, aux, children = tree.__dict__.get("type"), tree.__dict__.get("aux_data"), tree.children_defs
        if not isinstance(kind, type) or kind not in SUPPORTED_TYPE:
            raise RefusedError(f"an argument structure in it has the type {shown(kind)}")
        leaves = sum(child.num_leaves for child in children)
        if type(tree.__dict__.get("num_leaves")) is not int or tree.num_leaves != leaves:
            says = shown(tree.__dict__.get("num_leaves"))
            raise RefusedError(f"an argument structure in it says {says} leaves, not {leaves}")
        weigh(aux, self._budget, self.check_constant)
        named = kind in DICTS or kind in (QParams, LSQParams)
        if named and (type(aux) is not tuple or len(aux) != len(children)):
            raise RefusedError(f"a {kind.__name__} among the arguments in it has other names than values")
        if (kind in (list, tuple, slice) and aux is not None) or (kind is slice and len(children) != 3):
            raise RefusedError(f"a {kind.__name__} among the arguments in it is not what MegEngine writes")
        if kind in (QParams, LSQParams) and not _SLOTS.issuperset(aux):
            raise RefusedError("quantization parameters among the arguments in it have unknown parts")
        self._budget.work(len(children))

    def check_constant(self, value: Any) -> None:
        """Refuses what cannot be a constant argument of a call, containers included.

        Raises:
            RefusedError: naming its type.
        """
        kind = type(value)
        if kind in _PLAIN or isinstance(value, _OBJECTS):
            return
        if kind is ArgsIndex:
            ok = type(value.__dict__.get("index")) is int and type(value.__dict__.get("name")) is str
        elif kind is Device:
            name = value.__dict__.get("_logical_name")
            ok = type(value.__dict__.get("_cn")) is CompNode and (name is None or type(name) is str)
        elif kind is Group:
            weigh(list(value.__dict__.values()), self._budget, self._check_number)
            ok = "proc_ranks" in value.__dict__
        elif isinstance(value, tuple) and hasattr(value, "_fields"):  # FullArgSpec, QuantDtypeMeta
            weigh(tuple(value), self._budget, self.check_constant)
            ok = True
        else:
            ok = f"{kind.__module__}:{kind.__qualname__}" in self._names.extra and not isinstance(
                value, Module
            )
        if not ok:
            raise RefusedError(f"a constant argument in it is {shown(value)}")

    def _check_number(self, value: Any) -> None:
        if type(value) not in (int, bool, type(None)):
            raise RefusedError(f"a group of processes in it has {shown(value)}")


CODES = frozenset("b1 i1 i2 i4 i8 u1 u2 u4 u8 f2 f4 f8 c8 c16".split())  # noqa: SIM905 (shorter than a list)
_LARGEST_SCALE = float(np.finfo(np.float32).max)
_LARGEST_DIM = int(np.iinfo(np.int32).max)
TEXT = re.compile(r"[SU][0-9]{1,4}\Z")
OWN = {pybfloat16: bfloat16, pyintb1: intb1, pyintb2: intb2, pyintb4: intb4}


class Pending:
    """An object that the pickle has begun and that exists only once it has its state."""

    __slots__ = ("_make", "_start")

    def __init__(self, make: Callable[[Any, Any], Any], start: Any = None) -> None:
        self._make, self._start = make, start

    def finish(self, state: Any) -> Any:
        """The object with this state."""
        return self._make(self._start, state)


def start_dtype(*args: Any) -> Pending:
    """Starts the dtype of ``numpy.dtype(code, False, True)`` in a pickle, whose byte order follows later."""
    code = args[0] if len(args) == 3 and all(type(flag) is bool for flag in args[1:]) else None
    if type(code) is str and (code in CODES or TEXT.match(code)):
        return Pending(make_dtype, np.dtype(code))
    if isinstance(code, type) and code in OWN:
        return Pending(make_dtype, OWN[code])
    raise RefusedError(f"it holds data of the numpy dtype {shown(code)}, which is neither a number nor text")


def make_dtype(start: np.dtype, state: Any) -> np.dtype:
    """The dtype with byte order, and with the scale and zero point of a quantized one."""
    known = type(state) is tuple and len(state) in (8, 9) and state[0] in (3, 4) and state[2:5] == (None,) * 3
    if not known or state[1] not in ("<", ">", "|", "="):
        raise RefusedError(f"a numpy dtype in it has the state {shown(state)}")
    if len(state) == 9 and state[8]:
        return np.dtype(start.str, metadata=_metadata(state[8]))
    return start.newbyteorder(">") if state[1] == ">" and start.itemsize > 1 else start


def _metadata(value: Any) -> dict[str, dict[str, Any]]:
    """MegEngine's note on a quantized dtype, rebuilt so that nothing else comes along."""
    note = value.get("mgb_dtype") if type(value) is dict and len(value) == 1 else None
    if type(note) is not dict or not {"name", "scale"} <= set(note) <= {"name", "scale", "zero_point"}:
        raise RefusedError(f"a numpy dtype in it has the metadata {shown(value)}")
    scale, zero_point = note["scale"], note.get("zero_point", 0)
    numbers = type(scale) in (int, float) and 0 <= scale <= _LARGEST_SCALE and type(zero_point) is int
    if type(note["name"]) is not str or not numbers or not 0 <= zero_point < 2**16:
        raise RefusedError(f"a numpy dtype in it has the metadata {shown(value)}")
    return {"mgb_dtype": dict(note)}


def dtype_class(*args: Any) -> type:
    """The class of a dtype without a name of its own: MegEngine's bfloat16 and low-bit integers."""
    if len(args) != 1 or not isinstance(args[0], type) or args[0] not in OWN:
        raise RefusedError("it asks for the class of a numpy dtype that is not MegEngine's")
    return type(OWN[args[0]])


def start_array(*args: Any) -> Pending:
    """Reads the begin of a pickled array: an empty array of class ndarray."""
    if len(args) != 3 or args[0] is not np.ndarray or type(args[2]) is not bytes:
        raise RefusedError("it begins a numpy array that is no plain ndarray")
    return Pending(make_array)


def make_array(_: None, state: Any) -> np.ndarray:
    """Builds the array of the pickled ``state``: version, shape, dtype, order and bytes."""
    if type(state) is not tuple or len(state) != 5 or state[0] != 1 or type(state[4]) is not bytes:
        raise RefusedError("a numpy array in it has a state that numpy never writes")
    _version, shape, dtype, fortran, raw = state
    _check_array(shape, dtype, len(raw))
    array: np.ndarray = np.ndarray((0,), dtype)
    array.__setstate__((1, shape, dtype, bool(fortran), raw))
    return array


def from_buffer(*args: Any) -> np.ndarray:
    """The array that protocol 5 writes as bytes, dtype, shape and order."""
    if len(args) != 4 or type(args[0]) not in (bytes, bytearray) or args[3] not in ("C", "F"):
        raise RefusedError("a numpy array in it is not bytes, dtype, shape and order")
    raw, dtype, shape, order = args
    _check_array(shape, dtype, len(raw))
    return np.frombuffer(raw, dtype).reshape(shape, order=order)


def are_sizes(shape: Sequence[Any]) -> bool:
    """Returns whether a shape has only sizes that a tensor may have."""
    return all(type(n) is int and 0 <= n <= _LARGEST_DIM for n in shape)


def _check_array(shape: Any, dtype: Any, size: int) -> None:
    plain = type(shape) is tuple and len(shape) <= 32 and are_sizes(shape)
    if not plain or not isinstance(dtype, np.dtype) or dtype.hasobject:
        raise RefusedError("a numpy array in it lacks a plain shape and dtype")
    if math.prod(shape) * dtype.itemsize != size:
        raise RefusedError(f"a numpy array in it has shape {shape} and {size} bytes")


def make_scalar(*args: Any) -> Any:
    """A numpy scalar from its dtype and bytes."""
    ok = len(args) == 2 and isinstance(args[0], np.dtype) and not args[0].hasobject and type(args[1]) is bytes
    if not ok or len(args[1]) != args[0].itemsize:
        raise RefusedError("a numpy scalar in it is not dtype and bytes")
    try:
        return np.frombuffer(args[1], args[0])[0]
    except SystemError:  # numpy on text of no code point
        raise RefusedError("a numpy scalar in it is no text") from None


_STRATEGIES = frozenset(("HEURISTIC", "PROFILE", "REPRODUCIBLE", "OPTIMIZED"))
_ITEM = (int, bool, bool, bool, bool)  # of an indexing op: axis; whether begin, end, step and index are given
_SLICE_ITEM = (int, int, int, int)


@lru_cache(maxsize=256)
def _schema(cls: Callable[[], OpDef]) -> dict[str, Any]:
    """The state of an op as it is made, which has a value of the right type for each name."""
    return cls().__getstate__()


def op_state(cls: Any, state: dict[str, Any]) -> dict[str, Any]:
    """The part of a saved state that the op has, after each value was checked.

    Args:
        cls: the class of the op.
        state: name -> value, as the file has it.

    Raises:
        RefusedError: naming the op, the name and the value.
    """
    trial, known = cls(), {}
    for name, example in _schema(cls).items():
        if name not in state:
            continue  # an older version did not have it
        value = state[name]
        if not _fits(name, value, example):
            raise _refuse(cls, name, value)
        try:
            setattr(trial, name, value)  # here C++ says what it takes, in an exception
        except Exception:
            raise _refuse(cls, name, value) from None
        known[name] = value
    return known


def make_op(cls: type[OpDef], state: dict[str, Any]) -> OpDef:
    """The op with a state from `op_state`."""
    op = cls()
    op.__setstate__(state)
    return op


def _refuse(cls: type[OpDef], name: str, value: Any) -> RefusedError:
    return RefusedError(f"it gives the op {cls.__name__} the {name} {shown(value)}, which that does not take")


def _fits(name: str, value: Any, example: Any) -> bool:
    """Whether a value is of the type of the example."""
    kind = type(example)
    if name == "dtype":
        return value is None or isinstance(value, np.dtype)
    if name == "strategy":
        return (
            type(value) is tuple and bool(value) and all(type(n) is str and n in _STRATEGIES for n in value)
        )
    if name == "items":
        return _all_items(value, _ITEM)
    if name == "slice_items":
        return _all_items(value, _SLICE_ITEM)
    if kind is list:
        return type(value) in (list, tuple) and all(type(item) is int for item in value)
    if kind is float:
        return type(value) in (float, int)
    return type(value) is kind


def _all_items(value: Any, kinds: tuple[type, ...]) -> bool:
    return type(value) in (list, tuple) and all(
        type(item) is tuple and tuple(map(type, item)) == kinds for item in value
    )


Rule = Callable[..., Any]

_DEVICE = re.compile(r"[a-z]{3,12}[0-9]{0,9}(:[0-9]{1,9})?\Z")
_KEPT_DEVICE = re.compile(r"[a-z]{3,12}[0-9]{0,3}(:[0-9]{1,3})?\Z")


class Devices:
    """The devices that a file names: all are the default one, unless the caller wants the file's devices.

    A device is more than a name: MegEngine starts the threads of one that is new to it.

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
    """The type of None or of Ellipsis, which are nameless."""
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
        budget.take(OBJECT_BYTES + args[0].size * max(args[0].itemsize, args[1].itemsize))
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
