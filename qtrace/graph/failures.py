"""Failures in one sentence: of MegEngine's tracer, with submodule and remedy, of an op, and of a record."""

from __future__ import annotations

import copy
import functools
import inspect
import re
import sysconfig
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar, TypeVar

import megengine
from megengine.module import Module
from megengine.traced_module.expr import Constant, Expr
from megengine.traced_module.node import ModuleNode, NodeMixin
from megengine.traced_module.traced_module import InternalGraph, TracedModuleBuilder
from pydantic import ConfigDict, TypeAdapter, ValidationError

from qtrace.errors import GraphError, SchemeError, TraceError
from qtrace.graph.notes import name_with_line, source_line
from qtrace.graph.walk import op_label

_T = TypeVar("_T")
_DAMAGES = (ValueError, LookupError, TypeError, AttributeError, RecursionError, SchemeError)

# Beginnings of the paths of files that are not the user's code.
LIBRARIES = (
    *(str(Path(__file__).parents[1] / room) for room in ("graph", "gradients")),
    str(Path(megengine.__file__).parent.parent),
    sysconfig.get_path("stdlib"),
    sysconfig.get_path("purelib"),
    "<",
)

# A part of MegEngine's message, and the advice for it. The first part that occurs in the message counts.
_ADVICE = (
    (
        "in return values, MUST use Tensor",
        "a forward may only return Tensors and dicts, lists and tuples of them: trace the part of the model "
        "before this output",
    ),
    (
        'MUST use "register_supported_type"',
        "only Tensors, modules, numbers, strings and containers of them can pass between submodules: "
        "register the type with megengine.traced_module.register_supported_type, or pass plain Tensors",
    ),
    (
        "same container to store",
        "one list or dict holds modules beside other objects: keep the modules in a container of their own",
    ),
    (
        "do not support modify",
        "forward assigns a tensor or module to an attribute, which a trace cannot keep: use a local variable",
    ),
    (
        "'TracedModuleBuilder' object has no attribute",
        "forward reads an attribute past the usual look-up, such as by self.__getattribute__(name), which a "
        "trace cannot follow: use getattr(self, name)",
    ),
    (
        "got an unexpected keyword argument",
        "a numpy function was given a Tensor, most likely a shape: use tensor operations, or x.ndim and "
        "shapes known beforehand",
    ),
    (
        "cannot be interpreted as an integer",
        "Python wants a number where a trace has a Tensor (shapes are Tensors while tracing): use tensor "
        "operations, or a number known beforehand",
    ),
    (
        "PyLong_Check(maybe_list)",
        "a shape has an entry that is a float while tracing, such as a power of a size: multiply instead "
        "(n * n, not n ** 2), or use a number known beforehand",
    ),
    (
        "missing required keyword-only",
        "forward must take its inputs by position: give them a position or a default",
    ),
)

_OWN_CODE = (
    "the code there fails on what a trace gives it (shapes are Tensors while tracing, not numbers): use "
    "tensor operations, or numbers known beforehand"
)


def explain(error: Exception, source: Module, name: str) -> TraceError:
    """Builds the `TraceError` for an exception that ``trace_module`` raised.

    Args:
        error: the exception, with its traceback.
        source: the module that was traced.
        name: name of the module in the message.
    """
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    if "'TreeDef'" in str(error):
        problem = _two_structures(frames)
        if problem:
            return TraceError(f"{name} cannot be traced: {problem}")
    builders = _builders(frames)
    paths = {id(m): path for path, m in source.named_modules()}
    path = next((paths[id(b._mod)] for b in reversed(builders) if id(b._mod) in paths), "")
    location = f"in submodule {path!r}" if path else "in its own forward"
    line = user_line(error)
    location += f" ({line})" if line else ""
    module = builders[-1]._mod if builders else source
    if isinstance(inspect.getattr_static(type(module), "forward", None), staticmethod):
        advice = f"{type(module).__name__}.forward is static: make it a method `def forward(self, ...)`"
    elif error.args and isinstance(error.args[0], ModuleNode):
        advice = (
            "a module is handed to another module's forward as an argument: hold it as an attribute where "
            "it is called"
        )
    else:
        fallback = _OWN_CODE if frames and not frames[-1].f_code.co_filename.startswith(LIBRARIES) else ""
        advice = next((text for part, text in _ADVICE if part in str(error)), fallback)
    return TraceError(
        f"{name} cannot be traced: {location}, {advice or 'MegEngine refused the forward'}. "
        f"MegEngine says: {short(error)}"
    )


def _builders(frames: list[FrameType]) -> list[Any]:
    """Returns MegEngine's builders of the modules that were being traced, outermost first."""
    builders: list[Any] = []
    for frame in frames:
        if frame.f_code is TracedModuleBuilder.__call__.__code__:
            builders.append(frame.f_locals["self"])
    return builders


