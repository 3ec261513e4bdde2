"""Rules that rewrite a graph, written as functions."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import megengine as mge
import numpy as np
from megengine import Tensor
from megengine.module import Module
from megengine.traced_module import pytree, trace_module
from megengine.traced_module.expr import Expr
from megengine.traced_module.node import ModuleNode, Node, TensorNode

from qtrace.errors import GraphError
from qtrace.graph.edit import GraphEditor
from qtrace.graph.failures import clean_up, short, user_line
from qtrace.graph.notes import name_with_line
from qtrace.graph.operations import StoredTensor, canonical_call
from qtrace.graph.pattern import Const, Op, Outputs, Pattern, PatternMatch
from qtrace.graph.rewrite import RewriteRule
from qtrace.graph.tracing.recording import recording
from qtrace.graph.tracing.running import engine_for_tracing
from qtrace.graph.tracing.tracer import Tracer
from qtrace.graph.walk import op_label, output_index
from qtrace.process import on_engine_thread


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
        with engine_for_tracing(), recording(Tracer()), _marked_leaves():
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


_TENSORS = (TensorNode, StoredTensor)
_EXAMPLE_SHAPE = (2, 4, 4, 4)

Check = Callable[[PatternMatch], "str | None"]


@on_engine_thread
def function_rule(
    pattern: Callable[..., Any],
    replacement: Callable[..., Any],
    *,
    example: Sequence[Any] | None = None,
    check: Check | None = None,
    name: str | None = None,
) -> RewriteRule:
    """Builds a rule for `apply_rules` from a pattern and a replacement that are written as functions.

    The parameters of ``pattern`` are wildcards. Each stands for any tensor of the graph, the same one
    wherever the parameter occurs. One whose example is an `AnyNumber` stands for any Python number. Numbers
    that the function writes itself must be equal. All spellings of an operation match: ``x + y`` and
    ``F.add(y, x)``; ``x.reshape(2, -1)`` and ``F.reshape(x, (2, -1))``; ``F.sigmoid(x)`` and
    ``M.Sigmoid()(x)``; ``F.conv2d(x, w, b)`` and a layer `M.Conv2d`, whose parameters ``w`` and ``b`` then
    stand for. Only the results of a match may be used outside of it. A pattern with several results matches
    once for all of them.

    Example:
        >>> rule = function_rule(lambda x: x * F.sigmoid(x), lambda x: F.silu(x), name="silu")
        >>> [result.where for result in apply_rules(flat, [rule]) if result.applied]
        ['mul_out', 'mul_out_1']

    Args:
        pattern: a function of tensors that returns a tensor, or a tuple or list of tensors, each of which
            shares an argument or a call with the others. It calls functions of ``megengine.functional``,
            methods of tensors, and layers without parameters.
        replacement: a function of the same parameters that returns as many tensors of the same shapes and
            dtypes. It is called with tensors of the shapes of each match, and with the match's
            numbers.
        example: a Tensor, a numpy array or an `AnyNumber` for each parameter, on which ``pattern`` runs;
            None for float32 tensors of shape (2, 4, 4, 4).
        check: takes a match, with tensors and numbers under the names of the parameters, and returns None
            if the rule applies, else the reason why not.
        name: name of the rule in results; None for the name of ``pattern``.

    Raises:
        GraphError: when a function cannot be traced, ``pattern`` is more than operations on its parameters,
            or the results of the two functions differ in number, shape or dtype.
    """
    title = name or str(getattr(pattern, "__name__", type(pattern).__name__))
    names = _parameter_names(pattern, title)
    if len(_parameter_names(replacement, title)) != len(names):
        raise GraphError(
            f"rule {title}: the replacement takes other parameters than the pattern ({', '.join(names)}): "
            "give it the same ones."
        )
    values = _example_values(names, example, title)
    trace = trace_function(pattern, values, f"rule {title}: the pattern")
    tree = _PatternBuilder(trace, names, title).build()
    rule = _FunctionRule(title, tree, names, replacement, check)
    written = trace_function(replacement, values, f"rule {title}: the replacement")
    problem = _difference(written.outputs, trace.outputs)
    if problem is not None:
        raise GraphError(f"rule {title}: on the example, {problem}.")
    return rule


def _parameter_names(function: Callable[..., Any], title: str) -> list[str]:
    """Returns the names of the parameters, all of which can be given by position."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        parameters = None
    if parameters is None or any(p.kind not in kinds for p in parameters):
        raise GraphError(
            f"rule {title}: the parameters of {function!r} are unknown, or cannot be given by position: "
            "write it with named parameters, without * and **."
        )
    return [p.name for p in parameters]


