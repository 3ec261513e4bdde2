"""The statements of a graph: one for each expr, on variables that are called like the nodes."""

from __future__ import annotations

import builtins
import inspect
import keyword
import re
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from typing import Any

import megengine as mge
import megengine.functional as F
import numpy as np
from megengine.module import Module
from megengine.traced_module.traced_module import InternalGraph

from qtrace.errors import GraphError
from qtrace.extras.source.literals import (
    WIDTH,
    Literals,
    expression_of_op,
    shorten_eps,
    shortest,
    without_defaults,
)
from qtrace.gradients import plain
from qtrace.graph.kernels import MAX_RANK
from qtrace.graph.types import Apply, CallFunction, CallMethod, Constant, Expr, GetAttr, Node, TensorNode
from qtrace.graph.walk import called_graph, owner, reads_shape, unused_name

# They give the same number for numbers as for Tensors of int32.
_SIZE_ARITHMETIC = frozenset(
    ("__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__", "__floordiv__", "__neg__")
)
# Function -> its arguments that may be a number as well as a Tensor.
_TAKES_SIZES = {
    F.reshape: ("target_shape",),
    F.broadcast_to: ("shape",),
    F.full: ("shape",),
    F.zeros: ("shape",),
    F.ones: ("shape",),
    F.arange: ("start", "stop", "step"),
    F.vision.interpolate: ("size",),
}


def find_plain_shapes(graph: InternalGraph) -> set[Node]:
    """Finds the shapes that ``x.shape`` stands for, whether the source is traced or run.

    All that reads such a shape, or a size computed from it, takes numbers as well as Tensors. The others are
    Tensors in either case: ops compute with them, or the graph returns them.

    Args:
        graph: a graph of a traced module.

    Returns:
        The nodes of these shapes.
    """
    candidates = _find_candidates(graph)
    plain_nodes: set[Node] = set()
    for expr in reversed(graph._exprs):
        for node in expr.outputs or ():
            if node not in candidates or node in graph._outputs:
                continue
            if all(_takes(user, node, candidates, plain_nodes) for user in node.users):
                plain_nodes.add(node)
    return {expr.outputs[0] for expr in graph._exprs if _is_whole_shape(expr)} & plain_nodes


def _find_candidates(graph: InternalGraph) -> set[Node]:
    """Finds the nodes that are a tuple or a number if shapes are tuples, whoever reads them."""
    shapes: set[Node] = set()
    sizes: set[Node] = set()
    for expr in graph._exprs:
        if _is_whole_shape(expr):
            shapes.add(expr.outputs[0])
        elif isinstance(expr, CallMethod) and expr.outputs and not expr.kwargs:
            if expr.method == "__getitem__" and expr.args[0] in shapes:
                index = expr.args[1]
                if type(index) is int:
                    sizes.add(expr.outputs[0])
                elif isinstance(index, slice) and not any(_nodes(index)):
                    shapes.add(expr.outputs[0])
            elif expr.method in _SIZE_ARITHMETIC and all(type(a) is int or a in sizes for a in expr.args):
                sizes.add(expr.outputs[0])
    return shapes | sizes


def _is_whole_shape(expr: Expr) -> bool:
    """Whether an expr is the shape of a tensor that has axes: ``shape`` of another is a tuple, always."""
    if not isinstance(expr, Apply) or not reads_shape(expr):
        return False
    (node,) = expr.inputs
    axis = expr.opdef.__getstate__().get("axis", MAX_RANK)
    return axis == MAX_RANK and isinstance(node, TensorNode) and bool(node.shape)


def _takes(user: Expr, node: Node, candidates: set[Node], plain_nodes: set[Node]) -> bool:
    """Whether a reader of a size takes a number as well as a Tensor."""
    if user.outputs and user.outputs[0] in candidates:
        return user.outputs[0] in plain_nodes
    if isinstance(user, CallMethod) and owner(user) is None and not isinstance(user.args[0], type):
        if user.method == "__getitem__":  # a Tensor as an index takes the place of a number and of an axis
            index = user.args[1] if isinstance(user.args[1], tuple) else (user.args[1],)
            return user.args[0] is not node and not any(node is each for each in index)
        return user.method == "reshape" and user.args[0] is not node
    if isinstance(user, CallFunction):
        function = plain(user.func)
        names = _TAKES_SIZES.get(function, ())
        arguments = inspect.signature(function).bind(*user.args, **user.kwargs).arguments if names else {}
        others = (value for name, value in arguments.items() if name not in names)
        return bool(names) and not any(node is each for value in others for each in _nodes(value))
    return False


