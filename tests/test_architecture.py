"""Holds the arrows of ARCHITECTURE.md: which room may import which, wherever in a file the import stands."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LINKED = ("observers", "fakequant", "recipes")


def _rooms() -> dict[str, set[str]]:
    """Every room and the rooms that it may import. A room is a file or a folder of qtrace/."""
    rooms: dict[str, set[str]] = {}

    def room(name: str, imports: str | None = None) -> None:
        rooms[name] = set(rooms) if imports is None else set(imports.split())

    room("errors", "")
    room("stderr", "")
    room("archives", "")
    room("leftovers", "")
    room("scheme", "errors")
    room("numerics", "errors scheme")
    room("plugins", "errors")
    room("observers", "errors scheme numerics plugins")
    room("gradients", "")
    room("fakequant", "errors scheme numerics plugins observers gradients")
    room("graph", "errors leftovers scheme numerics observers gradients fakequant")
    room("ops", "errors gradients graph")
    room("backends", "errors scheme plugins graph ops")
    room("config", "errors scheme plugins observers fakequant ops backends")
    room("recipes", "")
    room("recipe", "errors config recipes")
    room("passes")  # without a list: all of the above
    room("batches", "errors graph")
    room("phases")
    room("qat", "errors fakequant graph numerics passes")
    room("ptq")
    room("preparation")
    room("explanation")
    room("data", "errors stderr plugins config recipe")
    room("export", "errors leftovers scheme numerics plugins fakequant graph ops backends config passes")
    room("collection")
    room("calibration")
    room("runtimes", "errors")
    room("report", "errors graph runtimes")
    room("causes", "scheme")
    room("crosscheck", "errors scheme numerics fakequant graph batches export report")
    room("verification")
    room("bisection")
    room("twin")
    room("comparison")
    room("sensitivity")
    room("finetuning")
    room("__init__")
    room("cli")
    room("__main__", "cli")
    return rooms


ROOMS = _rooms()

# Numpy only: these run in worker processes that never load MegEngine.
WITHOUT_MEGENGINE = {"errors", "stderr", "archives", "scheme", "numerics", "plugins", "observers"}

# The only room that touches TracedModule's internals, and the files outside it that may name the module.
TRACED_MODULE_ROOM = "graph"
TRACED_MODULE_FILES = {"qtrace/fakequant/base.py"}  # it calls register_as_builtin


def _sources() -> list[str]:
    real = [path for path in (ROOT / "qtrace").rglob("*.py") if not path.is_symlink()]
    linked = [path for name in LINKED for path in (ROOT / name).rglob("*.py")]
    names = {path.relative_to(ROOT).as_posix() for path in real + linked}
    return sorted({f"qtrace/{name}" if name.split("/")[0] in LINKED else name for name in names})


def _room_of(module: str) -> str:
    """The room of a dotted module name below qtrace: of `qtrace.graph.table`, graph."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def _imports(tree: ast.AST, file: str) -> list[tuple[int, str]]:
    """(line, dotted name) of everything a file imports, module or member of one, at any depth."""
    package = file.removesuffix(".py").split("/")[:-1]
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join(base + ([node.module] if node.module else []))
            found += [(node.lineno, f"{module}.{alias.name}") for alias in node.names]
    return found


def violations(file: str, source: str) -> list[str]:
    """What in a file goes against the table, one sentence each."""
    room = _room_of(file.removesuffix(".py").replace("/", "."))
    if room not in ROOMS:
        return [
            f"{file} belongs to no room: give {room!r} a line in {Path(__file__).name} and in ARCHITECTURE.md"
        ]

    tree = ast.parse(source)
    problems = []
    for line, name in _imports(tree, file):
        where = f"{file}:{line}"
        top = name.split(".")[0]
        if top in LINKED:
            problems.append(f"{where} imports {name}: say qtrace.{name}")
        elif top == "qtrace":
            target = _room_of(name)
            if target not in ROOMS:
                target = "__init__"  # `from qtrace import QScheme`: the public names
            if target != room and target not in ROOMS[room]:
                allowed = ", ".join(sorted(ROOMS[room])) or "nothing"
                problems.append(f"{where} imports {name}, but {room} may import only {allowed}")
        elif top == "megengine" and room in WITHOUT_MEGENGINE:
            problems.append(f"{where} imports {name}, but {room} must do without MegEngine")

    if room != TRACED_MODULE_ROOM and file not in TRACED_MODULE_FILES:
        named = [
            line for line, name in _imports(tree, file) if f"{name}.".startswith("megengine.traced_module.")
        ]
        named += [
            node.lineno
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute) and node.attr == "traced_module"
        ]
        problems += [
            f"{file}:{line} uses megengine.traced_module: qtrace.graph is for that" for line in named
        ]
    return problems


def test_each_room_imports_only_earlier_ones():
    names = list(ROOMS)
    for index, (name, imports) in enumerate(ROOMS.items()):
        assert imports <= set(names[:index]), name


@pytest.mark.parametrize("file", _sources())
def test_file_keeps_to_its_room(file):
    problems = violations(file, (ROOT / file).read_text(encoding="utf-8"))
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize(
    ("file", "source", "complaint"),
    [
        ("qtrace/scheme.py", "from qtrace.numerics import quantize", "scheme may import only errors"),
        (
            "qtrace/scheme.py",
            "def f():\n    from qtrace import numerics",
            "scheme.py:2 imports qtrace.numerics",
        ),
        ("qtrace/scheme.py", "if True:\n    import qtrace.cli as c", "imports qtrace.cli"),
        ("qtrace/graph/table.py", "from ..passes.insert import run", "imports qtrace.passes.insert.run"),
        ("qtrace/graph/__init__.py", "from ..cli import main", "imports qtrace.cli.main"),
        ("qtrace/errors.py", "from qtrace import QScheme", "errors may import only nothing"),
        ("qtrace/cli.py", "import observers.base", "say qtrace.observers.base"),
        ("qtrace/observers/ema.py", "import megengine.functional as F", "must do without MegEngine"),
        (
            "qtrace/preparation/passes/insert.py",
            "from megengine.traced_module import Node",
            "qtrace.graph is for that",
        ),
        (
            "qtrace/preparation/passes/insert.py",
            "from megengine import traced_module",
            "qtrace.graph is for that",
        ),
        ("qtrace/ops/conv.py", "import megengine as m\nm.traced_module.expr", "conv.py:2 uses"),
        ("qtrace/novel.py", "", "novel.py belongs to no room"),
        ("qtrace/novel/__init__.py", "", "belongs to no room"),
    ],
)
def test_complains_about(file, source, complaint):
    assert complaint in "\n".join(violations(file, source))


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("qtrace/numerics.py", "from qtrace import scheme\nfrom qtrace.errors import SchemeError"),
        ("qtrace/observers/ema.py", "from qtrace.observers.base import Observer\nfrom .base import Observer"),
        ("qtrace/graph/trace.py", "import megengine.traced_module as tm\nfrom . import table"),
        ("qtrace/fakequant/base.py", "from megengine.traced_module import register_as_builtin"),
        ("qtrace/cli.py", "import qtrace\nfrom qtrace import QConfig"),
        ("qtrace/__init__.py", "from qtrace.graph import trace"),
    ],
)
def test_allows(file, source):
    assert violations(file, source) == []
