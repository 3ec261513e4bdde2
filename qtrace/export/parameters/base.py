"""Kinds of files with quantization parameters by tensor name; each module here defines some in ``KINDS``."""

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
    """A kind of parameter file.

    Attributes:
        title: the name of the kind in messages.
        suffix: the end of the file's name, after the stem of the model's name.
        write: formats the table of sites as text; raises an `ExportError` for a site that it cannot express.
    """

    title: str
    suffix: str
    write: Callable[[Sequence[Row]], str]


def kinds() -> dict[str, ParameterFile]:
    """Returns the kinds by the names that the option ``params`` takes."""
    package = importlib.import_module(__name__.rpartition(".")[0])
    names = sorted(m.name for m in pkgutil.iter_modules(package.__path__) if m.name not in _OTHERS)
    files: dict[str, ParameterFile] = {}
    for name in names:
        files.update(importlib.import_module(f"{package.__name__}.{name}").KINDS)
    return files


def parameter_file(name: str) -> ParameterFile:
    """Returns the kind ``name``.

    Raises:
        ExportError: for an unknown name; the message lists the known ones.
    """
    files = kinds()
    if name not in files:
        raise ExportError(f"unknown kind of parameter file {name!r}; known: {', '.join(files)}.")
    return files[name]


def beside(model: Path, kind: ParameterFile) -> Path:
    """Returns the path of a model's parameter file."""
    return model.with_name(f"{model.stem}{kind.suffix}")


def refuse(row: Row, title: str, reason: str, change: str) -> ExportError:
    """Returns the error for a site that a kind of file cannot express.

    Args:
        row: the site.
        title: the title of the kind of file.
        reason: the limit of that kind, as a verb phrase.
        change: the change to make, as an imperative.
    """
    return ExportError(f"site {row.site} is {row.describe()}, but {title} {reason}: {change}.")


def refuse_floating(row: Row, title: str) -> None:
    """Refuses a tensor that some ops read rounded and others in float: an entry would apply to all.

    Raises:
        ExportError: naming the site and the op that reads it in float.
    """
    if row.floating:
        change = f"quantize {row.floating} as well, or export format onnx"
        raise refuse(
            row, title, f"rounds {row.tensor} for {row.floating} too, which reads it in float", change
        )
