"""Lint: finds problems of a traced graph by reading it, without running the model.

A *fault* makes the graph compute something else or fail, or makes an export wrong. Examples: a node that is
read before it is produced, a wrong list of users, a recorded shape that is not true any more. A *leftover*
only costs
memory: a dead expr, a module that no expr reaches. A user's own model may have leftovers (a head that its
forward does not return), so ``check`` allows them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from megengine.core._imperative_rt.core2 import Tensor as RawTensor
from megengine.module import Module
from megengine.traced_module import TracedModule
from megengine.traced_module.expr import CallFunction, CallMethod, Constant, Expr, GetAttr, is_call_module
from megengine.traced_module.node import ModuleNode, Node, TensorNode
from megengine.traced_module.pytree import TreeDef, _is_leaf
from megengine.traced_module.traced_module import InternalGraph

from qtrace.errors import GraphError, shorten_list
from qtrace.graph.renewal import find_false_types
from qtrace.graph.walk import check_traced, op_label, signature
from qtrace.process import on_engine_thread

LEFTOVERS = frozenset({"dead-expr", "stale-module", "stale-tensor"})

_MISSING = object()


@dataclass(frozen=True)
class LintProblem:
    """One problem of a graph.

    Attributes:
        code: kind of the problem, such as ``used-before-produced``; the kinds in ``LEFTOVERS`` are harmless.
        where: the expr's or node's name, or the path of a module or tensor; in a nested graph
            ``module.path/name``.
        message: the problem as a clause.
    """

    code: str
    where: str
    message: str

    def __str__(self) -> str:
        return f"{self.where}: {self.message} [{self.code}]"


def check(traced: TracedModule, leftovers: bool = False, types: bool = True) -> None:
    """Raises an error if ``traced`` has a fault.

    Args:
        traced: a traced module, flat or hierarchical.
        leftovers: whether dead exprs and stale modules are errors too.
        types: whether to infer shapes and dtypes, and compare them with the recorded ones.

    Raises:
        GraphError: with the first few problems.
    """
    problems = [p for p in lint(traced, types) if leftovers or p.code not in LEFTOVERS]
    if not problems:
        return
    count = f"{len(problems)} problem{'s' if len(problems) > 1 else ''}"
    raise GraphError(f"the graph has {count}:\n  " + shorten_list(problems, "\n  "))


@on_engine_thread
def lint(traced: TracedModule, types: bool = True) -> list[LintProblem]:
    """Finds the problems of the graph of ``traced``, of the graphs it calls, and leftovers in the tree.

    Args:
        traced: a traced module, flat or hierarchical; it is not changed and not run.
        types: whether to infer shapes and dtypes, and compare them with the recorded ones. A graph with
            another fault is not inferred.

    Returns:
        The problems in graph order; an empty list when there are none.

    Raises:
        GraphError: when ``traced`` is not a traced module.
    """
    check_traced(traced, "lint takes")
    reached: set[int] = set()
    visited: set[int] = set()
    problems: list[LintProblem] = []
    pending = [(traced, "", arg_def) for arg_def in traced.argdef_graph_map]
    while pending:
        module, path, arg_def = pending.pop()
        graph = module.argdef_graph_map[arg_def]
        if id(graph) not in visited:
            visited.add(id(graph))
            linter = _GraphLinter(module, graph, path, module.argdef_outdef_map.get(arg_def), reached)
            problems += linter.run(types)
            pending += reversed(linter.calls)
    return problems + list(_find_stale(traced, "", reached, set()))


class _GraphLinter:
    """Checks one graph; notes which modules and tensors it reaches and which graphs it calls."""

    def __init__(
        self,
        module: TracedModule,
        graph: InternalGraph,
        path: str,
        out_def: TreeDef | None,
        reached: set[int],
    ) -> None:
        self.module, self.graph, self.path = module, graph, path
        self.out_def, self.reached = out_def, reached
        self.problems: list[LintProblem] = []
        self.calls: list[tuple[TracedModule, str, TreeDef]] = []
        # The modules that module nodes stand for, with their paths.
        self.objects: dict[Node, tuple[Any, str]] = {graph._inputs[0]: (module, path)}
        self.nodes: dict[Node, None] = {}

    def run(self, types: bool) -> list[LintProblem]:
        """Runs all checks and returns the problems of the graph."""
        self._check_order()
        self._check_outputs()
        self._check_users()
        self._check_names_and_owners()
        for expr in self.graph._exprs:
            self._check_arguments(expr)
            self._resolve(expr)
        if types and not self.problems:
            for expr, text in find_false_types(self.module, self.graph):
                code = "stale-shape" if text.startswith("records") else "cannot-run"
                self._report(code, _location(expr), text)
        self._check_dead()
        return self.problems

    def _report(self, code: str, where: str, message: str) -> None:
        self.problems.append(LintProblem(code, f"{self.path}/{where}" if self.path else where, message))

    def _check_order(self) -> None:
        """Checks that every node has one producer, refers to it, and is read only after it."""
        producers: dict[Node, Expr] = {}
        for expr in self.graph._exprs:
            for node in expr.outputs:
                producers.setdefault(node, expr)
        self.nodes.update(dict.fromkeys(self.graph._inputs))  # one node may be an input twice: f(x, x)
        for expr in self.graph._exprs:
            for node in expr.inputs:
                if node in self.nodes:
                    continue
                later = producers.get(node)
                if later is None:
                    text = f"reads {_name(node)}, which no expr of this graph produces"
                    self._report("not-produced", _location(expr), text)
                else:
                    text = f"reads {_name(node)} before {_show(later)} produces it"
                    self._report("used-before-produced", _location(expr), text)
            for node in expr.outputs:
                if node in self.nodes:
                    text = f"is produced a second time, by {_show(expr)}"
                    self._report("produced-twice", _name(node), text)
                    continue
                self.nodes[node] = None
                if node.expr is not expr:
                    text = f"is produced by {_show(expr)}, but its expr is {_show(node.expr)}"
                    self._report("wrong-producer", _name(node), text)

    def _check_outputs(self) -> None:
        """Checks that the graph outputs are nodes of the graph, and as many as the module has."""
        for index, node in enumerate(self.graph._outputs):
            if node not in self.nodes:
                text = f"is output {index} of the graph, but nothing in the graph produces it"
                self._report("output-not-produced", _name(node), text)
        count, expected = len(self.graph._outputs), self.out_def and self.out_def.num_leaves
        if expected is not None and count != expected:
            text = f"the graph has {count} outputs, but the module returns {expected} values"
            self._report("wrong-outputs", self.graph._name, text)

    def _check_users(self) -> None:
        """Checks that a node's users are the exprs that read it, each as often as it reads the node."""
        reads: dict[Node, Counter[int]] = {}
        exprs = set(self.graph._exprs)
        for expr in self.graph._exprs:
            for node in expr.inputs:
                reads.setdefault(node, Counter())[expr] += 1
        for node in self.nodes:
            listed, actual = Counter(node.users), reads.get(node, Counter())
            if listed == actual:
                continue
            for user in node.users:
                if user not in exprs:
                    text = f"lists {_show(user)} as a user, which is not in this graph"
                    self._report("wrong-users", _name(node), text)
                    exprs.add(user)  # reported once
                    listed.pop(user, None)
            for user in dict.fromkeys((*actual, *listed)):
                count, recorded = actual[user], listed[user]
                if count != recorded and user in exprs:
                    text = f"is read {count} times by {_show(user)}, but lists it {recorded} times"
                    self._report("wrong-users", _name(node), text)

    def _check_names_and_owners(self) -> None:
        """Checks that names are unique, and that every expr and node refers back to this graph."""
        if self.graph._inputs[0].owner is not self.module:
            text = "stands for the graph's module, but refers to another one"
            self._report("wrong-owner", _name(self.graph._inputs[0]), text)
        named: dict[str, Node] = {}
        for node in self.nodes:
            other = named.setdefault(node._name, node)
            if other is not node:
                text = f"is the name of two nodes, of {_show(other.expr)} and of {_show(node.expr)}"
                self._report("name-twice", _name(node), text)
            if node.top_graph is not self.graph:
                self._report("wrong-graph", _name(node), "the node does not refer back to its graph")
        for expr in self.graph._exprs:
            if expr.top_graph is not self.graph:
                self._report("wrong-graph", _location(expr), "the expr does not refer back to its graph")

    def _check_arguments(self, expr: Expr) -> None:
        """Checks the number of inputs, constants and outputs against the structures of the call."""
        if expr.arg_def is not None and expr.const_val is not None:
            expected, count = expr.arg_def.num_leaves, len(expr.inputs) + len(expr.const_val)
            positions = [index for index, _ in expr.const_val]
            if expected != count:
                text = f"has {count} arguments, but its call takes {expected}"
                self._report("wrong-arguments", _location(expr), text)
            elif positions != sorted(set(positions)) or any(not 0 <= i < expected for i in positions):
                text = f"has its constants at the impossible places {positions}"
                self._report("wrong-arguments", _location(expr), text)
        for value in _constants(expr):
            if isinstance(value, Node) or not _is_leaf(value):
                text = f"has a constant of type {type(value).__name__}, which no traced module can hold"
                self._report("wrong-constant", _location(expr), text)
        if isinstance(expr, CallFunction) and (error := _misfit(expr)):
            self._report("wrong-arguments", _location(expr), f"calls {op_label(expr)}: {error}")
        if expr.out_def is not None and expr.out_def.num_leaves != len(expr.outputs):
            text = f"has {len(expr.outputs)} outputs, but its call returns {expr.out_def.num_leaves}"
            self._report("wrong-outputs", _location(expr), text)

    def _resolve(self, expr: Expr) -> None:
        """Checks that an attribute exists; marks modules and tensors that are called or passed as reached."""
        if isinstance(expr, GetAttr):
            self._check_attribute(expr)
        elif isinstance(expr, Constant) and isinstance(expr.outputs[0], ModuleNode):
            self.objects[expr.outputs[0]] = (expr.value, expr.outputs[0]._name)
        else:
            callee = expr.inputs[0] if isinstance(expr, CallMethod) and is_call_module(expr) else None
            for node in expr.inputs:
                if node in self.objects:
                    owner, path = self.objects[node]
                    if node is not callee or not self._enter_call(expr, owner, path):
                        self.reached.add(id(owner))

    def _check_attribute(self, expr: GetAttr) -> None:
        out = expr.outputs[0]
        if expr.inputs[0] not in self.objects:
            return
        base, path = self.objects[expr.inputs[0]]
        path = f"{path}.{expr.name}".lstrip(".")
        value = base
        for part in expr.name.split("."):
            value = getattr(value, part, _MISSING) if isinstance(value, Module) else _MISSING
        expected, kind = (Module, "module") if isinstance(out, ModuleNode) else (RawTensor, "tensor")
        if value is _MISSING:
            text = f"reads {path}, but the module has no such attribute"
            self._report("missing-attribute", _name(out), text)
        elif not isinstance(value, expected):
            text = f"reads {path} as a {kind}, but it is a {type(value).__name__}"
            self._report("wrong-kind", _name(out), text)
        elif isinstance(out, TensorNode):
            self.reached.add(id(value))
        else:
            self.objects[out] = (value, path)
            if out.owner is not value:
                self._report("wrong-owner", _name(out), f"stands for {path}, but refers to another module")

    def _enter_call(self, expr: CallMethod, owner: Any, path: str) -> bool:
        """Adds the graph that a call runs to `calls`; returns False if there is no graph to read."""
        if not isinstance(owner, TracedModule) or owner.is_qat:
            return False  # a QAT module has fake quants that its graph does not call
        if expr.arg_def in owner.argdef_graph_map:
            self.calls.append((owner, path, expr.arg_def))
        else:
            text = f"calls {path} with arguments for which it lacks a graph"
            self._report("no-graph", _location(expr), text)
        return True

    def _check_dead(self) -> None:
        """Checks that every result is used, unless the expr is protected or writes in place."""
        live = set(self.graph._outputs)
        dead: list[Expr] = []
        for expr in reversed(self.graph._exprs):
            writes = isinstance(expr, CallMethod) and expr.method == "__setitem__"
            if expr._disable_remove or writes or not expr.outputs or any(n in live for n in expr.outputs):
                live.update(node for node in expr.inputs)
            else:
                dead.append(expr)
        for expr in reversed(dead):
            self._report("dead-expr", _location(expr), f"nothing uses the result of {_show(expr)}")


