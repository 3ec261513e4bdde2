"""The API reference: one page for each public module, from docstrings.

It follows public names (``qtrace.observers.MinMax``), wherever their code stands.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import re
import types
import typing
from collections.abc import Iterator
from typing import Any

from scripts.site import docstrings

__all__ = ["MODULES", "entries", "pages", "public", "public_names", "results", "signature"]

# Public modules, and for those that have more inside than a user needs, their public names.
MODULES: dict[str, tuple[str, ...] | None] = {
    "qtrace": None,
    "qtrace.observers": None,
    "qtrace.fakequant": None,
    "qtrace.graph": None,
    "qtrace.qat": None,
    "qtrace.sensitivity": None,
    "qtrace.extras.finetune": ("FinetuneSettings",),
    "qtrace.gradients": ("conv2d", "fast_gradients"),
    "qtrace.ptq": None,
    "qtrace.errors": None,
}
_LINE = 92  # characters of a signature on one line


def public_names(module: str) -> list[str]:
    """The public names of a module that are no modules themselves, sorted."""
    loaded = importlib.import_module(module)
    chosen = MODULES[module]
    if chosen is None:
        chosen = getattr(loaded, "__all__", None) or _errors(loaded)
    return sorted((n for n in chosen if not inspect.ismodule(public(loaded, n))), key=_order)


def _order(name: str) -> tuple[bool, str]:
    return name[0].isupper(), name.lower()  # functions first


def _errors(module: Any) -> tuple[str, ...]:
    own = (n for n, v in vars(module).items() if inspect.isclass(v) and v.__module__ == module.__name__)
    return tuple(n for n in own if not n.startswith("_"))


def public(module: Any, name: str) -> Any:
    """Returns the value of a public name; of ``qtrace.export``, which is a package too, the function."""
    value = getattr(module, name)
    if inspect.ismodule(value) and callable(value):
        return vars(value)["__wrapped__"]
    return value


def entries() -> Iterator[tuple[str, str, Any]]:
    """Module, name and value of everything that is public."""
    for module in MODULES:
        for name in public_names(module):
            yield module, name, public(importlib.import_module(module), name)


@functools.cache
def results() -> dict[type, str]:
    """Classes that public functions return and that have no public name -> the function."""
    public = {id(value) for _, _, value in entries()}
    classes: dict[type, str] = {}
    for module, name, value in entries():
        if not inspect.isroutine(value):
            continue
        for kind in _classes(_returned(value)):
            if kind.__module__.startswith("qtrace.") and id(kind) not in public:
                classes.setdefault(kind, f"{module}.{name}")
    return classes


def _returned(function: Any) -> Any:
    """The annotation of what a function returns; None where it names what only type checkers import."""
    text = function.__annotations__.get("return")
    try:
        return eval(text, vars(inspect.getmodule(function))) if isinstance(text, str) else text
    except NameError:
        return None


def _classes(annotation: Any) -> Iterator[type]:
    if inspect.isclass(annotation) and not typing.get_args(annotation):
        yield annotation
    for inner in typing.get_args(annotation):
        yield from _classes(inner)


def pages() -> dict[str, str]:
    """Path of a page below ``reference/api`` -> its Markdown."""
    return {f"{module}.md": _page(module) for module in MODULES}


def _page(module: str) -> str:
    loaded = importlib.import_module(module)
    names = public_names(module)
    parts = [f"# `{module}`", docstrings.render(loaded.__doc__), _index(module, names)]
    for name in names:
        value = public(loaded, name)
        parts.append(_entry(f"{module}.{name}", name, value, 2))
    own = [kind for kind, function in results().items() if function.rpartition(".")[0] == module]
    if own:
        parts.append(
            "## Results {#results}\n\nWhat the functions above return. These classes are not made by hand."
        )
        parts += [_entry(f"{module}.{k.__name__}", k.__name__, k, 3) for k in own]
    return "\n\n".join(parts) + "\n"


def _index(module: str, names: list[str]) -> str:
    loaded = importlib.import_module(module)
    rows = ["| name | |", "| --- | --- |"]
    for name in names:
        text = docstrings.summary(public(loaded, name).__doc__).replace("|", "\\|")
        rows.append(f"| [`{name}`](#{module}.{name}) | {text} |")
    for inner in (n for n in MODULES if n.rpartition(".")[0] == module):
        text = docstrings.summary(importlib.import_module(inner).__doc__).replace("|", "\\|")
        rows.append(f"| [`{inner}`]({inner}.md) | {text} |")
    return "\n".join(rows)


def _entry(anchor: str, title: str, value: Any, level: int) -> str:
    if inspect.isclass(value):
        return _class(anchor, title, value, level)
    parts = [f"{'#' * level} `{title}` {{#{anchor}}}"]
    if inspect.isroutine(value):
        parts.append(_code(signature(title, value)))
    return "\n\n".join([*parts, docstrings.render(value.__doc__)])


def _class(anchor: str, title: str, value: type, level: int) -> str:
    bases = [_base(b) for b in value.__bases__ if b is not object and b.__name__ != "ABC"]
    parts = [f"{'#' * level} `{title}` {{#{anchor}}}"]
    if not issubclass(value, Exception):
        parts.append(_code(signature(title, value)))
    if bases:
        parts.append("Base: " + ", ".join(bases))
    parts.append(docstrings.render(value.__doc__))
    for name, member in _members(value):
        parts.append(f"{'#' * (level + 1)} `{title}.{name}` {{#{anchor}.{name}}}")
        if isinstance(member, (property, functools.cached_property)):
            doc = member.__doc__
        else:
            parts.append(_code(signature(name, member)))
            doc = inspect.getdoc(getattr(value, name))
        parts.append(docstrings.render(doc))
    return "\n\n".join(part for part in parts if part)


@functools.cache
def _anchors() -> dict[type, str]:
    """Public classes -> where they are described."""
    return {v: f"{module}.md#{module}.{name}" for module, name, v in entries() if inspect.isclass(v)}


def _base(base: type) -> str:
    """A base class, with a link if it is public: its methods are described there."""
    link = _anchors().get(base)
    return f"[`{base.__name__}`]({link})" if link else f"`{base.__name__}`"


def _members(value: type) -> list[tuple[str, Any]]:
    """Methods and properties that code of ours defines: own ones, and those of bases that are not public."""
    members: dict[str, Any] = {}
    for kind in reversed(value.__mro__):
        if kind is not value and kind in _anchors():
            continue
        if kind.__module__.partition(".")[0] == "qtrace":
            for name, member in vars(kind).items():
                if name.startswith("_") or name in _SERIALIZED:
                    continue
                if isinstance(member, _MEMBERS):
                    members[name] = member
    return [(name, member) for name, member in members.items() if _documented(value, name, member)]


_MEMBERS = (property, functools.cached_property, classmethod, staticmethod, types.FunctionType)
_SERIALIZED = {"forward", "model_post_init", "model_validate"}


def _documented(value: type, name: str, member: Any) -> bool:
    if isinstance(member, (property, functools.cached_property)):
        return bool(member.__doc__)
    return bool(inspect.getdoc(getattr(value, name)))


def signature(title: str, value: Any) -> str:
    """A signature as it is written, on several lines where it is long."""
    if isinstance(value, (classmethod, staticmethod)):
        prefix, value = f"@{type(value).__name__}\n", value.__func__
    else:
        prefix = ""
    try:
        shape = inspect.signature(value)
    except (TypeError, ValueError):
        return f"{title}(...)"
    shown = [p for p in shape.parameters.values() if p.name not in ("self", "cls")]
    shape = shape.replace(parameters=shown)
    returned = shape.return_annotation
    end = "" if returned is inspect.Signature.empty else f" -> {_annotation(returned)}"
    shape = shape.replace(return_annotation=inspect.Signature.empty)
    text = f"{prefix}{title}{_plain(str(shape))}{end}"
    if len(text) <= _LINE:
        return text
    lines, last = [], None
    for parameter in shown:
        if parameter.kind is parameter.KEYWORD_ONLY and last not in (
            parameter.KEYWORD_ONLY,
            parameter.VAR_POSITIONAL,
        ):
            lines.append("    *,")
        last = parameter.kind
        lines.append(f"    {_plain(str(parameter))},")
    return "\n".join([f"{prefix}{title}(", *lines, f"){end}"])


def _annotation(value: Any) -> str:
    return value if isinstance(value, str) else _plain(inspect.formatannotation(value))


def _plain(text: str) -> str:
    """Annotations as they are written: without quotes, and with objects by their names."""
    text = re.sub(r"(?<=[:>] )'([^']*)'", r"\1", text)
    text = re.sub(r"<factory>", "...", text)
    return re.sub(r"\b(?:qtrace|megengine|collections|typing|pathlib|numpy)\.(?:\w+\.)*(?=\w)", "", text)


def _code(text: str) -> str:
    return f"```python\n{text}\n```"
