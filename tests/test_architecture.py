"""Holds the table in ARCHITECTURE.md: which room may import which, wherever in a file the import stands."""

from __future__ import annotations

import ast
import functools
import re
from dataclasses import dataclass
from pathlib import Path

from scripts.budget import PLUG_INS, room_of
from tests.each import each_of

ROOT = Path(__file__).parent.parent
LINKED = ("observers", "fakequant", "recipes")

# Numpy only: these run in worker processes that never load MegEngine.
WITHOUT_MEGENGINE = {"errors", "storage", "scheme", "numerics", "plugins", "observers"}
WITHOUT_MEGENGINE |= {"onnxfile", "runtimes", "costs"}

# The rooms that touch TracedModule's internals: the IR, and what takes its graphs apart or writes them anew;
# and the files outside of them that may name the module.
TRACED_MODULE_ROOMS = {"graph", "extras/source", "extras/split", "targets/msc"}
TRACED_MODULE_FILES = {"qtrace/fakequant/base.py"}  # it calls register_as_builtin

MOST_ROOMS = 36
NOT_ROOMS = {"__init__.py", "__main__.py", "__pycache__", "py.typed"}
_ROW = re.compile(r"\| `(?P<room>\w+(?:/\w+)?)(?:/|\.py)?` \|[^|]+\|(?P<imports>[^|]*)\|(?P<by_name>[^|]*)\|")
_MODULE = re.compile(r"(?P<module>qtrace(\.\w+)+)(:\w+)?")


@dataclass(frozen=True)
class Row:
    """A room and what it may import: rooms by an import statement, and rooms by a name in a string."""

    imports: frozenset[str]
    by_name: frozenset[str]


def read_table(text: str) -> dict[str, Row]:
    """The rooms of the table in a page, in its order."""
    rows = {}
    for match in map(_ROW.match, text.splitlines()):
        if match:
            imports, by_name = (
                frozenset(part.replace(",", " ").split()) - {"nothing"}
                for part in match.group("imports", "by_name")
            )
            assert match["room"] not in rows, match["room"]
            rows[match["room"]] = Row(imports, by_name)
    return rows