def _two_structures(frames: list[FrameType]) -> str | None:
    """Describes the submodule that has two graphs, for which MegEngine cannot build the module tree."""
    parts: list[str] = []
    for frame in frames:
        if frame.f_code is not TracedModuleBuilder.build.__code__:
            continue
        graphs = frame.f_locals["self"]._argdef_graph_map
        if len(graphs) > 1:
            calls = " and ".join(f"({d._args_kwargs_repr()})" for d in graphs)
            return (
                f"submodule {'.'.join(parts)!r} is called with two argument structures, {calls}; call it in "
                "one way everywhere (the same arguments given, the same constants), or use two submodules."
            )
        parts.append(str(frame.f_locals.get("k")))
    return None


def clean_up(error: BaseException) -> None:
    """Removes the nodes of a failed trace from the tensors that outlive it.

    MegEngine leaves its node on a tensor that was captured as a constant, such as a global of the user's
    file. The next trace that reads the tensor would raise a KeyError.
    """
    graphs: list[Any] = []
    for frame, _ in traceback.walk_tb(error.__traceback__):
        graphs.extend(v for v in frame.f_locals.values() if isinstance(v, InternalGraph))
        if frame.f_code is TracedModuleBuilder.__call__.__code__:
            graphs.append(frame.f_locals["self"]._body)
    for graph in graphs:
        for expr in graph._exprs if graph is not None else ():
            if isinstance(expr, Constant):
                NodeMixin.clear_node(expr.value)


def user_line(error: BaseException) -> str:
    """Returns file name and line of the innermost frame outside of libraries; "" if there is none."""
    line = ""
    for frame, number in traceback.walk_tb(error.__traceback__):
        file = frame.f_code.co_filename
        if not file.startswith(LIBRARIES):
            line = f"{Path(file).name}:{number}"
    return line


def short(error: BaseException) -> str:
    """Returns type and message in one line, without the C++ location and stack that MegEngine adds."""
    text = " ".join(str(error).split("backtrace:")[0].split())
    text = re.sub(r" failed at \S+:\d+:.*?(extra message:|$)", r" failed; \1", text).rstrip("; ")
    return f"{type(error).__name__}: {text[:300]}"


def copy_module(source: Module, problem: str) -> Module:
    """Copies ``source`` with its tensors.

    Raises:
        TraceError: when it cannot be copied, with the ``problem`` that this is.
    """
    try:
        return copy.deepcopy(source)
    except Exception as error:
        raise TraceError(
            f"{type(source).__name__} cannot be copied, so {problem}; take what cannot be copied out of its "
            f"attributes ({short(error)})."
        ) from error


def describe_failure(expr: Expr, inputs: Sequence[Any], error: Exception, advice: str = "") -> str:
    """Returns a sentence about an op that fails, such as ``a_out (Conv2d, net.py:3) fails on x (1, 3): ...``.

    Args:
        expr: the op; its outputs may be missing yet.
        inputs: for each input of ``expr`` its value or its type; only those with shape and dtype are shown.
        error: the exception of the op.
        advice: what to do about the failure.
    """
    label = op_label(expr)
    if expr.outputs:
        place = name_with_line(expr, label)
    else:
        line = source_line(expr)
        place = f"the inserted {label}{f' ({line})' if line else ''}"
    tensors = [(node, v) for node, v in zip(expr.inputs, inputs, strict=True) if hasattr(v, "dtype")]
    sizes = ", ".join(f"{n.name} {tuple(int(i) for i in v.shape)} {_dtype_name(v)}" for n, v in tensors)
    cause = f"({short(error)})" if advice else short(error)
    return f"{place} fails{f' on {sizes}' if sizes else ''}: {advice}{' ' if advice else ''}{cause}."


def _dtype_name(value: Any) -> str:
    return str(getattr(value.dtype, "name", value.dtype))


@contextmanager
def parsing(record: str, cure: str) -> Iterator[None]:
    """Turns what a damaged record raises within the block into a `GraphError`.

    Args:
        record: the record and the verb, such as ``"the interface that the model carries is"``.
        cure: what to do.
    """
    try:
        yield
    except _DAMAGES as error:
        raise GraphError(f"{record} damaged ({type(error).__name__}): {cure}.") from error


class Saved:
    """A base of data classes that `from_json` reads; keys without a field are refused."""

    __pydantic_config__: ClassVar[ConfigDict] = {"extra": "forbid"}


@functools.cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def from_json(kind: type[_T], text: str | bytes) -> _T:
    """Reads an object of a data class from JSON that may be damaged: its fields say what is right.

    Raises:
        ValueError: for other types of values, or a field that is missing.
    """
    try:
        record: _T = _adapter(kind).validate_json(text, strict=True)  # type: ignore[arg-type]
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise ValueError(f"{place}: {first['msg']}" if place else first["msg"]) from error
    return record
