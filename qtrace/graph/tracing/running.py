"""Runs of a module during a trace, and modules of functions.

A module may have two names, such as an attribute and an item of a list. The ``state_dict`` has the first of
them in alphabetical order; a trace has those that ``forward`` uses. With the former in the trace, a
``state_dict`` of the source fits it.
"""

from __future__ import annotations

import difflib
import dis
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any, cast

from megengine import Tensor
from megengine.module import Identity, Module
from megengine.module.module import _expand_structure
from megengine.traced_module import TracedModule, tm_config
from megengine.traced_module.expr import CallMethod, Expr, GetAttr, is_call_module
from megengine.traced_module.module_tracer import module_tracer
from megengine.traced_module.node import ModuleNode, Node, TensorNode
from megengine.traced_module.pytree import LeafDef, TreeDef
from megengine.traced_module.traced_module import InternalGraph
from megengine.utils.naming import AutoNaming

from qtrace.errors import TraceError
from qtrace.gradients.recurrent import checked_shapes
from qtrace.graph import failures
from qtrace.graph.kernels import synchronous
from qtrace.graph.tracing.example_inputs import with_forward
from qtrace.graph.tracing.tracer import open_attention
from qtrace.graph.walk import graphs_of

_RESERVED = frozenset(dir(Identity()))  # names of what every module has
# Names that a subclass may define without changing what its forward computes.
_WITHOUT_EFFECT = {
    "__abstractmethods__",
    "__annotations__",
    "__dict__",
    "__doc__",
    "__init__",
    "__module__",
    "__qualname__",
    "__repr__",
    "__slotnames__",
    "__weakref__",
    "_abc_impl",
    "_module_info_string",
    "reset_parameters",
}


