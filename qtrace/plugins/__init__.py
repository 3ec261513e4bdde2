"""Plugins: classes by name, without a registry; the name is that of a file in the plugin folder.

``minmax`` names the one class in ``__all__`` of ``qtrace.observers.minmax``; ``pkg.mod:Class`` names a
user's class. The folder is read at every call, so that a new file is known at once.
"""

from __future__ import annotations

import importlib
import inspect
import os
import pkgutil
import re
import sys
from collections.abc import Mapping
from functools import reduce
from typing import Any

from qtrace.errors import ConfigError, Terminated

__all__ = ["OWN_CLASS", "attribute", "exported", "known", "name_of", "resolve", "search_current_folder"]

OWN_CLASS = re.compile(r"(?P<module>[^\W\d]\w*(\.[^\W\d]\w*)*):(?P<name>[^\W\d]\w*(\.[^\W\d]\w*)*)")
"""The name of a user's class, ``pkg.mod:Class``."""


def known(package: str) -> tuple[str, ...]:
    """Lists the plugins of a package: its modules except ``base``, ``_private`` ones and packages.

    Args:
        package: the dotted name of the plugin package, such as ``qtrace.observers``.
    """
    paths = importlib.import_module(package).__path__
    names = (module.name for module in pkgutil.iter_modules(paths) if not module.ispkg)
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
    own = OWN_CLASS.fullmatch(name) if isinstance(name, str) else None
    if own:
        cls = _user_class(own["module"], own["name"], base)
    elif name in (names := known(package)):
        cls = _only_class(f"{package}.{name}")
    else:
        raise ConfigError(
            f"{package} has no {name!r}: choose one of {', '.join(names) or '(none)'}, or name your own as "
            "'pkg.mod:Class'."
        )
    if not (inspect.isclass(cls) and issubclass(cls, base)):
        raise ConfigError(f"{package}: {name!r} is not a subclass of {base.__module__}.{base.__qualname__}.")
    if inspect.isabstract(cls):
        raise ConfigError(f"{package}: {name!r} is abstract: name a class that implements all methods.")
    return cls


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
    classes = {name: f"{package}.{file}" for file in known(package) for name in _all(f"{package}.{file}")}
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
    if name in others:
        return getattr(importlib.import_module(others[name]), name)
    if name == "base" or name in known(package):
        return importlib.import_module(f"{package}.{name}")
    # Python looks up private names by itself, which must not import the plugins.
    names = {} if name.startswith("_") else exported(package, others)
    if name not in names:
        listed = f": it has {', '.join(sorted(names))}" if names else ""
        raise AttributeError(f"module {package!r} has no attribute {name!r}{listed}")
    return getattr(importlib.import_module(names[name]), name)


def search_current_folder() -> None:
    """Puts the current folder first on the import path, as ``python -m`` does."""
    folder = os.getcwd()
    if folder not in sys.path:  # for good, as a module may import its neighbours later
        sys.path.insert(0, folder)


def _user_class(module: str, name: str, base: type) -> Any:
    """Returns the object `name` of a user's module."""
    try:
        imported = importlib.import_module(module)
    except Terminated:
        raise
    except (Exception, SystemExit) as error:  # the user's code may raise anything
        raise ConfigError(
            f"'{module}:{name}': importing {module} failed with {type(error).__name__}: {error}. Is it on "
            "PYTHONPATH?"
        ) from error
    try:
        return reduce(getattr, name.split("."), imported)
    except AttributeError:
        raise ConfigError(
            f"'{module}:{name}': {module} has no {name}: define it there as a subclass of {base.__name__}."
        ) from None


def _only_class(module: str) -> Any:
    """Returns the one class in ``__all__`` of a plugin file."""
    names = _all(module)
    if len(names) != 1:
        raise ConfigError(f"{module}: __all__ names {len(names)} things: a plugin file exports one class.")
    return getattr(importlib.import_module(module), names[0])


def _all(module: str) -> list[str]:
    """Lists the exported names of a plugin file."""
    return list(getattr(importlib.import_module(module), "__all__", ()))
