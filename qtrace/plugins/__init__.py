"""Plugins: classes and objects by name, without a registry; the name is a file's in the plugin folder.

``minmax`` names the one class in ``__all__`` of ``qtrace.observers.minmax``; ``pkg.mod:Class`` names a
user's class; and a name may be an entry point of an installed package. Every call looks if the folder has
changed, so that a new file is known at once.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import pkgutil
import re
import sys
import types
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from importlib import metadata
from types import MappingProxyType
from typing import Any, Generic, TypeVar

from qtrace.errors import ConfigError, QtraceError, Terminated

__all__ = [
    "BACKENDS",
    "COMPOSITES",
    "FORMATS",
    "OP_RULES",
    "OWN_CLASS",
    "ObjectPlugins",
    "all_names",
    "attribute",
    "exported",
    "installed",
    "known",
    "load_installed",
    "load_object",
    "load_when_used",
    "make_callable",
    "name_of",
    "packaged",
    "resolve",
    "search_current_folder",
]

BACKENDS = "qtrace.backends"
COMPOSITES = "qtrace.composites"
FORMATS = "qtrace.formats"
OP_RULES = "qtrace.op_rules"


@functools.cache
def installed(group: str) -> Mapping[str, str]:
    """Lists the plugins of one kind that installed packages declare: name -> ``pkg.mod:NAME``, by name.

    Args:
        group: the group of entry points, such as ``qtrace.backends``.

    Raises:
        ConfigError: when two packages declare one name, or qtrace itself is not installed.
    """
    declared = metadata.entry_points()
    if not declared.select(group=BACKENDS, name="generic"):
        raise ConfigError("the installed package qtrace is missing, or older than this one: run pip install.")
    plugins: dict[str, metadata.EntryPoint] = {}
    for entry in sorted(declared.select(group=group), key=lambda e: (e.name, e.value)):
        other = plugins.setdefault(entry.name, entry)
        if other.value != entry.value:
            raise ConfigError(
                f"two installed packages declare {entry.name!r} in {group}, as {_origin(other)} and as "
                f"{_origin(entry)}: uninstall one, rename its entry point, or name the plugin as "
                "'pkg.mod:NAME'."
            )
    return MappingProxyType({name: entry.value for name, entry in plugins.items()})


def all_names(group: str, own: Collection[str]) -> tuple[str, ...]:
    """Lists the names of all plugins of one kind, sorted: qtrace's own and other installed packages'.

    Args:
        group: the group of entry points.
        own: the names of qtrace's own plugins of the kind.

    Raises:
        ConfigError: when an installed package takes the name of one of qtrace's own.
    """
    for name, value in installed(group).items():
        if name in own:
            raise ConfigError(
                f"an installed package declares {name!r} in {group}, as {value}: qtrace itself has one of "
                "that name. Name yours as 'pkg.mod:NAME', or rename its entry point."
            )
    return tuple(sorted((*own, *installed(group))))


def _origin(entry: metadata.EntryPoint) -> str:
    return entry.value + (f" of {entry.dist.name}" if entry.dist is not None else "")


def make_callable(package: str, function: Callable[..., Any]) -> None:
    """Makes ``qtrace.NAME(...)`` work whether NAME is bound to the function or to the package.

    Python binds the name to the package as soon as a module of it is imported.

    Args:
        package: the full name of the package, which is being imported.
        function: what a call of it calls.
    """

    class _Package(types.ModuleType):
        __doc__ = function.__doc__

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs)

    module = sys.modules[package]
    module.__class__ = _Package
    module.__wrapped__ = function  # type: ignore[attr-defined]  # where tools find the signature


def load_when_used(package: str, homes: Mapping[str, str]) -> None:
    """Makes names available as ``package.name``, each of which imports its module at its first use.

    A name stays what it is when a module of the same name is imported: Python would bind it to the module.

    Args:
        package: the full name of the package, which is being imported.
        homes: the full name of a module -> its names, between spaces.
    """
    home_of = {name: module for module, names in homes.items() for name in names.split()}

    class _Package(types.ModuleType):
        def __getattr__(self, name: str) -> Any:
            if name not in home_of:
                raise AttributeError(f"module {package!r} has no attribute {name!r}")
            value = getattr(importlib.import_module(home_of[name]), name)
            setattr(self, name, value)
            return value

        def __setattr__(self, name: str, value: Any) -> None:
            is_home = isinstance(value, types.ModuleType) and home_of.get(name) == value.__name__
            super().__setattr__(name, getattr(value, name) if is_home else value)

        def __reduce__(self) -> tuple[Any, ...]:
            return importlib.import_module, (package,)  # cloudpickle knows modules only by their exact type

        def __dir__(self) -> list[str]:
            return sorted({*super().__dir__(), *home_of})

    sys.modules[package].__class__ = _Package
    vars(sys.modules[package])["__all__"] = sorted(home_of)


_Plugin = TypeVar("_Plugin")

OWN_CLASS = re.compile(r"(?P<module>[^\W\d]\w*(\.[^\W\d]\w*)*):(?P<name>[^\W\d]\w*(\.[^\W\d]\w*)*)")
"""The name of a user's class, ``pkg.mod:Class``."""


