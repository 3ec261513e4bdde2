"""Files with quantization parameters by tensor name: each kind is an entry point in ``qtrace.parameters``.

The name of the entry point is what the option ``params`` takes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from qtrace.errors import ExportError
from qtrace.export.parameters.sites import Row
from qtrace.plugins import ObjectPlugins

__all__ = ["ParameterFile", "beside", "parameter_file", "refuse", "refuse_floating"]


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


parameter_file = ObjectPlugins("qtrace.parameters", ParameterFile, ExportError).get


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
