"""The interface of an export format, as its module or a user's object defines it."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qtrace.errors import ConfigError

__all__ = ["Format"]


@dataclass(frozen=True)
class Format:
    """An export format.

    Attributes:
        name: the name by which users choose it.
        plugin: the module or object that has ``serialize`` or ``files``, or the function itself.
    """

    name: str
    plugin: Any

    def __post_init__(self) -> None:
        if self._writer is None:
            raise ConfigError(
                f"format {self.name!r} is of type {type(self.plugin).__name__}, without serialize or files: "
                "name a function, or a module or object that has one of the two."
            )

    @property
    def suffixes(self) -> tuple[str, ...]:
        """The suffixes that choose the format."""
        return tuple(getattr(self.plugin, "SUFFIXES", ()))

    @property
    def companions(self) -> tuple[str, ...]:
        """The suffixes of files that are written beside the named one."""
        return tuple(getattr(self.plugin, "COMPANIONS", ()))

    @property
    def runs_graph(self) -> bool:
        """Whether the format runs the graph by itself, and reads no recorded shapes."""
        return bool(getattr(self.plugin, "RUNS_GRAPH", False))

    @property
    def fixes_sizes(self) -> bool:
        """Whether a file of the format has numbers for all sizes."""
        return bool(getattr(self.plugin, "FIXES_SIZES", False))

    @property
    def has_composites(self) -> bool:
        """Whether the format has forms for attention, channel shuffle and the other composites."""
        return bool(getattr(self.plugin, "HAS_COMPOSITES", False))

    @property
    def writes_float(self) -> bool:
        """Whether the format also writes plain traced modules."""
        return hasattr(self.plugin, "FLOAT_OPTIONS")

    @property
    def options(self) -> tuple[str, ...]:
        """The names of its options."""
        names = inspect.signature(self._writer).parameters
        return tuple(names)[2:] if self._writes_files else tuple(names)[1:]

    @property
    def float_options(self) -> tuple[str, ...]:
        """The names of the options that apply to plain traced modules."""
        return tuple(name for name in self.options if name in getattr(self.plugin, "FLOAT_OPTIONS", ()))

    def write(self, graph: Any, path: Path, options: Mapping[str, Any]) -> dict[Path, bytes]:
        """Returns the contents of the files, by path.

        Args:
            graph: a `ConvertedGraph` or a `PlainGraph`.
            path: the file that the user named.
            options: the options of the format.
        """
        if self._writes_files:
            contents: dict[Path, bytes] = self._writer(graph, path, **options)
            return contents
        return {path: self._writer(graph, **options)}

    @property
    def _writes_files(self) -> bool:
        return hasattr(self.plugin, "files")

    @property
    def _writer(self) -> Any:
        if self._writes_files:
            return self.plugin.files
        return self.plugin if inspect.isfunction(self.plugin) else getattr(self.plugin, "serialize", None)
