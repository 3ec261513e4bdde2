"""The schema of options: a strict, frozen pydantic model with one plain sentence for each mistake.

Configs, observers, fake quants and algorithms declare their options as annotated fields of an `OptionModel`,
with types, bounds and defaults. Messages and reference pages come from these fields.

The arguments of public functions are checked by their annotations, as `check_arguments` does.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import numbers
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from typing import Annotated, Any, ParamSpec, TypeVar, get_args, overload

import numpy as np
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, Strict, ValidationError

from qtrace.errors import SHOWN_LINES, ConfigError, QtraceError

SHOWN_CHARACTERS = 60  # of a value in a message or a report
_MAX_LEVELS = 50  # of nested lists and mappings

_M = TypeVar("_M", bound="OptionModel")

Loc = tuple["int | str", ...]

# From a location in the data to a prefix such as "my.yaml:12: " and the spelling of the location there.
Place = Callable[[Loc], tuple[str, str]]


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


Bool = Annotated[bool, Strict()]
Int = Annotated[int, Strict()]
Float = Annotated[float, Strict(), Field(allow_inf_nan=False)]
Text = Annotated[str, Strict(), Field(min_length=1)]
Texts = Annotated[tuple[Text, ...], BeforeValidator(_as_list), Field(min_length=1)]


class OptionModel(BaseModel):
    """A frozen model that refuses unknown keys and raises `ConfigError`."""

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True, validate_default=False)

    def __init__(self, /, *args: Any, **data: Any) -> None:
        if args:
            raise ConfigError(self._unnamed(args[0]))
        _refuse_long_integers(data)
        try:
            super().__init__(**data)
        except ValidationError as error:
            raise ConfigError("\n".join(_explain(error, type(self)))) from None

    # pydantic then builds nested models without calling __init__, so that one error reports all mistakes.
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]

    @classmethod
    def _unnamed(cls, value: Any) -> str:
        """Writes the sentence for a value that was passed without a name."""
        names = ", ".join(known_keys(cls))
        return f"{cls.__name__}({show(value)}): values are given by name, as one of {names}."

    @classmethod
    def model_validate(cls: type[_M], obj: Any, *args: Any, place: Place | None = None, **kwargs: Any) -> _M:
        """Builds a model from a mapping, as the constructor does.

        Args:
            obj: a mapping, or an instance.
            *args: arguments of pydantic.
            place: finds the file and line of a location in ``obj``, for messages.
            **kwargs: arguments of pydantic.

        Raises:
            ConfigError: with a line for each mistake.
        """
        _refuse_long_integers(obj, place)
        try:
            return super().model_validate(obj, *args, **kwargs)
        except ValidationError as error:
            raise ConfigError("\n".join(_explain(error, cls, place))) from None

    def to_dict(self) -> Any:
        """Converts the options that were set to data for JSON and YAML, which the constructor accepts."""
        return {
            field.alias or name: _plain(getattr(self, name))
            for name, field in type(self).model_fields.items()
            if name in self.model_fields_set and getattr(self, name) is not None
        }


def check_options(
    schema: type[_M], owner: str, options: Mapping[str, Any], origin: Callable[[str], str] | None = None
) -> _M:
    """Checks the options of a plugin.

    Args:
        schema: the model that declares the options.
        owner: the name of the plugin in configs.
        options: values by name.
        origin: returns the place of an option, such as ``my.yaml:12``; for ``""`` the place of the plugin.
            None for options that come from no file.

    Raises:
        ConfigError: with a line for each mistake.
    """

    def place(loc: Loc) -> tuple[str, str]:
        prefix = f"{origin(str(loc[0]) if loc else '')}: " if origin else ""
        return prefix, f"{owner}.{spell(loc)}" if loc else owner

    return schema.model_validate({key: _as_python(value) for key, value in options.items()}, place=place)


def _as_python(value: Any) -> Any:
    """Converts a number of numpy to Python; returns other values unchanged."""
    return value.item() if type(value).__module__ == "numpy" and getattr(value, "ndim", 1) == 0 else value


def _plain(value: Any) -> Any:
    if isinstance(value, OptionModel):
        return value.to_dict()
    return [_plain(v) for v in value] if isinstance(value, tuple) else value


# The expected value by pydantic's type of error; the values of its context fill the braces.
_EXPECTED = {
    "bool_type": "true or false",
    "finite_number": "a finite number",
    "float_type": "a number",
    "greater_than": "greater than {gt}",
    "greater_than_equal": "at least {ge}",
    "int_type": "a whole number",
    "less_than": "less than {lt}",
    "less_than_equal": "at most {le}",
    "literal_error": "{expected}",
    "string_too_short": "text that is not empty",
    "string_type": "text",
    "string_unicode": "text that is valid Unicode",
    "tuple_type": "a list",
}


def _explain(error: ValidationError, model: type[BaseModel], place: Place | None = None) -> list[str]:
    """Writes one sentence for each mistake in ``error``.

    Args:
        error: the error of validating ``model``.
        model: the model, which lists the known keys.
        place: finds the file and line of a location; by default, messages have the location only.
    """
    mistakes = error.errors(include_url=False)
    sentences = [_sentence(e, model, place or _in_python) for e in mistakes[:SHOWN_LINES]]
    if len(mistakes) > SHOWN_LINES:
        prefix, _ = (place or _in_python)(mistakes[SHOWN_LINES]["loc"])
        sentences.append(f"{prefix}{len(mistakes) - SHOWN_LINES} more mistakes begin here.")
    return sentences


def _refuse_long_integers(data: Any, place: Place | None = None, loc: Loc = ()) -> None:
    """Raises ConfigError for an integer beyond 64 bits, whose conversion to decimal digits may take long."""
    if isinstance(data, Mapping) and len(loc) < _MAX_LEVELS:
        for key, value in data.items():
            _refuse_long_integers(value, place, (*loc, str(key)))
    elif isinstance(data, (list, tuple)) and len(loc) < _MAX_LEVELS:
        for index, value in enumerate(data):
            _refuse_long_integers(value, place, (*loc, index))
    elif isinstance(data, int) and data.bit_length() > 64:
        prefix, path = (place or _in_python)(loc)
        raise ConfigError(
            f"{prefix}{path or 'a config'} is a whole number of {data.bit_length()} bits: give one of 64."
        )


def hint(word: str, known: Iterable[str]) -> str:
    """Writes ``; did you mean 'x'?`` if one of ``known`` resembles ``word``, else lists all of them."""
    names = list(known)
    close = difflib.get_close_matches(word, names, n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; known: {', '.join(names) or '(none)'}."


def known_keys(model: type[BaseModel]) -> list[str]:
    """Lists the keys of ``model`` as users write them."""
    return [field.alias or name for name, field in model.model_fields.items()]


def spell(loc: Loc) -> str:
    """Spells a location as in ``rules[0].weight.bits``."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc)
    return text.removeprefix(".")


