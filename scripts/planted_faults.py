"""Plants single faults in a copy of the package and says which of them its tests find.

    python -m pytest -n auto --cov --cov-context=test
    python -m scripts.planted_faults --against ../older-checkout

A fault is one changed expression: a sign, a bound, a rounding, an axis, or a case that is left out. The same
seed plants the same faults. The tests of a fault are those that run its lines, by the coverage data of the
first command: near its module first, then those that touch the fewest files. A test counts if it passes
without the fault. With ``--against``, both checkouts have the function, and the older suite, in its own
``.venv``, runs its tests near the module for each fault that the newer one does not find.
"""

from __future__ import annotations

import argparse
import ast
import functools
import importlib.util
import os
import random
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from coverage import CoverageData

from scripts.budget import ROOT, SourceFile, imported_names, read_sources, room_of

KINDS = ("sign", "bound", "rounding", "axis", "case")
_BOUNDS = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt}
_ROUNDINGS = {"rint": "floor", "round": "floor", "floor": "ceil", "ceil": "floor", "trunc": "rint"}
_NOT_COPIED = shutil.ignore_patterns(".git", ".venv*", "__pycache__", ".*_cache", ".hypothesis", "*-out")
_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.MULTILINE)


@dataclass(frozen=True)
class Fault:
    """One changed expression. Two are equal if their functions are, in whichever file.

    Attributes:
        module: the dotted name of its file.
        function: the name of the function around it.
        kind: one of `KINDS`.
        before: the expression as it is.
        after: the expression as it is planted.
        place: its line in the body of the function, and its column.
        text: the body of the function.
    """

    module: str = field(compare=False)
    function: str
    kind: str
    before: str
    after: str
    place: tuple[int, int]
    text: str = field(repr=False)

    def __str__(self) -> str:
        return f"{self.module}:{self.function}: {self.kind}: {self.before} -> {self.after}"


def _change(node: ast.AST) -> tuple[str, str] | None:
    """Returns the kind of the fault at a node and the expression that takes its place, if there is one."""
    match node:
        case ast.BinOp(op=ast.Add() | ast.Sub()) if not _is_text(node.left) and not _is_text(node.right):
            other = ast.Sub() if isinstance(node.op, ast.Add) else ast.Add()
            return "sign", ast.unparse(ast.BinOp(node.left, other, node.right))
        case ast.UnaryOp(op=ast.USub()) if not isinstance(node.operand, ast.Constant):
            return "sign", ast.unparse(node.operand)
        case ast.UnaryOp(op=ast.Not()):
            return "case", ast.unparse(node.operand)
        case ast.BoolOp():
            left = node.values[:-1]
            return "case", ast.unparse(left[0] if len(left) == 1 else ast.BoolOp(node.op, left))
        case ast.Compare() if type(node.ops[0]) in _BOUNDS:
            operators = [_BOUNDS[type(node.ops[0])](), *node.ops[1:]]
            return "bound", ast.unparse(ast.Compare(node.left, operators, node.comparators))
        case ast.Call(ast.Attribute(ast.Name("np" | "math" | "F"), name)) if name in _ROUNDINGS:
            func = ast.Attribute(node.func.value, _ROUNDINGS[name])
            return "rounding", ast.unparse(ast.Call(func, node.args, node.keywords))
        case ast.Call(keywords=[*_, ast.keyword(arg="axis", value=axis)]) if _is_axis(axis):
            wrong = ast.keyword("axis", ast.Constant(1 if ast.unparse(axis) == "0" else 0))
            return "axis", ast.unparse(ast.Call(node.func, node.args, [*node.keywords[:-1], wrong]))
    return None


