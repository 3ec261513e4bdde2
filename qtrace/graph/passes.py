"""Passes over a graph with a contract: dead code, common subexpressions, constants."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from megengine import Parameter, Tensor
from megengine.core._imperative_rt.core2 import Tensor as RawTensor
from megengine.module import Module
from megengine.traced_module import TracedModule
from megengine.traced_module.expr import Apply, CallFunction, CallMethod, Constant, Expr, GetAttr
from megengine.traced_module.node import ModuleNode, Node, TensorNode

from qtrace.errors import GraphError
from qtrace.gradients import plain
from qtrace.graph.edit import GraphEditor
from qtrace.graph.flatten import set_parameter
from qtrace.graph.interpreter import evaluate_fixed, fixed_nodes
from qtrace.graph.lint import lint
from qtrace.graph.operations import canonical_call
from qtrace.graph.stepping import finish
from qtrace.graph.walk import (
    called_graph,
    exprs,
    freeze,
    get_module,
    op_label,
    owner,
    unused_name,
    updates_inputs,
    writes_into,
)

# Exprs that give the same result for the same inputs, and change nothing.

_RANDOM = (
    "uniform",
    "normal",
    "gamma",
    "beta",
    "poisson",
    "permutation",
    "shuffle",
    "dropout",
    "multinomial",
)


def is_pure(expr: Expr) -> bool:
    """Returns whether ``expr`` depends only on its inputs and acts on nothing but its outputs.

    A function or a module of a class of the user's own is not known to be pure, nor is a module in training.
    A method that writes into its tensor is not.
    """
    if isinstance(expr, (GetAttr, Constant)):
        return True
    if expr._disable_remove or not expr.outputs or updates_inputs(expr) or _is_random(expr):
        return False
    module = owner(expr)
    if module is not None:
        return _is_plain(module)
    if isinstance(expr, CallMethod):
        return not writes_into(expr)
    if isinstance(expr, CallFunction):
        return str(plain(expr.func).__module__).startswith(("megengine", "qtrace"))
    return isinstance(expr, Apply)


def find_written(order: list[Expr]) -> set[Node]:
    """Returns the nodes whose tensors a later expr writes into."""
    return {e.inputs[0] for e in order if isinstance(e, CallMethod) and writes_into(e)}


def _is_random(expr: Expr) -> bool:
    label = op_label(expr).rpartition(".")[2].lower()
    return label.endswith("rng") or label in _RANDOM


def _is_plain(module: Module) -> bool:
    """Returns whether ``module`` is one of MegEngine's own in evaluation."""
    return type(module).__module__.startswith("megengine.module") and not module.training


# The contract of a pass over a graph: what it requires, what it ensures, what it reports.


@dataclass(frozen=True)
class Condition:
    """A property of a graph that a pass requires or ensures.

    Attributes:
        name: the property as a clause about the graph, such as "is flat".
        find: returns what contradicts the property, one line each; empty where it holds.
        cure: what makes the property hold.
    """

    name: str
    find: Callable[[TracedModule], list[str]]
    cure: str = ""


@dataclass(frozen=True)
class PassReport:
    """The changes of a pass to the module that it edited in place.

    Attributes:
        name: the name of the pass.
        changed: one line for each change.
        left: one line with the reason for each candidate that was left.
    """

    name: str
    changed: tuple[str, ...] = ()
    left: tuple[str, ...] = ()


class GraphPass(abc.ABC):
    """Abstract base of passes: `run` checks the contract around `change`, in time linear in the graph.

    Attributes:
        requires: the properties without which `run` refuses a graph, and changes nothing.
        ensures: the properties that the graph has afterwards, besides those required.
    """

    requires: ClassVar[tuple[Condition, ...]] = ()
    ensures: ClassVar[tuple[Condition, ...]] = ()

    @property
    def name(self) -> str:
        """Name of the pass in reports."""
        return type(self).__name__

    @abc.abstractmethod
    def change(self, traced: TracedModule) -> PassReport:
        """Changes ``traced``, which has the required properties, in place."""

    def run(self, traced: TracedModule) -> PassReport:
        """Runs the pass on ``traced`` in place.

        Raises:
            GraphError: when ``traced`` lacks a required property, or the pass breaks its contract.
        """
        for condition in self.requires:
            contradictions = condition.find(traced)
            if contradictions:
                cure = f": {condition.cure}" if condition.cure else "."
                raise GraphError(
                    f"{self.name} takes a graph that {condition.name}, but {contradictions[0]}{cure}"
                )
        report = self.change(traced)
        for condition in dict.fromkeys((*self.requires, *self.ensures)):
            contradictions = condition.find(traced)
            if contradictions:
                raise GraphError(
                    f"{self.name} broke its contract: afterwards a graph {condition.name}, but "
                    f"{contradictions[0]}; please report it."
                )
        return report