ROOMS = read_table((ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8"))


def _sources() -> dict[str, Path]:
    """The name that each source file of the package has below ``qtrace/`` -> where it really stands."""
    folders = [(ROOT / "qtrace", "qtrace"), *((ROOT / name, f"qtrace/{name}") for name in LINKED)]
    files = {}
    for folder, name in folders:
        for path in folder.rglob("*.py"):
            inside = path.relative_to(folder)
            if not (folder.name == "qtrace" and inside.parts[0] in LINKED):
                files[f"{name}/{inside.as_posix()}"] = path
    return dict(sorted(files.items()))


SOURCES = _sources()
MODULES = {name.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for name in SOURCES}


@dataclass(frozen=True)
class Names:
    """The names that a file uses, each with its line, and what it defines at its top.

    Attributes:
        imports: dotted names of everything it imports, module or member of one, at any depth.
        modules: modules of ours that strings name, alone or as ``module:Class``.
        traced_module: lines that read an attribute of this name.
        classes: its classes.
        functions: its functions.
        for_types: lines of imports that only type checkers read.
    """

    imports: list[tuple[int, str]]
    modules: list[tuple[int, str]]
    traced_module: list[int]
    classes: list[str]
    functions: list[str]
    for_types: set[int]


@functools.cache
def read_names(file: str, source: str) -> Names:
    """Reads the names of a file; a tree of syntax is large, so that none is kept."""
    package, tree = file.removesuffix(".py").split("/")[:-1], ast.parse(source)
    imports, modules, traced_module, for_types = [], [], [], set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imports += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join(base + ([node.module] if node.module else []))
            imports += [(node.lineno, f"{module}.{alias.name}") for alias in node.names]
        elif isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            for_types |= {inner.lineno for inner in node.body}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            match = _MODULE.fullmatch(node.value)
            if match and match["module"] in MODULES:
                modules.append((node.lineno, match["module"]))
        elif isinstance(node, ast.Attribute) and node.attr == "traced_module":
            traced_module.append(node.lineno)
    classes = [node.name for node in tree.body if isinstance(node, ast.ClassDef)]
    functions = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    return Names(imports, modules, traced_module, classes, functions, for_types)


def _names_of(file: str) -> Names:
    return read_names(file, SOURCES[file].read_text(encoding="utf-8"))


def _private_part(name: str, module: str) -> str | None:
    """The first private module or name on the way to ``name`` that is not in a package around ``module``."""
    parts = name.split(".")
    for index, part in enumerate(parts):
        if part.startswith("_") and not part.startswith("__"):
            package = ".".join(parts[:index])
            return None if f"{module}.".startswith(f"{package}.") else part
    return None


def violations(file: str, source: str, rooms: dict[str, Row] = ROOMS) -> list[str]:
    """Returns a sentence for each import of a file that the table does not allow."""
    module = file.removesuffix(".py").replace("/", ".")
    room = room_of(module.removesuffix(".__init__"))
    if room not in rooms:
        return [f"{file} belongs to no room: give {room!r} a row in ARCHITECTURE.md"]

    names = read_names(file, source)
    problems = []
    for line, name in names.imports:
        place = f"{file}:{line}"
        top = name.split(".")[0]
        if top in LINKED:
            problems.append(f"{place} imports {name}: say qtrace.{name}")
        elif top == "qtrace":
            target = room_of(name)
            if target not in rooms:
                target = "__init__"  # `from qtrace import QScheme`: the public names
            doors = rooms[room].by_name if line in names.for_types else frozenset()
            if target != room and target not in rooms[room].imports | doors:
                allowed = ", ".join(sorted(rooms[room].imports)) or "nothing"
                problems.append(f"{place} imports {name}, but {room} may import only {allowed}")
            private = _private_part(name, module)
            if private is not None:
                problems.append(f"{place} imports {name}: {private} is private to its package")
        elif top == "megengine" and room in WITHOUT_MEGENGINE:
            problems.append(f"{place} imports {name}, but {room} must do without MegEngine")
    for line, name in names.modules:
        target = room_of(name)
        if target not in {room, *rooms[room].imports, *rooms[room].by_name}:
            problems.append(f"{file}:{line} names {name} in a string, but {room} may not know {target}")
    return problems + _uses_of_traced_module(file, room, names)


def _uses_of_traced_module(file: str, room: str, names: Names) -> list[str]:
    """Returns a sentence for each use of MegEngine's traced_module outside of the room graph."""
    if room in TRACED_MODULE_ROOMS or file in TRACED_MODULE_FILES:
        return []
    lines = [line for line, name in names.imports if f"{name}.".startswith("megengine.traced_module.")]
    lines += names.traced_module
    return [f"{file}:{line} uses megengine.traced_module: qtrace.graph is for that" for line in lines]


def test_each_room_imports_only_earlier_ones():
    names = list(ROOMS)
    for index, (name, row) in enumerate(ROOMS.items()):
        assert row.imports <= set(names[:index]), name
        assert row.by_name <= set(names), name
        assert not row.by_name & row.imports, name


def test_the_table_has_every_room_and_no_other():
    folders = {"": ROOT / "qtrace", **{f"{name}/": ROOT / "qtrace" / name for name in PLUG_INS}}
    entries = {
        prefix + path.name.removesuffix(".py")
        for prefix, folder in folders.items()
        for path in folder.iterdir()
        if path.name not in NOT_ROOMS
    }
    assert entries == set(ROOMS) - {"__init__", "__main__"}
    assert len([entry for entry in entries if not entry.startswith(PLUG_INS)]) <= MOST_ROOMS


def test_every_import_that_the_table_allows_is_used():
    used: dict[str, set[str]] = {room: set() for room in ROOMS}
    for file in SOURCES:
        room, names = room_of(file.removesuffix(".py").replace("/", ".")), _names_of(file)
        for _, name in (*names.imports, *names.modules):
            if name.split(".")[0] == "qtrace":
                target = room_of(name)
                used[room].add(target if target in ROOMS else "__init__")
    unused = {room: (row.imports | row.by_name) - used[room] for room, row in ROOMS.items()}
    assert {room: rooms for room, rooms in unused.items() if rooms} == {}


def circles(imports: dict[str, set[str]]) -> list[set[str]]:
    """Returns the sets of modules that reach each other by imports."""
    reach = {module: set(targets) for module, targets in imports.items()}
    for middle in imports:
        for targets in reach.values():
            if middle in targets:
                targets |= reach[middle]
    shared = {frozenset(m for m in reach[module] if module in reach.get(m, ())) for module in imports}
    return [set(circle) for circle in shared if circle]


def test_no_files_import_each_other():
    """Not in a circle either, nor for types alone."""
    modules = {file.removesuffix(".py").replace("/", ".").removesuffix(".__init__"): file for file in SOURCES}
    imports = {}
    for module, file in modules.items():
        names = [name for _, name in _names_of(file).imports]
        targets = {name if name in modules else name.rpartition(".")[0] for name in names}
        imports[module] = (targets & modules.keys()) - {module}
    public = "qtrace"  # its names are those of every room, and whoever asks for one imports the room
    assert circles({m: targets - {public} for m, targets in imports.items() if m != public}) == []


def test_a_public_class_has_a_name_of_its_own():
    """A word has one meaning: of two classes of one name a reader does not know which is meant."""
    names = [name for file in SOURCES for name in _names_of(file).classes if not name.startswith("_")]
    assert sorted({name for name in names if names.count(name) > 1}) == []


def test_no_word_is_the_name_of_many_functions():
    """A function's name of one word says what it does only if few share it; those of a protocol are one."""
    words: dict[str, set[str]] = {}
    for file in SOURCES:
        for name in _names_of(file).functions:
            if "_" not in name:
                words.setdefault(name, set()).add(file)
    many = {word for word, files in words.items() if len(files) >= 5}
    assert many <= {"files", "known", "main"}, many  # each format's, each table of plug-ins', each program's


def test_circles_are_found():
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": set()}) == [{"a", "b", "c"}]
    assert circles({"a": {"b"}, "b": {"c"}, "c": set()}) == []


def test_every_file_keeps_to_its_room():
    problems = [
        sentence
        for file, path in SOURCES.items()
        for sentence in violations(file, path.read_text(encoding="utf-8"))
    ]
    assert not problems, "\n".join(problems)


@each_of(
    ("file", "source", "complaint"),
    [
        ("qtrace/scheme.py", "from qtrace.numerics import quantize", "scheme may import only errors"),
        (
            "qtrace/scheme.py",
            "def f():\n    from qtrace import numerics",
            "scheme.py:2 imports qtrace.numerics",
        ),
        ("qtrace/scheme.py", "if True:\n    import qtrace.cli as c", "imports qtrace.cli"),
        ("qtrace/graph/table.py", "from ..ptq.gptq import run", "imports qtrace.ptq.gptq.run"),
        ("qtrace/graph/__init__.py", "from ..cli import main", "imports qtrace.cli.main"),
        ("qtrace/errors.py", "from qtrace import QScheme", "errors may import only nothing"),
        ("qtrace/cli.py", "import observers.base", "say qtrace.observers.base"),
        ("qtrace/observers/ema.py", "import megengine.functional as F", "must do without MegEngine"),
        ("qtrace/ptq/new.py", "from megengine.traced_module import Node", "qtrace.graph is for that"),
        ("qtrace/ptq/new.py", "from megengine import traced_module", "qtrace.graph is for that"),
        ("qtrace/ops/conv.py", "import megengine as m\nm.traced_module.expr", "conv.py:2 uses"),
        ("qtrace/novel.py", "", "novel.py belongs to no room"),
        ("qtrace/novel/__init__.py", "", "belongs to no room"),
        ("qtrace/ops/conv.py", "NAME = 'qtrace.cli'", "ops may not know cli"),
        ("qtrace/ops/conv.py", "NAME = 'qtrace.ptq.gptq:Gptq'", "ops may not know ptq"),
        ("qtrace/ops/conv.py", "from qtrace.graph._diff import x", "_diff is private to its package"),
        ("qtrace/ops/conv.py", "from qtrace.graph.walk import _x", "_x is private to its package"),
    ],
)
def test_complains_about(file, source, complaint):
    assert complaint in "\n".join(violations(file, source))


@each_of(
    ("file", "source"),
    [
        ("qtrace/numerics.py", "from qtrace import scheme\nfrom qtrace.errors import SchemeError"),
        ("qtrace/observers/ema.py", "from qtrace.observers.base import Observer\nfrom .base import Observer"),
        ("qtrace/graph/trace.py", "import megengine.traced_module as tm\nfrom . import table, _diff"),
        ("qtrace/fakequant/base.py", "from megengine.traced_module import register_as_builtin"),
        ("qtrace/cli.py", "import qtrace\nfrom qtrace import QConfig"),
        ("qtrace/__init__.py", "from qtrace.graph import trace"),
        ("qtrace/config/rule.py", "NAME = 'qtrace.ptq'"),
        ("qtrace/ops/conv.py", "KEY = 'qtrace.no_module_of_this_name'\nTEXT = 'see qtrace.cli for this'"),
    ],
)
def test_allows(file, source):
    assert violations(file, source) == []


def test_a_table_is_read_row_by_row():
    text = "| `a.py` | x | nothing | |\n| --- |\n| `b/` | y, z | a, c d | e |\n"
    assert read_table(text) == {
        "a": Row(frozenset(), frozenset()),
        "b": Row(frozenset("acd"), frozenset("e")),
    }
