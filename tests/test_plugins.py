from __future__ import annotations

import subprocess
import sys

import pytest

from qtrace import plugins
from qtrace.errors import ConfigError
from qtrace.observers.base import Observer
from qtrace.observers.minmax import MinMax
from tests.each import each_of

PACKAGE = "qtrace.observers"


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A plugin package `plug` in which a test writes files; gives a function that does."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "plug").mkdir()

    def write(name: str, text: str = "") -> None:
        (tmp_path / name).write_text(text)

    write("plug/__init__.py")
    yield write
    for name in [name for name in sys.modules if name.split(".")[0] in {"plug", "own"}]:
        del sys.modules[name]


def test_known_are_the_files():
    names = plugins.known(PACKAGE)
    assert {"minmax", "moving_average", "percentile", "mse"} <= set(names)
    assert list(names) == sorted(names)
    assert "base" not in names
    assert not any(name.startswith("_") for name in names)


def test_every_known_name_resolves_to_a_class_that_knows_its_name():
    from qtrace.scheme import QScheme

    for name in plugins.known(PACKAGE):
        cls = plugins.resolve(PACKAGE, name, Observer)
        assert issubclass(cls, Observer)
        assert cls(QScheme()).name == name


def test_a_file_name_and_a_users_own():
    assert plugins.resolve(PACKAGE, "minmax", Observer) is MinMax
    assert plugins.resolve(PACKAGE, "qtrace.observers.minmax:MinMax", Observer) is MinMax


def test_a_new_file_is_known_at_once(package):
    assert plugins.known("plug") == ()
    package("plug/fresh.py", "__all__ = ['Fresh']\nclass Fresh(int): pass\n")
    package("plug/_private.py")
    package("plug/base.py")
    assert plugins.known("plug") == ("fresh",)
    assert plugins.resolve("plug", "fresh", int).__name__ == "Fresh"


def test_unknown_name_lists_the_known_ones():
    with pytest.raises(
        ConfigError, match=r"'minmex'.*minmax, moving_average, moving_percentile, mse, percentile"
    ):
        plugins.resolve(PACKAGE, "minmex", Observer)


@each_of(
    "name",
    ["", "base", "_search", "os", "minmax.MinMax", ".minmax", "minmax ", "../minmax", "minmax:", ":MinMax",
     "a b:C", "os:", "x;y:Z", "minmax\n", None, 3, ["minmax"]],
)  # fmt: skip
def test_no_other_string_is_taken(name):
    with pytest.raises(ConfigError, match="choose one of"):
        plugins.resolve(PACKAGE, name, Observer)


def test_refused_names_import_nothing():
    code = (
        "import sys\nfrom qtrace import plugins\nfrom qtrace.errors import ConfigError\n"
        "plugins.known('qtrace.observers')\nbefore = set(sys.modules)\n"
        "for name in ('antigravity', 'this', 'json.tool', '_search', 'base', 'mse.x'):\n"
        "    try: plugins.resolve('qtrace.observers', name, object)\n"
        "    except ConfigError: pass\n"
        "    else: raise SystemExit(name)\n"
        "print(sorted(set(sys.modules) - before))\n"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert process.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("text", "name", "word"),
    [
        ("class A: pass", "own:A", "not a subclass"),
        ("A = 3", "own:A", "not a subclass"),
        ("", "own:A", "lacks A"),
        ("class Outer: pass", "own:Outer.Inner", "lacks Outer.Inner"),
        ("1 / 0", "own:A", "ZeroDivisionError"),
        ("def", "own:A", "SyntaxError"),
        ("", "no_such_module_here:A", "ModuleNotFoundError"),
        ("from qtrace.observers.base import Observer", "own:Observer", "abstract"),
    ],
)
def test_a_users_own_that_is_wrong(package, text, name, word):
    package("own.py", text)
    with pytest.raises(ConfigError, match=word):
        plugins.resolve(PACKAGE, name, Observer)


@pytest.mark.parametrize("names", ["[]", "['A', 'B']"])
def test_a_plugin_file_exports_one_class(package, names):
    package("plug/two.py", f"__all__ = {names}\nclass A(int): pass\nclass B(int): pass\n")
    with pytest.raises(ConfigError, match="one class"):
        plugins.resolve("plug", "two", int)