def run_passes(traced: TracedModule, passes: Sequence[GraphPass]) -> list[PassReport]:
    """Runs passes in order on ``traced`` in place; returns their reports.

    Raises:
        GraphError: when the graph lacks a property that a pass requires.
    """
    return [each.run(traced) for each in passes]


def _nested(traced: TracedModule) -> list[str]:
    if not isinstance(traced, TracedModule):
        return [f"a {type(traced).__name__} was given"]
    calls = (e for e in exprs(traced) if called_graph(e) is not None)
    return [f"{e.outputs[0].name if e.outputs else e} calls a graph of its own" for e in calls]


FLAT = Condition("is flat", _nested, "use qtrace.graph.flatten(traced).")
SOUND = Condition("lint finds sound", lambda traced: [str(problem) for problem in lint(traced)])


# Passes that leave out what a graph computes in vain: unread results, equal results, constants.


class RemoveDeadCode(GraphPass):
    """Removes exprs that no output depends on, and parameters, buffers and modules that no expr reads.

    An expr without outputs stays, and so does one whose removal MegEngine forbids: it may act on a module.
    """

    requires = (FLAT,)

    def change(self, traced: TracedModule) -> PassReport:
        """Removes all dead code at once."""
        dead = _dead_exprs(traced)
        changed = [f"{_name(e)}: nothing uses it" for e in dead if not isinstance(e, GetAttr)]
        finish(traced)
        for module, name, path in _unread_attributes(traced):
            delattr(module, name)
            changed.append(f"{path}: no expr reads it")
        return PassReport(self.name, tuple(changed))


def _dead_exprs(traced: TracedModule) -> list[Expr]:
    """Returns the exprs that no output depends on, in order."""
    live = set(traced.graph.outputs)
    dead: list[Expr] = []
    for expr in reversed(exprs(traced)):
        if expr._disable_remove or not expr.outputs or any(node in live for node in expr.outputs):
            live.update(expr.inputs)
        else:
            dead.append(expr)
    return dead[::-1]


def _unread_attributes(traced: TracedModule) -> list[tuple[Module, str, str]]:
    """Returns module, name and path of each tensor and submodule of which no expr reads anything.

    A tensor that is read under another name stays: the names of one tensor belong together.
    """
    read = {str(e.name) for e in exprs(traced) if isinstance(e, GetAttr)}
    parents = {path.rsplit(".", i)[0] for path in read for i in range(1, path.count(".") + 1)}
    values = {id(get_module(traced, path)) for path in read}
    unread: list[tuple[Module, str, str]] = []
    stack: list[tuple[str, Module]] = [("", traced)]
    while stack:
        prefix, module = stack.pop()
        for name, value in sorted(vars(module).items()):
            path = f"{prefix}{name}"
            if not isinstance(value, (Module, Tensor)) or path in read or id(value) in values:
                continue
            if path in parents:
                stack.append((f"{path}.", value))
            else:
                unread.append((module, name, path))
    return unread


def _name(expr: Expr) -> str:
    return ", ".join(str(node.name) for node in expr.outputs)


def _find_unread(traced: TracedModule) -> list[str]:
    dead = [f"nothing uses {_name(e)}" for e in _dead_exprs(traced)]
    return dead + [f"no expr reads {path}" for *_, path in _unread_attributes(traced)]


NO_DEAD_CODE = Condition("has no dead code", _find_unread, "run RemoveDeadCode first.")
RemoveDeadCode.ensures = (NO_DEAD_CODE, SOUND)


class MergeCommonSubexpressions(GraphPass):
    """Lets the readers of equal results read the first of them, in whichever spelling the calls are.

    Two calls are equal if they call one operation with equal constants on the same tensors. Random ops,
    modules in training, modules of classes of the user's own, and tensors that are written into are left.
    """

    requires = (FLAT, NO_DEAD_CODE)

    def change(self, traced: TracedModule) -> PassReport:
        """Merges all equal exprs in one sweep in graph order."""
        duplicates = _duplicates(traced)
        changed, left = [], []
        outputs = set(traced.graph.outputs)
        with GraphEditor(traced) as editor:
            for expr, first in duplicates:
                if any(node in outputs for node in expr.outputs) and any(n in outputs for n in first.outputs):
                    left.append(f"{_name(expr)}: it is an output beside {_name(first)}, which is equal")
                    continue
                for old, new in zip(expr.outputs, first.outputs, strict=True):
                    editor.replace_uses(old, new)
                editor.remove(expr)
                if not isinstance(expr, (GetAttr, Constant)):
                    changed.append(f"{_name(expr)}: equal to {_name(first)}")
        return PassReport(self.name, tuple(changed), tuple(left))