def _example_values(names: Sequence[str], example: Sequence[Any] | None, title: str) -> list[Any]:
    if example is None:
        example = [np.zeros(_EXAMPLE_SHAPE, np.float32) for _ in names]
    if len(example) != len(names):
        raise GraphError(
            f"rule {title}: the pattern takes {len(names)} parameters ({', '.join(names)}), but there are "
            f"{len(example)} examples: give one for each."
        )
    for parameter, value in zip(names, example, strict=True):
        if not isinstance(value, (Tensor, np.ndarray, AnyNumber)):
            raise GraphError(
                f"rule {title}: the example of {parameter} is a {type(value).__name__}: give a Tensor, a "
                "numpy array, or AnyNumber for a Python number."
            )
    return [Tensor(v) if isinstance(v, np.ndarray) else v for v in example]


class _AnyTensor(Pattern):
    """Any tensor of the graph, parameters included."""

    def mismatch(self, value: Any) -> str | None:
        """Returns why ``value`` is not a tensor."""
        return None if isinstance(value, _TENSORS) else "is a constant argument, expected a tensor"


class _Number(Const):
    """Any Python number."""

    def mismatch(self, value: Any) -> str | None:
        """Returns why ``value`` is not a number."""
        reason = super().mismatch(value)
        if reason is None and (isinstance(value, bool) or not isinstance(value, (int, float))):
            reason = "is an argument that must be a number"
        return reason


class _PatternBuilder:
    """Builds the tree of operations that computes the result of a traced function."""

    def __init__(self, trace: FunctionTrace, names: Sequence[str], title: str) -> None:
        self.trace, self.title = trace, title
        self.leaves: dict[Node, Pattern] = {}
        self.numbers: dict[str, _Number] = {}
        self.calls: dict[Node, Op] = {}
        self.names = list(names)
        for index, node in trace.inputs.items():
            self.leaves[node] = _AnyTensor(names[index])
        self.used: set[str] = set()

    def build(self) -> Outputs:
        for output in self.trace.outputs:
            if output in self.leaves:
                raise self._error(f"the pattern returns its parameter {self.leaves[output].name} as it is")
        tree = Outputs([self._call_pattern(output) for output in self.trace.outputs])
        if not tree.is_connected():
            raise self._error("the results of the pattern share no tensor: write a rule for each of them")
        missing = [name for name in self.names if name not in self.used]
        if missing:
            raise self._error(
                f"no call of the pattern reads {', '.join(missing)}: a number must be passed on as it is, "
                "not be computed with"
            )
        return tree

    def _pattern(self, value: Any) -> Pattern:
        if not isinstance(value, Node):
            return self._constant(value)
        if value in self.leaves:
            leaf = self.leaves[value]
            self.used.add(str(leaf.name))
            return leaf
        return self._call_pattern(value)

    def _call_pattern(self, node: Node) -> Op:
        if node not in self.calls:
            self.calls[node] = self._call(node)
        return self.calls[node]

    def _constant(self, value: Any) -> Pattern:
        index = marker_of(value)
        if index is None:
            return Const(value)
        name = self.names[index]
        self.used.add(name)
        return self.numbers.setdefault(name, _Number(name=name))

    def _call(self, node: Node) -> Op:
        expr = node.expr
        call = canonical_call(expr, layers=True)
        if call is None:
            raise self._error(
                f"{name_with_line(expr, op_label(expr))}: the pattern reads a tensor that is neither a "
                "parameter nor computed by functions: make it a parameter"
            )
        inputs = [self._pattern(value) for value in call.arguments]
        return Op(
            call.op,
            *inputs,
            commutative=call.op.commutative and len(inputs) == 2,
            output=output_index(node) if len(expr.outputs) > 1 else None,
            shared=node in self.trace.outputs,
        )

    def _error(self, problem: str) -> GraphError:
        return GraphError(f"rule {self.title}: {problem}.")


