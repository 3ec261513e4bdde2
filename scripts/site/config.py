"""The page of the config: every key with its type, default and example, from the pydantic models."""

from __future__ import annotations

import re
import types
import typing
from collections.abc import Iterator
from typing import Any

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from scripts.site import docstrings

__all__ = ["examples", "field_text", "models", "page", "settings"]

_HEAD = """# Config and recipe keys

A recipe is a YAML file; `qtrace.QConfig` takes the same keys as arguments. This page lists every key.
[Recipes](../guides/recipes.md) explains how files import each other.

```yaml
schema: qtrace/1
imports: [backend/tensorrt, resnet]
weight: {bits: 8}
rules:
  - {match: {name: "head.*"}, quantize: false}
```

```python
import qtrace

config = qtrace.QConfig(
    backend="tensorrt", rules=[{"match": {"name": "head.*"}, "quantize": False}]
)
```

An unknown key or a wrong value is a `ConfigError` with file and line. Two keys exist in files only:

- `schema`: always `qtrace/1`. Required.
- `imports`: a list of packaged recipes (`qtrace recipes list`) and of paths relative to the file. The
  importing file wins over what it imports, and a later import wins over an earlier one.
"""

_KINDS = {
    "qtrace.observers": ("an [observer](plugins.md#observers)", "mse"),
    "qtrace.fakequant": ("a [fake quant](plugins.md#fake-quants)", "lsq"),
    "qtrace.ptq": ("an [algorithm](plugins.md#algorithms)", "gptq"),
}
_PLAIN = {bool: "true or false", int: "whole number", float: "number", str: "text"}
_BOUNDS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}


def models() -> list[type[BaseModel]]:
    """Every model of a config, in the order in which the keys meet them."""
    from qtrace import QConfig

    reached: list[type[BaseModel]] = [QConfig]
    for model in reached:  # grows on the way
        for field in model.model_fields.values():
            reached += [m for m in _models(field.annotation) if m not in reached and _shown(m)]
    return reached


def _shown(model: type[BaseModel]) -> bool:
    """Whether a model has keys of its own: a name with options (`Spec`) is shown at the keys that take it."""
    return model.__name__ != "Spec"


def settings() -> Iterator[tuple[type[BaseModel], str, FieldInfo]]:
    """Every key as users write it, with its model and field."""
    for model in models():
        for name, field in model.model_fields.items():
            yield model, field.alias or name, field


def examples(model: type[BaseModel]) -> list[dict[str, Any]]:
    """Returns the keys and values of each YAML block in the Example section of a model's docstring."""
    texts = [s.text for s in docstrings.parse(model.__doc__) if s.title == "Example"]
    return [
        yaml.safe_load(block) for text in texts for block in re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    ]


def page() -> str:
    """The page in Markdown."""
    return "\n\n".join([_HEAD, *(_model(model) for model in models())]) + "\n"


def _model(model: type[BaseModel]) -> str:
    sections = docstrings.parse(model.__doc__)
    texts = {item.name: item.text for s in sections if s.title == "Attributes" for item in s.items}
    values = {key: value for block in reversed(examples(model)) for key, value in block.items()}
    prose = [s.text for s in sections if not s.title]
    title = _titles()[model]
    parts = [f"## {title} {{#{model.__name__}}}", *prose]
    for name, field in model.model_fields.items():
        key = field.alias or name
        facts = [field_text(field), _default(field)]
        if key in values:
            facts.append(f"example: `{key}: {_flow(values[key])}`")
        parts.append(f"`{key}` {{#{model.__name__}.{key}}}\n:   {texts.get(name, '')}")
        parts.append(f"    *{'; '.join(fact for fact in facts if fact)}*")
    return "\n\n".join(parts)


def _titles() -> dict[type[BaseModel], str]:
    """A heading for each model: the keys that lead there."""
    paths: dict[type[BaseModel], list[str]] = {}
    for owner in models():
        for name, field in owner.model_fields.items():
            for inner in _models(field.annotation):
                if _shown(inner):
                    prefix = "" if owner.__name__ == "QConfig" else f"{_first(paths, owner)}."
                    listed = "[]" if "tuple" in str(field.annotation) else ""
                    paths.setdefault(inner, []).append(f"{prefix}{field.alias or name}{listed}")
    titles = {model: ", ".join(f"`{path}`" for path in locations) for model, locations in paths.items()}
    return {model: titles.get(model, "Top level") for model in models()}


def _first(paths: dict[type[BaseModel], list[str]], model: type[BaseModel]) -> str:
    return paths[model][0]


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in typing.get_args(annotation):
        yield from _models(inner)


def field_text(field: FieldInfo) -> str:
    """The type of a field in words, with its bounds."""
    return _words(field.annotation, list(field.metadata))


def _words(annotation: Any, metadata: list[Any]) -> str:
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        more = [m for x in inner[1:] for m in (getattr(x, "metadata", None) or [x])]
        return _words(inner[0], [*metadata, *more])
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_words(a, metadata) for a in inner if a is not type(None))
    if origin is typing.Literal:
        return "one of " + ", ".join(f"`{value}`" for value in inner)
    if origin in (tuple, list):
        listed = f"list: {_words(inner[0], [])}"
        return f"text, or a list of texts{_bounds(metadata)}" if _one_or_many(metadata) else listed
    if origin is dict or annotation is Any:
        return "mapping"
    if annotation in _PLAIN:
        return _PLAIN[annotation] + _bounds(metadata)
    if isinstance(annotation, type) and annotation.__name__ == "Spec":
        label, name = _plugin(metadata)
        return f"{label}: `{name}`, `{{{name}: {{option: value}}}}` or `pkg.mod:Class`"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return f"[keys](#{annotation.__name__})"
    return f"`{annotation}`"


def _one_or_many(metadata: list[Any]) -> bool:
    return any(getattr(getattr(m, "func", None), "__name__", "") == "_as_list" for m in metadata)


def _bounds(metadata: list[Any]) -> str:
    bounds = [
        f"{word} {getattr(m, name):g}"
        for m in metadata
        for name, word in _BOUNDS.items()
        if getattr(m, name, None) is not None
    ]
    return f", {' and '.join(bounds)}" if bounds else ""


def _plugin(metadata: list[Any]) -> tuple[str, str]:
    """Returns the kind of plugin that a field names, which its validator holds, and an example."""
    for item in metadata:
        cells = getattr(getattr(item, "func", None), "__closure__", None) or ()
        for cell in cells:
            if cell.cell_contents in _KINDS:
                return _KINDS[cell.cell_contents]
    return "a plugin", "name"


def _default(field: FieldInfo) -> str:
    if field.default is PydanticUndefined and field.default_factory is None:
        return "required"
    if (
        field.default is None
        or isinstance(field.default, BaseModel)
        or field.default in ((), PydanticUndefined)
    ):
        return ""
    return f"default: `{_flow(field.default)}`"


def _flow(value: Any) -> str:
    """A value as YAML on one line."""
    text = yaml.safe_dump(value, default_flow_style=True, width=10_000, sort_keys=False)
    return text.removesuffix("\n").removesuffix("\n...").strip()
