"""Kinds of files that hold quantization parameters by tensor name: one a file, with its ``KINDS``."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from qtrace.errors import ExportError
from qtrace.export.parameters.sites import Row

__all__ = ["ParameterFile", "beside", "kinds", "parameter_file", "refuse", "refuse_floating"]


_OTHERS = ("base", "sites")


@dataclass(frozen=True)
class ParameterFile:
    """A kind of file.

    Attributes:
        title: what users call it.
        suffix: what stands behind the stem of the model's name.
        write: the table of sites as text; an `ExportError` for what it cannot say.
    """

    title: str
    suffix: str
    write: Callable[[Sequence[Row]], str]


def kinds() -> dict[str, ParameterFile]:
    """The kinds by the names that the option ``params`` takes."""
    package = importlib.import_module(__name__.rpartition(".")[0])
    names = sorted(m.name for m in pkgutil.iter_modules(package.__path__) if m.name not in _OTHERS)
    found: dict[str, ParameterFile] = {}
    for name in names:
        found.update(importlib.import_module(f"{package.__name__}.{name}").KINDS)
    return found


def parameter_file(name: str) -> ParameterFile:
    """The kind called ``name``.

    Raises:
        ExportError: when there is none, listing those there are.
    """
    found = kinds()
    if name not in found:
        raise ExportError(f"unknown kind of parameter file {name!r}; known: {', '.join(found)}.")
    return found[name]


def beside(model: Path, kind: ParameterFile) -> Path:
    """Where the parameter file of a model stands."""
    return model.with_name(f"{model.stem}{kind.suffix}")


def refuse(row: Row, title: str, reason: str, change: str) -> ExportError:
    """The error for a site that a kind of file cannot express.

    Args:
        row: the site.
        title: the kind of file.
        reason: what it cannot say.
        change: what to do.
    """
    return ExportError(f"site {row.site} is {row.describe()}, but {title} {reason}: {change}.")


def refuse_floating(row: Row, title: str) -> None:
    """Refuses a tensor that some ops read rounded and others as it is: an entry by its name holds for all.

    Raises:
        ExportError: naming both.
    """
    if row.floating:
        change = f"quantize {row.floating} as well, or export format onnx"
        raise refuse(
            row, title, f"rounds {row.tensor} for {row.floating} too, which reads it in float", change
        )
