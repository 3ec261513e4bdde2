"""The page of the command line, from click's own objects."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import click

__all__ = ["commands", "page"]

_HEAD = """# Command line

```
qtrace trace models:resnet18 --shape 1x3x224x224 -o float.mge
qtrace calibrate float.mge --data images/ --recipe resnet18 --out int8
qtrace export int8/quantized.mge -o model.onnx
qtrace verify model.onnx --model int8/quantized.mge --data images/ --recipe resnet18
```

`python -m qtrace` is the same program. Every command has `-h` and `--help`. Results go to stdout, with
`--json` as one JSON document; progress and notes go to stderr.

| exit code | meaning |
| --- | --- |
| 0 | success |
| 1 | a check failed: `verify`, `bisect`, `check` or `recipes check` found a difference or a mistake |
| 2 | a mistake in what was given; one sentence on stderr says which |
| 70 | a fault in qtrace itself |
| 130 | interrupted; no result was written |
"""


def commands() -> Iterator[tuple[str, click.Command]]:
    """Every command with its full name, groups before what is in them."""
    from qtrace.cli import group

    yield from _walk("qtrace", group)


def _walk(name: str, command: click.Command) -> Iterator[tuple[str, click.Command]]:
    yield name, command
    if isinstance(command, click.Group):
        for inner, child in command.commands.items():
            yield from _walk(f"{name} {inner}", child)


def page() -> str:
    """The page in Markdown."""
    listed = list(commands())
    index = ["| command | |", "| --- | --- |"]
    index += [
        f"| [`{name}`](#{_anchor(name)}) | {command.get_short_help_str(200)} |" for name, command in listed
    ]
    return "\n\n".join([_HEAD, "\n".join(index), *(_command(name, c) for name, c in listed)]) + "\n"


def _anchor(name: str) -> str:
    return name.replace(" ", "-")


def _command(name: str, command: click.Command) -> str:
    context = click.Context(command, info_name=name)
    parts = [f"## `{name}` {{#{_anchor(name)}}}"]
    parts.append(f"```text\n{name} {' '.join(command.collect_usage_pieces(context))}\n```")
    parts.append(inspect.cleandoc(command.help or "").replace("<", "\\<"))
    options = [p for p in command.get_params(context) if isinstance(p, click.Option) and p.name != "help"]
    if options:
        rows = ["| option | | default |", "| --- | --- | --- |"]
        rows += [f"| {_flags(o)} | {_cell(o.help or '')} | {_default(o)} |" for o in options]
        parts.append("\n".join(rows))
    if example := getattr(command, "example", ""):
        lines = [line.strip() for line in example.strip().splitlines()]
        parts.append("\n".join(["Example:", "", "```text", *lines, "```"]))
    return "\n\n".join(parts)


def _flags(option: click.Option) -> str:
    names = ", ".join(f"`{name}`" for name in option.opts)
    if option.is_flag:
        return names
    return f"{names} `{_cell(option.metavar or _kind(option.type))}`"


def _kind(kind: Any) -> str:
    if isinstance(kind, click.Choice):
        return ", ".join(str(choice) for choice in kind.choices)
    return str(kind.name).upper().replace(" RANGE", "")


def _default(option: click.Option) -> str:
    """The default as a user would write it; nothing for flags and options without one."""
    value = option.to_info_dict()["default"]
    if option.required:
        return "required"
    if option.is_flag or value in (None, (), "") or callable(value) or "Sentinel" in repr(type(value)):
        return ""
    return f"`{value}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "\\<")
