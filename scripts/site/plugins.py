"""The page of what configs name: observers, fake quants, algorithms, backends, formats and runtimes."""

from __future__ import annotations

import importlib
import inspect
from types import ModuleType
from typing import Any

from qtrace.plugins import installed
from scripts.site import docstrings, source
from scripts.site.config import field_text

__all__ = ["algorithms", "bits", "page"]

_HEAD = """# Names that configs use

A config names observers, fake quants, algorithms and backends; `qtrace export -f` names formats. Each name is
the name of a file in qtrace, and `pkg.mod:Class` names a class of your own.

```yaml
backend: onnxruntime
observers: {activation: {mse: {candidates: 128}}, weight: minmax}
fakequant: {lsq: {grad_scale: false}}
ptq: [fuse_bn, {gptq: {refit: true}}]
```

Guides: [observers](../guides/calibration.md#observers), [fake quants](../guides/training.md),
[algorithms](../guides/ptq.md), [deployment](../guides/deploy.md).
"""


def page() -> str:
    """The page in Markdown."""
    sections = [
        _section("Observers", "observers", "qtrace.observers", "Observer"),
        _section("Fake quants", "fake-quants", "qtrace.fakequant", "FakeQuant"),
        _algorithms(),
        _backends(),
        _formats(),
        _runtimes(),
    ]
    return "\n\n".join([_HEAD, *sections]) + "\n"


def _section(title: str, anchor: str, package: str, base: str) -> str:
    from qtrace import plugins

    parts = [f"## {title} {{#{anchor}}}"]
    for name in plugins.known(package):
        cls: Any = plugins.resolve(package, name, getattr(importlib.import_module(package), base))
        parts.append(f"### `{name}` {{#{anchor}-{name}}}")
        parts += [docstrings.render_section(s) for s in docstrings.parse(cls.__doc__) if s.title != "Options"]
        parts.append(_options(cls.Options, cls) if cls.Options else "")
        parts.append(f"API: [`{package}.{cls.__name__}`](api/{package}.md#{package}.{cls.__name__})")
    return "\n\n".join(part for part in parts if part)


def _options(schema: Any, owner: type) -> str:
    """The fields of ``schema`` with the texts in the docstrings of ``owner`` and its bases."""
    texts: dict[str, str] = {}
    for cls in owner.__mro__:
        for section in docstrings.parse(cls.__doc__):
            for item in section.items if section.title in ("Options", "Attributes") else ():
                texts.setdefault(item.name, item.text)
    lines = []
    for name, field in schema.model_fields.items():
        default = _value(list(field.default) if isinstance(field.default, tuple) else field.default)
        lines.append(f"- `{name}`: {texts.get(name, '')} *{field_text(field)}; default: `{default}`*")
    return "\n".join(["**Options**", "", *lines]) if lines else ""


def algorithms() -> dict[str, type]:
    """Every algorithm of ``ptq`` by name, those of ``prepare`` first."""
    from qtrace import plugins

    base = source.find("Algorithm")
    classes: dict[str, Any] = {n: plugins.resolve("qtrace.ptq", n, base) for n in plugins.known("qtrace.ptq")}
    return dict(sorted(classes.items(), key=lambda pair: (pair[1].stage != "float", pair[0])))


def _algorithms() -> str:
    parts = ["## Algorithms {#algorithms}"]
    stages = {"float": "in `prepare`", "calibrated": "at the end of `calibrate`"}
    for name, cls in algorithms().items():
        parts.append(f"### `{name}` {{#algorithm-{name}}}")
        parts += [s.text for s in docstrings.parse(cls.__doc__) if not s.title]
        parts.append(f"Runs {stages[cls.stage]}.")
        parts.append(_options(cls, cls))
    return "\n\n".join(part for part in parts if part)


def _backends() -> str:
    backends = source.room("backends")
    parts = [
        "## Backends {#backends}",
        "A backend is a target. `backend: NAME` in a config, or `imports: [backend/NAME]`, chooses it.",
        "| name | activations | weights | ties | ops on integers |\n| --- | --- | --- | --- | --- |",
    ]
    for name in backends.known():
        backend = backends.get(name)
        row = [f"`{name}`", backend.activation.describe(), backend.weight.describe()]
        row += ["to even" if backend.rounding == "half_even" else "away from zero", str(len(backend.ops))]
        parts[-1] += f"\n| {' | '.join(row)} |"
    parts.append(bits())
    for name in backends.known():
        backend = backends.get(name)
        doc = _module("qtrace.backends", name).__doc__
        parts.append(f"### `{name}` {{#backend-{name}}}\n\n{docstrings.render(doc)}")
        parts.append(f"On integers: {', '.join(f'`{op}`' for op in sorted(backend.ops))}.")
    return "\n\n".join(parts)


def bits() -> str:
    """The widths that each backend allows."""
    backends = source.room("backends")
    rows = ["| target | bits of weights | bits of activations |", "| --- | --- | --- |"]
    for name in backends.known():
        limits = backends.get(name).limits
        rows.append(f"| `{name}` | {_widths(limits['weight'].bits)} | {_widths(limits['activation'].bits)} |")
    return "\n".join(rows)


def _widths(allowed: tuple[int, ...]) -> str:
    """Widths with neighbours put together: ``2 to 8, 16``."""
    parts, start = [], allowed[0]
    for width, following in zip(allowed, (*allowed[1:], 0), strict=True):
        if following != width + 1:
            parts.append(str(width) if start == width else f"{start} to {width}")
            start = following
    return ", ".join(parts)


def _formats() -> str:
    export = source.room("export")
    parts = ["## Export formats {#formats}", "`qtrace export -f NAME`, or `qtrace.export(..., format=NAME)`."]
    for name in export.formats():
        module, chosen = _module("qtrace.formats", name), export.format_by_name(name)
        suffixes = ", ".join(f"`{s}`" for s in (*chosen.suffixes, *chosen.companions))
        parts.append(f"### `{name}` {{#format-{name}}}\n\n{docstrings.render(module.__doc__)}")
        parts.append(f"Suffixes: {suffixes}" if suffixes else "No suffix chooses this format: name it.")
        described = getattr(module, "FileOptions", chosen.write)
        texts = {i.name: i.text for s in docstrings.parse(described.__doc__) for i in s.items}
        parameters = inspect.signature(described).parameters
        options = [parameters[name] for name in chosen.options]
        lines = [f"- `{p.name}`: {texts.get(p.name, '')} *default: `{_value(p.default)}`*" for p in options]
        if lines:
            parts.append("\n".join(["**Options** (`-O NAME=VALUE`, or keyword arguments)", "", *lines]))
    return "\n\n".join(parts)


def _module(group: str, name: str) -> ModuleType:
    """The module of one of qtrace's own plug-ins."""
    return importlib.import_module(installed(group)[name].partition(":")[0])


def _value(default: Any) -> str:
    return (
        "none"
        if default in (None, ())
        else str(default).lower()
        if isinstance(default, bool)
        else str(default)
    )


def _runtimes() -> str:
    rows = ["| runtime | files | install |", "| --- | --- | --- |"]
    for name in installed("qtrace.runtimes"):
        runtime = _module("qtrace.runtimes", name).RUNTIME
        suffixes = ", ".join(f"`{s}`" for s in runtime.suffixes)
        extra = f"the extra `{runtime.extra}`" if runtime.extra else "nothing"
        rows.append(f"| `{runtime.name}` | {suffixes} | {extra} |")
    head = ["## Runtimes {#runtimes}", "`qtrace verify --runtime NAME` runs a file in one of these."]
    return "\n\n".join([*head, "\n".join(rows)])
