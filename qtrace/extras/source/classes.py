"""The classes of a traced module: one for each traced submodule, those with the same text shared."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import megengine as mge
import numpy as np
from megengine.module import Module
from megengine.traced_module.pytree import LeafDef, TreeDef
from megengine.traced_module.traced_module import InternalGraph

from qtrace.errors import GraphError
from qtrace.extras.source.body import Body, identifier, is_reserved
from qtrace.extras.source.literals import Literals, indent, shorten_eps
from qtrace.gradients import plain
from qtrace.graph.types import CallFunction, CallMethod, Expr, GetAttr, ModuleNode, Node, TracedModule
from qtrace.graph.walk import get_module, graphs_of, owner, unused_name
from qtrace.observers.base import Observer

# What a module has besides the values of its constructor.
_HOOKS = ("_forward_pre_hooks", "_forward_hooks")
_BOOKKEEPING = frozenset(
    ("_modules", "name", "_name", "_short_name", "training", "quantize_disabled", *_HOOKS)
)


@dataclass(frozen=True)
class Construction:
    """The statements that give a layer.

    Attributes:
        call: the call of its constructor.
        changes: what is set after the constructor: attribute -> expression.
    """

    call: str
    changes: tuple[tuple[str, str], ...] = ()


def construct(layer: Module, literals: Literals) -> Construction:
    """Writes the constructor of a layer.

    The arguments are the attributes of their names. The layer that they make is compared with ``layer``; what
    differs is set after the constructor. Values of tensors do not count: they are loaded.

    Args:
        layer: a module of MegEngine or qtrace, or of a user's own class that a trace keeps whole.
        literals: collects the imports.

    Raises:
        GraphError: when no arguments make the layer.
    """
    kind = type(layer)
    for squeeze in (True, False):
        arguments = _arguments(layer, squeeze)
        if arguments is None:
            continue
        required, options = arguments
        try:
            trial = kind(*required, **options)
        except Exception:
            continue
        changes = _changes(layer, trial)
        if changes is not None and (not squeeze or not changes):
            written = tuple((name, _expression(value, literals)) for name, value in changes.items())
            call = literals.call(literals.name(kind), required, shorten_eps(kind, (), options)[1])
            return Construction(call, written)
    return _made_by_hand(layer, literals)


def empty_tensor(tensor: mge.Tensor, literals: Literals) -> str:
    """Writes a tensor of this kind, shape and type, with zeros as its values."""
    literals.use("import megengine as mge")
    literals.use("import numpy as np")
    name = "mge.Parameter" if isinstance(tensor, mge.Parameter) else "mge.Tensor"
    shape = literals.write(tuple(int(n) for n in tensor.shape))
    return f'{name}(np.zeros({shape}, "{np.dtype(tensor.dtype).name}"))'


def _arguments(layer: Module, squeeze: bool) -> tuple[list[Any], dict[str, Any]] | None:
    """The arguments that the layer's attributes say; None if it lacks one that the constructor needs.

    Args:
        squeeze: whether equal sizes are one number: ``(3, 3)`` is 3.
    """
    required: list[Any] = []
    options: dict[str, Any] = {}
    for name, parameter in list(inspect.signature(type(layer).__init__).parameters.items())[1:]:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD) or name == "name":
            continue
        value = _attribute(layer, name)
        if value is inspect.Parameter.empty:
            if parameter.default is parameter.empty:
                return None
            continue
        if name == "bias" and (value is None or isinstance(value, mge.Tensor)):
            value = value is not None
        if isinstance(value, mge.Tensor) or (isinstance(value, Module) and name != "observer"):
            if parameter.default is parameter.empty:
                return None
            continue
        if squeeze and type(value) is tuple and len(value) > 1 and len(set(value)) == 1:
            value = value[0]
        if parameter.default is parameter.empty:
            if parameter.kind is not parameter.KEYWORD_ONLY:
                required.append(value)
                continue
        elif _same(value, parameter.default):
            continue
        options[name] = value
    return required, options


def _attribute(layer: Module, name: str) -> Any:
    """The attribute ``name`` of the layer, or of the first of its layers that has it."""
    for module in (layer, *(child for _, child in layer.named_children())):
        if name in vars(module):
            return vars(module)[name]
    return inspect.Parameter.empty


def _changes(layer: Module, trial: Module) -> dict[str, Any] | None:
    """What differs in ``trial``: path of an attribute -> value; None if setting it would not do."""
    changes: dict[str, Any] = {}
    wanted, modules = dict(layer.named_modules()), dict(trial.named_modules())
    if wanted.keys() != modules.keys():
        return None
    for path, module in wanted.items():
        if type(module) is not type(modules[path]):
            return None
        own, other = _state(module), _state(modules[path])
        if other.keys() - own.keys():
            return None
        for name, value in own.items():
            if name not in other or not _same(value, other[name]):
                changes[f"{path}.{name}".lstrip(".")] = value
    return changes


def _state(module: Module) -> dict[str, Any]:
    """The attributes that make the module what it is, without its modules."""
    return {
        name: value
        for name, value in vars(module).items()
        if name not in _BOOKKEEPING and not isinstance(value, Module) and not _holds_modules(value)
    }


def _holds_modules(value: Any) -> bool:
    if isinstance(value, dict):
        value = list(value.values())
    return isinstance(value, (list, tuple)) and any(isinstance(v, Module) or _holds_modules(v) for v in value)


def _same(value: Any, other: Any) -> bool:
    if isinstance(value, mge.Tensor):
        return (
            isinstance(other, mge.Tensor)
            and isinstance(value, mge.Parameter) == isinstance(other, mge.Parameter)
            and tuple(value.shape) == tuple(other.shape)
            and value.dtype == other.dtype
        )
    if isinstance(value, Observer):
        return type(value) is type(other) and (value.scheme, value.options) == (other.scheme, other.options)
    try:
        return type(value) is type(other) and bool(value == other)
    except Exception:
        return False


def _expression(value: Any, literals: Literals) -> str:
    return empty_tensor(value, literals) if isinstance(value, mge.Tensor) else literals.write(value)


def _made_by_hand(layer: Module, literals: Literals) -> Construction:
    """Writes a layer whose constructor takes what it does not keep: its class with its attributes."""
    literals.use_helper("made")
    attributes = []
    for name, value in vars(layer).items():
        if name in _BOOKKEEPING:
            continue
        if _holds_modules(value):
            raise GraphError(f"a {type(layer).__name__} keeps modules in {name}, which no expression gives")
        if isinstance(value, Module):
            inner = construct(value, literals)
            if inner.changes:
                raise GraphError(f"a {type(layer).__name__} keeps a module in {name} that no call makes")
            attributes.append(f"{name}={inner.call}")
        else:
            attributes.append(f"{name}={_expression(value, literals)}")
    return Construction(f"made({', '.join([literals.name(type(layer)), *attributes])})")


_SMALL = 8  # values of a constant that stand in the code


class Classes:
    """Writes a traced module and its submodules as classes.

    Attributes:
        texts: class name -> its source, the inner ones first.
        constants: path of a constant that the graph held itself -> its value.
        literals: the imports and helpers that the classes need.

    Args:
        traced: the module.
        name: the name of its class.

    Raises:
        GraphError: naming the module or node that no source gives.
    """

    def __init__(self, traced: TracedModule, name: str) -> None:
        self.texts: dict[str, str] = {}
        self.constants: dict[str, mge.Tensor] = {}
        self.literals = Literals()
        self._root = traced
        self._used = _used_modules(traced)
        self._needed = _needed_modules(traced, self._used)
        self._places: dict[int, str] = {}  # a module or tensor that stands already -> its path
        self._shared: list[tuple[str, str]] = []  # other paths of these: (path, path where it stands)
        self._functions = _function_names(traced)
        self._names = {name}
        lines, methods = self._parts(traced, "")
        ties = [_set(self._at(path), self._at(other)) for path, other in self._shared]
        self._add(name, [*lines, *ties], methods)

    def _add(self, name: str, lines: list[str], methods: list[str]) -> None:
        init = "def __init__(self):\n" + indent("\n".join(["super().__init__()", *lines]))
        parts = [f"class {name}(M.Module):", *(indent(part) for part in (init, *methods))]
        self.literals.use("import megengine.module as M")
        self.texts[name] = "\n\n".join(parts).replace(":\n\n", ":\n", 1) + "\n"

    def _class_of(self, module: TracedModule, path: str) -> str:
        """The class of a traced submodule: an earlier one if it has the same text."""
        lines, methods = self._parts(module, path)
        preferred = "".join(part[:1].upper() + part[1:] for part in path.replace("_", ".").split("."))
        name = unused_name(identifier(preferred), self._is_taken)
        self._add(name, lines, methods)
        text = self.texts[name].partition("\n")[2]
        for other, known in self.texts.items():
            if other != name and known.partition("\n")[2] == text:
                del self.texts[name]
                return other
        self._names.add(name)
        return name

    def _is_taken(self, name: str) -> bool:
        return name in self._names or name in self._functions or is_reserved(name)

    def _parts(self, module: TracedModule, path: str) -> tuple[list[str], list[str]]:
        """The statements of ``__init__``, and the methods."""
        lines = list(self._members(module, "self", path))
        methods = []
        for index, (arguments, graph) in enumerate(module.argdef_graph_map.items()):
            taken = self._functions | self._names | set(self.texts)
            body = Body(graph, self.literals, self._reach, self._callee, taken, set(vars(module)))
            signature = _flat_signature(graph, body) if path else self._signature(arguments, body)
            for expr in graph._exprs:
                body.write(expr)
            result = module.argdef_outdef_map[arguments].unflatten(graph._outputs)
            body.lines.append(f"return {_returned(result, self.literals, body)}")
            name = "forward" if index == 0 else f"forward_{index}"
            methods.append(f"def {name}({signature}):\n" + indent("\n".join(body.lines)))
            for attribute, value in body.constants.items():
                lines += self._constant(attribute, value, path)
        return lines, methods

    def _constant(self, name: str, value: Any, path: str) -> Iterator[str]:
        if isinstance(value, Module):
            yield from self._layer(value, f"self.{name}", _join(path, name))
            return
        self.constants[_join(path, name)] = value
        if value.size <= _SMALL:
            self.literals.use("import megengine as mge")
            yield f"self.{name} = mge.Tensor({self.literals.write(value.numpy())})"
        else:
            yield f"self.{name} = {empty_tensor(mge.Tensor(value), self.literals)}"

    def _members(self, module: Module, this: str, path: str) -> Iterator[str]:
        """The statements that give ``this`` its tensors and modules."""
        for name in _in_order_of_use(module):
            value, place = vars(module)[name], _join(path, name)
            target = self._reach(module, this, name)
            if isinstance(value, mge.Tensor):
                if not self._stands(value, place):
                    yield _set(target, empty_tensor(value, self.literals))
            elif isinstance(value, Module) and id(value) in self._needed and not self._stands(value, place):
                yield from self._layer(value, target, place)

    def _layer(self, module: Module, target: str, path: str) -> Iterator[str]:
        """The statements that make ``target`` a module like ``module``."""
        if not isinstance(module, TracedModule) and not self._only_holds(module):
            call, changes = self._leaf(module, path)
            yield _set(target, call)
            for name, value in changes:
                yield f"{target}.{name} = {value}"
        elif isinstance(module, TracedModule) and module.is_qat:
            raise GraphError(
                f"to_source cannot write module {path!r}: MegEngine quantized it; trace the float one."
            )
        elif _is_sequence(module):
            yield from self._sequential(module, target, path)
        elif _has_graph(module):
            yield _set(target, f"{self._class_of(module, path)}()")
        else:
            self.literals.use_helper("Group")
            yield _set(target, "Group()")
            yield from self._members(module, target, path)

    def _only_holds(self, module: Module) -> bool:
        """Whether the graph calls modules of ``module``, and never ``module`` itself."""
        return id(module) not in self._used and next(module.children(), None) is not None

    def _leaf(self, module: Module, path: str) -> tuple[str, tuple[tuple[str, str], ...]]:
        try:
            construction = construct(module, self.literals)
        except GraphError as error:
            raise GraphError(f"to_source cannot write module {path!r}: {error}.") from error
        for name, tensor in module.named_tensors():
            self._stands(tensor, _join(path, name))
        return construction.call, construction.changes

    def _sequential(self, module: TracedModule, target: str, path: str) -> Iterator[str]:
        calls, later = [], []
        for index in range(_count(module)):
            child, place = getattr(module, str(index)), _join(path, str(index))
            if self._stands(child, place):
                calls.append("M.Identity()")  # replaced by the shared one
                continue
            own = f"{target}[{index}]"
            first, *others = self._layer(child, own, place)
            calls.append(first[len(_set(own, "")) :])
            later += others
        self.literals.use("import megengine.module as M")
        layers = "".join(f"{indent(call)},\n" for call in calls)
        yield _set(target, f"M.Sequential(\n{layers})")
        yield from later

    def _stands(self, value: Any, path: str) -> bool:
        """Whether a module or tensor stands at another path already; else it stands at ``path`` now."""
        other = self._places.setdefault(id(value), path)
        if other != path:
            self._shared.append((path, other))
        return other != path

    def _reach(self, module: Any, this: str, path: str) -> str:
        """Writes the attribute at ``path`` of ``module``, whose own expression is ``this``."""
        for part in path.split("."):
            if part.isidentifier() and identifier(part) == part:
                this = f"{this}.{part}"
            elif _is_sequence(module) and module is not self._root:
                this = f"{this}[{part}]"
            elif not _has_graph(module):
                this = f"{this}[{part if part.isdecimal() else self.literals.write(part)}]"
            else:
                this = f"getattr({this}, {self.literals.write(part)})"
            module = getattr(module, part)
        return this

    def _at(self, path: str) -> str:
        return self._reach(self._root, "self", path)

    def _callee(self, expr: Expr, this: str) -> str:
        """What a call of a traced submodule calls: the module, or the method of a further graph."""
        index = [*owner(expr).argdef_graph_map].index(expr.arg_def)  # type: ignore[union-attr]
        return this if index == 0 else f"{this}.forward_{index}"

    def _signature(self, arguments: TreeDef, body: Body) -> str:
        """The parameters of the root, with the structure that it was traced with."""
        positional, keywords = arguments.children_defs
        nodes = iter(body.inputs)
        names = [] if self._root.argspec is None else self._root.argspec.args[1:]
        names = [*names, *(f"argument_{i}" for i in range(len(names), len(positional.children_defs) - 1))]
        pairs = [*zip(names, positional.children_defs[1:], strict=False)]
        fixed: list[tuple[str, str]] = []
        written = [self._parameter(str(name), tree, nodes, body, fixed) for name, tree in pairs]
        needed = max((i for i, (_, default) in enumerate(written) if not default), default=0)
        parameters = [name if i < needed else name + default for i, (name, default) in enumerate(written)]
        if keywords.aux_data:
            parameters.append("*")
            named = zip(keywords.aux_data, keywords.children_defs, strict=True)
            parameters += ["".join(self._parameter(str(n), tree, nodes, body, fixed)) for n, tree in named]
        if fixed:
            several = [self.literals.join("(", [*each], ")") for each in zip(*fixed, strict=True)]
            left, right = fixed[0] if len(fixed) == 1 else several
            body.lines.insert(0, f'assert {left} == {right}, "the trace holds these arguments"')
        return ", ".join(["self", *parameters])

    def _parameter(
        self, name: str, tree: TreeDef, nodes: Iterator[Node], body: Body, fixed: list[tuple[str, str]]
    ) -> tuple[str, str]:
        """Returns the name of the parameter of an argument, and its default.

        The parts of a structure get variables. An argument whose value the trace holds is added to ``fixed``:
        its name and its value.
        """
        leaves = list(_leaves(tree))
        structure = tree.unflatten([next(nodes) if _is_tensor(leaf) else leaf.const_val for leaf in leaves])
        if not any(map(_is_tensor, leaves)):
            own = body.parameter(None, name)
            try:
                value = self.literals.write(structure)
            except GraphError:  # there is no expression for it: it is not checked
                return own, "=None"
            if not any(isinstance(leaf.const_val, np.ndarray) for leaf in leaves):
                fixed.append((own, value))
            return own, f"={value}"
        if isinstance(tree, LeafDef):
            return body.parameter(structure, name), ""
        own = body.parameter(None, name)
        body.lines += body.unpack(structure, own)
        return own, ""


def _is_tensor(leaf: LeafDef) -> bool:
    return mge.Tensor in leaf.type


def _leaves(tree: TreeDef) -> Iterator[LeafDef]:
    if isinstance(tree, LeafDef):
        yield tree
    for child in tree.children_defs:
        yield from _leaves(child)


def _flat_signature(graph: InternalGraph, body: Body) -> str:
    """The parameters of a submodule: its tensors, one by one."""
    return ", ".join(["self", *(body.parameter(node, node._name) for node in graph._inputs[1:])])


def _returned(result: Any, literals: Literals, body: Body) -> str:
    text = literals.write(result, body.names)
    return text[1:-1] if isinstance(result, tuple) and len(result) > 1 and "\n" not in text else text


def _set(target: str, value: str) -> str:
    """The statement that sets an attribute; of ``self`` by `setattr` if its name is no identifier."""
    if target.startswith("getattr(") and target.endswith(")"):
        return f"setattr({target[len('getattr(') : -1]}, {value})"
    return f"{target} = {value}"


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _in_order_of_use(module: Module) -> list[str]:
    """The attributes of a module in the order in which its graphs use them, the others after them.

    A trace has its attributes, and the exprs that read them, in no order.
    """
    graphs = module.argdef_graph_map.values() if isinstance(module, TracedModule) else ()
    used: dict[str, None] = {}
    for graph in graphs:
        for expr in graph._exprs:
            if not isinstance(expr, GetAttr):
                used.update(
                    dict.fromkeys(name for node in expr.inputs for name in _attribute_of(node, graph))
                )
    others = sorted(vars(module), key=lambda name: (len(name), name) if name.isdecimal() else (0, ""))
    return [name for name in dict.fromkeys([*used, *others]) if name in vars(module)]


def _attribute_of(node: Node, graph: InternalGraph) -> Iterator[str]:
    """Yields the attribute of the graph's own module that a node is, or is part of."""
    while isinstance(node.expr, GetAttr):
        name, node = node.expr.name, node.expr.inputs[0]
        if node is graph._inputs[0]:
            yield name.partition(".")[0]