def known(package: str) -> tuple[str, ...]:
    """Lists the names of all plugins of a kind, sorted: qtrace's own and the plugins of installed packages.

    Args:
        package: the dotted name of the plugin package, such as ``qtrace.observers``; it is the group of entry
            points, too.

    Raises:
        ConfigError: when an installed package takes the name of another plugin.
    """
    return all_names(package, packaged(package))


def packaged(package: str) -> tuple[str, ...]:
    """Lists qtrace's own plugins of a package: its modules except ``base``, ``_private`` ones and packages.

    Args:
        package: the dotted name of the plugin package, such as ``qtrace.observers``.
    """
    (folder,) = importlib.import_module(package).__path__
    return _list_plugins(folder, os.stat(folder).st_mtime_ns)


@functools.cache
def _list_plugins(folder: str, changed: int) -> tuple[str, ...]:
    """Lists the plugins in a folder that was last changed at a time."""
    names = (module.name for module in pkgutil.iter_modules([folder]) if not module.ispkg)
    return tuple(sorted(name for name in names if not name.startswith("_") and name != "base"))


def resolve(package: str, name: str, base: type) -> type:
    """Returns the class that a config names.

    It imports only ``package.name`` for a `known` name, or the module of ``pkg.mod:Class``. That runs the
    module's code, so take such names from the user only.

    Args:
        package: the dotted name of the plugin package, such as ``qtrace.observers``.
        name: a plugin's file name without suffix, or ``pkg.mod:Class``.
        base: the base class of the result.

    Raises:
        ConfigError: when the name is unknown (the known ones are listed), its module cannot be imported, or
            it names no concrete subclass of `base`.
    """
    if isinstance(name, str) and OWN_CLASS.fullmatch(name):
        cls = _import(name, f"a subclass of {base.__name__}")
    elif name in (names := known(package)):
        value = installed(package).get(name)
        cls = _import(value, f"a subclass of {base.__name__}") if value else _only_class(f"{package}.{name}")
    else:
        raise ConfigError(
            f"{package} lacks {name!r}: choose one of {', '.join(names) or '(none)'}, or name your own as "
            "'pkg.mod:Class'."
        )
    if not (inspect.isclass(cls) and issubclass(cls, base)):
        raise ConfigError(f"{package}: {name!r} is not a subclass of {base.__module__}.{base.__qualname__}.")
    if inspect.isabstract(cls):
        missing = sorted(cls.__abstractmethods__)  # type: ignore[attr-defined]
        raise ConfigError(
            f"{package}: {name!r} is abstract: it has to implement {' and '.join(missing)}, as "
            f"{base.__module__}.{base.__qualname__} describes."
        )
    return cls


@dataclass(frozen=True)
class ObjectPlugins(Generic[_Plugin]):
    """A kind of plugin that is an object, not a class, such as backends, runtimes, formats and contracts.

    qtrace's own plugins are entry points, as plugins of other packages are.

    Attributes:
        group: the group of entry points, such as ``qtrace.backends``.
        kind: the class of the objects.
        error: the error for an unknown name.
    """

    group: str
    kind: type[_Plugin]
    error: type[QtraceError] = ConfigError

    @property
    def noun(self) -> str:
        """What messages call a plugin of the kind, such as ``parameter file`` for a `ParameterFile`."""
        return re.sub(r"(?<!^)(?=[A-Z])", " ", self.kind.__name__).lower()

    def packaged(self) -> tuple[str, ...]:
        """Lists the names of qtrace's own plugins of the kind, sorted."""
        return tuple(name for name, value in installed(self.group).items() if value.startswith("qtrace."))

    def known(self) -> tuple[str, ...]:
        """Lists the names of all plugins of the kind, sorted: qtrace's own and other installed packages'.

        Raises:
            ConfigError: when an installed package takes the name of another plugin.
        """
        return tuple(installed(self.group))

    def get(self, name: str) -> _Plugin:
        """Returns a plugin.

        Args:
            name: a known name, or ``pkg.mod:NAME``.

        Raises:
            QtraceError: `error` when the name is unknown; the message lists the known ones.
            ConfigError: when the name is of two plugins, its module cannot be imported, or the object is of
                another class.
        """
        if name not in installed(self.group) and not OWN_CLASS.fullmatch(name):
            known = ", ".join(self.known())
            raise self.error(f"unknown {self.noun} {name!r}; known: {known}, or your own as 'pkg.mod:NAME'.")
        return load_object(self.group, name, self.kind)


