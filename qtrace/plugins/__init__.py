"""Plugins: name -> class, without a registry; the name is that of a file in the plugin folder.

``minmax`` names the one class in ``__all__`` of ``qtrace.observers.minmax``; ``pkg.mod:Class`` names a user's
own. The folder is read at every call, so that a new file is known at once and in whatever order.
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
"""A class of the user's, ``pkg.mod:Class``."""


def known(package: str) -> tuple[str, ...]:
    """The names of the plugins in a package: its modules without ``base``, ``_private`` ones and packages.

    Args:
        package: the dotted name of the plugin package, such as ``qtrace.observers``.
    """
    paths = importlib.import_module(package).__path__
    names = (module.name for module in pkgutil.iter_modules(paths) if not module.ispkg)
    return tuple(sorted(name for name in names if not name.startswith("_") and name != "base"))


def resolve(package: str, name: str, base: type) -> type:
    """The class that a configuration names.

    Nothing is imported but ``package.name`` for a `known` name, or the module in ``pkg.mod:Class``: naming
    that one runs its code, so take such names from the user only.

    Args:
        package: the dotted name of the plugin package, such as ``qtrace.observers``.
        name: a plugin's file name without suffix, or ``pkg.mod:Class``.
        base: the class that the result derives from.

    Raises:
        ConfigError: when the name is unknown (the known ones are listed), its module cannot be imported, or
            what it names is not a concrete subclass of `base`.
    """
    own = OWN_CLASS.fullmatch(name) if isinstance(name, str) else None
    if own:
        found = _own(own["module"], own["name"], base)
    elif name in (names := known(package)):
        found = _only_class(f"{package}.{name}")
    else:
        raise ConfigError(
            f"{package} has no {name!r}: choose one of {', '.join(names) or '(none)'}, or name your own as "
            "'pkg.mod:Class'."
        )
    if not (inspect.isclass(found) and issubclass(found, base)):
        raise ConfigError(f"{package}: {name!r} is not a subclass of {base.__module__}.{base.__qualname__}.")
    if inspect.isabstract(found):
        raise ConfigError(f"{package}: {name!r} is abstract: name a class that implements all methods.")
    return found


def name_of(cls: type) -> str:
    """What a config calls a class: its file name in a plugin package of ours, else ``pkg.mod:Class``."""
    package, _, module = cls.__module__.rpartition(".")
    return module if package.startswith("qtrace.") else f"{cls.__module__}:{cls.__qualname__}"


def exported(package: str, others: Mapping[str, str]) -> dict[str, str]:
    """The public names of a plugin package -> the modules they live in: `others`, and every plugin's class.

    All plugins of the package are imported.

    Args:
        package: the dotted name of the plugin package, such as ``qtrace.observers``.
        others: name -> dotted module of what is public beside the plugins.
    """
    classes = {name: f"{package}.{file}" for file in known(package) for name in _all(f"{package}.{file}")}
    return {**others, **classes}


def attribute(package: str, name: str, others: Mapping[str, str]) -> Any:
    """What a plugin package's ``__getattr__`` answers: a public name, one of its modules, or ``__all__``.

    Args:
        package: the dotted name of the plugin package, such as ``qtrace.observers``.
        name: what is asked for.
        others: name -> dotted module of what is public beside the plugins.

    Raises:
        AttributeError: when there is no such name, listing those there are.
    """
    if name == "__all__":
        return sorted(exported(package, others))
    if name in others:
        return getattr(importlib.import_module(others[name]), name)
    if name == "base" or name in known(package):
        return importlib.import_module(f"{package}.{name}")
    # Python asks for private names of its own accord: no plugin is imported for them.
    names = {} if name.startswith("_") else exported(package, others)
    if name not in names:
        listed = f": it has {', '.join(sorted(names))}" if names else ""
        raise AttributeError(f"module {package!r} has no attribute {name!r}{listed}")
    return getattr(importlib.import_module(names[name]), name)


def search_current_folder() -> None:
    """Lets modules in the current folder be imported, before others, as ``python -m`` does."""
    here = os.getcwd()
    if here not in sys.path:  # it stays: a module may import its neighbours later
        sys.path.insert(0, here)


def _own(module: str, name: str, base: type) -> Any:
    """What a user's module calls `name`."""
    try:
        imported = importlib.import_module(module)
    except Terminated:
        raise
    except (Exception, SystemExit) as error:  # it is the user's code: anything may be wrong with it
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
    """The one name in ``__all__`` of a plugin file."""
    names = _all(module)
    if len(names) != 1:
        raise ConfigError(f"{module}: __all__ names {len(names)} things: a plugin file exports one class.")
    return getattr(importlib.import_module(module), names[0])


def _all(module: str) -> list[str]:
    """What a plugin file exports."""
    return list(getattr(importlib.import_module(module), "__all__", ()))