def _find_stale(module: Module, path: str, reached: set[int], visited: set[int]) -> Iterator[LintProblem]:
    """Yields the modules and tensors below ``module`` that no graph reaches; a stale layer counts as one."""
    for key, value in module._flatten(recursive=False, with_key=True):
        child = f"{path}.{key}".lstrip(".")
        if not isinstance(value, (Module, RawTensor)) or id(value) in visited or id(value) in reached:
            continue
        visited.add(id(value))
        if isinstance(value, RawTensor):
            yield LintProblem("stale-tensor", child, "no expr reads this tensor")
        elif _is_holder(value) or any(id(part) in reached for part in value._flatten()):
            yield from _find_stale(value, child, reached, visited)
        else:
            yield LintProblem("stale-module", child, f"no expr reaches this {type(value).__name__}")


def _is_holder(module: Module) -> bool:
    """Returns whether a module only holds other modules and computes nothing itself."""
    return isinstance(module, TracedModule) or getattr(module, "only_holds", False)


def _constants(expr: Expr) -> list[Any]:
    return [value for _, value in expr.const_val or ()]


def _misfit(expr: CallFunction) -> str:
    """Returns why the function of ``expr`` does not take its arguments by their names; "" if it does."""
    try:
        parameters = signature(expr.func)
    except (TypeError, ValueError):  # built in: it lacks a signature
        return ""
    try:
        parameters.bind(*expr.args, **expr.kwargs)
    except (TypeError, AssertionError) as error:
        return str(error)
    return ""


def _name(node: Node) -> str:
    return node._name or f"node {node._id}"


def _location(expr: Expr) -> str:
    return _name(expr.outputs[0]) if expr.outputs else f"expr {expr._id}"


def _show(expr: Expr | None) -> str:
    return "nothing" if expr is None else f"%{expr._id} {op_label(expr)}"