def _nodes(value: Any) -> Iterator[Node]:
    if isinstance(value, Node):
        yield value
    elif isinstance(value, slice):
        yield from _nodes((value.start, value.stop, value.step))
    elif isinstance(value, dict):
        yield from _nodes(tuple(value.values()))
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from _nodes(each)


_BINARY = {
    "__add__": "+",
    "__sub__": "-",
    "__mul__": "*",
    "__truediv__": "/",
    "__floordiv__": "//",
    "__mod__": "%",
    "__pow__": "**",
    "__matmul__": "@",
    "__and__": "&",
    "__or__": "|",
    "__xor__": "^",
    "__lshift__": "<<",
    "__rshift__": ">>",
    "__lt__": "<",
    "__le__": "<=",
    "__gt__": ">",
    "__ge__": ">=",
    "__eq__": "==",
    "__ne__": "!=",
}
_REFLECTED = {f"__r{name[2:]}": sign for name, sign in list(_BINARY.items())[:13]}
_IN_PLACE = {f"__i{name[2:]}": sign for name, sign in list(_BINARY.items())[:13]}
_OPERATORS = {F.add: "+", F.sub: "-", F.mul: "*", F.div: "/", F.matmul: "@"}
_UNARY = {"__neg__": "-", "__invert__": "~", "__pos__": "+"}
# They make a float32 of a number next to a tensor of float32.
_ARITHMETIC = frozenset((*_BINARY, *_REFLECTED, *_IN_PLACE))
# Names of nodes that say no more than that a shape is read.
_OF_OPS = re.compile(r"(getvarshape|getitem)_out(_\d+)?$")
_LONG = 60  # characters of a target on one line
_MODULE_NAMES = frozenset(("M", "F", "mge", "np", "apply", "builtin", "Group", "made", "Path", "load"))
# Builtins that the statements of a body use; a parameter may have the name of any other.
_USED_BUILTINS = frozenset(("abs", "float", "getattr", "slice"))
_BUILTINS = frozenset(dir(builtins))
_RESERVED = _MODULE_NAMES | _BUILTINS | {"self"}


def is_reserved(name: str) -> bool:
    """Returns whether no class of the source may have a name: a keyword, or what the source uses itself."""
    return name in _RESERVED or keyword.iskeyword(name)


def identifier(name: str) -> str:
    """Returns ``name`` with what no identifier of Python has replaced by underscores."""
    name = re.sub(r"\W", "_", name, flags=re.ASCII) or "_"
    return f"_{name}" if name[0].isdigit() or keyword.iskeyword(name) else name


def _plain_name(node: Node, name: str) -> str:
    """Returns the name of a node, or ``name`` for one that is called like the op of MegEngine."""
    return name if _OF_OPS.match(node._name) else node._name


def _reads_size(expr: CallMethod) -> bool:
    """Whether an expr takes one size of a shape."""
    shape, index = expr.args
    return isinstance(shape, Node) and reads_shape(shape.expr) and bool(shape.shape) and type(index) is int


