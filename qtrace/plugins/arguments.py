"""Names the argument of a public function whose type is wrong, where Python's own error would name a line."""

from __future__ import annotations

import functools
import inspect
import numbers
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from typing import Any, ParamSpec, TypeVar, overload

import numpy as np

from qtrace.errors import QtraceError

__all__ = ["check_arguments"]

_P = ParamSpec("_P")
_R = TypeVar("_R")
_CHECKED_ELSEWHERE = {"QConfig"}
_MAX_SHOWN = 60  # characters of a value in a message


def _is_bool(value: Any) -> bool:
    return isinstance(value, (bool, np.bool_))


def _is_int(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not _is_bool(value)


def _is_float(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not _is_bool(value)


def _is_list(value: Any) -> bool:
    return isinstance(value, Iterable) and not isinstance(value, (str, bytes, Mapping))


# The start of an annotation -> its words, and whether a value is one.
_PLAIN: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "None": ("None", lambda value: value is None),
    "str": ("a text", lambda value: isinstance(value, str)),
    "Path": ("a path", lambda value: isinstance(value, os.PathLike)),
    "os.PathLike[str]": ("a path", lambda value: isinstance(value, os.PathLike)),
    "bool": ("True or False", _is_bool),
    "int": ("a whole number", _is_int),
    "float": ("a number", _is_float),
    "Mapping": ("a dict", lambda value: isinstance(value, Mapping)),
    "dict": ("a dict", lambda value: isinstance(value, Mapping)),
    "Sequence": ("a list", _is_list),
    "Callable": ("a function", callable),
}
_LISTED = re.compile(r"(?:Sequence|Iterable)\[(str|int|float)\]\Z")


@overload
def check_arguments(function: Callable[_P, _R]) -> Callable[_P, _R]: ...


@overload
def check_arguments(*, options: type) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]: ...


def check_arguments(function: Any = None, *, options: Any = None) -> Any:
    """Makes a public function name the argument that is not of its annotated type, where it fails on one.

    Plain types count: texts, paths, numbers, dicts, lists, functions, and classes of qtrace. What the
    function refuses itself keeps its own sentence, and an error that no argument explains stays as it is.

    Args:
        function: the function.
        options: the dataclass whose fields the function takes by name, as ``**options``.
    """
    if function is None:
        return functools.partial(check_arguments, options=options)
    return _checked(function, {} if options is None else {f.name: f.type for f in fields(options)})


def _checked(function: Callable[_P, _R], options: Mapping[str, Any]) -> Callable[_P, _R]:
    signature = inspect.signature(function)
    annotations = {name: p.annotation for name, p in signature.parameters.items()}
    kinds = {name: _alternatives(str(kind)) for name, kind in {**annotations, **options}.items()}
    several = {n for n, p in signature.parameters.items() if p.kind is p.VAR_POSITIONAL}

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            return function(*args, **kwargs)
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            try:
                arguments = signature.bind(*args, **kwargs).arguments
            except TypeError:  # a name or a number of arguments, which Python has told
                arguments = {}
            named = arguments.get("options", {}) if options else {}
            for name, value in {**arguments, **{n: v for n, v in named.items() if n in kinds}}.items():
                for one in value if name in several else (value,):
                    if problem := _problem(function, one, kinds[name]):
                        raise QtraceError(f"{function.__name__}: {name} takes {problem}.") from error
            raise

    return call


def _alternatives(annotation: str) -> list[str]:
    """Splits ``A | B[C | D]`` at the signs outside of brackets."""
    parts, depth = [""], 0
    for sign in annotation:
        depth += (sign == "[") - (sign == "]")
        if sign == "|" and not depth:
            parts.append("")
        else:
            parts[-1] += sign
    return [part.strip() for part in parts]


def _problem(function: Callable[..., Any], value: Any, kinds: list[str]) -> str | None:
    """Says what an argument takes and what it got; None if it is right, or if this cannot tell."""
    words = []
    for kind in kinds:
        if kind in _PLAIN or kind.partition("[")[0] in _PLAIN:
            text, accepts = _PLAIN.get(kind) or _PLAIN[kind.partition("[")[0]]
        elif (cls := _own_class(function, kind)) is not None:
            text, accepts = _with_article(cls.__name__), cls.__instancecheck__
        elif not _LISTED.match(kind):
            return None
        else:
            text, accepts = "a list", _is_list
        if accepts(value):
            return _problem_of_entries(value, kind)
        if text not in words:
            words.append(text)
    return f"{_joined(words)}, not {_shown(value)}"


def _problem_of_entries(value: Any, kind: str) -> str | None:
    """Says which entry of a list is of another type, as ``Sequence[str]`` names it."""
    match = _LISTED.match(kind)
    if match is None or not isinstance(value, (list, tuple, set, frozenset)):
        return None
    text, accepts = _PLAIN[match[1]]
    wrong = [entry for entry in value if not accepts(entry)]
    return f"a list whose entries are each {text}, not {_shown(wrong[0])}" if wrong else None


def _own_class(function: Callable[..., Any], name: str) -> type | None:
    """Returns the class of qtrace that an annotation names; None for others, and for protocols."""
    cls = getattr(sys.modules.get(function.__module__), name, None)
    known = inspect.isclass(cls) and cls.__module__.startswith("qtrace.") and name not in _CHECKED_ELSEWHERE
    return cls if known and not getattr(cls, "_is_protocol", False) else None


def _with_article(name: str) -> str:
    return f"an {name}" if name[0] in "AEIOU" else f"a {name}"


def _joined(words: list[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


def _shown(value: Any) -> str:
    """Names a value: what is short is written, of what is long the type."""
    if isinstance(value, np.ndarray):
        return f"an array of shape {value.shape}"
    if value is None or isinstance(value, (str, bytes, numbers.Number, list, tuple, dict)):
        text = repr(value)
        if len(text) <= _MAX_SHOWN and "\n" not in text:
            return text
    return _with_article(type(value).__name__)
