"""Resolves the names in a file to objects, within the limits of the allow-list."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterable
from typing import Any

from megengine.module import Module

from qtrace.errors import ConfigError
from qtrace.graph.files import allowlist

DEPTH = 100
"""How deeply containers, argument structures and modules of a file may be nested."""

ENTRY = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*\Z")
_LONGEST_HINT = 400  # a longer name is no class of anybody's

_LISTS = {
    "type": allowlist.TYPES,
    "object": allowlist.OBJECTS,
    "module": allowlist.MODULES,
    "opdef": allowlist.OPDEFS,
    "reducer": allowlist.REDUCERS,
}


class RefusedError(Exception):
    """The file asks for something that no file may have; the message names it."""


class DamagedError(Exception):
    """The file cannot be read; the message gives the reason."""


class Ref:
    """Stands for a listed object on the unpickler's stack.

    A Ref cannot be called and has nothing to set: wherever a file puts it, it is a piece of lifeless data.
    Only the unpickler's own rules look at what it stands for.
    """

    __slots__ = ("key", "target")

    def __init__(self, key: str, target: Any) -> None:
        self.key, self.target = key, target


class LoadBudget:
    """The memory and the work that a file may cause; both limits are linear in its size.

    A pickle can name what it has stored again and again, each time with a few bytes. What a saved model makes
    is never larger than the file, so that a file that makes much more is refused before memory or time is
    spent.

    Args:
        size: bytes of the file.
    """

    __slots__ = ("_left", "_steps")

    def __init__(self, size: int) -> None:
        self._left = 4 * size + (1 << 20)  # data as bytes, array and tensor, and tables of small things
        self._steps = 4 * size + (1 << 19)

    def take(self, size: int) -> None:
        """Takes ``size`` bytes, or entries of a table.

        Raises:
            RefusedError: when nothing is left.
        """
        self._left -= size
        if self._left < 0:
            raise RefusedError("it would take far more memory than the file is long")

    def work(self, steps: int) -> None:
        """Takes ``steps`` elementary steps, each about a microsecond of Python.

        Raises:
            RefusedError: when nothing is left.
        """
        self._steps -= steps
        if self._steps < 0:
            raise RefusedError("it would take far more work to read than the file is long")


def shown(value: object, limit: int = 100) -> str:
    """Formats ``value`` for an error message.

    Names may be long or contain line breaks. Objects of a half-loaded model are only named by their type,
    because their own repr may not work yet.
    """
    plain = (str, int, float, bytes, type(None))
    if isinstance(value, str) and value.isprintable():
        text = value
    elif all(type(item) in plain for item in (value if isinstance(value, (tuple, list)) else [value])):
        text = ascii(value)
    else:
        text = f"a {type(value).__name__}"
    return text if len(text) <= limit else f"{text[:limit]}..."


class AllowList:
    """Looks names up, exactly, in the lists of ``allowlist.py`` and in the caller's own.

    Args:
        extra: the caller's entries, ``"pkg.mod:Qual.Name"``.

    Raises:
        ConfigError: when an entry is not of that form.
    """

    def __init__(self, extra: Iterable[str] = ()) -> None:
        if isinstance(extra, str):
            raise ConfigError(f"allow is a list of names such as 'pkg.mod:Name', not the string {extra!r}.")
        self.extra = frozenset(extra)
        for entry in self.extra:
            if not ENTRY.match(entry if isinstance(entry, str) else ""):
                raise ConfigError(f"allow entry {shown(entry)!r} is not of the form 'pkg.mod:Qual.Name'.")
        self._resolved: dict[tuple[str, str], Any] = {}

    def kind(self, key: str) -> str | None:
        """Returns the list of ``key``: extra, type, opdef, object, module, qtrace, reducer, or None."""
        own = allowlist.qtrace_classes() if key.startswith("qtrace.") else ()
        lists = {**_LISTS, "extra": self.extra, "qtrace": own}
        kind = next((kind for kind, keys in lists.items() if key in keys), None)
        return "qtrace" if kind is None and _is_installed(key) else kind

    def find(self, module: object, name: object) -> Any:
        """Returns what the unpickler puts on its stack for a global name: a harmless type, or a `Ref`.

        Raises:
            RefusedError: when the name is on no list.
        """
        if type(module) is not str or type(name) is not str:
            raise RefusedError("it builds the name of an import from things that are not strings")
        if (module, name) in self._resolved:
            return self._resolved[module, name]
        key = allowlist.current(f"{module}:{name}")
        kind = self.kind(key)
        if kind is None:
            raise refused("names", key)
        target = resolve(key)
        value = target if kind in ("type", "opdef", "extra") else Ref(key, target)
        self._resolved[module, name] = value
        return value

    def function(self, pair: object) -> Any:
        """The function of a CallFunction, held to the list before anything is imported."""
        key = _pair(pair, "the function of a CallFunction")
        listed = allowlist.FUNCTIONS | allowlist.QTRACE_FUNCTIONS | self.extra
        if key not in listed and not _is_installed(key):
            raise refused("would call the function", key)
        return resolve(key)

    def module_type(self, pair: object, instance: bool = False) -> Any:
        """A module class named by a string; ``instance`` when one is going to be made of it.

        MegEngine restores a TracedModule only as an object of its own, so none is made from a string.
        """
        key = _pair(pair, "a module type")
        listed = self.kind(key) in ("module", "qtrace", "extra") or key == "megengine.module.module:Module"
        if not listed and (instance or key != "megengine.traced_module.traced_module:TracedModule"):
            raise refused("names the module class", key)
        cls = resolve(key)
        if not isinstance(cls, type) or not issubclass(cls, Module):
            raise RefusedError(f"it names {shown(key)} as a module class, which it is not")
        return cls


def _is_installed(key: str) -> bool:
    """Returns whether a name belongs to a plugin of an installed package, whose user needs no `allow`."""
    return key in allowlist.installed_names(re.split("[.:]", key)[0])


def refused(does: str, key: str) -> RefusedError:
    """The refusal of a name, and what to do about it."""
    hint = (
        f"; if you trust the file, allow it with --allow {key}, in Python with load(..., allow=[{key!r}])"
        if ENTRY.match(key) and len(key) <= _LONGEST_HINT
        else ""
    )
    return RefusedError(f"it {does} {shown(key)}, which is not on the allow-list{hint}")


def resolve(key: str) -> Any:
    """Imports what a listed key names.

    Raises:
        DamagedError: when it cannot be imported here.
    """
    module, _, name = key.partition(":")
    try:
        target = importlib.import_module(module)
        for part in name.split("."):
            target = getattr(target, part)
    except (ImportError, AttributeError) as error:
        raise DamagedError(f"it needs {key}, which cannot be imported here ({error})") from error
    return target


def _pair(pair: object, title: str) -> str:
    if type(pair) is not tuple or len(pair) != 2 or type(pair[0]) is not str or type(pair[1]) is not str:
        raise RefusedError(f"{title} in it is not a pair of module and name but {shown(pair)}")
    return allowlist.current(f"{pair[0]}:{pair[1]}")
