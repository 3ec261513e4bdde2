"""Measures the size of the package, room by room, next to its budget in ``tests/budget.json``.

``make budget`` prints it. The budget only goes down: ``--lower`` writes what was measured where it is less.
Whoever must raise a figure edits the file, and adds an entry
under ``raises`` that says why, and what was taken away for it.
"""

from __future__ import annotations

import argparse
import ast
import itertools
import json
import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts import style

ROOT = Path(__file__).parent.parent
DATA = "tests/budget.json"
COLUMNS = ("lines", "files", "numbers", "functions", "classes")
HEADINGS = ("lines", "files", "bare numbers", "functions over 8 arguments", "classes over 12 fields")

# The modules of the public calls: how many files a reader may have to follow each of them into.
CALLS = {
    "annotate": "qtrace.preparation.passes.annotate",
    "prepare": "qtrace.preparation.prepare",
    "calibrate": "qtrace.calibration.calibrate",
    "tune": "qtrace.extras.tune.tune",
    "quantize": "qtrace.quantizing.quantize",
}
PLUG_INS = ("targets", "extras")  # each of their folders is a room
_LINKED = ("observers", "fakequant", "recipes")
_MOST_ARGUMENTS = 8
_MOST_FIELDS = 12


def room_of(name: str) -> str:
    """Returns the room of a dotted name: ``graph`` of ``qtrace.graph.table``; of a plug-in two parts."""
    parts = name.split(".")
    if len(parts) > 2 and parts[1] in PLUG_INS:
        return "/".join(parts[1:3])
    return parts[1] if len(parts) > 1 else "__init__"


@dataclass(frozen=True)
class SourceFile:
    """A file of the package.

    Attributes:
        module: its dotted name, such as ``qtrace.graph.table``; a package has the name of its folder.
        text: what stands in it.
    """

    module: str
    text: str

    @property
    def room(self) -> str:
        """The room of the file: the first part of its name below ``qtrace``, two for targets and extras."""
        return room_of(self.module)


def read_sources(root: Path = ROOT) -> list[SourceFile]:
    """Reads all files of the package, those of the linked folders under the name that users import."""
    folders = [(root / "qtrace", "qtrace"), *((root / name, f"qtrace.{name}") for name in _LINKED)]
    sources = []
    for folder, prefix in folders:
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            if prefix == "qtrace" and parts[0] in _LINKED:
                continue
            is_package = parts[-1] == "__init__"
            module = ".".join([prefix, *parts[: len(parts) - is_package]])
            sources.append(SourceFile(module, path.read_text(encoding="utf-8")))
    return sources


def read_pages(root: Path = ROOT) -> list[Path]:
    """Returns the Markdown files of the repository that its users and contributors read."""
    return [root / "README.md", root / "ARCHITECTURE.md", *sorted((root / "docs").rglob("*.md"))]


def count_lines(text: str, tree: ast.Module) -> int:
    """Counts the lines of code of a text and its tree: without docstrings, comments and blank lines."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings: set[int] = set()
    documented_count = 0
    for node in style.statements(tree):
        if isinstance(node, documented) and ast.get_docstring(node, clean=False) is not None:
            first = node.body[0]
            documented_count += 1
            docstrings |= set(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    stripped = map(str.strip, text.split("\n"))
    lines = {number for number, line in enumerate(stripped, 1) if line and not line.startswith("#")}
    for node in ast.walk(tree) if text.count('"""') > 2 * documented_count else ():
        if isinstance(node, (ast.Constant, ast.JoinedStr)):  # a text over several lines
            lines |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines - docstrings)


def is_number(node: ast.AST | None) -> bool:
    """Returns whether an expression is made of literals with a number among them: no name, and no call."""
    literal = (ast.Constant, ast.UnaryOp, ast.BinOp, ast.Tuple, ast.List, ast.Set, ast.Dict)
    grammar = (ast.operator, ast.unaryop, ast.expr_context)
    if node is None or not all(isinstance(part, (*literal, *grammar)) for part in ast.walk(node)):
        return False
    constants = (part.value for part in ast.walk(node) if isinstance(part, ast.Constant))
    return any(isinstance(value, (int, float)) and not isinstance(value, bool) for value in constants)