def _has_graph(module: Module) -> bool:
    return isinstance(module, TracedModule) and bool(module.argdef_graph_map)


def _count(module: Module) -> int:
    """The number of modules that are called 0, 1, 2 ..."""
    return sum(name.isdecimal() for name in vars(module))


def _is_sequence(module: Any) -> bool:
    """Whether a traced submodule does what `M.Sequential` does: each of its modules once, in order."""
    if not isinstance(module, TracedModule) or len(module.argdef_graph_map) != 1:
        return False
    (graph,) = module.argdef_graph_map.values()
    members = [name for name, value in vars(module).items() if isinstance(value, (Module, mge.Tensor))]
    calls = [expr for expr in graph._exprs if isinstance(expr, CallMethod)]
    attributes = len(graph._exprs) - len(calls)
    if len(graph._inputs) != 2 or not calls or not len(members) == len(calls) == attributes:
        return False
    value = graph._inputs[1]
    for index, expr in enumerate(calls):
        module_node = expr.inputs[0]
        own = getattr(module, str(index), None)
        if own is None or owner(expr) is not own or expr.inputs[1:] != [value] or len(expr.outputs) != 1:
            return False
        if (
            expr.kwargs
            or len(expr.args) != 2
            or not isinstance(expr.out_def, LeafDef)
            or module_node is value
        ):
            return False
        (value,) = expr.outputs
    return list(graph._outputs) == [value]


def _used_modules(traced: TracedModule) -> set[int]:
    """The modules that a graph calls, or gives to one that it calls."""
    calls = (e for g in graphs_of(traced) for e in g._exprs if not isinstance(e, GetAttr))
    nodes = (node for expr in calls for node in expr.inputs)
    return {id(node.owner) for node in nodes if isinstance(node, ModuleNode)}


def _needed_modules(traced: TracedModule, used: set[int]) -> set[int]:
    """The modules that a graph uses, or that have tensors, and those around them."""
    needed: set[int] = set()
    for path, module in traced.named_modules():
        if id(module) in used or next(iter(module.tensors()), None) is not None:
            parts = path.split(".") if path else []
            needed |= {id(get_module(traced, ".".join(parts[:end]))) for end in range(len(parts) + 1)}
    return needed


def _function_names(traced: TracedModule) -> set[str]:
    """The names that imports of functions and classes take."""
    exprs: Iterable[Expr] = (expr for graph in graphs_of(traced) for expr in graph._exprs)
    functions = {
        plain(expr.func).__qualname__.partition(".")[0] for expr in exprs if isinstance(expr, CallFunction)
    }
    return functions | {type(module).__name__ for module in traced.modules()}