def _is_axis(node: ast.AST) -> bool:
    return re.fullmatch(r"-?\d", ast.unparse(node)) is not None


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def find_faults(source: SourceFile) -> Iterator[tuple[Fault, ast.AST]]:
    """Yields the faults that can be planted in the functions of a file, and the nodes that they change.

    Messages and annotations are left as they are.
    """
    lines = source.text.splitlines()

    def visit(node: ast.AST, function: str, start: int, text: str) -> Iterator[tuple[Fault, ast.AST]]:
        if isinstance(node, (ast.Raise, ast.JoinedStr, ast.arg, ast.AnnAssign, ast.Assert)):
            return
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            function = f"{function}.{node.name}".lstrip(".")
            start = node.body[0].end_lineno if ast.get_docstring(node) else node.body[0].lineno - 1
            text = "\n".join(lines[start : node.end_lineno])
        change = _change(node) if function else None
        if change is not None:
            place = node.lineno - start, node.col_offset
            yield Fault(source.module, function, change[0], ast.unparse(node), change[1], place, text), node
        for child in ast.iter_child_nodes(node):
            yield from visit(child, function, start, text)

    yield from visit(ast.parse(source.text), "", 0, "")


def choose(faults: list[Fault], count: int, seed: int) -> list[Fault]:
    """Chooses faults from a seed: the kinds in turn, each time in another room."""
    pools: dict[str, dict[str, list[Fault]]] = {kind: {} for kind in KINDS}
    for fault in faults:
        pools[fault.kind].setdefault(room_of(fault.module), []).append(fault)
    chance, chosen, turns = random.Random(seed), list[Fault](), dict[str, list[str]]()
    while len(chosen) < count and any(pools.values()):
        kind = KINDS[len(chosen) % len(KINDS)]
        kind = kind if pools[kind] else next(kind for kind in KINDS if pools[kind])
        turn = turns[kind] = turns.get(kind) or chance.sample([*pools[kind]], len(pools[kind]))
        pool = pools[kind][room := turn.pop()]
        chosen.append(pool.pop(chance.randrange(len(pool))))
        if not pool:
            del pools[kind][room]
    return chosen


def read_faults(root: Path) -> list[Fault]:
    """Returns the faults that can be planted in a checkout."""
    return [fault for source in read_sources(root) for fault, _ in find_faults(source)]


def plant(fault: Fault, text: str) -> tuple[str, range]:
    """Returns the text of a file with the fault in it, and the numbers of its lines."""
    (node,) = (node for found, node in find_faults(SourceFile(fault.module, text)) if found == fault)
    lines = text.encode().splitlines(keepends=True)
    head = b"".join(lines[: node.lineno - 1]) + lines[node.lineno - 1][: node.col_offset]
    tail = lines[node.end_lineno - 1][node.end_col_offset :] + b"".join(lines[node.end_lineno :])
    planted = head + f"({fault.after})".encode() + tail
    return planted.decode(), range(node.lineno, node.end_lineno + 1)


def near_tests(root: Path, module: str) -> list[str]:
    """Returns the test files that import a module or mirror its folder."""
    mirror = root.joinpath("tests", *module.split(".")[1:])
    folders, near = {mirror, mirror.parent} - {root / "tests"}, []
    for path in sorted(root.glob("tests/**/test_*.py")):
        imports = any(f"{name}.".startswith(f"{module}.") for name in _imported(path))
        if imports or folders & {*path.parents} or path.stem == f"test_{mirror.name}":
            near.append(str(path.relative_to(root)))
    return near


@functools.cache
def _imported(path: Path) -> frozenset[str]:
    return frozenset(imported_names(path.read_text(encoding="utf-8")))


class Contexts:
    """The tests that run a line, from coverage data with contexts."""

    def __init__(self, path: Path) -> None:
        self._data = CoverageData(str(path))
        self._data.read()
        table = "arc" if self._data.has_arcs() else "line_bits"
        counts = f"SELECT context_id AS id, COUNT(DISTINCT file_id) AS files FROM {table} GROUP BY context_id"
        query = f"SELECT context, files FROM ({counts}) JOIN context USING (id)"
        self._files = dict(sqlite3.connect(path).execute(query))

    def choose_tests(self, path: str, lines: range, near: list[str]) -> list[str]:
        """Returns the tests that run lines of a file, those of `near` first; `near` if imports run them."""
        files = (file for file in self._data.measured_files() if file.endswith(f"/{path}"))
        contexts = self._data.contexts_by_lineno(next(files, ""))
        names = {name for line in lines for name in contexts.get(line, ())}
        far = {name: name.split("::")[0] not in near for name in names - {""}}
        order = sorted(far, key=lambda name: (far[name], self._files[name], name))
        return near if names == {""} else [*dict.fromkeys(name.rpartition("|")[0] for name in order)]


