"""Values as the Python expressions that give them, and the imports which these need."""

from __future__ import annotations

import dataclasses
import enum
import inspect
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import megengine.functional as F
import megengine.module as M
import numpy as np
from megengine.core._imperative_rt import OpDef
from megengine.core.ops import builtin

from qtrace.errors import GraphError
from qtrace.gradients import plain
from qtrace.graph.types import Node
from qtrace.observers.base import Observer

_PLAIN = (bool, int, bytes, type(None))
WIDTH = 100
"""The characters of a statement on one line, without its indentation."""


class Literals:
    """Writes values as expressions, and collects the imports of the names in them.

    Attributes:
        imports: lines such as ``import megengine as mge``.
        helpers: names of the definitions that the module begins with, such as ``Group``.
    """

    def __init__(self) -> None:
        self.imports: set[str] = set()
        self.helpers: set[str] = set()
        self._owners: dict[str, str] = {}  # an imported name -> the module that it comes from

    def use(self, line: str) -> None:
        """Adds an import."""
        self.imports.add(line)

    def use_helper(self, name: str) -> None:
        """Adds a definition before the classes."""
        self.helpers.add(name)

    def write(self, value: Any, names: Mapping[Node, str] | None = None) -> str:
        """Writes a value.

        Args:
            value: numbers, text, slices, dtypes, nodes, containers of them, and what fake quants hold.
            names: node -> the expression that stands for it.

        Raises:
            GraphError: for a value that no expression gives.
        """
        if isinstance(value, Node):
            if names is None or value not in names:
                raise GraphError(f"node {value} lacks a value here")
            return names[value]
        if value is Ellipsis:
            return "..."
        writers: tuple[tuple[Any, Callable[[Any], str]], ...] = (
            ((float, np.generic), _number),
            (_PLAIN, repr),
            (str, _text),
            (slice, lambda s: self._call("slice", [s.start, s.stop, s.step], {}, names)),
            ((tuple, list), lambda items: self._sequence(items, names)),
            (dict, lambda items: self._dict(items, names)),
            (np.dtype, lambda dtype: _text(dtype.name)),
            (np.ndarray, self._array),
            (type, self._type),
            (Observer, self._observer),
        )
        for kinds, writer in writers:
            if isinstance(value, kinds):
                return writer(value)
        if dataclasses.is_dataclass(value):
            return self._dataclass(value)
        raise GraphError(f"no Python expression gives {value!r}, a {type(value).__name__}")

    def _observer(self, value: Observer) -> str:
        fields = type(value).Options.model_fields
        changed = {
            name: each for name, each in value.options.items() if not _equal(each, fields[name].default)
        }
        return self._call(self.name(type(value)), [value.scheme], changed, None)

    def _dataclass(self, value: Any) -> str:
        own = {f.name: (getattr(value, f.name), f.default) for f in dataclasses.fields(value)}
        changed = {name: each for name, (each, default) in own.items() if each != default}
        return self._call(self.name(type(value)), [], changed, None)

    def call(
        self,
        function: str,
        arguments: list[Any],
        options: Mapping[str, Any],
        names: Any = None,
        target: str = "",
    ) -> str:
        """Writes a call; over several lines if it is long with the ``target`` that it is assigned to."""
        return self._call(function, arguments, options, names, len(target))

    def index(self, value: Any, names: Mapping[Node, str] | None = None) -> str:
        """Writes what stands between the brackets of an index, such as ``:, 0, ::2``."""
        if isinstance(value, tuple) and len(value) == 1 and isinstance(value[0], (int, slice)):
            return self.index(value[0], names)
        if isinstance(value, tuple) and value:
            text = ", ".join(self.index(each, names) for each in value)
            return text if len(value) > 1 else f"{text},"
        if isinstance(value, slice):
            ends = ["" if end is None else self.write(end, names) for end in (value.start, value.stop)]
            return ":".join(ends if value.step is None else [*ends, self.write(value.step, names)])
        return self.write(value, names)

    def _call(
        self, function: str, arguments: list[Any], options: Mapping[str, Any], names: Any, taken: int = 0
    ) -> str:
        written = [self.write(each, names) for each in arguments]
        written += [f"{key}={self.write(each, names)}" for key, each in options.items()]
        return self.join(f"{function}(", written, ")", taken)

    def name(self, thing: Any) -> str:
        """Writes the name of a class or function, and imports it.

        Raises:
            GraphError: when it is not found where it says that it is defined.
        """
        thing = plain(thing)
        module, path = thing.__module__, thing.__qualname__
        if path.isidentifier():
            if getattr(M, path, None) is thing:
                self.use("import megengine.module as M")
                return f"M.{path}"
            if getattr(F, path, None) is thing:
                self.use("import megengine.functional as F")
                return f"F.{path}"
            if module.startswith("megengine.functional."):
                own = module.rpartition(".")[2]
                if getattr(getattr(F, own, None), path, None) is thing:
                    self.use("import megengine.functional as F")
                    return f"F.{own}.{path}"
        return self._imported(thing, module, path)

    def _imported(self, thing: Any, module: str, path: str) -> str:
        first = path.partition(".")[0]
        if module == "__main__" or "<" in path:
            raise GraphError(f"{path} of {module} cannot be imported: define it in a module of its own")
        if self._owners.setdefault(first, module) != module:
            alias = f"{module.replace('.', '_')}_{first}"
            self.use(f"from {module} import {first} as {alias}")
            return path.replace(first, alias, 1)
        self.use(f"from {module} import {first}")
        return path

    def _type(self, value: type) -> str:
        if issubclass(value, np.generic):
            return _text(np.dtype(value).name)
        return self.name(value)

    def _sequence(self, items: Any, names: Any) -> str:
        if isinstance(items, tuple) and type(items) is not tuple:
            items = tuple(items)
        parts = [self.write(each, names) for each in items]
        left, right = "[]" if isinstance(items, list) else "()"
        return f"({parts[0]},)" if left == "(" and len(parts) == 1 else self.join(left, parts, right)

    def _dict(self, items: Mapping[Any, Any], names: Any) -> str:
        return self.join(
            "{", [f"{self.write(key)}: {self.write(each, names)}" for key, each in items.items()], "}"
        )

    @staticmethod
    def join(left: str, parts: list[str], right: str, taken: int = 0) -> str:
        """Writes parts between brackets; over several lines if they are long on one with ``taken`` others."""
        line = f"{left}{', '.join(parts)}{right}"
        return f"{left}\n{indent(_filled(parts))}\n{right}" if parts and len(line) + taken > WIDTH else line

    def _array(self, value: np.ndarray) -> str:
        self.use("import numpy as np")
        return f'np.array({self.write(value.tolist())}, "{value.dtype.name}")'