def _in_python(loc: Loc) -> tuple[str, str]:
    return "", spell(loc)


def _sentence(error: Mapping[str, Any], model: type[BaseModel], place: Place) -> str:
    kind, loc, value, context = error["type"], error["loc"], error["input"], error.get("ctx", {})
    prefix, path = place(loc)
    parent = place(loc[:-1])[1] if loc else ""
    if kind == "extra_forbidden" and loc in (("imports",), ("schema",)):
        return (
            f"{prefix}{loc[0]!r} belongs in a recipe file or in a mapping: give one of these instead of a "
            "QConfig, or give the name of a packaged recipe."
        )
    inside = f" in {parent}" if parent else ""
    if kind == "extra_forbidden":
        return f"{prefix}unknown key {loc[-1]!r}{inside}{hint(str(loc[-1]), _keys_at(model, loc[:-1]))}"
    if kind == "missing":
        return f"{prefix}{loc[-1]!r} is missing{inside}."
    if kind == "invalid_key":
        return f"{prefix}the key {loc[-1]!r}{inside} must be text."
    if kind == "value_error":
        message = str(context["error"])
        return f"{prefix}{path}: {message}" if path else f"{prefix}{message}"
    subject = path or "a config"
    if kind == "too_short":
        expected = f"a list of {context['min_length']} or more"
    elif kind in ("model_type", "model_attributes_type", "dict_type"):
        expected = f"a mapping with keys such as {', '.join(_keys_at(model, loc)[:3])}"
    else:
        expected = _EXPECTED.get(kind, "").format(**context)
    if not expected:
        return f"{prefix}{subject}: {error['msg']}, not {show(value)}."
    return f"{prefix}{subject} must be {expected}, not {show(value)}."


def show(value: Any) -> str:
    """Formats a value as YAML spells it, cut to a readable length."""
    text = "empty" if value is None else str(value).lower() if isinstance(value, bool) else repr(value)
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[: SHOWN_CHARACTERS - 3]}..."


def _keys_at(model: type[BaseModel], loc: Loc) -> list[str]:
    """Lists the keys that are known at a location."""
    for part in loc:
        if isinstance(part, str):
            fields = {field.alias or name: field for name, field in model.model_fields.items()}
            if part not in fields or (inner := _model_in(fields[part].annotation)) is None:
                return []
            model = inner
    return known_keys(model)


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """Finds the model in an annotation such as ``tuple[Rule, ...] | None``."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((m for a in get_args(annotation) if (m := _model_in(a)) is not None), None)


_P = ParamSpec("_P")
_R = TypeVar("_R")
_CHECKED_ELSEWHERE = {"QConfig"}


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
        if len(text) <= SHOWN_CHARACTERS and "\n" not in text:
            return text
    return _with_article(type(value).__name__)
