"""The argument structures of a file, ``TreeDef`` and ``LeafDef``: checked when they get their state.

A tree is built from the leaves up. Its children are whole when it gets its state, and nothing can change
them afterwards. So a tree has an end, a bounded depth and a known size. MegEngine hashes, compares and
unflattens trees by recursion, wherever a call is looked up.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from inspect import FullArgSpec
from typing import Any

import numpy as np
from megengine import Parameter, Tensor
from megengine.core._imperative_rt import OpDef
from megengine.core._imperative_rt.common import CompNode
from megengine.core._wrap import Device
from megengine.core.tensor.dtype import QuantDtypeMeta
from megengine.distributed import Group
from megengine.module import Module
from megengine.quantization.utils import LSQParams, QParams, QuantMode
from megengine.traced_module.expr import Apply, CallFunction, CallMethod, Constant, GetAttr, Input
from megengine.traced_module.node import ModuleNode, TensorNode
from megengine.traced_module.pytree import SUPPORTED_TYPE, ArgsIndex, LeafDef, TreeDef, _leaf_type

from qtrace.graph.files.names import DEPTH, AllowList, LoadBudget, RefusedError, shown

__all__ = []

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
_PRINTED_ITEMS = 1000  # numpy prints no more than these of an array


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
        return len(kinds) + (min(value.size, _PRINTED_ITEMS) if isinstance(value, np.ndarray) else 0)

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
