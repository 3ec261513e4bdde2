"""Plants single faults in a copy of the package and says which of them its tests find.

    python -m scripts.planted_faults --count 100
    python -m scripts.planted_faults --count 25 --rooms graph,ptq --against ../older-checkout

A fault is one changed expression: a sign, a bound, a rounding, an axis, or a case that is left out. The same
seed plants the same faults. The tests of a fault are those that import its module, then those that mirror its
folder; a test counts if it passes without the fault. With ``--against``, both checkouts have the changed
expression, and each is tested by its own suite in its own ``.venv``. What only the older suite finds is
listed at the end.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib.util
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from scripts.budget import ROOT, SourceFile, imported_names, read_sources

KINDS = ("sign", "bound", "rounding", "axis", "case")
_BOUNDS = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt}
_ROUNDINGS = {"rint": "floor", "round": "floor", "floor": "ceil", "ceil": "floor", "trunc": "rint"}
_NOT_COPIED = shutil.ignore_patterns(".git", ".venv*", "__pycache__", ".*_cache", ".hypothesis", "*-out")
_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.MULTILINE)


@dataclass(frozen=True)
class Fault:
    """One changed expression.

    Attributes:
        module: the dotted name of its file.
        function: the name of the function around it.
        kind: one of `KINDS`.
        before: the expression as it is.
        after: the expression as it is planted.
        number: how many expressions of the function read the same before this one.
    """

    module: str
    function: str
    kind: str
    before: str
    after: str
    number: int

    @property
    def room(self) -> str:
        """The room of the file."""
        return SourceFile(self.module, "").room

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
    counts: dict[tuple[str, str], int] = {}

    def visit(node: ast.AST, function: str) -> Iterator[tuple[Fault, ast.AST]]:
        if isinstance(node, (ast.Raise, ast.JoinedStr, ast.arg, ast.AnnAssign, ast.Assert)):
            return
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            function = f"{function}.{node.name}".lstrip(".")
        change = _change(node) if function else None
        if change is not None:
            kind, after = change
            before = ast.unparse(node)
            number = counts[function, before] = counts.get((function, before), -1) + 1
            yield Fault(source.module, function, kind, before, after, number), node
        for child in ast.iter_child_nodes(node):
            yield from visit(child, function)

    yield from visit(ast.parse(source.text), "")


def choose(root: Path, count: int, seed: int, rooms: set[str], against: Path | None) -> list[Fault]:
    """Chooses faults from a seed: the kinds in turn, each time in another room."""
    faults = _read_faults(root)
    older = {*_read_faults(against)} if against else {*faults}
    pools: dict[str, dict[str, list[Fault]]] = {kind: {} for kind in KINDS}
    for fault in faults:
        if fault in older and (not rooms or fault.room in rooms):
            pools[fault.kind].setdefault(fault.room, []).append(fault)
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


def _read_faults(root: Path) -> list[Fault]:
    return [fault for source in read_sources(root) for fault, _ in find_faults(source)]


def plant(fault: Fault, text: str) -> str:
    """Returns the text of a file with the fault in it."""
    (node,) = (node for found, node in find_faults(SourceFile(fault.module, text)) if found == fault)
    lines = text.encode().splitlines(keepends=True)
    head = b"".join(lines[: node.lineno - 1]) + lines[node.lineno - 1][: node.col_offset]
    tail = lines[node.end_lineno - 1][node.end_col_offset :] + b"".join(lines[node.end_lineno :])
    return (head + f"({fault.after})".encode() + tail).decode()


def choose_tests(root: Path, module: str) -> list[str]:
    """Returns the test files that import a module, then its mirror folder, then the mirror of its room."""
    folder = root.joinpath("tests", *module.split(".")[1:])
    room = root / "tests" / (*module.split("."), "none")[1]
    files = sorted(root.glob("tests/**/test_*.py"))
    mirrors = {place.parent / f"test_{place.name}.py" for place in (folder, room)}
    own = [path for path in files if path in mirrors]
    direct = [path for path in files if f"{module}." in _imports(path)]
    around = [place for place in (folder, folder.parent, room) if place == room or room in place.parents]
    near = [path for place in around for path in files if place in path.parents]
    return [str(path.relative_to(root)) for path in dict.fromkeys([*own, *direct, *near])]


def _imports(path: Path) -> set[str]:
    """Returns the dotted names that a test file imports and the modules of these names, each with a dot."""
    names = imported_names(path.read_text(encoding="utf-8"))
    return {f"{module}." for name in names for module in (name, name.rpartition(".")[0])}


class Suite:
    """A copy of a checkout whose tests run on planted faults."""

    def __init__(self, root: Path, folder: Path, seconds: float) -> None:
        self._root, self._seconds = folder, seconds
        own = root / ".venv" / "bin" / "python"  # whose entry points are those of the checkout
        self._python = str(own) if own.exists() else sys.executable
        shutil.copytree(root, folder, symlinks=True, ignore=_NOT_COPIED)

    def find(self, fault: Fault) -> str:
        """Returns the test that fails with the fault and passes without it, "" or "out of time"."""
        path = Path(str(self._root.joinpath(*fault.module.split("."))) + ".py")
        path = path if path.exists() else path.with_suffix("") / "__init__.py"
        text, tests = path.read_text(encoding="utf-8"), choose_tests(self._root, fault.module)
        broken = list[str]()
        while True:
            self._write(path, plant(fault, text))
            try:
                failed = self._run(tests, broken) if tests else ""
            finally:
                self._write(path, text)
            if failed in ("", "out of time") or not self._run([failed], []):
                return failed
            broken.append(failed)

    def _write(self, path: Path, text: str) -> None:
        path.write_text(text, encoding="utf-8")
        Path(importlib.util.cache_from_source(str(path))).unlink(missing_ok=True)

    def _run(self, tests: list[str], without: list[str]) -> str:
        command = [self._python, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
        command += [f"--deselect={test}" for test in without]
        process = subprocess.Popen(
            command,
            cwd=self._root,
            env={**os.environ, "PYTHONPATH": str(self._root)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=self._seconds)
        except subprocess.TimeoutExpired:
            return "out of time"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        failed = _FAILED.search(output)
        return failed[1] if failed else "" if process.returncode in (0, 5) else tests[0]


def main() -> None:
    """Plants the faults and prints what becomes of each."""
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=plain)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rooms", default="", help="only these rooms, such as graph,ptq")
    parser.add_argument("--minutes", type=float, default=5, help="the time limit of the tests of a fault")
    parser.add_argument("--against", type=Path, help="an older checkout, whose suite is compared")
    options = parser.parse_args()
    rooms = set(options.rooms.split(",")) - {""}
    faults = choose(ROOT, options.count, options.seed, rooms, options.against)
    with tempfile.TemporaryDirectory(prefix="qtrace-faults-") as folder:
        roots = [ROOT, *filter(None, [options.against])]
        suites = [Suite(root, Path(folder, str(n)), options.minutes * 60) for n, root in enumerate(roots)]
        found = []
        for fault in faults:
            found.append([suite.find(fault) for suite in suites])
            print(fault, *(f"  {test or 'not found'}" for test in found[-1]), sep="\n", flush=True)
    for suite, root in enumerate(roots):
        late = sum(tests[suite] == "out of time" for tests in found)
        number = sum(bool(tests[suite]) for tests in found) - late
        print(f"{root}: {number} of {len(faults)} found, {late} out of time")
    for fault, (now, *before) in zip(faults, found, strict=True):
        if before and not now and before[0] not in ("", "out of time"):
            print(f"only the older suite finds {fault}: {before[0]}")


if __name__ == "__main__":
    main()
