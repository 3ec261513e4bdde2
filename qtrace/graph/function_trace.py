"""Traces a function of tensors and numbers, without the checks that a model's trace has."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import megengine as mge
from megengine import Tensor
from megengine.module import Module
from megengine.traced_module import pytree, trace_module
from megengine.traced_module.expr import Expr
from megengine.traced_module.node import ModuleNode, TensorNode

from qtrace.errors import GraphError
from qtrace.graph.failures import clean_up, short, user_line
from qtrace.graph.tracing.recording import recording
from qtrace.graph.tracing.running import engine_for_tracing
from qtrace.graph.tracing.tracer import Tracer

__all__ = ["AnyNumber", "FunctionTrace", "marker_of", "trace_function"]


@dataclass(frozen=True)
class AnyNumber:
    """The example of a parameter that stands for any Python number.

    Attributes:
        like: the number with which the pattern is run, of the kind that its calls take there.
    """

    like: int | float = 1.0

    def __post_init__(self) -> None:
        if isinstance(self.like, bool) or not isinstance(self.like, (int, float)):
            raise GraphError(f"AnyNumber stands for an int or a float, not for {self.like!r}.")


class _MarkedInt(int):
    """An integer that the trace recognizes where a call takes it."""

    parameter: int


class _MarkedFloat(float):
    """A float that the trace recognizes where a call takes it."""

    parameter: int


def marker_of(value: Any) -> int | None:
    """Returns the index of the parameter whose `AnyNumber` ``value`` is; None for any other value."""
    return value.parameter if isinstance(value, (_MarkedInt, _MarkedFloat)) else None


@dataclass(frozen=True)
class FunctionTrace:
    """The calls of a function.

    Attributes:
        inputs: index of a tensor parameter -> its node.
        exprs: the calls that the results need, in order.
        outputs: the nodes of the results.
    """

    inputs: Mapping[int, TensorNode]
    exprs: tuple[Expr, ...]
    outputs: tuple[TensorNode, ...]


def trace_function(function: Callable[..., Any], arguments: Sequence[Any], title: str) -> FunctionTrace:
    """Traces ``function`` on Tensors, numbers and `AnyNumber`.

    Args:
        function: the function.
        arguments: its arguments by position.
        title: what the function is, as the subject of a message.

    Raises:
        GraphError: when the function fails, does not return tensors, or calls a module.
    """
    values: list[Any] = [_mark(index, value) for index, value in enumerate(arguments)]
    tensors = {i: v for i, v in enumerate(values) if isinstance(v, Tensor)}
    module = _module_of(function, values, list(tensors), title)
    try:
        with engine_for_tracing(async_level=0), recording(Tracer()), _marked_leaves():
            traced = trace_module(module, *tensors.values())
            mge._full_sync()
    except GraphError as error:
        clean_up(error)
        raise
    except Exception as error:
        try:
            line = user_line(error)
            raise GraphError(
                f"{title} fails{f' ({line})' if line else ''} on "
                f"{', '.join(_show(v) for v in values) or 'no arguments'}: {short(error)}."
            ) from error
        finally:
            clean_up(error)
    graph = traced.graph
    inputs = dict(zip(tensors, graph._inputs[1:], strict=True))
    if any(isinstance(node, ModuleNode) for e in graph._exprs for node in (*e.inputs, *e.outputs)):
        raise GraphError(f"{title} calls a module or reads a module's tensor: write it only with functions.")
    return FunctionTrace(inputs, tuple(graph._exprs), tuple(graph._outputs))


def _mark(index: int, value: Any) -> Any:
    if not isinstance(value, AnyNumber):
        return value
    marked = (_MarkedInt if isinstance(value.like, int) else _MarkedFloat)(value.like)
    marked.parameter = index
    return marked


def _module_of(
    function: Callable[..., Any], values: Sequence[Any], places: Sequence[int], title: str
) -> Module:
    """Returns a module whose forward calls ``function`` with its inputs at ``places`` among ``values``."""

    def call(inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        arguments = list(values)
        for place, tensor in zip(places, inputs, strict=True):
            arguments[place] = tensor
        result = function(*arguments)
        results = tuple(result) if isinstance(result, (tuple, list)) else (result,)
        if results and all(isinstance(each, Tensor) for each in results):
            return results
        kind = type(next((each for each in results if not isinstance(each, Tensor)), result)).__name__
        raise GraphError(f"{title} returns a {kind}: it must return a tensor, or a tuple or list of tensors.")

    def forward(self: Module, *inputs: Tensor) -> tuple[Tensor, ...]:
        return call(inputs)

    # MegEngine's tracer sees the globals of forward: here the globals of the function.
    scope = getattr(function, "__globals__", forward.__globals__)
    own = FunctionType(forward.__code__, scope, "forward", None, forward.__closure__)
    return type("Function", (Module,), {"forward": own})()


@contextmanager
def _marked_leaves() -> Iterator[None]:
    """Makes MegEngine's tracer take marked numbers as arguments within the block."""
    added = {_MarkedInt, _MarkedFloat}
    pytree.SUPPORTED_LEAF_TYPE.update(added)
    try:
        yield
    finally:
        pytree.SUPPORTED_LEAF_TYPE.difference_update(added)


def _show(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{tuple(int(n) for n in value.shape)} {value.dtype.name}"
    return repr(value)
