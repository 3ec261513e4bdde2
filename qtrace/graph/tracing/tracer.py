"""What a trace keeps as one call, and what it records a call as: a class to be subclassed, and leaves."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import megengine.functional as F
import megengine.module as M
import numpy as np
from megengine import Tensor
from megengine.core._imperative_rt.core2 import is_tracing_module
from megengine.module import Module
from megengine.module.qat import QATModule
from megengine.traced_module import TracedModule
from megengine.traced_module.expr import CallFunction
from megengine.traced_module.module_tracer import Patcher, active_module_tracer, module_tracer
from megengine.traced_module.node import ModuleNode

from qtrace.errors import TraceError
from qtrace.gradients import plain
from qtrace.graph.failures import short
from qtrace.graph.walk import graphs_of, owner

# What a trace keeps as one call, and what it records a call as: a class to be subclassed.


class Tracer:
    """Decides how `qtrace.trace` records a module; give an instance of a subclass to ``trace(tracer=)``.

    The trace is compared with the module all the same, so that a call which is recorded as something else
    must compute the same.

    Example:
        ```python
        class KeepBlocks(qtrace.graph.Tracer):
            def is_leaf(self, module, path):
                return isinstance(module, Block) or super().is_leaf(module, path)

            def record(self, function):
                return clip6 if function is F.relu6 else function
        ```
    """

    def is_leaf(self, module: Module, path: str) -> bool:
        """Returns whether a call of ``module`` is recorded as one expr, without looking inside.

        MegEngine's own layers are leaves unless a subclass says otherwise. A leaf of a class of your own may
        bring an `OpRule` as its attribute ``qtrace_rule``, and `load` needs its class in ``allow``.

        Args:
            module: a submodule.
            path: its path in the traced module, such as ``backbone.stem``.
        """
        return bool(module_tracer.is_builtin(module))

    def record(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns what a call of ``function`` is recorded as: itself, or a function with the same arguments.

        Args:
            function: a function of ``megengine.functional``.

        Returns:
            The function, or another. One of ``megengine.functional`` is recorded as one call; of one of your
            own, what it calls is recorded, and there ``function`` means itself.
        """
        return function


@contextmanager
def chosen_leaves(root: Module, tracer: Tracer) -> Iterator[dict[type[Module], type[Module]]]:
    """Makes MegEngine's tracer treat the submodules of ``root`` as ``tracer`` says within the block.

    MegEngine knows leaves by their class, so a choice that differs from MegEngine's gets a class of its own.

    Args:
        root: the private copy that is traced.
        tracer: says what is a leaf.

    Yields:
        A map from these classes to the modules' own.

    Raises:
        TraceError: for a leaf that a trace must look into.
    """
    own: dict[type[Module], type[Module]] = {}
    changed: list[Module] = []
    inside: list[str] = []
    for path, module in list(root.named_modules()):
        if not path or any(path.startswith(f"{leaf}.") for leaf in inside):
            continue
        leaf = _ask(tracer, "is_leaf", path, tracer.is_leaf, module, path)
        builtin = module_tracer.is_builtin(module)
        if leaf:
            inside.append(path)
        if bool(leaf) == builtin or type(module) in own:
            continue
        cls = type(module)
        if leaf and isinstance(module, (TracedModule, QATModule)):
            raise TraceError(f"{path} ({cls.__name__}) cannot be a leaf: a trace must look inside.")
        module.__class__ = type(cls.__name__, (cls,), {"__module__": cls.__module__})
        own[type(module)] = cls
        changed.append(module)
        if leaf:
            module_tracer._opaque_types.add(type(module))
    try:
        yield own
    finally:
        for module in changed:
            module_tracer._opaque_types.discard(type(module))
            module.__class__ = own[type(module)]


def name_own_classes(traced: TracedModule, own: dict[type[Module], type[Module]]) -> None:
    """Writes the modules' own classes into the nodes of ``traced``."""
    for graph in graphs_of(traced):
        for node in graph.nodes(False).as_list():
            if isinstance(node, ModuleNode) and node.module_type in own:
                node.module_type = own[node.module_type]