class _FunctionRule(RewriteRule):
    """Replaces the calls of a traced pattern by the calls of a function."""

    def __init__(
        self,
        title: str,
        pattern: Outputs,
        names: Sequence[str],
        replacement: Callable[..., Any],
        check: Check | None,
    ) -> None:
        self._title, self.pattern, self._names = title, pattern, tuple(names)
        self._replacement, self._check = replacement, check
        self._traces: dict[Any, FunctionTrace | str] = {}

    @property
    def name(self) -> str:
        """Name of the rule in reports."""
        return self._title

    def check(self, match: PatternMatch) -> str | None:
        """Returns why the match is left: the user's reason, or a replacement of another shape."""
        reason = None if self._check is None else self._check(match)
        if reason is not None:
            return reason
        unknown = [n for n in self._names if getattr(match[n], "shape", ()) is None]
        unknown += [str(node.name) for node in match.outputs if node.shape is None]
        if unknown:
            return f"the shape of {', '.join(unknown)} is not known"
        trace = self._trace(match)
        return trace if isinstance(trace, str) else _difference(trace.outputs, match.outputs)

    def rewrite(self, match: PatternMatch, editor: GraphEditor) -> Mapping[Node, Node]:
        """Writes the replacement's calls."""
        trace = self._trace(match)
        assert isinstance(trace, FunctionTrace)
        nodes: dict[Node, Node] = {node: match[self._names[i]] for i, node in trace.inputs.items()}
        for expr in trace.exprs:
            copies = editor.copy_expr(expr, [nodes[n] for n in expr.inputs], after=match.exprs[0])
            nodes.update(zip(expr.outputs, copies, strict=True))
        return {old: nodes[new] for old, new in zip(match.outputs, trace.outputs, strict=True)}

    def _trace(self, match: PatternMatch) -> FunctionTrace | str:
        """Traces the replacement for the shapes and numbers of ``match``, once for equal ones."""
        values = [match[name] for name in self._names]
        key = tuple(
            (tuple(int(n) for n in v.shape), np.dtype(v.dtype).str)
            if isinstance(v, _TENSORS)
            else (type(v), v)
            for v in values
        )
        if key not in self._traces:
            self._traces[key] = self._trace_at(values)
        return self._traces[key]

    def _trace_at(self, values: Sequence[Any]) -> FunctionTrace | str:
        try:
            arguments = [_zeros(v) if isinstance(v, _TENSORS) else v for v in values]
            return trace_function(self._replacement, arguments, "the replacement")
        except GraphError as error:
            return str(error).rstrip(".")


def _zeros(node: TensorNode | StoredTensor) -> Tensor:
    return Tensor(np.zeros(tuple(int(n) for n in node.shape), np.dtype(node.dtype)))


def _difference(written: Sequence[TensorNode], replaced: Sequence[TensorNode]) -> str | None:
    """Returns how the replacement's results differ from what they replace; None if they do not."""
    if len(written) != len(replaced):
        return f"the replacement gives {len(written)} results, the pattern {len(replaced)}"
    for new, old in zip(written, replaced, strict=True):
        if (text := _type_text(new)) != _type_text(old):
            return f"the replacement gives {text}, the pattern {_type_text(old)}"
    return None


def _type_text(node: TensorNode) -> str:
    return f"{tuple(int(n) for n in node.shape)} {np.dtype(node.dtype).name}"
