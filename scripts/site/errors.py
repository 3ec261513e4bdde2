"""The page of errors and warnings: every class, with the text of every message that the code can raise."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import re
from collections import defaultdict
from collections.abc import Iterator

from scripts import style
from scripts.site import docstrings, source

__all__ = ["classes", "messages", "page"]

# pydantic turns a ValueError of the config's models into a ConfigError with file and line.
_CONFIG = "ConfigError"

_HEAD = """# Errors and warnings

Search this page for words of a message that you got. Every error that your input can cause is a subclass of
`qtrace.errors.QtraceError`: one sentence that says what is wrong, where, and what to do. The command line
prints the sentence and exits with 2. A traceback from inside qtrace is a fault of qtrace: please report it.

```python
import qtrace
from qtrace.errors import ConfigError, QtraceError

try:
    qtrace.QConfig(backend="onnxruntim")
except ConfigError as error:
    print(error)  # backend: unknown backend 'onnxruntim'; did you mean 'onnxruntime'?

assert issubclass(ConfigError, QtraceError)
```

In the messages below, `[…]` stands for a name, a number or another sentence.
"""


def classes() -> dict[str, type[BaseException]]:
    """Every error and warning class of the public module, the base first."""
    module = importlib.import_module("qtrace.errors")
    own = [c for _, c in inspect.getmembers(module, inspect.isclass) if c.__module__ == module.__name__]
    own.sort(key=lambda c: (issubclass(c, Warning), len(c.__mro__), c.__name__))
    return {c.__name__: c for c in own}


@functools.cache
def messages() -> dict[str, list[str]]:
    """Name of a class -> the messages that are raised with it, sorted.

    Names that are not public are exceptions that the code raises inside, and puts into a public one.
    """
    texts_of: dict[str, set[str]] = defaultdict(set)
    for module in source.modules():
        tree = source.tree(module)
        config = _uses_pydantic(tree)
        for call in _calls(tree):
            name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
            if name == "ValueError" and config:
                name = _CONFIG
            if name == "warn" and len(call.args) > 1 and isinstance(call.args[1], ast.Name):
                name = call.args[1].id
            if text := _text(call.args[0] if call.args else None):
                texts_of[name].add(text)
    own = {*classes(), *_private()}
    return {name: sorted(texts, key=_letters) for name, texts in texts_of.items() if name in own}


def page() -> str:
    """The page in Markdown."""
    texts, parts = messages(), [_HEAD]
    for name, kind in classes().items():
        base = kind.__mro__[1].__name__
        parts.append(f"## `{name}` {{#{name}}}\n\n{docstrings.render(kind.__doc__)}\n\nBase: `{base}`")
        parts.append("\n".join(f"- {_shown(text)}" for text in texts.get(name, [])))
    inner = sorted({text for name in _private() for text in texts.get(name, [])}, key=_letters)
    parts.append(
        "## Reasons inside of other messages {#reasons}\n\n"
        "These sentences stand after the file, node or batch that an error above names."
    )
    parts.append("\n".join(f"- {_shown(text)}" for text in inner))
    return "\n\n".join(part for part in parts if part) + "\n"


@functools.cache
def _private() -> set[str]:
    """The names of exceptions that are defined elsewhere in the package."""
    names = set()
    for module in source.modules():
        for node in style.statements(source.tree(module)) if "Exception" in source.text(module) else ():
            if isinstance(node, ast.ClassDef) and any("Exception" in ast.unparse(b) for b in node.bases):
                names.add(node.name)
    return names - set(classes())


def _calls(tree: ast.Module) -> Iterator[ast.Call]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.Call))


def _uses_pydantic(tree: ast.Module) -> bool:
    return any(isinstance(n, ast.ImportFrom) and n.module == "pydantic" for n in ast.walk(tree))


def _text(node: ast.expr | None) -> str:
    """The text of an expression, with ``…`` for what is only known when it is raised; "" without a word."""
    text = re.sub(r"…(?:\s*…)+", "…", _template(node)).strip()
    return text if re.search(r"[^\W\d_]{2,}", text) else ""


def _template(node: ast.expr | None) -> str:
    if isinstance(node, ast.Constant):
        return str(node.value) if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(_template(part) or "…" for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return (_template(node.left) or "…") + (_template(node.right) or "…")
    if isinstance(node, ast.IfExp):
        return "…"
    return ""


def _letters(text: str) -> str:
    return re.sub(r"[\W_]+", " ", text).strip().lower()


def _shown(text: str) -> str:
    """A message as Markdown: what would mark it up is escaped."""
    return re.sub(r"([\\`*_{}\[\]<>|#])", r"\\\1", " ".join(text.split())).replace("…", r"\[…\]")
