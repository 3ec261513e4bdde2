"""The interface of a runner."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol, runtime_checkable

import numpy as np

from qtrace.errors import ExportError
from qtrace.runtimes.host import RuntimeHost

__all__ = ["Load", "ProfiledRunner", "Runner", "RunnerSettings", "fixed_shape", "random_values"]


@dataclass(frozen=True)
class RunnerSettings:
    """How a file is run.

    Attributes:
        threads: the number of threads.
        batch: the size of the first axis of inputs that leave it open.
        shapes: input -> shape, for inputs that leave other sizes open.
        host: the interpreter or machine that has the runtime; None for this one.
    """

    threads: int = 1
    batch: int = 1
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=lambda: MappingProxyType({}))
    host: RuntimeHost | None = None


class Runner(Protocol):
    """A loaded file with inputs."""

    @property
    def in_thread(self) -> bool:
        """Whether a run computes only in the calling thread, whose processor time is then its time."""

    @property
    def samples(self) -> int:
        """The number of samples of a run."""

    @property
    def side(self) -> Mapping[str, Any]:
        """Versions and machine of a runtime on another host; empty for one in this interpreter."""

    def run(self) -> float:
        """Runs the file once and returns the seconds that it took."""

    def memory(self) -> int | None:
        """Returns the bytes that the file added to its own process at most; None if it runs in this one."""


@runtime_checkable
class ProfiledRunner(Runner, Protocol):
    """A runner of ONNX files whose runtime has a profile.

    Attributes:
        shapes: input -> its shape in a run.
    """

    shapes: Mapping[str, tuple[int, ...]]

    def profile(self, runs: int) -> Any:
        """Runs the file some times, and returns the events of the runtime's own profile."""


@dataclass(frozen=True)
class Load:
    """A runtime that files are timed in.

    Attributes:
        name: the name of the runtime.
        package: its Python package.
        extra: the extra of qtrace that installs the package.
        suffixes: the suffixes of its files.
        open: loads a file.
        default: whether the runtime is used for its suffixes when the user names none.
    """

    name: str
    package: str
    extra: str
    suffixes: tuple[str, ...]
    open: Callable[[Path, RunnerSettings], Runner]
    default: bool = True


def fixed_shape(name: str, sizes: Sequence[object], settings: RunnerSettings) -> tuple[int, ...]:
    """Returns the shape of an input whose open sizes the settings fill.

    Args:
        name: the input.
        sizes: its sizes in the file; what is no positive number is open.
        settings: the batch size for an open first axis, and the shapes that the user gives.

    Raises:
        ExportError: when a shape contradicts the file, or an axis stays open.
    """
    override = settings.shapes.get(name)
    shown = "x".join(str(size) if _is_size(size) else "?" for size in sizes)
    if override is not None:
        pairs = zip(sizes, override, strict=False)
        if len(override) != len(sizes) or any(_is_size(own) and own != size for own, size in pairs):
            raise ExportError(f"input {name!r} is {shown} in the file, not {'x'.join(map(str, override))}.")
        return override
    first = sizes[0] if sizes else 1
    if settings.batch != 1 and _is_size(first) and first != settings.batch:
        raise ExportError(f"input {name!r} has a fixed batch of {first}: it cannot be {settings.batch}.")
    shape = [first if _is_size(first) else settings.batch, *sizes[1:]] if sizes else []
    if not all(_is_size(size) for size in shape):
        raise ExportError(f"input {name!r} is {shown}: give its shape, as in --shape {name}=1x3x224x224.")
    return tuple(int(str(size)) for size in shape)


def random_values(shape: Sequence[int], kind: np.dtype) -> np.ndarray:
    """Returns the same random values each time: normal floats, small integers."""
    random = np.random.default_rng(0)
    if kind.kind == "f":
        return random.normal(size=tuple(shape)).astype(kind)
    return random.integers(0, 2, tuple(shape)).astype(kind)


def _is_size(size: object) -> bool:
    return isinstance(size, int) and size > 0
