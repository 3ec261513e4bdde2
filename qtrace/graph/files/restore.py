"""Puts a loaded TracedModule together, as MegEngine does but in linear time, and checks what it would run.

MegEngine, and every room of qtrace, trusts a graph. It trusts that a node is there before it is read, and
that names are names. The structure of a call's arguments has as many leaves as the call has arguments. Here
is the one place where a file has to prove it.
"""

from __future__ import annotations

import re
import weakref
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from inspect import FullArgSpec
from typing import Any

import numpy as np
from megengine import Parameter, Tensor
from megengine.core._imperative_rt.common import CompNode
from megengine.core._imperative_rt.core2 import Tensor as RawTensor
from megengine.core._wrap import Device
from megengine.module import Module
from megengine.quantization.utils import LSQParams
from megengine.quantization.utils import QParams as MegEngineQParams
from megengine.traced_module import TracedModule
from megengine.traced_module.expr import (
    Apply,
    CallFunction,
    CallMethod,
    Constant,
    Expr,
    GetAttr,
    Input,
    is_call_module,
)
from megengine.traced_module.node import ModuleNode, TensorNode
from megengine.traced_module.pytree import LeafDef, TreeDef
from megengine.traced_module.serialization import (
    FUNCTIONAL_LOADER,
    load_apply_expr,
    load_call_module_expr,
    load_call_tensor_method_expr,
    load_functional,
)
from megengine.traced_module.traced_module import InternalGraph, NameSpace

from qtrace.graph.files import allowlist
from qtrace.graph.files.allowlist import DEPTH, LoadBudget, RefusedError, shown
from qtrace.graph.files.plain_values import EXPRS, NODES, Trees, are_sizes


def restore(module: TracedModule, budget: LoadBudget) -> None:
    """Restores a module as ``TracedModule.__setstate__`` does, but in linear time.

    Args:
        module: a module with its attributes and checked graphs.
        budget: pays for each visit of a module, of which shared modules have many.
    """
    for graph in module.argdef_graph_map.values():
        _check_getattrs(module, graph)
    _update_refs(module, budget)
    graphs = list(module.argdef_graph_map.values())
    for graph in graphs:
        for expr in graph._exprs:
            _apply_loaders(expr)
    for graph in graphs:
        _insert_missing(graph)
        _fix_users(graph)
        for expr in graph._exprs:
            graph._namespace.auto_naming_for_outputs(expr)
    _update_refs(module, budget)
    for graph in graphs:
        _check_subgraphs(graph)
        graph._reset_ids()


