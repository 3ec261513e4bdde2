"""What a runtime is: something that runs an exported file and gives every integer tensor in it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from qtrace.errors import ExportError

__all__ = ["Kernels", "Run", "Runtime", "Session", "check_size"]

# What the lengths and offsets of protobuf and FlatBuffers files can express.
_MAX_BYTES = 2**31


def check_size(path: Path, kind: str) -> None:
    """Refuses a protobuf or FlatBuffers file that is missing or larger than such a file can be.

    Args:
        path: the file, which is not read.
        kind: the kind of file, for the message: ``ONNX``.

    Raises:
        ExportError: saying why.
    """
    if not path.is_file():
        raise ExportError(f"{path} does not exist: export the module first.")
    size = path.stat().st_size
    if size >= _MAX_BYTES:
        raise ExportError(
            f"{path} has {size / 2**30:.1f} GiB, and an {kind} file less than {_MAX_BYTES >> 30} GiB: it is "
            "damaged, or something else; export the module again."
        )


@dataclass(frozen=True)
class Run:
    """What one run gave.

    Attributes:
        outputs: the model's outputs, in the order and layout of the graph's.
        integers: the integers of every site, and of nodes that carry integers, by the name of the site or
            node, in the layout of the graph.
    """

    outputs: list[np.ndarray]
    integers: dict[str, np.ndarray]


@dataclass(frozen=True)
class Kernels:
    """How a runtime computes the quantized ops of a file.

    Attributes:
        integer: names of the results that integer kernels compute.
        floats: result, op and reason for those that run in float between rounded tensors.
    """

    integer: tuple[str, ...]
    floats: tuple[tuple[str, str, str], ...]


class Session(Protocol):
    """A file that was loaded."""

    @property
    def integer_names(self) -> Sequence[str]:
        """The sites and nodes whose integers `run` gives."""

    def run(self, inputs: list[np.ndarray]) -> Run:
        """Runs the model.

        Args:
            inputs: one float32 array for each input of the graph, in order and in its layout.

        Raises:
            ExportError: when they do not fit.
        """


@dataclass(frozen=True)
class Runtime:
    """A runtime.

    Attributes:
        name: what users call it.
        package: the Python package that it needs.
        extra: the extra of qtrace that installs it.
        suffixes: of the files that it runs.
        open: loads a file: with every optimization that a user would deploy (True), or so that each op
            computes on its own (False).
        kernels: tells which ops of a file run on integers; None where the runtime does not let us see.
        default: whether it is the one for its suffixes unless another is named.
        companions: suffixes of the files that stand beside one that it runs, with the weights.
    """

    name: str
    package: str
    extra: str
    suffixes: tuple[str, ...]
    open: Callable[[Path, bool], Session]
    kernels: Callable[[Path], Kernels] | None = None
    default: bool = True
    companions: tuple[str, ...] = ()
