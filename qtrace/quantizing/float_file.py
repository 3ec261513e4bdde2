"""The float file of a network, beside which its quantized file is timed and judged; written once."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from types import TracebackType

from qtrace.config import QConfig
from qtrace.config.rule import Rule
from qtrace.export import export
from qtrace.graph.types import TracedModule
from qtrace.preparation.passes.convert import convert
from qtrace.preparation.prepare import prepare

__all__ = ["FloatFile"]


class FloatFile:
    """A network as a file with every op in float, in a folder of its own that is deleted at the end.

    Args:
        traced: the float network.
        config: the config, whose backend the file is for.
        suffix: that of the quantized file.
    """

    def __init__(self, traced: TracedModule, config: QConfig, suffix: str) -> None:
        self.traced, self.config, self.suffix = traced, config, suffix
        self._folder = tempfile.TemporaryDirectory(prefix="qtrace-float-")

    def __enter__(self) -> FloatFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._folder.cleanup()

    @functools.cached_property
    def prepared(self) -> TracedModule:
        """The graph of the file, before `convert`."""
        rule = Rule.model_validate({"match": {"name": "*"}, "quantize": False})
        plain = self.config.without_placement()
        rules = (*plain.rules, rule.with_origin("the measured speed"))
        changes = {"rules": rules, "ptq": None, "placement": "everything", "float": None}
        return prepare(self.traced, plain.model_copy(update=changes))

    @functools.cached_property
    def converted(self) -> TracedModule:
        """The graph of the file."""
        return convert(self.prepared)

    @functools.cached_property
    def path(self) -> Path:
        """The file.

        Raises:
            ExportError: when the graph has no such form.
        """
        path = Path(self._folder.name) / f"float{self.suffix}"
        export(self.converted, path)
        return path