def _count_numbers(tree: ast.Module) -> int:
    """Counts the module constants that are bare numbers, arithmetic or collections of numbers."""
    constants = (node for node in tree.body if isinstance(node, (ast.Assign, ast.AnnAssign)))
    return sum(is_number(node.value) for node in constants)


def measure_file(text: str) -> Counter[str]:
    """Measures one file: each of `COLUMNS`."""
    tree = style.parse(text)
    figures = Counter(lines=count_lines(text, tree), files=1, numbers=_count_numbers(tree))
    for node in style.statements(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            figures["functions"] += len(arguments) > _MOST_ARGUMENTS
        elif isinstance(node, ast.ClassDef):
            fields = [line for line in node.body if isinstance(line, ast.AnnAssign)]
            figures["classes"] += len(fields) > _MOST_FIELDS
    return figures


def imported_names(text: str) -> set[str]:
    """Returns the dotted names that a file imports, in functions too, but not those for types only."""
    names: set[str] = set()
    waiting: list[ast.AST] = [style.parse(text)]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"):
            waiting += style.inner_statements(node)
    return names


def reached_modules(start: str, imports: Mapping[str, set[str]]) -> set[str]:
    """Returns the modules that a module imports, directly or through others.

    Args:
        start: the module.
        imports: module -> the names that it imports.
    """
    reached: set[str] = set()
    waiting = [start]
    while waiting:
        module = waiting.pop()
        if module not in imports:
            module = module.rpartition(".")[0]  # a name in a module
        if module in imports and module not in reached and module != "qtrace":
            reached.add(module)
            waiting += imports[module]
    return reached


def measure(sources: Sequence[SourceFile], pages: Sequence[Path]) -> dict[str, dict[str, Any]]:
    """Measures the package and its docs.

    Args:
        sources: the files of the package.
        pages: the Markdown files of the repository.

    Returns:
        ``rooms``: room -> figure of `COLUMNS` -> count, with ``total`` and ``road``, all but the plug-ins;
        ``reach``: call -> files; ``style``: docstrings, messages or pages -> what `scripts.style` counts ->
        count.
    """
    rooms: dict[str, Counter[str]] = {}
    imports = {}
    texts: dict[str, list[str]] = {"docstrings": [], "messages": []}
    for source in sources:
        figures = measure_file(source.text)
        imports[source.module] = imported_names(source.text)
        texts["docstrings"] += style.docstrings(source.text)
        texts["messages"] += style.messages(source.text)
        road = () if source.room.startswith(PLUG_INS) else ("road",)
        for room in (source.room, *road, "total"):
            rooms.setdefault(room, Counter(dict.fromkeys(COLUMNS, 0))).update(figures)
    reach = {call: len(reached_modules(module, imports)) for call, module in CALLS.items()}
    texts["pages"] = [page.read_text(encoding="utf-8") for page in pages]
    words = {kind: {k: round(n, 2) for k, n in style.measure(t).items()} for kind, t in texts.items()}
    return {"rooms": {room: dict(rooms[room]) for room in sorted(rooms)}, "reach": reach, "style": words}


def flatten(figures: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """Returns the figures by dotted names, such as ``rooms.graph.lines`` and ``reach.prepare``."""
    flat = {f"reach.{call}": count for call, count in figures["reach"].items()}
    for kind in ("rooms", "style"):
        for group, row in figures.get(kind, {}).items():
            flat |= {f"{kind}.{group}.{name}": count for name, count in row.items()}
    return flat


def exceeded(measured: Mapping[str, Any], budget: Mapping[str, Any]) -> list[str]:
    """Returns a sentence for each figure that is above its budget; a room without a budget has 0."""
    limits = flatten(budget)
    return [
        f"{name} is {count}, and its budget is {limits.get(name, 0)}."
        for name, count in flatten(measured).items()
        if count > limits.get(name, 0)
    ]


def unexplained_raises(versions: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns a sentence for each raise between two versions that the last one does not explain.

    Args:
        versions: the contents of the data file, the oldest first.
    """
    explained = {
        (entry["figure"], entry["from"], entry["to"])
        for entry in versions[-1].get("raises", ())
        if entry["why"] and entry["taken away"]
    }
    sentences = []
    for older, newer in itertools.pairwise(versions):
        before = flatten(older)
        for name, count in flatten(newer).items():
            if name in before and count > before[name] and (name, before[name], count) not in explained:
                sentences.append(f"{name} went from {before[name]} to {count} without an entry in raises.")
    return sentences


def read_versions(root: Path = ROOT) -> list[dict[str, Any]]:
    """Reads the versions of the data file: those that git has, the oldest first, then the work tree's."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(root), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    try:
        commits = git("log", "--first-parent", "--reverse", "--format=%H", "--", DATA).split()
        versions = [json.loads(git("show", f"{commit}:{DATA}")) for commit in commits]
    except (OSError, subprocess.CalledProcessError):
        versions = []  # no git, or no checkout
    return [*versions, read_budget(root)]


def read_budget(root: Path = ROOT) -> dict[str, Any]:
    """Reads the data file."""
    return json.loads((root / DATA).read_text(encoding="utf-8"))


def lower(measured: Mapping[str, Any], budget: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the budget with every figure that was measured lower; rooms that are gone are left out."""
    limits = flatten(budget)

    def least(kind: str) -> dict[str, dict[str, float]]:
        return {
            group: {
                name: min(count, limits.get(f"{kind}.{group}.{name}", count)) for name, count in row.items()
            }
            for group, row in measured[kind].items()
        }

    reach = {
        call: min(count, limits.get(f"reach.{call}", count)) for call, count in measured["reach"].items()
    }
    return {"rooms": least("rooms"), "reach": reach, "style": least("style"), "raises": budget["raises"]}


def describe(measured: Mapping[str, Any], budget: Mapping[str, Any]) -> str:
    """Returns the table: each figure, and its budget where it differs."""
    limits = flatten(budget)

    def cell(name: str, count: float) -> str:
        limit = limits.get(name, 0)
        return f"{count:g}" if count == limit else f"{count:g}/{limit:g}"

    rows = [("room", *HEADINGS)]
    for room, row in sorted(measured["rooms"].items(), key=lambda item: -item[1]["lines"]):
        rows.append((room, *(cell(f"rooms.{room}.{column}", row[column]) for column in COLUMNS)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(text.rjust(width) for text, width in zip(row, widths, strict=True)) for row in rows]
    reach = ", ".join(f"{call} {cell(f'reach.{call}', count)}" for call, count in measured["reach"].items())
    words = []
    for kind, row in measured["style"].items():
        counts = (f"{name} {cell(f'style.{kind}.{name}', count)}" for name, count in row.items())
        words.append(f"{kind}: {', '.join(counts)}")
    head = "words per 1,000 that readers trip over"
    last = "measured/budget where both differ"
    return "\n".join([*lines, f"files that a call reaches: {reach}", head, *words, last])


def main() -> None:
    """Prints the table; ``--lower`` writes the budget anew where less was measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lower", action="store_true", help="write what was measured where it is less")
    options = parser.parse_args()
    measured, budget = measure(read_sources(), read_pages()), read_budget()
    print(describe(measured, budget))
    if (times := ROOT / ".ci/times").exists():
        print("times of the last .ci/run:", times.read_text(encoding="utf-8"), sep="\n", end="")
    if options.lower:
        text = json.dumps(lower(measured, budget), indent=1)
        (ROOT / DATA).write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
