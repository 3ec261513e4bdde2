"""The inputs of a trace, and the signature of ``forward``."""

from __future__ import annotations

import copy
import difflib
import inspect
from collections.abc import Callable, Mapping, Sequence
from types import FunctionType
from typing import Any

import numpy as np
from megengine import Tensor
from megengine.module import Module
from megengine.traced_module import TracedModule
from megengine.traced_module.pytree import tree_flatten

from qtrace.errors import TraceError
from qtrace.graph.open_axes import OpenAxes, OpenAxis, other_sizes, repeat_to


def with_forward(own: type[Module], method: str) -> type[Module]:
    """Returns a subclass of ``own`` whose ``forward`` is its ``method``, which may call the old forward."""
    inside = False
    called = getattr(own, method)

    def forward(self: Module, *args: Any, **kwargs: Any) -> Any:
        nonlocal inside
        if inside:
            return own.forward(self, *args, **kwargs)
        inside = True
        try:
            return called(self, *args, **kwargs)
        finally:
            inside = False

    return _subclass(own, "forward", forward, called, inspect.signature(called))


def fix_arguments(source: Module, method: str, fixed: Mapping[str, Any]) -> Module:
    """Returns a module that shares all with ``source`` and whose ``method`` takes the other arguments only.

    Args:
        source: the module; it is not changed.
        method: the name of the method.
        fixed: value of each argument that is fixed, by its name.

    Raises:
        TraceError: for a graph, which lacks such arguments, and for a name that the method does not take.
    """
    own = type(source)
    called = getattr(own, method, None)
    if isinstance(source, TracedModule):
        raise TraceError("fixed goes with a module: a graph is traced already, and takes only Tensors.")
    if not callable(called):  # refused with its name by `check_signature`
        return source
    signature = inspect.signature(called)
    names = list(signature.parameters)[1:]  # without self
    collects = [p.name for p in signature.parameters.values() if p.kind is inspect.Parameter.VAR_KEYWORD]
    named = [n for n in names if signature.parameters[n].kind not in _VARIADIC]
    unknown = [name for name in fixed if name not in named]
    if unknown and not collects:
        similar = difflib.get_close_matches(unknown[0], named, n=1)
        hint = f"did you mean {similar[0]!r}?" if similar else f"there are: {', '.join(named) or 'none'}."
        raise TraceError(f"fixed: {own.__name__}.{method} takes no argument {unknown[0]!r}; {hint}")
    rest = _without(signature, [name for name in fixed if name in named])

    def complete(*args: Any, **kwargs: Any) -> inspect.BoundArguments:
        """Returns all arguments of ``called`` for those that are not fixed."""
        bound = rest.bind(*args, **kwargs).arguments
        for name, value in fixed.items():
            if name in named:
                bound[name] = value
            else:
                bound[collects[0]] = {**bound.get(collects[0], {}), name: value}
        ordered = {name: bound[name] for name in signature.parameters if name in bound}
        return inspect.BoundArguments(signature, ordered)

    def forward(self: Module, *args: Any, **kwargs: Any) -> Any:
        call = complete(self, *args, **kwargs)
        return called(*call.args, **call.kwargs)

    result = object.__new__(_subclass(own, method, forward, called, rest))
    result.__dict__.update(source.__dict__)
    return result


_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def _without(signature: inspect.Signature, names: list[str]) -> inspect.Signature:
    """Returns ``signature`` without the parameters of these names."""
    return signature.replace(parameters=[p for n, p in signature.parameters.items() if n not in names])


def _subclass(
    own: type[Module],
    method: str,
    forward: Callable[..., Any],
    called: Callable[..., Any],
    signature: inspect.Signature,
) -> type[Module]:
    """Returns a subclass of ``own`` whose ``method`` is ``forward``, with the globals of what it calls.

    MegEngine's tracer wraps the functions that the globals of forward name: with other globals, a function
    that the user's file imports by name would be recorded as a bare op.
    """
    assert isinstance(forward, FunctionType)
    scope = getattr(inspect.unwrap(called), "__globals__", forward.__globals__)
    outer = FunctionType(forward.__code__, scope, method, None, forward.__closure__)
    outer.__signature__ = signature  # type: ignore[attr-defined]
    return type(own.__name__, (own,), {"__module__": own.__module__, method: outer})


Arguments = tuple[tuple[Any, ...], dict[str, Any]]  # by position and by name
Dynamic = Mapping[str, Mapping[int, str]]


def to_tensors(example: Sequence[Any], names: Sequence[str] = ()) -> tuple[Any, ...]:
    """Converts the numpy arrays of the examples to Tensors, in their containers.

    Args:
        example: the examples.
        names: the names of the examples for messages; their numbers if empty.

    Raises:
        TraceError: when an example is of a type that MegEngine's tracer does not know.
    """
    converted = []
    for index, value in enumerate(example):
        try:
            converted.append(_convert(value))
            tree_flatten(converted[-1])
        except (AssertionError, TypeError, ValueError, RuntimeError) as error:
            raise TraceError(
                f"example {names[index] if names else index} ({type(value).__name__}) cannot be an input: "
                f"give Tensors, numpy arrays, or dicts, lists and tuples of them ({error})."
            ) from error
    return tuple(converted)