def find_replacements(tracer: Tracer) -> dict[int, Callable[..., Any]]:
    """Asks ``tracer`` what each function of ``megengine.functional`` is recorded as.

    It is asked before MegEngine's tracer puts wrappers in the place of the functions, so that it may compare
    them with ``is``.

    Returns:
        The ``id`` of a function -> the other one that it is recorded as.

    Raises:
        TraceError: when the tracer fails, or returns no function.
    """
    replacements: dict[int, Callable[..., Any]] = {}
    if type(tracer).record is Tracer.record:
        return replacements
    functions = {
        id(value): value
        for module in Patcher._builtin_modules
        for value in vars(module).values()
        if isinstance(value, FunctionType) and value.__module__.startswith("megengine.functional")
    }
    for key, function in functions.items():
        other = _ask(tracer, "record", function.__name__, tracer.record, function)
        if not callable(other):
            raise TraceError(
                f"{type(tracer).__name__}.record returned {other!r} for {function.__name__}: return a "
                "function."
            )
        if other is not function:
            replacements[key] = other
    return replacements


def _ask(tracer: Tracer, method: str, subject: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """Calls a method of the user's tracer; its errors name it."""
    try:
        return function(*arguments)
    except Exception as error:
        raise TraceError(f"{type(tracer).__name__}.{method} fails for {subject}: {short(error)}") from error


def recorded_as(
    other: Callable[..., Any], wrapped: Callable[..., Any], wrap: Callable[[Any], Callable[..., Any]]
) -> Callable[..., Any]:
    """Returns what MegEngine's tracer calls in the place of a function that is recorded as another one.

    Args:
        other: the other function.
        wrapped: records a call of the function itself.
        wrap: makes the function that records a call of its argument.
    """
    inside = False

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal inside
        if inside or not is_tracing_module():
            return wrapped(*args, **kwargs)
        patcher = active_module_tracer().patcher
        recorded = wrap(other) if id(other) in patcher.patched_fn_ids else other
        patcher.auto_patch(getattr(other, "__globals__", {}))
        inside = True
        try:
            return recorded(*args, **kwargs)
        finally:
            inside = False

    return call


# Calls that a trace keeps whole: leaves, and MegEngine's attention.


def check_leaves(leaves: Sequence[Any]) -> None:
    """Refuses leaves that a trace cannot keep as one call.

    Raises:
        TraceError: for what is neither a class of modules nor a function at the top level of a file.
    """
    if isinstance(leaves, (type, FunctionType, str)):
        raise TraceError("leaves takes a list of module classes and functions, such as leaves=[MyOp].")
    for leaf in leaves:
        if isinstance(leaf, type) and issubclass(leaf, Module):
            if issubclass(leaf, (TracedModule, QATModule)):
                raise TraceError(f"{leaf.__name__} cannot be a leaf: a trace must look inside; leave it out.")
        elif not isinstance(leaf, FunctionType):
            raise TraceError(
                f"a leaf is a class of modules or a function, not {leaf!r}: give the class of the module."
            )
        elif leaf.__globals__.get(leaf.__name__) is not leaf:
            raise TraceError(
                f"the function {leaf.__qualname__} cannot be a leaf, since it is not at the top level of its "
                "file under its own name: move it there."
            )


@contextmanager
def keep_leaves(leaves: Sequence[Any]) -> Iterator[None]:
    """Makes MegEngine's tracer record each call of ``leaves`` as one expr within the block.

    Args:
        leaves: classes of modules and functions that `check_leaves` accepts.
    """
    classes = {leaf for leaf in leaves if isinstance(leaf, type)} - module_tracer._opaque_types
    functions = [(leaf.__globals__, leaf.__name__) for leaf in leaves if isinstance(leaf, FunctionType)]
    before = list(Patcher._builtin_functions)
    module_tracer._opaque_types.update(classes)
    Patcher._builtin_functions.extend(functions)
    try:
        yield
    finally:
        module_tracer._opaque_types.difference_update(classes)
        Patcher._builtin_functions[:] = before


def describe_unused_leaves(traced: TracedModule, leaves: Sequence[Any]) -> list[str]:
    """Returns a sentence for each leaf that ``traced`` does not call."""
    called: set[Any] = set()
    for expr in traced.graph.exprs():
        called.add(plain(expr.func) if isinstance(expr, CallFunction) else type(owner(expr)))
    return [
        f"leaves names {leaf.__name__}, which forward never calls: remove it, or name the class itself, not "
        "a base of it."
        for leaf in leaves
        if leaf not in called
    ]


def open_attention(root: Module) -> None:
    """Makes the tracer record the attention layers below ``root`` in parts instead of as one call.

    Args:
        root: a private copy of the model; its attention layers get a class of their own.
    """
    own = M.MultiHeadAttention
    for module in root.modules():
        if type(module) is own:
            module.__class__ = type(own.__name__, (own,), {"__module__": own.__module__})


def attention_in_parts(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim: int,
    num_heads: int,
    attn_drop: float,
    out_drop: float,
    io_weight_bias: Tensor,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Computes ``F.nn.multi_head_attention`` in evaluation by matrix products and a softmax.

    Args:
        query: queries (N, L, E).
        key: keys (N, S, K).
        value: values (N, S, V).
        embed_dim: the size E of the result.
        num_heads: the number of heads.
        attn_drop: dropout of the weights; without effect in evaluation.
        out_drop: dropout of the result; without effect in evaluation.
        io_weight_bias: the weights of the four projections, inputs first, then their biases.
        **options: the other arguments of ``F.nn.multi_head_attention``.

    Returns:
        The result, and the weights of each query if ``need_weights``.

    Raises:
        TraceError: for an option that is not supported.
    """
    _check(options)
    sizes = [query.shape[-1], key.shape[-1], value.shape[-1], embed_dim]
    weights, biases = _parameters(io_weight_bias, sizes, embed_dim, options)
    depth = embed_dim // num_heads
    projected = []
    for x, weight, bias in zip((query, key, value), weights, biases, strict=False):
        y = F.matmul(x, weight) if bias is None else F.matmul(x, weight) + bias
        projected.append(F.transpose(F.reshape(y, (x.shape[0], x.shape[1], num_heads, depth)), (0, 2, 1, 3)))
    q, k, v = projected
    scores = F.matmul(q * depth**-0.5, k, transpose_b=True)
    shares = F.softmax(_masked(scores, options), axis=[-1])  # a list: right for scores below -87, too
    joined = F.transpose(F.matmul(shares, v), (0, 2, 1, 3))
    joined = F.reshape(joined, (query.shape[0], query.shape[1], embed_dim))
    out = F.matmul(joined, weights[3])
    if biases[3] is not None:
        out = out + biases[3]
    if not options.get("need_weights"):
        return out, None
    if options.get("average_attn_weights"):
        return out, F.mean(shares, axis=1)
    return out, F.reshape(shares, (-1, query.shape[1], key.shape[1]))


def _check(options: dict[str, Any]) -> None:
    unsupported = ("bias_k", "bias_v", "reslink", "add_zero_attn", "maybe_cudnn_style_mask")
    used = [n for n in unsupported if options.get(n) is not None and options[n] is not False]
    empty = [n for n in ("qproj_size", "kproj_size", "vproj_size", "oproj_size") if options.get(n) == 0]
    if used or empty:
        raise TraceError(
            f"multi_head_attention with {', '.join(used + empty)} cannot be traced: write the layer with "
            "F.matmul and F.softmax."
        )


def _parameters(
    packed: Tensor, sizes: list[Any], embed: int, options: dict[str, Any]
) -> tuple[list[Tensor], list[Tensor | None]]:
    """Returns weights (inputs, outputs) and biases of the projections of query, key, value and result."""
    flat, start = F.reshape(packed, (-1,)), 0
    weights: list[Tensor] = []
    for size in (int(s) for s in sizes):
        weights.append(F.reshape(flat[start : start + size * embed], (size, embed)))
        start += size * embed
    biases: list[Tensor | None] = []
    for name in ("qbias", "kbias", "vbias", "obias"):
        if options.get(name):
            biases.append(flat[start : start + embed])
            start += embed
        else:
            biases.append(None)
    return weights, biases


def _masked(scores: Tensor, options: dict[str, Any]) -> Tensor:
    """Adds the masks to ``scores`` (N, heads, L, S); a true entry of a boolean mask excludes a key."""
    attention, padding = options.get("attn_mask"), options.get("key_padding_mask")
    if attention is not None:
        mask = _additive(attention)
        if mask.ndim == 3:
            mask = F.reshape(mask, (scores.shape[0], scores.shape[1], mask.shape[1], mask.shape[2]))
        scores = scores + mask
    elif padding is None and options.get("is_causal"):
        rows, columns = (int(n) for n in scores.shape[-2:])
        scores = scores + Tensor(np.triu(np.full((rows, columns), -math.inf, np.float32), 1))
    if padding is not None:
        mask = _additive(padding)
        scores = scores + F.reshape(mask, (mask.shape[0], 1, 1, mask.shape[1]))
    return scores


def _additive(mask: Tensor) -> Tensor:
    if np.dtype(mask.dtype) != np.bool_:
        return mask
    return F.where(mask, F.full(mask.shape, -math.inf, dtype="float32"), F.zeros(mask.shape))