class Body:
    """The statements of one graph.

    Attributes:
        lines: the statements.
        constants: what the graph holds itself, which the module needs as attributes: name -> value.
        names: node -> its variable, or the expression that reaches it from ``self``.
        inputs: the nodes of the graph's arguments without ``self``.

    Args:
        graph: a graph of a traced module.
        literals: writes arguments and collects imports.
        reach: writes the attribute at a path of a module: (module, expression of the module, path).
        callee: writes what is called for a traced submodule: (expr, expression of the module).
        taken: names that no variable may have: the names of functions and classes.
        attributes: names that no constant may have: the module's attributes.
    """

    def __init__(
        self,
        graph: InternalGraph,
        literals: Literals,
        reach: Callable[[Any, str, str], str],
        callee: Callable[[Expr, str], str],
        taken: set[str],
        attributes: set[str],
    ) -> None:
        self.lines: list[str] = []
        self.constants: dict[str, Any] = {}
        self.names: dict[Node, str] = {graph._inputs[0]: "self"}
        self.inputs = tuple(graph._inputs[1:])
        self._literals, self._reach, self._callee = literals, reach, callee
        self._plain_shapes = find_plain_shapes(graph)
        self._used, self._attributes = set(_RESERVED | taken), attributes | set(dir(Module))
        self._own: set[str] = set()  # names of parameters and variables

    def variable(self, node: Node) -> str:
        """Gives a node a variable of its name, or of the next that is free."""
        return self._named(node, node._name or "value", self._used)

    def parameter(self, node: Node | None, name: str) -> str:
        """Returns the name of a parameter; ``node`` is its value, if it is a tensor."""
        return self._named(node, name, (self._used - _BUILTINS) | _USED_BUILTINS | self._own)

    def _named(self, node: Node | None, name: str, used: AbstractSet[str]) -> str:
        name = unused_name(identifier(name), used.__contains__)
        self._used.add(name)
        self._own.add(name)
        if node is not None:
            self.names[node] = name
        return name

    def write(self, expr: Expr) -> None:
        """Adds the statements of an expr.

        Raises:
            GraphError: naming the node, when no source gives it.
        """
        try:
            self._write(expr)
        except GraphError as error:
            node = expr.outputs[0]._name if expr.outputs else type(expr).__name__
            raise GraphError(f"to_source cannot write node {node!r}: {error}.") from error

    def _write(self, expr: Expr) -> None:
        if isinstance(expr, GetAttr):
            base = expr.inputs[0]
            self.names[expr.outputs[0]] = self._reach(base.owner, self.names[base], expr.name)
        elif isinstance(expr, Constant):
            self._constant(expr)
        elif isinstance(expr, Apply) and expr.outputs[0] in self._plain_shapes:
            self._shape(expr)
        elif isinstance(expr, Apply):
            self._literals.use("from megengine.core._imperative_rt.core2 import apply")
            op = expression_of_op(expr.opdef, self._literals)
            value = f"apply({', '.join([op, *(self.names[n] for n in expr.inputs)])})"  # a list, always
            if len(expr.outputs) == 1:
                (node,) = expr.outputs
                name = _plain_name(node, "shape") if reads_shape(expr) else node._name or "value"
                self.lines.append(f"{self._named(node, name, self._used)} = {value}[0]")
            else:
                self.lines += self.unpack(list(expr.outputs), value)
        elif isinstance(expr, CallFunction):
            function = self._literals.name(expr.func)
            arguments, options = without_defaults(expr.func, list(expr.args), expr.kwargs)
            arguments, options = shorten_eps(expr.func, arguments, options)
            if not options and (text := self._operator(expr, arguments)):
                self._assign(expr, text)
                return
            self._call(expr, function, arguments, options)
        elif isinstance(expr, CallMethod):
            self._method(expr)
        else:
            raise GraphError(f"a {type(expr).__name__} lacks a source")

    def _operator(self, expr: CallFunction, arguments: list[Any]) -> str:
        """Writes a function of float32 tensors and numbers as its operator; "" if there is none."""
        sign = _OPERATORS.get(expr.func)
        if sign is None or len(arguments) != 2 or type(arguments[0]) is bool or type(arguments[1]) is bool:
            return ""
        dtypes = {np.dtype(node.dtype) for node in arguments if isinstance(node, TensorNode)}
        if dtypes != {np.dtype(np.float32)} or not all(isinstance(a, (Node, float, int)) for a in arguments):
            return ""
        left, right = (self._value(shortest(a)) for a in arguments)
        left = f"({left})" if left.startswith("-") else left
        line = f"{left} {sign} {right}"
        if len(expr.outputs[0]._name) + len(line) < WIDTH:
            return line
        return f"(\n    {left}\n    {sign} {right}\n)"

    def _constant(self, expr: Constant) -> None:
        node = expr.outputs[0]
        name = unused_name(identifier(node._name), self._attributes.__contains__)
        self._attributes.add(name)
        self.constants[name] = expr.value
        self.names[node] = f"self.{name}"

    def _shape(self, expr: Apply) -> None:
        """Writes a shape as ``x.shape``: where it is read, if that is one place, and no write precedes it."""
        (node,), (shape,) = expr.inputs, expr.outputs
        value = f"{self.names[node]}.shape"
        methods = (user.method for user in node.users if isinstance(user, CallMethod))
        if len(shape.users) == 1 and not any(m in _IN_PLACE or m == "__setitem__" for m in methods):
            self.names[shape] = value
        else:
            self.lines.append(f"{self._named(shape, _plain_name(shape, 'shape'), self._used)} = {value}")

    def _size(self, expr: CallMethod) -> None:
        """Writes one size of a shape: where it is read, if that is one place."""
        (size,), index = expr.outputs, expr.args[1]
        value = f"{self.names[expr.args[0]]}[{index}]"
        if len(size.users) == 1:
            self.names[size] = value
        else:
            name = _plain_name(size, f"size_{index}" if index >= 0 else "size_last")
            self.lines.append(f"{self._named(size, name, self._used)} = {value}")

    def _method(self, expr: CallMethod) -> None:
        this, *arguments = expr.args
        if called_graph(expr) is not None:
            tensors = ", ".join(self.names[node] for node in expr.inputs[1:])
            self._assign(expr, f"{self._callee(expr, self.names[this])}({tensors})")
        elif owner(expr) is not None:
            function = self.names[this] + ("" if expr.method == "__call__" else f".{expr.method}")
            self._call(expr, function, arguments, expr.kwargs)
        elif isinstance(this, type):
            self._literals.use("import megengine as mge")
            constructor = "mge.Parameter" if issubclass(this, mge.Parameter) else "mge.Tensor"
            if expr.method not in ("__new__", "__call__"):
                constructor = f"{constructor}.{expr.method}"
            self._call(expr, constructor, arguments, expr.kwargs)
        else:
            self._tensor_method(expr, self.names[this], arguments)

    def _tensor_method(self, expr: CallMethod, this: str, arguments: list[Any]) -> None:
        method = expr.method
        if method in _ARITHMETIC and np.dtype(expr.inputs[0].dtype) == np.float32:
            arguments = [shortest(value) for value in arguments]
        if method == "__setitem__":
            self.lines.append(
                f"{this}[{self._literals.index(arguments[0], self.names)}] = {self._value(arguments[1])}"
            )
            self.names[expr.outputs[0]] = this  # it is the tensor itself
        elif method in _IN_PLACE and this.isidentifier():
            self.lines.append(f"{this} {_IN_PLACE[method]}= {self._value(arguments[0])}")
            self.names[expr.outputs[0]] = this
        elif method == "__getitem__" and _reads_size(expr):
            self._size(expr)
        elif method == "__getitem__":
            self._assign(expr, f"{this}[{self._literals.index(arguments[0], self.names)}]")
        elif method in _BINARY:
            self._assign(expr, f"{this} {_BINARY[method]} {self._value(arguments[0])}")
        elif method in _REFLECTED:
            other = self._value(arguments[0])
            other = f"({other})" if other.startswith("-") else other
            self._assign(expr, f"{other} {_REFLECTED[method]} {this}")
        elif method == "__abs__":
            self._assign(expr, f"abs({this})")
        elif method in _UNARY:
            self._assign(expr, f"{_UNARY[method]}{this}")
        else:
            self._call(expr, f"{this}.{method}", arguments, expr.kwargs)

    def _value(self, value: Any) -> str:
        return self._literals.write(value, self.names)

    def _call(self, expr: Expr, function: str, arguments: list[Any], options: Mapping[str, Any]) -> None:
        target = f"{expr.outputs[0]._name} = " if len(expr.outputs or ()) == 1 else ""
        self._assign(expr, self._literals.call(function, arguments, options, self.names, target))

    def _assign(self, expr: Expr, value: str) -> None:
        outputs = list(expr.outputs or ())
        if not outputs:
            self.lines.append(value)
            return
        structure = outputs if expr.out_def is None else expr.out_def.unflatten(outputs)
        self.lines += self.unpack(structure, value)

    def unpack(self, structure: Any, value: str) -> Iterator[str]:
        """Yields the statements that give the nodes of a structure their variables.

        Args:
            structure: a node, or tuples, lists and dicts of them.
            value: the expression of the structure.
        """
        later: list[tuple[Any, str]] = []
        if isinstance(structure, dict) and structure and value.isidentifier():
            for key, part in structure.items():
                yield from self.unpack(part, f"{value}[{self._literals.write(key)}]")
            return
        target = self._target(structure, later)
        if target != value:
            yield f"{target} = {value}"
        for part, expression in later:
            yield from self.unpack(part, expression)

    def _target(self, structure: Any, later: list[tuple[Any, str]]) -> str:
        if isinstance(structure, Node):
            return self.variable(structure)
        if isinstance(structure, (tuple, list)) and structure:
            parts = [self._target(part, later) for part in structure]
            parts = [
                f"({part})" if isinstance(inner, (tuple, list)) and part[0] != "(" else part
                for part, inner in zip(parts, structure, strict=True)
            ]
            line = f"{parts[0]}," if len(parts) == 1 else ", ".join(parts)
            return line if len(line) < _LONG else self._literals.join("(", parts, ")")
        name = unused_name("values", self._used.__contains__)
        self._used.add(name)
        if not isinstance(structure, dict):
            return name  # a constant: nothing reads it
        later += [(part, f"{name}[{self._literals.write(key)}]") for key, part in structure.items()]
        return name