def _duplicates(traced: TracedModule) -> list[tuple[Expr, Expr]]:
    """Returns each expr that an earlier one equals, and that one, in graph order."""
    order = exprs(traced)
    written = find_written(order)
    same: dict[Node, Node] = {}
    firsts: dict[Any, Expr] = {}
    duplicates = []
    for expr in order:
        if not is_pure(expr) or any(node in written for node in (*expr.inputs, *expr.outputs)):
            continue
        key = _key(expr, same)
        first = firsts.setdefault(key, expr) if key is not None else expr
        if first is not expr:
            duplicates.append((expr, first))
            same.update(zip(expr.outputs, first.outputs, strict=True))
    return duplicates


def _key(expr: Expr, same: dict[Node, Node]) -> Any:
    """Returns a key that is equal for equal exprs; None for an expr that is compared with no other."""
    if isinstance(expr, GetAttr):
        return "getattr", same.get(expr.inputs[0], expr.inputs[0]), str(expr.name)
    if isinstance(expr, Constant):
        return ("constant", freeze(expr.value, id)) if isinstance(expr.value, RawTensor) else None
    call = canonical_call(expr)

    def first(node: Node) -> int:
        return id(same.get(node, node))

    try:
        if call is None:
            return ("module", id(owner(expr)), freeze((expr.args[1:], expr.kwargs), first))
        values = [freeze(value, first) for value in call.values.values()]
        if call.op.commutative and len(values) == 2:
            values.sort(key=repr)
        return call.op, tuple(call.values), tuple(values), len(expr.outputs)
    except TypeError:  # an argument of a type without a value to compare
        return None


def _find_duplicate(traced: TracedModule) -> list[str]:
    outputs = set(traced.graph.outputs)
    return [
        f"{_name(expr)} equals {_name(first)}"
        for expr, first in _duplicates(traced)
        if not all(any(node in outputs for node in e.outputs) for e in (expr, first))
    ]


NO_COMMON_SUBEXPRESSIONS = Condition("has no common subexpressions", _find_duplicate)
MergeCommonSubexpressions.ensures = (NO_DEAD_CODE, NO_COMMON_SUBEXPRESSIONS, SOUND)


class FoldConstants(GraphPass):
    """Replaces what is computed only from constants and buffers by a buffer that holds the result.

    What depends on a Parameter stays, as the Parameter could not be trained any more, unless ``parameters``
    is set. What is computed from the shapes of inputs stays: it may differ in the next call.

    Args:
        parameters: whether to take Parameters for constants, too.
    """

    requires = (FLAT, NO_DEAD_CODE)

    def __init__(self, parameters: bool = False) -> None:
        self.parameters = parameters

    def change(self, traced: TracedModule) -> PassReport:
        """Stores the constant results that the rest of the graph reads, and drops their exprs."""
        fixed = _foldable(traced, self.parameters)
        folded = _results(traced, fixed)
        values = evaluate_fixed(traced, folded)
        paths: dict[TensorNode, str] = {}
        changed = []
        for node in folded:
            path = unused_name(f"folded_{node.name}", lambda name: hasattr(traced, name))
            set_parameter(traced, path, Tensor(values[node].numpy()))
            paths[node] = path
            changed.append(f"{node.name}: stored as {path}")
        with GraphEditor(traced) as editor:
            for node, path in paths.items():
                editor.put_in_place(editor.get_attr(path), node)
        RemoveDeadCode().run(traced)
        return PassReport(self.name, tuple(changed))


def _foldable(traced: TracedModule, parameters: bool) -> set[Node]:
    """Returns the nodes that are computed only from constants, and these themselves."""
    written = find_written(exprs(traced))

    def varies(expr: Expr) -> bool:
        if not is_pure(expr) or any(node in written for node in expr.outputs):
            return True
        if isinstance(expr, GetAttr) and not parameters and isinstance(expr.outputs[0], TensorNode):
            return isinstance(get_module(traced, expr.name), Parameter)
        if isinstance(expr, GetAttr) and isinstance(expr.outputs[0], ModuleNode) and not parameters:
            return any(True for _ in get_module(traced, expr.name).parameters())
        return False

    return fixed_nodes(traced, without=varies)


def _results(traced: TracedModule, fixed: set[Node]) -> list[TensorNode]:
    """Returns the computed nodes of ``fixed`` that an expr outside of it reads, or the caller."""
    outputs = set(traced.graph.outputs)
    return [
        node
        for expr in exprs(traced)
        if not isinstance(expr, (GetAttr, Constant))
        for node in expr.outputs
        if node in fixed
        and (node in outputs or any(u.outputs and u.outputs[0] not in fixed for u in node.users))
    ]


def _find_foldable(traced: TracedModule) -> list[str]:
    return [f"{n.name} is computed from constants" for n in _results(traced, _foldable(traced, False))]


CONSTANTS_FOLDED = Condition("computes nothing from constants", _find_foldable)
FoldConstants.ensures = (NO_DEAD_CODE, CONSTANTS_FOLDED, SOUND)