class Suite:
    """A copy of a checkout whose tests run on planted faults."""

    def __init__(self, root: Path, folder: Path, seconds: float, contexts: Contexts | None = None) -> None:
        self._root, self._seconds, self._contexts = folder, seconds, contexts
        own = root / ".venv" / "bin" / "python"  # whose entry points are those of the checkout
        self._python = str(own) if own.exists() else sys.executable
        shutil.copytree(root, folder, symlinks=True, ignore=_NOT_COPIED)

    def find(self, fault: Fault, most: int | None = None) -> str:
        """Returns a test that fails with a fault and passes without it, "" or "out of time".

        Args:
            fault: a fault of the checkout.
            most: how many of its tests run.
        """
        path = Path(str(self._root.joinpath(*fault.module.split("."))) + ".py")
        path = path if path.exists() else path.with_suffix("") / "__init__.py"
        text, broken = path.read_text(encoding="utf-8"), list[str]()
        planted, lines = plant(fault, text)
        tests = near_tests(self._root, fault.module)
        if self._contexts:
            name = str(path.resolve().relative_to(self._root.resolve()))
            tests = self._contexts.choose_tests(name, lines, tests)[:most]
        while tests:
            self._write(path, planted)
            try:
                failed = self._run(tests, broken)
            finally:
                self._write(path, text)
            if failed in ("", "out of time") or not self._run([failed], []):
                return failed
            broken.append(failed)
        return ""

    def _write(self, path: Path, text: str) -> None:
        path.write_text(text, encoding="utf-8")
        Path(importlib.util.cache_from_source(str(path))).unlink(missing_ok=True)

    def _run(self, tests: list[str], without: list[str]) -> str:
        command = ["timeout", "-s", "KILL", str(self._seconds), self._python, "-m", "pytest", "-x", "-q"]
        command += ["-p", "no:cacheprovider", *tests, *(f"--deselect={test}" for test in without)]
        environment = {**os.environ, "PYTHONPATH": str(self._root)}
        process = subprocess.run(command, cwd=self._root, env=environment, capture_output=True, text=True)
        if process.returncode == -signal.SIGKILL:
            return "out of time"
        failed = _FAILED.search(process.stdout)
        return failed[1] if failed else "" if process.returncode in (0, 5) else tests[0]


def main() -> None:
    """Plants the faults and prints what becomes of each."""
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=plain)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--room", help="only this room, such as ptq")
    parser.add_argument("--minutes", type=float, default=5, help="the time limit of the tests of a fault")
    parser.add_argument("--tests", type=int, help="how many tests a fault has at most; all by default")
    parser.add_argument("--data", type=Path, default=ROOT / ".coverage", help="coverage data with contexts")
    parser.add_argument("--against", type=Path, help="an older checkout, whose suite is compared")
    options = parser.parse_args()
    older = {fault: fault for fault in read_faults(options.against or ROOT)}
    faults = [fault for fault in read_faults(ROOT) if fault in older]
    faults = [fault for fault in faults if options.room in (None, room_of(fault.module))]
    faults = choose(faults, options.count, options.seed)
    results = Counter[str]()
    with tempfile.TemporaryDirectory(prefix="qtrace-faults-") as folder:
        suite = Suite(ROOT, Path(folder, "now"), options.minutes * 60, Contexts(options.data))
        before = options.against and Suite(options.against, Path(folder, "older"), options.minutes * 60)
        for fault in faults:
            test = suite.find(fault, options.tests)
            result = test if test in ("", "out of time") else "found"
            print(fault, f"  {test or 'not found'}", sep="\n", flush=True)
            if result != "found" and before:
                print(f"  the older suite: {before.find(older[fault]) or 'not found'}", flush=True)
            results[result or "not found"] += 1
    print(", ".join(f"{count} {result}" for result, count in results.items()))


if __name__ == "__main__":
    main()