def _convert(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return Tensor(value)
    if type(value) in (list, tuple):
        return type(value)(_convert(v) for v in value)
    if isinstance(value, dict):
        result = copy.copy(value)  # keeps the kind of dict, and a defaultdict's factory
        result.update((k, _convert(v)) for k, v in value.items())
        return result
    return value


def other_example(value: Any, index: int) -> Arguments:
    """Converts an entry of ``also``: a tuple of inputs, a dict of inputs by name, or the one input.

    Raises:
        TraceError: when an input is of a type that MegEngine's tracer does not know.
    """
    args, kwargs = (
        (value, {}) if type(value) is tuple else ((), value) if type(value) is dict else ((value,), {})
    )
    titles = [f"{i} of also[{index}]" for i in range(len(args))]
    names = [f"{name} of also[{index}]" for name in kwargs]
    named = to_tensors([*kwargs.values()], names)
    return to_tensors(args, titles), dict(zip(kwargs, named, strict=True))


def describe(args: Arguments) -> str:
    """Returns the shapes of the inputs, such as ``2x3x8x8, mask 2x8``."""
    shapes = [("", value) for value in args[0]] + [(f"{name} ", value) for name, value in args[1].items()]
    return ", ".join(
        prefix + " and ".join("x".join(map(str, t._tuple_shape)) or "scalar" for t in _tensors(value))
        for prefix, value in shapes
        if _tensors(value)
    )


def fresh(args: Arguments) -> Arguments:
    """Copies the inputs for one run: a forward may write into its inputs."""
    return _map_tensors(lambda t: copy.deepcopy(t), args)


def batch_size(args: Arguments) -> int | None:
    """Returns the leading dimension of the first tensor that has one."""
    for tensor in _tensors(args):
        if tensor.ndim:
            return int(tensor._tuple_shape[0])
    return None


def vary(args: Arguments, high: bool, extra: int = 0) -> Arguments:
    """Generates inputs like ``args`` with other values, inside the range of the example's values.

    Args:
        args: the example inputs.
        high: whether the values gather at the upper or the lower end of the range. A branch on a mean, a
            minimum or a maximum takes the other path for one of the two.
        extra: number of rows to add to every tensor whose leading dimension is the batch.
    """
    rng = np.random.default_rng(int(high))  # fixed: the same model has the same verdict
    batch = batch_size(args)

    def vary_tensor(tensor: Tensor) -> Tensor:
        array = tensor.numpy()
        shape = array.shape
        if extra and shape and shape[0] == batch:
            shape = (shape[0] + extra, *shape[1:])
        if tensor.dtype.metadata:  # quantized: other values might not be multiples of its scale
            values = np.resize(array, shape)
        else:
            values = _other_values(array, shape, high, rng)
        return type(tensor)(values, dtype=tensor.dtype, device=tensor.device)

    return _map_tensors(vary_tensor, args)


def enlarge(args: Arguments) -> Arguments:
    """Generates inputs like ``args`` at twice the height and width, or twice the length without them."""

    def enlarge_tensor(tensor: Tensor) -> Tensor:
        array = tensor.numpy()
        axes = range(2, array.ndim) if array.ndim > 3 else range(1, min(array.ndim, 2))
        shape = tuple(size * 2 if axis in axes else size for axis, size in enumerate(array.shape))
        return type(tensor)(_resize_values(array, shape), dtype=tensor.dtype, device=tensor.device)

    return _map_tensors(enlarge_tensor, args)


def _resize_values(array: np.ndarray, shape: Sequence[int]) -> np.ndarray:
    """Returns the values of ``array`` in another shape; numbers with a fraction in another order.

    Values that merely repeat would hide a window of the example's size: it has the mean of the whole.
    """
    values = repeat_to(array, shape)
    if array.dtype.kind != "f":
        return values
    return np.random.default_rng(0).permutation(values.ravel()).reshape(values.shape)


def _other_values(
    array: np.ndarray, shape: tuple[int, ...], high: bool, rng: np.random.Generator
) -> np.ndarray:
    if array.size == 0 or array.dtype.kind not in "fiub":
        return np.resize(array, shape)
    whole = array == np.rint(array)
    varies = array.min() < array.max()
    if array.dtype.kind != "f" or (array.ndim == 1 and whole.all() and varies):
        # A permutation: indices stay valid, and values that must be distinct stay so.
        values = rng.permutation(array.ravel()).astype(np.int64)
        if high:
            values = values.min() + values.max() - values
        return np.resize(values, shape).astype(array.dtype)
    if array.ndim in (2, 3) and whole.all() and varies:
        return _other_rows(array, shape, high, rng)
    finite = array[np.isfinite(array)].astype(np.float64)
    if finite.size == 0:
        return np.resize(array, shape)
    low, top = finite.min(), finite.max()
    if low == top:  # zeros or ones: no range to go by
        low, top = low - max(1.0, abs(low)), top + max(1.0, abs(top))
    # Evenly spread before they are skewed, so that the mean changes even for a small tensor.
    count = int(np.prod(shape))
    spread = rng.permutation((np.arange(count) + 0.5) / count).reshape(shape)
    step = 0.6 * (top - low) * spread**3
    values = np.clip(top - step if high else low + step, low, top).astype(array.dtype)
    if len(shape) in (2, 3):
        # A table such as RoIs: a column of whole numbers next to others is an index into something.
        columns = whole.all(axis=tuple(range(array.ndim - 1)))
        if not columns.all():
            values[..., columns] = np.resize(array, shape)[..., columns]
    return values


def _other_rows(
    array: np.ndarray, shape: tuple[int, ...], high: bool, rng: np.random.Generator
) -> np.ndarray:
    """Generates other rows for a table of whole numbers, any column of which may index something.

    The rows change places, and each shrinks by a factor of its own. No index grows, and of two numbers of a
    row the larger one stays so, as the corners of a box must. The ones of a mask stay.
    """
    rows = rng.permutation(array.reshape(-1, array.shape[-1]))
    if np.abs(array).max() <= 1:
        return np.resize(rows, shape).astype(array.dtype)
    low, top = (0.75, 1.0) if high else (0.25, 0.75)
    shrunk = np.trunc(rows * rng.uniform(low, top, (len(rows), 1)))
    return np.resize(shrunk, shape).astype(array.dtype)


def _tensors(args: Any) -> list[Tensor]:
    return [leaf for leaf in tree_flatten(args)[0] if isinstance(leaf, Tensor)]


def _map_tensors(fn: Callable[[Tensor], Tensor], args: Arguments) -> Arguments:
    leaves, definition = tree_flatten(args)
    mapped = definition.unflatten([fn(v) if isinstance(v, Tensor) else v for v in leaves])
    return tuple(mapped[0]), dict(mapped[1])


def read_dynamic(module: Module, method: str, inputs: Arguments, dynamic: Dynamic) -> OpenAxes | None:
    """Returns the record of the open axes; None if `dynamic` names none.

    Args:
        module: the module.
        method: its method that is traced.
        inputs: the example.
        dynamic: name of an input of the method -> axis -> name of its size; negative axes count from the end.
            Axes of one name have one size.

    Raises:
        TraceError: for an unknown input or one that is no Tensor, an axis that it does not have, or sizes of
            one name that differ in the example.
    """
    if not isinstance(dynamic, Mapping) or not all(isinstance(own, Mapping) for own in dynamic.values()):
        raise TraceError(
            f"dynamic takes names of axes by input, such as {{'x': {{0: 'N'}}}}, not {dynamic!r}."
        )
    args, kwargs = inputs
    bound = inspect.signature(getattr(module, method)).bind(*args, **kwargs).arguments
    axes: list[OpenAxis] = []
    sizes: dict[str, tuple[int, str]] = {}
    for name, own in dynamic.items():
        if not isinstance(bound.get(name), Tensor):
            tensors = ", ".join(key for key, value in bound.items() if isinstance(value, Tensor))
            raise TraceError(
                f"dynamic: {name!r} is no Tensor among the inputs; there are: {tensors or 'none'}."
            )
        shape = tuple(int(n) for n in bound[name].shape)
        for axis, text in own.items():
            if not isinstance(axis, int) or not -len(shape) <= axis < len(shape):
                raise TraceError(f"dynamic: {name} has the shape {shape}, and no axis {axis!r}.")
            if not isinstance(text, str) or not text:
                raise TraceError(f"dynamic: axis {axis} of {name} needs a name such as 'H', not {text!r}.")
            position = axis % len(shape)
            size, other = sizes.setdefault(text, (shape[position], f"axis {position} of {name}"))
            if size != shape[position]:
                raise TraceError(
                    f"dynamic: {text!r} is {size} at {other} and {shape[position]} at axis {position} of "
                    f"{name}: axes of one name have one size."
                )
            axes.append(OpenAxis(name, position, text, text))
    return OpenAxes(tuple(axes)) if axes else None


def other_examples(
    module: Module, method: str, inputs: Arguments, record: OpenAxes
) -> list[tuple[str, Arguments]]:
    """Returns a title and the inputs for two other sizes of the open axes, with the values of the example."""
    signature = inspect.signature(getattr(module, method))
    args, kwargs = inputs
    bound = signature.bind(*args, **kwargs).arguments
    shapes = {axis.input: tuple(int(n) for n in bound[axis.input].shape) for axis in record.axes}
    examples = []
    for sizes in other_sizes(shapes, record.axes):
        resized = {name: Tensor(_resize_values(bound[name].numpy(), shape)) for name, shape in sizes.items()}
        names = dict(zip(signature.parameters, args, strict=False))
        positional = tuple(resized.get(name, value) for name, value in names.items())
        positional += args[len(positional) :]
        named = {name: resized.get(name, value) for name, value in kwargs.items()}
        shown = ", ".join(f"{name} {list(shape)}" for name, shape in sizes.items())
        examples.append((f"dynamic, at {shown},", (positional, named)))
    return examples
