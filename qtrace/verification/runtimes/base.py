"""The interface of a runtime: it runs an exported file and returns every integer tensor in it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from qtrace.errors import ExportError

__all__ = ["Kernels", "Runtime", "RuntimeRun", "Session", "check_size"]

# The lengths and offsets of protobuf and FlatBuffers files have 31 bits.
_MAX_BYTES = 2**31


def check_size(path: Path, kind: str) -> None:
    """Refuses a protobuf or FlatBuffers file that is missing or larger than such a file can be.

    Args:
        path: the file, which is not read.
        kind: the kind of file, for the message: ``ONNX``.

    Raises:
        ExportError: when the file is missing or too large.
    """
    if not path.is_file():
        raise ExportError(f"{path} does not exist: export the module first.")
    size = path.stat().st_size
    if size >= _MAX_BYTES:
        raise ExportError(
            f"{path} has {size / 2**30:.1f} GiB, and an {kind} file less than {_MAX_BYTES >> 30} GiB: it is "
            "damaged or of another kind; export the module again."
        )


@dataclass(frozen=True)
class RuntimeRun:
    """The values that a runtime computed for one batch.

    Attributes:
        outputs: the model's outputs, in the order and layout of the graph's; None for one that a device has
            not dumped.
        integers: name of a site, or of a node that carries integers -> its integers, in the graph's layout.
    """

    outputs: list[np.ndarray]
    integers: dict[str, np.ndarray]


@dataclass(frozen=True)
class Kernels:
    """How a runtime computes the quantized ops of a file.

    Attributes:
        integer: names of the results that integer kernels compute.
        floats: result, op and reason for those that run in float between rounded tensors.
        saturates: whether products of the file's types saturate on this processor.
    """

    integer: tuple[str, ...]
    floats: tuple[tuple[str, str, str], ...]
    saturates: bool = False

    def describe(self) -> list[str]:
        """Says in lines how many ops run on integers, and what keeps the others in float."""
        count = len(self.integer) + len(self.floats)
        rest = "; the others compute in float, with the same values" if self.floats else ""
        lines = [f"integer kernels: {len(self.integer)} of {count} ops of the file that read integers{rest}"]
        groups: dict[tuple[str, str], list[str]] = {}
        for name, op, why in self.floats:
            groups.setdefault((op, why), []).append(name)
        for (op, why), names in groups.items():
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            lines.append(f"  in float: {op} {', '.join(names[:3])}{more}: {why}")
        return lines


class Session(Protocol):
    """A loaded file.

    With an attribute ``partial`` that is true, sites may be missing; with an attribute ``first_of_equals``
    that is false, equal scores are ranked in the order of MegEngine's kernels. An attribute ``inexact`` names
    the sites whose kernels do not round ties as the graph does.
    """

    @property
    def integer_names(self) -> Sequence[str]:
        """The sites and nodes whose integers `run` gives."""

    def run(self, inputs: list[np.ndarray]) -> RuntimeRun:
        """Runs the model.

        Args:
            inputs: one float32 array for each input of the graph, in order and in its layout.

        Raises:
            ExportError: when the inputs do not fit the model.
        """


@dataclass(frozen=True)
class Runtime:
    """A runtime, and the files that it runs.

    Attributes:
        name: the name that users give to ``verify``.
        package: the Python package of the runtime.
        extra: the extra of qtrace that installs the package; "" for a runtime of the user's.
        suffixes: the suffixes of the files that the runtime runs.
        open: loads a file: with every optimization that a user would deploy (True), or so that each op
            computes on its own (False).
        kernels: finds the ops of a file that run on integers; None where the runtime does not show its
            kernels.
        default: whether the runtime is used for its suffixes when the user names none.
        companions: suffixes of the files of weights that stand beside a model file.
        optimizes: whether files can also run with optimizations; dumped tensors are as they are.
    """

    name: str
    package: str
    extra: str
    suffixes: tuple[str, ...]
    open: Callable[[Path, bool], Session]
    kernels: Callable[[Path], Kernels] | None = None
    default: bool = True
    companions: tuple[str, ...] = ()
    optimizes: bool = True
