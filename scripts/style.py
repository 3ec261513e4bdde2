"""Counts words and long sentences that readers trip over, in docstrings, messages and pages.

``make budget`` shows them. A count of words is per 1,000 words. ``tests/budget.json`` holds the counts,
which only go down.
"""

from __future__ import annotations

import ast
import functools
import re
from collections import deque
from collections.abc import Iterable, Iterator

TRIPPING = {
    "that of, those of": r"\b(?:that|those) of\b",
    "behind, in front of": r"\b(?:behind|in front of)\b",
    "alone": r"\balone\b",
    "beside": r"\bbeside\b",
    "has not, have no": r"\b(?:has|have) (?:not|no|none)\b",
    "tells of": r"\b(?:tells?|told) of\b",
}
"""Name -> the pattern of the words."""
LONG = "sentences over 25 words, %"
_MOST_WORDS = 25
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
_CODE = re.compile(r"^ *```.*?^ *```", re.DOTALL | re.MULTILINE)
_NOT_PROSE = re.compile(r"^(?:\||#|\s*<|---|\s*[\w.-]+:\s*$)")
_BLOCK = re.compile(r"\n\s*\n|\n(?=\s*[-*] |    \S|\S+:\n)")
_SENTENCE_END = re.compile(r"(?<=[.!?:])\s+(?=[A-Z`*\[(])")


@functools.lru_cache(maxsize=1)
def parse(text: str) -> ast.Module:
    """Parses a file; the tree of the last one is kept, for the next question about it."""
    return ast.parse(text)


def inner_statements(node: ast.AST) -> list[ast.AST]:
    """Returns the statements right inside a statement, its handlers and its cases."""
    fields = ("body", "handlers", "cases", "orelse", "finalbody")
    return [statement for field in fields for statement in getattr(node, field, ())]


def statements(tree: ast.AST) -> Iterator[ast.AST]:
    """Yields a tree and the statements in it, not their expressions, of which there are many more."""
    waiting = deque([tree])
    while waiting:
        node = waiting.popleft()
        yield node
        waiting += inner_statements(node)


@functools.cache
def docstrings(text: str) -> list[str]:
    """Returns the docstrings of a file."""
    nodes = (node for node in statements(parse(text)) if isinstance(node, _DOCUMENTED))
    return [docstring for docstring in map(ast.get_docstring, nodes) if docstring is not None]


@functools.cache
def messages(text: str) -> list[str]:
    """Returns the messages of the errors that a file raises, with ``X`` for what a message fills in."""
    return list(_messages(parse(text)))


def _messages(tree: ast.Module) -> Iterator[str]:
    for node in statements(tree):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            for argument in node.exc.args[:1]:
                if isinstance(argument, ast.JoinedStr):
                    parts = [p.value if isinstance(p, ast.Constant) else "X" for p in argument.values]
                    yield "".join(map(str, parts))
                elif isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                    yield argument.value


@functools.cache
def sentences(text: str) -> list[str]:
    """Splits prose into sentences, without code, tables and headings; an entry of a list begins a new one."""
    prose: list[str] = []
    for block in _BLOCK.split(_CODE.sub("", text)):
        lines = [line for line in block.splitlines() if not _NOT_PROSE.match(line)]
        prose += _SENTENCE_END.split(" ".join(" ".join(lines).split()))
    return [sentence for sentence in prose if sentence]


def measure(texts: Iterable[str]) -> dict[str, float]:
    """Counts the words of `TRIPPING` per 1,000 words, and the share of long sentences.

    Args:
        texts: docstrings, messages or pages.
    """
    prose = [sentence for text in texts for sentence in sentences(text)]
    words = max(sum(len(sentence.split()) for sentence in prose), 1)
    counts = {
        name: 1000 * sum(len(re.findall(pattern, s, re.IGNORECASE)) for s in prose) / words
        for name, pattern in TRIPPING.items()
    }
    long = sum(len(sentence.split()) > _MOST_WORDS for sentence in prose)
    return {**counts, LONG: 100 * long / max(len(prose), 1)}