def _update_refs(
    module: TracedModule,
    budget: LoadBudget,
    calls: dict[TreeDef, list[list[Any]]] | None = None,
    caller: InternalGraph | None = None,
) -> None:
    """Sets the weak references of exprs, nodes and graphs, as ``TracedModule._update_ref`` does.

    Args:
        module: the module; then those that it calls.
        budget: pays for each visit.
        calls: for each structure of arguments, the nodes of each call of ``module`` in ``caller``.
        caller: the graph that calls ``module``.
    """
    for structure, graph in module.argdef_graph_map.items():
        actual = list(zip(*calls[structure], strict=False)) if calls and structure in calls else []
        inputs = len(graph._inputs)
        # The structure of each call's arguments is hashed, which costs several steps.
        budget.work(4 + 8 * (len(graph._exprs) + inputs) + (inputs * inputs // 64 if actual else 0))
        graph_reference = weakref.ref(graph)
        if caller is not None:
            graph._top_graph = weakref.ref(caller)
        for node in graph._inputs + graph._outputs:
            node.expr._top_graph = node._top_graph = graph_reference
        graph._inputs[0]._owner = weakref.ref(module)
        for index, node in enumerate(graph._inputs):
            node.actual_node = list(actual[index]) if actual else []
        owners: dict[int, Any] = {id(graph._inputs[0]): module}
        next_calls: dict[int, dict[TreeDef, list[list[Any]]]] = {}
        for expr in graph._exprs:
            expr._top_graph = graph_reference
            for node in expr.inputs + expr.outputs:
                node._top_graph = graph_reference
            _follow(expr, owners, next_calls)
        for owner in list(owners.values()):
            if owner is not module and isinstance(owner, TracedModule):
                _update_refs(owner, budget, next_calls.get(id(owner)), graph)


def _follow(expr: Expr, owners: dict[int, Any], calls: dict[int, dict[TreeDef, list[list[Any]]]]) -> None:
    """Notes the module that an expr reads, or the call of one."""
    if type(expr) in (GetAttr, Constant) and type(expr.outputs[0]) is ModuleNode:
        node = expr.outputs[0]
        owner = expr.value if type(expr) is Constant else expr.interpret(owners[id(expr.inputs[0])])[0]
        node._owner = weakref.ref(owner)
        owners[id(node)] = owner
    if is_call_module(expr) and expr.arg_def is not None:
        owner = owners[id(expr.inputs[0])]
        calls.setdefault(id(owner), {}).setdefault(expr.arg_def, []).append(expr.inputs)


def _check_subgraphs(graph: InternalGraph) -> None:
    """Refuses a call of a traced module whose graph is missing, or made for other arguments."""
    for expr in graph._exprs:
        if not is_call_module(expr) or not isinstance(expr.inputs[0].owner, TracedModule):
            continue
        name = shown(expr.inputs[0]._name)
        inner = expr.inputs[0].owner.argdef_graph_map.get(expr.arg_def)
        if inner is None:
            raise RefusedError(f"it calls the module {name}, which lacks a graph for these arguments")
        takes, gives = len(inner._inputs), len(inner._outputs)
        if (takes, gives) != (len(expr.inputs), len(expr.outputs)):
            raise RefusedError(
                f"it calls the module {name} with {len(expr.inputs)} values for {len(expr.outputs)}, "
                f"but its graph takes {takes} and gives {gives}"
            )


def _apply_loaders(expr: Expr) -> None:
    """MegEngine's own adaptations of exprs that an older version saved."""
    if isinstance(expr, CallFunction):
        load_functional(expr)
    if isinstance(expr, CallMethod):
        if expr.method == "__call__":
            load_call_module_expr(expr)
        else:
            load_call_tensor_method_expr(expr)
    if isinstance(expr, Apply):
        load_apply_expr(expr)


def _insert_missing(graph: InternalGraph) -> None:
    """Inserts exprs that a loader created before the first expr that reads them."""
    present = set(map(id, graph._exprs))
    pending, ordered = graph._exprs[::-1], []
    while pending:
        expr = pending[-1]
        missing = []
        for node in expr.inputs:
            if id(node.expr) not in present and not isinstance(node.expr, Input):
                missing.append(node.expr)
                present.add(id(node.expr))
        pending.extend(missing)
        if not missing:
            ordered.append(pending.pop())
    graph._exprs[:] = ordered


def _fix_users(graph: InternalGraph) -> None:
    """Makes ``users`` and ``expr`` of every node agree with the exprs."""
    read = {id(expr): Counter(map(id, expr.inputs)) for expr in graph._exprs}
    listed: dict[int, Counter[int]] = {}
    for expr in graph._exprs:
        for node in expr.inputs:
            counts = listed.setdefault(id(node), Counter(map(id, node.users)))
            missing = read[id(expr)][id(node)] - counts[id(expr)]
            if missing > 0:
                node.users.extend([expr] * missing)
                counts[id(expr)] += missing
        for node in expr.outputs:
            node.expr = expr
    for node in graph.nodes(False):
        counts = listed.get(id(node), Counter())
        surplus = {user: count - read[user][id(node)] for user, count in counts.items() if user in read}
        node.users = list(_readers(node, surplus, read))


def _readers(node: Any, surplus: dict[int, int], read: dict[int, Counter[int]]) -> Iterator[Expr]:
    """The users of a node that read it, without the first ones of those that are listed too often."""
    for user in node.users:
        if id(user) not in read or not read[id(user)][id(node)]:
            continue
        if surplus.get(id(user), 0) > 0:
            surplus[id(user)] -= 1
            continue
        yield user


def check_calls(module: TracedModule, budget: LoadBudget) -> None:
    """Refuses a graph that would read or call anything but modules, tensors and listed methods of tensors.

    Functions, ops and module classes were checked by name before they were imported.

    Args:
        module: a restored module.
        budget: pays for the callers that hand a module over.

    Raises:
        RefusedError: naming the attribute or method.
    """
    for graph in module.argdef_graph_map.values():
        for expr in graph._exprs:
            if type(expr) is CallMethod:
                _check_method(expr)
            elif type(expr) is GetAttr and expr.inputs[0].owner is None:
                for owner in _passed_in(expr.inputs[0], budget, 0):
                    _read(expr, owner)


def _check_getattrs(module: TracedModule, graph: InternalGraph) -> None:
    """Follows the modules of a graph as ``_update_ref`` does, which trusts the names of attributes."""
    owners: dict[int, Any] = {id(graph._inputs[0]): module}
    passed_in = set(map(id, graph._inputs[1:]))
    for expr in graph._exprs:
        if type(expr) is Constant and type(expr.outputs[0]) is ModuleNode:
            owners[id(expr.outputs[0])] = expr.value
        if type(expr) is not GetAttr:
            continue
        source = expr.inputs[0]
        if type(source) is ModuleNode and id(source) in passed_in and type(expr.outputs[0]) is TensorNode:
            continue  # a module that the caller hands over: check_calls looks at it once the caller is there
        owners[id(expr.outputs[0])] = _read(expr, owners.get(id(source)))


def _passed_in(node: Any, budget: LoadBudget, depth: int) -> list[Any]:
    """The modules that callers hand over as this input."""
    budget.work(1)
    if type(node) is not ModuleNode or depth > DEPTH:
        return [None]
    if node.owner is not None:
        return [node.owner]
    return [owner for actual in node.actual_node for owner in _passed_in(actual, budget, depth + 1)] or [None]


def _read(expr: GetAttr, owner: Any) -> Any:
    """The module or tensor that a GetAttr reads."""
    if not isinstance(owner, Module):
        raise RefusedError(f"it reads the attribute {shown(expr.name)} of something that is no module")
    value = expr.interpret(owner)[0]
    if not isinstance(value, Module if type(expr.outputs[0]) is ModuleNode else RawTensor):
        raise RefusedError(f"it reads the attribute {shown(expr.name)} of a module, which is {shown(value)}")
    return value


def _check_method(expr: CallMethod) -> None:
    receiver = expr.args[0]
    if type(receiver) is ModuleNode:
        known = expr.method == "__call__" and isinstance(receiver.owner, Module)
    elif type(receiver) is TensorNode:
        known = expr.method in allowlist.TENSOR_METHODS
    else:
        known = expr.method == "__new__" and receiver in (Tensor, Parameter)
    if not known or (expr.inputs and expr.inputs[0] is not receiver and isinstance(receiver, NODES)):
        raise RefusedError(f"it calls the method {shown(expr.method)} of {shown(receiver)}")


# Checks a model file's graphs once, when the whole file was read and nothing can change them any more.

_PATTERN = re.compile(r"[*+?{}()|^$\\\[\]]")  # MegEngine makes a regular expression of a graph's name
_VERSION = re.compile(r"[0-9A-Za-z.+_-]{1,64}\Z")
_LONGEST_NAME = 10_000
_BODIES = (Apply, CallFunction, CallMethod, Constant, GetAttr)


class Validator:
    """Holds graphs to what MegEngine writes.

    Args:
        trees: the argument structures of the file.
        budget: pays for what qtrace and MegEngine do with the graphs while they load them.
    """

    def __init__(self, trees: Trees, budget: LoadBudget) -> None:
        self._trees, self._budget = trees, budget
        self._graphs: set[int] = set()  # those that were checked

    def check(self, module: TracedModule) -> None:
        """Refuses a module whose graphs are not whole.

        Args:
            module: a module with its attributes; the references of its graphs are not set yet.

        Raises:
            RefusedError: naming the part.
        """
        fields = module.__dict__
        graphs, outs = fields.get("argdef_graph_map"), fields.get("argdef_outdef_map")
        _check_type("argdef_graph_map", graphs, (dict,))
        _check_type("argdef_outdef_map", outs, (dict,))
        _each("argdef_graph_map", graphs, (TreeDef,))
        _each("argdef_graph_map", graphs.values(), (InternalGraph,))
        _each("argdef_outdef_map", outs, (TreeDef,))
        _each("argdef_outdef_map", outs.values(), (TreeDef, LeafDef))
        if fields.setdefault("argspec", None) is not None:
            _check_argspec(fields["argspec"])
        _each("end_points", fields["end_points"], NODES)
        # What was watched was not saved, and what stands for it was not checked.
        fields["watch_points"], fields["watch_node_value"] = [], {}
        for arguments, graph in graphs.items():
            self._budget.work(4 * self._trees.size(arguments))
            if arguments not in outs:
                raise RefusedError("a graph in it lacks the structure of its outputs")
            self._check_graph(graph)
            self._check_outputs("outputs of a graph", outs[arguments], graph._outputs)
            _check_signature(arguments)

    def _check_graph(self, graph: InternalGraph) -> None:
        fields = graph.__dict__
        for name in ("_exprs", "_inputs", "_outputs"):
            _check_type("list of exprs", fields.get(name), (list,))
        for name in ("_watch_point", "_end_point"):
            if fields.setdefault(name, []) != [] or type(fields[name]) is not list:
                raise RefusedError(f"the {name} of a graph in it is {shown(fields[name])}")
        if type(fields.setdefault("_rst", defaultdict(list))) is not defaultdict or fields["_rst"]:
            raise RefusedError(f"a graph in it has values of an earlier run: {shown(fields['_rst'])}")
        self._check_names(graph)
        _each("list of exprs", graph._exprs, _BODIES)
        _each("first input of a graph", graph._inputs[:1], (ModuleNode,))
        if not graph._inputs:
            raise RefusedError("a graph in it lacks inputs")
        exprs = {id(expr) for expr in graph._exprs}
        if len(exprs) != len(graph._exprs):
            raise RefusedError("a graph in it has an expr twice")
        present: set[int] = set()
        for node in graph._inputs:
            self._check_input(node, present, exprs)
        for expr in graph._exprs:
            self._check_expr(expr, present, exprs)
        for node in graph._outputs:
            if type(node) not in NODES or id(node) not in present:
                raise RefusedError(f"a graph in it gives {_called(node)}, which it does not compute")
        self._check_collisions(graph)
        self._graphs.add(id(graph))
        _forget_others(graph, present | self._graphs)

    def _check_names(self, graph: InternalGraph) -> None:
        space = graph.__dict__.get("_namespace")
        _check_type("namespace", space, (NameSpace,))
        for part in (graph, space):
            part.__dict__.setdefault("_name" if part is graph else "name", None)
        for value in (space.__dict__.get("qualname"), graph.__dict__.get("_qualname")):
            if type(value) is not str or not _is_name(value) or _PATTERN.search(value):
                raise RefusedError(f"a graph in it is called {shown(value)}")
        for value in (space.__dict__.get("name"), graph.__dict__.get("_name")):
            if value is not None and not _is_name(value):
                raise RefusedError(f"a graph in it is called {shown(value)}")
        used = space.__dict__.get("_used_names")
        _check_type("namespace", used, (dict,))
        for name, value in used.items():
            if not _is_name(name) or not (value is None or type(value) in (*NODES, InternalGraph)):
                raise RefusedError(f"the namespace of a graph in it has {shown(name)} for {shown(value)}")

    def _check_input(self, node: Any, present: set[int], exprs: set[int]) -> None:
        expr = node.__dict__.get("expr") if type(node) in NODES else None
        if type(expr) is not Input:
            raise RefusedError(f"a graph in it has {shown(node)} for an input")
        inputs, outputs = expr.__dict__.get("inputs"), expr.__dict__.get("outputs")
        if inputs != [] or type(outputs) is not list or len(outputs) != 1 or outputs[0] is not node:
            raise RefusedError(f"the input {_called(node)} of a graph in it is not made by its Input")
        self._check_common(expr)
        self._add_node(node, present, exprs)
        if not node._name:
            raise RefusedError("an input of a graph in it lacks a name")

    def _check_expr(self, expr: Any, present: set[int], exprs: set[int]) -> None:
        fields, kind = expr.__dict__, type(expr).__name__
        _check_type(f"inputs of a {kind}", fields.get("inputs"), (list,))
        _check_type(f"outputs of a {kind}", fields.get("outputs"), (list,))
        self._check_common(expr)
        for node in expr.inputs:
            if type(node) not in NODES or id(node) not in present:
                raise RefusedError(f"a {kind} in it reads {_called(node)}, which is not computed before it")
        if type(expr) in (GetAttr, Constant) and len(expr.outputs) != 1:
            raise RefusedError(f"a {kind} in it has {len(expr.outputs)} outputs")
        for node in expr.outputs:
            _check_type(f"outputs of a {kind}", node, NODES)
            if node.__dict__.get("expr") is not expr:
                raise RefusedError(f"the node {_called(node)} in it is not made by the expr that gives it")
            self._add_node(node, present, exprs)
        if type(expr) in (CallFunction, CallMethod):
            self._check_call(expr)
        needed = {
            Apply: "opdef",
            Constant: "value",
            GetAttr: "name",
            CallFunction: "func",
            CallMethod: "method",
        }
        if needed[type(expr)] not in fields:
            raise RefusedError(f"a {kind} in it lacks {needed[type(expr)]}")
        if type(expr) is GetAttr and (len(expr.inputs) != 1 or type(expr.inputs[0]) is not ModuleNode):
            raise RefusedError(f"it reads the attribute {shown(expr.name)} of something that is no module")

    def _check_common(self, expr: Any) -> None:
        fields = expr.__dict__
        fields.setdefault("_disable_remove", False)  # MegEngine 1.6 did not have it
        if type(fields.get("_id", 0)) is not int or type(fields.get("_disable_remove", False)) is not bool:
            raise RefusedError(f"a {type(expr).__name__} in it lacks an id")
        if "version" in fields and (
            type(fields["version"]) is not str or not _VERSION.match(fields["version"])
        ):
            raise RefusedError(f"a {type(expr).__name__} in it is of the version {shown(fields['version'])}")
        name = fields.get("name")
        if type(expr) in (Input, Constant) and not (name is None or _is_name(name)):
            raise RefusedError(f"an {type(expr).__name__} in it is called {shown(name)}")

    def _check_call(self, expr: Any) -> None:
        """Checks the arguments of a call: constants, nodes, and the structure that holds them."""
        fields, title = expr.__dict__, f"a {type(expr).__name__}"
        constants = fields.get("const_val")
        _check_type(f"constants of {title}", constants, (list,))
        total = len(constants) + len(expr.inputs)
        self._budget.work(total * total // 64)  # MegEngine searches and inserts into lists
        last = -1
        for pair in constants:
            if (
                type(pair) is not tuple
                or len(pair) != 2
                or type(pair[0]) is not int
                or not last < pair[0] < total
            ):
                raise RefusedError(f"{title} in it has the constant {shown(pair)}")
            last = pair[0]
            self._trees.check_constant(pair[1])
        arguments = fields.get("arg_def")
        self._check_structure(f"arguments of {title}", arguments, [*expr.inputs, *constants])
        _check_signature(arguments)
        if fields.get("out_def") is not None:
            self._check_outputs(f"outputs of {title}", expr.out_def, expr.outputs)
        if type(expr) is CallMethod:
            first = expr.inputs[0] if expr.inputs else None
            if (expr.__dict__.get("method") == "__call__") != (type(first) is ModuleNode):
                raise RefusedError(
                    f"it calls the method {shown(expr.__dict__.get('method'))} of {shown(first)}"
                )
        self._budget.work(4 * self._trees.size(arguments))
        try:
            args = expr.args
        except Exception:  # a leaf of another type than its value, a dict with a list for a key
            raise RefusedError(
                f"the arguments of {title} in it do not have the structure that it says"
            ) from None
        if type(expr) is CallMethod and not args:
            raise RefusedError(f"it calls the method {shown(expr.method)} of nothing")
        if type(expr) is CallFunction and callable(expr.__dict__.get("func")):
            old = (expr.func.__module__, expr.func.__qualname__) in FUNCTIONAL_LOADER
            self._budget.work(total * total if old else 0)

    def _check_structure(self, title: str, tree: Any, leaves: list[Any]) -> None:
        if type(tree) not in (TreeDef, LeafDef):
            raise RefusedError(f"the structure of the {title} in it is {shown(tree)}")
        self._budget.work(self._trees.size(tree))
        if tree.num_leaves != len(leaves):
            raise RefusedError(
                f"the {title} in it are {len(leaves)}, but {tree.num_leaves} in their structure"
            )

    def _check_outputs(self, title: str, tree: Any, nodes: list[Any]) -> None:
        self._check_structure(title, tree, nodes)
        try:
            tree.unflatten(nodes)
        except Exception:  # a leaf of another type than its node
            raise RefusedError(f"the {title} in it do not have the structure that it says") from None

    def _add_node(self, node: Any, present: set[int], exprs: set[int]) -> None:
        if id(node) in present:
            raise RefusedError(f"its node {_called(node)} is the output of two exprs")
        present.add(id(node))
        fields = node.__dict__
        for name in ("_name", "_qualname"):
            value = fields.setdefault(name, None)
            if value is not None and not _is_name(value):
                raise RefusedError(f"a node in it is called {shown(value)}")
            self._budget.work(len(value or "") // 8)
        if type(fields.get("_id", 0)) is not int:
            raise RefusedError(f"the node {_called(node)} in it lacks an id")
        users = fields.get("users")
        _check_type(f"users of the node {_called(node)}", users, (list,))
        _each(f"users of the node {_called(node)}", users, EXPRS)
        if type(node) is TensorNode:
            _check_tensor_node(node)
        elif not isinstance(node.module_type, type):
            raise RefusedError(f"the node {_called(node)} in it stands for {shown(node.module_type)}")

    def _check_collisions(self, graph: InternalGraph) -> None:
        """Pays for the search of free names, which counts upwards from 1 for each node without one."""
        used = graph._namespace._used_names
        bases: dict[str, int] = {}
        for name in used:
            base = re.sub(r"_\d+\Z", "", name)
            bases[base] = bases.get(base, 0) + 1
        for expr in graph._exprs:
            for node in expr.outputs:
                if node._name and used.get(node._name) is node:
                    continue
                base = re.sub(r"_\d+\Z", "", node._name or type(expr).__name__)
                bases[base] = bases.get(base, 0) + 1
                self._budget.work(bases[base])


def _forget_others(graph: InternalGraph, known: set[int]) -> None:
    """Lets the names of a graph stand for its own nodes and for graphs that are used.

    What else they stand for, such as a removed node, was not checked, and would be saved with the model.
    """
    used = graph._namespace._used_names
    for name, value in used.items():
        if id(value) not in known:
            used[name] = None


def _check_tensor_node(node: TensorNode) -> None:
    shape, dtype, device, params = node._shape, node._dtype, node._device, node._qparams
    if shape is not None and not (type(shape) in (tuple, list) and are_sizes(shape)):
        raise RefusedError(f"the shape of the node {_called(node)} in it is {shown(shape)}")
    if dtype is not None and not (
        isinstance(dtype, np.dtype)
        or (isinstance(dtype, type) and issubclass(dtype, (np.generic, bool, int, float)))
    ):
        raise RefusedError(f"the dtype of the node {_called(node)} in it is {shown(dtype)}")
    if not (device is None or isinstance(device, (CompNode, Device))):
        raise RefusedError(f"the device of the node {_called(node)} in it is {shown(device)}")
    if not (params is None or type(params) in (MegEngineQParams, LSQParams)):
        raise RefusedError(
            f"the quantization parameters of the node {_called(node)} in it are {shown(params)}"
        )


def _check_argspec(spec: Any) -> None:
    if type(spec) is not FullArgSpec:
        raise RefusedError(f"the signature of a module in it is {shown(spec)}")
    names = [*spec.args, *spec.kwonlyargs, *(n for n in (spec.varargs, spec.varkw) if n is not None)]
    if not all(type(name) is str and name.isidentifier() for name in names):
        raise RefusedError("the signature of a module in it has arguments without names")


def _check_signature(arguments: TreeDef) -> None:
    """The arguments of a call are a tuple of them and a dict of named ones."""
    children = arguments.children_defs
    known = type(arguments) is TreeDef and arguments.type is tuple and len(children) == 2
    if not known or children[0].type not in (tuple, list) or children[1].type is not dict:
        raise RefusedError("the arguments of a call in it are not a tuple and a dict of named ones")
    if not all(type(name) is str and _is_name(name) for name in children[1].aux_data):
        raise RefusedError(f"a call in it has arguments of the names {shown(children[1].aux_data)}")


def _is_name(value: Any) -> bool:
    return type(value) is str and len(value) <= _LONGEST_NAME and value.isprintable()


def _called(node: Any) -> str:
    return shown(node.__dict__.get("_name")) if type(node) in NODES else shown(node)


def _check_type(name: str, value: Any, kinds: tuple[type, ...]) -> None:
    _each(name, [value], kinds)


def _each(name: str, values: Iterable[Any], kinds: tuple[type, ...]) -> None:
    for value in values:
        if type(value) not in kinds:
            raise RefusedError(f"the {name} of a graph in it holds {shown(value)}")
