"""Reads the arguments of a call for the op rules; an argument that cannot be read is an `UnreadableError`."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping
from typing import Any

from megengine import Tensor

from qtrace.graph.open_axes import traced_value
from qtrace.graph.types import Apply, CallFunction, CallMethod, Expr, TensorNode, is_call_module
from qtrace.graph.walk import owner, signature


class UnreadableError(ValueError):
    """The form of a call is not supported; the message gives the reason as a clause."""


class Arguments(dict[str, Any]):
    """The arguments of one call by name.

    The methods read the argument ``name`` as numbers or as a node of the graph, and raise `UnreadableError`
    for anything else. A name that the call does not have is a `KeyError`: a bug in the rule.
    """

    def integer(self, name: str) -> int:
        """Reads an integer."""
        return _convert(int, name, self[name], "an integer")

    def number(self, name: str) -> float:
        """Reads a number as a float."""
        return _convert(float, name, self[name], "a number")

    def flag(self, name: str) -> bool:
        """Reads a truth value."""
        return _convert(bool, name, self[name], "true or false")

    def integers(self, name: str, count: int) -> tuple[int, ...]:
        """Reads one integer, which stands for ``count`` equal ones, or ``count`` integers."""
        return integers(name, self[name], count)

    def axes(self, name: str) -> tuple[int, ...] | None:
        """Reads one axis or several; None stands for all axes."""
        value = self[name]
        if value is None:
            return None
        axes = value if isinstance(value, (tuple, list)) else (value,)
        return tuple(_convert(int, name, axis, "an axis") for axis in axes)

    def tensor(self, name: str = "inp") -> TensorNode:
        """Reads a tensor of the graph."""
        return _tensor(self[name])


def integers(name: str, value: Any, count: int) -> tuple[int, ...]:
    """Reads ``value``, one integer or ``count`` integers, as ``count`` integers.

    Raises:
        UnreadableError: for any other value; the message calls it ``name``.
    """
    expected = f"{count} integers"
    values = value if isinstance(value, (tuple, list)) else (value,) * count
    if len(values) != count:
        raise unreadable(name, value, expected)
    return tuple(_convert(int, name, v, expected) for v in values)


def _convert(convert: Callable[[Any], Any], name: str, value: Any, expected: str) -> Any:
    if not isinstance(value, TensorNode):
        try:
            return convert(value)
        except (TypeError, ValueError, OverflowError):
            pass
    raise unreadable(name, value, expected)


def unreadable(name: str, value: Any, expected: str) -> UnreadableError:
    """Builds the error for an argument that is not of the expected sort.

    Args:
        name: name of the argument in the message.
        value: value of the argument.
        expected: the sort of value that the rule reads, such as "an integer".
    """
    if children(value):
        return UnreadableError(f"its {name} is computed in the graph, and its rule reads only numbers there")
    return UnreadableError(f"its {name} is {reprlib.repr(value)}, which its rule does not read as {expected}")


def _tensor(value: Any) -> TensorNode:
    if not isinstance(value, TensorNode):
        raise UnreadableError("its input is not a tensor of the graph")
    return value


def arguments(expr: Expr) -> Arguments:
    """Reads the arguments of a call by parameter name, defaults included.

    For a module call the names come from its ``forward`` without ``self``.

    Raises:
        UnreadableError: for a kernel, whose arguments are unnamed, and for arguments that do not fit.
    """
    if isinstance(expr, CallFunction):
        return _bind(expr.func, expr.args, expr.kwargs)
    if not isinstance(expr, CallMethod):
        raise UnreadableError("its arguments belong to a kernel, which are not read")
    if is_call_module(expr):
        module = expr.inputs[0].owner
        return _bind(type(module).forward, (module, *expr.args[1:]), expr.kwargs)
    return _bind(getattr(Tensor, expr.method), expr.args, expr.kwargs)


def named(expr: Expr) -> Arguments:
    """Reads the arguments of a function or of its Tensor method by name; the tensor is ``inp``."""
    by_name = arguments(expr)
    if "self" in by_name:
        by_name["inp"] = by_name.pop("self")
    return by_name


def settings(expr: Expr, *names: str) -> Arguments:
    """Reads the settings of an op: attributes of a module or of a kernel, arguments of a function.

    Args:
        expr: a call.
        *names: the names of the attributes; a function or Tensor method gives all of its arguments.

    Raises:
        UnreadableError: when the module lacks one of the attributes.
    """
    holder: Any = expr.opdef if isinstance(expr, Apply) else owner(expr)
    if holder is None:
        return named(expr)
    for name in names:
        if not hasattr(holder, name):
            raise UnreadableError(f"its {type(holder).__name__} lacks {name}, so its rule does not read it")
    return Arguments({name: getattr(holder, name) for name in names})


def _bind(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    try:
        bound = signature(func).bind(*args, **kwargs)
    except TypeError as error:
        raise UnreadableError(f"its arguments do not fit {func.__name__} ({error})") from None
    bound.apply_defaults()
    return Arguments(bound.arguments)


def traced_arguments(values: Mapping[str, Any]) -> tuple[Arguments, str]:
    """Replaces arguments that are computed from shapes by the numbers of the traced sizes.

    Args:
        values: name of an argument -> a number, a node, or nested tuples of both.

    Returns:
        The arguments with numbers in the place of nodes, and a clause that lists the computed ones or "".

    Raises:
        UnreadableError: when an argument depends on the values of tensors, which no trace fixes.
    """
    numbers = Arguments({name: _without_nodes(name, value) for name, value in values.items()})
    computed = [name for name, value in values.items() if children(value)]
    if not computed:
        return numbers, ""
    listed = ", ".join(f"{name} {numbers[name]!r}" for name in computed)
    return numbers, f"computed from shapes, and fixed at the traced size: {listed}"


def _without_nodes(name: str, value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return tuple(_without_nodes(name, v) for v in value)
    if not isinstance(value, TensorNode):
        return value
    array = traced_value(value)
    if array is None:
        raise UnreadableError(f"its {name} is computed from values: compute it from shapes, or fix it")
    return array.item() if array.size == 1 and array.ndim == 0 else tuple(array.reshape(-1).tolist())


def positional(expr: Expr) -> tuple[Any, ...]:
    """Returns the positional operands of a function, a method, a module (without itself) or a kernel."""
    if isinstance(expr, Apply):
        return tuple(expr.inputs)
    return tuple(expr.args[1:] if is_call_module(expr) else expr.args)


def operands(expr: Expr, count: int) -> tuple[Any, ...]:
    """Returns the first ``count`` positional operands.

    Raises:
        UnreadableError: when the call has fewer operands.
    """
    first = positional(expr)[:count]
    if len(first) < count:
        raise UnreadableError(f"it has {len(first)} operands, and its rule reads {count}")
    return first


def activation(expr: Expr) -> TensorNode:
    """Returns the first operand.

    Raises:
        UnreadableError: when the operand is not a tensor of the graph.
    """
    return _tensor(operands(expr, 1)[0])


def tensors(*values: Any) -> tuple[TensorNode, ...]:
    """Returns the tensor nodes among ``values``."""
    return tuple(v for v in values if isinstance(v, TensorNode))


def children(value: Any) -> tuple[TensorNode, ...]:
    """Returns the tensor nodes in nested tuples, lists, dicts and slices."""
    if isinstance(value, TensorNode):
        return (value,)
    if isinstance(value, slice):
        value = (value.start, value.stop, value.step)
    if isinstance(value, dict):
        value = tuple(value.values())
    return tuple(n for v in value for n in children(v)) if isinstance(value, (tuple, list)) else ()
