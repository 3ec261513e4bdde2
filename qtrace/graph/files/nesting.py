"""Bounds of nested data: containers within containers, and the keys of dicts.

Python hashes, compares, prints and copies nested data by recursion, without a limit of depth for tuples and
without noticing that a part occurs many times. So the depth of everything that a file brings is bounded, and
each occurrence of a shared part costs work of the file's budget.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from inspect import FullArgSpec
from typing import Any

from megengine import Parameter, Tensor
from megengine.core.tensor.dtype import QuantDtypeMeta
from megengine.traced_module.expr import Apply, CallFunction, CallMethod, Constant, GetAttr, Input
from megengine.traced_module.node import ModuleNode, TensorNode
from megengine.traced_module.pytree import LeafDef, TreeDef

from qtrace.graph.files.names import DEPTH, LoadBudget, RefusedError

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