def load_object(group: str, name: str, kind: type[_Plugin]) -> _Plugin:
    """Returns the object of an entry point, or of ``pkg.mod:NAME``.

    Args:
        group: the group of entry points, such as ``qtrace.backends``.
        name: the name of an entry point in it, or ``pkg.mod:NAME``.
        kind: the class of the object.

    Raises:
        ConfigError: when its module cannot be imported, or the object is of another class.
    """
    value = installed(group).get(name, name)
    plugin = _import(value, f"an object of {kind.__name__}")
    if not isinstance(plugin, kind):
        raise ConfigError(
            f"{value!r} is of type {type(plugin).__name__}: define it as an object of "
            f"{kind.__module__}.{kind.__qualname__}."
        )
    return plugin


def load_installed(group: str, kind: type) -> tuple[Any, ...]:
    """Returns the objects that installed packages declare in a group, by the names of their entry points.

    Args:
        group: the group of entry points, such as ``qtrace.op_rules``.
        kind: the class of the objects; an entry point may name a tuple of them.

    Raises:
        ConfigError: when a module cannot be imported, or an object is of another class.
    """
    objects: list[Any] = []
    for value in installed(group).values():
        plugin = _import(value, f"an object of {kind.__name__}")
        several = plugin if isinstance(plugin, tuple) else (plugin,)
        if wrong := [item for item in several if not isinstance(item, kind)]:
            raise ConfigError(
                f"{value!r}, which an installed package declares in {group}, is of type "
                f"{type(wrong[0]).__name__}: define it as an object of "
                f"{kind.__module__}.{kind.__qualname__}, or as a tuple of such."
            )
        objects += several
    return tuple(objects)


def name_of(cls: type) -> str:
    """Returns the name of a class in configs: the file name of a plugin of qtrace, else ``pkg.mod:Class``."""
    package, _, module = cls.__module__.rpartition(".")
    return module if package.startswith("qtrace.") else f"{cls.__module__}:{cls.__qualname__}"


def exported(package: str, others: Mapping[str, str]) -> dict[str, str]:
    """Maps the public names of a plugin package to their modules: `others`, and the class of every plugin.

    It imports all plugins of the package.

    Args:
        package: the dotted name of the plugin package, such as ``qtrace.observers``.
        others: the other public names and their dotted modules.
    """
    classes = {name: f"{package}.{file}" for file in packaged(package) for name in _all(f"{package}.{file}")}
    return {**others, **classes}


def attribute(package: str, name: str, others: Mapping[str, str]) -> Any:
    """Answers ``__getattr__`` of a plugin package: a public name, one of its modules, or ``__all__``.

    Args:
        package: the dotted name of the plugin package, such as ``qtrace.observers``.
        name: the attribute.
        others: the other public names and their dotted modules.

    Raises:
        AttributeError: when there is no such name; the message lists the names.
    """
    if name == "__all__":
        return sorted(exported(package, others))
    if name not in others and (name == "base" or name in packaged(package)):
        return importlib.import_module(f"{package}.{name}")
    # Python looks up private names by itself, which must not import the plugins.
    names = others if name in others or name.startswith("_") else exported(package, others)
    if name not in names:
        raise AttributeError(f"{package!r} has no attribute {name!r}: it has {', '.join(sorted(names))}")
    return getattr(importlib.import_module(names[name]), name)


def search_current_folder() -> None:
    """Puts the current folder first on the import path, as ``python -m`` does."""
    if (folder := os.getcwd()) not in sys.path:  # for good, as a module may import its neighbours later
        sys.path.insert(0, folder)


def _import(value: str, definition: str) -> Any:
    """Returns what an entry point or ``pkg.mod:NAME`` names; an entry point may name a module.

    Args:
        value: the module, and the name in it after a colon.
        definition: what the user has to define there, for the message.
    """
    module, name = (part.strip() for part in f"{value}:".split(":")[:2])
    try:
        imported = importlib.import_module(module)
    except Terminated:
        raise
    except (Exception, SystemExit) as error:  # the user's code may raise anything
        problem = f"importing {module} failed with {type(error).__name__}: {error}. Is it on PYTHONPATH?"
        raise ConfigError(f"'{value}': {problem}") from error
    try:
        return functools.reduce(getattr, name.split("."), imported) if name else imported
    except AttributeError:
        raise ConfigError(f"'{value}': {module} lacks {name}: define it there as {definition}.") from None


def _only_class(module: str) -> Any:
    """Returns the one class in ``__all__`` of a plugin file."""
    names = _all(module)
    if len(names) != 1:
        raise ConfigError(f"{module}: __all__ names {len(names)} things: a plugin file exports one class.")
    return getattr(importlib.import_module(module), names[0])


def _all(module: str) -> list[str]:
    """Lists the exported names of a plugin file."""
    return list(getattr(importlib.import_module(module), "__all__", ()))