def check_signature(module: Module, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raises a `TraceError` if ``module`` lacks ``method``, or cannot call it with these arguments."""
    name = type(module).__name__
    called = getattr(type(module), method, None)
    if not callable(called):
        similar = difflib.get_close_matches(method, dir(type(module)), n=1)
        hint = f"; did you mean {similar[0]!r}?" if similar else "."
        raise TraceError(f"{name} lacks method {method!r}{hint}")
    signature = inspect.signature(getattr(module, method))
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise TraceError(
            f"{name}.{method}{signature} cannot be called with "
            f"{len(args)} example(s) by position{_by_name(kwargs)} ({error}); give all that it needs, by "
            "position or by name."
        ) from error


def _by_name(kwargs: dict[str, Any]) -> str:
    return f" and {', '.join(kwargs)} by name" if kwargs else ""


@contextmanager
def engine_for_tracing() -> Iterator[None]:
    """Sets MegEngine's ``async_level`` to 0 within the block; restores the tracer after an exception."""
    default_check, depth = tm_config._enable_default_checker, len(AutoNaming.scopes)
    # qtrace compares on other inputs; MegEngine's own comparison on the example costs another forward.
    tm_config._enable_default_checker = False
    try:
        with synchronous(), checked_shapes():
            yield
    finally:
        tm_config._enable_default_checker = default_check
        while len(AutoNaming.scopes) > depth:
            AutoNaming.pop_scope()


def copy_module(source: Module, method: str) -> Module:
    """Copies ``source`` in eval mode, with its ``method`` as forward, so that the tracer looks inside.

    Raises:
        TraceError: for a module that cannot be copied, or whose class is registered as a builtin.
    """
    name = type(source).__name__
    module = failures.copy_module(source, "it cannot be traced without changing it")
    module.eval()
    _use_builtin_classes(module)
    open_attention(module)
    own = type(module)
    if module_tracer.is_builtin(module):  # the tracer calls such a class as one op, which is no graph
        if not own.__module__.startswith("megengine."):
            raise TraceError(
                f"{name} is registered as a builtin, so a trace does not look inside: hold it in a "
                "Module of your own and trace that."
            )
        module.__class__ = type(own.__name__, (own,), {"__module__": own.__module__})
    if method != "forward":
        module.__class__ = with_forward(type(module), method)
    return module


def _use_builtin_classes(root: Module) -> None:
    """Sets the class of every submodule below ``root`` that computes the same as its base class to that base.

    A tracer records the inside of every class that it does not know. A subclass that only fills in arguments,
    such as a BatchNorm2d that is always frozen, would become functions, and no pass would recognize a layer.

    Args:
        root: a private copy of the user's module; its own class stays.
    """
    for module in root.modules():
        if module_tracer.is_builtin(module):  # a leaf of the user's own, or a layer of MegEngine's
            continue
        base = _builtin_base(type(module))
        if module is not root and base is not None and not (_is_hooked(module) or _is_patched(module, base)):
            module.__class__ = base


def _builtin_base(cls: type[Module]) -> type[Module] | None:
    """Returns the MegEngine class whose ``forward`` ``cls`` runs unchanged.

    None if ``cls`` is such a class itself, or if there is none.
    """
    for position, base in enumerate(cls.__mro__):
        if base is Module:
            return None
        if base.__module__.startswith("megengine.module.") and base in module_tracer._opaque_types:
            between = cls.__mro__[:position]
            return base if between and all(_adds_nothing(c, base) for c in between) else None
    return None


def _adds_nothing(cls: type, base: type[Module]) -> bool:
    return all(
        name in _WITHOUT_EFFECT or _is_new_method(name, value, base) for name, value in vars(cls).items()
    )


def _is_new_method(name: str, value: Any, base: type[Module]) -> bool:
    """Returns whether ``value`` is a method whose name ``base`` lacks, so that its forward never calls it."""
    is_method = isinstance(value, (FunctionType, staticmethod, classmethod))
    return is_method and not name.startswith("__") and not hasattr(base, name)


def _is_hooked(module: Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)


def _is_patched(module: Module, base: type[Module]) -> bool:
    """Returns whether ``module`` itself replaces a method of ``base``, as by ``self.forward = ...``."""
    return any(callable(getattr(base, name, None)) for name in vars(module))


def as_module(root: Any, method: str) -> tuple[Module, str]:
    """Returns what is to be traced as a module, and the name of the method.

    Args:
        root: a module, a function, or a bound method of a module.
        method: the name of the method that shall be traced if ``root`` is a module.

    Raises:
        TraceError: for anything else.
    """
    if isinstance(root, Module):
        return root, method
    name = getattr(root, "__name__", type(root).__name__)
    if method != "forward" and isinstance(root, (FunctionType, MethodType)):
        raise TraceError(f"method={method!r} goes with a module, but {name} is a function: leave method out.")
    if isinstance(root, MethodType) and isinstance(root.__self__, Module):
        return root.__self__, root.__name__
    if isinstance(root, FunctionType):
        return _module_of(root), "forward"
    kind = f"the class {name}" if isinstance(root, type) else type(root).__name__
    raise TraceError(
        f"a megengine.module.Module or a function can be traced, not {kind}: call it in a function or in the "
        "forward of a Module, and trace that."
    )


def _module_of(function: FunctionType) -> Module:
    """Returns a module whose forward is ``function``."""
    free, used = _held_variables(function), _held_globals(function)
    attributes = {name: f"{name}_" if name in _RESERVED else name for name in (*used, *free)}

    def bind(module: Any) -> Callable[..., Any]:
        """Returns ``function`` with attributes of ``module`` for the modules and tensors that it names."""
        scope = function.__globals__
        recorded: Any = scope.get(function.__name__)
        if recorded is not function and _original(recorded) is function:
            return cast(Callable[..., Any], recorded)  # the tracer has wrapped it: one call
        if used:
            scope = {**scope, **{name: getattr(module, attributes[name]) for name in used}}
        cells = tuple(
            CellType(getattr(module, attributes[name])) if name in free else cell
            for name, cell in _variables(function)
        )
        own = FunctionType(function.__code__, scope, function.__name__, function.__defaults__, cells)
        own.__kwdefaults__ = function.__kwdefaults__
        return own

    def forward(self: Module, *args: Any, **kwargs: Any) -> Any:
        return bind(self)(*args, **kwargs)

    # MegEngine's tracer wraps what the globals of forward name, so these are the globals of the function.
    outer = FunctionType(forward.__code__, function.__globals__, "forward", None, forward.__closure__)
    signature = inspect.signature(function)
    own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    if not any(p.kind is inspect.Parameter.POSITIONAL_ONLY for p in signature.parameters.values()):
        own = own.replace(kind=inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = [own, *signature.parameters.values()]
    outer.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    name = function.__name__ if function.__name__.isidentifier() else "function"
    module = type(name, (Module,), {"__module__": function.__module__, "forward": outer})()
    for key, value in (*used.items(), *free.items()):
        setattr(module, attributes[key], value)
    return module


def _original(function: Any) -> Any:
    return getattr(function, "__wrapped__", function)


def _variables(function: FunctionType) -> Iterator[tuple[str, CellType]]:
    return zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)


def _held_variables(function: FunctionType) -> dict[str, Any]:
    """Returns the modules and tensors among the variables around ``function``."""
    held = {}
    for name, cell in _variables(function):
        try:
            value = cell.cell_contents
        except ValueError:  # not assigned yet
            continue
        if _is_held(value):
            held[name] = value
    return held


def _held_globals(function: FunctionType) -> dict[str, Any]:
    """Returns the modules and tensors among the globals that ``function`` reads."""
    names = dict.fromkeys(_global_names(function.__code__))
    values = {name: function.__globals__.get(name) for name in names}
    return {name: value for name, value in values.items() if _is_held(value)}


def _global_names(code: CodeType) -> Iterator[str]:
    """Yields the globals that ``code`` and the functions and comprehensions within it read."""
    yield from (i.argval for i in dis.get_instructions(code) if i.opname == "LOAD_GLOBAL")
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _global_names(constant)


def _is_held(value: Any) -> bool:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return any(isinstance(item, Module) for item in value)
    return isinstance(value, (Module, Tensor))


def restore_names(source: Module, traced: TracedModule) -> None:
    """Names the modules and tensors of ``traced`` as the ``state_dict`` of ``source`` does.

    A module that was traced separately under both of its names, with different arguments, keeps them.

    Args:
        source: the module that ``traced`` was traced from.
        traced: the hierarchical trace; it is changed in place.
    """
    renamed = [pair for pair in list(_second_names(source, traced, "")) if _rename(traced, *pair)]
    if not renamed:
        return
    traced._update_ref()
    for graph in graphs_of(traced):
        _requalify(graph, traced.graph._qualname, renamed)


def restore_input_names(traced: TracedModule) -> None:
    """Names the inputs of ``traced`` after the arguments of forward that they are.

    MegEngine counts only tensors when it looks for the names: after an argument that is left out, each
    input gets the name of another one.
    """
    ((arg_def, graph),) = traced.argdef_graph_map.items()
    args, kwargs = arg_def.children_defs
    spec = traced.argspec
    names = [] if spec is None else spec.args[1:]
    trees = [*zip(names, args.children_defs[1:], strict=False)]
    trees += zip(kwargs.aux_data or (), kwargs.children_defs, strict=True)
    input_names = [name for argument, tree in trees for name in _input_names(str(argument), tree)]
    nodes = [node for node in graph.inputs if isinstance(node, TensorNode)]
    if len(input_names) != len(nodes):  # arguments beyond those with names
        return
    wrong = [(node, name) for node, name in zip(nodes, input_names, strict=True) if node._name != name]
    names = graph._namespace
    holders = [(names.used_names.get(name), name) for _, name in wrong]
    others = [(other, name) for other, name in holders if other is not None and other not in nodes]
    for node in (*(node for node, _ in wrong), *(other for other, _ in others)):
        names.unassociate_name_with_obj(node)
    for node, name in (*wrong, *others):  # a result of an op that has the name of an input gets another one
        node._name = names.create_unique_name(name, node)


def _input_names(argument: str, tree: TreeDef) -> Iterator[str]:
    """Yields the names of the tensors in an argument: its own, or with the number of the value within it."""
    if isinstance(tree, LeafDef):
        yield from [argument] if Tensor in tree.type else []
        return
    leaves = [leaf for child in tree.children_defs for leaf in _leaves(child)]
    for number, leaf in enumerate(leaves):
        if Tensor in leaf.type:
            yield f"{argument}_{number}"


def _leaves(tree: TreeDef) -> Iterator[LeafDef]:
    if isinstance(tree, LeafDef):
        yield tree
        return
    for child in tree.children_defs:
        yield from _leaves(child)


def _second_names(source: Module, traced: Module, path: str) -> Iterator[tuple[str, str]]:
    """Yields pairs of a path in ``traced`` and the path that it should have, the deepest first."""
    first: dict[int, str] = {}
    own = vars(source)
    for key in sorted(own):
        for name, leaf in _expand_structure(key, own[key]):
            child = _get(traced, name)
            if isinstance(leaf, Module) and isinstance(child, TracedModule):
                yield from _second_names(leaf, child, _join(path, name))
            first_name = first.setdefault(id(leaf), name)
            if first_name != name and isinstance(child, (Module, Tensor)):
                yield _join(path, name), _join(path, first_name)


def _rename(root: TracedModule, old: str, new: str) -> bool:
    """Moves the attribute at the path ``old`` to ``new``; returns whether that is possible."""
    present, moved = _get(root, new), _get(root, old)
    if present is not None and present is not moved:
        if not (_alike(present, moved) and isinstance(present, TracedModule)):
            return False
    elif present is None and not _attach(root, new, moved):
        return False
    for path in _ancestors(old):
        module = _get(root, path)
        if isinstance(module, TracedModule):
            for graph in module.argdef_graph_map.values():
                _redirect(graph, old[len(path) :].lstrip("."), new[len(path) :].lstrip("."))
    _detach(root, old)
    return True


def _alike(left: Any, right: Any) -> bool:
    """Returns whether two traces of one module have the same graphs and the same modules below."""
    if not (isinstance(left, TracedModule) and isinstance(right, TracedModule)):
        return left is right
    if set(left.argdef_graph_map) != set(right.argdef_graph_map):
        return False
    lefts, rights = dict(_children(left)), dict(_children(right))
    return lefts.keys() == rights.keys() and all(_alike(lefts[k], rights[k]) for k in lefts)


def _children(module: Module) -> Iterator[tuple[str, Any]]:
    return ((k, v) for k, v in vars(module).items() if isinstance(v, (Module, Tensor)))


def _redirect(graph: InternalGraph, old: str, new: str) -> None:
    """Makes every expr of ``graph`` that reads the attribute ``old`` of its module read ``new``."""
    paths: dict[Node, str] = {graph._inputs[0]: ""}
    for expr in list(graph._exprs):
        if not isinstance(expr, GetAttr) or expr.inputs[0] not in paths:
            continue
        path = paths[expr.outputs[0]] = _join(paths[expr.inputs[0]], expr.name)
        if path == old:
            _get_from(graph, expr, graph._inputs[0], new)


def _get_from(graph: InternalGraph, expr: GetAttr, base: ModuleNode, name: str) -> None:
    before = expr.inputs[0]
    before.users.remove(expr)
    base.users.append(expr)
    expr.inputs[0], expr.name = base, name
    _rename_nodes(graph, expr.outputs[0], name.replace(".", "_"))
    while isinstance(before.expr, GetAttr) and not before.users and before not in graph._outputs:
        unused: Expr = before.expr
        graph._exprs.remove(unused)
        before = unused.inputs[0]
        before.users.remove(unused)


def _rename_nodes(graph: InternalGraph, node: Node, name: str) -> None:
    """Renames ``node`` and the results of the calls of its module after the attribute ``name``."""
    old, node._name = node._name, graph._namespace.create_unique_name(name, node)
    for user in node.users:
        if isinstance(user, CallMethod) and user.inputs[0] is node:
            for out in user.outputs:
                if out._name.startswith(f"{old}_"):
                    new_name = f"{node._name}{out._name[len(old) :]}"
                    out._name = graph._namespace.create_unique_name(new_name, out)


def _attach(root: TracedModule, path: str, value: Any) -> bool:
    """Sets the attribute at ``path`` and creates its containers; False if a container is no module."""
    parent: Any = root
    *containers, name = path.split(".")
    for part in containers:
        if not hasattr(parent, part):
            _set(parent, part, TracedModule(False, {}, {}, False))
        parent = getattr(parent, part)
        if not isinstance(parent, Module):
            return False
    _set(parent, name, value)
    return True


def _set(parent: Module, name: str, value: Any) -> None:
    """Sets an attribute like ``setattr``, which would warn that the module keeps its old name."""
    parent.__dict__[name] = value
    if isinstance(value, Module) and name not in parent._modules:
        parent._modules.append(name)


def _detach(root: TracedModule, path: str) -> None:
    """Removes the attribute at ``path``, and the containers that are empty afterwards."""
    parent_path, _, name = path.rpartition(".")
    parent = _get(root, parent_path)
    delattr(parent, name)
    empty = isinstance(parent, TracedModule) and not parent.argdef_graph_map and not list(_children(parent))
    if parent_path and empty:
        _detach(root, parent_path)


def _requalify(graph: InternalGraph, top: str, renamed: list[tuple[str, str]]) -> None:
    """Rewrites the paths that MegEngine recorded for a graph and its nodes."""
    graph._qualname = _requalified(graph._qualname, top, renamed)
    graph._namespace.qualname = graph._qualname
    nodes = list(graph._inputs)
    for expr in graph._exprs:
        nodes.extend(expr.outputs)
        if isinstance(expr, CallMethod) and is_call_module(expr):
            nodes.append(expr.inputs[0])
    for node in dict.fromkeys(nodes):
        node._qualname = _requalified(node._qualname, top, renamed)


def _requalified(name: str, top: str, renamed: list[tuple[str, str]]) -> str:
    for old, new in renamed:
        old_name = f"{top}.{old}"
        if name == old_name or name.startswith(f"{old_name}."):
            name = f"{top}.{new}{name[len(old_name) :]}"
    return name


def _ancestors(path: str) -> Iterator[str]:
    """Yields the paths above ``path``, from its parent to the root, which is ''."""
    while path:
        path = path.rpartition(".")[0]
        yield path


def _get(root: Module, path: str) -> Any:
    """Returns the attribute at a dotted path; None if there is none."""
    value: Any = root
    for part in path.split(".") if path else ():
        value = vars(value).get(part) if isinstance(value, Module) else None
    return value


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