def _filled(arguments: list[str]) -> str:
    """Arguments, as many on a line as fit."""
    lines = [""]
    for each in arguments:
        if lines[-1] and ("\n" in each or len(lines[-1]) + len(each) + 2 > WIDTH - 8):
            lines.append("")
        lines[-1] += f"{' ' if lines[-1] else ''}{each},"
    return "\n".join(lines)


def indent(text: str, depth: int = 1) -> str:
    """Indents all lines that are not empty by ``depth`` times four spaces."""
    return re.sub(r"(?m)^(?=.)", "    " * depth, text)


def _number(value: float | np.generic) -> str:
    number = value.item() if isinstance(value, np.generic) else value
    if isinstance(number, float) and not math.isfinite(number):
        return f'float("{number}")'
    return repr(number)


def shortest(value: Any) -> Any:
    """Returns the shortest number of the same float32, such as 0.001 for a 0.0010000000474974513 of a file.

    Other numbers, and what is no number, are returned as they are.
    """
    if type(value) is not float or not math.isfinite(value) or float(np.float32(value)) != value:
        return value
    return float(str(np.float32(value)))


def shorten_eps(
    function: Callable[..., Any], arguments: Sequence[Any], options: Mapping[str, Any]
) -> tuple[list[Any], dict[str, Any]]:
    """Returns the arguments of a call with the shortest ``eps``; an option that is the default is left out.

    MegEngine's kernels read it as a float32; what others make of theirs is not known.
    """
    arguments, options = list(arguments), dict(options)
    if str(function.__module__).partition(".")[0] != "megengine":
        return arguments, options
    try:
        parameters = inspect.signature(plain(function)).parameters
    except (TypeError, ValueError):
        return arguments, options
    place = [*parameters].index("eps") if "eps" in parameters else len(arguments)
    if place < len(arguments):
        arguments[place] = shortest(arguments[place])
    if "eps" in options:
        options["eps"] = shortest(options["eps"])
        if "eps" in parameters and _equal(options["eps"], parameters["eps"].default):
            del options["eps"]
    return arguments, options


def _text(value: str) -> str:
    return repr(value) if '"' in value or "'" in value else f'"{repr(value)[1:-1]}"'


def without_defaults(
    function: Callable[..., Any], arguments: list[Any], options: Mapping[str, Any]
) -> tuple[list[Any], dict[str, Any]]:
    """Returns the arguments of a call without those that the function takes by itself."""
    try:
        parameters = inspect.signature(plain(function)).parameters
    except (TypeError, ValueError):
        return arguments, dict(options)
    if any(p.kind is p.VAR_POSITIONAL for p in parameters.values()):
        return arguments, dict(options)
    arguments, ordered = list(arguments), list(parameters.values())
    options = {
        n: v for n, v in options.items() if n not in parameters or not _equal(v, parameters[n].default)
    }
    while arguments and _equal(arguments[-1], ordered[len(arguments) - 1].default):
        arguments.pop()
    return arguments, options


def _equal(value: Any, default: Any) -> bool:
    return type(value) is type(default) and not isinstance(value, (Node, np.ndarray)) and value == default


def expression_of_op(op: OpDef, literals: Literals) -> str:
    """Writes an op of MegEngine's core, such as ``builtin.GetVarShape()``.

    Raises:
        GraphError: when its constructor does not give the op again.
    """
    kind = type(op)
    state, default = op.__getstate__(), kind().__getstate__()
    options = {
        name: each.name if isinstance(each, enum.Enum) else each
        for name, each in state.items()
        if each != default[name]
    }
    try:
        again = kind(**options).__getstate__()
    except Exception:
        again = None
    if getattr(builtin, kind.__name__, None) is not kind or again != state:
        raise GraphError(f"op {kind.__name__} cannot be made again by its constructor")
    literals.use("from megengine.core.ops import builtin")
    return literals.call(f"builtin.{kind.__name__}", [], options)
