"""The interface of a runtime: it runs an exported file and returns every integer tensor in it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from qtrace.data.batches import MOST_VALUES
from qtrace.errors import ExportError
from qtrace.onnxfile.kernels import Kernels
from qtrace.process import Together, count_threads
from qtrace.runtimes.host import RuntimeHost


@dataclass(frozen=True)
class RuntimeRun:
    """The values that a runtime computed for one batch.

    Attributes:
        outputs: the model's outputs, in the order and layout of the graph's; None for one that a device did
            not dump.
        integers: name of a site, or of a node that carries integers -> its integers, in the graph's layout.
        places: what each node of the file that selects has picked for these outputs; () if that is not known.
    """

    outputs: list[np.ndarray]
    integers: dict[str, np.ndarray]
    places: Sequence[np.ndarray] = ()


class Session(Protocol):
    """A loaded file.

    With an attribute ``partial`` that is true, sites may be missing. With an attribute ``first_of_equals``
    that is false, equal scores are ranked in the order of MegEngine's kernels. An attribute ``inexact`` names
    the sites whose kernels do not round ties as the graph does, ``side`` what ran where on another host,
    ``place_kinds`` the ops of the nodes that select. ``remark`` says what a client has to do so that it
    computes the same. A method ``run_outputs`` runs the model only for its outputs.
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


def run_outputs(session: Session, inputs: list[np.ndarray]) -> list[np.ndarray]:
    """Runs a loaded file only for its outputs, without its integers where the runtime gives these apart.

    Args:
        session: the file.
        inputs: as for `Session.run`.

    Raises:
        ExportError: when the inputs do not fit the model.
    """
    run = getattr(session, "run_outputs", None)
    outputs: list[np.ndarray] = session.run(inputs).outputs if run is None else run(inputs)
    return outputs


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
        find_fixed_batch: finds the only batch that a file takes; None where its files take any, or single
            samples.
        default: whether the runtime is used for its suffixes when the user names none.
        companions: suffixes of the files of weights that stand next to a model file.
        optimizes: whether files can also run with optimizations; dumped tensors are as they are.
        hosted: gives the runtime in another interpreter or on another machine; None where it runs here only.
        host: where the runtime runs; None for here.
    """

    name: str
    package: str
    extra: str
    suffixes: tuple[str, ...]
    open: Callable[[Path, bool], Session]
    kernels: Callable[[Path], Kernels] | None = None
    find_fixed_batch: Callable[[Path], int | None] | None = None
    default: bool = True
    companions: tuple[str, ...] = ()
    optimizes: bool = True
    hosted: Callable[[RuntimeHost], Runtime] | None = None
    host: RuntimeHost | None = None

    def at(self, host: RuntimeHost | None) -> Runtime:
        """Returns the runtime in another interpreter or on another machine; itself for None.

        Raises:
            ExportError: when it runs in this process only.
        """
        if host is None:
            return self
        if self.hosted is None:
            raise ExportError(
                f"{self.name} runs in this process only: leave out the interpreter or command, {host}."
            )
        return self.hosted(host)


class Prefetcher:
    """Runs batches in sessions before their values are asked for, while MegEngine computes the graph.

    MegEngine computes on one thread, and a session of onnxruntime keeps no lock of Python while it runs, so
    both together take the time of the longer one.

    Args:
        sessions: the sessions. Those with an attribute ``concurrent`` that is true run small batches on
            threads. The others, which may compute by MegEngine, run when their values are asked for.
        together: the threads; see `threads_for`.
    """

    def __init__(self, sessions: Sequence[Session], together: Together) -> None:
        self._sessions, self._together = sessions, together

    def begin(self, inputs: list[np.ndarray]) -> list[Callable[[], RuntimeRun]]:
        """Begins to run a batch; returns what gives the run of each session, or raises its error."""
        small = sum(x.size for x in inputs) <= MOST_VALUES
        runs = [functools.partial(session.run, inputs) for session in self._sessions]
        return [
            self._together.begin(run) if small and _is_concurrent(session) else run
            for session, run in zip(self._sessions, runs, strict=True)
        ]


def threads_for(sessions: Sequence[Session]) -> int:
    """Returns the number of threads on which sessions run next to the graph, the graph's thread included."""
    count = sum(map(_is_concurrent, sessions))
    return 1 + min(count, max(1, count_threads(None) - 1))


def _is_concurrent(session: Session) -> bool:
    return bool(getattr(session, "concurrent", False))
