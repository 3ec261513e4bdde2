"""Runners, one a runtime: each loads a file with all optimizations, and runs it on the same inputs.

A runner is an entry point in the group ``qtrace.runners``, called as its runtime. Files take turns in rounds;
a measurement says on which machine it was made.
"""

from __future__ import annotations

import datetime
import importlib
import importlib.util
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol, runtime_checkable

import numpy as np

from qtrace.costs import Machine, processor_facts, processor_flags
from qtrace.errors import ExportError, install
from qtrace.plugins import ObjectPlugins
from qtrace.runtimes.host import RuntimeHost


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


_RUNNERS = ObjectPlugins("qtrace.runners", Load, ExportError)
known = _RUNNERS.known


def can_time(path: Path) -> bool:
    """Returns whether a runtime here runs files like ``path``."""
    return any(path.suffix.lower() in _RUNNERS.get(name).suffixes for name in known())


def open_file(path: Path, runtime: str | None = None, settings: RunnerSettings | None = None) -> Runner:
    """Loads a file in its runtime.

    Args:
        path: the file.
        runtime: the name of the runtime; None for the first one that runs such files.
        settings: threads and shapes.

    Raises:
        ExportError: when the file is missing, no runtime runs it, or the runtime is not installed.
    """
    if runtime is not None and runtime not in known():
        raise ExportError(f"files cannot be timed in {runtime!r}; known: {', '.join(known())}.")
    loads = {name: _RUNNERS.get(name) for name in ([runtime] if runtime else known())}
    fitting = [load for load in loads.values() if path.suffix.lower() in load.suffixes]
    if not fitting:
        subject = f"{runtime} does not run" if runtime else "no runtime here runs"
        raise ExportError(f"{subject} files like {path.name}; known: {_describe(loads)}.")
    if not path.is_file():
        raise ExportError(f"{path} does not exist: export the module first.")
    load = sorted(fitting, key=lambda each: not each.default)[0]
    settings = settings or RunnerSettings()
    if settings.host is None and importlib.util.find_spec(load.package) is None:
        raise ExportError(
            f"to time {path.name} in {load.name}, the package {load.package} is needed: "
            f"run {install(load.extra)}."
        )
    return load.open(path, settings)


def _describe(loads: Mapping[str, Load]) -> str:
    return ", ".join(f"{load.name} ({' '.join(load.suffixes)})" for load in loads.values())


_LEAST_ROUNDS, _MOST_ROUNDS = 9, 2000


@dataclass(frozen=True)
class Latency:
    """The times of one file.

    Attributes:
        minimum: the seconds of the fastest run.
        median: the median.
        low: the 10th percentile.
        high: the 90th percentile.
        runs: the number of runs.
        throughput: the samples of a second, by the median.
        ratio: how many times as fast as the first file it is: the median of the ratios of single rounds.
    """

    minimum: float
    median: float
    low: float
    high: float
    runs: int
    throughput: float
    ratio: float

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields, for JSON."""
        return dict(vars(self))


def rotate_order(count: int, number: int) -> list[int]:
    """Returns the order in which files run in a turn, which lets none run twice in a row.

    A file that does is faster, probably as caches have its data: ResNet-18 at 96x96 took 2.9 ms after another
    file, and 1.4 ms after five runs of its own. Each turn begins with the next file, so that a machine that
    slows down steadily favours none. Of two files one would then run twice in a row: their order stays.

    Args:
        count: the number of files.
        number: the number of the turn.
    """
    start = number % count if count > 2 else 0
    return [*range(start, count), *range(start)]


def run_interleaved(
    runners: Sequence[Runner], seconds: float, tick: Callable[[], None] = lambda: None
) -> list[Latency]:
    """Runs all files in turns and returns the latency of each.

    The order comes from `rotate_order`.

    Args:
        runners: the files, the first of which is the reference of the ratios.
        seconds: how long to measure; at least 9 rounds are made.
        tick: called after each round.
    """
    for runner in runners:
        runner.run()  # allocates
    times: list[list[float]] = [[] for _ in runners]
    end = time.perf_counter() + seconds
    for number in range(_MOST_ROUNDS):
        for index in rotate_order(len(runners), number):
            times[index].append(runners[index].run())
        tick()
        if number + 1 >= _LEAST_ROUNDS and time.perf_counter() > end:
            break
    return [_summarize(own, times[0], runner.samples) for own, runner in zip(times, runners, strict=True)]


def _summarize(own: Sequence[float], first: Sequence[float], samples: int) -> Latency:
    median = statistics.median(own)
    low, high = np.percentile(own, [10, 90])
    ratio = statistics.median(f / o for f, o in zip(first, own, strict=True))
    return Latency(min(own), median, float(low), float(high), len(own), samples / median, ratio)


def file_size(path: Path) -> int:
    """Returns the bytes of a model file and of the files of weights that stand next to it."""
    beside = (
        path.with_suffix(".bin") if path.suffix.lower() == ".param" else path.with_name(f"{path.name}.data")
    )
    return sum(os.path.getsize(file) for file in (path, beside) if file.is_file())


def describe_machine(runtime: str, package: str, threads: int) -> Machine:
    """Returns the facts for a table measured now on this machine.

    Args:
        runtime: the name of the runtime.
        package: the distribution that usually holds it; another one may, as onnxruntime-gpu does.
        threads: the number of threads.

    Raises:
        ExportError: when the runtime is not installed.
    """
    return Machine(
        runtime=runtime,
        version=_version(package),
        processor=processor_facts().get("model name") or platform.machine(),
        flags=processor_flags(),
        threads=threads,
        date=datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
    )


def _version(package: str) -> str:
    """Returns the version of a package's module, whatever distribution it has come with."""
    try:
        own = str(getattr(importlib.import_module(package.replace("-", "_")), "__version__", ""))
    except ImportError as error:
        raise ExportError(f"{package} cannot be imported ({error}): install it.") from error
    try:
        released = version(package)
    except PackageNotFoundError:
        return own or "unknown"
    return released if own.startswith(released) or not own else own  # OpenVINO's own one has a build, too


def differences(table: Machine, machine: Machine) -> list[str]:
    """Says in what the machine of a cost table differs from another one."""
    pairs = [
        ("processor", table.processor, machine.processor),
        ("version", f"{table.runtime} {table.version}", f"{machine.runtime} {machine.version}"),
        ("threads", table.threads, machine.threads),
    ]
    return [f"{name} {measured}, here {own}" for name, measured, own in pairs if measured != own]


def peak_memory(path: Path, runtime: str | None, settings: RunnerSettings) -> int | None:
    """Returns the bytes that loading and one run add to a process at most; None if it ends too early."""
    host = settings.host or RuntimeHost(python=sys.executable)  # its process holds only the file
    try:
        return open_file(path, runtime, replace(settings, host=host)).memory() or None
    except ExportError:
        return None
